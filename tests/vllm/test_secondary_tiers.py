"""The library's tiers below vLLM's real tiering manager, with its primary tier and with ours."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from dataclasses import replace
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingModelConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvoffload._metrics import TIER_METRICS, TIER_PREFIX
from kvoffload.integrations.vllm import KVOffloadFileTier, KVOffloadTier, secondary_tiers
from kvoffload.integrations.vllm.secondary_tiers import SecondaryTier, namespace_of
from kvoffload.testing.tiers import FaultyTier
from kvoffload.tiers import Done, MemoryTier, State, Status, TierError
from tests.vllm.configuration import CHUNK_BYTES, PACKAGE, configuration
from tests.vllm.requests import context, key
from tests.vllm.tiered import OURS, THEIRS, Engine, assert_nothing_is_left, content, slab

IN_VLLM = f"vllm:{TIER_PREFIX}"
SPECS = pytest.mark.parametrize("names", [OURS, THEIRS], ids=["ours", "theirs"])


def chain(start, length=4):
    return [key(number) for number in range(start, start + length)]


# -- bytes ---------------------------------------------------------------------------------------


@SPECS
@pytest.mark.parametrize("policy", ["lru", "hit-density", "s3fifo"])
def test_chunks_come_back_byte_for_byte_also_after_a_restart(tmp_path, engines, names, policy):
    tier = slab(tmp_path, policy=policy)
    engine = engines(tier, names=names)
    assert type(engine.manager) is TieringOffloadingManager
    assert type(engine.tier) is KVOffloadFileTier
    starts = [0, 10, 20, 30]
    for start in starts:
        assert engine.request(chain(start)) == 0
    for start in starts:  # each evicts the others from the primary; bytes are compared in `request`
        assert engine.request(chain(start)) == 4
    assert_nothing_is_left(engine)
    engine.close()
    again = engines(tier, names=names)
    assert again.tier.tier.num_restored == 16
    for start in starts:
        assert again.request(chain(start)) == 4
    assert {job for job, *_ in again.jobs} == {"submit_load"}
    assert_nothing_is_left(again)


def test_a_chunk_that_is_there_is_not_written_again(tmp_path, engines):
    engine = engines(slab(tmp_path))
    engine.request(chain(0))
    engine.settle()
    job = TransferJob(77, chain(0), np.arange(4), False, ReqContext("r"))
    engine.tier.submit_store(job)
    (result,) = engine.tier.get_finished_jobs()
    assert (result.job_id, result.success, result.transfer_bytes) == (77, True, 0)


def test_damaged_chunks_are_computed_again_and_never_served(tmp_path, engines):
    tier = slab(tmp_path)
    engine = engines(tier)
    engine.request(chain(0))
    engine.request(chain(10))
    engine.close()
    (path,) = tmp_path.rglob("blocks.dat")
    data = bytearray(path.read_bytes())
    at = data.index(content(key(2)))
    data[at + 1234] ^= 0x10
    path.write_bytes(data)
    engine = engines(tier)
    assert engine.request(chain(0)) == 2  # up to the damage; the rest is computed and stored
    assert_nothing_is_left(engine)
    assert engine.tier.tier.stats()["get_corrupt"] == 1
    engine.request(chain(10))
    assert engine.request(chain(0)) == 4


def test_a_slab_that_is_in_use_or_too_large_stops_the_start(tmp_path, engines):
    engines(slab(tmp_path))
    with pytest.raises(TierError, match=str(os.getpid())):
        Engine(slab(tmp_path))
    with pytest.raises(TierError, match="space"):
        Engine(slab(tmp_path / "more", 2**30))


# -- trouble -------------------------------------------------------------------------------------


class FaultySecondaryTier(SecondaryTier):
    """A tier that fails when it is told to."""

    def __init__(self, *arguments, chunks=64, **options):
        def opener(namespace, enable_events, generation):
            return FaultyTier(
                chunks * CHUNK_BYTES,
                namespace=namespace,
                enable_events=enable_events,
                ack="stored",  # so that a chunk whose job has ended is there
            )

        super().__init__(*arguments, opener=opener, **options)


def faulty(**options):
    return {"type": "FaultySecondaryTier", "module_path": __name__, **options}


def test_a_request_does_not_ask_again_for_what_failed(engines):
    engine = engines(faulty())
    engine.request(chain(0))
    engine.request(chain(10))
    # Nothing is known of a block whose get timed out: the tier still says HIT.
    tier = engine.tier.tier
    real_poll = tier.poll

    def poll():
        return [
            replace(done, status=np.full_like(done.status, Status.TIMEOUT), nbytes=0)
            if done.op == "get"
            else done
            for done in real_poll()
        ]

    tier.poll = poll
    loads = Counter()
    assert engine.request(chain(0)) == 0
    for direction, keys, _ in engine.jobs:
        if direction == "submit_load":
            loads.update(keys)
    assert set(loads.values()) == {1}
    assert tier.state(key(0)) == State.HIT
    del tier.poll
    assert_nothing_is_left(engine)
    engine.request(chain(10))
    assert engine.request(chain(0)) == 4


def test_a_hung_tier_lets_go_of_the_primary_by_the_deadline(engines):
    engine = engines(faulty())
    engine.request(chain(0))
    engine.request(chain(10))
    tier = engine.tier.tier
    get = tier.get
    tier.get = lambda keys, ids: get(keys, ids, 0.05)
    tier.hang()
    try:
        assert engine.request(chain(0)) == 0
        engine.reset()  # waits for jobs, and ends
        assert not engine.manager._jobs
    finally:
        tier.resume()
        del tier.get
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(4))
def test_a_tier_in_all_kinds_of_trouble_never_serves_a_wrong_byte(engines, seed):
    """Bytes are compared in `request`."""
    rng = random.Random(seed)
    engine = engines(faulty(chunks=40), num_chunks=6)
    tier = engine.tier.tier
    hits = 0
    for _ in range(150):
        trouble = rng.random()
        if trouble < 0.1:
            tier.fail(rng.choice(["get", "put"]), rng.randint(1, 3))
        elif trouble < 0.2:
            one = key(rng.randrange(40))
            if tier.state(one) == State.HIT:
                tier.flip(one, rng.randrange(8 * CHUNK_BYTES))
        elif trouble < 0.23:
            engine.reset()
        elif trouble < 0.3:
            tier.discard([key(rng.randrange(40))])
        elif trouble < 0.4:
            tier.health(reset=True)
        start = rng.randrange(36)
        hits += engine.request(chain(start, rng.randint(1, 5)))
    assert hits > 0
    assert_nothing_is_left(engine)


def test_what_a_tier_raises_does_not_reach_the_scheduler(engines, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = engines(faulty())

    def broken(*_):
        raise ZeroDivisionError("a policy of one's own")

    for name in ("put", "touch", "release"):
        setattr(engine.tier.tier, name, broken)
    assert engine.request(chain(0), params={"kvoffload": {"ends": True}}) == 0
    assert "store failed" in caplog.text
    for name in ("put", "touch", "release"):
        delattr(engine.tier.tier, name)
    engine.request(chain(10))
    assert engine.request(chain(0)) == 0  # it was not stored
    for name in ("get", "state"):
        assert engine.request(chain(10)) == 4
        assert engine.tier.tier.state(key(0)) == State.HIT
        setattr(engine.tier.tier, name, broken)
        assert engine.request(chain(0)) == 0
        delattr(engine.tier.tier, name)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("ends", ["poll", "reset", "events", "hung poll", "hung reset"])
def test_the_jobs_of_an_interrupted_tier_end(engines, monkeypatch, ends):
    engine = engines(faulty(enable_kv_events=True))
    for start in (0, 10):
        engine.request(chain(start))
    tier, manager, context = engine.tier.tier, engine.manager, ReqContext("waits")
    manager.on_new_request(context)
    assert manager.lookup(key(0), context) is LookupResult.HIT_PENDING
    tier.hang()
    manager.on_schedule_end(ScheduleEndContext((), ()))
    monkeypatch.setattr(tier._medium, "touch", None)  # an exception in the middle of a change
    engine.tier.touch(chain(0), context)
    if "hung" in ends:  # its call may still use the primary tier's memory
        monkeypatch.setattr(type(tier), "direct", True)
        while not tier._store.running._cond._waiters:
            time.sleep(0.001)
        assert not engine.tier.get_finished_jobs()
        assert engine.tier._transfers
        Timer(0.5, tier.resume).start()
    else:
        tier.resume()
    if "reset" in ends:
        engine.reset()
    elif ends == "hung poll":
        while not engine.tier._finished:
            engine.tier._collect()
            time.sleep(0.01)
    elif ends == "events":
        list(manager.take_events())
    assert manager.lookup(key(0), context) is LookupResult.MISS
    manager.on_request_finished(context)
    assert not manager.has_pending_work()
    assert engine.primary._usage() == (0, 0)
    engine.reset()


def test_a_chunk_id_out_of_bounds_fails_the_job(tmp_path, engines):
    engine = engines(slab(tmp_path))
    for submit in (engine.tier.submit_store, engine.tier.submit_load):
        submit(TransferJob(5, chain(0, 1), np.array([4]), False, ReqContext("r")))
        (result,) = engine.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (5, False)


def test_a_load_says_which_chunks_came(tmp_path, engines):
    engine = engines(slab(tmp_path))
    engine.request(chain(0, 3))
    engine.settle()
    keys = [key(0), key(99), key(2)]
    engine.tier.submit_load(TransferJob(9, keys, np.array([3, 2, 1]), True, ReqContext("r")))
    assert engine.tier.tier.wait(list(engine.tier._transfers), 60)
    (result,) = engine.tier.get_finished_jobs()
    assert not result.success
    assert result.successful_keys == (key(0), key(2))
    assert result.transfer_bytes == 2 * CHUNK_BYTES
    assert engine.read(3) == content(key(0))
    assert engine.read(1) == content(key(2))


# -- resets and the end --------------------------------------------------------------------------


@SPECS
@pytest.mark.parametrize("on_reset", ["forget", "keep", None])
def test_a_reset_forgets_unless_told_otherwise(tmp_path, engines, names, on_reset):
    tier = slab(tmp_path, **({} if on_reset is None else {"on_reset": on_reset}))
    engine = engines(tier, names=names)
    engine.request(chain(0))
    engine.request(chain(10))
    engine.reset()
    kept = 4 if on_reset == "keep" else 0
    assert engine.request(chain(0)) == kept
    assert_nothing_is_left(engine)
    engine.close()
    engine = engines(tier, names=names)
    assert engine.request(chain(0)) == kept  # after the reset it was a random generation's
    assert engine.request(chain(10)) == kept


@SPECS
def test_a_file_names_the_weights_at_the_start_and_at_each_reset(tmp_path, engines, names):
    file = tmp_path / "generation"
    file.write_text("step 1\n")
    tier = slab(tmp_path, generation_file=str(file))
    engine = engines(tier, names=names)
    engine.request(chain(0))
    file.write_text("step 2\n")
    engine.reset()
    assert engine.request(chain(0)) == 0
    assert_nothing_is_left(engine)
    engine.close()
    engine = engines(tier, names=names)
    assert engine.request(chain(0)) == 4  # stored under the same name
    engine.reset()
    assert engine.request(chain(0)) == 4, "the weights have not changed"
    assert_nothing_is_left(engine)
    engine.close()
    engine = engines(slab(tmp_path, generation="step 1"), names=names)
    assert engine.request(chain(0)) == 0


def test_a_reset_in_the_middle_of_a_request_ends_it_all(tmp_path, engines):
    engine = engines(slab(tmp_path))
    engine.request(chain(0))
    engine.request(chain(10))
    context = ReqContext("waits")
    engine.manager.on_new_request(context)
    assert engine.manager.lookup(key(0), context) is LookupResult.HIT_PENDING
    engine.manager.on_schedule_end(ScheduleEndContext((), ()))
    engine.reset()
    assert engine.manager.lookup(key(0), context) is LookupResult.MISS
    engine.manager.on_request_finished(context)
    assert_nothing_is_left(engine)


@SPECS
def test_the_end_unmaps_the_primary_s_memory(tmp_path, engines, names):
    engine = engines(slab(tmp_path), names=names)
    engine.request(chain(0))
    region = engine.spec._scheduler_mmap
    tier = engine.tier
    engine.close()
    assert region.mmap_obj is None
    tier.shutdown()  # again


def test_memory_that_a_hung_call_may_write_is_kept(engines, monkeypatch):
    engine = engines(faulty())
    monkeypatch.setattr("kvoffload.integrations.tiers.CLOSE_S", 0.1)
    engine.request(chain(0))
    engine.request(chain(10))
    tier = engine.tier.tier
    tier._medium.direct = True  # as a slab is
    tier.hang()
    engine.tier.submit_load(TransferJob(9, chain(0), np.arange(4), True, ReqContext("r")))
    with pytest.raises(TierError, match="has not returned"):
        engine.close()
    assert engine.spec._scheduler_mmap.mmap_obj is not None
    tier.resume()
    engine.primary.shutdown()


# -- recency -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hints", [None, {"expect_s": 3}, {"ends": True}])
def test_the_end_of_a_request_is_one_access_and_that_of_a_session_the_last(
    tmp_path, engines, hints
):
    engine = engines(slab(tmp_path, 10), num_chunks=8)
    engine.request(chain(0))
    engine.request(chain(10), params={"kvoffload": hints})
    if hints != {"ends": True}:
        engine.request(chain(0))  # hits in the primary: only the end of the request tells the tier
    engine.request(chain(20))  # evicts two: the tail of the oldest, or of what has ended
    every = [*chain(0), *chain(10), *chain(20)]
    there = [engine.tier.tier.state(one) == State.HIT for one in every]
    assert there == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("asks", [False, True])
def test_a_session_may_go_on_before_its_answer(tmp_path, engines, asks):
    tier, ended = engines(slab(tmp_path)).tier, []
    tier.tier.end_request = lambda keys, own, num_last: ended.append((keys, num_last))
    *prompt, answer = chain(0, 3)
    made = context(prompt)
    tier.on_new_request(made)
    if asks:  # where its prompt ends is known from then on
        tier.lookup(prompt[0], made)
    made.set_offload_key_position(answer, 10**6)
    tier.on_request_finished(made)
    assert ended == [([*prompt, answer], 2 if asks else 1)]


# -- tiers that have to be asked -----------------------------------------------------------------


class AskedTier(MemoryTier):
    """A memory tier that knows nothing before it is asked, as servers are."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.known = set()
        self.queries = []
        self.is_silent = False
        self.held = []

    def state(self, key):
        return super().state(key) if key in self.known else int(State.UNKNOWN)

    def query(self, keys, deadline_s=None):
        keys = list(keys)
        self.queries.append(keys)
        job = super().query(keys, deadline_s)
        if not self.is_silent:
            self.known.update(keys)
        return job

    def poll(self):
        found, self.held = self.held, []
        for done in super().poll():
            if self.is_silent and done.op == "query":
                done = Done(done.job, done.op, np.full_like(done.status, Status.TIMEOUT), 0, 0.1)
            (self.held if done.op == "query" else found).append(done)  # a step later
        return found


