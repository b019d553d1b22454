"""Replays of models with several KV groups, and vLLM's real scheduler over the same requests.

Requests come one at a time: vLLM's scheduler and connector decide what is loaded and offered, and
its manager, or ours in it, what is stored and evicted. `GroupServer` must decide the same.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvoffload import CPUOffloadingManager
from kvoffload.integrations.vllm._upstream import installed_release
from kvoffload.policies import registry
from kvoffload.replay import Group, GroupChunks, GroupLayout
from kvoffload.replay.device import ChunkCache
from kvoffload.replay.serving import GroupServer, group_key
from tests.vllm.conftest import SEED
from tests.vllm.engine import HEAD_SIZE, HEADS, SPECS, end_step, new_request, new_scheduler

pytestmark = pytest.mark.usefixtures("host_platform")

BLOCK = 16
STEP_TOKENS = 4096
LAYOUTS = {
    "full": [("full", 16, 0)],
    "two full": [("full", 16, 0), ("full", 16, 0)],
    "window": [("window", 16, 48)],
    "full, window": [("full", 16, 0), ("window", 16, 48)],
    "full, window of a block and a token": [("full", 16, 0), ("window", 16, 49)],
    "full, two windows": [("full", 16, 0), ("window", 16, 100), ("window", 16, 40)],
    "full, chunked": [("full", 16, 0), ("chunked", 16, 64)],
    "full, state": [("full", 16, 0), ("state", 16, 0)],
    "state": [("state", 16, 0)],
    "full, three states": [("full", 16, 0), *[("state", 16, 0)] * 3],
    "full, window, state": [("full", 16, 0), ("window", 16, 48), ("state", 16, 0)],
    "full, larger window": [("full", 16, 0), ("window", 32, 100)],
    "full, smaller window": [("full", 32, 0), ("window", 16, 100)],
    "fulls of two sizes, window": [("full", 16, 0), ("full", 32, 0), ("window", 16, 48)],
}
if installed_release().name == "0.31":  # its states are offered by another rule
    LAYOUTS = {name: groups for name, groups in LAYOUTS.items() if "state" not in name}


def layout(name: str) -> GroupLayout:
    return GroupLayout(tuple(Group(kind, 1, size, w) for kind, size, w in LAYOUTS[name]), 4096)


def chunks_of(
    name: str, blocks_per_chunk: int, retention: int | None, step_tokens: int | None
) -> GroupChunks:
    smallest = min(group.block_tokens for group in layout(name).groups)
    tokens = blocks_per_chunk * smallest
    return GroupChunks.of(layout(name), tokens, retention, step_tokens=step_tokens)


def spec(group: Group) -> Any:
    shape = {
        "block_size": group.block_tokens,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE * BLOCK // group.block_tokens,
        "dtype": torch.float16,
    }
    if group.kind == "full":
        return FullAttentionSpec(**shape)
    if group.kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=group.window)
    if group.kind == "chunked":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.window)
    return MambaSpec(
        block_size=group.block_tokens,
        shapes=((HEADS * HEAD_SIZE,),),
        dtypes=(torch.float16,),
        page_size_padded=2 * BLOCK * HEADS * HEAD_SIZE * 2,
        mamba_cache_mode="align",
    )


@dataclass
class Decisions:
    """What an engine decided about a request."""

    local: int = 0
    junction: int = 0
    hit: int = 0
    hashes: list[bytes] = field(default_factory=list)
    loaded: list[bytes] = field(default_factory=list)
    offered: list[list[bytes]] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class Engine:
    """vLLM's scheduler with its connector.

    A request's stores end after the request, or, `in_steps`, as vLLM's worker ends them at the
    soonest: it begins a store in the step after the one that ordered it.
    """

    def __init__(
        self,
        folder,
        chunks: GroupChunks,
        num_chunks: int,
        extra: dict[str, Any],
        gpu_blocks: int,
        *,
        in_steps: bool = False,
    ) -> None:
        groups = [
            KVCacheGroupSpec([f"layer{number}"], spec(group))
            for number, group in enumerate(chunks.layout.groups)
        ]
        page = 2 * BLOCK * HEADS * HEAD_SIZE * 2
        chunk_bytes = page * len(groups) * chunks.blocks_per_chunk
        extra = {
            "cpu_bytes_to_use": num_chunks * -(-chunk_bytes // 4096) * 4096,
            "blocks_per_chunk": chunks.blocks_per_chunk,
            "offload_prompt_only": in_steps,
            **extra,
        }
        self.in_steps = in_steps
        self.hash_tokens = min(group.block_tokens for group in chunks.layout.groups)
        self.scheduler = new_scheduler(
            folder,
            groups,
            extra,
            gpu_blocks,
            longest=8192,
            step_tokens=chunks.step_tokens or STEP_TOKENS,
            prefix_cache_retention_interval=chunks.retention,
        )
        self.connector = self.scheduler.connector.connector_scheduler
        self.manager = self.connector.manager
        # of host memory, with a disk behind it too
        assert getattr(self.manager, "primary_tier", self.manager)._num_chunks == num_chunks
        self.hasher = get_request_block_hasher(self.hash_tokens, sha256)
        self.seen = Decisions()
        self.number = self.hit_tokens = 0
        self._listen()

    def _listen(self) -> None:
        """Note what is asked of the connector and of the manager."""
        connector, manager = self.connector, self.manager
        match, load, store = (
            connector.get_num_new_matched_tokens,
            manager.prepare_load,
            manager.prepare_store,
        )

        def matched(request, local, **more):
            hit, is_async = match(request, local, **more)
            if hit is not None:
                self.seen.local, self.seen.hit = local, hit
                self.seen.junction = request.shared_prefix_boundary
            return hit, is_async

        def loading(keys, *more):
            self.seen.loaded.extend(keys)
            return load(keys, *more)

        def storing(keys, *more):
            output = store(keys, *more)
            self.seen.offered.append(list(keys))
            if output is not None:
                self.seen.stored.extend(output.keys_to_store)
                self.seen.evicted.extend(output.evicted_keys)
            return output

        connector.get_num_new_matched_tokens = matched
        manager.prepare_load, manager.prepare_store = loading, storing

    def serve(self, prompt: list[int]) -> Decisions:
        """Run a request to its end and return what was decided."""
        self.seen = Decisions()
        self.number += 1
        name = f"request{self.number}"
        request = new_request(name, prompt, 3 if self.in_steps else 1, self.hasher)
        self.scheduler.add_request(request)
        self.seen.hashes = list(request.block_hashes)
        stores: list[int] = []  # that have not ended
        for _ in range(200):
            output = self.scheduler.schedule()
            orders = output.kv_connector_metadata
            begun = list(stores) if self.in_steps else []
            stores += orders.store_jobs
            over = name not in self.connector._req_status or (
                self.connector._req_status[name].finished_signaled
            )
            worker = OffloadingWorkerMetadata()
            ended = stores if over else begun
            for job in [*orders.load_jobs, *ended]:
                worker.mark_completed(job)
            stores = [job for job in stores if job not in ended]
            received = {job.req_id for job in orders.load_jobs.values()}
            self._update(output, worker, received)
            if over:
                assert not self.scheduler.has_requests()
                return self.seen
        raise AssertionError("the request does not end")

    def _update(self, output, worker, received) -> None:
        end_step(self.scheduler, output, worker, received)

    def forget(self) -> None:
        """Empty the accelerator's cache."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()


