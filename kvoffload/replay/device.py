"""The prefix cache of the accelerator itself, which is looked up before the manager."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .groups import ChunkIndex, GroupChunks
from .index import DEVICE, Change, Recent
from .requests import Blocks

if TYPE_CHECKING:
    from .rows import Rows

_Key = tuple[int, int]
"""A chunk: its group, and the number of its last block."""


class Found(NamedTuple):
    """Blocks of each request in the accelerator's own cache, (requests,) int64."""

    hits: npt.NDArray[np.int64]  # leading blocks
    junctions: npt.NDArray[np.int64]  # those that full groups have if others have fewer, else 0


class DeviceCache:
    """An LRU cache of blocks; every request leaves all of its blocks, computed or loaded.

    The first block of a request is the most recent; of a request larger than the cache the first
    ones stay.
    """

    def __init__(self, rows: Rows, slots: int) -> None:
        self._cached = Recent(rows.unique_blocks, slots) if slots else None
        self.changes: list[Change] = []  # by the last request

    def find(self, blocks: Blocks, input_length: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of leading blocks present, and 0; insert the request."""
        if self._cached is None:
            return 0, 0
        hits, entered, left = self._cached.use(blocks.data)
        self.changes = [Change(DEVICE, entered, left)]
        return hits, 0

    def leave(
        self,
        blocks: Blocks,
        input_length: int,
        hits: int,
        junction: int,
        hit_tokens: int = 0,
    ) -> None:
        """Insert nothing: `find` has done so."""


class ChunkCache:
    """The same of a model with several groups, in slots that hold a chunk of any of them.

    Every request leaves in it the chunks that the engine keeps, computed or loaded: every chunk of
    full and chunked groups, and of others the chunks before its resume points, except those inside
    a prefix that was loaded. Chunks stand for the blocks of the engine.

    Parameters
    ----------
    slots : int
        Its capacity, >= 1.
    groups : GroupChunks
        The KV groups of the model.
    """

    changes: Sequence[Change] = ()

    def __init__(self, slots: int, groups: GroupChunks) -> None:
        self._slots = slots
        self._groups = groups
        # The key of each copy of a chunk, and by key the copies, oldest first.
        self._key_of: OrderedDict[int, _Key] = OrderedDict()
        self._copies: dict[_Key, list[int]] = {}
        self._numbers = itertools.count()

    def find(self, blocks: Blocks, input_length: int = 0) -> tuple[int, int]:
        """Return the number of leading blocks present, and the junction.

        The junction is the number that full groups have if others have fewer, else 0. `blocks` are
        those of the prompt in the trace, and `input_length` its tokens, 0 if unknown.
        """
        groups = self._groups
        length = groups.length_of(input_length, len(blocks))
        local, junction = groups.local(
            length, lambda index: self._key(blocks, index) in self._copies
        )
        return local // groups.block_tokens, junction // groups.block_tokens

    def leave(
        self,
        blocks: Blocks,
        input_length: int,
        hits: int,
        junction: int,
        hit_tokens: int = 0,
    ) -> None:
        """Insert a request.

        Parameters
        ----------
        blocks, input_length
            As in `find`.
        hits, junction : int
            What `find` returned of it.
        hit_tokens : int
            Tokens that were loaded behind the hits. Of a window the request then has only what is
            before their end.
        """
        groups = self._groups
        size = groups.block_tokens
        length, local = groups.length_of(input_length, len(blocks)), hits * size
        kept = local + hit_tokens if hit_tokens else 0
        # What it resumes from is used again, and given back while the rest is computed. The rest
        # is new: of a chunk that another request has left, a second copy.
        resumed = groups.kept_on_device(groups.loaded(0, local), kept)
        left = groups.kept_on_device(groups.left_on_device(length, junction * size), kept)
        self._leave([self._key(blocks, index) for index in resumed], is_new=False)
        new = set(left).difference(resumed)
        for is_new, indexes in itertools.groupby(reversed(left), new.__contains__):
            self._leave([self._key(blocks, index) for index in indexes][::-1], is_new=is_new)

    def _key(self, blocks: Blocks, index: ChunkIndex) -> _Key:
        stride = self._groups.chunk_tokens[index.group] // self._groups.block_tokens
        return index.group, blocks.item((index.chunk + 1) * stride - 1)

    def _leave(self, keys: Sequence[_Key], *, is_new: bool) -> None:
        """Make chunks the most recent, the first last: copies of their own, or those in use."""
        copies, key_of = self._copies, self._key_of
        for key in reversed(keys):
            if is_new or key not in copies:
                copy = next(self._numbers)
                copies.setdefault(key, []).append(copy)
            else:
                copy = copies[key][0]
            key_of[copy] = key
            key_of.move_to_end(copy)
        while len(key_of) > self._slots:
            copy, key = key_of.popitem(last=False)
            copies[key].remove(copy)
            if not copies[key]:
                del copies[key]


def new_device(rows: Rows, slots: int) -> DeviceCache | ChunkCache:
    """Return the empty cache of an accelerator; with 0 slots there is none."""
    if rows.groups.is_plain or not slots:
        return DeviceCache(rows, slots)
    return ChunkCache(slots, rows.groups)


def device_hits(rows: Rows, slots: int) -> Found:
    """Return what the accelerator's own cache has of each row.

    With several groups, as if no host memory were behind it: of a window it then keeps more.
    """
    found = np.zeros((2, len(rows)), dtype=np.int64)
    if slots:
        device = new_device(rows, slots)
        for row, length in enumerate(rows.lengths.tolist()):
            blocks = rows.blocks_of(row)
            found[:, row] = hits, junction = device.find(blocks, length)
            device.leave(blocks, length, hits, junction)
    return Found(*found)