class AskedSecondaryTier(SecondaryTier):
    def __init__(self, *arguments, **options):
        def opener(namespace, enable_events, generation):
            return AskedTier(64 * CHUNK_BYTES, namespace=namespace)

        super().__init__(*arguments, opener=opener, **options)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_request_asks_for_its_chunks_at_once(engines, is_silent):
    engine = engines({"type": "AskedSecondaryTier", "module_path": __name__})
    engine.request(chain(0))
    engine.request(chain(10))
    tier = engine.tier.tier
    tier.queries.clear()
    tier.known.clear()
    tier.is_silent = is_silent
    assert engine.request(chain(0)) == (0 if is_silent else 4)
    assert tier.queries == [chain(0)]
    assert_nothing_is_left(engine)


def test_an_answer_after_the_request_has_ended_is_nothing(engines):
    engine = engines({"type": "AskedSecondaryTier", "module_path": __name__})
    context = ReqContext("gone")
    context.set_offload_key_position(key(0), 16)
    engine.manager.on_new_request(context)
    assert engine.manager.lookup(key(0), context) is LookupResult.RETRY
    engine.manager.on_request_finished(context)
    assert_nothing_is_left(engine)
    assert not engine.tier._queries


# -- what the bytes mean -------------------------------------------------------------------------


