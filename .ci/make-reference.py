"""Write the tables of the reference that the library itself defines: names, policies, metrics.

    python .ci/make-reference.py [FOLDER]

It writes the pages of docs/reference, or of another folder that has them, between their lines
``<!-- made by .ci/make-reference.py: WHAT -->`` and ``<!-- end -->``. So they are readable in the
raw pages too, as on a code host; `docs/conf.py` says what Sphinx adds. To show another name, add a
row ``| [`X`](. "kvoffload.X") | |`` to a table of names.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["KVOFFLOAD_PURE_PYTHON"] = "1"  # so that every name leads to a file that can be read

import kvoffload
from kvoffload._metrics import TIER_METRICS, WATCH_METRICS, Metric
from kvoffload.policies import registry

ROOT = Path(__file__).parents[1]
MADE = re.compile(
    r"(<!-- made by \.ci/make-reference\.py: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
TITLED = re.compile(r'^\| \[`\w+`\]\([^)\s]+ "(kvoffload[\w.]*)"\)', re.MULTILINE)
HIDDEN = re.compile(r"\s*<!-- eval-rst\n(.*?)^-->", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(
    r"^\.\. (?:auto|py:(?!module|currentmodule))\w+:: ([\w.]+)(.*(?:\n(?:   .*)?)*)", re.MULTILINE
)


def table(head: str, rows: Iterable[str]) -> str:
    """Return a table."""
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|---" * columns + "|", *rows, ""])


def policy_table() -> str:
    """Return the table of all policies."""
    rows = []
    for entry in map(registry.entry, registry.names()):
        options = "; ".join(
            f"`{option.name}` = {option.default} ({option.minimum} … {option.maximum}): "
            f"{option.summary}"
            for option in entry.options
        )
        simplicity = f"{entry.simplicity}: {entry.explained_by.rstrip('.')}"
        rows.append(f"| `{entry.name}` | {entry.summary} | {options} | {simplicity} |")
    return table("name | what leaves | options | simplicity", rows)


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return the table of metrics."""
    rows = []
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return table("name | kind | labels | what", rows)


def updated(rows: str, following: str) -> Iterator[str]:
    """Yield the rows of a table of names anew: of objects, then of directives that follow it."""
    for name in TITLED.findall(rows):
        yield object_row(name)
    for name, rest in DIRECTIVE.findall(following):
        if name.startswith("kvoffload."):
            target = find(name)
            yield row(name, target, first_line(target))
        else:
            found = re.search(r"^ +[^ :.].*(?:\n +.*)*", rest, re.MULTILINE)
            yield row(name, None, plain(inspect.cleandoc(found[0])) if found else "")


def object_row(name: str) -> str:
    """Return the row of an object; the title of its link is the full name, which Sphinx finds."""
    target = find(name)
    text = first_line(target) if callable(target) else ""
    return row(name, target, text, f' "{name}"')


def find(name: str) -> Any:
    """Return the object of a full name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def first_line(target: object) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return plain((inspect.getdoc(target) or "").split("\n\n")[0])


def plain(text: str) -> str:
    """Return a text of reStructuredText as one line of Markdown."""
    return re.sub(r"`+([^`]+)`+", r"`\1`", text.replace("\n", " "))


def row(name: str, target: object, text: str, title: str = "") -> str:
    """Return a row, whose link leads to the file of the object, from a page of the reference."""
    link = f"`{name.rpartition('.')[2] if target is not None else name}`"
    with suppress(TypeError):  # a constant
        path = Path(inspect.getsourcefile(target) or "")  # type: ignore[arg-type]
        path = path.relative_to(Path(kvoffload.__file__).parent)
        link = f"[{link}](../../kvoffload/{path.as_posix()}{title})"
    return f"| {link} | {text} |"


def made(page: str) -> str:
    """Return a page with its tables."""
    classes = [f"kvoffload.{registry.entry(name).class_name}" for name in registry.names()]
    tables = {
        "policy table": policy_table,
        "policy classes": lambda: table("name | what", map(object_row, classes)),
        "metrics of tiers": lambda: metrics_table(TIER_METRICS),
        "metrics of a watch": lambda: metrics_table(WATCH_METRICS),
    }

    def fill(match: re.Match[str]) -> str:
        begin, what, end = match.groups()
        if what in tables:
            return f"{begin}\n{tables[what]()}\n{end}"
        hidden = HIDDEN.match(page, match.end())
        rows = updated(match[0], hidden[1] if hidden else "")
        return f"{begin}\n{table('name | what', rows)}\n{end}"

    return MADE.sub(fill, page)


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    for path in sorted(folder.glob("*.md")):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
