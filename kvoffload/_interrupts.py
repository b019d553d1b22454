"""Ctrl-C while the command imports its modules.

Importing takes some tenths of a second, during which an interrupt would print the traceback of an
import. There is nothing to clean up yet, so the process ends at once: this is the first module of
the package, and imports only modules that Python has already loaded. A program that imports the
package keeps its own handling of signals.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # without the enumerations of signal
import os
import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 and the number of SIGINT."""


def raise_again() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` from now on, instead of ending the process at once."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _is_command() -> bool:
    """Return whether ``kvoffload`` or ``python -m kvoffload`` was called.

    ``sys.argv[0]`` is not yet the file of the module; a worker process of the command has the
    command's arguments in ``sys.argv``, and its own in ``sys.orig_argv``.
    """
    arguments = getattr(sys, "argv", [])
    if not 0 < len(arguments) <= len(sys.orig_argv):
        return False
    called = sys.orig_argv[-len(arguments)].removeprefix("-m")
    return os.path.splitext(os.path.basename(called))[0] == "kvoffload"  # noqa: PTH119, PTH122


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


if _is_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end)
