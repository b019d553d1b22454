"""Measure a watch's accuracy against exact replays, and its cost as ratios.

    python asv_benchmarks/watch.py accuracy [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py policies [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py causes [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py pending [--policy lru] [--pending N…] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py resets [--policy lru] [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py short [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py sizes [--traces FOLDER] [NAME…]
    python asv_benchmarks/watch.py fleet [--traces FOLDER] [--secrets 20] [NAME…]
    python asv_benchmarks/watch.py cost [--vllm] [--capacity 100000]
    python asv_benchmarks/watch.py memory [--pending N]

Errors are of hit ratios over a whole trace. The cost is CPU time: the medians of interleaved rounds
within one process, as ratios, and valgrind's counts with ``cost --rounds 1`` under it; with
``--vllm`` that of vLLM's interface to the manager, in an environment that `.ci/vllm-env` makes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha512
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload import CPUOffloadingManager, Request
from kvoffload.replay import Configuration, DecodedTrace
from kvoffload.replay.loop import Replays
from kvoffload.traces import Trace
from kvoffload.watch import Watch

FOLDER = Path(os.environ.get("KVOFFLOAD_TRACES") or os.devnull)
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
PERCENT = (2, 5, 10)
REQUESTS_PER_RESET = (500, 2000)
FOREVER = 1e9


def traces(folder: Path, names: list[str]) -> Iterator[tuple[str, DecodedTrace]]:
    paths = {path.name.removesuffix(".jsonl.gz"): path for path in folder.glob("*.jsonl.gz")}
    for name in names or paths or ["a trace"]:
        if name not in paths:
            sys.exit(f"--traces must name a folder with {name} (.jsonl.gz), got {folder}")
    for name in sorted(names or paths):
        yield name, DecodedTrace.of(Trace(paths[name]))


def watched_replay(
    trace: DecodedTrace,
    keys: list[bytes],
    capacity: int,
    policy: str,
    watch: Watch | None,
    *,
    pending: int = 0,
    requests: int | None = None,
    per_reset: int = 0,
):
    """Replay a trace, or its first requests, with as many stores under way as `pending`.

    With `per_reset` the cache is reset after each such number of requests, but not at the end.
    """
    manager = CPUOffloadingManager(1, capacity, policy, watch=watch)
    key_of = keys.__getitem__
    under_way: deque[Request] = deque()
    for number, row in enumerate(islice(trace.rows(), requests)):
        if per_reset and number and number % per_reset == 0:
            manager.reset_cache()
            under_way.clear()
        request = manager.begin(list(map(key_of, row)))
        request.lookup()
        request.prepare_store()
        request.finish()
        under_way.append(request)
        if len(under_way) > pending:
            under_way.popleft().complete_store()
    return manager


def exact(replays: Replays, policy: str, capacity: int, pending: int = 0) -> tuple[float, int]:
    result = replays.of(Configuration(policy=policy, host=capacity, pending=pending))
    return result.hit_ratio, result.refused


def whole_run(number: int, **options: Any) -> Watch:
    """Return a watch with an endless window, and the sample `number`."""
    return Watch(window=FOREVER, secret=secret(number), clock=lambda: 0.0, **options)


def secret(number: int) -> bytes:
    return sha512(b"%d" % number).digest()


def accuracy(arguments: argparse.Namespace) -> None:
    """Print the p95 of the error at each size, and how often the error bar covers the truth."""
    pooled: dict[float, list[float]] = defaultdict(list)
    covered: list[bool] = []
    marked: list[float] = []
    worst: dict[float, float] = defaultdict(float)
    for name, trace in traces(arguments.traces, arguments.names):
        replays = Replays(trace)
        keys = replays.keys()
        for percent in PERCENT:
            capacity = trace.unique_blocks * percent // 100
            if capacity < arguments.slots:
                print(f"{name} {percent} %: {capacity} blocks are fewer than the slots")
                continue
            truth = {size: exact(replays, "lru", int(capacity * size)) for size in SIZES}
            errors: dict[float, list[float]] = defaultdict(list)
            for number in range(arguments.secrets):
                watch = Watch(
                    slots=arguments.slots,
                    policies=(),
                    max_rate=1.0,
                    window=FOREVER,
                    secret=secret(number),
                    clock=lambda: 0.0,
                )
                manager = watched_replay(trace, keys, capacity, "lru", watch)
                for point in manager.watch.report().points:
                    if point.hit_ratio is None:
                        continue
                    error = abs(point.hit_ratio - truth[point.memory][0])
                    if "long_requests" in point.marks:
                        marked.append(error)
                        continue
                    errors[point.memory].append(error)
                    if point.memory != 1.0:
                        covered.append(error <= point.error)
            line = []
            for size in SIZES:
                pooled[size] += errors[size]
                if not errors[size]:
                    line.append(f"{size:g}x none")
                    continue
                p95 = float(np.quantile(errors[size], 0.95))
                worst[size] = max(worst[size], p95)
                line.append(f"{size:g}x {p95:.4f}")
            print(f"{name} {percent} %: p95 {', '.join(line)}", flush=True)
    print("worst p95:", ", ".join(f"{size:g}x {worst[size]:.4f}" for size in SIZES))
    means = [statistics.fmean(pooled[size]) for size in (0.5, 2.0, 4.0, 8.0) if pooled[size]]
    print(f"mean of 1/2x to 8x: {statistics.fmean(means):.4f}")
    print(f"marked long_requests: {len(marked)} points, the worst {max(marked, default=0):.4f} off")
    print(f"error bars that cover: {statistics.fmean(covered):.3f} of {len(covered)}")


def policies(arguments: argparse.Namespace) -> None:
    """Print the errors of miniatures at the present size."""
    names = ("arc", "hit-density", "slru", "s3fifo", "lfu", "arc-classic")
    all_errors = []
    for name, trace in traces(arguments.traces, arguments.names):
        replays = Replays(trace)
        keys = replays.keys()
        for percent in PERCENT:
            capacity = trace.unique_blocks * percent // 100
            if capacity < 1024:
                continue
            truth = {policy: exact(replays, policy, capacity)[0] for policy in names}
            errors = defaultdict(list)
            for number in range(arguments.secrets):
                watch = Watch(
                    policies=names,
                    max_rate=1.0,
                    window=FOREVER,
                    secret=secret(number),
                    clock=lambda: 0.0,
                )
                report = watched_replay(trace, keys, capacity, "lru", watch).watch.report()
                for point in report.points:
                    if "long_requests" in point.marks:
                        continue
                    if point.policy in truth and point.hit_ratio is not None:
                        errors[point.policy].append(abs(point.hit_ratio - truth[point.policy]))
            all_errors += [each for some in errors.values() for each in some]
            means = {policy: statistics.fmean(some) for policy, some in errors.items()}
            shown = ", ".join(f"{policy} {mean:.4f}" for policy, mean in means.items())
            print(f"{name} {percent} %: mean error {shown}", flush=True)
    print(f"mean {statistics.fmean(all_errors):.4f}, max {max(all_errors):.4f}")


def pending(arguments: argparse.Namespace) -> None:
    """Print the error of LRU's points without marks if stores overlap."""
    pooled: list[tuple[float, float]] = []
    marked = 0
    for name, trace in traces(arguments.traces, arguments.names):
        replays = Replays(trace)
        keys = replays.keys()
        for percent, under_way in product(PERCENT, arguments.pending):
            capacity = trace.unique_blocks * percent // 100
            truth = {
                size: exact(replays, "lru", int(capacity * size), under_way)[0] for size in SIZES
            }
            errors: dict[float, list[float]] = defaultdict(list)
            for number in range(arguments.secrets):
                watch = whole_run(number, max_rate=1.0)
                report = watched_replay(
                    trace, keys, capacity, arguments.policy, watch, pending=under_way
                ).watch.report()
                for point in report.points:
                    if point.policy != "lru" or point.hit_ratio is None:
                        continue
                    if set(point.marks) - {"filling"}:
                        marked += 1
                        continue
                    errors[point.memory].append(abs(point.hit_ratio - truth[point.memory]))
                    if (arguments.policy, point.memory) != ("lru", 1.0) and point.error is not None:
                        pooled.append((errors[point.memory][-1], point.error))
            shown = ", ".join(
                f"{size:g}x {truth[size]:.3f} {max(some):.4f} off" for size, some in errors.items()
            )
            print(f"{name} {percent} %, {under_way} under way: {shown}", flush=True)
    found = [error for error, _ in pooled]
    print(f"{len(found)} points: mean {statistics.fmean(found):.4f}, max {max(found):.4f}")
    print(f"error bars that cover: {statistics.fmean(e <= bar for e, bar in pooled):.3f}")
    print(f"marked otherwise: {marked} points")


