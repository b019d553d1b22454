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

METRICS = {metric.name: metric for metric in WATCH_METRICS}
SUFFIXES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
SHADOW = "ignoring(policy, memory) group_left()"
POINT = "ignoring(policy, memory, marks) group_left()"
FLEET = "job, model_name"
"""Labels that tell fleets apart."""
POLICY = "{{policy}} {{memory}}x"
"""The legend of a policy and size."""


class Panel(NamedTuple):
    """A panel of the dashboard: Grafana's name of its unit, and the expression of each legend."""

    title: str
    unit: str
    description: str
    targets: dict[str, str]
    builder: type = timeseries.Panel


class Series:
    """The series of metrics with a selector, over a range."""

    def __init__(self, selector: str, window: str) -> None:
        self.selector = selector
        self.window = window

    def __call__(self, name: str, **labels: str) -> str:
        """Return a gauge, or the rate of a counter or of the buckets of a histogram."""
        metric = METRICS[name]
        if not set(labels) <= set(metric.labels):
            raise ValueError(f"{name} does not have the labels {sorted(labels)}")
        more = (f'{label}="{value}"' for label, value in labels.items())
        inside = ", ".join(filter(None, [self.selector, *more]))
        series = f"{PREFIX}{WATCH_PREFIX}{name}{SUFFIXES[metric.kind]}"
        series += f"{{{inside}}}" if inside else ""
        return series if metric.kind == "gauge" else f"rate({series}[{self.window}])"

    # -- of each engine, by policy and memory ------------------------------------------------------

    def points(self) -> str:
        """Return the points without marks in the watches' window; a NaN is not one."""
        return f"{self('shadow_hit_ratio', marks=UNMARKED)} >= 0"

    def scaled(self, name: str) -> str:
        """Return a shadow's counts, of all blocks, if its point is given without marks.

        In vLLM gauges may have a label ``pid`` that counters have not.
        """
        return (
            f"({self(name)} / {SHADOW} ({self('base_missed_blocks')} > 0) * {SHADOW} "
            f"{self('missed_blocks')} and ignoring(marks, pid) ({self.points()}))"
        )

    def beside(self, scaled: str, value: str) -> str:
        """Return a value of the engine beside each of those points."""
        return f"(0 * {scaled} + {SHADOW} {value})"


