"""The advice on a fleet as one HTML page, like that on one engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload.traces.outputs import open_output

from .fleet_subject import FleetSubject, Heat
from .fleet_wording import each_text, p95_text, tier_text
from .fleets import saving
from .report import rendered
from .units import bytes_text, latency_text, percent_text

__all__ = ["fleet_report_html", "write_fleet_report"]

SHADES = 10
"""The darkest shade of a heat map: everything is saved."""

BAR = 100
"""Length of the longest bar, user units."""

_FIRST = ("Changes", "Capacity", "Router", "Memory", "Tier", "First token")
"""Findings shown at the top of the page, under the recommendation."""


def write_fleet_report(subject: FleetSubject, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; on failure the file is what it was, and an OSError names it."""
    page = fleet_report_html(subject)
    with open_output(path) as file:
        file.write(page.encode())


@dataclass(frozen=True, slots=True)
class _Square:
    """A cell of a heat map: its text, its shade, and whether its fleet is enough."""

    text: str
    shade: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class _Map:
    """A heat map: its caption, and a row of squares per router."""

    caption: str
    rows: list[tuple[str, list[_Square]]]


@dataclass(frozen=True, slots=True)
class _Bar:
    """A value as text, and as a length of at most `BAR`; None without a bar."""

    text: str
    length: float | None = None


def fleet_report_html(subject: FleetSubject) -> str:
    """Return the page; MissingExtraError if jinja2 is not installed."""
    advice = subject.advice
    found = subject.findings()
    first, *others = (_map(subject, heat) for heat in subject.heats())
    titles, lines = _routers(subject)
    return rendered(
        "fleet.html.jinja",
        subject=subject,
        headline=subject.headline(),
        first_findings=[finding for finding in found if finding.title in _FIRST],
        findings=[finding for finding in found if finding.title not in _FIRST],
        memories=[bytes_text(one) if one else each_text(0) for one in advice.setup.memories()],
        saved=advice.setup.saved,
        chosen_memory=each_text(advice.case.memory),
        chosen_router=advice.case.fleet.router,
        first_map=first,
        maps=others,
        titles=titles,
        lines=lines,
        bar=BAR,
        vllm=subject.vllm_text(),
    )


def _map(subject: FleetSubject, heat: Heat) -> _Map:
    """Lay out a heat map: the shade is the share that is saved."""
    advice, rows = subject.advice, []
    for router, results in heat.rows.items():
        squares = []
        for memory, result in zip(advice.setup.memories(), results, strict=True):
            chosen = subject.is_enough(heat, router, memory)
            share = 0.0 if result is None else saving(result)
            text = "-" if result is None else percent_text(share)
            squares.append(_Square(text, round(SHADES * min(1.0, max(0.0, share))), chosen))
        rows.append((router, squares))
    tiers = f", {tier_text(heat.tier)}" if len(advice.setup.tiers) > 1 else ""
    return _Map(f"{heat.policy}{tiers}", rows)


def _routers(subject: FleetSubject) -> tuple[list[str], list[tuple[str, list[_Bar]]]]:
    """Return titles, and a line of bars per router, all else as in the fleet that is enough."""
    advice = subject.advice
    results = {router: advice.like(router=router) for router in subject.routers()}
    known = {router: result for router, result in results.items() if result is not None}
    columns = {"tokens hit": [_Bar(percent_text(one.token_hit_ratio)) for one in known.values()]}
    if advice.setup.rate is not None:
        p50s = [one.ttft_p50 or 0.0 for one in known.values()]
        columns["first token, median"] = _bars(p50s, map(latency_text, p50s))
        p95s = [one.ttft_p95 or 0.0 for one in known.values()]
        columns["first token, 95 %"] = _bars(p95s, map(p95_text, known.values()))
        columns["busy"] = [_Bar(percent_text(one.busy)) for one in known.values()]
    imbalances = [one.imbalance for one in known.values()]
    longest = max(imbalances)
    columns["busiest engine / mean"] = [
        _Bar(f"{value:.2f}", round(BAR * value / longest, 1)) for value in imbalances
    ]
    lines = zip(known, zip(*columns.values(), strict=True), strict=True)
    return list(columns), [(router, list(bars)) for router, bars in lines]


def _bars(seconds: Sequence[float], texts: Iterable[str]) -> list[_Bar]:
    longest = max(seconds) or 1.0
    return [
        _Bar(text, round(BAR * one / longest, 1)) for one, text in zip(seconds, texts, strict=True)
    ]
