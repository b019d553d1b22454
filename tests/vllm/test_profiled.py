"""A profiler that looks at every object it can reach while a store is under way."""

from __future__ import annotations

import gc
import sys

import pytest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvoffload.integrations.vllm import KVOffloadManager
from tests.vllm.requests import context

LENGTHS = (32, 32, 12, 32, 20, 40)


def keys_of(start: int) -> list[bytes]:
    """Keys of several lengths."""
    names = [b"%0*d" % (length, start + place) for place, length in enumerate(LENGTHS)]
    return [bytes(make_offload_key(name, 0)) for name in names]


def store(manager: KVOffloadManager, name: str, keys: list[bytes]):
    request = context(keys, name)
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    manager.complete_store(output.keys_to_store, request)
    manager.on_request_finished(request)
    return output


@pytest.mark.parametrize("policy", ["lru", "arc", "hit-density"])
def test_no_key_is_seen_before_it_is_written(policy):
    """An object that is hashed before its bytes are written keeps a wrong hash for good."""
    manager = KVOffloadManager(len(LENGTHS), policy, enable_events=True)
    stored, offered, between = keys_of(0), keys_of(1000), keys_of(2000)
    store(manager, "first", stored)
    store(manager, "before", offered)  # a policy that declines them stores them the next time
    store(manager, "between", between)
    list(manager.take_events())
    seen: set[bytes] = set()

    def look(frame, event, argument):
        lists = [one for one in gc.get_objects() if type(one) is list and len(one) <= len(LENGTHS)]
        for one in [*lists, *frame.f_locals.values()]:
            if isinstance(one, list):
                seen.update(item for item in one if type(item) is bytes)

    request = ReqContext("second")
    manager.on_new_request(request)
    sys.setprofile(look)
    try:
        output = manager.prepare_store(offered, request)
    finally:
        sys.setprofile(None)
    assert offered[0] in seen  # it did look
    (event,) = manager.take_events()
    assert sorted(output.evicted_keys) == sorted(event.keys)
    assert set(output.evicted_keys) <= {*stored, *between}  # by their hashes
    assert len(output.evicted_keys) == len(offered)
