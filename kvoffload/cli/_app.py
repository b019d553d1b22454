"""The command's root: its subcommands, and what becomes of errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from kvoffload import IMPLEMENTATION, __version__
from kvoffload.traces import MissingExtraError, TraceError

from .advise import advise
from .convert import convert
from .generate import generate
from .info import info
from .replay import replay
from .sweep import sweep
from .tier import tier

DATA_ERROR = 1
USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT


class _Root(click.Group):
    """A group that lets a closed pipe and Ctrl-C end the command without a word."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            ctx.exit(0)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        return result


@click.group(
    cls=_Root,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message=f"%(prog)s %(version)s ({IMPLEMENTATION})")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Replay request traces through the cache managers of KV-cache offloading."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(USAGE_ERROR)


for command in (replay, sweep, advise, info, generate, convert, tier):
    root.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; errors are one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name need not be text in any encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        code = root.main(list(arguments), prog_name="kvoffload", standalone_mode=False)
    except click.ClickException as error:
        return _fail(" ".join(error.format_message().split()), USAGE_ERROR)
    except MissingExtraError as error:
        return _fail(str(error), USAGE_ERROR)
    except TraceError as error:
        return _fail(str(error), DATA_ERROR)
    except OSError as error:
        place = "" if error.filename is None else f"{os.fspath(error.filename)}: "
        return _fail(f"{place}{error.strerror or error}", DATA_ERROR)
    except MemoryError:
        return _fail("there is not enough memory for this", DATA_ERROR)
    except click.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"kvoffload: {message}", err=True)
    return code


def _drop_output() -> None:
    """Point standard output at nothing, so that the interpreter's last flush succeeds."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
