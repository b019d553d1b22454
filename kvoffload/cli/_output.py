"""Outputs of the commands, checked before the work begins."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import click

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.traces import Request, write_requests
from kvoffload.traces.formats.mooncake import MOONCAKE
from kvoffload.traces.lines import STARTS, STDIN
from kvoffload.traces.oracle_general import ORACLE_GENERAL, is_named_oracle_general
from kvoffload.traces.outputs import check_output, open_output, own_descriptor
from kvoffload.traces.writer import packed_output

from ._options import CommandFunction, bundled, of_text
from ._sources import named_files
from ._streams import check_standard_output, standard_output
from ._terminal import csv_text, is_quiet, print_json

STDOUT = "-"
TRACE = "TRACE"
OF_TRACES = ("--output", "--results")
"""The options whose files may replace a trace or extend lines of JSON: they write such."""
PICTURES = (".png", ".svg", ".pdf")


def output_option(how: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for the file that a command writes instead of standard output."""
    return click.option(
        *("-o", "--output"),
        default=STDOUT,
        metavar="FILE",
        help=f"File to write{how}; standard output by default.",
    )


packed_option = output_option(", compressed if it ends in .gz or .zst")


def check_outputs(
    traces: Sequence[str],
    files: Mapping[str, str | None] | None = None,
    *,
    append: Collection[str] = (),
    prints: bool = True,
) -> None:
    """Check that a command can write `files`, by option, and to standard output if it `prints`.

    Options whose file is appended to are in `append`; `traces` are the inputs as given. If two of
    all these are one file, a usage error is raised before anything is opened, and so if a name is
    an option or trace that an option without a value took. An OSError names a file that cannot be
    written.
    """
    given = {option: name for option, name in (files or {}).items() if name is not None}
    for option, name in given.items():
        if name[:1] in ("", "-"):
            _refuse(option, "must name a file, with ./ before a -", name)
    _check_apart(traces, given, prints=prints)
    if prints:
        check_standard_output()
    for option, name in given.items():
        check_output(name, append=option in append)
        if option not in OF_TRACES and _is_trace(name):
            _refuse(option, "must not replace a trace, JSON or a compressed file", name)


def check_output_option(traces: Sequence[str], output: str, to: str = MOONCAKE.name) -> None:
    """Check the output of a command that writes one trace in a format to `output_option`."""
    if is_named_oracle_general(output) and to != ORACLE_GENERAL:
        raise click.UsageError(
            f"--output must not have a name of {ORACLE_GENERAL} traces for a {to} one, got "
            f"{output!r}: kvoffload convert --to {ORACLE_GENERAL} writes one"
        )
    if output == STDOUT:
        check_outputs(traces)
    else:
        check_outputs(traces, {"--output": output}, prints=False)


