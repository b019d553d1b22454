"""Replays of models with several KV groups and a disk, and vLLM's real scheduler over the same.

`KVOffloadTieringSpec` puts a tier below host memory, of memory too, because that has no deadline to
miss; a slab decides by the same index. Requests come one at a time, and every transfer ends before
the next step.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM 0.31 counts no sources")

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload import CPUOffloadingManager
from kvoffload.policies import registry
from kvoffload.replay.tiers import TieredServer
from kvoffload.testing.policies import check_invariants
from tests.vllm.configuration import PACKAGE
from tests.vllm.conftest import SEED
from tests.vllm.test_groups import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    IS_OLDER,
    LAYOUTS,
    POLICY_LAYOUTS,
    RETENTIONS,
    SEQUENCES,
    Engine,
    Prompts,
    chunks_of,
    serve_both,
    takes,
)
from tests.vllm.tiered import OURS, wait_for

pytestmark = [
    pytest.mark.usefixtures("host_platform"),
    pytest.mark.skipif(IS_OLDER, reason="replays follow 0.33"),
]

REQUESTS = 60


class TieredEngine(Engine):
    """An engine with a tier that has done its work after each step."""

    def __init__(self, folder, chunks, num_chunks, disk_chunks, policy, disk_policy, **more):
        page = 2 * BLOCK * HEADS * HEAD_SIZE * 2 * len(chunks.layout.groups)
        capacity = disk_chunks * -(-page * chunks.blocks_per_chunk // 4096) * 4096
        url = f"memory:?capacity={capacity}&policy={disk_policy}"
        tier = {"type": "KVOffloadTier", "module_path": PACKAGE, "url": url}
        extra = {**OURS, "eviction_policy": policy, "secondary_tiers": [tier]}
        super().__init__(folder, chunks, num_chunks, extra, **more)
        self.primary = self.manager.primary_tier
        (self.tier,) = self.manager.secondary_tiers
        self.by_source: dict[CacheHitSource, int] = {}
        sources = self.connector.get_external_cache_hit_sources

        def counted(*arguments):
            self.by_source = sources(*arguments)
            return self.by_source

        self.connector.get_external_cache_hit_sources = counted
        write = self.primary.prepare_write

        def writing(keys, *more):
            output = write(keys, *more)
            if output is not None:
                self.seen.stored.extend(output.keys_to_store)
                self.seen.evicted.extend(output.evicted_keys)
            return output

        self.primary.prepare_write = writing
        submit = self.tier.submit_store

        def submitting(job):
            # Its keys are a set, from which a policy that declines takes any: here, the first.
            keys = sorted(job.keys, key=self.seen.stored.index)
            places = dict(zip(job.keys, job.chunk_ids, strict=True))
            ids = np.array([places[key] for key in keys])
            submit(replace(job, keys=keys, chunk_ids=ids))

        self.tier.submit_store = submitting

    def serve(self, prompt):
        self.by_source = {}
        decided = super().serve(prompt)
        self.manager._process_finished_jobs()
        return decided

    def _update(self, *arguments):
        super()._update(*arguments)
        wait_for(self.tier)
        self.manager._process_finished_jobs()

    def on_disk(self, keys):
        return {key for key in keys if self.tier.tier.state(key) == 0}


def compare(
    folder,
    name: str,
    retention: int | None,
    blocks_per_chunk: int = 1,
    *,
    seed: int,
    host: int = 40,
    disk: int = 120,
    policy: str = "lru",
    disk_policy: str = "lru",
    forget: bool = True,
    step_tokens: int | None = None,
) -> tuple[list[tuple[int, list[str]]], int, int]:
    """Serve random prompts with both; return what differs, and the tokens of both tiers."""
    bound = chunks_of(name, blocks_per_chunk, retention, step_tokens)
    host, disk = host * len(LAYOUTS[name]), disk * len(LAYOUTS[name])
    engine = TieredEngine(
        folder,
        bound,
        host,
        disk,
        policy,
        disk_policy,
        gpu_blocks=2000 if forget else 150,
        in_steps=step_tokens is not None,
    )
    memory = CPUOffloadingManager(bound.block_tokens, host, policy)
    memory.policy.set_declining(False)
    slab = CPUOffloadingManager(bound.block_tokens, disk, disk_policy)
    server = TieredServer(bound, memory, slab)
    prompts = Prompts(random.Random(seed), 700)
    found, keys, from_host, from_disk = [], set(), 0, 0
    try:
        for number in range(REQUESTS):
            prompt = prompts.next()
            # The disk would learn of a block of the answer, which has more tokens with steps.
            while len(prompt) % BLOCK >= BLOCK - (1 if step_tokens is None else BLOCK // 2):
                prompt.append(1)
            decided, served = serve_both(engine, server, prompt)
            keys.update(*decided.offered, *served.offered)
            of_host = engine.by_source.get(CacheHitSource.HOST, 0)
            of_host += engine.by_source.get(CacheHitSource.EXTERNAL_UNSPECIFIED, 0)
            of_disk = engine.by_source.get(CacheHitSource.DISK, 0)
            pairs = {
                "hit": (decided.hit, served.hit_tokens),
                "host": (of_host, served.hit_tokens - served.disk_tokens),
                "disk": (of_disk, served.disk_tokens),
                "loaded": (decided.loaded, served.loaded),
                "stored": (decided.stored, served.to_store),
                "evicted": (decided.evicted, served.evicted),
                "in memory": (
                    {key for key in keys if engine.primary._chunk(key) is not None},
                    {key for key in keys if key in memory},
                ),
                "on disk": (engine.on_disk(keys), {key for key in keys if key in slab}),
            }
            differing = [what for what, (theirs, ours) in pairs.items() if theirs != ours]
            if differing:
                found.append((number, differing))
            from_host, from_disk = from_host + of_host, from_disk + of_disk
            if forget:
                engine.forget()
        check_invariants(memory)
        assert memory.stats()["pinned"] == memory.stats()["pending"] == 0
    finally:
        engine.manager.shutdown()
    return found, from_host, from_disk


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("on_device", "sizes"),
    [(False, (1, 4)), (True, (1,)), pytest.param(True, (4,), marks=pytest.mark.nightly)],
)
def test_hits_by_tier_are_those_of_the_engine(tmp_path, name, on_device, sizes):
    host = (20 if "state" in name else 30) if "full" in name else 8
    from_host = from_disk = 0
    for sequence in range(SEQUENCES):
        for retention in filter(lambda retention: takes(name, retention), RETENTIONS):
            for size in sizes:
                memory = {"host": host // size, "disk": 3 * host // size, "forget": not on_device}
                found, of_host, of_disk = compare(
                    tmp_path, name, retention, size, seed=SEED + sequence, **memory
                )
                assert not found, f"retention {retention}, {size} blocks per chunk"
                from_host, from_disk = from_host + of_host, from_disk + of_disk
    if not on_device:  # which has most of what is asked for
        assert from_disk
        assert from_host


@pytest.mark.parametrize("name", POLICY_LAYOUTS)
@pytest.mark.parametrize("policy", registry.names())
def test_every_policy_in_both_tiers(tmp_path, name, policy):
    for sequence in range(SEQUENCES):
        found, _, _ = compare(
            tmp_path, name, 0, seed=SEED + sequence, policy=policy, disk_policy=policy
        )
        assert not found


@pytest.mark.parametrize("name", POLICY_LAYOUTS)
@pytest.mark.parametrize(("disk_policy", "host"), [("lru", 60), ("s3fifo", 14)])
def test_prompts_of_several_steps(tmp_path, name, disk_policy, host):
    more = {"host": host, "disk": 150, "disk_policy": disk_policy, "step_tokens": 128}
    for sequence in range(SEQUENCES):
        assert not compare(tmp_path, name, 0, seed=SEED + sequence, **more)[0]


@pytest.mark.parametrize("name", POLICY_LAYOUTS)
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_prompts_larger_than_memory(tmp_path, name, policy):
    """Their promotions find no room, and chunks further on leave for them."""
    for sequence in range(8 * SEQUENCES):
        found, _, from_disk = compare(
            tmp_path, name, 0, seed=SEED + sequence, host=14, disk=200, policy=policy
        )
        assert not found
        assert from_disk
