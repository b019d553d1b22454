"""Compare vLLM's own CPU manager with KVOffloadManager: interleaved calls in one process.

Prints a table of ratios, vLLM's time (or bytes) divided by ours. Needs an environment with vLLM,
which ``.ci/vllm-env`` makes::

    $(.ci/vllm-env) setup.py build_ext --inplace
    $(.ci/vllm-env) asv_benchmarks/vllm_cycles.py

A *hit cycle* is ``on_new_request``, a ``lookup`` of each key, ``prepare_load``, ``complete_load``,
``on_request_finished``; a *store cycle* is ``on_new_request``, ``prepare_store`` with as many
evictions as keys, ``complete_store``, ``on_request_finished``; the *pinned store* is the slowest of
all ``prepare_store`` calls of 64 keys while 90 % of the chunks are pinned. The request contexts and
keys are made outside the clock, anew for each manager, so that no hash is cached for the second.
The clock is the CPU time of the thread: the slowest of many calls would otherwise be the one during
which another process ran.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager

BUILDERS = {"vllm": CPUOffloadingManager, "kvoffload": KVOffloadManager}
BLOCK_TOKENS = 16
PINNED_SHARE = 0.9
PINNED_BATCH = 64


def request_keys(number: int, size: int) -> list[bytes]:
    """Return fresh key objects of one request, as the scheduler makes them for every request."""
    return [
        bytes(make_offload_key(hashlib.sha256(b"%d.%d" % (number, place)).digest(), 0))
        for place in range(size)
    ]


def request_context(number: int, keys: list[bytes]) -> ReqContext:
    context = ReqContext(str(number))
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, (place + 1) * BLOCK_TOKENS)
    return context


def store_cycle(manager, number: int, size: int) -> float:
    keys = request_keys(number, size)
    context = request_context(number, keys)
    start = time.thread_time()
    manager.on_new_request(context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return time.thread_time() - start


def hit_cycle(manager, number: int, size: int) -> float:
    keys = request_keys(number, size)
    context = request_context(number, keys)
    start = time.thread_time()
    manager.on_new_request(context)
    for key in keys:
        manager.lookup(key, context)
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    manager.on_request_finished(context)
    return time.thread_time() - start


def pinned_stores(managers: dict, num_chunks: int, size: int, repeats: int) -> dict[str, float]:
    """Pin most of the chunks, then return each manager's slowest store of PINNED_BATCH keys."""
    pinned = int(num_chunks * PINNED_SHARE) // size
    worst = dict.fromkeys(managers, 0.0)
    for manager in managers.values():
        for number in range(pinned):
            keys = request_keys(number, size)
            manager.prepare_load(keys, request_context(number, keys))
    for number in range(repeats):
        for name, manager in managers.items():
            keys = request_keys(10**9 + number, PINNED_BATCH)
            context = request_context(number, keys)
            start = time.thread_time()
            output = manager.prepare_store(keys, context)
            worst[name] = max(worst[name], time.thread_time() - start)
            manager.complete_store(output.keys_to_store, context)
            manager.on_request_finished(context)
    return worst


def store_all(manager, requests) -> None:
    """Store requests in turn and drop their outputs."""
    for number, keys in enumerate(requests):
        context = request_context(number, keys)
        output = manager.prepare_store(keys, context)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)


def bytes_a_chunk(build, cache_policy: str, num_chunks: int, size: int) -> float:
    """Return the bytes of state per chunk of a full cache, keys excluded.

    Python's allocations are traced; our C arrays are measured by the process's resident pages.
    """
    requests = num_chunks // size
    kept = [request_keys(number, size) for number in range(requests)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    manager = build(num_chunks, cache_policy)
    store_all(manager, kept)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return traced / (requests * size)


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * 4096


def native_bytes_a_chunk(build, cache_policy: str, num_chunks: int, size: int) -> float:
    """Return the growth of resident memory per chunk while a cache fills; key objects are kept."""
    requests = num_chunks // size
    kept = [request_keys(number, size) for number in range(requests)]
    gc.collect()
    before = resident_bytes()
    manager = build(num_chunks, cache_policy)
    store_all(manager, kept)
    gc.collect()
    return (resident_bytes() - before) / (requests * size)


def measure(cache_policy: str, num_chunks: int, size: int, repeats: int) -> None:
    managers = {name: build(num_chunks, cache_policy) for name, build in BUILDERS.items()}
    full = num_chunks // size
    for number in range(full):
        for manager in managers.values():
            store_cycle(manager, number, size)
    hits: dict[str, list[float]] = {name: [] for name in managers}
    stores: dict[str, list[float]] = {name: [] for name in managers}
    for number in range(repeats):
        for name, manager in managers.items():
            hits[name].append(hit_cycle(manager, number * 7 % full, size))
    for number in range(repeats):
        for name, manager in managers.items():
            stores[name].append(store_cycle(manager, full + number, size))
    worst = pinned_stores(
        {name: refilled(manager, num_chunks, size) for name, manager in managers.items()},
        num_chunks,
        size,
        repeats,
    )
    label = f"{cache_policy}, {num_chunks:,} chunks, requests of {size}"
    show(label, "hit cycle", *(statistics.median(hits[name]) * 1e6 for name in BUILDERS), "µs")
    show(label, "store cycle", *(statistics.median(stores[name]) * 1e6 for name in BUILDERS), "µs")
    show(label, "worst pinned store", *(worst[name] * 1e6 for name in BUILDERS), "µs")


def refilled(manager, num_chunks: int, size: int):
    """Start again with a cache that is full to the last chunk."""
    manager.reset_cache()
    for number in range(num_chunks // size):
        store_cycle(manager, number, size)
    if num_chunks % size:
        store_cycle(manager, num_chunks // size, num_chunks % size)
    return manager


def show(label: str, what: str, theirs: float, ours: float, unit: str) -> None:
    print(
        f"| {label} | {what} | {theirs:,.0f} {unit} | {ours:,.0f} {unit} | {theirs / ours:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=150, help="cycles of each kind")
    repeats = parser.parse_args().repeats
    print("| case | what | vLLM 0.33 | kvoffload | ratio |")
    print("|---|---|---|---|---|")
    for cache_policy, num_chunks, size in (
        ("lru", 100_000, 512),
        ("arc", 100_000, 512),
        ("lru", 10_000, 128),
    ):
        measure(cache_policy, num_chunks, size, repeats)
    for cache_policy in ("lru", "arc"):
        theirs = bytes_a_chunk(CPUOffloadingManager, cache_policy, 100_000, 512)
        ours = native_bytes_a_chunk(KVOffloadManager, cache_policy, 100_000, 512)
        show(f"{cache_policy}, 100,000 chunks", "state of a chunk", theirs, ours, "B")


if __name__ == "__main__":
    main()
