"""The dashboard and the recording rules: grafana.json and rules.yml, which are written by hand.

A ratio of several engines is a sum over a sum of the same engines: an idle one is in neither, nor
is, for a policy and size, one without a point of it or with a marked point. Estimates are computed
per engine, then added up. In vLLM gauges may have a label ``pid`` that counters have not: then the
largest counts. A rule is an expression of one engine with all its labels, or of a fleet, which job
and model_name tell apart.
"""

from __future__ import annotations

from importlib import resources


def grafana_json() -> str:
    """Return the dashboard in Grafana's import format."""
    return _shipped("grafana.json")


def rules_yaml(prefix: str = "") -> str:
    """Return Prometheus' recording rules; `prefix` is what an engine puts before metric names."""
    return _shipped("rules.yml").replace("${prefix}", prefix)


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
