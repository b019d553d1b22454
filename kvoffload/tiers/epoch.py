"""Epochs: the numbers that separate blocks stored before a `Tier.forget` from later ones.

An epoch has 64 bits: milliseconds since 1970, followed by 20 random bits. So epochs are ordered
across processes and machines, and no two processes draw the same. If a clock is behind, or two
epochs are drawn in a millisecond, the next one counts on from the highest known epoch: only the
order matters; the time provides it for processes that know no epoch.

A medium may have any bytes. An epoch ahead of the clock is valid, since the next is above it:
clocks that are wrong by days do no harm. An epoch more than a century ahead was not drawn here and
could exhaust the numbers: it is invalid, like text that is not 16 hex digits. That limit moves with
the clock, so that within a millisecond there is a next epoch; until then, a process that needs one
above the limit starts again at the clock, and all stored blocks are forgotten. An epoch more than a
day ahead (`is_far_ahead`) that a process knows and its medium has lost came from a wrong clock: no
process counts on from it.

Structure
    `Agreement` decides, without I/O, which epoch a process uses, given the one found on a shared
    medium. `Agreement.forget` records a call of `RemoteTier.forget`; `Agreement.answer` takes the
    medium's epoch and returns the one to write, if any. ``remote.shared`` does the I/O.
Protocol
    A process that finds its last epoch keeps it. One that finds a higher epoch adopts it: another
    process has forgotten. One that finds a lower epoch, none, or an invalid one is in doubt, since
    another process may have forgotten meanwhile. It writes a new epoch above everything it has
    seen, and never its own again. A `forget` that the medium has not confirmed is also a doubt,
    which only an epoch drawn after the call resolves.
Invariants
    Each epoch is drawn for one write, and blocks are put only under an epoch that was found on the
    medium. So a replaced epoch does not return unless the medium is restored from a snapshot, and
    no block that was put before a `forget` has an epoch that is used after it. The order of epochs
    reveals a restored snapshot. The epoch of a process falls only from one that is more than a day
    ahead of the clock, which a wrong clock has drawn. Unless the medium has such an epoch, the next
    one is drawn from the clock.
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
"""Least time of a clock, September 2026: with a clock that was never set, epochs stay valid."""
_DIGITS = frozenset(b"0123456789abcdef")


def new_epoch(above: int = 0) -> int:
    """Return an epoch above `above` that no other process draws, ``1 ... 2**64 - 1``.

    `above` is the highest known epoch, 0 for none. An invalid one is ignored (`is_epoch`).
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
    """Return the highest valid epoch, a century ahead of the clock."""
    return (_now_ms() + AHEAD_MS) << RANDOM_BITS


def epoch_text(epoch: int) -> bytes:
    """Return an epoch, ``0 ... 2**64 - 1``, as it is stored on media: 16 hex digits.

    Raises
    ------
    TypeError, ValueError
        If it is not such an integer.
    """
    epoch = check_int("epoch", epoch, 0, 2**64 - 1)
    return b"%016x" % epoch


def parse_epoch(data: object) -> int | None:
    """Return the epoch that bytes of a medium encode; None if they encode none."""
    if not isinstance(data, bytes) or len(data) != EPOCH_CHARACTERS or not _DIGITS.issuperset(data):
        return None
    found = int(data, 16)
    return found if is_epoch(found) else None


def _now_ms() -> int:
    return max(time.time_ns() // 1_000_000, EARLIEST_MS)


class Decision(NamedTuple):
    """The decision after the medium's epoch was read."""

    write: int = 0  # the epoch to write; 0 if the medium has that of this process
    above: int = 0  # an epoch higher than this must not be overwritten
    loss: str = ""  # `MISSING` or `LOWER` if this process must forget everything


class Agreement:
    """The epoch that a process and its medium agree on.

    Notes
    -----
    Thread-safety: callers serialise; attributes may be read at any time. Complexity: O(1).
    """

    __slots__ = ("_drawn", "_forgetting", "_seen", "adopted", "epoch", "forgets", "owed")

    def __init__(self) -> None:
        self.epoch = 0  # of this process; 0 while it is unknown or in doubt
        self.owed = False  # the medium still needs a new epoch, after a `forget` or a loss
        self.adopted = 0  # number of epochs that this process has used
        self.forgets = 0  # number of calls of `forget`
        self._seen = 0  # the highest epoch that the medium has had, as far as this process knows
        self._drawn = 0  # the last epoch drawn, which may be on the medium; 0: none
        self._forgetting = False  # the medium has not confirmed the last `forget`

    def forget(self) -> None:
        """Use no epoch until the medium has one that was drawn after this call."""
        self.epoch = self._drawn = 0
        self.forgets += 1
        self.owed = self._forgetting = True

    def answer(self, found: int | None) -> Decision:
        """Adopt the medium's epoch, or draw another; None: it has none or an invalid one."""
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
        """Return whether all blocks under an epoch were put after every known `forget`."""
        return found in (self.epoch, self._drawn) or (found > self._seen and not self._forgetting)

    def deleted(self, forgets: int) -> None:
        """Count the epoch's deletion, which forgets for all processes, as the pending write.

        `forgets` is its value before the epoch was deleted: a later `forget` is still pending.
        """
        if forgets == self.forgets:
            self.owed = self._forgetting = False
