"""W-TinyLFU (Einziger, Friedman & Manes, ACM Transactions on Storage 13(4), 2017).

Structure
    *Window*: new blocks, least recently used first, meant to hold the share `window` of the
    capacity. *Main*: a segmented LRU of *probation* and *protected*, which is at most four fifths
    of main. *Sketch*: estimated counts of accesses, of blocks that are not resident too.
How it works
    `insert` puts a block into the window. While main has room, the window's excess moves to
    probation. Later the window's least recent block competes with main's: the one with more
    accesses by the sketch stays, in probation, and the other leaves. An access in probation
    promotes a block to protected, which demotes its least recent block if it is full.
Sketch
    Count-min with conservative update: four rows of counters to 15, one per row for a block; only
    the least of the four are increased, and the least is the estimate. After ten accesses per block
    of the capacity all counters are halved. At most 2**20 counters per row, 4 MiB in all. The
    indexes come from BLAKE2b under a key that is drawn when the policy is made, so that users
    cannot choose prompts whose counts collide; `seed` fixes it, for repeatable experiments.
Differs from the paper
    A block waits for those behind it in its chain (see ``_chained``), and a block that moves to
    main takes those before it along. The sketch has no Bloom filter before it (*doorkeeper*). Room
    for a batch is made as if its blocks came one by one; one that is larger than the window makes
    it larger for a time, since blocks in use do not leave.
Cost
    get O(1), insert, remove O(log resident), touch, evict O(n log resident), amortised.
"""

from __future__ import annotations

import os
from hashlib import blake2b

from ._chained import ChainedPolicy, MayLeave, Queue

PROTECTED_SHARE = 0.8  # of main
SAMPLE = 10  # accesses per block of the capacity, until the counters are halved


class WTinyLFU(ChainedPolicy):
    """A policy that admits a block from a small window if it is used more often than the victim.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    window : float
        Share of the capacity for new blocks, ``0.0 ... 1.0``.
    seed : int, optional
        Key of the sketch's hash, >= 0, below 2**64; by default an unpredictable one.

    References
    ----------
    Einziger, Friedman & Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
    Transactions on Storage 13(4), 2017.
    """

    def __init__(
        self, cache_capacity: int, *, window: float = 0.01, seed: int | None = None
    ) -> None:
        if not 0.0 <= window <= 1.0:
            raise ValueError(f"window must be 0.0 ... 1.0, got {window!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
            raise ValueError(f"seed must be an int, 0 ... 2**64 - 1, got {seed!r}")
        self.window, self.seed = window, seed
        super().__init__(cache_capacity)

    def _reset(self) -> None:
        self._window = self._new_queue()
        self._probation = self._new_queue()
        self._protected = self._new_queue()
        self._window_size = max(1, int(self.window * self.cache_capacity))
        self._main_size = max(0, self.cache_capacity - self._window_size)
        self._sketch = Sketch(self.cache_capacity, self.seed)

    def _added(self, block_hash: bytes) -> None:
        self._window.put(block_hash, self._now())
        while (
            len(self._window) > self._window_size
            and len(self._probation) + len(self._protected) < self._main_size
            and (oldest := self._window.first(_any)) is not None
        ):
            self._admit(oldest)

    def _missed(self, block_hash: bytes) -> None:
        self._sketch.add(block_hash)

    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        if is_access:
            self._sketch.add(block_hash)
        queue = self._queue_of(block_hash)
        if is_access and queue is self._probation:
            queue.drop(block_hash)
            queue = self._protected
        queue.put(block_hash, self._now())
        while (
            len(self._protected) > PROTECTED_SHARE * self._main_size
            and (oldest := self._protected.first(_any)) is not None
        ):
            self._protected.drop(oldest)
            self._probation.put(oldest, self._now())

    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:  # noqa: ARG002
        self._queue_of(block_hash).drop(block_hash)

    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:
        victim = self._probation.first(may_leave) or self._protected.first(may_leave)
        candidate = self._window.first(may_leave)
        if victim is None or candidate is None:
            return victim or candidate
        if len(self._window) + arrivals < self._window_size:
            return victim  # the window has room for the new block
        if self._sketch.estimate(candidate) > self._sketch.estimate(victim):
            self._admit(candidate)
            return victim
        return candidate

    def _admit(self, block_hash: bytes) -> None:
        """Move a block of the window to probation, and those before it that are in the window."""
        moved: bytes | None = block_hash
        while moved is not None and moved in self._window:
            self._window.drop(moved)
            self._probation.put(moved, self._now())
            moved = self._before.get(moved)

    def _queue_of(self, block_hash: bytes) -> Queue:
        queues = (self._window, self._probation, self._protected)
        return next(queue for queue in queues if block_hash in queue)


def _any(block_hash: bytes) -> bool:  # noqa: ARG001
    return True


class Sketch:
    """Estimated counts of accesses, in bounded memory; old ones fade.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks, from which the number of counters and the length of a period follow.
    seed : int or None
        Key of the hash; None draws one.
    """

    ROWS = 4
    LARGEST = 15
    MOST_COUNTERS = 2**20

    def __init__(self, cache_capacity: int, seed: int | None) -> None:
        width = 1 << max(6, (4 * cache_capacity - 1).bit_length())  # a power of two
        self._mask = min(width, self.MOST_COUNTERS) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(self.ROWS)]
        self._key = os.urandom(16) if seed is None else seed.to_bytes(8, "little")
        self._period = SAMPLE * max(1, cache_capacity)
        self._added = 0

    def add(self, block_hash: bytes) -> None:
        """Count an access."""
        indexes = self._indexes(block_hash)
        least = min(row[index] for row, index in zip(self._rows, indexes, strict=True))
        if least < self.LARGEST:
            for row, index in zip(self._rows, indexes, strict=True):
                row[index] = max(row[index], least + 1)
        self._added += 1
        if self._added >= self._period:
            self._rows = [row.translate(_HALVES) for row in self._rows]
            self._added //= 2

    def estimate(self, block_hash: bytes) -> int:
        """Return the count of a block, 0 ... 15; collisions make it larger, never smaller."""
        indexes = self._indexes(block_hash)
        return min(row[index] for row, index in zip(self._rows, indexes, strict=True))

    def _indexes(self, block_hash: bytes) -> list[int]:
        digest = blake2b(block_hash, digest_size=4 * self.ROWS, key=self._key).digest()
        return [
            int.from_bytes(digest[first : first + 4], "little") & self._mask
            for first in range(0, len(digest), 4)
        ]


_HALVES = bytes(count // 2 for count in range(256))