class Prompts:
    """Prompts that share beginnings, go on, and repeat."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self.rng = rng
        self.longest = longest
        self.systems = [self.words(rng.randint(10, longest // 2)) for _ in range(3)]
        self.said: list[list[int]] = []

    def words(self, number: int) -> list[int]:
        return [self.rng.randrange(1, 999) for _ in range(number)]

    def next(self) -> list[int]:
        rng, chance = self.rng, self.rng.random()
        if self.said and chance < 0.6:
            prompt = list(rng.choice(self.said[-12:]))
            if chance < 0.1:
                del prompt[rng.randint(1, len(prompt)) :]
            if chance > 0.2:
                prompt += self.words(rng.randint(1, 90))
        else:
            prompt = [*rng.choice(self.systems), *self.words(rng.randint(1, 90))]
        if chance > 0.9:
            prompt = prompt[: max(16, len(prompt) // 16 * 16)]
        del prompt[self.longest :]
        self.said.append(prompt)
        return prompt


def serve_both(engine: Engine, server: Any, prompt: list[int]) -> tuple[Decisions, Any]:
    """Serve a prompt with both; return what the engine decided, and the request of the server."""
    decided = engine.serve(prompt)
    stride = server.groups.block_tokens // engine.hash_tokens
    served = server.serve(
        decided.hashes[stride - 1 :: stride], len(prompt), decided.local, decided.junction
    )
    served.complete()
    return decided, served


def differences(engine: Engine, server: GroupServer, prompt: list[int]) -> list[str]:
    """Serve a prompt with both and name what differs."""
    decided, served = serve_both(engine, server, prompt)

    def once(calls):
        return [call for call, _ in itertools.groupby(calls)]  # what was refused comes again

    pairs = {
        "hit": (decided.hit, served.hit_tokens),
        "loaded": (decided.loaded, served.loaded),
        "offered": (once(decided.offered), once(served.offered)),
        "stored": (decided.stored, served.to_store),
        "evicted": (decided.evicted, served.evicted),
    }
    engine.hit_tokens += decided.hit
    return [name for name, (theirs, ours) in pairs.items() if theirs != ours]


def compare(
    folder,
    name: str,
    retention: int | None,
    blocks_per_chunk: int,
    *,
    seed: int,
    num_requests: int,
    num_chunks: int = 150,
    gpu_blocks: int = 2000,
    policy: str = "lru",
    spec_name: str = "vllm",
    forget: bool = True,
    longest: int = 700,
    step_tokens: int | None = None,
    must_hit: bool = True,
) -> list[tuple[int, list[str]]]:
    """Serve random prompts with both; return which requests differ, and in what."""
    bound = chunks_of(name, blocks_per_chunk, retention, step_tokens)
    assert bound.is_exact
    assert bound.blocks_per_chunk == blocks_per_chunk
    extra = {"eviction_policy": policy, **SPECS[spec_name]}
    engine = Engine(folder, bound, num_chunks, extra, gpu_blocks, in_steps=step_tokens is not None)
    server = GroupServer(bound, CPUOffloadingManager(bound.block_tokens, num_chunks, policy))
    prompts = Prompts(random.Random(seed), longest)
    found = []
    for number in range(num_requests):
        differing = differences(engine, server, prompts.next())
        if differing:
            found.append((number, differing))
        if forget:
            engine.forget()
    if (
        must_hit and forget and blocks_per_chunk == 1
    ):  # states at whole chunks of several blocks are rare
        assert engine.hit_tokens, "nothing was loaded: nothing was compared"
    return found


RETENTIONS = (0, 128, None)
#: Requests of a sequence; a run with a larger budget has more sequences.
REQUESTS = 40
#: Before 0.33 vLLM stores chunks of which the accelerator's cache had only a part, and its LRU does
#: not count what a request has loaded as newest until the request ends. Replays follow 0.33.
IS_OLDER = installed_release().name in ("0.31", "0.32")
OWN_POLICY = "arc" if IS_OLDER else "lru"
POLICIES = [name for name in registry.names() if name != "lru" or not IS_OLDER]
POLICY_LAYOUTS = [
    name
    for name in ("full", "full, two windows", "full, three states", "full, chunked")
    if name in LAYOUTS
]
SEQUENCES = max(1, int(float(os.environ.get("KVOFFLOAD_TEST_BUDGET", "") or 1)))


STEPPED_AT_NIGHT = [] if IS_OLDER else [(128, 70, "arc"), (64, 3, "arc"), (100, 25, "lru")]


def takes(name: str, retention: int | None) -> bool:
    """Return whether vLLM takes an interval for such groups."""
    return not retention or any(kind in ("window", "state") for kind, _, _ in LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("on_device", [False, True])
def test_vllms_own_decisions(tmp_path, name, on_device):
    for sequence in range(SEQUENCES):
        for retention in filter(lambda retention: takes(name, retention), RETENTIONS):
            for blocks_per_chunk in (1,) if on_device and IS_OLDER else (1, 4):
                assert not compare(
                    tmp_path,
                    name,
                    retention,
                    blocks_per_chunk,
                    seed=SEED + sequence,
                    num_requests=REQUESTS,
                    gpu_blocks=150 if on_device else 2000,
                    forget=not on_device,
                    policy=OWN_POLICY,
                ), f"retention {retention}, {blocks_per_chunk} blocks per chunk"


@pytest.mark.parametrize(
    ("step_tokens", "on_device"), [(None, False), (256, False), (256, True)], ids=str
)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_as_our_spec(tmp_path, policy, step_tokens, on_device):
    for sequence in range(SEQUENCES):
        for name in POLICY_LAYOUTS:
            assert not compare(
                tmp_path,
                name,
                0,
                1,
                seed=SEED + sequence,
                num_requests=60,
                num_chunks=60 * len(LAYOUTS[name]) if step_tokens else 100,
                gpu_blocks=400 if on_device else 2000,
                forget=not on_device,
                longest=1200 if step_tokens else 700,
                policy=policy,
                spec_name="kvoffload",
                step_tokens=step_tokens,
            ), name


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("step_tokens", "num_chunks", "policy"),
    [
        *((128, 70, OWN_POLICY), (64, 3, OWN_POLICY), (100, 25, "arc")),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in STEPPED_AT_NIGHT),
    ],
)
def test_prompts_of_several_steps_in_little_memory(tmp_path, name, step_tokens, num_chunks, policy):
    # With blocks of two sizes the accelerator does not cache all blocks that a window offers, and
    # gives those that the window has left to others: an offer that is repeated lacks them.
    sizes = {size for _, size, _ in LAYOUTS[name]}
    if len(sizes) > 1 and num_chunks < 10:
        pytest.skip("nearly every offer is repeated")
    told = {"offered"} if len(sizes) > 1 else set()
    for sequence in range(SEQUENCES):
        for retention in filter(lambda retention: takes(name, retention), RETENTIONS):
            found = compare(
                tmp_path,
                name,
                retention,
                1,
                seed=SEED + sequence,
                num_requests=REQUESTS,
                num_chunks=num_chunks * len(LAYOUTS[name]),
                longest=1200,
                policy=policy,
                step_tokens=step_tokens,
                must_hit=num_chunks > 40,
            )
            assert [one for one in found if set(one[1]) - told] == [], f"retention {retention}"


def test_what_a_finish_passes_over_can_be_evicted(tmp_path):
    """Stores end before the request does; then SLRU demotes, and passes over what is pending."""
    if IS_OLDER:
        pytest.skip("a sequence of this release")
    memory = {"num_requests": 40, "num_chunks": 60, "longest": 1200, "step_tokens": 256}
    more = {"policy": "slru", "spec_name": "kvoffload"}
    assert not compare(tmp_path, "full", 0, 1, seed=22, **memory, **more)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("policy", [OWN_POLICY] if IS_OLDER else ["lru", "arc"])
@pytest.mark.parametrize(("num_chunks", "step_tokens"), [(70, 128), (40, 256), (7, 64)])
def test_blocks_of_one_full_group_step_by_step(
    tmp_path, policy, num_chunks, step_tokens, on_device
):
    """Blocks are decided on as in vLLM for prompts that are close to memory, or larger."""
    chunks = GroupChunks.of(layout("full"), BLOCK, 0, step_tokens=step_tokens)
    extra = {"eviction_policy": policy, **SPECS["vllm"]}
    gpu_blocks = 150 if on_device else 2000
    engine = Engine(tmp_path, chunks, num_chunks, extra, gpu_blocks, in_steps=True)
    manager = CPUOffloadingManager(BLOCK, num_chunks, policy)
    server = GroupServer(GroupChunks.of_blocks(BLOCK, step_tokens=step_tokens), manager)
    prompts = Prompts(random.Random(SEED), 1200)
    refused = evicted = 0
    for _ in range(80):
        prompt = prompts.next()
        decided = engine.serve(prompt)
        keys = [group_key(block, 0) for block in decided.hashes[: len(prompt) // BLOCK]]
        served = server.serve(keys, BLOCK * len(keys), decided.local)
        served.complete()
        assert served.hit_tokens == decided.hit
        assert served.to_store == decided.stored
        assert served.evicted == decided.evicted
        refused += served.refused
        evicted += len(served.evicted)
        if not on_device:
            engine.forget()
    assert evicted
    assert refused or num_chunks > 7


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_accelerators_cache(tmp_path, name):
    """Its hits are within 5 % of vLLM's, and so are those after it together with them."""
    chunks = GroupChunks.of(layout(name), 16, 0)
    if not chunks.is_exact:
        pytest.skip("a block of the trace is not a chunk")
    extra = {"eviction_policy": OWN_POLICY, **SPECS["vllm"]}
    engine = Engine(tmp_path, chunks, 150, extra, 250)
    server = GroupServer(chunks, CPUOffloadingManager(16, 150, OWN_POLICY))
    device = ChunkCache(249, chunks)  # a block of vLLM's is always empty
    prompts = Prompts(random.Random(7), 700)
    numbers: dict[bytes, int] = {}
    theirs = ours = of_theirs = of_ours = 0
    for _ in range(120):
        prompt = prompts.next()
        decided = engine.serve(prompt)
        stride = chunks.block_tokens // engine.hash_tokens
        hashes = decided.hashes[stride - 1 :: stride]
        blocks = np.array(
            [numbers.setdefault(block, len(numbers)) for block in hashes], dtype=np.uint32
        )
        found = device.find(blocks, len(prompt))
        local, junction = (16 * hit for hit in found)
        served = server.serve(hashes, len(prompt), local, junction)
        served.complete()
        device.leave(blocks, len(prompt), *found, served.hit_tokens)
        of_theirs += decided.local
        of_ours += local
        theirs += decided.local + decided.hit
        ours += local + served.hit_tokens
    assert of_theirs
    assert of_ours == pytest.approx(of_theirs, rel=0.05)
    assert ours == pytest.approx(theirs, rel=0.05)
