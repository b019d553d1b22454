"""The watch in vLLM's own metrics: declared in the frontend, sent by the manager, scraped."""

from __future__ import annotations

import logging
import math
import random

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.metrics.stats import SchedulerStats

from kvoffload._metrics import WATCH_METRICS
from kvoffload.integrations.vllm import (
    KVOffloadManager,
    KVOffloadPrimaryTier,
    KVOffloadSpec,
    KVOffloadTieringSpec,
)
from kvoffload.integrations.vllm.watching import (
    MOST_AGES,
    MOST_CHARACTERS,
    WatchExport,
    metric_definitions,
)
from kvoffload.watch import Watch
from kvoffload.watch.metrics import samples
from kvoffload.watch.scraped import read_engines, view
from tests.vllm.configuration import PACKAGE, configuration
from tests.vllm.conftest import SEED
from tests.vllm.engine import Engine, Talk
from tests.vllm.watched import Request, Time, keys_of, watched

SPEC = {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE}
EVERY_BLOCK = {"max_rate": 1.0, "slots": 2**20, "policy_slots": 2**20}


# -- the key ---------------------------------------------------------------------------------------


def test_off_and_on():
    for value in ({}, {"kvoffload_watch": False}):
        manager = KVOffloadSpec(configuration(20, **value)).get_manager()
        assert manager.watch is None
        assert metric_definitions(value) == {}
        assert KVOffloadSpec.build_metric_definitions(value).keys() == (
            super(KVOffloadSpec, KVOffloadSpec).build_metric_definitions(value).keys()
        )
    manager = KVOffloadSpec(configuration(20, kvoffload_watch=True)).get_manager()
    report = manager.watch.report()
    assert (report.policy, report.capacity) == ("lru", 20)
    options = {
        "memory": [0.5, 4],
        "policies": ["slru", "s3fifo"],
        "slots": 64,
        "policy_slots": 32,
        "max_rate": 0.5,
        "window": 60,
        "interval": 5,
        "deadline": 7,
    }
    spec = KVOffloadSpec(configuration(20, kvoffload_watch=options, eviction_policy="arc"))
    watch = spec.get_manager().watch
    assert (watch.memory, watch.policies) == ((0.5, 1.0, 4.0), ("slru", "s3fifo"))
    assert (watch.slots, watch.policy_slots, watch.max_rate) == (64, 32, 0.5)
    assert (watch.window, watch.deadline) == (60, 7)
    assert spec.get_manager()._watch_export.interval == 5
    assert watch.report().policy == "arc"


def test_a_policy_of_others_is_not_watched(caplog):
    logging.getLogger("vllm").propagate = True
    options = {
        "eviction_policy": "LRUCachePolicy",
        "cache_policy_module_path": "vllm.v1.kv_offload.cpu.policies.lru",
        "kvoffload_watch": True,
    }
    with caplog.at_level("WARNING"):
        manager = KVOffloadSpec(configuration(20, **options)).get_manager()
    assert type(manager) is not KVOffloadManager
    assert "kvoffload_watch needs a policy of kvoffload; nothing is watched" in caplog.text
    assert manager.get_stats() is not None


# -- what is sent ----------------------------------------------------------------------------------


def sent_of(manager):
    """Return what the statistics of one step have of a watch: by name and labels."""
    data = manager.get_stats().data
    return {
        (name, labels): value
        for name, values in data["data"].items()
        if name.startswith("vllm:kvoffload_")
        for labels, value in values.items()
    }


def exported(num_chunks, interval=30, **options):
    """Return a manager whose watch is exported, and the clock of the export."""
    manager = watched(num_chunks, **options)
    clock = Time()
    manager._watch_export = WatchExport(manager.watch, interval, clock)
    return manager, clock


def collect(manager, clock, totals, seconds=30):
    """Add up what is sent within some seconds; return the sizes of the parts."""
    sizes = []
    for _ in range(seconds):
        sent = sent_of(manager)
        if sent:
            sizes.append(len(sent))
        for key, value in sent.items():
            kind = next(m.kind for m in WATCH_METRICS if f"vllm:kvoffload_{m.name}" == key[0])
            if kind == "counter":
                assert value > 0
                totals[key] = totals.get(key, 0) + value
            elif kind == "gauge":
                totals[key] = value
            else:
                totals.setdefault(key, []).extend(value)
        clock.now += 1
    return sizes


def requests(manager, rng, number=200, longest=30):
    for _ in range(number):
        Request(manager, keys_of(rng.choice("abcdefgh"), range(rng.randint(1, longest)))).run()


