"""The common part of the baselines: resident blocks, their chains, and the loop of an eviction.

A policy of the literature chooses among pages or objects that do not depend on each other. Three
things differ for the blocks of prompts, and this module handles them for all policies:

A block waits for those behind it
    A block is useless without those before it in its chain. So a block does not leave while one
    behind it is resident. If all idle blocks wait, because those behind them are in use, one leaves
    that has no idle block behind it.
One request, one access
    A request uses its blocks as it begins and as it finishes. The second use is not an access, nor
    is the touch of a block whose store is pending.
All or nothing
    Blocks that may leave are counted first. Then they are chosen one by one, so that a rule may
    change its own state while it chooses.
Cost
    Each rule's file states its cost if most blocks may leave. The count at the start of an
    eviction, and a queue, pass over each block in use: an eviction of a few blocks takes
    O(resident log resident) if hardly any may leave.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import Any

from kvoffload import BlockNotFoundError, BlockStatus, CachePolicy, Hints

MayLeave = Callable[[bytes], bool]
"""Whether a block is idle and not protected."""


class ChainedPolicy(CachePolicy):
    """A policy whose rule does not handle chains, slots or blocks in use.

    A rule implements `_added`, `_touched`, `_gone`, `_choose` and `_reset`, and keeps its blocks in
    one or several of `_new_queue`.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._blocks: dict[bytes, BlockStatus] = {}
        self._before: dict[bytes, bytes] = {}  # of a resident block: the one before it
        self._behind: dict[bytes, set[bytes]] = {}  # of any block: the resident ones behind it
        self._queues: list[Queue] = []
        self._time = 0
        self._reset()

    # -- the rule --------------------------------------------------------------------------------

    @abstractmethod
    def _added(self, block_hash: bytes) -> None:
        """Add a block that was not resident."""

    def _missed(self, block_hash: bytes) -> None:
        """Note an access to a block that is not resident."""

    @abstractmethod
    def _touched(self, block_hash: bytes, *, is_access: bool) -> None:
        """Note a touch of a resident block."""

    @abstractmethod
    def _gone(self, block_hash: bytes, *, evicted: bool) -> None:
        """Forget a block that was resident, or remember that it was."""

    @abstractmethod
    def _choose(self, may_leave: MayLeave, arrivals: int) -> bytes | None:
        """Return the next victim, which ends its chain, or None.

        Parameters
        ----------
        may_leave : callable
            Whether a block is idle and not protected.
        arrivals : int
            How many blocks will have come by then: one per victim so far.
        """

    @abstractmethod
    def _reset(self) -> None:
        """Begin without blocks."""

    def _new_queue(self) -> Queue:
        queue = Queue(self._behind)
        self._queues.append(queue)
        return queue

    def _now(self) -> int:
        """Return a number above all previous ones."""
        self._time += 1
        return self._time

    # -- the contract ----------------------------------------------------------------------------

    def get(self, block_hash: bytes) -> BlockStatus | None:
        return self._blocks.get(block_hash)

    def insert(self, block_hash: bytes, status: BlockStatus) -> None:
        if block_hash in self._blocks:
            raise ValueError(f"block_hash must not be resident, got {block_hash.hex()}")
        self._blocks[block_hash] = status
        self._added(block_hash)

    def remove(self, block_hash: bytes) -> None:
        if block_hash not in self._blocks:
            raise BlockNotFoundError(f"block {block_hash.hex()} is not resident")
        self._forget(block_hash, evicted=False)

    def touch(self, hashes: Iterable[bytes]) -> None:
        self._use(list(hashes), is_access=True)

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        del hints
        self._use(list(hashes), is_access=False)

    def _use(self, batch: list[bytes], *, is_access: bool) -> None:
        for before, block_hash in pairwise(batch):
            if block_hash in self._blocks and block_hash not in self._before:
                self._before[block_hash] = before
                self._behind.setdefault(before, set()).add(block_hash)
        for block_hash in reversed(batch):
            status = self._blocks.get(block_hash)
            if status is not None:
                self._touched(block_hash, is_access=is_access and status.ref_cnt >= 0)
            elif is_access:
                self._missed(block_hash)

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")

        def may_leave(block_hash: bytes) -> bool:
            return self._blocks[block_hash].ref_cnt == 0 and block_hash not in protected

        if sum(1 for _ in islice(filter(may_leave, self._blocks), n)) < n:
            return None
        victims: list[tuple[bytes, BlockStatus]] = []
        while len(victims) < n:
            block_hash = self._choose(may_leave, len(victims)) or self._last_that(may_leave)
            victims.append((block_hash, self._forget(block_hash, evicted=True)))
        for queue in self._queues:
            queue.restore()
        return victims

    def clear(self) -> None:
        self._blocks.clear()
        self._before.clear()
        self._behind.clear()
        self._queues.clear()
        self._time = 0
        self._reset()

    def __len__(self) -> int:
        return len(self._blocks)

    def _last_that(self, may_leave: MayLeave) -> bytes:
        """Return a block that may leave, with none behind it that may, when all wait for others."""
        allowed = list(filter(may_leave, self._blocks))
        for block_hash in allowed:
            behind = self._behind.get(block_hash, set())
            if not any(map(may_leave, behind)):
                return block_hash
        return allowed[0]  # the hashes form cycles, not chains: each has another behind it

    def _forget(self, block_hash: bytes, *, evicted: bool) -> BlockStatus:
        self._gone(block_hash, evicted=evicted)
        before = self._before.pop(block_hash, None)
        if before is not None:
            behind = self._behind[before]
            behind.remove(block_hash)
            if not behind:
                del self._behind[before]
                for queue in self._queues:
                    queue.wake(before)
        return self._blocks.pop(block_hash)