def resets(arguments: argparse.Namespace) -> None:
    """Print the error of points without marks if the cache is reset repeatedly."""
    pooled: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    for _, trace in traces(arguments.traces, arguments.names):
        keys = trace.keys()
        for percent, per_reset in product(PERCENT, REQUESTS_PER_RESET):
            capacity = trace.unique_blocks * percent // 100
            truth: dict[tuple[str, float], float] = {}
            for number in range(arguments.secrets):
                watch = whole_run(number, max_rate=1.0)
                report = watched_replay(
                    trace, keys, capacity, arguments.policy, watch, per_reset=per_reset
                ).watch.report()
                for point in report.points:
                    place = point.policy, point.memory
                    if point.hit_ratio is None or point.error is None:
                        continue
                    if place == (arguments.policy, 1.0) or set(point.marks) - {"filling"}:
                        continue
                    if place not in truth:
                        size = int(capacity * point.memory)
                        stats = watched_replay(
                            trace, keys, size, point.policy, None, per_reset=per_reset
                        ).stats()
                        truth[place] = stats["hit_blocks"] / stats["lookup_blocks"]
                    error = abs(point.hit_ratio - truth[place])
                    pooled["filling" in point.marks].append((error, point.error))
    for filling, some in sorted(pooled.items()):
        found = [error for error, _ in some]
        covered = statistics.fmean(error <= bar for error, bar in some)
        print(
            f"{len(found)} points {'marked filling' if filling else 'without marks'}: mean "
            f"{statistics.fmean(found):.4f}, max {max(found):.4f}; covered {covered:.3f}"
        )


