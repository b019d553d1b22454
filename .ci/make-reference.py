"""Write the tables of the reference that the library itself defines: names, policies, metrics.

    python .ci/make-reference.py [FOLDER]

It writes the pages of docs/reference, or of another folder that has them, between their lines
``<!-- made by .ci/make-reference.py: WHAT -->`` and ``<!-- end -->``. So they are readable in the
raw pages too, as on a code host; `docs/conf.py` says what Sphinx adds.
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
SCOPE = re.compile(r"^\.\. (?:py:)?(?:current)?module:: (.*)", re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. (?:py:)?(auto)?(\w+):: ([\w.]+)(.*(?:\n(?:   .*)?)*)", re.MULTILINE)


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
    """Return the names of the policies' classes, and Sphinx's directives for them."""
    lines = ["<!-- eval-rst", ".. currentmodule:: kvoffload"]
    for entry in map(registry.entry, registry.names()):
        policy_class = getattr(kvoffload, entry.class_name)
        contract = dir(kvoffload.CachePolicy)
        own = [name for name in dir(policy_class) if name[0] != "_" and name not in contract]
        members = ", ".join(name for name in own if name != "cache_capacity")
        lines += ["", f".. autoclass:: {entry.class_name}"]
        lines += [f"   :members: {members}", "   :inherited-members:"] if members else []
    text = "\n".join([*lines, "-->", ""])
    return f"{name_table(text, 'kvoffload')}\n{text}"


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return the table of metrics."""
    lines = ["| name | kind | labels | what |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def name_table(text: str, scope: str) -> str:
    """Return the table of the names that directives show, each with its file and first line."""
    rows = list(named(text, scope))
    return "\n".join(["| name | what |", "|---|---|", *rows]) + "\n"


def named(text: str, scope: str) -> Iterator[str]:
    """Yield the rows of `name_table`."""
    for auto, kind, name, rest in DIRECTIVE.findall(text):
        if not auto and kind in {"module", "currentmodule"}:
            scope = name
        elif auto:
            full_name = name if name.startswith("kvoffload.") else f"{scope}.{name}"
            yield from documented(full_name, rest)
        else:
            yield row(name.rpartition(".")[2], None, None, described(rest))


def documented(name: str, rest: str) -> Iterator[str]:
    """Yield the row of an object, or those of the members of a module that are shown."""
    target = find(name)
    members = re.search(r":members: (.*)", rest)
    if inspect.ismodule(target) and members:
        for member in members[1].split(", "):
            yield from documented(f"{name}.{member}", "")
    elif inspect.ismodule(target):
        yield row(name, target, None, first_line(target))
    else:
        text = described(rest) or (first_line(target) if callable(target) else "")
        yield row(name.rpartition(".")[2], target, name, text)


def described(rest: str) -> str:
    """Return the description under a directive, on one line."""
    found = re.search(r"^ +[^ :.].*(?:\n +.*)*", rest, re.MULTILINE)
    return plain(inspect.cleandoc(found[0])) if found else ""


def find(name: str) -> Any:
    """Return the object of a full name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        if length == len(parts) > 1:  # a function may have the name of its module
            found = getattr(importlib.import_module(".".join(parts[:-1])), parts[-1], found)
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


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
        scopes = ["kvoffload", *SCOPE.findall(page[: match.start()])]
        following = page[match.end() :].partition("\n-->")[0]
        return f"{begin}\n{name_table(following, scopes[-1])}\n{end}"

    return MADE.sub(fill, page)


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    for path in sorted(folder.glob("*.md")):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
