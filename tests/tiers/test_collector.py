"""Tiers in a registry: what the parser reads, while they work and when they are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")

from prometheus_client import CollectorRegistry

from kvoffload._metrics import SECONDS_BOUNDS, TIER_METRICS, TIER_PREFIX, Histogram
from kvoffload.tiers import MemoryTier, Namespace, Region, Tier, open_tier
from kvoffload.tiers.prometheus import TierCollector
from tests.tiers.inside import settle
from tests.watch.test_collector import scraped

NAMESPACE = Namespace("model", 4096, tokens_per_block=16)
Series = dict[tuple[tuple[str, str], ...], float]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[tuple[Tier, ...]]:
    """Give three tiers of different kinds, which have put, got and evicted."""
    found = (
        MemoryTier(8 * 4096, namespace=NAMESPACE, name="near"),
        open_tier(f"slab:{tmp_path}/slab?capacity=1MiB&name=disk", NAMESPACE),
        open_tier(f"dir:{tmp_path}/shared?capacity=1MiB&name=shared", NAMESPACE),
    )
    try:
        for tier in found:
            tier.attach(Region.allocate(16, 4096))
            keys = [b"%d" % number for number in range(16)]
            for part in (keys[:8], keys[8:]):
                assert tier.wait([tier.put(part, range(8))], 60)
            assert tier.wait([tier.get([b"15", b"absent"], [0, 1])], 60)
            settle(tier)
            tier.poll()
        yield found
    finally:
        for tier in found:
            tier.close()


def expected(tiers: tuple[Tier, ...], labels: dict[str, str]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for tier in tiers:
        for metric, own, value in tier.samples():  # type: ignore[attr-defined]
            key = {**labels, "tier": tier.name, **own}
            name = TIER_PREFIX + metric.name

            def put(name: str, value: float, key: dict[str, str] = key) -> None:
                found.setdefault(name, {})[tuple(sorted(key.items()))] = value

            if isinstance(value, Histogram):
                put(f"{name}_count", sum(value.counts))
                put(f"{name}_sum", value.total)
                for number, bound in enumerate((*map(str, metric.bounds), "+Inf"), 1):
                    put(f"{name}_bucket", sum(value.counts[:number]), {**key, "le": bound})
            else:
                put(f"{name}_total" if metric.kind == "counter" else name, value)
    return found


def test_several_tiers_in_one_registry(tiers: tuple[Tier, ...]) -> None:
    registry = CollectorRegistry()
    host = "\\udc80"
    collector = TierCollector(tiers, {"host": "\udc80"})  # which no exporter could encode
    registry.register(collector)
    names = [family.name for family in collector.describe()]
    assert names == [TIER_PREFIX + metric.name for metric in TIER_METRICS]
    assert {family.name for family in collector.collect()} == set(names)
    found = scraped(registry)
    assert found == expected(tiers, {"host": host})
    blocks = found[f"{TIER_PREFIX}blocks_total"]
    for tier in tiers:
        key = (("host", host), ("op", "put"), ("status", "ok"), ("tier", tier.name))
        assert blocks[key] == tier.stats()["put_ok"] == 16
    near = (("host", host), ("reason", "evicted"), ("tier", "near"))
    assert found[f"{TIER_PREFIX}evicted_total"][near] == 8
    seconds = f"{TIER_PREFIX}seconds"
    assert sum(found[f"{seconds}_sum"].values()) > 0
    longest = ("le", str(SECONDS_BOUNDS[-1]))
    within = sum(value for key, value in found[f"{seconds}_bucket"].items() if longest in key)
    assert within == sum(found[f"{seconds}_count"].values()) > 0


@pytest.mark.thorough
def test_scrapes_beside_a_tier_at_work(tiers: tuple[Tier, ...]) -> None:
    registry = CollectorRegistry()
    registry.register(TierCollector(tiers))
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            scraped(registry)

    with ThreadPoolExecutor(2) as threads:
        scrapes = [threads.submit(scrape) for _ in range(2)]
        try:
            for number in range(60):
                for tier in tiers:
                    keys = [b"%d/%d" % (number, place) for place in range(4)]
                    assert tier.wait([tier.put(keys, range(4)), tier.get(keys, range(4))], 60)
                    tier.discard(keys[:1])
                    list(tier.poll())
            for tier in tiers:
                tier.close()
        finally:
            over.set()
    for each in scrapes:
        each.result()
    assert scraped(registry) == expected(tiers, {}), "a closed tier has its last values"


def test_what_is_refused(tiers: tuple[Tier, ...]) -> None:
    with pytest.raises(TypeError, match=r"tiers must be tiers of kvoffload\.tiers, got 3"):
        TierCollector(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tiers must be tiers of kvoffload\.tiers, got 'near'"):
        TierCollector([tiers[0], "near"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tiers must hold at least one tier, got none"):
        TierCollector([])
    with pytest.raises(ValueError, match="tiers must have distinct names, got 'near' twice"):
        TierCollector([tiers[0], tiers[1], tiers[0]])
    with pytest.raises(ValueError, match="must not have a name that metrics have, got 'tier'"):
        TierCollector(tiers, {"tier": "disk"})