def panels() -> Iterator[Panel]:
    """Yield the panels, in their order."""
    of = Series('model_name=~"$model", engine=~"$engine"', "$__rate_interval")
    asked, missed = of("asked_blocks"), of("missed_blocks")
    shadow, stores = of.scaled("shadow_missed_blocks"), of.scaled("shadow_stored_blocks")
    by = "sum by (policy, memory) "
    there = f"{by}{of.beside(shadow, asked)}"
    weight, points = of("window_asked_blocks"), f"({of.points()})"
    weights = f"{by}(0 * {points} + {POINT} {weight})"
    errors = f"({of('shadow_error')} and ignoring(marks) {points}) * {SHADOW} {weight}"
    marked, causes = of("shadow_hit_ratio"), of("sampled_missed_blocks")
    left, unused = of("sampled_evicted_blocks"), of("sampled_evicted_blocks", used="false")
    counted = ("asked", "missed", "stored", "evicted", "declined")
    counters = *(f"{name}_blocks" for name in counted), "refused_stores", "failed_blocks", "resets"
    ages = f"sum by (le) ({of('eviction_age_seconds')})"
    returns, factor = f"({of('hint_returns')} >= 0)", f"({of('hint_factor')} >= 0)"
    trials, beside = f"({of('hint_hit_ratio')} >= 0)", f"ignoring(trial) group_left() {weight}"
    error, followed = f"({of('hint_error')} >= 0)", f"({of('hints_followed')} >= 0)"
    yield Panel(
        "Does it pay?",
        "percentunit",
        "Share of the requested blocks that were hits.",
        {"hit ratio": f"1 - sum({missed}) / (sum({asked}) > 0)"},
        stat.Panel,
    )
    yield Panel(
        "Watched managers",
        "short",
        "Their blocks of memory and their policies.",
        {
            "blocks of memory": f"sum({of('capacity_blocks')})",
            "{{policy}}": f"count by (policy, version) ({of('watch_info')})",
        },
        stat.Panel,
    )
    yield Panel(
        "Hit ratio by memory and policy",
        "percentunit",
        "Estimated from a sample of the live requests over the panel's range. A point covers the "
        "engines that report it without marks; to compare points, use the gains below.",
        {POLICY: f"1 - {by}{shadow} / {there}"},
    )
    yield Panel(
        "Gain of other sizes and policies",
        "percentunit",
        "Estimated hit ratio minus the present one, of the engines that report the point without "
        "marks. If the gain of more memory is far above 0, more memory pays.",
        {POLICY: f"({by}{of.beside(shadow, missed)} - {by}{shadow}) / {there}"},
    )
    yield Panel(
        "Hit ratio by memory and policy, in the watch's window",
        "percentunit",
        "Each watch's estimate, weighted by its requested blocks, and the half-width of the 95 % "
        "interval; absent with too little data or a mark.",
        {
            POLICY: f"{by}({points} * {POINT} {weight}) / ({weights} > 0)",
            f"± {POLICY}": f"({by}(({errors}) ^ 2)) ^ 0.5 / ({weights} > 0)",
        },
    )
    yield Panel(
        "Unreliable points",
        "short",
        "Engines whose estimate is marked or withheld, and the reason.",
        {
            f"{POLICY} marked: {{{{marks}}}}": f"count by (policy, memory, marks) ({marked} >= 0) "
            f"unless count by (policy, memory, marks) ({points})",
            f"{POLICY} withheld: {{{{reason}}}}": "count by (policy, memory, reason) "
            f"({of('shadow_withheld')} >= 0)",
        },
    )
    yield Panel(
        "Why blocks were missed",
        "percentunit",
        "Causes of the misses in the sample, as shares.",
        {"{{cause}}": f"sum by (cause) ({causes}) / on() group_left() (sum({causes}) > 0)"},
    )
    yield Panel(
        "Stored in vain",
        "percentunit",
        "Share of the evicted blocks that had no hit since their store.",
        {"evicted without a hit": f"sum({unused}) / (sum({left}) > 0)"},
    )
    yield Panel(
        "Stores per hit",
        "short",
        "Stored blocks per hit: of the present policy, and estimated for others.",
        {
            "now": f"sum({of('stored_blocks')}) / (sum({asked}) - sum({missed}) > 0)",
            f"{POLICY}, per present hit": f"{by}{stores} / "
            f"({by}{of.beside(stores, asked)} - {by}{of.beside(stores, missed)} > 0)",
        },
    )
    yield Panel(
        "Blocks",
        "cps",
        "Blocks, refused stores and resets of the cache, per second.",
        {name.replace("_", " "): f"sum({of(name)})" for name in counters},
    )
    yield Panel(
        "Tokens withheld by windows and states",
        "cps",
        "Tokens per second that the full KV groups had but that were not loaded because a window "
        "or a state was missing. Above 5 % of the hits, points have the mark tails.",
        {"tokens": f"sum({of('tail_missed_tokens')})"},
    )
    yield Panel(
        "Hints of clients",
        "cps",
        "Requests per second whose client announced the end of its session or its return.",
        {"{{source}}: {{kind}}": f"sum by (source, kind) ({of('hints')})"},
    )
    yield Panel(
        "Announced returns",
        "short",
        "Requests that returned to blocks whose return a client had announced, since the engines' "
        "last reset.",
        {"{{source}}": f"sum by (source) {returns}"},
    )
    yield Panel(
        "Quality of hints",
        "short",
        "Greatest factor by which a source's announced times multiply the chance that a block is "
        "used: between 1 and 2 if they mean nothing. Weighted by returns.",
        {
            "{{source}}": f"sum by (source) ({factor} * {returns}) / "
            f"(sum by (source) ({returns} and {factor}) > 0)"
        },
    )
    yield Panel(
        "Gain by hints of returns",
        "percentunit",
        "Hit ratios of two small caches on a sample of the blocks, one of which heeds the hints; "
        "the half-width of the 95 % interval of their difference; and the share of the traffic "
        "whose engines follow the hints now. Weighted by requested blocks.",
        {
            "{{trial}}": f"sum by (trial) ({trials} * {beside}) / "
            f"(sum by (trial) (0 * {trials} + {beside}) > 0)",
            "±": f"sum(({error} * {weight}) ^ 2) ^ 0.5 / (sum(0 * {error} + {weight}) > 0)",
            "followed": f"sum({followed} * {weight}) / (sum(0 * {followed} + {weight}) > 0)",
        },
    )
    yield Panel(
        "Age at eviction",
        "s",
        "Seconds from the last use of a block to its eviction.",
        {
            f"{share:.0%} are younger": f"histogram_quantile({share}, {ages})"
            for share in (0.1, 0.5, 0.9)
        },
    )
    yield Panel(
        "Overdue transfers",
        "short",
        "Blocks that transfers past their deadline still pin or keep pending.",
        {"overdue {{kind}}s": f"sum by (kind) ({of('overdue_blocks')})"},
    )
    yield Panel(
        "Oldest open transfer",
        "s",
        "Its age.",
        {"{{kind}}": f"max by (kind) ({of('oldest_open_seconds')})"},
    )


