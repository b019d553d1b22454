"""Make the dashboard and the recording rules that are shipped: grafana.json and rules.yml.

    python .ci/make-dashboard.py [FOLDER]

They are written to kvoffload/watch, or to another folder. Needs grafana-foundation-sdk, which the
library does not need.

A ratio of several engines is a sum over a sum of the same engines: an idle one is in neither, nor
is, for a policy and size, one without a point of it or with a marked point. Estimates are computed
per engine, then added up.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from kvoffload._metrics import WATCH_METRICS, WATCH_PREFIX
from kvoffload.watch.metrics import UNMARKED

TARGET = Path(__file__).parents[1] / "kvoffload" / "watch"
PREFIX = "${prefix}"
"""The prefix of an engine's metrics: a variable of the dashboard, filled in for rules."""
WINDOW = "15m"
"""Range of the recording rules."""
SELECTOR = '{model_name=~"$model", engine=~"$engine"}'

METRICS = {metric.name: metric for metric in WATCH_METRICS}
SHADOW = "ignoring(policy, memory) group_left()"
POINT = "ignoring(policy, memory, marks) group_left()"
FLEET = "job, model_name"
"""Labels that tell fleets apart."""


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


class Names:
    """The series of metrics under a prefix, with a selector, over a range."""

    def __init__(self, prefix: str, selector: str, window: str) -> None:
        self.prefix = prefix
        self.selector = selector
        self.window = window

    def gauge(self, name: str, **labels: str) -> str:
        """Return a gauge."""
        return self._series(name, "gauge", "", labels)

    def rate(self, name: str, **labels: str) -> str:
        """Return the rate of a counter."""
        return f"rate({self._series(name, 'counter', '_total', labels)}[{self.window}])"

    def buckets(self, name: str) -> str:
        """Return the rates of the buckets of a histogram."""
        return f"rate({self._series(name, 'histogram', '_bucket', {})}[{self.window}])"

    def _series(self, name: str, kind: str, suffix: str, labels: dict[str, str]) -> str:
        metric = METRICS[name]
        if metric.kind != kind or not set(labels) <= set(metric.labels):
            raise ValueError(f"{name} is no {kind} with the labels {sorted(labels)}")
        more = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        inside = ", ".join(filter(None, [self.selector.strip("{}"), more]))
        return f"{self.prefix}{WATCH_PREFIX}{name}{suffix}" + (f"{{{inside}}}" if inside else "")

    # -- of each engine, by policy and memory ------------------------------------------------------

    def points(self) -> str:
        """Return the points without marks in the watches' window; a NaN is not one."""
        return f"{self.gauge('shadow_hit_ratio', marks=UNMARKED)} >= 0"

    def scaled(self, name: str) -> str:
        """Return a shadow's counts, of all blocks, if its point is given without marks.

        In vLLM gauges may have a label ``pid`` that counters have not.
        """
        return (
            f"({self.rate(name)} / {SHADOW} ({self.rate('base_missed_blocks')} > 0) * {SHADOW} "
            f"{self.rate('missed_blocks')} and ignoring(marks, pid) ({self.points()}))"
        )

    def beside(self, scaled: str, value: str) -> str:
        """Return a value of the engine beside each of those points."""
        return f"(0 * {scaled} + {SHADOW} {value})"


