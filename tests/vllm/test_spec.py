"""``KVOffloadSpec`` through vLLM's own factory, with the keys that the how-to page gives."""

from __future__ import annotations

import logging

import pytest
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvoffload.integrations.vllm import KVOffloadManager, KVOffloadSpec
from kvoffload.integrations.vllm.hints import IGNORED_METRIC
from kvoffload.integrations.vllm.manager import CAPACITY_METRIC
from tests.vllm.configuration import PACKAGE, create

SPEC = {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE}


def test_the_spec_gives_our_manager(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    spec = create(**SPEC)
    with caplog.at_level(logging.INFO, logger="vllm.kvoffload"):
        manager = spec.get_manager()
    assert "kvoffload: compiled manager active, policy lru, 8 chunks" in caplog.text
    assert type(spec) is KVOffloadSpec
    assert isinstance(spec, CPUOffloadingSpec)
    assert type(manager) is KVOffloadManager
    assert isinstance(manager, OffloadingManager)
    assert spec.get_manager() is manager
    assert manager._num_chunks == 8


def test_metrics_and_labels_are_those_of_vllm_and_one_more():
    extra = {"store_threshold": 2}
    ours, theirs = create(**SPEC, **extra), create(**extra)
    assert type(theirs) is CPUOffloadingSpec
    definitions = type(ours).build_metric_definitions(extra)
    assert definitions.pop(IGNORED_METRIC) is not None
    assert definitions.pop(CAPACITY_METRIC) is not None
    assert definitions == type(theirs).build_metric_definitions(extra)
    if hasattr(theirs, "cpu_info"):  # from 0.33 on
        assert type(ours).config_info_keys(extra) == type(theirs).config_info_keys(extra)
        assert ours.get_manager().config_info() == theirs.get_manager().config_info()
    stats = ours.get_manager().get_stats().data
    tokens = stats["data"].pop(CAPACITY_METRIC)
    del stats["types"][CAPACITY_METRIC]
    assert stats == theirs.get_manager().get_stats().data
    (group,) = ours.config.groups
    per_chunk = group.tokens_per_block * ours.config.cache.blocks_per_chunk
    assert tokens == {(): 8 * per_chunk}


def test_every_option_of_vllm_is_honoured():
    extra = {"store_threshold": 3, "max_tracker_size": 7, "eviction_policy": "arc"}
    ours = create(**SPEC, **extra, events=False).get_manager()
    theirs = create(**extra, events=False).get_manager()
    for name in ("store_threshold", "max_tracker_size", "events", "medium", "counts"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours._policy.cache_capacity == theirs._policy.cache_capacity
    assert list(ours._policy.t1) == []


def test_the_library_s_own_policies_go_by_name_and_options():
    manager = create(**SPEC, eviction_policy="hit-density?ghosts=2&guard=0").get_manager()
    assert type(manager) is KVOffloadManager
    assert (manager._rules.policy.ghosts, manager._rules.policy.guard) == (2.0, 0)


def test_a_policy_of_others_gets_vllm_s_manager_and_a_line_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    extra = {"eviction_policy": "Someones", "cache_policy_module_path": "tests.vllm.test_spec"}
    with caplog.at_level(logging.WARNING, logger="vllm.kvoffload"):
        manager = create(**SPEC, **extra).get_manager()
    assert type(manager) is CPUOffloadingManager
    assert type(manager._policy) is Someones
    assert "vLLM's own manager drives it" in caplog.text


class Someones(LRUCachePolicy):
    """A policy that is not the library's."""


def test_an_unknown_key_is_an_error_that_names_the_known_ones():
    text = "unknown kvoffload keys: kvoffload_recrod .known: kvoffload_record, kvoffload_record_max"
    with pytest.raises(ValueError, match=text):
        create(**SPEC, kvoffload_recrod="x")


def test_a_worker_imports_no_policy(monkeypatch):
    """A spec is built in each worker, too, which never asks for a manager."""
    extra = {"eviction_policy": "Someones", "cache_policy_module_path": "nonesuch"}
    monkeypatch.setattr(CachePolicyFactory, "get_cache_policy_cls", None)
    for name in ("KVOffloadSpec", "KVOffloadTieringSpec"):
        create(**{**SPEC, "spec_name": name}, **extra)


@pytest.mark.parametrize("more", [{}, {"cache_policy_module_path": "tests.vllm.test_spec"}])
@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("tests.vllm.nonesuch", "Someones", ImportError),
        ("tests.vllm.test_spec", "Nonesuch", AttributeError),
    ],
)
def test_what_a_registered_policy_s_module_raises_is_not_hidden(
    monkeypatch, module, name, error, more
):
    monkeypatch.setattr(CachePolicyFactory, "_registry", dict(CachePolicyFactory._registry))
    CachePolicyFactory.register_cache_policy("someones", module, name)
    with pytest.raises(error, match=r"[Nn]onesuch"):
        create(**SPEC, eviction_policy="someones", **more).get_manager()


@pytest.mark.parametrize("more", [{}, {"cache_policy_module_path": PACKAGE}])
def test_an_unknown_policy_s_error_has_that_of_vllm_as_its_cause(more):
    with pytest.raises(ValueError, match="eviction_policy must be one of") as caught:
        create(**SPEC, eviction_policy="nonesuch", **more).get_manager()
    assert "nonesuch" in str(caught.value.__cause__)


def test_a_policy_that_was_registered_with_vllm_gets_vllm_s_manager(monkeypatch):
    monkeypatch.setattr(CachePolicyFactory, "_registry", dict(CachePolicyFactory._registry))
    CachePolicyFactory.register_cache_policy("someones", "tests.vllm.test_spec", "Someones")
    manager = create(**SPEC, eviction_policy="someones").get_manager()
    assert type(manager) is CPUOffloadingManager
    assert type(manager._policy) is Someones
