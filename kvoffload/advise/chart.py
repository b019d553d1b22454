"""The pictures of a report: shares over memory, over the requests, and requests by share."""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .answer import Curve, Curves
from .details import PolicyDetails
from .drawing import DARK, LIGHT, Line, Look, draw_lines, picture

__all__ = ["Picture", "by_share", "over_memory", "over_time"]

PIXELS = 72
"""Pixels of an inch, at which a point is a pixel, too."""

WIDE, NARROW = (800, 380), (280, 320)
"""Width and height of a picture, pixels, and on a phone; names and labels are added."""

FONT_PIXELS = 12

_SMALL = (390, 150)
_CLASSES = (("none", 0, 1), ("up to half", 1, 6), ("more than half", 6, 11), ("all", 11, 12))

Size = tuple[int, int]
Draw = Callable[..., None]  # on axes, with a look and a size


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in each size and colour scheme."""

    title: str
    sources: list[tuple[str, str]]  # condition of each but the last, and its address

    @property
    def address(self) -> str:
        """The address where no condition holds."""
        return self.sources[-1][1]


def over_memory(curves: Curves) -> Picture:
    """Draw shares over the memories that were compared, a line each."""
    columns = range(len(curves.memories))

    def line(index: int | str, curve: Curve) -> Line:
        more = {"linewidth": 3.2, "zorder": 4} if curve.name == curves.chosen else {}
        places = [column for column in columns if curve.shares[column] is not None]
        return Line(curve.name, places, [curve.shares[n] or 0.0 for n in places], index, more)

    lines = [line(index, curve) for index, curve in enumerate(curves.lines)]
    lines += [line(":" if curve.is_flat else "--", curve) for curve in curves.ceilings]

    def draw(axes: Any, look: Look, size: Size) -> None:
        texts = list(curves.memories)
        if size == NARROW:
            texts = [text.replace(" ", "\n") for text in texts]
        texts[curves.asked] += f"\n{curves.marked}"

        def set_x(axes: Any) -> None:
            axes.set_xlim(-0.05, max(1, len(columns) - 1) * 1.02)
            axes.set_xticks(columns, texts)
            axes.axvline(curves.asked, color=look.soft, linestyle=(0, (2, 4)), linewidth=1)

        draw_lines(axes, lines, set_x, share=None, look=look, most=5)

    return Picture(curves.title, list(_sources(draw, WIDE, NARROW)))


def over_time(policies: Sequence[tuple[int, PolicyDetails]]) -> Picture:
    """Draw hit ratios over the requests of a trace; each policy with the number of its colour."""
    plain = {"marker": ""}
    lines = [
        Line(one.policy, range(len(one.over_time)), one.over_time, index, plain)
        for index, one in policies
    ]

    def draw(axes: Any, look: Look, **_: Size) -> None:
        def set_x(axes: Any) -> None:
            last = max(1, len(lines[0].x) - 1)
            axes.set_xlim(0, last)
            axes.set_xticks([0, last], ["first request", "last"])

        draw_lines(axes, lines, set_x, share=None, look=look, most=3)

    return Picture("Hit ratio over the requests of the trace", list(_sources(draw, _SMALL)))


def by_share(policies: Sequence[tuple[int, PolicyDetails]], counted: str) -> Picture:
    """Draw how many requests hit none, some or all of their blocks, a bar per policy."""

    def draw(axes: Any, look: Look, **_: Size) -> None:
        for place, (index, one) in enumerate(policies):
            whole = sum(one.requests_by_share) or 1
            shares = [sum(one.requests_by_share[a:b]) / whole for _, a, b in _CLASSES]
            rows = [row + 0.4 * place for row in range(len(_CLASSES))]
            colour = look.lines[index % len(look.lines)]
            drawn = axes.barh(rows, shares, height=0.36, color=colour)
            axes.bar_label(drawn, [f"{share * 100:.1f} %" for share in shares], padding=3)
        middle = 0.2 * (len(policies) - 1)
        axes.set_yticks(
            [row + middle for row in range(len(_CLASSES))], [name for name, *_ in _CLASSES]
        )
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.tick_params(left=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    title = f"Requests by the share of their {counted} that is hit"
    return Picture(title, list(_sources(draw, _SMALL)))


def _sources(draw: Draw, *sizes: Size) -> Iterator[tuple[str, str]]:
    """Yield the condition and the address of each picture, narrow and dark ones first."""
    for size, look in itertools.product(reversed(sizes), (DARK, LIGHT)):
        conditions = ["(prefers-color-scheme: dark)"] if look is DARK else []
        conditions += ["(max-width: 640px)"] if size == NARROW else []
        inches = size[0] / PIXELS, size[1] / PIXELS
        drawn = functools.partial(draw, look=look, size=size)
        file = picture(drawn, "svg", look=look, inches=inches, points=FONT_PIXELS)
        text = base64.b64encode(file).decode()
        yield " and ".join(conditions), f"data:image/svg+xml;base64,{text}"
