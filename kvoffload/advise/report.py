"""The advice as one HTML page: nothing to install, nothing to fetch.

Style and script stand in the page, and its content security policy admits them by their hash and
nothing else; so even a name that escaped the escaping could run nothing and load nothing.
"""

from __future__ import annotations

import base64
import os
from hashlib import sha256
from importlib.resources import files

from kvoffload import IMPLEMENTATION, __version__
from kvoffload.policies import registry
from kvoffload.traces._extras import require
from kvoffload.traces.outputs import open_output

from .advice import Advice
from .chart import chart
from .choice import by_simplicity
from .configuration import python_text, vllm_text
from .subject import Subject
from .units import bytes_text, count_text, percent_text, rate_text, unbroken
from .wording import findings, headline, noise_text

__all__ = ["report_html", "require_report", "write_report"]

_WIDE = {"width": 800, "height": 420, "label_height": 17}
_NARROW = {"width": 340, "height": 360, "label_height": 16}


def require_report() -> None:
    """Check that what the report needs is installed.

    Raises
    ------
    MissingExtraError
        If it is not.
    """
    require("jinja2", "a report", "report")


def write_report(subject: Subject, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; on failure the file is what it was.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed.
    OSError
        If the file cannot be written; it names the file.
    """
    page = report_html(subject)
    with open_output(path) as file:
        file.write(page.encode())


def report_html(subject: Subject) -> str:
    """Return the page.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed.
    """
    require_report()
    import jinja2
    from markupsafe import Markup

    advice = subject.advice
    policy = advice.policy
    style, script = _page("report.css"), _page("report.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["unbroken"] = unbroken
    template = environment.from_string(_page("report.html.jinja"))
    setup = advice.setup
    capacity = advice.capacities[advice.asked]
    return template.render(
        subject=subject,
        policy=policy,
        headline=headline(advice),
        findings=findings(advice),
        noise=noise_text(),
        simplicity=", ".join(by_simplicity(setup.policies)),
        wide=chart(advice, **_WIDE),
        narrow=chart(advice, **_NARROW),
        asked=bytes_text(setup.memory),
        titles=_titles(subject),
        rows=_rows(subject),
        meanings=_meanings(advice),
        python=policy and python_text(policy, capacity, setup.block_tokens),
        vllm=policy and vllm_text(policy, setup.memory, setup.block_tokens),
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=_hash(style),
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=_hash(script),
        version=__version__,
        implementation=IMPLEMENTATION,
    )


def _titles(subject: Subject) -> list[str]:
    memories = [f"hit ratio, {bytes_text(memory)}" for memory in subject.advice.memories]
    return ["policy", *memories, "tokens saved", "stored a hit", "to host", "from host"]


def _rows(subject: Subject) -> list[dict[str, object]]:
    advice = subject.advice
    places = range(len(advice.memories))
    rows: list[dict[str, object]] = []
    for policy in advice.ranking():
        cell = advice.cell(policy)
        stored = "-" if cell.stored_per_hit is None else f"{cell.stored_per_hit:.2f}"
        rows.append(
            {
                "name": policy,
                "chosen": policy == advice.policy,
                "cells": [
                    *(percent_text(advice.cell(policy, place).hit_ratio) for place in places),
                    count_text(cell.saved_tokens),
                    stored,
                    rate_text(cell.store_rate),
                    rate_text(cell.load_rate),
                ],
            }
        )
    best, unbounded = advice.ceiling_tokens()
    for name, ratios, tokens in (
        ("belady", advice.ceilings, best),
        ("infinite", [advice.unbounded] * len(advice.memories), unbounded),
    ):
        cells = [*map(percent_text, ratios), count_text(tokens), "", "", ""]
        rows.append({"name": name, "chosen": False, "cells": cells})
    return rows


def _meanings(advice: Advice) -> list[tuple[str, str]]:
    """Return what each row of the table is, for a reader who does not know the names."""
    found = [(p, registry.parse(p).entry.summary) for p in advice.ranking()]
    found.append(("belady", "Belady's choice with bypass, which knows the future"))
    found.append(("infinite", "a cache that keeps everything"))
    return found


def _page(name: str) -> str:
    return files("kvoffload.advise").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()
