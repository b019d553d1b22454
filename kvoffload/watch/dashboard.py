"""The panels of the dashboard and the recording rules, as expressions over the table of metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from .metrics import METRICS, PREFIX

__all__ = ["PANELS", "Panel", "Rule", "Target", "grafana_json", "rules", "rules_yaml"]

WINDOW = "15m"
"""What the recording rules look back."""
SELECTOR = '{model_name=~"$model", engine=~"$engine"}'

_METRICS = {metric.name: metric for metric in METRICS}
_SHADOW = "ignoring(policy, memory) group_left()"


class Target(NamedTuple):
    """An expression, and the legend of its series."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """A panel of the dashboard; `unit` is Grafana's name of it."""

    title: str
    kind: str
    unit: str
    description: str
    targets: tuple[Target, ...]


class Rule(NamedTuple):
    """A recording rule."""

    record: str
    expr: str


class _Names:
    """The series of metrics under a prefix, with a selector, over a range."""

    def __init__(self, prefix: str, selector: str, window: str) -> None:
        self.prefix = prefix
        self.selector = selector
        self.window = window

    def gauge(self, name: str, **labels: str) -> str:
        return self._series(name, "gauge", "", labels)

    def rate(self, name: str, **labels: str) -> str:
        return f"rate({self._series(name, 'counter', '_total', labels)}[{self.window}])"

    def buckets(self, name: str) -> str:
        return f"rate({self._series(name, 'histogram', '_bucket', {})}[{self.window}])"

    def _series(self, name: str, kind: str, suffix: str, labels: dict[str, str]) -> str:
        metric = _METRICS[name]
        if metric.kind != kind or not set(labels) <= set(metric.labels):
            raise ValueError(f"{name} is no {kind} with the labels {sorted(labels)}")
        more = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        inside = ", ".join(filter(None, [self.selector.strip("{}"), more]))
        return f"{self.prefix}{PREFIX}{name}{suffix}" + (f"{{{inside}}}" if inside else "")


def _panels() -> Iterator[Panel]:
    """Yield the panels; ``$prefix`` is what an engine puts in front of the names."""
    of = _Names("${prefix}", SELECTOR, "$__rate_interval")
    asked, missed = f"sum({of.rate('asked_blocks')})", f"sum({of.rate('missed_blocks')})"
    hits = f"({asked} - {missed})"
    scaled = (
        f"{of.rate('shadow_missed_blocks')} / {_SHADOW} {of.rate('base_missed_blocks')}"
        f" * {_SHADOW} {of.rate('missed_blocks')}"
    )
    estimate = f"1 - sum by (policy, memory) ({scaled}) / on() group_left() {asked}"
    yield Panel(
        "Does it pay?",
        "stat",
        "percentunit",
        "Share of the blocks asked for that were there.",
        (Target(f"1 - {missed} / {asked}", "hit ratio"),),
    )
    yield Panel(
        "What is watched",
        "stat",
        "short",
        "Blocks of memory, and the policies in use.",
        (
            Target(f"sum({of.gauge('capacity_blocks')})", "blocks of memory"),
            Target(f"count by (policy, version) ({of.gauge('watch_info')})", "{{policy}}"),
        ),
    )
    yield Panel(
        "Hit ratio by memory and policy",
        "timeseries",
        "percentunit",
        "Estimated from a sample of the live requests, over the range of the panel. Where the "
        "lines for more memory lie far above that for 1, memory pays.",
        (Target(estimate, "{{policy}} {{memory}}x"),),
    )
    yield Panel(
        "Hit ratio by memory and policy, in the watch's window",
        "timeseries",
        "percentunit",
        "As each watch estimates it; absent where there is not enough data.",
        (
            Target(
                f"avg by (policy, memory) ({of.gauge('shadow_hit_ratio')})",
                "{{policy}} {{memory}}x",
            ),
            Target(
                f"max by (policy, memory) ({of.gauge('shadow_error')})", "± {{policy}} {{memory}}x"
            ),
        ),
    )
    one = of.rate("shadow_missed_blocks", memory="1")
    gain = (
        f"sum by (policy) ({of.rate('missed_blocks')} - ignoring(policy, memory) group_right() "
        f"{one} / {_SHADOW} {of.rate('base_missed_blocks')} * {_SHADOW} {of.rate('missed_blocks')})"
        f" / on() group_left() {asked}"
    )
    yield Panel(
        "Gain of other policies at this memory",
        "timeseries",
        "percentunit",
        "Hit ratio that each would have, less that of now.",
        (Target(gain, "{{policy}}"),),
    )
    causes = of.rate("sampled_missed_blocks")
    yield Panel(
        "Why blocks were missed",
        "timeseries",
        "percentunit",
        "Shares of the misses of the sample.",
        (Target(f"sum by (cause) ({causes}) / on() group_left() sum({causes})", "{{cause}}"),),
    )
    left = of.rate("sampled_evicted_blocks")
    unused = of.rate("sampled_evicted_blocks", used="false")
    yield Panel(
        "Stored for nothing",
        "timeseries",
        "percentunit",
        "Share of the evicted blocks that were never hit since they were stored.",
        (Target(f"sum({unused}) / sum({left})", "evicted without a hit"),),
    )
    yield Panel(
        "Stores for each hit",
        "timeseries",
        "short",
        "Blocks that were stored, and that other policies would have stored, for each hit.",
        (
            Target(f"sum({of.rate('stored_blocks')}) / {hits}", "now"),
            Target(
                f"sum by (policy, memory) ({of.rate('shadow_stored_blocks')} / {_SHADOW} "
                f"{of.rate('base_missed_blocks')} * {_SHADOW} {of.rate('missed_blocks')})"
                f" / on() group_left() {hits}",
                "{{policy}} {{memory}}x, each hit of now",
            ),
        ),
    )
    yield Panel(
        "Blocks",
        "timeseries",
        "cps",
        "Blocks a second.",
        tuple(
            Target(f"sum({of.rate(name)})", name.replace("_", " "))
            for name in (
                "asked_blocks",
                "missed_blocks",
                "stored_blocks",
                "evicted_blocks",
                "declined_blocks",
                "refused_stores",
                "failed_blocks",
            )
        ),
    )
    ages = f"sum by (le) ({of.buckets('eviction_age_seconds')})"
    yield Panel(
        "Age at eviction",
        "timeseries",
        "s",
        "Seconds from the last use of a block to its eviction: how long memory remembers.",
        tuple(
            Target(f"histogram_quantile({share}, {ages})", f"{share:.0%} are younger")
            for share in (0.1, 0.5, 0.9)
        ),
    )
    yield Panel(
        "Transfers that do not end",
        "timeseries",
        "short",
        "Blocks of transfers that are past their deadline, still pinned or pending.",
        (Target(f"sum by (kind) ({of.gauge('overdue_blocks')})", "overdue {{kind}}s"),),
    )
    yield Panel(
        "Oldest open transfer",
        "timeseries",
        "s",
        "Its age.",
        (Target(f"max by (kind) ({of.gauge('oldest_open_seconds')})", "{{kind}}"),),
    )


