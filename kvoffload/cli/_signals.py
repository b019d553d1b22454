"""Signals that end the command, as exceptions, so that nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["EndedBySignal", "ending_by_signals"]


class EndedBySignal(BaseException):
    """A signal that asks the process to end; its number is the argument."""


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """Raise `EndedBySignal` for SIGTERM and SIGHUP, unless someone has other plans for them."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                handlers[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise EndedBySignal(number)