def test_sums_of_what_is_sent_are_what_the_watch_counts():
    manager, clock = exported(400, policies=("arc", "slru"), policy_slots=2**20)
    rng, totals = random.Random(SEED), {}
    parts = []
    for _ in range(4):
        requests(manager, rng, 150, 150)
        parts += collect(manager, clock, totals)
        assert len(parts) > 1
    parts += collect(manager, clock, totals, 90)
    expected = {}
    for metric, labels, value in samples(manager.watch):
        if metric.kind != "histogram" and value:
            expected[f"vllm:kvoffload_{metric.name}", tuple(labels.values())] = value
    ages = totals.pop(("vllm:kvoffload_eviction_age_seconds", ()))
    gone = [key for key, value in totals.items() if math.isnan(value)]
    assert not expected.keys() & set(gone)
    assert totals == pytest.approx(expected | dict.fromkeys(gone, math.nan), nan_ok=True)
    assert len(expected) > 30
    assert 0 < len(ages) <= manager.watch.counters()["evicted"]
    # Once all is told and nothing happens, nothing is sent.
    assert collect(manager, clock, totals, 60) == []


def test_a_gauge_that_has_no_value_any_longer_is_not_a_number():
    watch_clock, totals = Time(), {}
    manager, clock = exported(
        400, clock=watch_clock, window=100, memory=(1,), policies=("arc",), policy_slots=2**20
    )
    requests(manager, random.Random(SEED), 150, 150)
    collect(manager, clock, totals, 60)
    (ratio,) = (
        key
        for key in totals
        if key[0] == "vllm:kvoffload_shadow_hit_ratio" and key[1][:2] == ("lru", "1")
    )
    assert 0 < totals[ratio] < 1
    assert "nan" not in str(totals)
    for watch_clock.now in (1000, 2000):
        collect(manager, clock, totals, 60)
    assert manager.watch.report().points[0].reason == "few_misses"
    assert math.isnan(totals[ratio])
    assert collect(manager, clock, totals, 60) == []


def test_a_mark_leaves_the_process_and_takes_the_unmarked_point_away():
    """At no moment are there both: a reader may advise on the one without."""
    watch_clock, totals = Time(), {}
    manager, clock = exported(400, clock=watch_clock, window=100, policies=(), memory=(2,))

    def marks():
        return {
            key[1][2]: value
            for key, value in totals.items()
            if key[0] == "vllm:kvoffload_shadow_hit_ratio" and key[1][:2] == ("lru", "2")
        }

    rng = random.Random(1)  # one for which there is a point at first
    requests(manager, rng, 150, 150)
    collect(manager, clock, totals, 60)
    assert list(marks()) == ["none"]
    Request(manager, keys_of("i", range(410))).run()
    watch_clock.now = 1
    requests(manager, rng, 20, 150)
    for _ in range(60):
        collect(manager, clock, totals, 1)
        given = [mark for mark, value in marks().items() if not math.isnan(value)]
        assert len(given) <= 1
    assert given == ["long_requests"]
    assert math.isnan(marks()["none"])


def test_of_many_ages_an_even_part_is_sent():
    clock = Time()
    manager, export_clock = exported(50, clock=clock)
    for number in range(40):
        clock.now = number
        Request(manager, keys_of("a", range(number * 50, (number + 1) * 50))).run()
    evicted = manager.watch.counters()["evicted"]
    assert evicted > 4 * MOST_AGES
    totals = {}
    collect(manager, export_clock, totals)
    ages = totals["vllm:kvoffload_eviction_age_seconds", ()]
    assert len(ages) == MOST_AGES
    assert sum(ages) / len(ages) == pytest.approx(1, rel=0.1)


def test_a_watch_that_fails_does_not_reach_the_engine(monkeypatch, caplog):
    logging.getLogger("vllm").propagate = True
    manager, clock = exported(20)
    monkeypatch.setattr(type(manager.watch), "counters", lambda self: 1 / 0)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            assert sent_of(manager) == {}
            clock.now += 100
    assert caplog.text.count("the watch is no longer exported: division by zero") == 1


def random_options(rng):
    """Return a configuration with a watch."""
    options = {
        "memory": rng.sample([0.1, 0.25, 0.5, 1, 2, 3, 4, 8, 16], rng.randint(0, 8)),
        "policies": rng.sample(
            ["lru", "arc", "slru", "s3fifo", "hit-density", "slru?protected=0.5"], rng.randint(0, 5)
        ),
        "slots": rng.choice([4, 256, 2**20]),
        "policy_slots": rng.choice([4, 2**20]),
        "max_rate": rng.choice([0.01, 0.5, 1.0]),
        "window": rng.choice([1, 900]),
        "deadline": rng.choice([1e-6, 60]),
    }
    chosen = rng.sample(list(options), rng.randint(0, len(options)))
    return {
        "kvoffload_watch": {name: options[name] for name in chosen} or True,
        "eviction_policy": rng.choice(["lru", "arc", "hit-density", "sieve"]),
        "store_threshold": rng.choice([0, 2]),
    }