PANELS = tuple(_panels())
"""The panels, in their order."""


def rules(prefix: str = "") -> list[Rule]:
    """Return the recording rules; every label of the series is kept.

    Parameters
    ----------
    prefix : str
        What an engine puts in front of the names.

    Returns
    -------
    list of Rule
    """
    of = _Names(prefix, "", WINDOW)
    miss_ratio = f"{of.rate('missed_blocks')} / {of.rate('asked_blocks')}"
    base = f"{_SHADOW} {of.rate('base_missed_blocks')}"
    sampled = of.rate("sampled_missed_blocks")
    left = of.rate("sampled_evicted_blocks")
    unused = of.rate("sampled_evicted_blocks", used="false")
    values = {
        "hit_ratio": f"1 - {miss_ratio}",
        "shadow_hit_ratio": (
            f"1 - {of.rate('shadow_missed_blocks')} / {base} * {_SHADOW} ({miss_ratio})"
        ),
        "shadow_stores_per_asked_block": (
            f"{of.rate('shadow_stored_blocks')} / {base} * {_SHADOW} ({miss_ratio})"
        ),
        "missed_share": f"{sampled} / ignoring(cause) group_left() sum without (cause) ({sampled})",
        "unused_share": f"sum without (used) ({unused}) / sum without (used) ({left})",
    }
    return [Rule(f"kvoffload:{name}:rate{WINDOW}", expr) for name, expr in values.items()]


def rules_yaml(prefix: str = "") -> str:
    """Return the recording rules as a file that Prometheus reads.

    Parameters
    ----------
    prefix : str
        What an engine puts in front of the names.

    Returns
    -------
    str
    """
    lines = ["groups:", "  - name: kvoffload", "    rules:"]
    for rule in rules(prefix):
        # A string of JSON is one of YAML.
        lines += [f"      - record: {rule.record}", f"        expr: {json.dumps(rule.expr)}"]
    return "\n".join([*lines, ""])


def grafana_json() -> str:
    """Return the dashboard as Grafana imports it.

    Returns
    -------
    str
    """
    return resources.files(__package__).joinpath("grafana.json").read_text(encoding="utf-8")