def panels() -> Iterator[Panel]:
    """Yield the panels, in their order."""
    of = Names(PREFIX, SELECTOR, "$__rate_interval")
    asked, missed = of.rate("asked_blocks"), of.rate("missed_blocks")
    shadow, stores = of.scaled("shadow_missed_blocks"), of.scaled("shadow_stored_blocks")
    by = "sum by (policy, memory) "
    there = f"{by}{of.beside(shadow, asked)}"
    yield Panel(
        "Does it pay?",
        "stat",
        "percentunit",
        "Share of the requested blocks that were hits.",
        (Target(f"1 - sum({missed}) / (sum({asked}) > 0)", "hit ratio"),),
    )
    yield Panel(
        "Watched managers",
        "stat",
        "short",
        "Their blocks of memory and their policies.",
        (
            Target(f"sum({of.gauge('capacity_blocks')})", "blocks of memory"),
            Target(f"count by (policy, version) ({of.gauge('watch_info')})", "{{policy}}"),
        ),
    )
    yield Panel(
        "Hit ratio by memory and policy",
        "timeseries",
        "percentunit",
        "Estimated from a sample of the live requests over the panel's range. A point covers the "
        "engines that report it without marks; to compare points, use the gains below.",
        (Target(f"1 - {by}{shadow} / {there}", "{{policy}} {{memory}}x"),),
    )
    yield Panel(
        "Gain of other sizes and policies",
        "timeseries",
        "percentunit",
        "Estimated hit ratio minus the present one, of the engines that report the point without "
        "marks. If the gain of more memory is far above 0, more memory pays.",
        (
            Target(
                f"({by}{of.beside(shadow, missed)} - {by}{shadow}) / {there}",
                "{{policy}} {{memory}}x",
            ),
        ),
    )
    weight = of.gauge("window_asked_blocks")
    points = f"({of.points()})"
    weights = f"{by}(0 * {points} + {POINT} {weight})"
    errors = f"({of.gauge('shadow_error')} and ignoring(marks) {points}) * {SHADOW} {weight}"
    yield Panel(
        "Hit ratio by memory and policy, in the watch's window",
        "timeseries",
        "percentunit",
        "Each watch's estimate, weighted by its requested blocks, and the half-width of the 95 % "
        "interval; absent with too little data or a mark.",
        (
            Target(
                f"{by}({points} * {POINT} {weight}) / ({weights} > 0)", "{{policy}} {{memory}}x"
            ),
            Target(f"({by}(({errors}) ^ 2)) ^ 0.5 / ({weights} > 0)", "± {{policy}} {{memory}}x"),
        ),
    )
    marked = of.gauge("shadow_hit_ratio")
    yield Panel(
        "Unreliable points",
        "timeseries",
        "short",
        "Engines whose estimate is marked or withheld, and the reason.",
        (
            Target(
                f"count by (policy, memory, marks) ({marked} >= 0) "
                f"unless count by (policy, memory, marks) ({points})",
                "{{policy}} {{memory}}x marked: {{marks}}",
            ),
            Target(
                f"count by (policy, memory, reason) ({of.gauge('shadow_withheld')} >= 0)",
                "{{policy}} {{memory}}x withheld: {{reason}}",
            ),
        ),
    )
    causes = of.rate("sampled_missed_blocks")
    yield Panel(
        "Why blocks were missed",
        "timeseries",
        "percentunit",
        "Causes of the misses in the sample, as shares.",
        (
            Target(
                f"sum by (cause) ({causes}) / on() group_left() (sum({causes}) > 0)", "{{cause}}"
            ),
        ),
    )
    left = of.rate("sampled_evicted_blocks")
    unused = of.rate("sampled_evicted_blocks", used="false")
    yield Panel(
        "Stored in vain",
        "timeseries",
        "percentunit",
        "Share of the evicted blocks that had no hit since their store.",
        (Target(f"sum({unused}) / (sum({left}) > 0)", "evicted without a hit"),),
    )
    yield Panel(
        "Stores per hit",
        "timeseries",
        "short",
        "Stored blocks per hit: of the present policy, and estimated for others.",
        (
            Target(f"sum({of.rate('stored_blocks')}) / (sum({asked}) - sum({missed}) > 0)", "now"),
            Target(
                f"{by}{stores} / ({by}{of.beside(stores, asked)} - {by}"
                f"{of.beside(stores, missed)} > 0)",
                "{{policy}} {{memory}}x, per present hit",
            ),
        ),
    )
    yield Panel(
        "Blocks",
        "timeseries",
        "cps",
        "Blocks, refused stores and resets of the cache, per second.",
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
                "resets",
            )
        ),
    )
    yield Panel(
        "Tokens withheld by windows and states",
        "timeseries",
        "cps",
        "Tokens per second that the full KV groups had but that were not loaded because a window "
        "or a state was missing. Above 5 % of the hits, points have the mark tails.",
        (Target(f"sum({of.rate('tail_missed_tokens')})", "tokens"),),
    )
    ages = f"sum by (le) ({of.buckets('eviction_age_seconds')})"
    yield Panel(
        "Hints of clients",
        "timeseries",
        "cps",
        "Requests per second whose client announced the end of its session or its return.",
        (Target(f"sum by (source, kind) ({of.rate('hints')})", "{{source}}: {{kind}}"),),
    )
    returns = f"({of.gauge('hint_returns')} >= 0)"
    yield Panel(
        "Announced returns",
        "timeseries",
        "short",
        "Requests that returned to blocks whose return a client had announced, since the engines' "
        "last reset.",
        (Target(f"sum by (source) {returns}", "{{source}}"),),
    )
    factor = f"({of.gauge('hint_factor')} >= 0)"
    yield Panel(
        "Quality of hints",
        "timeseries",
        "short",
        "Greatest factor by which a source's announced times multiply the chance that a block is "
        "used: between 1 and 2 if they mean nothing. Weighted by returns.",
        (
            Target(
                f"sum by (source) ({factor} * {returns}) / "
                f"(sum by (source) ({returns} and {factor}) > 0)",
                "{{source}}",
            ),
        ),
    )
    trials = f"({of.gauge('hint_hit_ratio')} >= 0)"
    beside = f"ignoring(trial) group_left() {weight}"
    error, followed = f"({of.gauge('hint_error')} >= 0)", f"({of.gauge('hints_followed')} >= 0)"
    yield Panel(
        "Gain by hints of returns",
        "timeseries",
        "percentunit",
        "Hit ratios of two small caches on a sample of the blocks, one of which heeds the hints; "
        "the half-width of the 95 % interval of their difference; and the share of the traffic "
        "whose engines follow the hints now. Weighted by requested blocks.",
        (
            Target(
                f"sum by (trial) ({trials} * {beside}) / "
                f"(sum by (trial) (0 * {trials} + {beside}) > 0)",
                "{{trial}}",
            ),
            Target(f"sum(({error} * {weight}) ^ 2) ^ 0.5 / (sum(0 * {error} + {weight}) > 0)", "±"),
            Target(
                f"sum({followed} * {weight}) / (sum(0 * {followed} + {weight}) > 0)", "followed"
            ),
        ),
    )
    yield Panel(
        "Age at eviction",
        "timeseries",
        "s",
        "Seconds from the last use of a block to its eviction.",
        tuple(
            Target(f"histogram_quantile({share}, {ages})", f"{share:.0%} are younger")
            for share in (0.1, 0.5, 0.9)
        ),
    )
    yield Panel(
        "Overdue transfers",
        "timeseries",
        "short",
        "Blocks that transfers past their deadline still pin or keep pending.",
        (Target(f"sum by (kind) ({of.gauge('overdue_blocks')})", "overdue {{kind}}s"),),
    )
    yield Panel(
        "Oldest open transfer",
        "timeseries",
        "s",
        "Its age.",
        (Target(f"max by (kind) ({of.gauge('oldest_open_seconds')})", "{{kind}}"),),
    )