def short(arguments: argparse.Namespace) -> None:
    """Print the errors of the first 100, 200 and 400 requests of each trace, at the defaults."""
    pooled: list[tuple[float, float]] = []
    withheld = 0
    for _, trace in traces(arguments.traces, arguments.names):
        keys = trace.keys()
        for percent, requests in product(PERCENT, (100, 200, 400)):
            capacity = trace.unique_blocks * percent // 100
            exactly = Watch(policies=(), slots=2**20, max_rate=1.0, secret=secret(0))
            watched_replay(trace, keys, capacity, "lru", exactly, requests=requests)
            judged = [sum(some) for some in zip(*exactly.counters()["judged"], strict=True)]
            truth = {
                size: sum(judged[: place + 1]) / sum(judged) for place, size in enumerate(SIZES)
            }
            for number in range(arguments.secrets):
                watch = whole_run(number, policies=(), max_rate=1 / 4)
                report = watched_replay(
                    trace, keys, capacity, "lru", watch, requests=requests
                ).watch.report()
                for point in report.points:
                    if point.hit_ratio is None or point.error is None:
                        withheld += 1
                    elif point.memory != 1.0 and "long_requests" not in point.marks:
                        error = abs(point.hit_ratio - truth[point.memory])
                        pooled.append((error, point.error))
    found = [error for error, _ in pooled]
    print(f"{len(found)} points: mean {statistics.fmean(found):.4f}, max {max(found):.4f}")
    print(f"error bars that cover: {statistics.fmean(e <= bar for e, bar in pooled):.3f}")
    print(f"withheld: {withheld} points")


def sizes(arguments: argparse.Namespace) -> None:
    """Print how far causes and waste depend on the sizes that are asked about."""
    for name, trace in traces(arguments.traces, arguments.names):
        keys = trace.keys()
        capacity = trace.unique_blocks // 20
        for memory in ((1,), (0.5, 2), SIZES):
            watch = whole_run(0, policies=(), memory=memory)
            report = watched_replay(trace, keys, capacity, "lru", watch).watch.report()
            missed = report.sampled_missed
            share = missed["never_or_long_ago"] / sum(missed.values())
            print(f"{name} {memory}: waste {report.waste:.4f}, never or long ago {share:.4f}")


