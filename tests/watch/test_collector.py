"""Watches in a registry: one or several, what the parser reads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvoffload import CPUOffloadingManager
from kvoffload._metrics import WATCH_METRICS, WATCH_PREFIX, Histogram
from kvoffload.watch import Watch
from kvoffload.watch.metrics import samples
from kvoffload.watch.prometheus import WatchCollector
from kvoffload.watch.scraped import read_engines, view
from tests.blocks import block_hash

from .watched import SECRET, serve


def busy_watch(num_requests: int, policy: str = "lru") -> Watch:
    watch = Watch(max_rate=1.0, slots=2**20, policy_slots=2**20, secret=SECRET)
    manager = CPUOffloadingManager(16, 600, policy, watch=watch)
    for index in range(num_requests):
        document = index * 7919 % 61
        serve(manager, [block_hash(1000 * document + position) for position in range(20)])
    watch.manager = manager  # type: ignore[attr-defined] # a watch does not keep it alive
    return watch


def scraped(registry: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in series, (sample.name, key)
            series[key] = sample.value
    return found


def test_several_watches_in_one_registry() -> None:
    watches = {"chat": busy_watch(300), "code": busy_watch(200, "hit-density")}
    registry = CollectorRegistry()
    registry.register(WatchCollector(watches, {"host": "a"}))
    found = scraped(registry)
    count = 0
    for name, watch in watches.items():
        for metric, labels, value in samples(watch):
            more = {"host": "a", "manager": name}
            suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
            key = tuple(sorted({**labels, **more}.items()))
            got = found[f"{WATCH_PREFIX}{metric.name}{suffix}"][key]
            assert got == (sum(value.counts) if isinstance(value, Histogram) else value)
            count += 1
    assert count == sum(
        len(found[name]) for name in found if not name.endswith(("_bucket", "_sum"))
    )
    assert count > 2 * len(WATCH_METRICS)
    engines = read_engines("here", generate_latest(registry).decode())
    assert sorted(dict(engine.labels)["manager"] for engine in engines) == ["chat", "code"]


def test_engines_that_nobody_has_asked_are_shown_without_a_hit_ratio() -> None:
    registry = CollectorRegistry()
    registry.register(WatchCollector({name: busy_watch(0) for name in "ab"}))
    found = view(read_engines("here", generate_latest(registry).decode()))
    assert (found.engines, found.hit_ratio) == (2, None)
    assert all(shadow.hit_ratio is None for shadow in found.shadows)


@pytest.mark.parametrize("label", ["host", "manager"])
def test_one_watch_has_no_label_of_its_own(label: str) -> None:
    registry = CollectorRegistry()
    watch = busy_watch(100)
    registry.register(WatchCollector(watch, {label: "a"}))
    assert scraped(registry)[f"{WATCH_PREFIX}asked_blocks_total"] == {((label, "a"),): 2_000}
    assert watch.counters()["asked"] == 2_000


def test_a_registry_takes_one_collector_and_says_so_at_once() -> None:
    registry = CollectorRegistry()
    registry.register(WatchCollector(busy_watch(1)))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(WatchCollector(busy_watch(1)))
    assert f"{WATCH_PREFIX}asked_blocks_total" in scraped(registry)


NAMES = "labels must have names of Prometheus, got "
MAPPING = r"labels must be a mapping of names to text, got "


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda: (3,), TypeError, "watch must be a Watch or Watches by name, got 3"),
        (lambda: ({"a": None},), TypeError, "watch must be a Watch or Watches by name, got None"),
        (lambda: ({1: Watch()},), TypeError, "watch must have names of type str, got 1"),
        (lambda: ({},), ValueError, "watch must hold at least one Watch, got none"),
        (lambda: (Watch(), ["a"]), TypeError, MAPPING + r"\['a'\]"),
        (lambda: (Watch(), {"a": 1}), TypeError, MAPPING + "{'a': 1}"),
        (lambda: (Watch(), {"a-b": "c"}), ValueError, NAMES + "'a-b'"),
        (lambda: (Watch(), {"__a": "c"}), ValueError, NAMES + "'__a'"),
        (lambda: (Watch(), {"policy": "c"}), ValueError, "a name that metrics have, got 'policy'"),
        (lambda: ({"a": Watch()}, {"manager": "c"}), ValueError, "have, got 'manager'"),
    ],
)
def test_what_is_refused(
    arguments: Callable[[], tuple[Any, ...]], error: type[Exception], message: str
) -> None:
    given = arguments()  # not before: without the extensions there is no watch
    with pytest.raises(error, match=message):
        WatchCollector(*given)
