"""A miniature: a policy that serves whole requests, without slots.

It holds keys, no slots. Of small capacity, fed the sampled part of each request, its hits estimate
those of a cache that is larger by the sampling factor (Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations", USENIX ATC'17): the guard of hit density and the
miniatures of a watch are such. Fed every block, it is the cache of a replay.

While a cache stores blocks, they are not hits and may not leave, so the stores of a miniature take
some requests as well: the *lag*.

Invariants
    A block that was stored in a request is pending until the lag, in requests, has passed.
    Between calls every other block is idle.
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

from ._twin_py import PythonPolicy, require

Blocks = npt.NDArray[np.uint32]


class Miniature:
    """A cache of keys that serves whole requests."""

    __slots__ = ("_counts", "_entered", "_left", "_storing", "policy")

    def __init__(self, policy: PythonPolicy) -> None:
        self.policy = policy
        # By the position of the request, oldest first.
        self._storing: deque[tuple[float, Mapping[BlockHash, BlockStatus]]] = deque()
        self._counts = dict.fromkeys(
            (
                "lookup_blocks",
                "hit_blocks",
                "stored_blocks",
                "evicted_blocks",
                "refused_stores",
                "not_admitted",
            ),
            0,
        )
        self._left: list[BlockStatus] = []  # of the last request
        self._entered: list[BlockHash] = []

    def serve(
        self,
        hashes: list[BlockHash],
        first: int,
        stop: int,
        hints: Hints | None,
        now: float | None,
        *,
        position: float,
        before: float,
        waits: bool = False,
    ) -> int:
        """Serve a request; return the number of leading blocks that were ready.

        It asks for the blocks from `first` to before `stop`. Stores that began before the position
        `before` have ended, and if the request `waits`, those of its own blocks, too.
        """
        self.end_stores(before)
        if waits:
            self._end_own(hashes)
        last = None if hints is not None and hints.ends else hints
        return self._serve(hashes, hashes[first:stop], hints, last, now, position=position)

    def _serve(
        self,
        batch: list[BlockHash],
        asked: list[BlockHash],
        hints: Hints | None,
        last: Hints | None,
        now: float | None,
        *,
        position: float,
    ) -> int:
        """Serve a request; `last` are its hints at the end.

        If the session ends, the request takes only free slots and those of released blocks.
        """
        policy, resident, counts = self.policy, self.policy._resident, self._counts
        policy._take_back(batch)
        policy._begun(batch, hints, now)
        ready = takewhile(lambda key: key in resident and resident[key].ref_cnt == 0, asked)
        num_hits = sum(1 for _ in ready)
        counts["lookup_blocks"] += len(asked)
        counts["hit_blocks"] += num_hits
        self._store(batch, position, ends=hints is not None and hints.ends)
        policy._take_back(batch)
        policy._finished(batch, last, now)
        return num_hits

    def end_stores(self, before: float) -> None:
        """End the stores that began before a position."""
        while self._storing and self._storing[0][0] < before:
            for status in self._storing.popleft()[1].values():
                status.ref_cnt = 0

    def _end_own(self, batch: list[BlockHash]) -> None:
        """End the stores of some blocks."""
        used = set(batch)
        for place, (position, blocks) in enumerate(self._storing):
            for block_hash in blocks.keys() & used:
                blocks[block_hash].ref_cnt = 0
            others = {key: status for key, status in blocks.items() if key not in used}
            self._storing[place] = position, others

    def _store(self, batch: list[BlockHash], position: float, *, ends: bool) -> None:
        """Store the missing blocks of the request, as far as the policy admits them."""
        policy, resident, counts = self.policy, self.policy._resident, self._counts
        self._left, self._entered = [], []
        missing = [key for key in dict.fromkeys(batch) if key not in resident]
        if not missing:
            return
        decide = policy._make_room_of_released if ends else policy._make_room
        room = decide(missing, policy.cache_capacity - len(resident), set(batch))
        if room is None:
            counts["refused_stores"] += 1
            return
        num_admitted, victims = room
        self._left, self._entered = [status for _, status in victims], missing[:num_admitted]
        stored = {key: BlockStatus(0) for key in self._entered}
        policy._insert(stored)
        if stored:
            self._storing.append((position, stored))
        counts["evicted_blocks"] += len(victims)
        counts["stored_blocks"] += num_admitted
        counts["not_admitted"] += len(missing) - num_admitted

    def finish(self, hashes: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        """Apply a hint that came at the end of a request."""
        self.policy._take_back(hashes)
        self.policy._finished(hashes, hints, now)

    def release(self, hashes: list[BlockHash]) -> None:
        """Release blocks: they leave before all others."""
        self.policy._release(hashes)

    def clear(self) -> None:
        """Forget everything but the counts."""
        self._storing.clear()
        self.policy._clear()

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
    ) -> npt.NDArray[np.int64]:
        """Serve the requests of a trace; return the hits of each, (rows,) int64.

        `keys` are the trace's distinct blocks, and `blocks` ((n,) uint32) those of all rows by
        their indexes in it. Row i has those of ``starts[i:i + 2]`` ((rows + 1,) int64), and asks
        for those from its ``first[i]`` on ((rows,) int64). `nodes` ((len(keys),) uint32) notes
        where each key was found; initial values are arbitrary. `position` is that of the first
        row; a store ends before the row that follows `lag` others.
        """
        del nodes  # of the compiled twin
        hits = np.empty(len(first), dtype=np.int64)
        for row, before in enumerate(first.tolist()):
            batch = [keys[block] for block in blocks[starts[row] : starts[row + 1]].tolist()]
            at = position + row
            hits[row] = self.serve(
                batch, before, len(batch), None, None, position=at, before=at - lag
            )
        return hits

    def serve_row(
        self, keys: Sequence[BlockHash], blocks: Blocks, first: int
    ) -> tuple[int, Blocks, Blocks]:
        """Serve a row of `serve_rows`; return its hits, and the blocks that left and entered.

        Both are indexes in `keys`, (n,) uint32, in order. Its store ends before the next row.
        """
        numbers = dict(
            zip((keys[block] for block in blocks.tolist()), blocks.tolist(), strict=True)
        )
        batch = [keys[block] for block in blocks.tolist()]
        hits = self.serve(batch, first, len(batch), None, None, position=0.0, before=1.0)
        left = np.array([status.block_id for status in self._left], dtype=np.uint32)
        for block_hash in self._entered:
            self.policy._resident[block_hash].block_id = numbers[block_hash]
        entered = [numbers[block_hash] for block_hash in self._entered]
        return hits, left, np.array(entered, dtype=np.uint32)

    def stats(self) -> dict[str, int]:
        """Return the counts since the construction, and the present numbers of blocks."""
        return {
            **self._counts,
            "resident": len(self.policy._resident),
            "pending": sum(len(blocks) for _, blocks in self._storing),
        }

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(len(self.policy) <= self.policy.cache_capacity, "it is within its capacity")
        pending = [status.ref_cnt for _, blocks in self._storing for status in blocks.values()]
        require(set(pending) <= {-1}, "the blocks that are being stored are pending")
        self.policy._check()
