"""The numbers that tell what was stored before a `Tier.forget` from what came after.

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
"""

from __future__ import annotations

import secrets
import time

from kvoffload._checks import check_int

__all__ = [
    "EPOCH_CHARACTERS",
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
    """Return an epoch above another that no other process draws; never 0.

    Parameters
    ----------
    above : int
        The highest epoch that is known, 0 for none. What is no epoch is passed over (`is_epoch`).

    Returns
    -------
    int
        ``1 ... 2**64 - 1``.
    """
    random = secrets.randbits(RANDOM_BITS)
    drawn = (_now_ms() << RANDOM_BITS) | random
    return max(drawn, above + 1 + random) if is_epoch(above) else drawn


def is_epoch(number: int) -> bool:
    """Return whether a number can be an epoch: above 0, and at most a century ahead."""
    return 0 < number <= last_epoch()


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
