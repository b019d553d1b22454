"""Tables and snippets of an advice, as the command prints them and the page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a table: its text, and how a page shows it."""

    text: str
    best: bool = False  # reads as the best of its column
    shade: int | None = None  # of a heat map, 0 to 10
    enough: bool = False  # what is recommended
    bar: float | None = None  # a length, of 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; a line of its title may end where there is a line break."""

    title: str
    cells: Sequence[TableCell]
    first: bool = False  # shown on the narrowest screens, too
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the names of its rows, and groups of columns that stay together."""

    heading: str  # on a page
    title: str
    name: str  # of what the rows are
    rows: Sequence[str]
    groups: Sequence[Sequence[Column]]
    chosen: str | None = None  # a row
    kind: str = ""  # its class on a page: "heat", "bars", "plain", or none
    is_detail: bool = False


class Snippet(NamedTuple):
    """Something to paste: its title, its name on a page, and its text."""

    title: str
    name: str
    text: str


def column(title: str, texts: Sequence[str], values: Sequence[float] = (), **more: Any) -> Column:
    """Return a column of texts, the first of them of values, of which the greatest is the best.

    Texts that read alike are equally good; if all of the values do, none is the best.
    """
    shown = texts[: len(values)]
    best = shown[values.index(max(values))] if len({*shown}) > 1 else None
    marked = [text == best for text in shown] + [False] * (len(texts) - len(shown))
    cells = [TableCell(text, mark) for text, mark in zip(texts, marked, strict=True)]
    return Column(title, cells, **more)
