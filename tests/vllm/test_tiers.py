"""Past one machine: vLLM's real tiering manager and real file tier over our primary tier."""

from __future__ import annotations

import hashlib
import time

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvoffload.integrations.vllm import KVOffloadPrimaryTier
from kvoffload.testing.policies import check_invariants
from tests.vllm.configuration import CHUNK_BYTES, PACKAGE, create
from tests.vllm.requests import context as context_of

OURS = {"spec_name": "KVOffloadTieringSpec", "spec_module_path": PACKAGE}
THEIRS = {"spec_name": "TieringOffloadingSpec"}


def key(number: int) -> bytes:
    return bytes(make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0))


def content(one: bytes) -> bytes:
    return hashlib.sha256(one).digest() * (CHUNK_BYTES // 32)


class Engine:
    """Drive a tiering manager as a scheduler would; chunks get known bytes.

    Parameters
    ----------
    folder : Path
        Of the file tier.
    num_chunks : int
        Of the primary tier.
    names : dict
        Which spec.
    """

    def __init__(self, folder, num_chunks, names, **extra):
        tier = {"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1}
        self.spec = create(num_chunks, **names, secondary_tiers=[tier], **extra)
        self.manager = self.spec.get_manager()
        self.primary = self.manager.primary_tier
        (self.tier,) = self.manager.secondary_tiers
        self.jobs = []
        self.count = 0
        for direction in ("submit_store", "submit_load"):
            self.record(direction)

    def record(self, direction):
        submit = getattr(self.tier, direction)

        def recorded(job):
            self.jobs.append((direction, list(job.keys), [int(one) for one in job.chunk_ids]))
            submit(job)

        setattr(self.tier, direction, recorded)

    def end_step(self):
        """End a scheduler step and wait until the tier has nothing left to do."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.tier.drain_jobs()

    def look_up(self, keys, context):
        """Look all keys up, step by step, until each answer is final."""
        deadline = time.monotonic() + 300
        while True:
            answers = [self.manager.lookup(one, context) for one in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                return answers
            assert time.monotonic() < deadline, answers
            self.end_step()
            time.sleep(0.05)  # the tier looks for files in a thread of its own

    def request(self, keys, store_succeeds=True, params=None):
        """Run one request: what hits is loaded and compared, the rest is stored."""
        self.count += 1
        context = context_of(keys, f"r{self.count}", params)
        self.manager.on_new_request(context)
        answers = self.look_up(keys, context)
        hits = 0
        while hits < len(keys) and answers[hits] is LookupResult.HIT:
            hits += 1
        if hits:
            loaded = self.manager.prepare_load(keys[:hits], context)
            for one, chunk in zip(keys, loaded.chunk_ids, strict=False):
                assert self.read(chunk) == content(one), "other bytes came back"
            self.manager.complete_load(keys[:hits], context)
        output = self.manager.prepare_store(keys[hits:], context)
        if output is not None and output.keys_to_store:
            for one, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.write(chunk, content(one))
            self.manager.complete_store(output.keys_to_store, context, store_succeeds)
        self.manager.on_request_finished(context)
        self.end_step()
        return hits

    def read(self, chunk):
        with self.primary.get_kv_memoryview().cast("B") as memory:
            return bytes(memory[int(chunk) * CHUNK_BYTES :][:CHUNK_BYTES])

    def write(self, chunk, block):
        with self.primary.get_kv_memoryview().cast("B") as memory:
            memory[int(chunk) * CHUNK_BYTES : (int(chunk) + 1) * CHUNK_BYTES] = block

    def settle(self):
        """Let everything in flight end."""
        for _ in range(3):
            self.end_step()

    def close(self):
        self.manager.shutdown()


@pytest.fixture
def engines():
    made = []

    def make(*arguments, **extra):
        made.append(Engine(*arguments, **extra))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_nothing_is_left(engine):
    """No pinned, no pending and no lost chunk."""
    engine.settle()
    assert not engine.manager._jobs
    assert engine.primary._usage() == (0, 0)
    check_invariants(engine.primary)


def test_the_spec_puts_our_primary_tier_into_vllm_s_manager(tmp_path, engines):
    engine = engines(tmp_path, 4, OURS)
    assert type(engine.manager) is TieringOffloadingManager
    assert type(engine.primary) is KVOffloadPrimaryTier
    # The name that stood for it is vLLM's class again.
    assert tiering_spec.CPUPrimaryTierOffloadingManager is CPUPrimaryTierOffloadingManager


@pytest.mark.parametrize("policy", ["lru", "arc", "lfu"])
def test_blocks_come_back_from_files_byte_for_byte(tmp_path, engines, policy):
    engine = engines(tmp_path, 4, OURS, eviction_policy=policy)
    first, second = [key(n) for n in range(4)], [key(n) for n in range(10, 14)]
    assert engine.request(first) == 0
    assert engine.request(second) == 0  # evicts the first from the primary
    assert all(engine.primary.lookup(one, None) is LookupResult.MISS for one in first)
    assert len(list(tmp_path.rglob("*.bin"))) == 8
    assert engine.request(first) == 4  # promoted from files, compared in `request`
    assert any(job[0] == "submit_load" for job in engine.jobs)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_same_requests_give_the_same_jobs(tmp_path, engines, policy):
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
    ours = engines(tmp_path / "ours", 8, OURS, eviction_policy=policy)
    theirs = engines(tmp_path / "theirs", 8, THEIRS, eviction_policy=policy)
    assert type(theirs.primary) is CPUPrimaryTierOffloadingManager
    for keys in requests:
        assert ours.request(keys) == theirs.request(keys)
        assert ours.jobs == theirs.jobs
    assert any(job[0] == "submit_load" for job in ours.jobs)
    ours.settle()
    theirs.settle()
    assert list(ours.manager.take_events()) == list(theirs.manager.take_events())
    assert_nothing_is_left(ours)


def test_a_tier_that_cannot_read_leaves_nothing_behind(tmp_path, engines):
    engine = engines(tmp_path, 4, OURS)
    first, second = [key(n) for n in range(4)], [key(n) for n in range(10, 14)]
    engine.request(first)
    engine.request(second)
    for path in tmp_path.rglob("*.bin"):
        path.write_bytes(b"short")
    assert engine.request(first) == 0
    assert_nothing_is_left(engine)
    assert engine.request(first) == 4  # stored by the request that could not load


def test_a_tier_that_cannot_write_leaves_nothing_behind(tmp_path, engines):
    engine = engines(tmp_path / "tier", 4, OURS)
    (base,) = (path for path in (tmp_path / "tier").iterdir() if path.is_dir())
    base.with_name(f"{base.name}_r0").write_text("a file where a folder is needed")
    keys = [key(n) for n in range(4)]
    engine.request(keys)
    assert_nothing_is_left(engine)
    assert engine.request(keys) == 4


def test_a_store_that_fails_and_a_full_primary_leave_nothing_behind(tmp_path, engines):
    engine = engines(tmp_path, 4, OURS)
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
    engine = engines(tmp_path, 4, OURS)
    keys = [key(n) for n in range(4)]
    engine.request(keys)
    engine.manager.reset_cache()
    if hasattr(engine.manager, "on_reset_flushed"):  # from 0.33 on
        engine.manager.on_reset_flushed()
    assert_nothing_is_left(engine)
    assert engine.primary.lookup(keys[0], None) is LookupResult.MISS
    assert engine.request(keys) == 4  # from files
    assert_nothing_is_left(engine)


def test_a_threshold_is_refused_as_in_vllm(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    spec = create(4, **OURS, secondary_tiers=[tier], store_threshold=2)
    with pytest.raises(ValueError, match="store_threshold is not supported"):
        spec.get_manager()
    assert tiering_spec.CPUPrimaryTierOffloadingManager is CPUPrimaryTierOffloadingManager


def test_the_exchange_is_guarded(tmp_path, monkeypatch):
    spec = create(4, **OURS, secondary_tiers=[])
    monkeypatch.setattr(tiering_spec, "CPUPrimaryTierOffloadingManager", object)
    with pytest.raises(RuntimeError, match="is not vLLM's own class"):
        spec.get_manager()
