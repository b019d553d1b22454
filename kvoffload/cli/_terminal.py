"""What the commands print: progress and notes on standard error, tables and JSON on output."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

REFRESH_SECONDS = 0.1


def print_json(value: object) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, indent=2))


def note(message: str, *, quiet: bool) -> None:
    """Print a line on standard error unless the user wants quiet."""
    if not quiet:
        click.echo(f"note: {message}", err=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    cells: list[str]
    numeric: bool = True


def print_tables(title: str, leading: list[Column], groups: list[list[Column]]) -> None:
    """Print a title and a table, cut into several below each other where it is too wide for one.

    A terminal, or ``COLUMNS``, sets the width; a file or a pipe is as wide as the table.

    Parameters
    ----------
    title : str
        Printed above, never wrapped.
    leading : list of Column
        The columns that every table starts with.
    groups : list of list of Column
        The others; the table is cut between groups, within one only where it alone is too wide.
    """
    console = Console(highlight=False)
    unbounded = console.options.update(width=10_000)

    def width(some: list[Column]) -> int:
        return console.measure(_table(some), options=unbounded).maximum

    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = width([*leading, *itertools.chain(*groups)])
    tables = [[*leading]]
    for group in groups:
        fitting = [group] if width([*leading, *group]) <= console.width else [[c] for c in group]
        for part in fitting:
            if len(tables[-1]) > len(leading) and width([*tables[-1], *part]) > console.width:
                tables.append([*leading])
            tables[-1] += part
    console.print(title, markup=False, soft_wrap=True)
    for table in tables:
        console.print()
        console.print(_table(table))


def _table(columns: list[Column]) -> Table:
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
        table.add_row(*map(Text, cells))
    return table


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, *, quiet: bool, unit: str = "requests"
) -> Iterator[Callable[[int], None] | None]:
    """Give a function that shows how many units are done; None where no bar is wanted.

    The bar is drawn by that function, not by a thread that would run into what is being timed.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(description, total=total)
        drawn = 0.0

        def show(done: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= REFRESH_SECONDS:
                drawn = now
                progress.update(task, completed=done, refresh=True)

        yield show