def test_every_part_of_the_configuration_is_in_the_namespace(monkeypatch):
    config = replace(
        configuration(4), parallel=replace(configuration(4).parallel, is_parallelism_agnostic=False)
    )
    group = config.groups[0]
    others = {
        "model": replace(config, model=OffloadingModelConfig("another/model", "float16")),
        "dtype": replace(config, model=replace(config.model, dtype="fp8")),
        "layout": replace(config, kv_cache_layout="LBNHC"),
        "canonical": replace(config, kv_cache_layout="LBNHC", canonical_layout=True),
        "replicated": replace(config, replicated_layout=True),
        "chunk": replace(config, cache=replace(config.cache, blocks_per_chunk=2)),
        "hash": replace(config, cache=replace(config.cache, tokens_per_hash=32)),
        "tokens": replace(config, groups=(replace(group, tokens_per_block=32),)),
        "layers": replace(config, groups=(replace(group, layer_names=("other",)),)),
        "groups": replace(config, groups=(group, group)),
        "portable": replace(config, parallel=configuration(4).parallel),
        **{
            name: replace(config, parallel=replace(config.parallel, **{name: 2}))
            for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
        },
    }
    found = {name: namespace_of(one, CHUNK_BYTES).fingerprint for name, one in others.items()}
    found["same"] = namespace_of(config, CHUNK_BYTES).fingerprint
    found["bytes"] = namespace_of(config, 2 * CHUNK_BYTES).fingerprint
    found["weights"] = namespace_of(config, CHUNK_BYTES, weights_id="step 7").fingerprint
    found["revision"] = namespace_of(config, CHUNK_BYTES, revision="v2").fingerprint
    found["salt"] = namespace_of(config, CHUNK_BYTES, salt="quantized").fingerprint
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    found["seed"] = namespace_of(config, CHUNK_BYTES).fingerprint
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setattr(secondary_tiers, "vllm_version", "9.9.0")
    found["vllm"] = namespace_of(config, CHUNK_BYTES).fingerprint
    assert len(set(found.values())) == len(found)


