"""The figures of a replayed configuration, each once, as value and as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.advise.answer import Column, column
from kvoffload.advise.choice import p95_error
from kvoffload.advise.units import percent_text
from kvoffload.replay import Configuration, Result
from kvoffload.replay.events import NANOSECONDS
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import implementation_of


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration and its result, with its sizes as they were given."""

    configuration: Configuration
    result: Result
    given: str  # host memory of each engine
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A figure of a row: its name in JSON and CSV, its value there, and its column in a table.

    A value that is not known is None, and a dash in a table. In a title, ``{slot}`` and ``{hit}``
    stand for the units of capacities and of hits.
    """

    name: str
    value: Callable[[Row], Any]
    title: str = ""
    text: Callable[[Any], str] = str
    numeric: bool = True

    def text_of(self, row: Row) -> str:
        """Return the text for a row."""
        value = self.value(row)
        return "-" if value is None else self.text(value)

    def column(self, rows: Sequence[Row]) -> Column:
        """Return the column of a table."""
        groups = rows[0].configuration.groups
        title = self.title.format(slot=f"{groups.slot_name}s", hit=groups.hit_name)
        return column(title, [self.text_of(row) for row in rows], numeric=self.numeric)


def milliseconds(duration: float) -> str:
    """Return seconds as milliseconds with three significant digits."""
    return seconds(duration * 1e3)


def seconds(duration: float) -> str:
    """Return a duration with three significant digits, or all digits of its whole units."""
    for digits, limit in ((4, 0.1), (3, 1), (2, 10), (1, 100)):
        if duration < limit:
            return f"{duration:.{digits}f}"
    return f"{duration:,.0f}"


def count(number: int) -> str:
    """Return a number with commas."""
    return f"{number:,}"


def rounded(number: float) -> str:
    """Return a number without its fraction, with commas."""
    return f"{number:,.0f}"


def _of(name: str, title: str = "", text: Callable[[Any], str] = count, **more: Any) -> Field:
    """Return the field of a value of a configuration."""
    return Field(name, lambda row: getattr(row.configuration, name), title, text, **more)


def _found(
    name: str, title: str = "", text: Callable[[Any], str] = count, *, in_ceilings: bool = True
) -> Field:
    """Return the field of a value of a result, which ceilings may lack."""

    def value(row: Row) -> Any:
        is_known = in_ceilings or row.configuration.policy not in CEILINGS
        return getattr(row.result, name) if is_known else None

    return Field(name, value, title, text)


def _share(place: str, title: str) -> Field:
    """Return the field of the blocks found in a place, in a table as a share of all."""
    name = f"{place}_hits"

    def text_of(row: Row) -> str:
        return percent_text(getattr(row.result, name) / (row.result.blocks or 1))

    return Field(f"{name}_share", text_of, title, str)


def _timed(
    name: str, title: str, value: Callable[[Result], float], text: Callable[[Any], str]
) -> Field:
    """Return the field of a time in the manager, None if that was not measured."""
    return Field(
        name, lambda row: value(row.result) if row.result.times.count else None, title, text
    )


def _percentile(percent: int) -> Callable[[Result], float]:
    return lambda result: result.times.percentile(percent) / NANOSECONDS


def _tier(name: str, attribute: str) -> Field:
    def value(row: Row) -> Any:
        tier = row.configuration.tier
        return None if tier is None else getattr(tier, attribute)

    return Field(name, value)


def _bytes(name: str, attribute: str, in_groups: str = "") -> Field:
    """Return the field of the bytes moved to or from a place, if that is known.

    With several groups, whose hits are tokens, slots of another attribute are moved.
    """

    def value(row: Row) -> int | None:
        one = row.configuration
        slots = attribute if one.groups.is_plain else in_groups
        moved = getattr(row.result, slots) if slots else None
        return None if moved is None or not one.block_bytes else one.block_bytes * moved

    return Field(name, value)


def _capacity_bytes(row: Row) -> int | None:
    size = row.configuration.block_bytes
    return row.configuration.host * size if size else None


def _implementation(row: Row) -> str | None:
    policy = row.configuration.policy
    return None if policy in CEILINGS else implementation_of(policy)


def _p95_error(row: Row) -> float | None:
    return None if row.result.ttft_p95 is None else p95_error(row.result)


_EACH = (
    *("requests", "device_hits", "host_hits", "tier_hits", "missed_tokens", "stored"),
    *("tier_stored", "ttft_p95", "busy"),
)


def _per_engine(row: Row) -> list[dict[str, Any]]:
    """Return the figures of each engine."""
    engines = row.result.engines or (row.result,)
    return [{name: getattr(one, name) for name in _EACH} for one in engines]


WHICH = (
    _of("engines", "engines"),
    _of("policy", "policy", str, numeric=False),
    _of("router", "router", str, numeric=False),
    Field("capacity", lambda row: row.configuration.host, "capacity\n{slot}", count),
    Field("capacity_given", lambda row: row.given, "given", str),
    Field("capacity_bytes", _capacity_bytes),
    Field("device_blocks", lambda row: row.configuration.device),
    Field("tier_given", lambda row: row.tier, "tier", str, numeric=False),
    _tier("tier", "kind"),
    _tier("tier_blocks", "slots"),
    _tier("tier_policy", "policy"),
    _of("pending"),
    Field("implementation", _implementation, "implementation", str, numeric=False),
)
FOUND = (
    _found("requests", "requests"),
    _found("blocks", "blocks"),
    _found("tokens"),
    _found("asked", "{hit}\nasked for"),
    _found("hits", "hits"),
    _found("hit_ratio", "hit ratio", percent_text),
    _found("device_hits"),
    _found("host_hits"),
    _found("tier_hits"),
    _found("hit_tokens"),
    _found("missed_tokens"),
    _found("token_hit_ratio", "tokens hit", percent_text),
    _found("missed_p50", "tokens missed\np50"),
    _found("missed_p95", "\np95"),
    _found("honest_hit_ratio", "hit ratio\nhonest", percent_text),
    _found("liar_hit_ratio", "hit ratio\nliars", percent_text),
    _found("liar_asked"),
    _found("liar_hits"),
)
KEPT = (
    _found("loaded"),
    _found("stored", "stored"),
    _found("evicted", "evicted", in_ceilings=False),
    _found("refused", "refused", in_ceilings=False),
    _found("not_admitted", "not\nadmitted", in_ceilings=False),
    _found("tier_stored"),
    _bytes("bytes_host_in", "stored", "stored"),
    _bytes("bytes_host_out", "host_hits", "loaded"),
    _bytes("bytes_tier_in", "tier_stored", "tier_stored"),
    _bytes("bytes_tier_out", "tier_hits"),
)
IN_TIME = (
    _found("saved", "prefill\nsaved", percent_text),
    _found("ttft_p50", "first token\np50 s", seconds),
    _found("ttft_p95", "p95\ns", seconds),
    Field("ttft_p95_error", _p95_error),
    _found("ttft_mean", "mean\ns", seconds),
    _found("latency_mean", "whole\nmean s", seconds),
    _found("requests_per_second", "requests\n/s", lambda rate: f"{rate:.3g}"),
    _found("tokens_per_second", "tokens\n/s", rounded),
    _found("busy", "busy", percent_text),
    _found("imbalance", "busiest\nengine/mean", lambda ratio: f"{ratio:.2f}"),
    _found("placement"),
)
IN_MANAGER = (
    _timed("manager_seconds", "", lambda result: result.manager_seconds, seconds),
    _timed("request_seconds_p50", "p50\nms", _percentile(50), milliseconds),
    _timed("request_seconds_p99", "p99\nms", _percentile(99), milliseconds),
    _timed("request_seconds_max", "max\nms", _percentile(100), milliseconds),
    _timed("blocks_per_second", "blocks/s", lambda result: result.blocks_per_second, rounded),
)
FIELDS = {
    field.name: field
    for field in (*(*WHICH, *FOUND, *KEPT, *IN_TIME, *IN_MANAGER), Field("per_engine", _per_engine))
}
"""All fields of a row in JSON and CSV, by name."""

PLACES = (
    _share("device", "blocks on\ndevice"),
    _share("host", "blocks in\nhost"),
    _share("tier", "blocks in\ntier"),
)
"""Columns of the blocks found in each place."""


def columns(rows: Sequence[Row], *names: str) -> list[Column]:
    """Return columns of a table, without those that are not known of any row."""
    fields = [FIELDS[name] for name in names]
    return [
        field.column(rows) for field in fields if any(field.value(row) is not None for row in rows)
    ]


def as_object(row: Row) -> Mapping[str, Any]:
    """Return a row as ``--json`` prints it."""
    return {name: field.value(row) for name, field in FIELDS.items()}
