"""The library's own policies under vLLM, by name.

What a policy declines to store, and what that means to the scheduler, is in test_admission.py.
"""

from __future__ import annotations

import random

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.vllm.conftest import SEED
from tests.vllm.pair import Pair
from tests.vllm.sequences import Sequence, Shape

OWN = [name for name in registry.names() if name not in ("lru", "arc")]


def key(number: int) -> bytes:
    return bytes(make_offload_key(b"%032d" % number, 0))


class Requests:
    """Run requests one after the other."""

    def __init__(self, manager):
        self.manager = manager
        self.count = 0

    def run(self, keys, load_own=False):
        """Load what hits, store the rest; return the evicted keys."""
        self.count += 1
        context = ReqContext(str(self.count))
        for place, one in enumerate(keys):
            context.set_offload_key_position(one, (place + 1) * 16)
        manager = self.manager
        manager.on_new_request(context)
        ready = [one for one in keys if manager.lookup(one, context) is LookupResult.HIT]
        manager.prepare_load(ready, context)
        manager.complete_load(ready, context)
        output = manager.prepare_store([one for one in keys if one not in ready], context)
        manager.complete_store(output.keys_to_store, context)
        if load_own:
            manager.prepare_load(output.keys_to_store, context)
            manager.complete_load(output.keys_to_store, context)
        manager.on_request_finished(context)
        return output.evicted_keys


@pytest.mark.parametrize("cache_policy", OWN)
def test_random_sequences_keep_every_invariant_and_repeat(cache_policy):
    for number in range(40):
        rng = random.Random(SEED + number)
        shape = Shape.draw(rng)
        chains = shape.chains(rng)
        keys = list(dict.fromkeys(key for chain in chains for groups in chain for key in groups))
        managers = [
            KVOffloadManager(shape.num_chunks, cache_policy, enable_events=True) for _ in range(2)
        ]
        Sequence(Pair(*managers, keys), chains, rng, shape.unpositioned).run(150)


def test_a_use_is_counted_once_a_request_and_an_insertion_is_none():
    requests = Requests(KVOffloadManager(4, "slru?protected=0.5"))
    requests.run([key(1)])
    requests.run([key(2)], load_own=True)  # reading back what it stored is no use either
    requests.run([key(1)])  # used again: protected
    requests.run([key(3)])
    requests.run([key(4)])
    assert requests.run([key(5)]) == [key(2)]
    assert requests.run([key(6)]) == [key(3)]
    assert requests.run([key(7)]) == [key(4)]
    assert requests.manager._policy.get(key(1)) is not None
    check_invariants(requests.manager)


@pytest.mark.parametrize(
    "cache_policy", [name for name in OWN if registry.entry(name).tail_first != "never"]
)
def test_a_chain_leaves_tail_first(cache_policy):
    requests = Requests(KVOffloadManager(4, cache_policy))
    requests.run([key(n) for n in range(4)])
    evicted = []
    for number in (9, 8, 9, 8):  # a policy that declines them the first time stores them the second
        evicted += requests.run([key(number)])
    assert evicted == [key(3), key(2)]
