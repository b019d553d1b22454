"""What calls a manager back in the middle of a call: a clock may, a context is refused."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.vllm.watched import keys_of

KEYS = keys_of("k", range(8))
OTHERS = keys_of("o", range(300))


@pytest.mark.parametrize("cache_policy", registry.names())
def test_a_clock_that_calls_the_manager(cache_policy):
    manager = None

    def clock():
        if manager is not None:
            # Copies: nothing else holds them when the outer call goes on.
            manager.touch([bytes(bytearray(key)) for key in OTHERS], ReqContext("clock"))
        return 0.0

    manager = KVOffloadManager(16, cache_policy, watch=Watch(clock=clock))
    context = ReqContext("r")
    assert manager.prepare_store(KEYS, context).keys_to_store == KEYS
    manager.complete_store(KEYS, context)
    assert manager.prepare_load(KEYS, context).block_ids.tolist() == list(range(8))
    manager.complete_load(KEYS, context)
    manager.on_request_finished(context)
    check_invariants(manager)


CALLS = {
    "prepare_load": lambda manager, context: manager.prepare_load(KEYS[:4], context),
    "prepare_store": lambda manager, context: manager.prepare_store(OTHERS[:4], context),
    "complete_store": lambda manager, context: manager.complete_store(KEYS, context),
    "touch": lambda manager, context: manager.touch(OTHERS, context),
    "on_request_finished": lambda manager, context: manager.on_request_finished(context),
    "reset_cache": lambda manager, _: manager.reset_cache(),
}


class Calling(ReqContext):
    """A request's context that calls the manager when it is asked something."""

    call = None

    def asked(self):
        if self.call is not None:
            self.call()

    def get_state(self, state_class):
        self.asked()
        return super().get_state(state_class)

    def set_state(self, state):
        self.asked()
        super().set_state(state)

    def get_offload_key_position(self, key):
        self.asked()
        return super().get_offload_key_position(key)


@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize("outer", ["prepare_load", "prepare_store", "on_request_finished"])
@pytest.mark.parametrize("cache_policy", ["lru", "arc", "hit-density"])
def test_a_context_may_not_call_the_manager(cache_policy, outer, inner):
    manager = KVOffloadManager(16, cache_policy)
    context = Calling("r")
    for position, key in enumerate(KEYS):
        context.set_offload_key_position(key, position)
    manager.prepare_store(KEYS, context)
    manager.complete_store(KEYS, context)
    context.call = lambda: CALLS[inner](manager, ReqContext("other"))
    with pytest.raises(RuntimeError, match="the manager is in the middle of another call"):
        CALLS[outer](manager, context)
    check_invariants(manager)
    context.call = None
    assert manager.prepare_load(KEYS, context).block_ids.tolist() == list(range(8))
    manager.complete_load(KEYS, context)
    CALLS[outer](manager, context)
    check_invariants(manager)