def rules() -> dict[str, str]:
    """Return the recording rules: of each engine with all its labels, then of each fleet."""
    of = Series("", WINDOW)
    asked, missed = of("asked_blocks"), of("missed_blocks")
    sampled, left = of("sampled_missed_blocks"), of("sampled_evicted_blocks")
    unused = of("sampled_evicted_blocks", used="false")
    shadow, stores = of.scaled("shadow_missed_blocks"), of.scaled("shadow_stored_blocks")
    fleet, by = f"sum by ({FLEET})", f"sum by ({FLEET}, policy, memory) "
    there = f"{by}{of.beside(shadow, asked)}"
    beside_cause = "/ ignoring(cause) group_left()"
    values = {
        "hit_ratio": f"1 - {missed} / ({asked} > 0)",
        "shadow_hit_ratio": f"1 - {shadow} / {SHADOW} ({asked} > 0)",
        "shadow_stores_per_asked_block": f"{stores} / {SHADOW} ({asked} > 0)",
        "missed_share": f"{sampled} {beside_cause} (sum without (cause) ({sampled}) > 0)",
        "unused_share": f"sum without (used) ({unused}) / (sum without (used) ({left}) > 0)",
        "fleet_hit_ratio": f"1 - {fleet} ({missed}) / ({fleet} ({asked}) > 0)",
        "fleet_shadow_hit_ratio": f"1 - {by}{shadow} / {there}",
        "fleet_shadow_gain": f"({by}{of.beside(shadow, missed)} - {by}{shadow}) / {there}",
        "fleet_shadow_stores_per_asked_block": f"{by}{stores} / {by}{of.beside(stores, asked)}",
        "fleet_missed_share": f"sum by ({FLEET}, cause) ({sampled}) {beside_cause} "
        f"({fleet} ({sampled}) > 0)",
        "fleet_unused_share": f"{fleet} ({unused}) / ({fleet} ({left}) > 0)",
    }
    return {f"kvoffload:{name}:rate{WINDOW}": expr for name, expr in values.items()}


# -- output ------------------------------------------------------------------------------------

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def panel(found: Panel):
    """Return the builder of a panel."""
    builder = found.builder().title(found.title).description(found.description).unit(found.unit)
    builder = builder.datasource(SOURCE).height(8).span(12)
    for number, (legend, expr) in enumerate(found.targets.items()):
        query = prometheus.Dataquery().expr(expr).legend_format(legend)
        builder = builder.with_target(query.ref_id(chr(ord("A") + number)).datasource(SOURCE))
    return builder


def variable(name: str, title: str, label: str):
    """Return the builder of a variable that is a label of the series."""
    series = '{__name__=~".*' + WATCH_PREFIX + 'asked_blocks_total"}'
    built = dashboard.QueryVariable(name).label(title).query(f"label_values({series}, {label})")
    return built.datasource(SOURCE).include_all(True).all_value(".*").multi(True)


def rules_yaml() -> str:
    """Return the rules as a file that Prometheus reads, once the prefix is filled in."""
    lines = ["groups:", "  - name: kvoffload", "    rules:"]
    for record, expr in rules().items():
        # A string of JSON is one of YAML.
        lines += [f"      - record: {record}", f"        expr: {json.dumps(expr)}"]
    return "\n".join([*lines, ""])


def grafana_json() -> str:
    """Return the dashboard as Grafana imports it."""
    built = dashboard.Dashboard("KV-cache offloading").uid("kvoffload").tags(["kvoffload"])
    built = built.description("Does offloading pay, and what would pay more?")
    built = built.refresh("30s").time("now-3h", "now")
    for each in (
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        variable("model", "Model", "model_name"),
        variable("engine", "Engine", "engine"),
        dashboard.TextBoxVariable("prefix").label("Prefix of the names").default_value(""),
    ):
        built = built.with_variable(each)
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