@pytest.mark.parametrize("number", range(15))
def test_every_name_that_is_sent_is_declared(number):
    """The frontend sees the configuration alone, and ends at a name that it does not know."""
    rng = random.Random(SEED + number)
    options = random_options(rng)
    declared = KVOffloadSpec.build_metric_definitions(options)
    kinds = {"counter": "Counter", "gauge": "Gauge", "histogram": "Histogram"}
    manager = KVOffloadSpec(configuration(rng.choice([1, 300]), **options)).get_manager()
    clock = Time()
    manager._watch_export = WatchExport(manager.watch, 30, clock)
    for _ in range(4):
        requests(manager, rng, 40)
        for _ in range(40):
            stats = manager.get_stats()
            for name, values in stats.data["data"].items():
                definition = declared[name]
                kind = kinds[stats.data["types"][name]]
                assert type(definition).__name__ == f"Offloading{kind}Metadata"
                assert all(len(labels) == len(definition.labelnames) for labels in values)
            ours = OffloadingConnectorStats()
            for name, values in stats.data["data"].items():
                if name.startswith("vllm:kvoffload_"):
                    ours.data["data"][name] = values
                    ours.data["types"][name] = stats.data["types"][name]
            assert len(log_line(ours)) <= MOST_CHARACTERS + 100
            clock.now += 1


def log_line(stats):
    """Return vLLM's line of the log for some statistics."""
    return ", ".join(f"{name}={value}" for name, value in stats.reduce().items())


def test_the_primary_tier_is_watched(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Watch, "set_declining", lambda self, *, allowed: told.append(allowed))
    tiers = {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    for value in (True, {"interval": 1}):
        options = {"kvoffload_watch": value, **tiers}
        declared = KVOffloadTieringSpec.build_metric_definitions(options)
        spec = KVOffloadTieringSpec(configuration(20, **options))
        manager = spec.get_manager()
        try:
            assert type(manager.primary_tier) is KVOffloadPrimaryTier
            assert manager.primary_tier.watch.report().capacity == 20
            assert told == [False]  # as the primary tier itself
            told.clear()
            names = manager.get_stats().data["data"].keys()
            assert "vllm:kvoffload_capacity_blocks" in names
            assert names <= declared.keys()
        finally:
            manager.shutdown()


# -- the whole way ---------------------------------------------------------------------------------


def frontend(config: VllmConfig, registry: CollectorRegistry) -> KVConnectorProm:
    """Return what vLLM's frontend has of a connector's metrics, with a registry of its own."""

    def bound(kind):
        return lambda **options: kind(**options, registry=registry)

    class Prom(KVConnectorProm):
        _gauge_cls = staticmethod(bound(Gauge))
        _counter_cls = staticmethod(bound(Counter))
        _histogram_cls = staticmethod(bound(Histogram))

    return Prom(config, ["model_name", "engine"], {0: ["a-model", "0"]})


@pytest.mark.usefixtures("host_platform")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_from_the_scheduler_to_the_scrape(tmp_path, num_groups):
    options = {"kvoffload_watch": {**EVERY_BLOCK, "policies": ["arc"]}, **SPEC}
    engine = Engine(tmp_path, options, num_groups)
    manager = engine.connector.manager
    clock = Time()
    manager._watch_export = WatchExport(manager.watch, 30, clock)
    registry = CollectorRegistry()
    prom = frontend(engine.scheduler.vllm_config, registry)
    logged = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config)
    lines = []
    wire = msgspec.msgpack

    class Tapped(type(engine.scheduler)):
        def make_stats(self, *arguments, **keywords):
            stats = super().make_stats(*arguments, **keywords)
            if stats is not None and stats.kv_connector_stats:
                received = wire.decode(wire.encode(stats), type=SchedulerStats)
                prom.observe(received.kv_connector_stats)
                logged.observe(received.kv_connector_stats)
            clock.now += 1
            if clock.now % 10 == 0:
                logged.log(lambda *line: lines.append(line[0] % line[1:]))
            return stats

    engine.scheduler.__class__ = Tapped
    talk = Talk([engine], random.Random(SEED), resets=False)
    while len(talk.prompts) < 60 or talk.loads < 3:
        talk.turn()
    talk.drain()
    for _ in range(100):
        engine.step(0)
    # An idle scheduler still makes statistics here, so that all is told.
    text = generate_latest(registry).decode()
    (scraped,) = read_engines("here", text)
    counters = manager.watch.counters()
    assert counters["asked"] > counters["missed"] > 100
    for name, key in (
        ("asked_blocks", "asked"),
        ("missed_blocks", "missed"),
        ("stored_blocks", "stored"),
        ("evicted_blocks", "evicted"),
    ):
        assert scraped.value(name) == counters[key]
    assert 'vllm:kvoffload_asked_blocks_total{engine="0",model_name="a-model"} ' in text
    shadows = {key: pair[0] for key, pair in counters["shadows"].items() if pair[0]}
    for (policy, memory), missed in shadows.items():
        assert scraped.value("shadow_missed_blocks", policy, f"{memory:g}") == missed
    shown = view([scraped])
    assert shown.policy == "lru"
    assert shown.hit_ratio == pytest.approx(1 - counters["missed"] / counters["asked"])
    assert any("kvoffload" in line for line in lines)
    assert max(map(len, lines)) <= 2000
