"""Whole workloads through both twins: every hit, every eviction and every slot compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins
from tests.differential.workloads import GENERATED, TRACES, Request, trace, trace_path

LOOKS = 12
"""Comparisons of everything visible over a replay."""


def replay(pair: Pair, requests: Iterable[Request]) -> dict[str, int]:
    """Replay requests by the protocol of a connector; compare each answer."""
    batches = list(requests)
    every = max(1, len(batches) // LOOKS)
    for number, batch in enumerate(batches):
        pair.do("touch", batch)
        hits = pair.do("lookup", batch)[1]
        if hits:
            pair.do("prepare_load", batch[:hits])
            pair.do("complete_load", batch[:hits])
        output: Any = pair.do("prepare_store", batch)[1]
        pair.do("touch", batch)
        if output is not None:
            pair.do("complete_store", output[0])
        if number % every == 0:
            pair.agree()
    pair.agree()
    stats: dict[str, int] = pair.python.stats()
    return stats


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(
    ("workload", "capacity", "key_length"),
    [("loops", 16, 48), ("scans", 60, 36), ("conversations", 60, 48)],
)
def test_generated_workloads(
    twins: Twins, seed: int, name: str, workload: str, capacity: int, key_length: int
) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name, True))
    stats = replay(pair, GENERATED[workload](seed, 150, key_length))
    assert stats["stored_blocks"] > 0
    assert stats["evicted_blocks"] > 0 or capacity == 16


def options_at_their_bounds() -> list[str]:
    """Return a policy string for each bound of each option."""
    return [
        f"{name}?{option.name}={bound}"
        for name in registry.names()
        for option in registry.entry(name).options
        for bound in (option.minimum, option.maximum)
    ]


@pytest.mark.parametrize("text", options_at_their_bounds())
def test_options_at_their_bounds(twins: Twins, seed: int, text: str) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 60, text, True))
    for workload in ("scans", "conversations"):
        replay(pair, GENERATED[workload](seed, 80))


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(("trace_name", "capacity"), [*zip(TRACES, (100, 100, 1500), strict=True)])
def test_the_first_requests_of_real_traces(
    twins: Twins, name: str, trace_name: str, capacity: int
) -> None:
    if not trace_path(trace_name).exists():
        pytest.skip(f"no {trace_name} in the folder that KVOFFLOAD_TRACES names")
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    stats = replay(pair, trace(trace_name, 150))
    assert stats["evicted_blocks"] > 0


@pytest.mark.parametrize("manager", ["LRUOffloadingManager", "ARCOffloadingManager"])
def test_managers_over_a_backend(twins: Twins, seed: int, manager: str) -> None:
    pair = Pair(twins, lambda twin: getattr(twin, manager)(twin.CPUBackend(16, 50), True))
    assert replay(pair, GENERATED["conversations"](seed, 150))["evicted_blocks"] > 0
