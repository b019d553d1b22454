"""``kvoffload diff``: what differs between two outputs of replay, sweep or fleet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvoffload.advise.answer import column
from kvoffload.advise.units import change_text
from kvoffload.errors import describe

from ._fields import FIELDS
from ._options import examples, json_option
from ._output import check_outputs
from ._terminal import print_json, print_tables

MOST_BYTES = 2**28
MOST_NAMED = 5
WHICH: dict[str, Any] = dict.fromkeys(("policy", "capacity_given", "tier_given"))
WHICH |= {"engines": 1, "router": "round-robin", "pending": 0}
"""The fields that two rows of one configuration share, and what they are where a row has none."""
ONE_OPTION = ("device_blocks", "tier_policy")
"""Other fields of rows, which one option sets for all rows of a file."""

FIGURES = (
    *("hit_ratio", "token_hit_ratio", "missed_p50", "missed_p95"),
    *("stored", "saved", "ttft_p95"),
)
TITLES = {"missed_p95": "tokens missed\np95", "ttft_p95": "first token\np95 s"}
_IN_POINTS = ("hit_ratio", "token_hit_ratio", "saved")
_RULE = "must be the output of kvoffload replay, sweep or fleet --json"


@click.command(epilog=examples("kvoffload diff monday.json tuesday.json"))
@click.argument("before", metavar="BEFORE")
@click.argument("now", metavar="NOW")
@json_option
def diff(before: str, now: str, *, as_json: bool) -> None:
    """Compare two outputs of replay, sweep or fleet, also of 0.4.

    BEFORE and NOW are files that --json wrote: of two traces, two versions, or with other options.
    Rows of one configuration stand beside each other: hit ratio, tokens hit and missed, blocks
    stored, prefill saved and the 95th percentile of first tokens, as far as they differ.
    """
    check_outputs(())
    (was, old_rows), (head, new_rows) = _read(before), _read(now)
    in_blocks = any("tier_given" not in row for row in (*old_rows, *new_rows))
    old = {_which(row, in_blocks=in_blocks): row for row in old_rows}
    new = {_which(row, in_blocks=in_blocks): row for row in new_rows}
    shared = [which for which in new if which in old]
    if not shared:
        raise click.UsageError("BEFORE and NOW must share a configuration, got none")
    if as_json:
        print_json({"results": [_object(which, old[which], new[which]) for which in shared]})
        return
    leading = [
        column(name.removesuffix("_given"), [str(which[index]) for which in shared], numeric=False)
        for index, name in enumerate(WHICH)
        if name == "policy" or len({which[index] for which in shared}) > 1
    ]
    figures = [
        (name, [_text(name, old[which], new[which]) for which in shared]) for name in FIGURES
    ]
    columns = [
        [column(TITLES.get(name, FIELDS[name].title), texts)]
        for name, texts in figures
        if any(text.endswith(")") for text in texts)
    ]
    alone = [_named(which) for which in [*old, *new] if which not in old or which not in new]
    title = [f"{now}, and the change from {before}; shares change by points"]
    if alone:
        named = _listed(alone, "; ")
        title.append(f"{len(alone):,} configurations stand in one of the files only: {named}")
    pairs = [(head, was, (*head,)), *((new[one], old[one], ONE_OPTION) for one in shared)]
    others = dict.fromkeys(
        name
        for one, other, names in pairs
        for name in names
        if name in one and name in other and one[name] != other[name]
    )
    title += [f"the files differ in {_listed([*others], ', ')}"] if others else []
    title += [] if columns else ["none of the figures compared differs"]
    print_tables(title, leading, columns)


def _read(path: str) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Return what a file says of all its rows, and the rows."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise click.UsageError(f"{path} must have at most {MOST_BYTES:,} bytes, got more")
    try:
        found = json.loads(data)
        rows = [_row(found, dict(row)) for row in found.pop("results")]
        for row in rows:  # raise for values that cannot be compared or shown
            hash((_which(row), _which(row, in_blocks=True)))
            [float(row[name]) for name in FIGURES if isinstance(row.get(name), int)]
        return found, rows
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        raise click.UsageError(
            f"{path} {_RULE}, got {describe(data[:40].decode(errors='replace'))}"
        ) from None


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    """Return a row without the objects of 0.4: the part of a value is named ``value_part``."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}_{part}": one for part, one in value.items()}
        else:
            found[name] = value
    return found


def _row(head: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the fields of 0.5, also if it is of 0.4."""
    row = {"device_blocks": head.get("device_blocks", 0), **_flat(values)}
    row.setdefault("stored", row.get("host_stored"))
    if "capacity_given" not in row:
        row["capacity_given"] = str(row["capacity"])
    if "engines" not in row and row["device_blocks"]:  # of 0.4: without the accelerator's hits
        row.pop("token_hit_ratio", None)
    if not isinstance(row["policy"], str):
        raise TypeError(f"policy must be a string, got {describe(row['policy'])}")
    return row


def _which(row: Mapping[str, Any], *, in_blocks: bool = False) -> tuple[Any, ...]:
    """Return the configuration of a row, with its tier `in_blocks`: 0.4 has no words for it."""
    if in_blocks:
        tier = {"private": "own"}.get(row.get("tier", ""), row.get("tier"))
        row = {**row, "tier_given": tier and f"{tier} {row.get('tier_blocks')}"}
    return tuple(row.get(name, default) for name, default in WHICH.items())


def _listed(names: list[str], between: str) -> str:
    return between.join(names[:MOST_NAMED] + ["…"] * (len(names) > MOST_NAMED))


def _named(which: tuple[Any, ...]) -> str:
    """Return a configuration in words, without what is as usual."""
    pairs = zip(which, WHICH.items(), strict=True)
    return " ".join(
        str(value) if default is None else f"{name.removesuffix('_blocks')} {value}"
        for value, (name, default) in pairs
        if value != default
    )


def _object(
    which: tuple[Any, ...], old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    figures = {name: {"before": old.get(name), "now": new.get(name)} for name in FIGURES}
    return dict(zip(WHICH, which, strict=True)) | figures


def _text(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a figure of two rows: the second, and the change."""
    before, now = old.get(name), new.get(name)
    if not isinstance(before, int | float) or not isinstance(now, int | float):
        return "-"
    text = FIELDS[name].text(now)
    if now == before:
        return text
    if name in _IN_POINTS:
        return f"{text} ({change_text(now - before)})"
    return (
        f"{text} ({now - before:+,})" if isinstance(now, int) else f"{text} ({now - before:+.3g})"
    )
