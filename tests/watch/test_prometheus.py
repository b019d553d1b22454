"""A real Prometheus has metrics of three engines; expressions of dashboard and rules are right."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")

from kvoffload._metrics import AGE_BOUNDS, WATCH_METRICS
from kvoffload._metrics import WATCH_PREFIX as PREFIX
from kvoffload.watch import WatchReport
from kvoffload.watch.ages import age_histogram
from kvoffload.watch.dashboard import grafana_json, rules_yaml
from tests.tiers.servers import Server
from tests.waiting import wait_until

from .fleet import HINTED, Fleet

pytestmark = pytest.mark.servers

VARIABLES = {"${prefix}": "", "$model": ".*", "$engine": ".*", "$__rate_interval": "15m"}
SCRAPES = 15  # one a minute
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs Debian's prometheus",
)
Labels = tuple[str, ...]


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()


def prometheus(port: int, _: Path) -> list[str]:
    address = f"--web.listen-address=127.0.0.1:{port}"
    return ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", address]


@pytest.fixture(scope="module")
def query(fleet: Fleet) -> Iterator[Any]:
    """Give a Prometheus the metrics of some minutes up to now; return a function that asks it."""
    server = Server(prometheus)
    folder, last = server.folder, int(time.time())
    with (folder / "metrics").open("w") as file:
        for number in range(1, SCRAPES + 1):
            file.writelines(fleet.scrape(last - 60 * (SCRAPES - number)))
        file.write("# EOF\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "rules.yml").write_text(rules_yaml())
    (folder / "prometheus.yml").write_text(
        "global: {evaluation_interval: 1s}\nrule_files: [rules.yml]\n"
    )

    def ask(expr: str, *, now: bool = False) -> list[dict[str, Any]]:
        moment = {} if now else {"time": last}
        asked = urllib.parse.urlencode({"query": expr, **moment})
        url = f"http://127.0.0.1:{server.port}/api/v1/query?{asked}"
        with urllib.request.urlopen(url, timeout=300) as sent:
            answer = json.load(sent)
        assert answer["status"] == "success"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def has_read() -> object:
        with contextlib.suppress(OSError):  # it is not ready at once
            return ask(f"{PREFIX}asked_blocks_total")

    with server:
        wait_until(has_read, 0.2)
        yield ask


class Counted:
    """The counts of each engine from the first scrape to the last."""

    def __init__(self, fleet: Fleet, query: Any) -> None:
        before, after = fleet.scrapes[0], fleet.scrapes[-1]
        self.engines = [added(new, old) for new, old in zip(after, before, strict=True)]
        self.reports: list[WatchReport] = fleet.reports()
        self.open = [manager.watch.open_seconds() for manager in fleet.managers]
        (rate,) = query(f'rate({PREFIX}asked_blocks_total{{engine="0"}}[15m])')
        self.second = float(rate["value"][1]) / self.engines[0]["asked"]  # of Prometheus' rates

    def sum(self, name: str) -> float:
        return float(sum(engine[name] for engine in self.engines))

    def giving(self) -> dict[Labels, list[int]]:
        """Return the engines that were asked, and give a point without marks, by point."""
        found: dict[Labels, list[int]] = {}
        for index, report in enumerate(self.reports):
            for point in report.points:
                if point.hit_ratio is not None and not point.marks and self.engines[index]["asked"]:
                    found.setdefault((point.policy, f"{point.memory:g}"), []).append(index)
        return found

    def scaled(self, index: int, key: Labels, part: int) -> float:
        """Return what a shadow missed, or stored, of all blocks of an engine."""
        engine = self.engines[index]
        base = engine["shadows"][self.reports[index].policy, 1.0][0]
        found: float = engine["shadows"][key[0], float(key[1])][part] / base * engine["missed"]
        return found

    def each(self, part: int, share: Any) -> dict[Labels, float]:
        """Return what `share` says of the sums of the engines that give each point."""
        return {
            key: share(
                sum(self.scaled(index, key, part) for index in indexes),
                sum(self.engines[index]["asked"] for index in indexes),
                sum(self.engines[index]["missed"] for index in indexes),
            )
            for key, indexes in self.giving().items()
        }

    def per_engine(self, part: int, share: Any) -> dict[Labels, float]:
        return {
            (str(index), *key): share(self.scaled(index, key, part), self.engines[index]["asked"])
            for key, indexes in self.giving().items()
            for index in indexes
        }

    def in_window(self) -> tuple[dict[Labels, float], dict[Labels, float]]:
        """Return the weighted means of the reports' points, and their errors."""
        points: dict[Labels, list[tuple[float, float, float]]] = {}
        for report in self.reports:
            for point in report.points:
                if point.hit_ratio is not None and point.error is not None and not point.marks:
                    points.setdefault((point.policy, f"{point.memory:g}"), []).append(
                        (point.hit_ratio, point.error, report.asked)
                    )
        ratios, errors = {}, {}
        for key, found in points.items():
            asked = sum(weight for _, _, weight in found)
            ratios[key] = sum(ratio * weight for ratio, _, weight in found) / asked
            errors[key] = math.hypot(*(error * weight for _, error, weight in found)) / asked
        return ratios, errors

    def reasons(self, of: Any) -> dict[Labels, float]:
        found: dict[Labels, float] = {}
        for report in self.reports:
            for point in report.points:
                if of(point):
                    key = (point.policy, f"{point.memory:g}", of(point))
                    found[key] = found.get(key, 0) + 1
        return found

    def causes(self, engines: list[int]) -> dict[Labels, float]:
        names = list(self.reports[0].sampled_missed)
        sums = [sum(self.engines[n]["causes"][cause] for n in engines) for cause in range(8)]
        return {(name,): each / sum(sums) for name, each in zip(names, sums, strict=True)}

    def unused(self, engines: list[int]) -> float:
        unused, used = (
            sum(self.engines[n]["evicted_used"][each] for n in engines) for each in (0, 1)
        )
        return float(unused / (unused + used))

    def age(self, share: float) -> float:
        """Return a quantile of the ages at eviction, as Prometheus interpolates it."""
        bins = [sum(pair) for pair in zip(*(e["unused_ages"] for e in self.engines), strict=True)]
        counts = age_histogram(bins).counts
        rank, below = share * sum(counts), 0.0
        for start, end, count in zip((0.0, *AGE_BOUNDS), AGE_BOUNDS, counts, strict=False):
            if below + count >= rank:
                return start + (end - start) * (rank - below) / count
            below += count
        raise AssertionError("no age is beyond the bounds")


