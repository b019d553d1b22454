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


def policy_table() -> str:
    """Return the table of all policies."""
    lines = ["| name | what leaves | options | simplicity |", "|---|---|---|---|"]
    for entry in map(registry.entry, registry.names()):
        options = "; ".join(
            f"`{option.name}` = {option.default} ({option.minimum} … {option.maximum}): "
            f"{option.summary}"
            for option in entry.options
        )
        simplicity = f"{entry.simplicity}: {entry.explained_by.rstrip('.')}"
        lines.append(f"| `{entry.name}` | {entry.summary} | {options} | {simplicity} |")
    return "\n".join(lines) + "\n"


def policy_classes() -> str:
    """Return the table of the policies' classes."""
    names = [registry.entry(name).class_name for name in registry.names()]
    return name_table([object_row(f"kvoffload.{name}") for name in names])


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return the table of metrics."""
    lines = ["| name | kind | labels | what |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def name_table(rows: Iterable[str]) -> str:
    """Return the table of names with these rows."""
    return "\n".join(["| name | what |", "|---|---|", *rows]) + "\n"


def updated(table: str, following: str) -> Iterator[str]:
    """Yield the rows of a table of names anew: of objects, then of directives that follow it."""
    for name in TITLED.findall(table):
        yield object_row(name)
    for name, rest in DIRECTIVE.findall(following):
        if name.startswith("kvoffload."):
            target = find(name)
            yield row(name.rpartition(".")[2], target, None, first_line(target))
        else:
            yield row(name, None, None, described(rest))


def object_row(name: str) -> str:
    """Return the row of an object."""
    target = find(name)
    text = first_line(target) if callable(target) else ""
    return row(name.rpartition(".")[2], target, name, text)


def described(rest: str) -> str:
    """Return the description under a directive, on one line."""
    found = re.search(r"^ +[^ :.].*(?:\n +.*)*", rest, re.MULTILINE)
    return plain(inspect.cleandoc(found[0])) if found else ""


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


def row(shown: str, target: object, name: str | None, text: str) -> str:
    """Return a row; the title of its link is the full name, where Sphinx finds the object."""
    link = f"`{shown}`"
    if target is not None:
        path = source_of(target)
        if path is not None:
            title = f' "{name}"' if name else ""
            link = f"[{link}]({path}{title})"
    return f"| {link} | {text} |"


def source_of(target: object) -> str | None:
    """Return the file of an object, as a link of a page of the reference."""
    try:
        path = Path(inspect.getsourcefile(target) or "")  # type: ignore[arg-type]
    except TypeError:  # a constant
        return None
    package = Path(kvoffload.__file__).parent
    return f"../../kvoffload/{path.relative_to(package).as_posix()}"


def made(page: str) -> str:
    """Return a page with its tables."""
    tables = {
        "policy table": policy_table,
        "policy classes": policy_classes,
        "metrics of tiers": lambda: metrics_table(TIER_METRICS),
        "metrics of a watch": lambda: metrics_table(WATCH_METRICS),
    }

    def fill(match: re.Match[str]) -> str:
        begin, what, end = match.groups()
        if what in tables:
            return f"{begin}\n{tables[what]()}\n{end}"
        hidden = HIDDEN.match(page, match.end())
        rows = updated(match[0], hidden[1] if hidden else "")
        return f"{begin}\n{name_table(rows)}\n{end}"

    return MADE.sub(fill, page)


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    for path in sorted(folder.glob("*.md")):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