def test_the_same_configuration_gives_the_same_namespace():
    first, second = (namespace_of(configuration(n), CHUNK_BYTES) for n in (4, 9))
    assert first.json == second.json
    assert '"weights":"a/model"' in first.json
    portable = replace(
        configuration(4), parallel=replace(configuration(4).parallel, tp_size=8, world_size=8)
    )
    assert namespace_of(portable, CHUNK_BYTES) == first


def test_replaced_weights_are_another_namespace(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"old")
    config = replace(configuration(4), model=OffloadingModelConfig(str(model), "float16"))
    old = namespace_of(config, CHUNK_BYTES)
    (model / "model.safetensors").write_bytes(b"newer")
    assert namespace_of(config, CHUNK_BYTES) != old


def test_replicas_have_slabs_of_their_own(tmp_path):
    config = configuration(4)
    config = replace(
        config, parallel=replace(config.parallel, data_parallel_index=1, data_parallel_size=2)
    )
    spec = SimpleNamespace(config=config, kv_events_config=None)
    view = memoryview(np.zeros((4, CHUNK_BYTES), np.int8))
    size = 8 * CHUNK_BYTES
    for tier in (
        KVOffloadFileTier(spec, view, "t", path=f"{tmp_path}/a", capacity_bytes=size),
        KVOffloadTier(spec, view, "t", url=f"slab:{tmp_path}/b?capacity={size}"),
    ):
        assert tier.tier.folder.parent.name == "replica1"
        tier.shutdown()
    with pytest.raises(ValueError, match="a slab must have a folder"):  # and not /replica1
        KVOffloadTier(spec, view, "t", url=f"slab:?capacity={size}")


