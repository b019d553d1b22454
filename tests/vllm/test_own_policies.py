"""The library's own policies under vLLM, by name.

What a policy declines to store, and what that means to the scheduler, is in test_admission.py.
"""

from __future__ import annotations

import pytest

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.requests import key
from tests.vllm.watched import Request

OWN = [name for name in registry.names() if name not in ("lru", "arc")]


def run(manager, keys, load_own=False):
    """Run a request, which loads what hits and stores the rest; return the evicted keys."""
    request = Request(manager, keys)
    request.load()
    output = request.store(keys[len(request.hits) :])
    if load_own:
        manager.prepare_load(output.keys_to_store, request.context)
        manager.complete_load(output.keys_to_store, request.context)
    request.finish()
    return output.evicted_keys


def test_a_use_is_counted_once_a_request_and_an_insertion_is_none():
    manager = KVOffloadManager(4, "slru?protected=0.5")
    run(manager, [key(1)])
    run(manager, [key(2)], load_own=True)  # reading back what it stored is no use either
    run(manager, [key(1)])  # used again: protected
    run(manager, [key(3)])
    run(manager, [key(4)])
    assert run(manager, [key(5)]) == [key(2)]
    assert run(manager, [key(6)]) == [key(3)]
    assert run(manager, [key(7)]) == [key(4)]
    assert manager._policy.get(key(1)) is not None
    check_invariants(manager)


@pytest.mark.parametrize(
    "cache_policy", [name for name in OWN if registry.entry(name).tail_first != "never"]
)
def test_a_chain_leaves_tail_first(cache_policy):
    manager = KVOffloadManager(4, cache_policy)
    run(manager, [key(n) for n in range(4)])
    evicted = []
    for number in (9, 8, 9, 8):  # a policy that declines them the first time stores them the second
        evicted += run(manager, [key(number)])
    assert evicted == [key(3), key(2)]
