"""``kvoffload demo``: what it says is next works, with `top` and with Prometheus' own check."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

for module in ("click", "rich", "msgspec", "prometheus_client"):
    pytest.importorskip(module, reason="the command needs the watch extra")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from kvoffload import IMPLEMENTATION  # noqa: E402
from kvoffload._metrics import WATCH_METRICS  # noqa: E402
from kvoffload.traces import Workload, write_trace  # noqa: E402

from .conftest import BARE, COMMAND, heed_signals, run_shell  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="ends a process by SIGINT"),
    pytest.mark.skipif(IMPLEMENTATION == "python", reason="a watch needs the extensions"),
]


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run the command until it has said what is next; give the process, that text and host:port."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--port", "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=BARE,
        preexec_fn=heed_signals,  # noqa: PLW1509 (no thread yet)
    ) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "dashboard grafana" in line:
                    break
            text = "".join(lines)
            target = re.match(r"serving http://(127\.0\.0\.1:\d+)/metrics until Ctrl-C", text)
            assert target, text or process.stderr.read()
            yield process, text, target[1]
        finally:
            process.kill()


def metrics(target: str) -> dict[str, float]:
    """Scrape as Prometheus 2 does; return the samples by name and labels."""
    wanted = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}
    request = urllib.request.Request(f"http://{target}/metrics", headers=wanted)
    with urllib.request.urlopen(request, timeout=300) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in families
            for sample in family.samples
        }


LABELS = "[('engine', '0'), ('model_name', 'demo')]"


@pytest.mark.thorough
def test_it_serves_what_an_engine_would_until_control_c(tmp_path):
    with running("--rate", 5000) as (process, _, target):
        asked = f"vllm:kvoffload_asked_blocks_total{LABELS}"
        while (found := metrics(target))[asked] < 10_000:  # some 1,000 requests
            pass
        for metric in WATCH_METRICS:
            # All points are known, and its clients say nothing.
            if metric.name != "shadow_withheld" and not metric.name.startswith("hint"):
                assert any(name.startswith(f"vllm:kvoffload_{metric.name}") for name in found)
        assert found[f"vllm:kvoffload_capacity_blocks{LABELS}"] == 2000
        done = run_shell(f"kvoffload top {target} --once", environment=BARE | {"COLUMNS": "80"})
        assert done.code == 0
        assert "policy lru, 2,000 blocks of memory" in done.out
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 130


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")
def test_prometheus_takes_the_configuration_and_the_rules_that_it_prints(tmp_path):
    with running("--prefix", "ray_vllm_") as (_, text, target):
        pass
    configuration = text.partition("prometheus.yml:\n")[2].partition("\n\n")[0]
    assert target in configuration
    (tmp_path / "prometheus.yml").write_text(
        "".join(line.removeprefix("  ") for line in configuration.splitlines(keepends=True))
    )
    (rules,) = re.findall(r"^  (kvoffload dashboard rules .*)$", text, re.MULTILINE)
    assert run_shell(f'cd "$FOLDER" && {rules}', FOLDER=tmp_path).code == 0
    assert "rate(ray_vllm_kvoffload_missed_blocks_total[15m])" in (
        (tmp_path / "rules.yml").read_text()
    )
    checked = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_trace_is_replayed_once_in_a_share_of_its_blocks(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trace(Workload(200), path)
    blocks = [block for request in Workload(200) for block in request.hash_ids]
    options = ("--rate", 100_000, "--prefix", "", "--policy", "arc")
    with running(path, *options) as (process, text, target):
        capacity = len(set(blocks)) // 20
        assert f"{path}, 100000 requests per second; arc, {capacity:,} blocks of memory" in text
        assert process.stderr.readline() == (
            "note: the trace ended after 200 requests; its metrics are served until Ctrl-C\n"
        )
        found = metrics(target)
        assert found[f"kvoffload_asked_blocks_total{LABELS}"] == len(blocks)
        assert found[f"kvoffload_capacity_blocks{LABELS}"] == capacity


def test_a_port_that_is_taken_is_said(kvoffload):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = kvoffload("demo", "--port", port)
    assert done.code == 2
    assert done.error == f"--port must be free, got {port}, on which another program listens"
