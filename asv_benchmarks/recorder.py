"""Print the cost of recording per block, on the thread that calls the manager and in all.

Every figure is CPU time. The caller's is that of its lookups through the recorder, less that of the
same lookups without; the rest is that of the recorder's own thread. The sides take turns, each
round with keys that were never hashed, and medians are printed. Usage::

    python asv_benchmarks/recorder.py [--rounds N] [--lengths 8,24,128,1024]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from hashlib import sha256
from typing import Any

from kvoffload import CPUOffloadingManager
from kvoffload.traces import TraceRecorder

GROUP = 4_096  # blocks whose keys are made at a time, as an engine hashes just before it asks
GROUPS = 32  # of them per round and side


def make_requests(first: int, length: int, width: int) -> list[list[bytes]]:
    """Make requests of new keys, GROUP blocks together: a digest and an engine's suffix."""
    keys = [sha256(b"%d" % i).digest() + bytes(width - 32) for i in range(first, first + GROUP)]
    return [keys[start : start + length] for start in range(0, GROUP - length + 1, length)]


def lookup_ns(manager: Any, number: int, length: int, width: int) -> tuple[int, int]:
    """Return the CPU time of the lookups of one round, ns, and how many blocks they asked for."""
    spent = blocks = 0
    for group in range(number * GROUPS, (number + 1) * GROUPS):
        requests = make_requests(group * GROUP, length, width)
        start = time.thread_time_ns()
        for request in requests:
            manager.lookup(request)
        spent += time.thread_time_ns() - start
        blocks += length * len(requests)
    return spent, blocks


def side_ns(suffix: str | None, number: int, length: int, width: int) -> tuple[float, float]:
    """Return the CPU time per block of the caller and of other threads; None: without recorder."""
    manager = CPUOffloadingManager(16, GROUP)
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time_ns() - time.thread_time_ns()
        if suffix is None:
            spent, blocks = lookup_ns(manager, number, length, width)
        else:
            with TraceRecorder(manager, f"{folder}/trace.jsonl{suffix}") as recorder:
                spent, blocks = lookup_ns(recorder, number, length, width)
            if recorder.log.dropped_requests:
                raise SystemExit("requests were dropped: the figures would be too low")
        others = time.process_time_ns() - time.thread_time_ns() - before
    return spent / blocks, others / blocks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", default="8,24,128,1024")
    chosen = parser.parse_args()
    lengths = [int(length) for length in chosen.lengths.split(",")]
    print("ns of CPU time per block       calling thread   recorder's thread   in all")
    for suffix in (".zst", ".gz"):
        for width in (32, 36):
            for length in lengths:
                caller, thread = [], []
                for number in range(chosen.rounds):
                    found = {}
                    for side in (None, suffix) if number % 2 else (suffix, None):
                        found[side] = side_ns(side, number, length, width)
                    caller.append(found[suffix][0] - found[None][0])
                    thread.append(found[suffix][1] - found[None][1])
                ours, its = statistics.median(caller), statistics.median(thread)
                name = f"{suffix:4} {length:5} blocks of {width} bytes"
                print(f"{name:30} {ours:14.0f} {its:19.0f} {ours + its:8.0f}", flush=True)


if __name__ == "__main__":
    main()
