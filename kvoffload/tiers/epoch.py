"""Epochs: the numbers that tell what was stored before a `Tier.forget` from what came after.

An epoch has 64 bits: milliseconds since 1970 in front, 20 random bits behind. So epochs are in
order across processes and machines, and no two processes draw the same. Where a clock is behind,
or two epochs are drawn in a millisecond, the next one counts on from the highest that is known:
the order counts, the time is only what makes it hold where nothing is known.

What lies on a medium may be anything. An epoch ahead of the clock is one, since the next is above
it: clocks that are wrong by days do no harm. One that is more than a century ahead was not drawn
here, and could use the numbers up: it is nonsense, as is what does not read as 16 digits. That
limit moves with the clock, so that within a millisecond there is a next epoch; until then, who
needs one above the limit begins again at the clock, and what was stored is forgotten. An epoch
that a process knows, that is more than a day ahead (`is_far_ahead`) and that its medium has lost
came from a wrong clock: no process counts on from it.

Structure
    `Agreement` decides, without I/O, which epoch a process uses, given what it finds on a shared
    medium. `Agreement.forget` tells it of a call of `RemoteTier.forget`; `Agreement.answer` takes
    what the medium has and returns what to write there, if anything. ``remote.shared`` asks the
    medium and writes to it.
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

import secrets
import time
from typing import NamedTuple

from kvoffload._checks import check_int

from .metrics import LOWER, MISSING

__all__ = [
    "EPOCH_CHARACTERS",
    "Agreement",
    "Decision",
    "epoch_text",
    "is_epoch",
    "is_far_ahead",
    "last_epoch",
    "new_epoch",
    "parse_epoch",
]

EPOCH_CHARACTERS = 16
"""Hex digits of an epoch on a medium."""
RANDOM_BITS = 20
AHEAD_MS = 100 * 365 * 86_400_000
"""Milliseconds that an epoch may be ahead of the clock."""
FAR_AHEAD_MS = 86_400_000
"""Milliseconds ahead of the clock above which a clock must have been wrong."""
EARLIEST_MS = 1_790_000_000_000
"""The least that a clock shows, September 2026: one that was never set refuses no epoch."""
_DIGITS = frozenset(b"0123456789abcdef")


def new_epoch(above: int = 0) -> int:
    """Return an epoch above another that no other process draws, ``1 ... 2**64 - 1``.

    `above` is the highest that is known, 0 for none. What is no epoch is passed over (`is_epoch`).
    """
    random = secrets.randbits(RANDOM_BITS)
    drawn = (_now_ms() << RANDOM_BITS) | random
    return max(drawn, above + 1 + random) if is_epoch(above) else drawn


def is_epoch(value: int) -> bool:
    """Return whether a number can be an epoch: above 0, and at most a century ahead."""
    return 0 < value <= last_epoch()


def is_far_ahead(epoch: int) -> bool:
    """Return whether an epoch is more than a day ahead of the clock."""
    return epoch >> RANDOM_BITS > _now_ms() + FAR_AHEAD_MS


def last_epoch() -> int:
    """Return the highest number that is an epoch now, a century ahead."""
    return (_now_ms() + AHEAD_MS) << RANDOM_BITS


def epoch_text(epoch: int) -> bytes:
    """Return an epoch, ``0 ... 2**64 - 1``, as it lies on media: 16 hex digits.

    Raises
    ------
    TypeError, ValueError
        If it is no such integer.
    """
    epoch = check_int("epoch", epoch, 0, 2**64 - 1)
    return b"%016x" % epoch


def parse_epoch(data: object) -> int | None:
    """Return the epoch that bytes of a medium say; None for whatever is none."""
    if not isinstance(data, bytes) or len(data) != EPOCH_CHARACTERS or not _DIGITS.issuperset(data):
        return None
    found = int(data, 16)
    return found if is_epoch(found) else None


def _now_ms() -> int:
    return max(time.time_ns() // 1_000_000, EARLIEST_MS)


class Decision(NamedTuple):
    """The decision after a look at the medium."""

    write: int = 0  # the epoch to write; 0 where the medium has the one that this process uses
    above: int = 0  # a higher epoch than this one is not to be overwritten
    loss: str = ""  # `MISSING` or `LOWER` where this process has to forget everything


class Agreement:
    """The epoch that a process and its medium agree on.

    Notes
    -----
    Thread-safety: callers serialise; attributes may be read at any time. Complexity: O(1).
    """

    __slots__ = ("_drawn", "_forgetting", "_seen", "adopted", "epoch", "forgets", "owed")

    def __init__(self) -> None:
        self.epoch = 0  # that this process uses; 0 while it has learned none, or is in doubt
        self.owed = False  # the medium has yet to take a new epoch: after a `forget`, or a loss
        self.adopted = 0  # number of epochs that this process has used
        self.forgets = 0  # number of calls of `forget`
        self._seen = 0  # the highest epoch that the medium has had, as far as this process knows
        self._drawn = 0  # the last one that was drawn, which may be on the medium; 0: none
        self._forgetting = False  # the medium has not confirmed the last `forget`

    def forget(self) -> None:
        """Use no epoch until the medium has one that is drawn from now on."""
        self.epoch = self._drawn = 0
        self.forgets += 1
        self.owed = self._forgetting = True

    def answer(self, found: int | None) -> Decision:
        """Adopt the medium's epoch, or draw another one; None: it has none, or nonsense."""
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

        `forgets` is its value before the epoch was deleted: a later `forget` is still owed.
        """
        if forgets == self.forgets:
            self.owed = self._forgetting = False
