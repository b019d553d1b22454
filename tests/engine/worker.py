"""A worker that copies chunks between two places in host memory: vLLM's own needs an accelerator.

vLLM loads `install` in each of its processes, by the entry point of ``vllm.general_plugins`` that
`tests.engine.server` provides. So the specs, vLLM's and ours, are configured as they are with an
accelerator.

It lives with the tests and not in the package: where device memory is host memory a second copy
gains nothing, a larger device cache does. And vLLM's own specs refuse to run on a CPU, so that a
comparison with its manager needs this from outside in any case.

``KVOFFLOAD_TEST_COPIES`` says how it copies: ``now``, before the call returns, so that two engines
that are asked the same do the same in the same step; ``later``, in a thread, so that stores and
loads are pending for some steps; ``zeros``, the control: what is loaded is not what was stored.

``KVOFFLOAD_TEST_REPORT`` names a file for what the scheduler's side says of itself at its end.

``KVOFFLOAD_TEST_START`` says how vLLM starts the engine's process: ``fork``, which spares it half
of a start, the imports, or ``spawn``, as vLLM does on a CPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

COPIES = "KVOFFLOAD_TEST_COPIES"
REPORT = "KVOFFLOAD_TEST_REPORT"
DELAY = 0.02  # seconds that a copy in a thread waits: some steps of a small model


class CopyingWorker(OffloadingWorker):
    """Copies between the engine's KV tensors and chunks in host memory, as vLLM's worker.

    `kv_caches` has a row of bytes for each block and tensor, and which tensors a KV group has.
    `mmap_region` is the memory, where secondary tiers share it; else it is allocated here.
    """

    def __init__(
        self, kv_caches, blocks_per_chunk, num_cpu_chunks, mmap_region=None, canonical_layout=False
    ):
        if canonical_layout:
            raise NotImplementedError("the tests' worker copies blocks as they are")
        self.copies = os.environ.get(COPIES, "now")
        self.blocks_per_chunk = blocks_per_chunk
        self.region = mmap_region
        self.tensors = kv_caches.group_data_refs
        self.device = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self.host = []
        for one in kv_caches.tensors:
            size = one.page_size_bytes * blocks_per_chunk
            self.host.append(
                torch.zeros((num_cpu_chunks, size), dtype=torch.int8)
                if mmap_region is None
                else mmap_region.create_next_worker_view(size)
            )
        self.thread = ThreadPoolExecutor(1) if self.copies == "later" else None
        self.under_way: dict[int, Future[int]] = {}

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.submit(job_id, list(self.places(src_spec, dst_spec)), self.store)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self.submit(job_id, list(self.places(dst_spec, src_spec)), self.load)

    def submit(self, job_id, places, copy):
        def run() -> int:
            if self.thread:
                time.sleep(DELAY)
            return sum(copy(*place) for place in places)

        if self.thread:
            self.under_way[job_id] = self.thread.submit(run)
        else:
            done: Future[int] = Future()
            done.set_result(run())
            self.under_way[job_id] = done
        return True

    def places(self, device_spec, host_spec) -> Iterator[tuple[int, int, int, int]]:
        """Give KV group, block, chunk and place in the chunk, for each block of a transfer.

        The blocks of a group follow one another in the request, but the first may lie inside a
        chunk.
        """
        blocks, chunks = iter(device_spec.block_ids.tolist()), iter(host_spec.block_ids.tolist())
        per_chunk = self.blocks_per_chunk
        for group, count in enumerate(device_spec.group_sizes):
            first = device_spec.block_indices[group] % per_chunk
            chunk = -1
            for place in range(first, first + count):
                if place == first or place % per_chunk == 0:
                    chunk = next(chunks)
                yield group, next(blocks), chunk, place % per_chunk

    def rows(self, group, block, chunk, place) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give the two memories of a block, a pair for each tensor of its group."""
        for tensor in self.tensors[group]:
            device = self.device[tensor.tensor_idx]
            start = place * device.shape[1]
            size = tensor.page_size_bytes  # without padding
            host = self.host[tensor.tensor_idx][chunk, start : start + size]
            yield device[block, :size], host

    def store(self, *place) -> int:
        return sum(len(host.copy_(device)) for device, host in self.rows(*place))

    def load(self, *place) -> int:
        zeros = self.copies == "zeros"
        return sum(
            len(device.zero_() if zeros else device.copy_(host))
            for device, host in self.rows(*place)
        )

    def get_finished(self):
        done = [job for job, future in self.under_way.items() if future.done()]
        return [
            TransferResult(
                job_id=job,
                success=True,
                transfer_size=self.under_way.pop(job).result(),
                transfer_time=1e-6,
            )
            for job in done
        ]

    def wait(self, job_ids):
        for job in job_ids & self.under_way.keys():
            self.under_way[job].result()

    def shutdown(self):
        if self.thread:
            self.thread.shutdown()
        self.device.clear()
        self.host.clear()
        if self.region is not None:
            self.region.cleanup()


def get_worker(spec, kv_caches):
    """Build the spec's worker without asking for an accelerator."""
    if not spec._worker:
        spec._worker = spec.create_worker(kv_caches)
    return spec._worker


def report(connector: Any) -> dict[str, Any]:
    """Return what the scheduler's side of the connector says of itself."""
    manager = connector.manager
    check = getattr(getattr(manager, "primary_tier", manager), "_check", None)
    if check is not None:  # ours: all invariants
        check()
    return {
        "manager": type(manager).__name__,
        "checked": check is not None,
        "open_transfers": len(connector._jobs),
        "open_requests": len(connector._req_status),
        "in_use": manager.get_stats().reduce()["vllm:kv_offload_cpu_cache_usage_perc"],
    }


def install() -> None:
    """Put the worker in the place of vLLM's, where its specs look for it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.engine import utils
    from vllm.v1.kv_offload.cpu import spec
    from vllm.v1.kv_offload.tiering import spec as tiering

    start = os.environ.get("KVOFFLOAD_TEST_START", "fork")
    utils.get_mp_context = partial(multiprocessing.get_context, start)
    spec.CPUOffloadingWorker = tiering.CPUOffloadingWorker = CopyingWorker
    spec.CPUOffloadingSpec.get_worker = get_worker
    path = os.environ.get(REPORT)
    if path:
        connector = scheduler.OffloadingConnectorScheduler
        shutdown = connector.shutdown

        def shutdown_with_report(self):
            Path(path).write_text(json.dumps(report(self)))
            shutdown(self)

        connector.shutdown = shutdown_with_report