def added(after: Any, before: Any) -> Any:
    """Subtract counts, nested alike; what is no count stays."""
    if isinstance(after, dict):
        return {name: added(value, before[name]) for name, value in after.items()}
    if isinstance(after, list | tuple):
        return [added(new, old) for new, old in zip(after, before, strict=True)]
    return after if isinstance(after, str) else after - before


def expected(counted: Counted) -> dict[str, dict[Labels, float]]:
    """Return the values of each expression of the dashboard, by title and legend, and each rule."""
    asked, missed = counted.sum("asked"), counted.sum("missed")
    ratios, errors = counted.in_window()
    busy = [index for index, engine in enumerate(counted.engines) if engine["asked"]]
    assert busy == [0, 1]
    every = counted.reports
    of = "{{policy}} {{memory}}x"
    names = ("asked", "missed", "stored", "evicted", "declined", "refused", "failed")
    blocks = {
        f"Blocks|{name} {'stores' if name == 'refused' else 'blocks'}": {
            (): counted.sum(name) * counted.second
        }
        for name in names
    }
    blocks["Blocks|resets"] = {(): counted.sum("resets") * counted.second}
    panels = {
        "Does it pay?|hit ratio": {(): 1 - missed / asked},
        "Watched managers|blocks of memory": {(): float(sum(each.capacity for each in every))},
        "Watched managers|{{policy}}": {("hit-density",): 1.0, ("lru",): 2.0},
        f"Hit ratio by memory and policy|{of}": counted.each(0, lambda s, a, _: 1 - s / a),
        f"Gain of other sizes and policies|{of}": counted.each(0, lambda s, a, m: (m - s) / a),
        f"Hit ratio by memory and policy, in the watch's window|{of}": ratios,
        f"Hit ratio by memory and policy, in the watch's window|± {of}": errors,
        f"Unreliable points|{of} marked: {{{{marks}}}}": counted.reasons(
            lambda point: ",".join(point.marks) if point.hit_ratio is not None else ""
        ),
        f"Unreliable points|{of} withheld: {{{{reason}}}}": counted.reasons(
            lambda point: point.reason
        ),
        "Why blocks were missed|{{cause}}": counted.causes(busy),
        "Stored in vain|evicted without a hit": {(): counted.unused(busy)},
        "Stores per hit|now": {(): counted.sum("stored") / (asked - missed)},
        f"Stores per hit|{of}, per present hit": counted.each(1, lambda s, a, m: s / (a - m)),
        **blocks,
        "Tokens withheld by windows and states|tokens": {(): 0.0},  # these have no groups
        **{
            f"Age at eviction|{share:.0%} are younger": {(): counted.age(share)}
            for share in (0.1, 0.5, 0.9)
        },
        "Overdue transfers|overdue {{kind}}s": {("load",): 0.0, ("store",): 3.0},
        "Oldest open transfer|{{kind}}": {
            (kind,): max(ages[kind] for ages in counted.open) for kind in ("load", "store")
        },
    }
    panels |= hinted(counted)
    engine = counted.engines
    named = {
        "hit_ratio": {(str(n),): 1 - engine[n]["missed"] / engine[n]["asked"] for n in busy},
        "shadow_hit_ratio": counted.per_engine(0, lambda s, a: 1 - s / a),
        "shadow_stores_per_asked_block": counted.per_engine(1, lambda s, a: s / a),
        "missed_share": {
            (str(n), *key): share for n in busy for key, share in counted.causes([n]).items()
        },
        "unused_share": {(str(n),): counted.unused([n]) for n in busy},
        "fleet_hit_ratio": {(): 1 - missed / asked},
        "fleet_shadow_hit_ratio": counted.each(0, lambda s, a, _: 1 - s / a),
        "fleet_shadow_gain": counted.each(0, lambda s, a, m: (m - s) / a),
        "fleet_shadow_stores_per_asked_block": counted.each(1, lambda s, a, _: s / a),
        "fleet_missed_share": counted.causes(busy),
        "fleet_unused_share": {(): counted.unused(busy)},
    }
    return panels | {f"kvoffload:{name}:rate15m": values for name, values in named.items()}


