"""The advice as one HTML page: nothing to install, nothing to fetch.

The page contains its style and script. Its content security policy admits only these two, by their
hashes, so even a name that evaded the escaping could run and load nothing.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from kvoffload import IMPLEMENTATION, __version__
from kvoffload._extras import require
from kvoffload.replay.policies import summary
from kvoffload.traces.outputs import open_output

from .advice import Advice
from .chart import NAME_OFFSET, bars, chart, strip
from .configuration import python_text, vllm_text
from .economy import balance
from .subject import Subject
from .units import bytes_text, count_text, duration_text, percent_text, rate_text, unbroken
from .wording import noise_text

__all__ = ["rendered", "report_html", "require_report", "write_report"]

_WIDE = {"width": 800, "height": 420, "label_height": 17}
_NARROW = {"width": 340, "height": 360, "label_height": 16}


def require_report() -> None:
    """Raise MissingExtraError unless the requirements of a report are installed."""
    require("jinja2", "a report", "report")


def write_report(subject: Subject, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; on failure the file is what it was, and an OSError names it."""
    page = report_html(subject)
    with open_output(path) as file:
        file.write(page.encode())


_FIRST = ("Changes", "Capacity", "Time", "First token", "Retention", "Accelerator", "More memory")
"""Findings shown at the top of the page, under the recommendation."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table; `first` ones are shown on the narrowest screens."""

    title: str
    texts: list[str]
    best: set[int]
    first: bool = False


def report_html(subject: Subject) -> str:
    """Return the page; MissingExtraError if jinja2 is not installed."""
    advice = subject.advice
    policy = advice.policy
    columns = _columns(subject)
    setup = advice.setup
    capacity = advice.capacities[advice.memory_index]
    return rendered(
        "report.html.jinja",
        subject=subject,
        policy=policy,
        headline=subject.headline(),
        findings=[f for f in subject.findings() if f.title not in _FIRST],
        noise=noise_text(),
        wide=chart(advice, **_WIDE),
        narrow=chart(advice, **_NARROW),
        name_offset=NAME_OFFSET,
        asked=bytes_text(setup.memory),
        counted=setup.counted,
        hit=setup.counted.removesuffix("s"),
        columns=columns,
        rows=_rows(subject, columns),
        first_findings=[f for f in subject.findings() if f.title in _FIRST],
        strip=subject.details and strip(advice, subject.details, width=390, height=170),
        bars=subject.details and bars(advice, subject.details, width=390, row=15),
        disk=_disk(subject),
        device_table=subject.device_table(),
        meanings=_meanings(advice),
        python=policy and python_text(policy, capacity, setup.block_tokens),
        vllm=policy and vllm_text(policy, setup.memory, setup.chunks),
        vllm_flag=subject.vllm_flag(),
    )


def rendered(template: str, **values: object) -> str:
    """Return a page from a template, with style and script; MissingExtraError without jinja2."""
    require_report()
    import jinja2
    from markupsafe import Markup

    style, script = _page("report.css"), _page("report.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["unbroken"] = unbroken
    return environment.from_string(_page(template)).render(
        **values,
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=_hash(style),
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=_hash(script),
        version=__version__,
        implementation=IMPLEMENTATION,
    )


def _columns(subject: Subject) -> list[_Column]:
    """Return the columns of the table, with the best cells of each."""
    advice, alone, engine = subject.advice, subject.alone, subject.engine
    ranking = advice.ranking()
    blank = ["", ""]
    columns = []
    for index, memory in enumerate(advice.memories):
        ratios = [advice.cell(policy, index).hit_ratio for policy in ranking]
        ends = [advice.ceilings[index], advice.unbounded]
        title = f"hit ratio, {bytes_text(memory)}"
        texts = [percent_text(ratio) for ratio in [*ratios, *ends]]
        columns.append(_Column(title, texts, _best(ratios), index == advice.memory_index))
    if alone is not None:
        ratios = [alone.cell(policy).hit_ratio for policy in ranking]
        ends = [alone.ceilings[alone.memory_index], alone.unbounded]
        title = f"{bytes_text(alone.setup.memory)}, no device cache"
        texts = [percent_text(ratio) for ratio in [*ratios, *ends]]
        columns.append(_Column(title, texts, _best(ratios)))
    cells = [advice.cell(policy) for policy in ranking]
    saved = [count_text(cell.saved_tokens) for cell in cells]
    saved += ["-" if n is None else count_text(n) for n in advice.ceiling_tokens()]
    columns.append(_Column("tokens saved", saved, _best([c.saved_tokens for c in cells]), True))
    per_hit = ["-" if c.stored_per_hit is None else f"{c.stored_per_hit:.2f}" for c in cells]
    least = _best([-(c.stored_per_hit or math.inf) for c in cells])
    columns.append(_Column("stored per hit", per_hit + blank, least))
    rates = [rate_text(c.store_rate) for c in cells]
    columns.append(_Column("to host", rates + blank, _best([-c.stored for c in cells])))
    rates = [rate_text(c.load_rate) for c in cells]
    columns.append(_Column("from host", rates + blank, set()))
    if engine is not None:
        found = [balance(advice, cell, engine) for cell in cells]
        net = [duration_text(b.net_seconds) for b in found]
        columns.append(_Column("time gained", net + blank, _best([b.net_seconds for b in found])))
    return columns


def _best(values: Sequence[float]) -> set[int]:
    """Return the indexes of the greatest values, none where all are equal."""
    if not values or min(values) == max(values):
        return set()
    return {index for index, value in enumerate(values) if value == max(values)}


def _rows(subject: Subject, columns: list[_Column]) -> list[dict[str, object]]:
    advice = subject.advice
    names = [*advice.ranking(), "belady", "infinite"]
    return [
        {
            "name": name,
            "chosen": name == advice.policy,
            "cells": [
                {"text": column.texts[row], "best": row in column.best, "column": column}
                for column in columns
            ],
        }
        for row, name in enumerate(names)
    ]


def _disk(subject: Subject) -> list[tuple[str, ...]]:
    """Return the rows of the disk's table: policies, host memory, hits, and what is written."""
    if subject.details is None:
        return []
    return [
        (
            cell.policy,
            cell.host_policy,
            bytes_text(cell.memory),
            percent_text(cell.counts.hit_ratio),
            "-" if cell.bytes_per_day is None else bytes_text(cell.bytes_per_day),
            "-" if cell.writes_per_day is None else f"{cell.writes_per_day:.3g}",
        )
        for cell in subject.details.disk_cells
    ]


def _meanings(advice: Advice) -> list[tuple[str, str]]:
    """Return an explanation of each row of the table."""
    found = [(p, summary(p)) for p in advice.ranking()]
    found.append(("belady", "Belady's choice with bypass, which knows the future"))
    found.append(("infinite", "a cache that keeps everything"))
    return found


def _page(name: str) -> str:
    return files("kvoffload.advise").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()
