"""Pictures by matplotlib, of a sweep and of a report: lines, each with its name at its end."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

FIGURE_INCHES = (6.6, 4.6)  # the axes take the share AXES; titles and labels around them are added
AXES = (0.1, 0.1, 0.7, 0.8)
FONT_POINTS = 10  # about 7 pixels if the picture is as wide as a phone
LABEL_X = 1.035  # where labels begin, share of the width
MARGIN_INCHES = 0.12  # around the drawing
TITLE_CHARACTERS = 76  # of a line of the title


@dataclass(frozen=True, slots=True)
class Look:
    """The colours of a picture."""

    ink: str
    soft: str
    rule: str
    page: str
    lines: tuple[str, ...]


# After Okabe & Ito's colours, which differ for colour-blind readers and in print, without the
# yellow that is invisible on white; darker or lighter, so that each stands out from its page.
LIGHT = Look(
    "#1B1F24",
    "#57606A",
    "#D0D7DE",
    "#FFFFFF",
    ("#0060A8", "#B84A00", "#00795A", "#9A3D78", "#806000", "#4A4FC0", "#C0272D", "#202020"),
)
DARK = Look(
    "#E6E9ED",
    "#A3ACB6",
    "#3B444E",
    "#14181D",
    ("#6DB3F2", "#FF9D5C", "#4FD1A5", "#E59AC9", "#E0BD4F", "#A3B1FF", "#FF8A8A", "#F2F2F2"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, slots=True)
class Line:
    """A line, with its name at its end; without a name if it is the only one."""

    name: str | None
    x: Sequence[float]
    y: Sequence[float]
    index: int | str  # of its colour and marker; of a ceiling how it is dashed
    more: dict[str, Any] = field(default_factory=dict)  # arguments of matplotlib

    def style(self, look: Look) -> dict[str, Any]:
        """Return the arguments of matplotlib; the looks of 64 lines differ."""
        if isinstance(self.index, str):
            style = {"color": look.soft, "linestyle": self.index, "zorder": 1}
        else:
            colours = look.lines
            style = {
                "color": colours[self.index % len(colours)],
                "marker": MARKERS[(self.index + self.index // len(colours)) % len(MARKERS)],
                "markersize": 4.5,
                "zorder": 3,
            }
        return {"linewidth": 1.4, **style, **self.more}


def picture(
    draw: Callable[[Any], None],
    form: str,
    *,
    look: Look = LIGHT,
    inches: tuple[float, float] = FIGURE_INCHES,
    points: float = FONT_POINTS,
    axes: tuple[float, float, float, float] = AXES,
) -> bytes:
    """Return what `draw` puts on axes of fixed size as a file of a format.

    The picture grows around the axes, so that no label is cut off.
    """
    file = io.BytesIO()
    inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    settings: Any = {"font.size": points, "svg.hashsalt": "kvoffload"}
    settings.update(dict.fromkeys(inks, look.ink))
    with warnings.catch_warnings(), mpl.rc_context(settings):
        warnings.simplefilter("ignore")  # a character of a name may be in no font
        figure = Figure(figsize=inches, facecolor=look.page)
        drawn = figure.add_axes(axes, facecolor=look.page)
        draw(drawn)
        drawn.set_axisbelow(True)
        for side in ("top", "right"):
            drawn.spines[side].set_visible(False)
        figure.savefig(
            file,
            format=form,
            dpi=160,
            bbox_inches="tight",
            pad_inches=MARGIN_INCHES,
            metadata={_DATE[form]: None} if form in _DATE else None,
        )
    return file.getvalue()


_DATE = {"svg": "Date", "pdf": "CreationDate"}
"""Metadata that would make two pictures of one sweep differ."""


def draw_lines(
    axes: Any,
    lines: Sequence[Line],
    set_x: Callable[[Any], None],
    *,
    share: str | None,
    look: Look = LIGHT,
    most: int = 8,
) -> None:
    """Draw lines of shares, from 0 to the greatest, over a scale that `set_x` labels."""
    for line in lines:
        axes.plot(line.x, line.y, **line.style(look))
    set_x(axes)
    ratios = ratio_ticks(max(max(line.y, default=0.0) for line in lines), most)
    axes.set_ylim(0, ratios[-1] * 1.02)
    if share is not None:
        axes.set_ylabel(share)
    axes.set_yticks(ratios, [ratio_text(ratio) for ratio in ratios])
    axes.grid(True, color=look.rule, linewidth=0.6)
    named = [line for line in lines if line.name is not None and line.x]
    if named:
        _label_ends(axes, named, look)


def write_title(axes: Any, title: Sequence[str], above: float) -> None:
    """Write a title, in lines that are not too long, `above` the axes in points."""
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


def _label_ends(axes: Any, lines: Sequence[Line], look: Look) -> None:
    """Write each line's name beside its end, apart from the others, joined to it by a thin line."""
    to_axes = axes.transData + axes.transAxes.inverted()
    height = axes.get_window_extent().height / axes.figure.dpi * 72
    step = 1.25 * mpl.rcParams["font.size"] / height
    ends = [to_axes.transform((line.x[-1], line.y[-1])) for line in lines]
    order = sorted(range(len(lines)), key=lambda index: ends[index][1])
    # No label above the axes, where a second scale may be drawn.
    positions = apart([ends[index][1] for index in order], step, most=1.0)
    for position, index in zip(positions, order, strict=True):
        line, (x_end, y_end) = lines[index], ends[index]
        style = line.style(look)
        axes.plot(
            (x_end + 0.008, LABEL_X - 0.004),
            (y_end, position),
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
            clip_on=False,
        )
        axes.text(
            LABEL_X + 0.028,
            position,
            line.name,
            transform=axes.transAxes,
            color=look.ink,
            weight="bold" if style["linewidth"] > 2 else "normal",
            va="center",
            parse_math=False,
        )


def ratio_ticks(highest: float, most: int = 5) -> list[float]:
    """Return 0 and about `most` round ratios above it, the last of them not below `highest`."""
    steps = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
    step = next((step for step in steps if highest / step <= most), 0.2)
    count = max(1, math.ceil(highest / step - 1e-9))
    return [index * step for index in range(count + 1)]


def ratio_text(ratio: float) -> str:
    """Return the text of a tick, as in ``2.5 %``."""
    return f"{ratio * 100:.4g} %"


def apart(positions: Sequence[float], distance: float, most: float = math.inf) -> list[float]:
    """Move rising positions as little as possible until all are `distance` apart.

    Labels that would touch form a group, centred on the mean of its members' positions.
    No position is above `most`.
    """
    groups: list[tuple[float, int]] = []  # centre and number of members
    for position in positions:
        centre, size = position, 1
        while groups:
            before, members = groups[-1]
            if centre - before >= distance * (size + members) / 2:
                break
            groups.pop()
            centre = (centre * size + before * members) / (size + members)
            size += members
        groups.append((centre, size))
    moved = [
        centre + distance * (index - (size - 1) / 2)
        for centre, size in groups
        for index in range(size)
    ]
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], most)
        most = moved[index] - distance
    return moved
