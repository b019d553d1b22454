"""Output of the commands: notes and progress on standard error, tables and JSON on output."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvoffload._printable import printable
from kvoffload.advise.answer import Column
from kvoffload.advise.units import NO_BREAK_SPACE, duration_text, unbroken

_QUIET = f"{__name__}.quiet"
REFRESH_SECONDS = 0.1
LINE_SECONDS = 10.0
WIDEST_PROSE = 100
"""Widest line of text, columns, however wide the terminal is."""

Item = TypeVar("Item")


def print_json(value: object) -> None:
    """Print one JSON object; numbers that JSON lacks, such as infinity, become null."""
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_quiet(context: click.Context, _parameter: click.Parameter, quiet: bool) -> None:
    """Remember ``--quiet``: a callback of click."""
    context.meta[_QUIET] = quiet


def is_quiet() -> bool:
    """Return whether the user wants neither notes nor progress, or where there is no command."""
    context = click.get_current_context(silent=True)
    return context is None or context.meta.get(_QUIET, False)


def note(message: str) -> None:
    """Print a line on standard error unless the user wants quiet."""
    if not is_quiet():
        click.echo(f"note: {printable(message)}", err=True)


def bad_lines_text(count: int) -> str:
    """Return how many bad lines were skipped, in words; an empty text for none."""
    return f"{count:,} bad line{'s' * (count > 1)} skipped" if count else ""


def note_bad_lines(count: int) -> None:
    """Print how many bad lines were skipped, if any."""
    if count:
        note(bad_lines_text(count))


def csv_text(objects: Iterable[Mapping[str, object]]) -> str:
    """Return a heading and one line per object without its lists; unknown values are empty."""
    rows = [
        {name: value for name, value in one.items() if not isinstance(value, list)}
        for one in objects
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def print_prose(text: str, indent: str = "") -> None:
    """Print a text filled to the width, with all lines but the first indented.

    A terminal, or ``COLUMNS``, sets the width, up to `WIDEST_PROSE`; otherwise it is 80.
    """
    click.echo(_filled(text, min(WIDEST_PROSE, _console().width), indent))


def _filled(text: str, width: int, indent: str = "") -> str:
    lines = textwrap.fill(
        unbroken(text),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(NO_BREAK_SPACE, " ")


def print_tables(
    title: Sequence[str], leading: Sequence[Column], groups: Sequence[Sequence[Column]]
) -> None:
    """Print a title and a table, split into several, one below the other, if it is too wide.

    A terminal, or ``COLUMNS``, sets the width; a file or a pipe is as wide as the table. Control
    characters, as in a file name, are escaped. The lines of the title are wrapped between words if
    a terminal is narrower. Every table starts with the columns of `leading`; the others are split
    between groups, and within a group only if it is too wide.
    """
    console = _console()
    unbounded = console.options.update(width=10_000)

    def width(some: Sequence[Column]) -> int:
        return console.measure(_table(some), options=unbounded).maximum

    is_bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").strip("0").isdecimal()
    if not is_bounded:
        console.width = width([*leading, *itertools.chain(*groups)])
    tables = [[*leading]]
    for group in groups:
        fitting = [group] if width([*leading, *group]) <= console.width else [[c] for c in group]
        for part in fitting:
            if len(tables[-1]) > len(leading) and width([*tables[-1], *part]) > console.width:
                tables.append([*leading])
            tables[-1] += part
    for line in title:
        text = printable(line)
        if is_bounded and len(text) > console.width:
            text = _filled(text, console.width)
        click.echo(text)
    for table in tables:
        with console.capture() as captured:  # rich itself exits at a closed pipe
            console.print(_table(table))
        click.echo(f"\n{captured.get()}", nl=False)


def _console(*, stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.width:  # COLUMNS=0
        console.width = 80
    return console


def _table(columns: Sequence[Column]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        show_header=any(column.title for column in columns),
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        table.add_column(Text(column.title), justify=justify, vertical="bottom", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        texts = (f"{cell.text} *" if cell.enough else cell.text for cell in cells)
        table.add_row(*(Text(printable(text)) for text in texts))
    return table


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, unit: str = "requests"
) -> Iterator[Callable[[int], None] | None]:
    """Provide a function that shows how many units are done; None if that is not wanted.

    It draws a bar on a terminal, and else prints a line every `LINE_SECONDS`. It does so itself: a
    separate thread would disturb the timings. Only more than before is shown.
    """
    console = _console(stderr=True)
    if is_quiet():
        yield None
        return
    if not console.is_terminal or console.is_dumb_terminal:
        yield _in_lines(description, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(description, total=total)

        def draw(done: int) -> None:
            progress.update(task, completed=done, refresh=True)

        yield _now_and_then(draw, REFRESH_SECONDS, 0.0)


def _in_lines(description: str, total: int | None, unit: str) -> Callable[[int], None]:
    """Return a function that prints how many units are done, now and then."""
    start = time.monotonic()

    def write(done: int) -> None:
        if total:
            left = duration_text((time.monotonic() - start) * max(0, total - done) / done)
            text = f"{description} {min(done / total, 1) * 100:.0f} %, about {left} left"
        else:
            text = f"{description}: {done:,} {unit}"
        click.echo(printable(text), err=True)

    return _now_and_then(write, LINE_SECONDS, start)


def _now_and_then(
    show: Callable[[int], None], seconds: float, shown: float
) -> Callable[[int], None]:
    """Return a function that shows more than before, at intervals since it was `shown`."""
    most = 0

    def heard(done: int) -> None:
        nonlocal shown, most
        now = time.monotonic()
        if now - shown >= seconds and done > most:
            shown, most = now, done
            show(done)

    return heard


def counted(
    items: Iterable[Item], progress: Callable[[int], object] | None, every: int = 1
) -> Iterator[Item]:
    """Yield items, and report their number after each `every` of them."""
    for count, item in enumerate(items, start=1):
        yield item
        if progress is not None and count % every == 0:
            progress(count)
