"""vLLM's real scheduler and offloading connector on a machine without an accelerator.

The model runner and the worker are mocks, since both need an accelerator: every scheduled token is
"computed" at once, and a transfer is reported as done some steps after it was ordered.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvoffload.integrations.vllm._upstream import installed_release
from tests.vllm.configuration import PACKAGE

BLOCK_TOKENS = 16
GPU_BLOCKS = 60
LONGEST = 600  # tokens of a conversation, for all groups together: what fits, with a turn more
HEADS, HEAD_SIZE, LAYERS = 4, 16, 2
SPECS = {
    "vllm": {"spec_name": "CPUOffloadingSpec"},
    "kvoffload": {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE},
}
#: Before 0.33 vLLM's connector fails at a request that a reset preempts and that loads in the same
#: step, so there nothing is left to load.
RESETS_ALL = installed_release().name in ("0.31", "0.32")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "rms_norm_eps": 1e-5,
}


class HostPlatform(UnspecifiedPlatform):
    """A machine without an accelerator on which the scheduler side can run."""

    device_type = "cpu"

    @classmethod
    def support_hybrid_kv_cache(cls):
        return True

    @classmethod
    def is_pin_memory_available(cls):
        return False

    @classmethod
    def check_and_update_config(cls, vllm_config):
        pass


def groups(num_groups: int) -> list[KVCacheGroupSpec]:
    shape = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float16,
    }
    full = KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=48))
    if num_groups < 3:
        return [full, window][:num_groups]
    drafting = KVCacheGroupSpec(["drafting"], FullAttentionSpec(**shape), is_eagle_group=True)
    return [full, window, drafting]


def new_scheduler(
    folder: Path,
    kv_groups: list[KVCacheGroupSpec],
    extra: dict[str, Any],
    gpu_blocks: int,
    *,
    longest: int = 2048,
    step_tokens: int = 128,
    events: KVEventsConfig | None = None,
    **retention: int | None,
) -> Scheduler:
    """Return a scheduler with its connector; `retention` is a field of both configurations."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": longest}))
    sizes = [group.kv_cache_spec.block_size for group in kv_groups]
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=sizes[0], enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=events,
    )
    config.cache_config.num_gpu_blocks = gpu_blocks
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_groups):
        config.cache_config.mamba_cache_mode = "align"
    for name, value in retention.items():
        setattr(config.cache_config, name, value)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=gpu_blocks, kv_cache_tensors=[], kv_cache_groups=kv_groups, **retention
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(sizes),
        hash_block_size=min(sizes),
        log_stats=True,
    )


def new_request(name, prompt, answer_tokens, hasher, extra_args=None, **more) -> Request:
    parameters = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, extra_args=extra_args)
    parameters.update_from_generation_config({}, eos_token_id=0)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=hasher,
        **more,
    )


def end_step(scheduler, output, worker, received) -> None:
    """Give the scheduler what a step computed, and whose loads have ended."""
    names = list(output.num_scheduled_tokens)
    requests = scheduler.requests
    # A request that is past its prompt has one more token computed.
    tokens = [
        [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
        for name in names
    ]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(),
                finished_recving=received,
                kv_connector_worker_meta=worker,
            ),
        ),
    )


