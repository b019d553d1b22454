"""The ``kvoffload`` command: one file per command; the console script calls `main`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvoffload._interrupts import INTERRUPTED

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        0; 1 for data that cannot be read or written; 2 for wrong usage or a missing extra; 128 plus
        the number of the signal that ended it: 130 for Ctrl-C, 141 if the reader of a pipe is gone,
        143 for SIGTERM.
    """
    try:
        from ._streams import standard_streams

        with standard_streams():
            return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # while modules were still being imported
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    from kvoffload._extras import require
    from kvoffload.errors import MissingExtraError

    try:
        require("click", "the command")
        from ._app import run
    except MissingExtraError as error:
        sys.stderr.write(f"kvoffload: {error}\n")
        return 2
    return run(arguments)
