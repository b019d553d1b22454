"""KV events on their way out: what vLLM's publisher is given, as a subscriber decodes it."""

from __future__ import annotations

import random

import msgspec
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import make_offload_key

from tests.vllm.conftest import SEED
from tests.vllm.engine import BLOCK_TOKENS, SPECS, Engine, Talk, new_request

pytestmark = pytest.mark.usefixtures("host_platform")

GROUP_BYTES = 4  # of a key: the index of its KV group


def run(folder, cache_policy, **extra):
    """Run conversations; return the engine, the prompts and the events of the offload cache."""
    options = {"eviction_policy": cache_policy, **SPECS["kvoffload"], **extra}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(folder, options, 1, events=events)
    published = []
    engine.scheduler.kv_event_publisher.publish = published.append
    talk = Talk([engine], random.Random(SEED), resets=False)
    while len(talk.prompts) < 60:
        talk.turn()
    talk.drain()
    for _ in range(3):
        engine.step(0)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    batches = [decoder.decode(msgspec.msgpack.encode(batch)) for batch in published]
    found = [
        event
        for batch in batches
        for event in batch.events
        if isinstance(event, BlockStored | BlockRemoved) and event.medium == "CPU"
    ]
    return engine, talk.prompts, found


@pytest.mark.parametrize("cache_policy", ["lru", "hit-density"])
def test_a_subscriber_gets_tokens_parent_and_size(tmp_path, cache_policy):
    engine, prompts, events = run(tmp_path, cache_policy, self_describing_kv_events=True)
    described: dict[object, tuple[object, list[int]]] = {}
    keys: dict[object, bytes] = {}
    for prompt in prompts:
        parent = None
        for place, key in enumerate(keys_of(engine, prompt)):
            block = maybe_convert_block_hash(key[:-GROUP_BYTES])
            start = place * BLOCK_TOKENS
            described[block] = (parent, prompt[start : start + BLOCK_TOKENS])
            keys[block] = key
            parent = block
    held: set[object] = set()
    left: set[object] = set()
    placeholders = 0
    for event in events:
        if isinstance(event, BlockRemoved):
            assert held.issuperset(event.block_hashes)
            held.difference_update(event.block_hashes)
            left.update(event.block_hashes)
            continue
        (block,) = event.block_hashes
        assert block not in held
        held.add(block)
        if not event.token_ids:
            # vLLM forgets what was evicted and is stored again in one step.
            assert block in left
            placeholders += 1
            continue
        assert event.block_size == BLOCK_TOKENS
        assert (event.parent_block_hash, list(event.token_ids)) == described[block]
    assert len(left) > 10
    assert placeholders < len(events) // 10
    manager = engine.connector.manager
    assert held == {block for block, key in keys.items() if manager._chunk(key) is not None}


def keys_of(engine, tokens):
    """Return the keys of whole blocks of tokens, as the connector makes them."""
    request = new_request("hashed", tokens, 1, engine.hasher)
    return [bytes(make_offload_key(block, 0)) for block in request.block_hashes]


def test_without_the_key_events_have_no_tokens(tmp_path):
    _, _, events = run(tmp_path, "lru")
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert stored
    assert all(event.token_ids == [] and event.block_size == 0 for event in stored)
    assert all(event.parent_block_hash is None for event in stored)
