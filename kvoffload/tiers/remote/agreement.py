"""Which epoch a process uses, given what it finds on a shared medium: decisions without I/O.

Structure
    `Agreement` is a state machine. `Agreement.forget` tells it of a call of `RemoteTier.forget`;
    `Agreement.answer` takes what the medium has and returns what to write there, if anything.
    ``shared`` asks the medium and writes to it.
Protocol
    A process that finds the epoch that it used last goes on with it. One that finds a higher epoch
    adopts it: another process has forgotten. One that finds a lower one, none, or nonsense is in
    doubt: whoever lowered or lost the epoch may have forgotten since. It writes a new epoch above
    everything it has seen, and never its own back. A `forget` that the medium has not confirmed is
    a doubt as well, which nothing settles but an epoch that was drawn after the call.
Invariants
    Each epoch is drawn for one write, and blocks are put only under an epoch that was found on the
    medium. So an epoch that was replaced does not return unless the medium is restored from a
    snapshot, and no block that was put before a `forget` has an epoch that is used after it. The
    order of epochs is what reveals a snapshot.
    The epoch of a process falls only from one that is more than a day ahead of the clock, as a
    clock that was wrong has drawn it. Such an epoch is not counted on from, unless the medium has
    it: the next one is drawn from the clock.
"""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.tiers.epoch import is_far_ahead, new_epoch
from kvoffload.tiers.metrics import LOWER, MISSING

__all__ = ["Agreement", "Decision"]


class Decision(NamedTuple):
    """The decision after a look at the medium.

    Attributes
    ----------
    write : int
        The epoch to write; 0 where the medium has the epoch that this process uses.
    above : int
        A higher epoch than this one is not to be overwritten.
    loss : str
        `MISSING` or `LOWER` where the answer makes this process forget everything, otherwise empty.
    """

    write: int = 0
    above: int = 0
    loss: str = ""


class Agreement:
    """The epoch that a process and its medium agree on.

    Attributes
    ----------
    epoch : int
        The epoch that this process uses; 0 while it has learned none, or is in doubt.
    owed : bool
        Whether the medium has yet to take a new epoch: after a `forget`, or after a loss.
    adopted : int
        Number of epochs that this process has used.
    forgets : int
        Number of calls of `forget`.

    Notes
    -----
    Thread-safety: callers serialise; attributes may be read at any time. Complexity: O(1).
    """

    __slots__ = ("_drawn", "_forgetting", "_seen", "adopted", "epoch", "forgets", "owed")

    def __init__(self) -> None:
        self.epoch = 0
        self.owed = False
        self.adopted = 0
        self.forgets = 0
        self._seen = 0  # the highest epoch that the medium has had, as far as this process knows
        self._drawn = 0  # the last one that was drawn, which may be on the medium; 0: none
        self._forgetting = False  # the medium has not confirmed the last `forget`

    def forget(self) -> None:
        """Use no epoch until the medium has one that is drawn from now on."""
        self.epoch = self._drawn = 0
        self.forgets += 1
        self.owed = self._forgetting = True

    def answer(self, found: int | None) -> Decision:
        """Adopt the medium's epoch, or draw another one.

        Parameters
        ----------
        found : int or None
            The epoch that the medium has; None where there is none, or nonsense.
        """
        if found is not None and self._is_sound(found):
            self.adopted += found != self.epoch
            self.epoch = self._seen = found
            self._drawn = 0
            self.owed = self._forgetting = False
            return Decision()
        loss = ""
        if self.epoch:
            loss = MISSING if found is None else LOWER
            self.epoch = 0
            self.owed = True
        known = max(self._seen, found or 0)
        if is_far_ahead(known):
            known = found or 0
        self._seen = known
        self._drawn = new_epoch(known)
        return Decision(self._drawn, self._drawn - 1 if self._forgetting else known, loss)

    def _is_sound(self, found: int) -> bool:
        """Return whether no block under an epoch was put before a `forget` that is known here."""
        return found in (self.epoch, self._drawn) or (found > self._seen and not self._forgetting)

    def deleted(self, forgets: int) -> None:
        """Take the absence of an epoch, which forgets for all, for what the medium was owed.

        Parameters
        ----------
        forgets : int
            The value of `forgets` before the epoch was deleted: a later call is still owed.
        """
        if forgets == self.forgets:
            self.owed = self._forgetting = False
