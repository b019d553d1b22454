"""Which resident blocks only one session uses, as far as the requests tell.

Structure
    Two marks per resident block. *Ends*: the block was the last of the request that used it last.
    *Shared*: several sessions have used it. They end when the block leaves. Compiled, they are
    flags of the nodes (``_steps_c``).
Rule
    The deepest resident block of a new request tells whether its session goes on: it does if that
    block ends a request, and the mark moves on with it. Otherwise the request branches off from an
    earlier one, and both share all blocks up to there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvoffload.types import BlockHash


class Sessions:
    """The marks of a manager's resident blocks; `resident` has their hashes."""

    __slots__ = ("_ends", "_resident", "_shared")

    def __init__(self, resident: Collection[BlockHash]) -> None:
        self._resident = resident
        self._ends: set[BlockHash] = set()
        self._shared: set[BlockHash] = set()

    def meet(self, hashes: Sequence[BlockHash], start: int = 0) -> int:
        """Note a request, or the blocks that it adds from `start` on.

        Return the number of its blocks up to the deepest resident one, at least `start`.
        """
        known = self._num_known(hashes, start)
        if known > start:
            self._go_on(hashes[:known])
        return known

    def leave(self, hashes: Sequence[BlockHash], met: int, own: int) -> None:
        """Note the end of a request, for which `meet` returned `met`.

        `own` is the first position that it has stored, or `met`. Resident blocks between the two
        were stored by requests open at the same time, and are shared with them.
        """
        known = self._num_known(hashes[:own], met)
        if known > met:
            self._share(hashes[:known])
        if hashes and hashes[-1] in self._resident:
            self._ends.add(hashes[-1])

    def serve_at_once(
        self, hashes: Sequence[BlockHash], own: Collection[BlockHash], num_last: int
    ) -> None:
        """Note a whole request, for an engine that shows its blocks only when it finishes.

        The deepest resident block that is not of its `own` stores is the deepest known one. Of the
        `num_last` blocks, of several groups, at its end, the last resident one gets the mark.
        """
        known = len(hashes)
        while known and (hashes[known - 1] not in self._resident or hashes[known - 1] in own):
            known -= 1
        if known:
            self._go_on(hashes[:known])
        for block_hash in hashes[max(0, len(hashes) - num_last) :][::-1]:
            if block_hash in self._resident:
                self._ends.add(block_hash)
                break

    def unshared(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the blocks that are not shared."""
        return [block_hash for block_hash in hashes if block_hash not in self._shared]

    def own(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the resident blocks that are not shared."""
        return [one for one in hashes if one in self._resident and one not in self._shared]

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Forget blocks that have left."""
        self._ends.difference_update(hashes)
        self._shared.difference_update(hashes)

    def _go_on(self, known: Sequence[BlockHash]) -> None:
        """Note whether a request goes on after its last known block."""
        if known[-1] in self._ends:
            self._ends.remove(known[-1])
        else:
            self._share(known)

    def _num_known(self, hashes: Sequence[BlockHash], start: int) -> int:
        known = len(hashes)
        while known > start and hashes[known - 1] not in self._resident:
            known -= 1
        return max(known, start)

    def _share(self, hashes: Iterable[BlockHash]) -> None:
        self._shared.update(block_hash for block_hash in hashes if block_hash in self._resident)

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        if not (self._ends | self._shared).issubset(self._resident):
            raise AssertionError("only resident blocks have marks of sessions")