class Queue:
    """Blocks in the order of their ranks, the least first.

    Parameters
    ----------
    behind : dict of bytes to set of bytes
        The blocks that wait, as keys.

    Notes
    -----
    A heap with outdated entries. The entry of a block that waits is dropped when it comes to the
    top, until `wake`, so that no call examines it again. Complexity of all methods: O(log n),
    amortised.
    """

    def __init__(self, behind: dict[bytes, set[bytes]]) -> None:
        self._behind = behind
        self._ranks: dict[bytes, Any] = {}
        self._heap: list[tuple[Any, bytes]] = []
        self._aside: list[tuple[Any, bytes]] = []  # of blocks in use, during an eviction

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, block_hash: bytes, rank: Any) -> None:
        """Add a block, or give it another rank."""
        self._ranks[block_hash] = rank
        heappush(self._heap, (rank, block_hash))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, block_hash) for block_hash, rank in self._ranks.items()]
            heapify(self._heap)

    def drop(self, block_hash: bytes) -> Any:
        """Drop a block; return its rank."""
        return self._ranks.pop(block_hash)

    def wake(self, block_hash: bytes) -> None:
        """Note that no block is behind this one any longer."""
        if block_hash in self._ranks:
            heappush(self._heap, (self._ranks[block_hash], block_hash))

    def first(self, may_leave: MayLeave) -> bytes | None:
        """Return the block of the least rank that may leave and does not wait."""
        while self._heap:
            rank, block_hash = self._heap[0]
            if self._ranks.get(block_hash) != rank or block_hash in self._behind:
                heappop(self._heap)
            elif may_leave(block_hash):
                return block_hash
            else:
                self._aside.append(heappop(self._heap))
        return None

    def restore(self) -> None:
        """End an eviction: blocks that were in use may be idle at the next one."""
        for entry in self._aside:
            heappush(self._heap, entry)
        self._aside.clear()


class Ghosts:
    """Records of blocks that left; the first that left is forgotten first.

    Parameters
    ----------
    most : int
        Number of blocks to remember.

    Notes
    -----
    The papers ask whether a block is remembered before they make room for it. Here the room for a
    whole store is made first. So the oldest ghost is forgotten only when a block comes; until then
    there may be more than `most`, by the blocks that left since.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._remembered: dict[bytes, Any] = {}  # the one that left first at the start
        self._num_ahead = 0  # that left before a block came for them

    def __len__(self) -> int:
        return len(self._remembered)

    def add(self, block_hash: bytes, remembered: Any) -> None:
        """Remember a block that leaves for another."""
        self._remembered[block_hash] = remembered
        self._num_ahead += 1

    def arrive(self, block_hash: bytes) -> Any:
        """Forget an arriving block and any excess ghosts; return what was remembered, or None.

        Complexity: O(1), amortised.
        """
        remembered = self._remembered.get(block_hash)
        self._num_ahead = max(0, self._num_ahead - 1)
        while len(self._remembered) > self._most + self._num_ahead:
            del self._remembered[next(iter(self._remembered))]
        self._remembered.pop(block_hash, None)
        return remembered
