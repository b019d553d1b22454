"""Past one machine: vLLM's real tiering manager and real file tier over our primary tier."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvoffload.integrations.vllm import KVOffloadPrimaryTier
from tests.vllm.configuration import create
from tests.vllm.requests import key
from tests.vllm.tiered import OURS, THEIRS, assert_nothing_is_left, files


def test_the_spec_puts_our_primary_tier_into_vllm_s_manager(tmp_path, engines):
    engine = engines(files(tmp_path))
    assert type(engine.manager) is TieringOffloadingManager
    assert type(engine.primary) is KVOffloadPrimaryTier
    # The name that stood for it is vLLM's class again.
    assert tiering_spec.CPUPrimaryTierOffloadingManager is CPUPrimaryTierOffloadingManager


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_same_requests_give_the_same_jobs(tmp_path, engines, policy):
    """And bytes, which are compared in `request`."""
    # Each prefix is in memory or not as a whole: vLLM's promotions evict parts of their own.
    requests = [
        [key(100 * chain + n) for n in range(length)]
        for chain, length in (
            (0, 4),
            (1, 4),
            (0, 4),
            (2, 8),
            (1, 4),
            (0, 4),
            (3, 8),
            (2, 8),
            (0, 4),
        )
    ]
    ours = engines(files(tmp_path / "ours"), 8, eviction_policy=policy)
    theirs = engines(files(tmp_path / "theirs"), 8, THEIRS, eviction_policy=policy)
    assert type(theirs.primary) is CPUPrimaryTierOffloadingManager
    for keys in requests:
        assert ours.request(keys) == theirs.request(keys)
        assert ours.jobs == theirs.jobs
    assert any(job[0] == "submit_load" for job in ours.jobs)
    assert len(list((tmp_path / "ours").rglob("*.bin"))) == 24
    ours.settle()
    theirs.settle()
    assert list(ours.manager.take_events()) == list(theirs.manager.take_events())
    assert_nothing_is_left(ours)


def test_a_store_that_fails_and_a_full_primary_leave_nothing_behind(tmp_path, engines):
    engine = engines(files(tmp_path))
    assert engine.request([key(n) for n in range(6)]) == 0  # more than there is room for: refused
    assert engine.jobs == []
    assert engine.request([key(n) for n in range(3)], store_succeeds=False) == 0
    assert engine.request([key(n) for n in range(20, 24)]) == 0
    # A promotion finds no room while everything is pinned.
    keys = [key(n) for n in range(20, 24)]
    context = ReqContext("holder")
    engine.manager.on_new_request(context)
    engine.manager.prepare_load(keys, context)
    other = [key(n) for n in range(30, 32)]
    assert engine.request(other) == 0
    engine.manager.complete_load(keys, context)
    engine.manager.on_request_finished(context)
    assert_nothing_is_left(engine)


def test_a_reset_leaves_nothing_behind_and_files_stay(tmp_path, engines):
    engine = engines(files(tmp_path))
    keys = [key(n) for n in range(4)]
    engine.request(keys)
    engine.reset()
    assert_nothing_is_left(engine)
    assert engine.primary.lookup(keys[0], None) is LookupResult.MISS
    assert engine.request(keys) == 4  # from files
    assert_nothing_is_left(engine)


def test_a_threshold_is_refused_as_in_vllm(tmp_path):
    spec = create(4, **OURS, secondary_tiers=[files(tmp_path)], store_threshold=2)
    with pytest.raises(ValueError, match="store_threshold is not supported"):
        spec.get_manager()
    assert tiering_spec.CPUPrimaryTierOffloadingManager is CPUPrimaryTierOffloadingManager


def test_the_exchange_is_guarded(monkeypatch):
    spec = create(4, **OURS, secondary_tiers=[])
    monkeypatch.setattr(tiering_spec, "CPUPrimaryTierOffloadingManager", object)
    with pytest.raises(RuntimeError, match="is not vLLM's own class"):
        spec.get_manager()
