"""Breakers, which stop calls to a medium that does not answer and probe it again later.

Structure
    A breaker is *closed* (calls are allowed), *open* (calls are refused until a time) or *probing*
    (one call tests whether the medium is back). Corrupt blocks are counted separately; too many
    *stop* the breaker until it is reset.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 5
"""Failures in a row that open a breaker."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
CORRUPT_LIMIT = 8
"""Corrupt blocks among the last `CORRUPT_WINDOW` that stop it."""
CORRUPT_WINDOW = 64
_WINDOW_MASK = (1 << CORRUPT_WINDOW) - 1


class Breaker:
    """A switch that allows calls while the medium answers.

    Notes
    -----
    Thread-safety: callers serialise. Complexity: O(1) per call.
    """

    closed: bool  # whether all calls are allowed

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Close the breaker and clear all counts."""
        self._failures = 0
        self._pause_s = 0.0  # of the present opening; 0: closed
        self._retry_at = 0.0
        self._probing = False
        self._stopped = False
        self.closed = True
        self._window = 0  # one bit per block that was read, the latest lowest; 1: corrupt

    @property
    def state(self) -> str:
        """``"closed"``, ``"open"``, ``"probing"`` or ``"stopped"``."""
        if self._stopped:
            return "stopped"
        if not self._pause_s:
            return "closed"
        return "probing" if self._probing else "open"

    def would_allow(self) -> bool:
        """Return whether `allow` would allow a call now."""
        if self.closed:
            return True
        return not self._stopped and not self._probing and self._clock() >= self._retry_at

    def allow(self) -> bool:
        """Return whether a call is allowed; a probe excludes all others until it has ended."""
        allowed = self.would_allow()
        if allowed and not self.closed:
            self._probing = True
        return allowed

    def succeed(self) -> None:
        """Count a call that the medium answered."""
        self._failures = 0
        self._pause_s = 0.0
        self._probing = False
        self.closed = not self._stopped

    def fail(self) -> None:
        """Count a call that the medium did not answer, or answered with an error."""
        self._failures += 1
        if self._probing or (not self._pause_s and self._failures >= FAILURES):
            self._open()

    def trip(self) -> None:
        """Open at once, as after a call that holds memory and does not return."""
        if self._probing or not self._pause_s:
            self._open()

    def withdraw(self) -> None:
        """Take back a call that was allowed and never reached the medium."""
        self._probing = False

    def count_corrupt(self, corrupt: int, sound: int) -> None:
        """Count blocks that were read."""
        if corrupt or self._window:
            sound, corrupt = min(sound, CORRUPT_WINDOW), min(corrupt, CORRUPT_WINDOW)
            window = self._window << sound << corrupt | (1 << corrupt) - 1
            self._window = window & _WINDOW_MASK
        if self._window.bit_count() >= CORRUPT_LIMIT:
            self._stopped = True
            self.closed = False

    def _open(self) -> None:
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        self.closed = False
        self._retry_at = self._clock() + self._pause_s
        self._probing = False