def hinted(counted: Counted) -> dict[str, dict[Labels, float]]:
    """Return the values of what is shown of hints, which one engine's clients give."""
    engine, report = counted.engines[HINTED], counted.reports[HINTED]
    rates = {
        (kind, source): count * counted.second for (source, kind), count in engine["hints"].items()
    }
    learned = {(each.source or "others",): each for each in report.hints}
    found = {
        "Hints of clients|{{source}}: {{kind}}": rates,
        "Announced returns|{{source}}": {
            key: float(each.returns) for key, each in learned.items() if each.returns is not None
        },
        "Quality of hints|{{source}}": {
            key: each.factor for key, each in learned.items() if each.factor is not None
        },
    }
    gain = report.hint_gain
    assert gain is not None
    return found | {
        "Gain by hints of returns|{{trial}}": {
            ("hints",): gain.hit_ratio,
            ("plain",): gain.plain,
        },
        "Gain by hints of returns|±": {(): gain.error},
        "Gain by hints of returns|followed": {(): float(gain.followed)},
    }


LABELS = ("engine", "policy", "memory", "marks", "reason", "cause", "kind", "source", "trial")


def values(found: list[dict[str, Any]]) -> dict[Labels, float]:
    return {
        tuple(series["metric"][name] for name in LABELS if name in series["metric"]): float(
            series["value"][1]
        )
        for series in found
    }


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


TARGETS = [
    (panel["title"], target["legendFormat"], target["expr"])
    for panel in json.loads(grafana_json())["panels"]
    for target in panel["targets"]
]


def rules() -> list[tuple[str, str]]:
    """Return the recording rules, each a name and an expression."""
    lines = rules_yaml().splitlines()[3:]
    return [
        (record.removeprefix("      - record: "), json.loads(expr.removeprefix("        expr: ")))
        for record, expr in zip(lines[::2], lines[1::2], strict=True)
    ]


EXPRESSIONS = [" ".join(expr for *_, expr in exprs) for exprs in (TARGETS, rules())]


@needs_prometheus
def test_each_expression_of_the_dashboard_and_of_the_rules_has_its_value(fleet, query):
    """One test: each process of pytest-xdist would wait for a Prometheus of its own."""
    right = expected(Counted(fleet, query))
    wrong = {}
    asked = [(f"{title}|{legend}", filled(expr)) for title, legend, expr in TARGETS]
    asked += rules()
    for name, expr in asked:
        found = values(query(expr))
        # Of a counter that begins near 0 Prometheus takes another share of the range.
        rare = name.startswith(("Age", "Blocks", "Why")) or "missed_share" in name
        near = partial(pytest.approx, rel=0.1 if rare else 1e-6, abs=0.02 if rare else 1e-9)
        if found != near(right.pop(name)) or not found:
            wrong[name] = found, expected(Counted(fleet, query))[name]
    assert not right, "nothing says these"
    assert not wrong
    for record, _ in rules():
        wait_until(partial(query, record, now=True), 0.2)


@needs_prometheus
def test_the_fleet_has_what_ratios_go_wrong_with(fleet, query):
    """Points of one engine alone, of two, with marks, without; an engine that is idle but gives."""
    giving = Counted(fleet, query).giving()
    assert giving["lru", "2"] == [0, 1]
    assert giving["hit-density", "2"] == [1]
    reports = fleet.reports()
    assert any(point.hit_ratio is not None for point in reports[2].points)
    assert any(point.hit_ratio is not None and point.marks for point in reports[0].points)


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


def test_dashboard_and_rules_have_the_metrics_by_their_names_and_labels():
    suffixes = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    metrics = {f"{each.name}{suffixes[each.kind]}": each for each in WATCH_METRICS}
    shown, ruled = (re.findall(rf"{PREFIX}(\w+)(?:{{(.*?)}})?", text) for text in EXPRESSIONS)
    for name, selector in shown + ruled:
        labels = set(re.findall(r"(\w+)=", selector)) - {"model_name", "engine"}
        assert labels <= {*metrics[name].labels}, name
    assert {name for name, _ in shown} == {*metrics}


def test_the_dashboard_is_as_grafana_imports_it():
    """A panel whose query names itself twice, or lies on another one, is lost without a word."""
    dashboard = json.loads(grafana_json())
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "model", "engine", "prefix"]
    panels = dashboard["panels"]
    places = [tuple(panel["gridPos"][name] for name in "xywh") for panel in panels]
    assert sorted(places) == sorted((12 * (n % 2), n // 2 * 8, 12, 8) for n in range(len(panels)))
    for panel in panels:
        names = [target["refId"] for target in panel["targets"]]
        assert len({*names}) == len(names), panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
