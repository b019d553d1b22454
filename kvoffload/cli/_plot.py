"""Pictures of a sweep, of fleets and of kept blocks: shares over a logarithmic scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvoffload._printable import plural, printable
from kvoffload.advise.drawing import Line, draw_lines, picture, write_title
from kvoffload.advise.units import bytes_text
from kvoffload.replay.offline import CEILINGS
from kvoffload.traces.outputs import open_output
from kvoffload.traces.returns import KeptCounter

from ._fleet_result import Fleets
from .sweep import Swept


def draw(view: Swept, path: str) -> None:
    """Draw a sweep into a file, in the format that its name ends in; an OSError names the file."""
    lines: list[Line] = []
    looks = {policy: n for n, policy in enumerate(p for p in view.policies if p not in CEILINGS)}
    for policy in view.policies:
        rows = sorted(view.of(policy), key=lambda row: row.configuration.host)
        x = [row.configuration.host for row in rows]
        look = looks.get(policy, ":" if policy == "infinite" else "--")
        lines.append(Line(policy, x, [row.result.hit_ratio for row in rows], look))
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

    _draw(path, [Line(None, minutes, kept.ratios, 0)], [printable(Path(name).name)], set_x)


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
        lines.append(Line(name, x, y, index))

    def set_x(axes: Any) -> None:
        axes.set_xlabel("host memory of all engines, blocks")
        _set_sizes(axes, sorted({x for line in lines for x in line.x}))

    engines = ", ".join(f"{one}" for one in sorted({fleet.engines for fleet in fleets}))
    title = f"{printable(Path(view.read.source.name).name)}; engines: {engines}"
    _draw(path, lines, [title], set_x, share="share of prompt tokens hit")


def _draw(
    path: str,
    lines: Sequence[Line],
    title: Sequence[str],
    set_x: Callable[[Any], None],
    *,
    share: str = "hit ratio",
    above: int = 10,
) -> None:
    """Draw lines over a logarithmic axis that `set_x` labels, under a title `above` the axes."""

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        draw_lines(axes, lines, set_x, share=share)
        write_title(axes, title, above)

    drawn = picture(draw, path.rpartition(".")[2].lower())
    with open_output(path) as file:
        file.write(drawn)


def _title(view: Swept) -> list[str]:
    one, trace = view.first, view.read.trace
    facts = f"{plural(trace.num_requests, 'request')}, {plural(trace.num_blocks, 'block')}, "
    lines = [printable(Path(view.read.source.name).name), f"{facts}{trace.unique_blocks:,} unique"]
    notes = [] if view.read.source.ids_text is None else [view.read.source.ids_text]
    if one.device:
        notes.append(f"behind {one.device:,} {one.groups.slot_name}s on the device")
    if one.pending:
        notes.append(f"stores in flight for {plural(one.pending, 'request')}")
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