def write_output(
    requests: Iterable[Request],
    output: str,
    write: Callable[[Iterable[Request], BinaryIO], object] = write_requests,
    opened: Callable[[str], AbstractContextManager[BinaryIO]] = packed_output,
) -> None:
    """Write requests to a file, or to standard output for ``-``; an OSError names the file."""
    if output == STDOUT:
        write(requests, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    with opened(output) as stream:
        write(requests, stream)


class Result(Protocol):
    """What a command computed, in every form in which it can be asked for."""

    def draw(self, path: str) -> None: ...

    def as_object(self) -> Mapping[str, Any]: ...

    def print(self) -> None: ...


def note_fonts() -> None:
    """Let matplotlib log that it looks for fonts, at its first run, unless the command is quiet."""
    if is_quiet():
        logging.getLogger("matplotlib").setLevel(logging.ERROR)


def write_files(*files: tuple[str | None, Callable[[str], object]]) -> list[OSError]:
    """Write the files that were asked for; return the errors, so that the result is still printed.

    Each file comes with the function that writes it.
    """
    faults: list[OSError] = []
    for path, write in files:
        if path is not None and path != STDOUT:
            try:
                write(path)
            except OSError as error:
                faults.append(error)
    return faults


@dataclass(frozen=True, slots=True)
class Outputs:
    """The forms of its result that a command was asked for; files are None if it has none."""

    as_json: bool
    plot: str | None
    csv: str | None

    def check(self, traces: Sequence[str], results: str | None = None) -> None:
        """Check that they can be written, and the file that `results` are appended to."""
        if self.csv == STDOUT and self.as_json:
            raise click.UsageError("--csv and --json exclude each other, got both")
        csv = None if self.csv == STDOUT else self.csv
        files = {"--plot": self.plot, "--results": results, "--csv": csv}
        check_outputs(traces, files, append=("--results",))
        if self.plot is not None:
            note_fonts()
            require("matplotlib", "--plot", "plot")

    def show(self, result: Result, faults: Sequence[OSError] = ()) -> None:
        """Draw, write and print a result; then raise the first of `faults` and of its own."""

        def write_csv(path: str) -> None:
            with open_output(path) as file:
                file.write(csv_text(result.as_object()["results"]).encode())

        faults = [*faults, *write_files((self.plot, result.draw), (self.csv, write_csv))]
        if self.as_json:
            print_json(result.as_object())
        elif self.csv == STDOUT:
            click.echo(csv_text(result.as_object()["results"]), nl=False)
        else:
            result.print()
        if faults:
            raise faults[0]


in_outputs = bundled("outputs", Outputs)
"""Combines the options ``--json``, ``--plot`` and ``--csv`` of a command: ``outputs``."""


def plot_option(what: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for a file to draw something into."""
    return click.option(
        "--plot",
        **of_text("FILE", read_picture),
        help=f"Draw {what}: {', '.join(PICTURES[:-1])} or {PICTURES[-1]}.",
    )


def csv_option(row: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for a file of values, a line per `row`."""
    return click.option(
        "--csv",
        metavar="FILE|-",
        help=f"Write one line per {row}, comma-separated, to FILE; - prints the lines instead of "
        "the tables.",
    )


def read_picture(text: str) -> str:
    """Read the name of a picture file."""
    if not text.lower().endswith(PICTURES):
        raise ValueError(f"must end in {', '.join(PICTURES)}, got {describe(text)}")
    return text


def _refuse(option: str, rule: str, name: str) -> NoReturn:
    hint = "; - prints it" if option == "--csv" else ""
    raise click.UsageError(f"{option} {rule}, got {name!r}{hint}")


def _is_trace(name: str) -> bool:
    """Return whether a file that would be replaced begins as JSON or compressed data does."""
    if own_descriptor(name) is not None or not Path(name).is_file():
        return False
    with contextlib.suppress(OSError), Path(name).open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf\r\n\t ").startswith((b"{", b"[", *STARTS))
    return False


def _check_apart(traces: Sequence[str], files: Mapping[str, str], *, prints: bool) -> None:
    """Check that no input or output is the same file as another."""
    taken: dict[object, str] = {}  # a file may be read twice; None stands for no file

    def take(identity: object, what: str, shown: str | None) -> None:
        if identity is not None and taken.setdefault(identity, what) != what:
            raise click.UsageError(
                f"{what} must be another file than {taken[identity]}, got {shown!r}"
            )

    for trace in named_files(traces):
        taken.setdefault(_identity(0 if trace == STDIN else trace), TRACE)
    if prints:
        take(_identity(standard_output()), "standard output", " ".join(traces))
    for option, name in files.items():
        identity = _identity(name)
        # output to /dev/stdout comes before the printed result
        if own_descriptor(name) is None or taken.get(identity) == TRACE:
            take(identity, option, name)


def _identity(file: str | int | None) -> object:
    """Return the same value for all names of one file; None if sharing it does no harm."""
    if file is None:
        return None
    try:
        status = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    except (OSError, ValueError):  # missing so far, or opening it will report the reason
        return None if isinstance(file, int) else os.path.realpath(file)
    exclusive = stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFBLK)
    return (status.st_dev, status.st_ino) if exclusive else None
