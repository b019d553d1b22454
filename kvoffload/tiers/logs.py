"""The log of tiers.

A handler of the application may raise. Tiers log in threads that have jobs, and between two steps
of a `forget`: the exception would end the thread or keep the second step from being taken.
"""

from __future__ import annotations

import contextlib
import logging

__all__ = ["write_line"]

log = logging.getLogger("kvoffload.tiers")


def write_line(level: int, message: str, *arguments: object) -> None:
    """Log a line, and drop what a handler raises.

    Parameters
    ----------
    level : int
        A level of `logging`.
    message : str
        The line, with places for the arguments, as `logging.Logger.log` takes it.
    *arguments : object
        What belongs in these places.
    """
    with contextlib.suppress(Exception):
        log.log(level, message, *arguments, stacklevel=2)
