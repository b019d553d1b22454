"""Layout of the charts of a report: hit ratio over memory, over time and per request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .advice import Advice
from .axes import apart, ratio_text, ratio_ticks
from .details import Details
from .units import bytes_text, count_text, percent_text, rate_text

__all__ = ["Bars", "Chart", "Line", "Point", "Strip", "Tick", "bars", "chart", "strip"]


NAME_OFFSET = 17
"""User units between the plot and the names beside it."""

NAME_UNITS = 8.8
"""Greatest average width of a character of a name in bold, user units."""

NAME_MARGIN = 122
"""User units behind the plot, for the names of the built-in policies."""


@dataclass(frozen=True, slots=True)
class Point:
    """A mark on a line: its position, its column of marks, and its text."""

    x: float
    y: float
    column: int
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A policy, or a ceiling."""

    name: str  # the label at its end
    kind: str  # ``"chosen"``, ``"policy"`` or ``"ceiling"``
    color: int  # number of its colour
    points: list[Point]  # its marks, least memory first
    label_y: float  # position of the label, such that no two overlap

    @property
    def path(self) -> str:
        """The line as points of an SVG polyline."""
        return " ".join(f"{point.x:g},{point.y:g}" for point in self.points)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of `width` by `height` units whose plot lies between the four edges."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    asked: float
    lines: list[Line]


def chart(advice: Advice, *, width: int, height: int, label_height: int) -> Chart:
    """Lay out the chart, in user units; wider where a name takes more than the built-in policies'.

    `label_height` is the distance between two names at the lines' ends.
    """
    left, right, top, bottom = 48, width - NAME_MARGIN, 16, height - 44
    longest = max(map(len, advice.setup.replayed))
    width = right + max(NAME_MARGIN, math.ceil(NAME_OFFSET + NAME_UNITS * longest))
    ratios = [cell.hit_ratio for cell in advice.cells.values()]
    ceilings = [ratio for ratio in advice.ceilings if ratio is not None]
    highest = max([*ratios, *ceilings, advice.unbounded])
    ticks = ratio_ticks(highest)

    def y(ratio: float) -> float:
        return round(bottom - (bottom - top) * ratio / ticks[-1], 1)

    last = max(1, len(advice.memories) - 1)

    def x(column: int) -> float:
        return round(left + (right - left) * column / last, 1)

    memories = [bytes_text(memory) for memory in advice.memories]
    columns = range(len(memories))

    def line(name: str, kind: str, color: int, ratios: list[float], texts: list[str]) -> Line:
        marks = zip(ratios, texts, strict=True)
        points = [Point(x(n), y(ratio), n, text) for n, (ratio, text) in enumerate(marks)]
        return Line(name, kind, color, points, 0.0)

    lines = [
        line(
            policy,
            "chosen" if policy == advice.policy else "policy",
            color,
            [advice.cell(policy, column).hit_ratio for column in columns],
            [_cell_text(advice, policy, column) for column in columns],
        )
        for color, policy in enumerate(advice.setup.replayed)
    ]
    without = f"without bounds a cache would hit {percent_text(advice.unbounded)}"
    everything = [advice.unbounded] * len(memories)
    lines.append(line("infinite", "ceiling", 1, everything, [without] * len(memories)))
    if ceilings:
        best = [
            f"{memory}: no policy can hit more than {percent_text(ratio)}"
            for memory, ratio in zip(memories, ceilings, strict=True)
        ]
        lines.append(line("belady", "ceiling", 0, ceilings, best))
    lines = _with_labels(lines, top, bottom, label_height)
    # the last drawn is on top
    lines.sort(key=lambda line: ("ceiling", "policy", "chosen").index(line.kind))
    x_ticks = [Tick(x(column), text) for column, text in enumerate(memories)]
    y_ticks = [Tick(y(ratio), ratio_text(ratio)) for ratio in ticks]
    asked = x(advice.memory_index)
    return Chart(width, height, left, right, top, bottom, x_ticks, y_ticks, asked, lines)


def _cell_text(advice: Advice, policy: str, index: int) -> str:
    cell = advice.cell(policy, index)
    text = (
        f"{policy}, {bytes_text(advice.memories[index])}: {percent_text(cell.hit_ratio)} hit, "
        f"{count_text(cell.saved_tokens)} prefill tokens saved"
    )
    if cell.store_rate is None:
        return text
    return f"{text}, {rate_text(cell.store_rate)} to host and {rate_text(cell.load_rate)} from it"


def _with_labels(lines: list[Line], top: int, bottom: int, height: int) -> list[Line]:
    """Return the lines with labels placed near their ends, without overlap."""
    order = sorted(range(len(lines)), key=lambda n: (lines[n].points[-1].y, lines[n].kind))
    positions = apart([lines[index].points[-1].y for index in order], height, top, bottom)
    at = dict(zip(order, positions, strict=True))
    return [replace(line, label_y=round(at[index], 1)) for index, line in enumerate(lines)]


@dataclass(frozen=True, slots=True)
class Strip:
    """A small drawing of hit ratios over the requests of a trace, a line per policy."""

    width: int
    height: int
    left: int
    bottom: int
    y_ticks: list[Tick]
    lines: list[tuple[str, int, str]]


def strip(advice: Advice, found: Details, *, width: int, height: int) -> Strip:
    """Lay out hits over time: name, number of its colour and points of each line."""
    left, right, top, bottom = 48, width - 8, 12, height - 28
    highest = max((max(p.over_time, default=0.0) for p in found.policies), default=0.0)
    ticks = ratio_ticks(highest, most=3)

    def y(ratio: float) -> float:
        return round(bottom - (bottom - top) * ratio / ticks[-1], 1)

    lines = []
    for policy in found.policies:
        color = advice.setup.replayed.index(policy.policy)
        last = max(1, len(policy.over_time) - 1)
        points = " ".join(
            f"{round(left + (right - left) * n / last, 1):g},{y(ratio):g}"
            for n, ratio in enumerate(policy.over_time)
        )
        lines.append((policy.policy, color % 8, points))
    marks = [Tick(y(ratio), ratio_text(ratio)) for ratio in ticks]
    return Strip(width, height, left, bottom, marks, lines)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, position, length, text and colour."""

    label: str
    y: float
    length: float
    text: str
    color: int


@dataclass(frozen=True, slots=True)
class Bars:
    """A small drawing of the requests by the share of their blocks that is hit."""

    width: int
    height: int
    left: int
    bars: list[Bar]


_CLASSES = (("none", 0, 1), ("up to half", 1, 6), ("more than half", 6, 11), ("all", 11, 12))


def bars(advice: Advice, found: Details, *, width: int, row: int) -> Bars:
    """Lay out the distribution of requests by the share of their blocks that is hit."""
    left, right = 104, width - 56
    drawn = []
    y = 4.0
    for label, first, last in _CLASSES:
        for index, policy in enumerate(found.policies):
            whole = sum(policy.requests_by_share) or 1
            share = sum(policy.requests_by_share[first:last]) / whole
            length = round((right - left) * share, 1)
            name = label if index == 0 else ""
            color = advice.setup.replayed.index(policy.policy)
            drawn.append(Bar(name, y, length, f"{share * 100:.1f} %", color % 8))
            y += row
        y += 6
    return Bars(width, int(y), left, drawn)