def rules() -> list[Rule]:
    """Return the recording rules: of each engine with all its labels, then of each fleet."""
    of = Names(PREFIX, "", WINDOW)
    asked, missed = of.rate("asked_blocks"), of.rate("missed_blocks")
    sampled = of.rate("sampled_missed_blocks")
    left = of.rate("sampled_evicted_blocks")
    unused = of.rate("sampled_evicted_blocks", used="false")
    shadow, stores = of.scaled("shadow_missed_blocks"), of.scaled("shadow_stored_blocks")
    fleet = f"sum by ({FLEET})"
    by = f"sum by ({FLEET}, policy, memory) "
    there = f"{by}{of.beside(shadow, asked)}"
    all_sampled = f"({fleet} ({sampled}) > 0)"
    values = {
        "hit_ratio": f"1 - {missed} / ({asked} > 0)",
        "shadow_hit_ratio": f"1 - {shadow} / {SHADOW} ({asked} > 0)",
        "shadow_stores_per_asked_block": f"{stores} / {SHADOW} ({asked} > 0)",
        "missed_share": (
            f"{sampled} / ignoring(cause) group_left() (sum without (cause) ({sampled}) > 0)"
        ),
        "unused_share": f"sum without (used) ({unused}) / (sum without (used) ({left}) > 0)",
        "fleet_hit_ratio": f"1 - {fleet} ({missed}) / ({fleet} ({asked}) > 0)",
        "fleet_shadow_hit_ratio": f"1 - {by}{shadow} / {there}",
        "fleet_shadow_gain": f"({by}{of.beside(shadow, missed)} - {by}{shadow}) / {there}",
        "fleet_shadow_stores_per_asked_block": f"{by}{stores} / {by}{of.beside(stores, asked)}",
        "fleet_missed_share": (
            f"sum by ({FLEET}, cause) ({sampled}) / ignoring(cause) group_left() {all_sampled}"
        ),
        "fleet_unused_share": f"{fleet} ({unused}) / ({fleet} ({left}) > 0)",
    }
    return [Rule(f"kvoffload:{name}:rate{WINDOW}", expr) for name, expr in values.items()]


