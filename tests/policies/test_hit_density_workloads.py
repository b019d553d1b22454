"""Floors for hit density on workloads that each favour another policy.

The floors stand a little below what was measured for seeds 1 to 5, LRU and published ARC beside
it. Most are served by the compiled twin alone, as they take minutes in Python: that both decide
alike is tested elsewhere. ``KVOFFLOAD_TEST_BUDGET=2`` runs a second seed of each.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvoffload import IMPLEMENTATION, CPUOffloadingManager
from tests.conftest import read_budget
from tests.policies.stress import WORKLOADS, Request, hit_ratios, repeated, serve

pytestmark = pytest.mark.thorough

REQUESTS = 2000
IN_FLIGHT = 6
SEEDS = [1, 2][: 1 + (read_budget() >= 2)]

takes_minutes_in_python = pytest.mark.skipif(
    IMPLEMENTATION != "compiled", reason="takes minutes in Python"
)

# workload, capacity in percent of the distinct blocks: at least this many times LRU's hits
GAINS = {
    ("popularity", 1): 2.3,
    ("popularity", 5): 1.35,
    ("documents", 1): 1.2,
    ("documents", 5): 1.15,
    ("scans", 1): 2.2,
    ("scans", 5): 1.8,
    ("loops", 20): 2.5,
}
# How far below the better of LRU and published ARC it may end, as a share of all blocks. Of seeds 1
# and 2 the worst is .0182, phases at 1 % under seed 1.
REGRET = 0.02
# The same where requests come twice in a row: the worst is .0074.
REPEATS_REGRET = 0.01
# Where requests overlap, a cache that does not hold those under way: what is pinned leaves LRU no
# room, so that it refuses whole requests and keeps what it has; the miniatures know of no pins.
OVERLAP_REGRETS = {("sessions", 1): 0.02, ("chats", 1): 0.027, ("agents", 5): 0.021}


@cache
def workload(name: str, seed: int) -> list[Request]:
    return WORKLOADS[name](seed, REQUESTS)


def ratios_of(
    name: str,
    seed: int,
    percent: int,
    *,
    loads: int = 0,
    stores: int = 0,
    repeats: float = 0.0,
) -> dict[str, float]:
    """Return the hit ratios at a capacity in percent of the distinct blocks."""
    requests = repeated(workload(name, seed), repeats)
    unique = len({number for request in requests for number in request})
    capacity = unique * percent // 100
    return hit_ratios(requests, capacity, loads=loads, stores=stores)


def shortfall(ratios: dict[str, float]) -> float:
    """Return how far hit density is below the better of the others."""
    return max(ratios["lru"], ratios["arc-classic"]) - ratios["hit-density"]


AT_A_TIME = [
    (name, percent, seed, {}) for name in WORKLOADS for percent in (1, 5, 20) for seed in SEEDS
]
OVERLAPPING = [
    (name, percent, 3, {"loads": IN_FLIGHT, "stores": IN_FLIGHT})
    for name in WORKLOADS
    for percent in (1, 5)
]
SLOWLY_STORED = [
    (name, 5, seed, {"stores": pending})
    for name in WORKLOADS
    for pending in [1, 4, 16][-1 if len(SEEDS) < 2 else 0 :]
    for seed in SEEDS
]
REPEATED = [
    (name, 5, seed, {"repeats": share})
    for name in ("loops", "rounds", "chats", "documents")
    for share in (0.05, 0.5, 1.0)
    for seed in SEEDS
]


@takes_minutes_in_python
@pytest.mark.parametrize(
    ("name", "percent", "seed", "how"), [*AT_A_TIME, *OVERLAPPING, *SLOWLY_STORED, *REPEATED]
)
def test_it_is_nowhere_far_below_the_better_of_lru_and_arc(
    name: str, percent: int, seed: int, how: dict[str, float]
) -> None:
    regret = OVERLAP_REGRETS.get((name, percent), REGRET) if "stores" in how else REGRET
    most = REPEATS_REGRET if "repeats" in how else regret
    assert shortfall(ratios_of(name, seed, percent, **how)) <= most


@takes_minutes_in_python
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "percent"), GAINS)
def test_it_gains_where_a_cache_thrashes(name: str, percent: int, seed: int) -> None:
    ratios = ratios_of(name, seed, percent)
    assert ratios["hit-density"] >= GAINS[name, percent] * ratios["lru"]


def test_it_holds_a_part_of_a_loop_that_is_longer_than_the_cache() -> None:
    ratios = ratios_of("rounds", 1, 50)
    assert ratios["lru"] == ratios["arc-classic"] == 0
    assert ratios["hit-density"] > 0.35


def test_it_stores_a_fraction_of_what_lru_stores_where_a_cache_thrashes() -> None:
    requests = workload("scans", 1)
    stored = {}
    for policy in ("lru", "hit-density"):
        manager = CPUOffloadingManager(16, 200, policy)
        serve(manager, requests)
        stored[policy] = manager.stats()["stored_blocks"]
    assert stored["hit-density"] < 0.3 * stored["lru"]
