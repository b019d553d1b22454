"""The picture of a sweep: hit ratio over capacity, each line with its name at its end."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from kvoffload._printable import printable
from kvoffload.replay import CEILINGS
from kvoffload.traces.outputs import open_output

from ._sweep_result import Grid

# Okabe & Ito's colours, which stay apart for colour-blind readers and in print, without the yellow
# that white swallows; markers tell apart what colours do not.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C1E", "#444444")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
CEILING_COLOUR = "#888888"
LABEL_COLOUR = "#222222"  # the lines' lighter colours could not be read as text
LABEL_STEP = 0.042  # least distance of two labels, share of the height
LABEL_PLACE = 1.035  # where labels begin, share of the width


def draw(grid: Grid, path: str) -> None:
    """Draw a sweep into a file, in the form that its name ends in.

    Raises
    ------
    OSError
        If the file cannot be written; it names the file.
    """
    form = path.rpartition(".")[2].lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a character of a name is in no font
        picture = _picture(grid, form)
    with open_output(path) as file:
        file.write(picture)


def _picture(grid: Grid, form: str) -> bytes:
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "kvoffload"}):
        figure = Figure(figsize=(8.2, 5.0))
        # The second scale stands between the axes and the title.
        height = 0.79 if grid.block_bytes is None else 0.73
        axes = figure.add_axes((0.08, 0.11, 0.70, height))
        ends = []
        number = 0
        for policy in grid.policies:
            row = sorted(grid.row(policy), key=lambda pair: pair[0].capacity)
            x = [cell.capacity for cell, _ in row]
            y = [counts.hit_ratio for _, counts in row]
            if policy in CEILINGS:
                style: dict[str, Any] = {
                    "color": CEILING_COLOUR,
                    "linestyle": ":" if policy == "infinite" else "--",
                    "zorder": 1,
                }
            else:
                style = {
                    "color": COLOURS[number % len(COLOURS)],
                    "marker": MARKERS[number % len(MARKERS)],
                    "markersize": 4.5,
                    "zorder": 3,
                }
                number += 1
            axes.plot(x, y, linewidth=1.4, **style)
            ends.append((policy, y[-1], style))
        _set_axes(axes, grid)
        _label_ends(axes, ends)
        title = _title(grid)
        figure.suptitle(title, x=0.08, y=0.975, ha="left", fontsize=10, parse_math=False)
        picture = io.BytesIO()
        figure.savefig(picture, format=form, dpi=160, metadata=None if form == "png" else {})
        return picture.getvalue()


def _title(grid: Grid) -> str:
    cell, counts = grid.row(grid.policies[0])[0]
    name = printable(Path(grid.source.name).name)
    title = f"{name}: {counts.requests:,} requests, {counts.blocks:,} blocks"
    title += f", {grid.unique_blocks:,} of them unique"
    notes = []
    if cell.device_blocks:
        notes.append(f"behind {cell.device_blocks:,} blocks on the device")
    if cell.pending:
        notes.append(f"stores in flight for {cell.pending:,} requests")
    return "\n".join([title, "; ".join(notes)]) if notes else title


def _set_axes(axes: Any, grid: Grid) -> None:
    sizes = sorted(set(grid.sizes.values()))
    axes.set_xscale("log")
    # One capacity alone has no range; half and double of it give it one.
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15) if len(sizes) > 1 else axes.set_xlim(
        sizes[0] / 2, sizes[0] * 2
    )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.02)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("hit ratio")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.grid(True, color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _set_ticks(axes.xaxis, lambda value: f"{value:,.0f}")
    if grid.block_bytes is not None:
        size = grid.block_bytes
        above = axes.secondary_xaxis(
            "top", functions=(lambda blocks: blocks * size, lambda total: total / size)
        )
        above.set_xlabel("capacity, bytes")
        _set_ticks(above.xaxis, _bytes)


def _set_ticks(axis: Any, text: Any) -> None:
    """Label 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def _label_ends(axes: Any, ends: list[tuple[str, float, dict[str, Any]]]) -> None:
    """Write each line's name beside its end, apart from the others, joined to it by a thin line."""
    to_axes = axes.transData + axes.transAxes.inverted()
    x_end = axes.get_lines()[0].get_xdata()[-1]
    wanted = sorted(
        ((to_axes.transform((x_end, y))[1], policy, style) for policy, y, style in ends),
        key=lambda end: end[0],
    )
    x_line = float(to_axes.transform((x_end, 0))[0])
    for place, (height, policy, style) in zip(
        _apart([end[0] for end in wanted]), wanted, strict=True
    ):
        axes.plot(
            (x_line + 0.008, LABEL_PLACE - 0.004),
            (height, place),
            transform=axes.transAxes,
            color=style["color"],
            linewidth=0.6,
            clip_on=False,
        )
        axes.plot(
            (LABEL_PLACE, LABEL_PLACE + 0.01, LABEL_PLACE + 0.02),
            (place, place, place),
            transform=axes.transAxes,
            **(style | {"markevery": (1, 2)}),
            linewidth=1.4,
            clip_on=False,
        )
        axes.text(
            LABEL_PLACE + 0.028,
            place,
            policy,
            transform=axes.transAxes,
            color=LABEL_COLOUR,
            va="center",
            fontsize=9,
            parse_math=False,
        )


def _apart(heights: list[float]) -> list[float]:
    """Move rising heights as little as it takes for all to be LABEL_STEP apart.

    Labels that would touch form a group, which is centred on the mean of what its members want.
    """
    groups: list[tuple[float, int]] = []  # centre and number of members
    for height in heights:
        centre, size = height, 1
        while groups:
            before, members = groups[-1]
            if centre - before >= LABEL_STEP * (size + members) / 2:
                break
            groups.pop()
            centre = (centre * size + before * members) / (size + members)
            size += members
        groups.append((centre, size))
    places = [
        centre + LABEL_STEP * (number - (size - 1) / 2)
        for centre, size in groups
        for number in range(size)
    ]
    # None above the axes, where the second scale stands.
    highest = 1.0
    for number in range(len(places) - 1, -1, -1):
        places[number] = min(places[number], highest)
        highest = places[number] - LABEL_STEP
    return places
