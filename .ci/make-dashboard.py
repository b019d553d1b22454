"""Write kvoffload/watch/grafana.json, or another file, from kvoffload.watch.dashboard.

Needs grafana-foundation-sdk, which nothing that is installed needs.
"""

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from kvoffload.watch.dashboard import PANELS, Panel
from kvoffload.watch.metrics import PREFIX

TARGET = Path(__file__).parents[1] / "kvoffload" / "watch" / "grafana.json"
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
    series = '{__name__=~".*' + PREFIX + 'asked_blocks_total"}'
    return (
        dashboard.QueryVariable(name)
        .label({"model": "Model", "engine": "Engine"}[name])
        .query(f"label_values({series}, {label})")
        .datasource(SOURCE)
        .include_all(True)
        .all_value(ALL)
        .multi(True)
    )


def main() -> None:
    """Write the file."""
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
    for found in PANELS:
        built = built.with_panel(panel(found))
    text = JSONEncoder(sort_keys=True, indent=2).encode(built.build())
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
