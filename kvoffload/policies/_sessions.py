"""Which resident blocks only one session uses, as far as the requests tell.

Structure
    Two marks per resident block. *Ends*: its session may go on after it, because it was the last
    of a prompt or of the answer. *Shared*: several sessions have used it. They end when the block
    leaves. Compiled, they are flags of the nodes (``_steps_c``).
Rule
    The deepest resident block of a new request tells whether its session goes on: it does if that
    block ends a request, and the marks move on with it. A client may send the whole answer again, a
    part, as without its reasoning, or none of it. If none of these blocks was stored, the mark
    stays where the session went on. Otherwise the request branches off from an earlier one, and
    both share all blocks up to there.
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

    def leave(self, hashes: Sequence[BlockHash], met: int, own: int, num_last: int) -> None:
        """Note the end of a request, for which `meet` returned `met`.

        `own` is the first position that it has stored, or the end if it has asked in vain for
        blocks to store, or `met`. Resident blocks between the two were stored by requests open at
        the same time, and are shared with them. The session may go on after each of the `num_last`
        blocks at the end.
        """
        known = self._num_known(hashes[:own], met)
        if known > met:
            self._share(hashes[:known])
        self._mark_ends(hashes, met, num_last)

    def serve_at_once(
        self, hashes: Sequence[BlockHash], own: Collection[BlockHash], num_last: int
    ) -> None:
        """Note a whole request, for an engine that shows its blocks only when it finishes.

        The deepest resident block that is not of its `own` stores is the deepest known one.
        `num_last` is as in `leave`, of all groups.
        """
        known = len(hashes)
        while known and (hashes[known - 1] not in self._resident or hashes[known - 1] in own):
            known -= 1
        if known:
            self._go_on(hashes[:known])
        self._mark_ends(hashes, known, num_last)

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

    def clear(self) -> None:
        """Forget every block; a call that resets the manager meanwhile goes on with these marks."""
        self._ends.clear()
        self._shared.clear()

    def _go_on(self, known: Sequence[BlockHash]) -> None:
        """Note whether a request goes on after its last known block."""
        place = len(known)
        while place and known[place - 1] in self._ends:
            place -= 1
            self._ends.remove(known[place])
        if place == len(known):
            self._share(known)

    def _mark_ends(self, hashes: Sequence[BlockHash], known: int, num_last: int) -> None:
        """Mark the resident ones of the last blocks, or else the one before `known` if unshared."""
        last = hashes[max(0, len(hashes) - num_last) :]
        ends = [block_hash for block_hash in last if block_hash in self._resident]
        self._ends.update(ends or self.own(hashes[max(0, known - 1) : known]))

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
