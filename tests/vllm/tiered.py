"""vLLM's tiering manager over a secondary tier, vLLM's own or one of ours, and its bytes."""

from __future__ import annotations

import hashlib
import time

from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from kvoffload.integrations.vllm.secondary_tiers import SecondaryTier
from kvoffload.testing.policies import check_invariants
from tests.vllm.configuration import CHUNK_BYTES, PACKAGE, create
from tests.vllm.requests import context as context_of

OURS = {"spec_name": "KVOffloadTieringSpec", "spec_module_path": PACKAGE}
THEIRS = {"spec_name": "TieringOffloadingSpec"}


def content(one: bytes) -> bytes:
    return hashlib.sha256(one).digest() * (CHUNK_BYTES // 32)


def files(folder):
    """Return the options of vLLM's own file tier."""
    return {"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1}


def slab(folder, chunks=64, **options):
    return {
        "type": "KVOffloadFileTier",
        "module_path": PACKAGE,
        "path": str(folder),
        "capacity_bytes": chunks * CHUNK_BYTES,
        "ack": "stored",  # where chunks are copied, a chunk whose job has ended is there
        **options,
    }


def wait_for(tier):
    """Wait until a tier has nothing left to do."""
    if isinstance(tier, SecondaryTier):  # whose `drain_jobs` is a reset, too
        assert tier.tier.wait([*tier._transfers, *tier._queries], 60)
    else:
        tier.drain_jobs()
        time.sleep(0.002)  # it looks for files in a thread of its own


class Engine:
    """Drive a tiering manager as a scheduler would; chunks get known bytes.

    Parameters
    ----------
    tier : dict
        The options of the secondary tier.
    num_chunks : int
        Of the primary tier.
    names : dict
        Which spec.
    """

    def __init__(self, tier, num_chunks=4, names=OURS, **extra):
        self.spec = create(num_chunks, **names, secondary_tiers=[tier], **extra)
        self.manager = self.spec.get_manager()
        self.primary = self.manager.primary_tier
        (self.tier,) = self.manager.secondary_tiers
        self.jobs = []
        self.count = 0
        self.is_open = True
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
        wait_for(self.tier)

    def look_up(self, keys, context):
        """Look all keys up, step by step, until each answer is final."""
        deadline = time.monotonic() + 300
        while True:
            answers = [self.manager.lookup(one, context) for one in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                return answers
            assert time.monotonic() < deadline, answers
            self.end_step()

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

    def reset(self):
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from vLLM 0.33 on
            self.manager.on_reset_flushed()

    def settle(self):
        """Let everything in flight end."""
        for _ in range(3):
            self.end_step()

    def close(self):
        if self.is_open:
            self.is_open = False
            self.manager.shutdown()


def assert_nothing_is_left(engine):
    """No pinned, no pending and no lost chunk; no job and no request."""
    engine.settle()
    assert not engine.manager._jobs
    if isinstance(engine.tier, SecondaryTier):
        assert not engine.tier._transfers
        assert not engine.tier._requests
        assert not engine.tier.get_finished_jobs()
    if hasattr(engine.primary, "_check"):
        assert engine.primary._usage() == (0, 0)
        check_invariants(engine.primary)
