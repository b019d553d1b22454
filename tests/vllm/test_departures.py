"""Intended differences from vLLM's manager: repeats, and errors before any change."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload import BlockNotFoundError, BlockNotPinnedError, BlockNotReadyError, OffloadError
from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.integrations.vllm._upstream import installed_release
from kvoffload.testing.policies import check_invariants
from tests.vllm.pair import learned, seen
from tests.vllm.requests import context, key


@pytest.fixture(params=["lru", "arc"])
def policy(request):
    return request.param


def filled(policy, keys, num_chunks=8, **arguments):
    manager = KVOffloadManager(num_chunks, policy, enable_events=True, **arguments)
    request = context(keys)
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    manager.complete_store(output.keys_to_store, request)
    return manager, request


def everything(manager, keys):
    """Return all that an error must leave alone."""
    return seen(manager, keys), learned(manager, None)


def test_repeats_of_a_store_are_dropped(policy):
    """vLLM leaks a slot for each; here the first occurrence counts, once."""
    keys = [key(1), key(2), key(1), key(2), key(1)]
    manager = KVOffloadManager(4, policy)
    output = manager.prepare_store(keys, context(keys[:2]))
    assert output.keys_to_store == [key(1), key(2)]
    assert output.store_spec.block_ids.tolist() == [0, 1]
    assert manager.allocation_sizes_in_current_batch == [2]
    manager.complete_store(output.keys_to_store, ReqContext("r"))
    check_invariants(manager)

    leaky = CPUOffloadingManager(4, policy)
    assert len(leaky.prepare_store(keys[:3], context(keys[:2])).keys_to_store) == 3


def test_repeats_of_an_offer_are_counted_once(policy):
    manager = KVOffloadManager(4, policy, store_threshold=2)
    request = context([key(1)])
    assert manager.prepare_store([key(1), key(1), key(1)], request).keys_to_store == []
    assert manager.counts[key(1)] == 1
    assert manager.stores_skipped_in_current_batch == 1
    assert manager.prepare_store([key(1), key(1)], request).keys_to_store == [key(1)]


def test_events_that_were_taken_in_part_do_not_come_again(policy):
    """In every release; before 0.33 vLLM's own manager gives them again."""
    manager, _ = filled(policy, [key(1)])
    first = next(iter(manager.take_events()))
    assert list(first.keys) == [key(1)]
    assert list(manager.take_events()) == []


@pytest.mark.parametrize(
    ("method", "keys", "error", "text"),
    [
        ("prepare_load", [1, 9], BlockNotFoundError, "is not resident"),
        ("prepare_load", [1, 7], BlockNotReadyError, "is not ready"),
        ("complete_load", [1, 9], BlockNotFoundError, "is not resident"),
        ("complete_load", [1, 2], BlockNotPinnedError, "is not pinned"),
        ("complete_load", [1, 1], BlockNotPinnedError, "is not pinned"),
        ("complete_load", [1, 7], BlockNotPinnedError, "is not pinned"),
    ],
)
def test_errors_come_before_any_change(policy, method, keys, error, text):
    stored = [key(n) for n in (1, 2, 3)]
    manager, request = filled(policy, stored)
    manager.prepare_store([key(7)], context([key(7)], "other"))
    manager.prepare_load([key(1)], request)
    universe = [key(n) for n in range(10)]
    before = everything(manager, universe)
    with pytest.raises(error, match=text):
        getattr(manager, method)([key(n) for n in keys], context([key(n) for n in keys], "third"))
    assert everything(manager, universe) == before
    check_invariants(manager)


@pytest.mark.parametrize("method", ["prepare_load", "prepare_store"])
def test_new_keys_after_finish_are_an_error_before_any_change(policy, method):
    manager, request = filled(policy, [key(1), key(2)])
    other = context([key(3)], "other")
    manager.prepare_store([key(3)], other)
    manager.complete_store([key(3)], other)
    manager.on_request_finished(request)
    universe = [key(n) for n in range(10)]
    before = everything(manager, universe)
    with pytest.raises(OffloadError, match="new to the request, which has finished"):
        getattr(manager, method)([key(1), key(3)], request)
    assert everything(manager, universe) == before
    # What the request has shown before is welcome.
    manager.prepare_load([key(1)], request)
    manager.complete_load([key(1)], request)
    check_invariants(manager)


@pytest.mark.parametrize("bad", ["text", 3, None, b"", bytearray(b"x")])
def test_a_key_must_be_bytes(policy, bad):
    manager, request = filled(policy, [key(1), key(2)])
    universe = [key(1), key(2)]
    before = everything(manager, universe)
    error = ValueError if bad == b"" else TypeError
    for method in ("prepare_load", "complete_load", "prepare_store", "complete_store", "touch"):
        with pytest.raises(error, match=r"keys\[1\] must"):
            getattr(manager, method)([key(1), bad], request)
    with pytest.raises(error, match=r"keys\[0\] must"):
        manager.lookup(bad, request)
    assert everything(manager, universe) == before


def test_a_position_must_fit(policy):
    if policy == "arc" or not installed_release().provisional_ranks:
        pytest.skip("ARC, and LRU before vLLM 0.33, read no positions when they store")
    manager = KVOffloadManager(4, policy)
    request = ReqContext("r")
    request.set_offload_key_position(key(1), 2**31)
    with pytest.raises(ValueError, match="token position must be within"):
        manager.prepare_store([key(1)], request)
    assert manager.lookup(key(1), request) is LookupResult.MISS
    check_invariants(manager)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="num_chunks must be >= 0"):
        KVOffloadManager(-1)
    with pytest.raises(ValueError, match="cache_policy must be one of"):
        KVOffloadManager(4, "nonesuch")
    with pytest.raises(ValueError, match="needs vLLM's own manager"):
        KVOffloadManager(4, "Someone", "elsewhere")
    with pytest.raises(TypeError, match="store_threshold must be an integer"):
        KVOffloadManager(4, store_threshold="2")


def test_the_policy_view_evicts_and_shows(policy):
    keys = [key(n) for n in range(4)]
    manager, request = filled(policy, keys, 4)
    manager.on_request_finished(request)
    view = manager._policy
    assert view.cache_capacity == 4
    assert view.get(key(9)) is None
    assert view.get(keys[0]).is_ready
    (victim,) = view.evict(1, {keys[3]})
    assert victim[0] == keys[2]  # the tail leaves first, and the tail's tail is protected
    assert view.evict(4, ()) is None
    assert manager.lookup(keys[2], request) is LookupResult.MISS
    if policy == "arc":
        assert list(view.b1) == [keys[2]]
        view.target_t1_size = 2.5
        assert view.target_t1_size == 2.5
        with pytest.raises(ValueError, match="target_t1_size must be in"):
            view.target_t1_size = 5
    check_invariants(manager)


def test_a_context_of_another_class_is_asked_by_its_methods():
    class Asked(ReqContext):
        def get_offload_key_position(self, one):
            return {keys[0]: 32, keys[1]: 16}[one]

    keys = [key(1), key(2)]
    first, second = CPUOffloadingManager(2, "lru"), KVOffloadManager(2, "lru")
    for manager in (first, second):
        request = Asked("r")
        manager.prepare_store(keys, request)
        manager.complete_store(keys, request)
        output = manager.prepare_store([key(3)], context([key(3)], "other"))
        assert output.evicted_keys == [keys[0]]
