"""The dashboard and the recording rules, as `.ci/make-dashboard.py` has made them."""

from __future__ import annotations

from importlib import resources

__all__ = ["grafana_json", "rules_yaml"]


def grafana_json() -> str:
    """Return the dashboard as Grafana imports it."""
    return _shipped("grafana.json")


def rules_yaml(prefix: str = "") -> str:
    """Return the recording rules as Prometheus reads them; engines put `prefix` before names."""
    return _shipped("rules.yml").replace("${prefix}", prefix)


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
