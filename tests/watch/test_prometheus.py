"""A real Prometheus scrapes a replay; every expression of dashboard and rules returns data."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")

from kvoffload.watch.dashboard import PANELS, grafana_json, rules, rules_yaml
from kvoffload.watch.metrics import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
REPLAY = Path(__file__).with_name("replay.py")
VARIABLES = {"${prefix}": "", "$model": ".*", "$engine": ".*", "$__rate_interval": "15s"}
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs Debian's prometheus",
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def wait_for(what: str, seconds: float, found: Any) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found():
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"no {what} within {seconds} s")


@pytest.fixture(scope="module")
def exporter() -> Iterator[str]:
    """Run a replay in a process of its own; return the address of its metrics."""
    port = free_port()
    with subprocess.Popen([sys.executable, str(REPLAY), str(port)]) as process:
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            wait_for("shadow_hit_ratio", 90, lambda: b"kvoffload_shadow_hit_ratio{" in fetch(url))
            yield url
        finally:
            process.kill()


@pytest.fixture(scope="module")
def query(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Let a Prometheus scrape the replay for a while; return a function that asks it."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rules.yml").write_text(rules_yaml())
    target = urllib.parse.urlsplit(exporter).netloc
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}\n"
        "rule_files: [rules.yml]\n"
        f"scrape_configs: [{{job_name: replay, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:

        def ask(expr: str) -> list[dict[str, Any]]:
            answer = json.loads(fetch(f"{base}/api/v1/query?query={urllib.parse.quote(expr)}"))
            assert answer["status"] == "success"
            found: list[dict[str, Any]] = answer["data"]["result"]
            return found

        try:
            wait_for("scrapes", 60, lambda: ask("count_over_time(up[1m]) > 12"))
            yield ask
        finally:
            process.kill()


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


TARGETS = [(panel.title, target.expr) for panel in PANELS for target in panel.targets]


@needs_prometheus
def test_every_expression_of_the_dashboard_and_of_the_rules_returns_data(query):
    """One test: each process of pytest-xdist would wait for a Prometheus of its own."""
    for title, expr in TARGETS:
        found = query(filled(expr))
        assert found, (title, expr)
        assert any(math.isfinite(float(series["value"][1])) for series in found), (expr, found)
    for rule in rules():
        assert query(rule.expr), rule.expr
        wait_for(rule.record, 15, lambda record=rule.record: query(record))


@needs_prometheus
def test_the_curve_of_the_counters_is_that_of_the_watch(query):
    """Over all its life: PromQL says what `Watch.report` says."""
    names = {name: f"{PREFIX}{name}_total" for name in ("missed_blocks", "asked_blocks")}
    expr = (
        f"1 - {PREFIX}shadow_missed_blocks_total / ignoring(policy, memory) group_left() "
        f"{PREFIX}base_missed_blocks_total * ignoring(policy, memory) group_left() "
        f"({names['missed_blocks']} / {names['asked_blocks']}) "
        f"- {PREFIX}shadow_hit_ratio"
    )
    found = {
        (series["metric"]["policy"], series["metric"]["memory"]): float(series["value"][1])
        for series in query(expr)
    }
    assert ("lru", "2") in found
    # The counters of the shadows are of the policies' half of the sample, the gauge is of it all.
    assert all(abs(difference) < 0.02 for difference in found.values()), found


@needs_prometheus
@pytest.mark.parametrize("prefix", ["", "vllm:", "ray_vllm_"])
def test_promtool_finds_the_rules_sound(tmp_path, prefix):
    path = tmp_path / "rules.yml"
    path.write_text(rules_yaml(prefix))
    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(rules())} rules found" in done.stdout


def test_every_metric_is_on_the_dashboard():
    text = " ".join(expr for _, expr in TARGETS)
    for metric in METRICS:
        assert f"{PREFIX}{metric.name}" in text, metric.name


def test_the_dashboard_that_is_shipped_has_these_panels():
    shipped = json.loads(grafana_json())
    found = [
        (panel["title"], [target["expr"] for target in panel["targets"]])
        for panel in shipped["panels"]
    ]
    assert found == [(panel.title, [each.expr for each in panel.targets]) for panel in PANELS]
    names = [variable["name"] for variable in shipped["templating"]["list"]]
    assert names == ["datasource", "model", "engine", "prefix"]


def test_the_dashboard_that_is_shipped_was_made_by_its_script(tmp_path):
    pytest.importorskip("grafana_foundation_sdk", reason="making it needs the dashboard extra")
    script = ROOT / ".ci" / "make-dashboard.py"
    if not script.exists():
        pytest.skip("the source tree is not beside the tests")
    target = tmp_path / "grafana.json"
    subprocess.run([sys.executable, str(script), str(target)], check=True)
    assert target.read_text() == grafana_json()


def test_top_reads_the_replay(exporter, capsys):
    pytest.importorskip("rich", reason="the command needs the cli extra")
    from kvoffload.cli import main

    assert main(["top", exporter, "--json"]) == 0
    looked = json.loads(capsys.readouterr().out)
    assert looked["engines"] == 1
    assert {(each["policy"], each["memory"]) for each in looked["shadows"]} >= {
        ("lru", 2.0),
        ("hit-density", 1.0),
    }
    assert sum(looked["causes"].values()) == pytest.approx(1)