def fleet(arguments: argparse.Namespace) -> None:
    """Print the error of a fleet of two policies, one engine idle, as ``kvoffload top`` adds up."""
    from prometheus_client import CollectorRegistry, generate_latest

    from kvoffload.watch.prometheus import WatchCollector
    from kvoffload.watch.scraped import read_engines, view

    errors = []
    for _, trace in traces(arguments.traces, arguments.names):
        replays = Replays(trace)
        keys = replays.keys()
        capacity = trace.unique_blocks // 10
        truth = {
            size: statistics.fmean(
                exact(replays, "lru", int(capacity * factor * size))[0] for factor in (1, 2)
            )
            for size in SIZES
        }
        for number in range(arguments.secrets):
            engines = []
            for policy, factor in (("lru", 1), ("hit-density", 2), ("lru", 0)):
                watch = whole_run(number, max_rate=1.0)
                if factor:
                    manager = watched_replay(trace, keys, capacity * factor, policy, watch)
                else:
                    manager = CPUOffloadingManager(1, capacity, policy, watch=watch)
                registry = CollectorRegistry()
                registry.register(WatchCollector(manager.watch))
                engines += read_engines(f"{policy} {factor}", generate_latest(registry).decode())
            for shadow in view(engines).shadows:
                if shadow.hit_ratio is None or shadow.marks or shadow.policy != "lru":
                    continue
                errors.append(abs(shadow.hit_ratio - truth[shadow.memory]))
    found = f"mean {statistics.fmean(errors):.4f}, max {max(errors):.4f}"
    print(f"{len(errors)} points of fleets: {found}")


def causes(arguments: argparse.Namespace) -> None:
    """Print how far shares at a rate of 1/64 are from those of all blocks."""
    rows: dict[str, list[float]] = defaultdict(list)
    for name, trace in traces(arguments.traces, arguments.names):
        keys = trace.keys()
        for percent in PERCENT:
            capacity = trace.unique_blocks * percent // 100

            def shares(rate: float, number: int) -> tuple[float, float]:
                watch = Watch(
                    policies=(),
                    slots=2**20,
                    max_rate=rate,
                    window=FOREVER,
                    secret=secret(number),
                    clock=lambda: 0.0,
                )
                report = watched_replay(trace, keys, capacity, "lru", watch).watch.report()  # noqa: B023
                missed = report.sampled_missed
                return report.waste or 0.0, missed["never_or_long_ago"] / sum(missed.values())

            truth = shares(1.0, 0)
            found = [shares(1 / 64, number) for number in range(arguments.secrets)]
            for what, true, some in zip(
                ("waste", "never seen"), truth, zip(*found, strict=False), strict=True
            ):
                errors = [abs(each - true) for each in some]
                rows[what] += errors
                mean = statistics.fmean(errors)
                print(f"{name} {percent} %: {what} {true:.3f}, mean error {mean:.4f}")
    for what, errors in rows.items():
        print(f"{what}: mean {statistics.fmean(errors):.4f}, max {max(errors):.4f}")


def cycle(manager: CPUOffloadingManager, requests: list[list[bytes]], pending: int = 0) -> None:
    """Serve requests with as many stores under way as `pending`, which end with the last."""
    under_way: deque[Request] = deque()
    for hashes in requests:
        request = manager.begin(hashes)
        found = request.lookup()
        if found:
            request.prepare_load(0, found)
            request.complete_load(0, found)
        if request.prepare_store() is not None:
            under_way.append(request)
        request.finish()
        if len(under_way) > pending:
            under_way.popleft().complete_store()
    for request in under_way:
        request.complete_store()


