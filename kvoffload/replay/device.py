"""The prefix cache of the accelerator itself, which is looked up before the manager."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from .groups import ChunkIndex, GroupChunks
from .requests import DecodedTrace

__all__ = ["DeviceCache", "device_hits", "device_hits_and_junctions"]


class DeviceCache:
    """An LRU cache of slots that serves the leading blocks of each request.

    Every request leaves in it the chunks that the engine keeps, computed or loaded: every chunk of
    full and chunked groups, and of others the chunks before its resume points. The first is the
    most recent; of a request larger than the cache the first ones stay. Chunks stand for the blocks
    of the engine.

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
        self._cached: OrderedDict[Hashable, None] = OrderedDict()

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
        if not self.num_slots:
            return 0, 0
        if self._groups.is_plain:
            hits = 0
            for block in blocks:
                if block not in self._cached:
                    break
                hits += 1
            self._insert(blocks)
            return hits, 0
        groups = self._groups
        strides = [tokens // groups.block_tokens for tokens in groups.chunk_tokens]

        def key(index: ChunkIndex) -> Hashable:
            return index.group, blocks[(index.chunk + 1) * strides[index.group] - 1]

        length = groups.length_of(input_length, len(blocks))
        local, junction = groups.local(length, lambda index: key(index) in self._cached)
        self._insert([key(index) for index in groups.left_on_device(length, junction)])
        return local // groups.block_tokens, junction // groups.block_tokens

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
    if num_slots:
        asked = map(DeviceCache(num_slots, groups).ask, trace.rows(), trace.lengths.tolist())
        for index, pair in enumerate(asked):
            found[:, index] = pair
    return found[0], found[1]