# -- configuration -------------------------------------------------------------------------------


def test_a_scheme_that_is_not_the_tier_s_is_refused():
    entry = {"type": "KVOffloadRedisTier", "module_path": PACKAGE, "url": "s3://bucket"}
    with pytest.raises(ValueError, match="url of KVOffloadRedisTier must start with one of redis:"):
        Engine(entry)


def test_a_size_may_be_text_and_options_reach_the_tier(tmp_path, engines):
    engine = engines(
        slab(
            tmp_path,
            capacity_bytes="1MiB",
            policy="s3fifo",
            threads=3,
            staged=True,
            staging_bytes="1MiB",
            ack="stored",
            max_queued_bytes="1GiB",
            name="near",
            locality="REMOTE",
        )
    )
    tier = engine.tier.tier
    assert (tier.num_slots, tier.name, tier.direct) == (256, "near", False)
    assert tier.max_queued_bytes == 2**30
    assert engine.tier.locality is Locality.REMOTE
    engine.request(chain(0))
    engine.request(chain(10))
    assert engine.request(chain(0)) == 4


# -- events and metrics --------------------------------------------------------------------------


def test_events_say_what_was_stored_and_what_left(tmp_path, engines):
    engine = engines(slab(tmp_path, 4, enable_kv_events=True, name="near"), num_chunks=8)
    engine.request(chain(0, 3))
    engine.request(chain(10, 3))
    engine.settle()
    events = [one for one in engine.manager.take_events() if one.ownership is not None]
    assert {(one.medium, one.locality, one.ownership) for one in events} == {
        (Medium.STORAGE, Locality.LOCAL, "near")
    }
    assert all(one.removal_expected is not one.removed for one in events)
    there = set()
    for one in events:
        there = there.difference(one.keys) if one.removed else there.union(one.keys)
    assert there == {one for one in chain(0, 14) if engine.tier.tier.state(one) == State.HIT}
    assert any(one.removed for one in events)
    engine.reset()  # which vLLM announces itself
    assert not [one for one in engine.manager.take_events() if one.ownership is not None]


