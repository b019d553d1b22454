"""The command's root: its subcommands, and how errors are reported."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

import kvoffload
from kvoffload import IMPLEMENTATION, PolicyError, __version__
from kvoffload._interrupts import INTERRUPTED
from kvoffload._printable import printable
from kvoffload.errors import MissingExtraError

from ._group import SUMMARIES, RootGroup

DATA_ERROR = 1
USAGE_ERROR = 2
BY_SIGNAL = 128  # plus its number, as in shells
NO_READER = BY_SIGNAL + 13  # SIGPIPE, which ends other commands
COMPLETION = "_KVOFFLOAD_COMPLETE"  # set by a shell that asks click for completions


INSTEAD = {
    "--capacities": "it is called --capacity",
    "--columns": "it is called --fields",
    "--device-blocks": "it is called --device-memory",
    "--memory": "it is called --capacity, where a number without a unit means blocks",
    "--policies": "it is called --policy",
    "--processes": "it is called --jobs",
    "--router-config": "the page 'Configure the router of a stack' has the settings",
    "forget": "kvoffload tier delete PATH --all deletes blocks",
}
"""Options and commands of earlier versions, and the replacement of each."""


@click.group(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=f"%(prog)s %(version)s ({IMPLEMENTATION})")
def root() -> None:
    """Replay request traces through the cache managers of KV-cache offloading."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status; errors are one line on standard error."""
    try:
        with _ended_by_signals():
            code = _invoke(arguments)
            sys.stdout.flush()
            return code
    except (KeyboardInterrupt, click.Abort):  # Ctrl-C, also at a question
        return INTERRUPTED
    except SystemExit as end:  # a signal, or click's completion
        return int(end.code or 0)
    except click.ClickException as error:
        return _fail(_explained(error, arguments), USAGE_ERROR)
    except (MissingExtraError, PolicyError) as error:  # or a user's policy is at fault
        return _fail(str(error), USAGE_ERROR)
    except OSError as error:
        if _is_of_own_policy(error):
            raise
        if isinstance(error, BrokenPipeError):
            return NO_READER
        location = "" if error.filename is None else f"{os.fspath(error.filename)}: "
        return _fail(f"{location}{error.strerror or error}", DATA_ERROR)
    except MemoryError:
        return _fail("there is not enough memory for this", DATA_ERROR)
    except ValueError as error:
        from kvoffload.traces import TraceError  # a help text needs no reader

        if isinstance(error, TraceError):
            return _fail(str(error), DATA_ERROR)
        raise


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, which otherwise would end the process at once.

    No temporary file and no process is left behind; click handles only SIGINT. A signal that is
    ignored or handled by the caller stays so.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            signum = getattr(signal, name, None)  # Windows has no SIGHUP
            if signum is not None and signal.getsignal(signum) is signal.SIG_DFL:
                handlers[signum] = signal.signal(signum, _exit)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _exit(signum: int, _frame: FrameType | None) -> None:
    sys.exit(BY_SIGNAL + signum)


def _invoke(arguments: Sequence[str]) -> int:
    """Invoke the command as `click.Command.main` does, but leave all errors to the caller."""
    if COMPLETION in os.environ:
        root.main(list(arguments), prog_name="kvoffload")
    try:
        with root.make_context("kvoffload", list(arguments), obj=list(arguments)) as context:
            root.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0


def _explained(error: click.ClickException, arguments: Sequence[str]) -> str:
    """Return the text of an error on one line, with what to write instead if that is known."""
    text = " ".join(error.format_message().split())
    name = getattr(error, "option_name", None) or getattr(error, "command_name", None)
    hint = INSTEAD.get(name or "")
    if hint is None and isinstance(error, click.NoSuchOption):
        with click.Context(root) as context:
            commands = [root.get_command(context, command) for command in SUMMARIES]
        have = [str(one.name) for one in commands if one and _option(one, name)]
        hint = f"it is an option of {', '.join(have)}" if have else None
    command = root.commands.get(arguments[0]) if arguments else None
    if command and isinstance(error, click.BadOptionUsage) and "requires" in error.message:
        hint = getattr(_option(command, name), "metavar", None)
    return f"{error.message.removesuffix('.')}: {hint}." if hint else text


def _option(command: click.Command, name: str | None) -> click.Parameter | None:
    return next((option for option in command.params if name in option.opts), None)


def _is_of_own_policy(error: OSError) -> bool:
    """Return whether a user's policy raised an error, here or in a process of ``--jobs``.

    From another process, only the traceback's text is available.
    """
    from kvoffload.replay import policies as making

    text = "".join(traceback.format_exception(error))
    managers = Path(kvoffload.__file__).with_name("managers")
    return f'"{managers}{os.sep}' in text or f'"{making.__file__}"' in text


def _fail(message: str, code: int) -> int:
    click.echo(f"kvoffload: {printable(message)}", err=True)
    return code
