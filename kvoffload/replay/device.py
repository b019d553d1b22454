"""The prefix cache of the accelerator itself, which is looked up before the manager."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from .fleet.index import Recent
from .groups import ChunkIndex, GroupChunks
from .requests import DecodedTrace

__all__ = ["DeviceCache", "device_hits", "device_hits_and_junctions"]


class DeviceCache:
    """An LRU cache of slots that serves the leading blocks of each request.

    Every request leaves in it the chunks that the engine keeps, computed or loaded: every chunk of
    full and chunked groups, and of others the chunks before its resume points, except those inside
    a prefix that was loaded. The first is the most recent; of a request larger than the cache the
    first ones stay. Chunks stand for the blocks of the engine.

    Parameters
    ----------
    num_slots : int
        Its capacity, in blocks of the trace or chunks of any group; 0 for no cache.
    groups : GroupChunks, optional
        The KV groups of the model; one full group by default.
    """

    def __init__(self, num_slots: int, groups: GroupChunks | None = None) -> None:
        self.num_slots = num_slots
        self._groups = groups or GroupChunks.of_blocks()
        self._cached: OrderedDict[Hashable, None] = OrderedDict()  # blocks, with one full group
        # With several groups: the key of each copy of a chunk, and by key the copies, oldest first.
        self._key_of: OrderedDict[int, Hashable] = OrderedDict()
        self._copies: dict[Hashable, list[int]] = {}
        self._numbers = itertools.count()

    def ask(self, blocks: Sequence[Hashable], input_length: int = 0) -> tuple[int, int]:
        """Return the number of leading blocks present, and the junction; insert the request.

        Parameters
        ----------
        blocks : sequence
            The prompt's blocks in the trace, first block first.
        input_length : int
            Tokens of the prompt; 0 if unknown.

        Returns
        -------
        (int, int)
            Blocks; the junction is the number that full groups have if others have fewer, else 0.

        Complexity: O(len(blocks)) with one full group.
        """
        hits, junction = self.find(blocks, input_length)
        self.leave(blocks, input_length, hits, junction)
        return hits, junction

    def find(self, blocks: Sequence[Hashable], input_length: int = 0) -> tuple[int, int]:
        """Return what `ask` does; insert nothing. Arguments are those of `ask`."""
        groups = self._groups
        if not self.num_slots:
            return 0, 0
        if groups.is_plain:
            hits = 0
            for block in blocks:
                if block not in self._cached:
                    break
                hits += 1
            return hits, 0
        length = groups.length_of(input_length, len(blocks))
        local, junction = groups.local(
            length, lambda index: self._key(blocks, index) in self._copies
        )
        return local // groups.block_tokens, junction // groups.block_tokens

    def leave(
        self,
        blocks: Sequence[Hashable],
        input_length: int,
        hits: int,
        junction: int,
        hit_tokens: int = 0,
    ) -> None:
        """Insert a request.

        Parameters
        ----------
        blocks, input_length
            As in `ask`.
        hits, junction : int
            What `find` returned of it.
        hit_tokens : int
            Tokens that were loaded behind the hits. Of a window the request then has only what is
            before their end.
        """
        groups = self._groups
        if not self.num_slots:
            return
        if groups.is_plain:
            self._insert(blocks)
            return
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

    def _key(self, blocks: Sequence[Hashable], index: ChunkIndex) -> Hashable:
        stride = self._groups.chunk_tokens[index.group] // self._groups.block_tokens
        return index.group, blocks[(index.chunk + 1) * stride - 1]

    def _leave(self, keys: Sequence[Hashable], *, is_new: bool) -> None:
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
        while len(key_of) > self.num_slots:
            copy, key = key_of.popitem(last=False)
            copies[key].remove(copy)
            if not copies[key]:
                del copies[key]

    def _insert(self, keys: Sequence[Hashable]) -> None:
        """Make keys the most recent, the first last."""
        cached = self._cached
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self.num_slots:
            cached.popitem(last=False)


def device_hits(
    trace: DecodedTrace, num_slots: int, groups: GroupChunks | None = None
) -> npt.NDArray[np.int64]:
    """Return the leading blocks of each request that a `DeviceCache` of `num_slots` slots has.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    num_slots : int
        Capacity of the accelerator's cache; 0 for none.
    groups : GroupChunks, optional
        The KV groups of the model, as in `DeviceCache`.

    Returns
    -------
    (requests,) int64
    """
    return device_hits_and_junctions(trace, num_slots, groups)[0]


def device_hits_and_junctions(
    trace: DecodedTrace, num_slots: int, groups: GroupChunks | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the results of `DeviceCache.ask` for each request: two arrays of blocks."""
    found = np.zeros((2, trace.num_requests), dtype=np.int64)
    if num_slots and (groups is None or groups.is_plain):
        cached = Recent(num_slots)
        for index, (start, end) in enumerate(itertools.pairwise(trace.starts.tolist())):
            row = trace.blocks[start:end]
            found[0, index], _ = cached.lead_and_missing(row)
            cached.use(row)
    elif num_slots:
        asked = map(DeviceCache(num_slots, groups).ask, trace.rows(), trace.lengths.tolist())
        for index, pair in enumerate(asked):
            found[:, index] = pair
    return found[0], found[1]
