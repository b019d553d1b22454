"""LFU with dynamic aging, LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich & Jin, 1999).

Structure
    Each block has a count of accesses F, 1 ... 15, and a priority K. The cache has an age L, 0 at
    first. No K is less than L or more than L + 15, so sixteen ordered dicts hold the blocks, least
    recent first: dict number K mod 16 holds those of priority K.
How it works
    K is set to L + F whenever a block is inserted (F = 1) or touched. The victim is the least
    recent block of the least K, and L becomes its K: a formerly popular block stays until L has
    caught up with it.
One request, one access
    The end of a request sets K of its blocks again and leaves F unchanged: it does not count as a
    use. Neither does the touch of a pending block, which has not been seen again.
Differs from the paper
    F stops at 15, so formerly popular blocks leave within 15 steps of age. A batch of victims ages
    the cache once, to the last one's K. Pinned, pending and protected blocks are skipped and keep
    their place, and L stops at their least K until they have left or were touched.
Order in a chain
    A block's prefix is touched whenever the block is, so it has no smaller F, was given its K at no
    smaller L, and with the same K it is the more recent: a chain leaves tail first.
Invariants
    Every block is in the ring of its K, L <= K <= L + 15; ``_resident`` is the union of the rings.
Cost
    insert, remove, get O(1); touch O(n); evict O(n + blocks skipped).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockHash, BlockStatus, Hints

from ._twin_py import PythonPolicy, Victims, evictable, require

MOST_COUNTED = 15
NUM_RINGS = MOST_COUNTED + 1


class LFUCachePolicy(PythonPolicy):
    """A policy that evicts the least frequently used block; old counts fade as the cache ages.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for. Kept only for reading.

    References
    ----------
    Arlitt, Cherkasova, Dilley, Friedrich & Jin, "Evaluating Content Management Techniques for Web
    Proxy Caches", Workshop on Internet Server Performance, 1999.
    """

    __slots__ = ("_age", "_counts", "_priorities", "_rings")

    def __init__(self, cache_capacity: int) -> None:
        capacity = check_cache_capacity(cache_capacity)
        self._require_free("__init__")
        self._age = 0
        self._counts: dict[BlockHash, int] = {}
        self._priorities: dict[BlockHash, int] = {}
        self._rings: list[OrderedDict[BlockHash, BlockStatus]] = [
            OrderedDict() for _ in range(NUM_RINGS)
        ]
        super().__init__(capacity)

    @property
    def age(self) -> int:
        """The least priority that a block can have."""
        return self._age

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            self._resident[block_hash] = status
            self._counts[block_hash] = 1
            self._place(block_hash)

    def _place(self, block_hash: BlockHash) -> None:
        """Put a resident block that is in no ring at the most recent end of the ring of its K."""
        priority = self._age + self._counts[block_hash]
        self._priorities[block_hash] = priority
        self._rings[priority % NUM_RINGS][block_hash] = self._resident[block_hash]

    def _take_out(self, block_hash: BlockHash) -> None:
        """Take a block out of its ring."""
        del self._rings[self._priorities.pop(block_hash) % NUM_RINGS][block_hash]

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            self._take_out(block_hash)
            del self._counts[block_hash]
            self._drop(block_hash)

    def _touch(self, batch: list[BlockHash]) -> None:
        self._use(batch, counts=True)

    def _finished(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        del hints, now
        self._use(batch, counts=False)

    def _use(self, batch: list[BlockHash], *, counts: bool) -> None:
        """Set K of resident blocks, last hash first, with a higher F if the use counts."""
        for block_hash in reversed(batch):
            status = self._resident.get(block_hash)
            if status is not None:
                if counts and status.ref_cnt >= 0:
                    self._counts[block_hash] = min(self._counts[block_hash] + 1, MOST_COUNTED)
                self._take_out(block_hash)
                self._place(block_hash)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        released = self._choose_released(n, protected)
        # Least K first, then least recent first.
        rings = (evictable(ring, protected, released) for ring in self._rings_by_priority())
        sparse = dict(islice(chain.from_iterable(rings), n - len(released)))
        victims = released | sparse
        if len(victims) < n:
            return None
        # Only blocks that leave in their turn age the cache.
        last_priority = self._priorities[next(reversed(sparse))] if sparse else self._age
        if victims:
            self._remove(victims)
            while self._age < last_priority and not self._rings[self._age % NUM_RINGS]:
                self._age += 1
        return list(victims.items())

    def _rings_by_priority(self) -> Iterator[OrderedDict[BlockHash, BlockStatus]]:
        for priority in range(self._age, self._age + NUM_RINGS):
            yield self._rings[priority % NUM_RINGS]

    def _clear(self) -> None:
        super()._clear()
        self._age = 0
        self._counts.clear()
        self._priorities.clear()
        for ring in self._rings:
            ring.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        for ring in self._rings_by_priority():
            yield from ring.values()

    def _check(self) -> None:
        super()._check()
        for index, ring in enumerate(self._rings):
            for block_hash, status in ring.items():
                require(self._resident.get(block_hash) is status, "rings hold live statuses")
                priority = self._priorities[block_hash]
                require(priority % NUM_RINGS == index, "a block is in the ring of its K")
                require(0 <= priority - self._age <= MOST_COUNTED, "K is L ... L + 15")
                require(1 <= self._counts[block_hash] <= MOST_COUNTED, "F is 1 ... 15")
        num_in_rings = sum(map(len, self._rings))
        require(num_in_rings == len(self._resident), "resident is the union of the rings")
        require(len(self._counts) == num_in_rings, "every block has one count")
        require(len(self._priorities) == num_in_rings, "every block has one priority")
