"""``kvoffload dashboard``: files for Grafana and Prometheus that show watches."""

from __future__ import annotations

import click

from ._group import Group
from ._options import check_prefix, examples


@click.group(
    cls=Group,
    epilog=examples(
        "kvoffload dashboard grafana > dashboard.json", "kvoffload dashboard rules > rules.yml"
    ),
)
def dashboard() -> None:
    """Print a Grafana dashboard and Prometheus rules for the metrics of watches."""


@dashboard.command(epilog=examples("kvoffload dashboard grafana > dashboard.json"))
def grafana() -> None:
    """Print the dashboard for import into Grafana.

    Its variable `prefix` is the text before kvoffload_ in the names of the metrics.
    """
    from kvoffload.watch.dashboard import grafana_json

    click.echo(grafana_json(), nl=False)


@dashboard.command(epilog=examples("kvoffload dashboard rules --prefix vllm: > rules.yml"))
@click.option("--prefix", default="", help="Text before kvoffload_ in the names, such as vllm:")
def rules(prefix: str) -> None:
    """Print recording rules for Prometheus."""
    from kvoffload.watch.dashboard import rules_yaml

    check_prefix(prefix)
    click.echo(rules_yaml(prefix), nl=False)
