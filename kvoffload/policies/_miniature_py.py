"""A miniature: a policy that serves whole requests, without slots.

With a small capacity and the sampled part of each request, its hits estimate those of a cache that
is larger by the sampling factor (Waldspurger et al., "Cache Modeling and Optimization using
Miniature Simulations", USENIX ATC'17). The guard of hit density and a watch use it so. With every
block of each request it is the cache of a replay.

While a cache stores blocks, they are not hits and may not leave, so the stores of a miniature take
some requests as well. The caller gives each request a *position* among all requests, and says
which position the oldest request has whose stores have not ended.

Invariants
    A stored block is pending until its store ends. Between calls every other block is idle.
Cost
    That of the policy, per block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvoffload.types import BlockHash, BlockStatus, Hints

from ._sessions import Sessions
from ._twin_py import PythonPolicy, require

Blocks = npt.NDArray[np.uint32]
Told = tuple[float | None, Hints | None, Hints | None]


class Miniature:
    """A cache of keys that serves whole requests."""

    __slots__ = (
        *("_entered", "_left", "_sessions", "_storing", "policy"),
        *("asked", "evicted", "hits", "not_admitted", "refused", "stored"),
    )

    def __init__(self, policy: PythonPolicy) -> None:
        self.policy = policy
        self._sessions = Sessions(policy._resident)
        # By the position of the request, oldest first.
        self._storing: deque[tuple[float, Mapping[BlockHash, BlockStatus]]] = deque()
        self._left: list[BlockStatus] = []  # for the last request
        self._entered: dict[BlockHash, BlockStatus] = {}
        # Blocks, and of `refused` stores, since the construction.
        self.asked = self.hits = self.stored = self.evicted = self.not_admitted = self.refused = 0

    def serve(
        self,
        hashes: list[BlockHash],
        first: int,
        stop: int,
        hints: Hints | None,
        *,
        position: float,
        before: float,
        waits: bool = False,
        again: bool = True,
        early: bool = False,
    ) -> int:
        """Serve a request; return the number of leading blocks that were ready.

        It asks for the blocks from `first` to before `stop`. Stores that began before the position
        `before` have ended, and if the request `waits`, those of its own blocks, too. It finishes
        at once, and finds its blocks ready if its store ends `early`. The hints count when it
        begins, and `again` when it finishes. If its session ends, it takes only free slots and
        those of released blocks, and the caller releases its blocks.
        """
        ends = hints is not None and hints.ends
        self.end_stores(before)
        if waits:
            self._end_own(hashes)
        self._begin(hashes, hints)
        num_hits = self._ask(hashes[first:stop])
        self._store(hashes, position, ends=ends)
        own = self._entered.values() if early else ()
        for status in own:
            status.ref_cnt = 0
        self.finish(hashes, None if ends or not again else hints)
        for status in own:
            status.ref_cnt = -1
        return num_hits

    def _begin(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        self.policy._take_back(hashes)
        self.policy._begun(hashes, hints)

    def _ask(self, asked: Sequence[BlockHash]) -> int:
        """Count the leading blocks that are ready of those that a request asks for."""
        resident = self.policy._resident
        ready = takewhile(lambda key: key in resident and resident[key].ref_cnt == 0, asked)
        num_hits = sum(1 for _ in ready)
        self.asked += len(asked)
        self.hits += num_hits
        return num_hits

    def end_stores(self, before: float) -> None:
        """End the stores that began before a position."""
        while self._storing and self._storing[0][0] < before:
            for status in self._storing.popleft()[1].values():
                status.ref_cnt = 0

    def _end_own(self, batch: list[BlockHash]) -> None:
        """End the stores of some blocks."""
        own = set(batch)
        for place, (position, blocks) in enumerate(self._storing):
            for block_hash in blocks.keys() & own:
                blocks[block_hash].ref_cnt = 0
            others = {key: status for key, status in blocks.items() if key not in own}
            self._storing[place] = position, others

    def _store(self, batch: list[BlockHash], position: float, *, ends: bool) -> None:
        """Store the missing blocks of the request, as far as the policy admits them."""
        policy, resident = self.policy, self.policy._resident
        self._left, self._entered = [], {}
        missing = [key for key in dict.fromkeys(batch) if key not in resident]
        if not missing:
            return
        decide = policy._make_room_of_released if ends else policy._make_room
        room = decide(missing, policy.cache_capacity - len(resident), set(batch))
        if room is None:
            self.refused += 1
            return
        num_admitted, victims = room
        self._left = [status for _, status in victims]
        self._sessions.forget([key for key, _ in victims])
        self._entered = {key: BlockStatus(0) for key in missing[:num_admitted]}
        policy._insert(self._entered)
        if self._entered:
            self._storing.append((position, self._entered))
        self.evicted += len(victims)
        self.stored += num_admitted
        self.not_admitted += len(missing) - num_admitted

    def finish(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        """Apply a hint that came at the end of a request."""
        self.policy._take_back(hashes)
        self.policy._finished(hashes, hints)

    def release(self, hashes: list[BlockHash]) -> None:
        """Release blocks: they leave before all others."""
        self.policy._release(hashes)

    def clear(self) -> None:
        """Forget everything but the counts."""
        self._storing.clear()
        self._left, self._entered = [], {}
        self.policy._clear()
        self._sessions = Sessions(self.policy._resident)

    def serve_rows(
        self,
        keys: Sequence[BlockHash],
        starts: npt.NDArray[np.int64],
        blocks: Blocks,
        first: npt.NDArray[np.int64],
        nodes: Blocks,
        *,
        position: float,
        lag: float,
        told: Sequence[Told] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Serve the requests of a trace; return the counts of each, (rows, 5) int64.

        These are blocks hit, stored and evicted, refused stores, and blocks not admitted. `keys`
        are the trace's distinct blocks, and `blocks` ((n,) uint32) those of all rows by their
        indexes in it. Row i has those of ``starts[i:i + 2]`` ((rows + 1,) int64), and asks for
        those from its ``first[i]`` on ((rows,) int64). `nodes` ((len(keys),) uint32) notes where
        each key was found; initial values are arbitrary. `told`, a list, has of each row the time,
        and the hints at its beginning and its end; then sessions are noted, and those that end
        release their blocks. `position` is that of the first row; a store ends before the row that
        follows `lag` others, and with its own for -1.
        """
        del nodes  # for the compiled twin
        counts = [self._counts()]
        for row, skipped in enumerate(first.tolist()):
            numbers = blocks[starts[row] : starts[row + 1]].tolist()
            batch, at = [keys[number] for number in numbers], position + row
            if told is None:
                self.serve(batch, skipped, len(batch), None, position=at, before=at - lag)
            else:
                self._serve_told(batch, skipped, told[row], at, at - lag)
            counts.append(self._counts())
            for key, number in zip(batch, numbers, strict=True):
                if key in self._entered:
                    self._entered[key].block_id = number
        every = np.array(counts, dtype=np.int64)
        return every[1:] - every[:-1]

    def _serve_told(
        self, batch: list[BlockHash], first: int, told: Told, position: float, before: float
    ) -> None:
        _, hints, at_finish = told
        last = at_finish or hints
        self.end_stores(before)
        self._begin(batch, hints)
        met = self._sessions.meet(batch)
        self._ask(batch[first:])
        self._store(batch, position, ends=hints is not None and hints.ends)
        self.finish(batch, last)
        own = next((index for index, key in enumerate(batch) if key in self._entered), met)
        self._sessions.leave(batch, met, own, 1)
        if last is not None and last.ends:
            self.release(self._sessions.unshared(batch))

    def _counts(self) -> tuple[int, ...]:
        return self.hits, self.stored, self.evicted, self.refused, self.not_admitted

    def changes(self) -> tuple[Blocks, Blocks]:
        """Return the blocks that left and that entered for the last row that was served.

        Both are indexes in its `keys`, (n,) uint32, in order.
        """
        both = self._left, self._entered.values()
        left, entered = (np.array([each.block_id for each in some], np.uint32) for some in both)
        return left, entered

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(len(self.policy) <= self.policy.cache_capacity, "it is within its capacity")
        pending = [status.ref_cnt for _, blocks in self._storing for status in blocks.values()]
        require(set(pending) <= {-1}, "the blocks that are being stored are pending")
        self.policy._check()
