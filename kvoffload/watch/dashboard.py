"""The dashboard and the recording rules that `.ci/make-dashboard.py` generates."""

from __future__ import annotations

from importlib import resources

__all__ = ["grafana_json", "rules_yaml"]


def grafana_json() -> str:
    """Return the dashboard in Grafana's import format."""
    return _shipped("grafana.json")


def rules_yaml(prefix: str = "") -> str:
    """Return Prometheus' recording rules; `prefix` is what an engine puts before metric names."""
    return _shipped("rules.yml").replace("${prefix}", prefix)


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