@pytest.mark.parametrize("is_global", [True, False])
def test_events_are_off_unless_asked_for_twice(tmp_path, engines, is_global):
    engine = engines(slab(tmp_path, enable_kv_events=not is_global), events=is_global)
    engine.request(chain(0))
    engine.settle()
    events: list[OffloadingEvent] = list(engine.tier.take_events())
    assert events == []


def test_metrics_are_those_of_the_tier(tmp_path, engines):
    tier = slab(tmp_path, 8, name="near")
    engine = engines(tier)
    definitions = type(engine.spec).build_metric_definitions({"secondary_tiers": [tier]})
    assert {name for name in definitions if name.startswith(IN_VLLM)} == {
        IN_VLLM + metric.name for metric in TIER_METRICS
    }
    kinds = {
        "counter": OffloadingCounterMetadata,
        "gauge": OffloadingGaugeMetadata,
        "histogram": OffloadingHistogramMetadata,
    }
    for metric in TIER_METRICS:
        assert type(definitions[IN_VLLM + metric.name]) is kinds[metric.kind]
        assert definitions[IN_VLLM + metric.name].labelnames == ("tier", *metric.labels)
    total = engine.tier.get_stats()
    for start in (0, 10, 0, 20, 30):
        engine.request(chain(start))
        total.aggregate(engine.manager.get_stats())
    engine.settle()
    total.aggregate(engine.manager.get_stats())
    for name, values in total.data["data"].items():
        if name.startswith(IN_VLLM):
            assert all(
                labels[0] == "near" and len(labels) == len(definitions[name].labelnames)
                for labels in values
            )
    found, stats = total.data["data"], engine.tier.tier.stats()
    assert found[f"{IN_VLLM}hits"]["near",] == stats["hits"] > 0
    assert found[f"{IN_VLLM}misses"]["near",] == stats["misses"] > 0
    assert found[f"{IN_VLLM}blocks"]["near", "put", "ok"] == stats["put_ok"] == 16
    assert found[f"{IN_VLLM}bytes"]["near", "get"] == stats["get_bytes"] == 4 * CHUNK_BYTES
    assert found[f"{IN_VLLM}evicted"]["near", "evicted"] == stats["removed_evicted"] == 8
    assert found[f"{IN_VLLM}capacity_tokens"]["near",] % 8 == 0 < len(found)
    assert found[f"{IN_VLLM}used_bytes"]["near",] == stats["used_bytes"] == 8 * CHUNK_BYTES
    assert len(found[f"{IN_VLLM}seconds"]["near", "put"]) == 4
    assert len(found[f"{IN_VLLM}seconds"]["near", "get"]) == 1
    assert engine.tier.get_stats().data["types"].get(f"{IN_VLLM}hits") is None  # told already


def test_an_end_that_cannot_be_processed_fails_its_job_and_no_other(
    tmp_path, engines, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = engines(slab(tmp_path), 12)
    for start in (0, 10, 20, 30):
        engine.request(chain(start))
    result, bad = engine.tier._result, chain(0)

    def raising(transfer, done):
        if set(transfer.keys) & set(bad):
            raise KeyError("of a plug-in")
        return result(transfer, done)

    monkeypatch.setattr(engine.tier, "_result", raising)
    contexts = {}
    for start in (0, 10):
        keys, contexts[start] = chain(start), ReqContext(f"back {start}")
        engine.manager.on_new_request(contexts[start])
        for one in keys:
            engine.manager.lookup(one, contexts[start])
    engine.end_step()  # the ends of both come in one poll
    engine.manager.lookup(chain(0)[0], contexts[0])
    assert "end of a job failed" in caplog.text
    for start in (0, 10):
        answers = {engine.manager.lookup(one, contexts[start]) for one in chain(start)}
        assert answers == {LookupResult.MISS if start == 0 else LookupResult.HIT}
        engine.manager.on_request_finished(contexts[start])
    engine.request(chain(40))
    assert_nothing_is_left(engine)