def engine_cycle(manager: Any, requests: list[list[bytes]]) -> None:
    """Serve requests as vLLM's scheduler does: keys one by one until the first miss."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    for number, keys in enumerate(requests):
        context = ReqContext(f"request {number}")
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        manager.on_new_request(context)
        found = 0
        while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
            found += 1
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
        if found < len(keys):
            output = manager.prepare_store(keys[found:], context)
            if output is not None and output.keys_to_store:
                manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)


def engine_keys(requests: list[list[bytes]]) -> list[list[bytes]]:
    """Return the keys that vLLM has for blocks."""
    from vllm.v1.kv_offload.base import make_offload_key

    return [[make_offload_key(key, 0) for key in request] for request in requests]


def workload(
    rng: np.random.Generator, number: int, length: int, capacity: int = 100_000
) -> list[list[bytes]]:
    """Make chains, half of which were seen before, on about twice the memory."""
    documents = rng.integers(0, max(1, 400 * 512 * capacity // 100_000 // length), number)
    return [
        [
            b"%016d%016d" % (document, place if place < length // 2 else place + 1000 * tail)
            for place in range(length)
        ]
        for document, tail in zip(
            documents.tolist(), rng.integers(0, 4, number).tolist(), strict=True
        )
    ]


def cost(arguments: argparse.Namespace) -> None:
    """Print the CPU time of a cycle with a watch against that without."""
    variants: dict[str, Callable[[], Watch | None]] = {
        "none": lambda: None,
        "none again": lambda: None,
        "curve": lambda: Watch(policies=()),
        "curve and one policy": Watch,
    }
    if arguments.only:
        variants = {arguments.only: variants[arguments.only]}
    build: Callable[..., Any] = partial(CPUOffloadingManager, 16)
    serve: Callable[[Any, list[list[bytes]]], None] = cycle
    if arguments.vllm:
        from kvoffload.integrations.vllm import KVOffloadManager

        build, serve = KVOffloadManager, engine_cycle
    for length in arguments.lengths:
        rng = np.random.default_rng(1)
        warm = workload(rng, 200_000 // length, length, arguments.capacity)
        parts = [
            workload(rng, arguments.blocks // length, length, arguments.capacity) for _ in range(4)
        ]
        if arguments.vllm:
            warm, *parts = map(engine_keys, (warm, *parts))
        managers = {
            name: build(arguments.capacity, watch=make()) for name, make in variants.items()
        }
        for manager in managers.values():
            serve(manager, warm)
        gc.collect()
        gc.freeze()  # as vLLM's engine does: imported objects are not garbage
        times: dict[str, list[float]] = defaultdict(list)
        for number in range(arguments.rounds):
            names = list(managers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                start = time.process_time_ns()
                serve(managers[name], parts[number % 4])
                times[name].append(time.process_time_ns() - start)
        base = times.get("none", next(iter(times.values())))
        blocks = sum(map(len, parts[0]))
        for name, some in times.items():
            ratios = [mine / other for mine, other in zip(some, base, strict=True)]
            print(
                f"requests of {length}, {name}: {statistics.median(ratios):.4f} times, least time "
                f"{min(some) / min(base):.4f} times ({min(some) / blocks:.1f} ns per block)"
            )


def resident(arguments: argparse.Namespace) -> None:
    """Print this process's resident KiB after a run, with a watch or with one that is dropped."""
    rng = np.random.default_rng(1)
    requests = workload(rng, 1_000, 512)
    clock = [0.0]
    watch = Watch(clock=lambda: clock[0])
    cycle(CPUOffloadingManager(16, 1_000, watch=Watch()), requests[:20])  # one-time loads first
    manager = CPUOffloadingManager(16, 100_000, watch=watch if arguments.only else None)
    pending = max(arguments.pending)
    for _ in range(arguments.rounds):
        clock[0] += 100.0
        cycle(manager, requests, pending)
    if arguments.only and bool(watch._shadows.lru) != bool(pending):
        raise RuntimeError("stores overlap where they should not, or the reverse")
    print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024)


def memory(arguments: argparse.Namespace) -> None:
    """Print the resident memory that a default watch adds to a process of its own."""
    for pending, rounds in product(
        (0, max(arguments.pending)), (1, arguments.rounds, 4 * arguments.rounds)
    ):
        command = [sys.executable, __file__, "resident", "--rounds", str(rounds)]
        command += ["--pending", str(pending)]
        sizes = [
            [
                int(subprocess.run([*command, *more], capture_output=True, check=True).stdout)
                for _ in range(3)
            ]
            for more in ([], ["--only", "watch"])
        ]
        without, with_watch = map(statistics.median, sizes)
        print(
            f"{pending} stores under way, after {rounds} runs: {with_watch - without:.0f} KiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "figure",
        choices=(
            *("accuracy", "policies", "causes", "pending", "resets", "short", "sizes", "fleet"),
            *("cost", "memory", "resident"),
        ),
    )
    parser.add_argument("names", nargs="*", help="traces; all by default")
    parser.add_argument("--traces", type=Path, default=FOLDER)
    parser.add_argument("--secrets", type=int, default=20)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--capacity", type=int, default=100_000, help="blocks, of the cost")
    parser.add_argument("--pending", type=int, nargs="+", default=[4, 32], help="stores under way")
    parser.add_argument("--policy", default="lru", help="the live one, of pending and resets")
    parser.add_argument("--only")
    parser.add_argument("--vllm", action="store_true", help="of the manager for vLLM")
    arguments = parser.parse_args()
    globals()[arguments.figure](arguments)


if __name__ == "__main__":
    sys.exit(main())
