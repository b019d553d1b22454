"""Print the CPU seconds of a fleet of eight engines against one replay of the same trace.

The last line is the most memory that was in use.

One engine serves the requests in turn, with the memory of one and with that of all; then each
router with that memory divided, LRU, at 10,000 tokens of prompts per second and engine. All in one
process, in turn; the median of several rounds and its ratio to the first. Usage::

    python asv_benchmarks/fleets.py [--rounds N] [--percent SHARE] [--engines N] TRACE
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

from ratios import trace_path

from kvoffload.replay import Configuration, DecodedTrace, GroupChunks
from kvoffload.replay.loop import Replays
from kvoffload.replay.routers import ROUTERS
from kvoffload.traces import Survey, Trace

RATE = 10_000  # tokens per second
TOKEN_BYTES = 262_144


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--percent", type=float, default=5.0, help="blocks in all memory")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("trace")
    chosen = parser.parse_args()
    survey = Survey.of((), unique=False, block_tokens=None)
    requests = Trace(trace_path(chosen.trace))
    trace = DecodedTrace.of(survey.counting(requests), arrivals=True)
    size = survey.block_tokens
    if size is None:
        parser.error("TRACE must have blocks of one size")
    replays, groups = Replays(trace), GroupChunks.of_blocks(size, block_bytes=size * TOKEN_BYTES)
    replays.keys()
    each = int(trace.unique_blocks * chosen.percent / 100) // chosen.engines

    def alone(blocks: int) -> Callable[[], object]:
        one = Configuration(host=blocks, groups=groups)
        return lambda: replays.of(one)

    def behind(router: str) -> Callable[[], object]:
        fleet = Configuration(
            engines=chosen.engines, router=router, host=each, rate=RATE, groups=groups
        )
        return lambda: replays.of(fleet)

    works = {"one engine": alone(each), "one, all memory": alone(each * chosen.engines)}
    works |= {router: behind(router) for router in ROUTERS}
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(chosen.rounds):
        for name, work in works.items():
            start = time.process_time()
            work()
            spent[name].append(time.process_time() - start)
    one = statistics.median(spent["one engine"])
    for name, seconds in spent.items():
        median = statistics.median(seconds)
        print(f"{name:15} {median:6.2f} s {median / one:6.2f} x")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