# -- output ------------------------------------------------------------------------------------

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
BUILDERS = {"stat": stat.Panel, "timeseries": timeseries.Panel}
ALL = ".*"


def panel(found: Panel):
    """Return the builder of a panel."""
    builder = (
        BUILDERS[found.kind]()
        .title(found.title)
        .description(found.description)
        .unit(found.unit)
        .datasource(SOURCE)
        .height(8)
        .span(12)
    )
    for number, target in enumerate(found.targets):
        query = prometheus.Dataquery().expr(target.expr).legend_format(target.legend)
        builder = builder.with_target(query.ref_id(chr(ord("A") + number)).datasource(SOURCE))
    return builder


def variable(name: str, label: str):
    """Return the builder of a variable that is a label of the series."""
    series = '{__name__=~".*' + WATCH_PREFIX + 'asked_blocks_total"}'
    return (
        dashboard.QueryVariable(name)
        .label({"model": "Model", "engine": "Engine"}[name])
        .query(f"label_values({series}, {label})")
        .datasource(SOURCE)
        .include_all(True)
        .all_value(ALL)
        .multi(True)
    )


def rules_yaml() -> str:
    """Return the rules as a file that Prometheus reads, once the prefix is filled in."""
    lines = ["groups:", "  - name: kvoffload", "    rules:"]
    for rule in rules():
        # A string of JSON is one of YAML.
        lines += [f"      - record: {rule.record}", f"        expr: {json.dumps(rule.expr)}"]
    return "\n".join([*lines, ""])


def grafana_json() -> str:
    """Return the dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard("KV-cache offloading")
        .uid("kvoffload")
        .tags(["kvoffload"])
        .description("Does offloading pay, and what would pay more?")
        .refresh("30s")
        .time("now-3h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(variable("model", "model_name"))
        .with_variable(variable("engine", "engine"))
        .with_variable(
            dashboard.TextBoxVariable("prefix").label("Prefix of the names").default_value("")
        )
    )
    for found in panels():
        built = built.with_panel(panel(found))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    (folder / "grafana.json").write_text(grafana_json(), encoding="utf-8")
    (folder / "rules.yml").write_text(rules_yaml(), encoding="utf-8")


if __name__ == "__main__":
    main()
