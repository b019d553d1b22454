"""Print the blocks per second of a replay, beside libCacheSim's on the same blocks.

Both go through one trace in one process, taking turns: kvoffload by requests, with its manager's
lookups, loads and stores; libCacheSim as a run of single objects, all of size 1, from a file in its
own format. Their hits differ: a request asks for its leading blocks, an object for itself. Needs
``pip install libcachesim``; the trace may be gzipped. Usage::

    python asv_benchmarks/simulators.py TRACE [--share PERCENT] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import libcachesim

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvoffload.replay import Configuration, DecodedTrace  # noqa: E402 - beside this folder
from kvoffload.replay.loop import Replays  # noqa: E402
from kvoffload.traces import Trace  # noqa: E402
from kvoffload.traces.oracle_general import write_oracle_general  # noqa: E402

POLICIES = {
    "lru": libcachesim.LRU,
    "arc": libcachesim.ARC,
    "sieve": libcachesim.Sieve,
    "s3fifo": libcachesim.S3FIFO,
}


def cpu_seconds(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--share", type=float, default=5.0, help="capacity, percent of the distinct blocks"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trace = DecodedTrace.of(Trace(options.trace))
    replays = Replays(trace)
    replays.keys()
    capacity = int(trace.unique_blocks * options.share / 100)
    print(
        f"{options.trace.name}: {trace.num_requests:,} requests, {trace.num_blocks:,} blocks, "
        f"{trace.unique_blocks:,} distinct; {capacity:,} slots; medians of {options.rounds} rounds"
    )
    print("million blocks per second:")
    print(f"{'policy':8} {'kvoffload':>14} {'libCacheSim':>14} {'times':>6}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.oracleGeneral.bin"
        with path.open("wb") as file:
            write_oracle_general(Trace(options.trace), file)
        for policy, of in POLICIES.items():
            sides: dict[str, list[float]] = {"kvoffload": [], "libcachesim": []}
            for _ in range(options.rounds):
                one = Configuration(policy=policy, host=capacity)
                sides["kvoffload"].append(cpu_seconds(lambda: replays.of(one)))  # noqa: B023
                cache = of(capacity)
                reader = libcachesim.TraceReader(
                    str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE
                )
                sides["libcachesim"].append(
                    cpu_seconds(lambda: cache.process_trace(reader))  # noqa: B023
                )
            speeds = {
                name: trace.num_blocks / statistics.median(seconds) / 1e6
                for name, seconds in sides.items()
            }
            ours, theirs = speeds.values()
            print(f"{policy:8} {ours:14.2f} {theirs:14.2f} {ours / theirs:6.2f}")


if __name__ == "__main__":
    main()