class Engine:
    """One scheduler, with a mock of everything behind it.

    Parameters
    ----------
    folder : Path
        Where the model's configuration is written.
    extra : dict
        ``kv_connector_extra_config``, without the size of the cache.
    num_groups : int
        KV groups: full attention, then a sliding window, then full attention that drafts.
    num_chunks : int
        Capacity of the offload cache.
    events : KVEventsConfig or None
        Whether KV events are published, and where.
    """

    def __init__(
        self,
        folder: Path,
        extra: dict[str, Any],
        num_groups: int,
        num_chunks: int = 90,
        events: KVEventsConfig | None = None,
    ):
        page = 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 2
        extra = {"cpu_bytes_to_use": num_chunks * max(4096, page * num_groups), **extra}
        self.num_groups = num_groups
        self.scheduler = new_scheduler(folder, groups(num_groups), extra, GPU_BLOCKS, events=events)
        self.connector = self.scheduler.connector.connector_scheduler
        assert type(self.connector) is OffloadingConnectorScheduler
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.in_flight: list[tuple[int, int, str | None]] = []  # due step, job, request to wake
        self.steps = 0

    def add(self, name, prompt, answer_tokens, kv_transfer_params=None, kv_hints=None):
        more = None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        more = {"extra_args": more, "kv_hints": kv_hints}
        self.scheduler.add_request(new_request(name, prompt, answer_tokens, self.hasher, **more))

    def step(self, delay):
        """Run one scheduler step; return what it orders from the worker."""
        self.steps += 1
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        for job, order in orders.load_jobs.items():
            self.in_flight.append(
                (self.steps + delay, job, None if is_sync(order) else order.req_id)
            )
        for job in orders.store_jobs:
            self.in_flight.append((self.steps + delay, job, None))
        flushed = orders.jobs_to_flush or set()
        due = [one for one in self.in_flight if one[0] <= self.steps or one[1] in flushed]
        self.in_flight = [one for one in self.in_flight if one not in due]
        worker = OffloadingWorkerMetadata()
        for _, job, _ in due:
            worker.mark_completed(job)
        end_step(self.scheduler, output, worker, {name for _, _, name in due if name is not None})
        return plain_orders(orders), sorted(output.num_scheduled_tokens.items())

    def is_loading(self):
        """Return whether loaded blocks wait for their request: vLLM refuses to reset then."""
        return any(
            request.status is not RequestStatus.RUNNING
            and any(self.scheduler.kv_cache_manager.get_block_ids(name))
            for name, request in self.scheduler.requests.items()
        )

    def is_idle(self):
        return not self.in_flight and not self.scheduler.has_requests()


def is_sync(job) -> bool:
    """Return whether a load is over before the step's forward pass; before 0.33 none was."""
    return getattr(job, "sync", False)


def plain_orders(orders):
    """Return every transfer that a worker would do, in comparable form."""

    def plain(jobs):
        return {
            number: (
                job.req_id,
                is_sync(job),
                [type(spec).__name__ for spec in (job.src_spec, job.dst_spec)],
                [str(spec.block_ids.dtype) for spec in (job.src_spec, job.dst_spec)],
                [spec.block_ids.tolist() for spec in (job.src_spec, job.dst_spec)],
            )
            for number, job in jobs.items()
        }

    return plain(orders.load_jobs), plain(orders.store_jobs), orders.jobs_to_flush


class Talk:
    """Conversations over some engines: every request is a turn and repeats what was said before.

    Parameters
    ----------
    engines : list of Engine
        All get the same requests and must give the same orders.
    rng : random.Random
        The source of every choice.
    num_conversations : int
        Conversations that go on at a time.
    resets : bool
        Whether caches are reset now and then, the accelerator's or both.
    """

    def __init__(
        self,
        engines: list[Engine],
        rng: random.Random,
        num_conversations: int = 12,
        resets: bool = True,
    ):
        self.engines = engines
        self.rng = rng
        self.resets = resets
        self.conversations = [self.words(rng.randint(20, 60)) for _ in range(num_conversations)]
        self.prompts: list[list[int]] = []
        self.loads = self.stores = self.resets_done = 0

    def words(self, number: int) -> list[int]:
        return [self.rng.randrange(1, 999) for _ in range(number)]

    def turn(self) -> None:
        """Add one request and run some steps."""
        rng = self.rng
        talk = rng.choice(self.conversations)
        del talk[LONGEST // self.engines[0].num_groups :]
        talk += self.words(rng.randint(10, 90))
        answer = rng.randint(1, 20)
        for engine in self.engines:
            engine.add(f"turn{len(self.prompts)}", list(talk), answer)
        self.prompts.append(list(talk))
        for _ in range(rng.randint(1, 12)):
            self.step(rng.randint(0, 3))
        if self.resets and rng.random() < 0.05 and not self.engines[0].is_loading():
            offloaded = rng.random() < 0.5 or RESETS_ALL
            for engine in self.engines:
                assert engine.scheduler.reset_prefix_cache(True, offloaded)
            self.resets_done += 1

    def step(self, delay: int) -> None:
        """Run a step of each engine and compare what they order."""
        orders, *others = (engine.step(delay) for engine in self.engines)
        for other in others:
            assert orders == other, f"turn {len(self.prompts)}"
        self.loads += len(orders[0][0])
        self.stores += len(orders[0][1])

    def drain(self) -> None:
        """Run until nothing is left to do."""
        for _ in range(3000):
            if all(engine.is_idle() for engine in self.engines):
                return
            self.step(0)
        raise AssertionError("the engines do not come to rest")
