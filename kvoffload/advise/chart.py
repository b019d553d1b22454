"""The pictures of a report: shares over memory, over the requests, and requests by share."""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .choice import saving
from .details import PolicyDetails
from .drawing import DARK, LIGHT, Line, Look, draw_lines, picture
from .subject import Subject
from .tables import heats
from .units import bytes_text
from .wording import tier_text

PIXELS = 72
"""Pixels of an inch, at which a point is a pixel, too."""

WIDE, NARROW = (800, 380), (280, 320)
"""Width and height of a picture, pixels, and on a phone; names and labels are added."""

FONT_PIXELS = 12

_SMALL = (390, 150)
_DASHES = {"infinite": ":", "belady": "--"}  # of ceilings
_CLASSES = (("none", 0, 1), ("up to half", 1, 6), ("more than half", 6, 11), ("all", 11, 12))

Size = tuple[int, int]
Draw = Callable[..., None]  # on axes, with a look and a size


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in each size and colour scheme."""

    title: str
    sources: list[tuple[str, str]]  # condition of each but the last, and its address
    meaning: str = ""  # of a share, a sentence

    @property
    def address(self) -> str:
        """The address where no condition holds."""
        return self.sources[-1][1]


def over_memory(subject: Subject) -> Picture:
    """Draw shares over the memories that were compared, a line each.

    Hit ratios by policy; of a fleet what it saves by router.
    """
    advice, setup, memories = subject.advice, subject.setup, subject.setup.memories()
    shares: dict[str, list[float | None]]
    if setup.engines:
        (tier, policy), rows = next(iter(heats(advice).items()))
        title = f"{setup.saved.capitalize()} saved over memory"
        behind = "" if tier is None else f" and {tier_text(tier)}"
        meaning = f"With {policy} in the memory of each engine{behind}."
        asked, marked, chosen = advice.case.memory, "enough", advice.case.router
        if advice.objections:
            marked = chosen = ""
        shares = {
            router: [None if one is None else saving(one) for one in results]
            for router, results in rows.items()
        }
    else:
        title = "Hit ratio over memory"
        meaning = (
            f"A hit is a {setup.counted.removesuffix('s')} of a prompt whose keys and values are "
            "loaded from host memory instead of computed again."
        )
        marked = "asked for" if subject.knee is None else "advised on"
        asked, chosen = setup.memory, advice.policy or ""
        shares = {
            policy: [advice.of(policy, memory).hit_ratio for memory in memories]
            for policy in setup.replayed
        }
        shares["infinite"] = [advice.unbounded] * len(memories)
        if setup.chunks.num_full:
            shares["belady"] = [*advice.ceilings.values()]
    lines = []
    for index, (name, found) in enumerate(shares.items()):
        more = {"linewidth": 3.2, "zorder": 4} if name == chosen else {}
        points = [(place, share) for place, share in enumerate(found) if share is not None]
        x, y = [place for place, _ in points], [share for _, share in points]
        lines.append(Line(name, x, y, _DASHES.get(name, index), more))

    def draw(axes: Any, look: Look, size: Size) -> None:
        texts = [bytes_text(memory) if memory else "none" for memory in memories]
        if size == NARROW:
            texts = [text.replace(" ", "\n") for text in texts]
        place = memories.index(asked)
        texts[place] += f"\n{marked}"

        def set_x(axes: Any) -> None:
            axes.set_xlim(-0.05, max(1, len(memories) - 1) * 1.02)
            axes.set_xticks(range(len(memories)), texts)
            axes.axvline(place, color=look.soft, linestyle=(0, (2, 4)), linewidth=1)

        draw_lines(axes, lines, set_x, share=None, look=look, most=5)

    return Picture(title, list(_sources(draw, WIDE, NARROW)), meaning)


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
