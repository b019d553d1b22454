"""An answer: advice with its context, as the command prints it and the page shows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from kvoffload._printable import printable

from .comparison import Comparison
from .knee import Knee
from .model_shape import ModelShape
from .setup import Setup
from .units import duration_text
from .wording import Finding, capacity_text

__all__ = [
    "Answer",
    "Column",
    "Curve",
    "Curves",
    "Snippet",
    "Table",
    "TableCell",
    "best",
    "column",
]


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a table: its text, and how a page shows it."""

    text: str
    best: bool = False  # of its column
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


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: shares by memory, None for what was not compared."""

    name: str
    shares: Sequence[float | None]
    is_flat: bool = False  # a ceiling that does not depend on the memory


@dataclass(frozen=True, slots=True)
class Curves:
    """A chart: shares over memory."""

    title: str
    meaning: str  # of a share, a sentence
    memories: Sequence[str]
    asked: int  # index of the memory that is marked
    marked: str  # why
    chosen: str | None  # a line
    lines: Sequence[Curve]
    ceilings: Sequence[Curve] = ()


class Snippet(NamedTuple):
    """Something to paste: its title, its name on a page, and its text."""

    title: str
    name: str
    text: str


def column(title: str, texts: Sequence[str], marked: set[int] | None = None, **more: Any) -> Column:
    """Return a column of texts, of which some are the best."""
    cells = [TableCell(text, index in (marked or ())) for index, text in enumerate(texts)]
    return Column(title, cells, **more)


def best(values: Sequence[float]) -> set[int]:
    """Return the indexes of the greatest values, none where all are equal."""
    if not values or min(values) == max(values):
        return set()
    return {index for index, value in enumerate(values) if value == max(values)}


@dataclass(frozen=True, slots=True)
class Answer(ABC):
    """Advice and its context."""

    FIRST: ClassVar[tuple[str, ...]] = ()
    """Findings shown at the top of a page."""

    trace: str  # its name as given by the user
    advice: Any
    model: ModelShape | None  # None if bytes per token were given
    dtype: str  # element type of the model's KV cache
    command: str  # as it was typed
    block_tokens_from: str = "lengths"  # or ``"trace"``, or ``"option"`` if neither tells
    assumed_text: str | None = None  # what was assumed when the trace was read, in words
    breaks_text: str | None = None  # what breaks the prefixes of its prompts, in words
    hints_text: str | None = None  # what clients say of their sessions, in words
    knee: Knee | None = None  # None if the memory was given
    since: Comparison | None = None  # comparison with earlier advice

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    @property
    def setup(self) -> Setup:
        """The question."""
        setup: Setup = self.advice.setup
        return setup

    @property
    @abstractmethod
    def heading(self) -> str:
        """The heading of a page."""

    @property
    @abstractmethod
    def is_recommended(self) -> bool:
        """Whether there is a recommendation."""

    @abstractmethod
    def headline(self) -> str:
        """Return the verdict in a sentence or two."""

    def findings(self) -> list[Finding]:
        """Return the findings: changes, the knee and what breaks prefixes come first."""
        found = []
        if self.since is not None:
            found.append(Finding("Changes", f"{self.since}"))
        if self.knee is not None:
            found.append(Finding("Capacity", capacity_text(self.knee, self.setup)))
        if self.breaks_text is not None:
            found.append(Finding("Prefixes", f"Broken by {self.breaks_text}"))
        return [*found, *self.own_findings()]

    @abstractmethod
    def own_findings(self) -> list[Finding]:
        """Return the findings on what is recommended."""

    def trace_text(self) -> str:
        """Return a description of the trace."""
        facts, setup = self.advice.facts, self.setup
        believed = " (as given; the trace has no lengths)" * (self.block_tokens_from == "option")
        span, full = "", ""
        if not setup.engines:
            span = f" in {duration_text(facts.seconds)}" if facts.seconds else ""
            full = "full " * setup.full_blocks
        return (
            f"{facts.requests:,} requests{span}, {facts.blocks:,} {full}blocks of "
            f"{setup.block_tokens:,} tokens{believed}, {facts.unique_blocks:,} of them distinct"
            + ("" if self.assumed_text is None else f"; {self.assumed_text}")
        )

    @property
    def model_text(self) -> str:
        """The model and its element type before a size, if the model is known."""
        return "" if self.model is None else f"{self.model.name}, {self.dtype}: "

    @abstractmethod
    def memory_text(self) -> str:
        """Return the bytes per block or slot, and how much of the trace the memory holds."""

    @abstractmethod
    def curves(self) -> Curves:
        """Return the chart."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Return the tables."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """Return the assumptions behind the figures."""

    @abstractmethod
    def snippets(self) -> list[Snippet]:
        """Return the configuration to paste; empty without a recommendation."""

    def meanings(self) -> list[tuple[str, str]]:
        """Return an explanation of each row of the first table that needs one."""
        return []
