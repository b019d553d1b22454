"""The advice as one HTML page: nothing to install, nothing to fetch.

The page contains its style and script. Its content security policy admits only these two, by their
hashes, so even a name that evaded the escaping could run and load nothing.
"""

from __future__ import annotations

import base64
import os
import re
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from kvoffload import IMPLEMENTATION, __version__
from kvoffload._extras import require
from kvoffload.traces.outputs import open_output

from .findings import findings
from .remarks import remarks
from .subject import Subject
from .tables import tables
from .units import unbroken
from .verdicts import headline

if TYPE_CHECKING:
    from .chart import Picture


_OPTION = re.compile(r"--[a-z][a-z-]+")

FIRST = (
    *("Changes", "Capacity", "Prefixes", "Time", "First token", "Retention", "Accelerator"),
    *("Router", "Memory", "More memory", "Tier"),
)
"""Findings shown at the top of the page."""


def require_report() -> None:
    """Raise MissingExtraError unless the requirements of a report are installed."""
    for name in ("jinja2", "matplotlib"):
        require(name, "a report", "report")


def write_report(answer: Subject, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; on failure the file is what it was, and an OSError names it."""
    page = report_html(answer)
    with open_output(path) as file:
        file.write(page.encode())


def report_html(answer: Subject) -> str:
    """Return the page; MissingExtraError if jinja2 is not installed."""
    require_report()
    import jinja2
    from markupsafe import Markup, escape

    from .chart import over_memory

    style, script = _page("report.css"), _page("report.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)

    def whole_options(text: str) -> Markup:
        """Escape a text in which no line may end in an option, nor before a unit."""
        escaped = str(escape(unbroken(text)))
        return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', escaped))  # noqa: S704

    environment.filters["unbroken"] = whole_options
    found, shown = findings(answer), tables(answer)
    return environment.from_string(_page("report.html.jinja")).render(
        answer=answer,
        headline=headline(answer),
        first_findings=[finding for finding in found if finding.title in FIRST],
        findings=[finding for finding in found if finding.title not in FIRST],
        tables=[table for table in shown if not table.is_detail],
        more_tables=[table for table in shown if table.is_detail],
        chart=over_memory(answer),
        pictures=_details(answer),
        snippets=answer.snippets(),
        meanings=answer.meanings(),
        remarks=remarks(answer),
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=_hash(style),
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=_hash(script),
        version=__version__,
        implementation=IMPLEMENTATION,
    )


def _details(answer: Subject) -> list[Picture]:
    """Return the pictures of the details; none of a fleet."""
    from .chart import by_share, over_time

    if answer.details is None:
        return []
    numbers = answer.setup.replayed
    policies = [(numbers.index(one.policy), one) for one in answer.details.policies]
    return [over_time(policies), by_share(policies, answer.setup.counted)]


def _page(name: str) -> str:
    return files("kvoffload.advise").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()
