"""Pictures: hit ratios over a logarithmic scale, each line with its name at its end."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvoffload._printable import printable
from kvoffload.advise.axes import apart, ratio_text, ratio_ticks
from kvoffload.advise.units import bytes_text
from kvoffload.replay.offline import CEILINGS
from kvoffload.traces.outputs import open_output
from kvoffload.traces.returns import KeptCounter

from ._fleet_result import Fleets
from .sweep import Swept

# Okabe & Ito's colours, which differ for colour-blind readers and in print, without the yellow that
# is invisible on white; markers distinguish lines of the same colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C1E", "#444444")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
CEILING_COLOUR = "#888888"
LABEL_COLOUR = "#222222"  # the lines' lighter colours could not be read as text
FIGURE_INCHES = (6.6, 4.6)  # the axes take the share AXES; titles and labels around them are added
AXES = (0.1, 0.1, 0.7, 0.8)
FONT_POINTS = 10  # about 7 pixels if the picture is as wide as a phone
LABEL_STEP = 1.25 * FONT_POINTS / (72 * FIGURE_INCHES[1] * AXES[3])  # of labels, share of height
LABEL_X = 1.035  # where labels begin, share of the width
MARGIN_INCHES = 0.12  # around the drawing
TITLE_CHARACTERS = 76  # of a line of the title


@dataclass(frozen=True, slots=True)
class _Line:
    """A line, with its name at its end; without a name if it is the only one."""

    name: str | None
    x: Sequence[float]
    y: Sequence[float]
    style: dict[str, Any]


def draw(view: Swept, path: str) -> None:
    """Draw a sweep into a file, in the format that its name ends in; an OSError names the file."""
    lines, index = [], 0
    for policy in view.policies:
        rows = sorted(view.of(policy), key=lambda row: row.configuration.host)
        if policy in CEILINGS:
            line = ":" if policy == "infinite" else "--"
            style: dict[str, Any] = {"color": CEILING_COLOUR, "linestyle": line, "zorder": 1}
        else:
            style = {**look(index), "markersize": 4.5, "zorder": 3}
            index += 1
        x = [row.configuration.host for row in rows]
        lines.append(_Line(policy, x, [row.result.hit_ratio for row in rows], style))
    size = view.first.block_bytes or None

    def set_x(axes: Any) -> None:
        axes.set_xlabel(f"capacity, {view.first.groups.slot_name}s")
        _set_sizes(axes, sorted(set(view.sizes.values())), size)

    _draw(path, lines, _title(view), set_x, above=10 if size is None else 42)


def draw_kept(name: str, kept: KeptCounter, path: str) -> None:
    """Draw the hit ratio over the time for which blocks are kept; an OSError names the file."""
    minutes = [seconds / 60 for seconds in kept.seconds]

    def set_x(axes: Any) -> None:
        axes.set_xlabel("minutes for which a block is kept after its last use")
        axes.set_xticks(minutes, [f"{value:g}" for value in minutes])
        axes.xaxis.set_minor_locator(NullLocator())

    line = _Line(None, minutes, kept.ratios, {**look(0), "markersize": 4.5})
    _draw(path, [line], [printable(Path(name).name)], set_x)


def draw_fleets(view: Fleets, path: str) -> None:
    """Draw the tokens that fleets hit over the memory of all their engines, a line per router."""
    points: dict[str, list[tuple[int, float]]] = {}
    fleets = [row.configuration for row in view.rows]
    several = {
        name: len({getattr(fleet, name) for fleet in fleets}) > 1
        for name in ("router", "policy", "tier")
    }
    for row in view.rows:
        fleet = row.configuration
        words = [fleet.router if several["router"] or not several["policy"] else ""]
        words += [fleet.policy if several["policy"] else ""]
        words += [(row.tier or "no tier") if several["tier"] else ""]
        point = fleet.engines * fleet.host, row.result.token_hit_ratio or 0.0
        points.setdefault(" ".join(filter(None, words)), []).append(point)
    lines = []
    for index, (name, some) in enumerate(points.items()):
        x, y = zip(*sorted(some), strict=True)
        lines.append(_Line(name, x, y, {**look(index), "markersize": 4.5}))

    def set_x(axes: Any) -> None:
        axes.set_xlabel("host memory of all engines, blocks")
        _set_sizes(axes, sorted({x for line in lines for x in line.x}))

    engines = ", ".join(f"{one}" for one in sorted({fleet.engines for fleet in fleets}))
    title = f"{printable(Path(view.read.source.name).name)}; engines: {engines}"
    _draw(path, lines, [title], set_x, share="share of prompt tokens hit")


def _draw(
    path: str,
    lines: Sequence[_Line],
    title: Sequence[str],
    set_x: Callable[[Any], None],
    *,
    share: str = "hit ratio",
    above: int = 10,
) -> None:
    """Draw lines over a logarithmic axis that `set_x` labels, under a title `above` the axes.

    The picture grows around axes of fixed size, so that no label is cut off.
    """
    form = path.rpartition(".")[2].lower()
    picture = io.BytesIO()
    with warnings.catch_warnings(), mpl.rc_context(_SETTINGS):
        warnings.simplefilter("ignore")  # a character of a name may be in no font
        figure = Figure(figsize=FIGURE_INCHES)
        axes = figure.add_axes(AXES)
        for line in lines:
            axes.plot(line.x, line.y, linewidth=1.4, **line.style)
        axes.set_xscale("log")
        set_x(axes)
        _set_ratios(axes, max(max(line.y) for line in lines), share)
        named = [(line.name, line.y[-1], line.style) for line in lines if line.name is not None]
        if named:
            _label_ends(axes, named)
        wrapped = [part for text in title for part in textwrap.wrap(text, TITLE_CHARACTERS)]
        axes.annotate(
            "\n".join(wrapped),
            (0, 1),
            xytext=(0, above),
            xycoords="axes fraction",
            textcoords="offset points",
            va="bottom",
            annotation_clip=False,
            parse_math=False,
        )
        figure.savefig(
            picture,
            format=form,
            dpi=160,
            bbox_inches="tight",
            pad_inches=MARGIN_INCHES,
            metadata={_DATE[form]: None} if form in _DATE else None,
        )
    with open_output(path) as file:
        file.write(picture.getvalue())


_SETTINGS: Any = {"font.size": FONT_POINTS, "svg.hashsalt": "kvoffload"}
_DATE = {"svg": "Date", "pdf": "CreationDate"}
"""Metadata that would make two pictures of one sweep differ."""


def look(index: int) -> dict[str, str]:
    """Return the colour and the marker of a policy by its index; 64 differ."""
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}


def _title(view: Swept) -> list[str]:
    one, trace = view.first, view.read.trace
    facts = f"{trace.num_requests:,} requests, {trace.num_blocks:,} blocks, "
    lines = [printable(Path(view.read.source.name).name), f"{facts}{trace.unique_blocks:,} unique"]
    notes = [] if view.read.source.ids_text is None else [view.read.source.ids_text]
    if one.device:
        notes.append(f"behind {one.device:,} {one.groups.slot_name}s on the device")
    if one.pending:
        notes.append(f"stores in flight for {one.pending:,} requests")
    lines += [view.model] if view.model else []
    return [*lines, *(["; ".join(notes)] if notes else [])]


def _set_sizes(axes: Any, sizes: list[float], block_bytes: int | None = None) -> None:
    """Label sizes in blocks; if `block_bytes` is known, also in bytes on a second scale."""
    axes.set_xlim(*_ends(sizes))
    _set_ticks(axes.xaxis, sizes, lambda value: f"{value:,.0f}")
    if block_bytes is not None:
        above = axes.secondary_xaxis(
            "top", functions=(lambda blocks: blocks * block_bytes, lambda size: size / block_bytes)
        )
        above.set_xlabel("capacity, bytes")
        sizes = [blocks * block_bytes for blocks in sizes]
        _set_ticks(above.xaxis, sizes, bytes_text, powers_of_two=True)


def _set_ratios(axes: Any, greatest: float, share: str) -> None:
    """Let the height be shares from 0 to the greatest."""
    ratios = ratio_ticks(greatest, most=8)
    axes.set_ylim(0, ratios[-1] * 1.02)
    axes.set_ylabel(share)
    axes.set_yticks(ratios, [ratio_text(ratio) for ratio in ratios])
    axes.grid(True, color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _set_ticks(axis: Any, sizes: list[float], text: Any, *, powers_of_two: bool = False) -> None:
    """Label 1, 2 and 5 of each decade, or powers of two; the ends where these are too few.

    Over more than three decades, label only 1: there is no room for more.
    """
    least, most = _ends(sizes)
    subs = (1.0, 2.0, 5.0) if most < 1000 * least else (1.0,)
    locator = LogLocator(base=2) if powers_of_two else LogLocator(subs=subs)
    within = [tick for tick in locator.tick_values(least, most) if least <= tick <= most]
    axis.set_major_locator(locator if len(within) > 1 else FixedLocator([sizes[0], sizes[-1]]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())
    if powers_of_two:
        axis.set_minor_locator(NullLocator())


def _ends(sizes: list[float]) -> tuple[float, float]:
    """Return the ends of the scale; for a single capacity, its half and double."""
    more = 1.15 if len(sizes) > 1 else 2
    return sizes[0] / more, sizes[-1] * more


def _label_ends(axes: Any, ends: list[tuple[str, float, dict[str, Any]]]) -> None:
    """Write each line's name beside its end, apart from the others, joined to it by a thin line."""
    to_axes = axes.transData + axes.transAxes.inverted()
    x_end = axes.get_lines()[0].get_xdata()[-1]
    wanted = sorted(
        ((to_axes.transform((x_end, y))[1], policy, style) for policy, y, style in ends),
        key=lambda end: end[0],
    )
    x_line = float(to_axes.transform((x_end, 0))[0])
    # No label above the axes, where the second scale is drawn.
    positions = apart([end[0] for end in wanted], LABEL_STEP, most=1.0)
    for position, (height, policy, style) in zip(positions, wanted, strict=True):
        axes.plot(
            (x_line + 0.008, LABEL_X - 0.004),
            (height, position),
            transform=axes.transAxes,
            color=style["color"],
            linewidth=0.6,
            clip_on=False,
        )
        axes.plot(
            (LABEL_X, LABEL_X + 0.01, LABEL_X + 0.02),
            (position, position, position),
            transform=axes.transAxes,
            **(style | {"markevery": (1, 2)}),
            linewidth=1.4,
            clip_on=False,
        )
        axes.text(
            LABEL_X + 0.028,
            position,
            policy,
            transform=axes.transAxes,
            color=LABEL_COLOUR,
            va="center",
            parse_math=False,
        )
