"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Seconds after which a test calls what has not happened a hang."""


def wait_until(is_so: Callable[[], object], pause_s: float = 0.001) -> None:
    """Wait until a condition holds; fail if it does not in a long time."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(pause_s)
