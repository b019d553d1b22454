"""KV events on their way out: vLLM's own publisher, real sockets, and a subscriber."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.vllm.conftest import SEED
from tests.vllm.engine import BLOCK_TOKENS, SPECS, Engine, Talk

pytestmark = pytest.mark.usefixtures("host_platform")

TIMEOUT = 60_000  # ms
GROUP_BYTES = 4  # of a key: the index of its KV group
LAST = (-1).to_bytes(8, "big", signed=True)


def replayed(endpoint):
    """Return the payload of every batch, by number, as the publisher gives them again."""
    payloads = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert socket.poll(TIMEOUT), "the publisher does not answer"
            *_, number, payload = socket.recv_multipart()
            if number == LAST:
                return payloads
            payloads[int.from_bytes(number, "big")] = payload


def receive(subscriber, payloads):
    """Take what has come by now."""
    while subscriber.poll(0):
        _, number, payload = subscriber.recv_multipart()
        payloads[int.from_bytes(number, "big")] = payload


def run(folder, cache_policy, **extra):
    """Run conversations; return the engine, the prompts and the events of the offload cache."""
    endpoints = {
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **endpoints)
    options = {"eviction_policy": cache_policy, **SPECS["kvoffload"], **extra}
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(endpoints["endpoint"])
        engine = Engine(folder, options, 1, events=events)
        publisher = engine.scheduler.kv_event_publisher
        assert type(publisher) is ZmqEventPublisher
        published = []
        publish = publisher.publish

        def counted(batch):
            published.append(batch.ts)
            publish(batch)

        publisher.publish = counted
        try:
            talk = Talk([engine], random.Random(SEED), resets=False)
            received: dict[int, bytes] = {}
            while len(talk.prompts) < 60 or not received:
                talk.turn()
                if not received:
                    subscriber.poll(20)  # ms; it connects meanwhile, and requests do not pile up
                receive(subscriber, received)
                assert len(talk.prompts) < 2000, "the subscriber gets nothing"
            talk.drain()
            for _ in range(3):
                engine.step(0)
            while len(payloads := replayed(endpoints["replay_endpoint"])) < len(published):
                time.sleep(0.05)  # a thread publishes, after the fact
            while max(received) < max(payloads):
                assert subscriber.poll(TIMEOUT), "the subscriber does not get the last batch"
                receive(subscriber, received)
        finally:
            publisher.shutdown()
    first = min(received)
    assert received == {number: payloads[number] for number in payloads if number >= first}
    assert list(payloads) == list(range(len(payloads)))
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    batches = [decoder.decode(payload) for payload in payloads.values()]
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
    from vllm.sampling_params import SamplingParams
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    if not tokens:
        return []
    request = Request(
        request_id="hashed",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=engine.hasher,
    )
    return [bytes(make_offload_key(block, 0)) for block in request.block_hashes]


def test_without_the_key_events_have_no_tokens(tmp_path):
    _, _, events = run(tmp_path, "lru")
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert stored
    assert all(event.token_ids == [] and event.block_size == 0 for event in stored)
    assert all(event.parent_block_hash is None for event in stored)
