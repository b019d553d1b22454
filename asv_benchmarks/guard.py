"""Print the hits that hit density's guard costs or brings on the traces.

Each line is a trace, with the mean over the capacities of hits relative to LRU's, if that has any:
without the guard, with it, and the change. The traces are read from the folder that
``KVOFFLOAD_TRACES`` names. weka_cc_a, whose times of subagents are wrong, stands for coding agents:
only the change counts. Usage::

    python asv_benchmarks/guard.py [--pending N] [--device PERCENT]
"""

from __future__ import annotations

import argparse
import statistics

from ratios import trace_path

from kvoffload.replay import Configuration, DecodedTrace
from kvoffload.replay.loop import Replays
from kvoffload.traces import Trace

NAMES = ("mooncake_conversation", "weka_cc_a", "lmcache_agents_64c")
PERCENTS = (0.5, 1, 2, 5, 10, 20, 40)
POLICIES = ("lru", "arc-classic", "hit-density?guard=0", "hit-density")
MOST_LOSS = 0.005


def hit_ratios(name: str, pending: int, device: float) -> list[list[float]]:
    """Return the block hit ratios of each policy, per capacity."""
    trace = DecodedTrace.of(Trace(trace_path(name)))
    replays = Replays(trace)

    def hit_ratio(policy: str, percent: float) -> float:
        host, on_device = (int(trace.unique_blocks * part / 100) for part in (percent, device))
        one = Configuration(policy=policy, host=host, device=on_device, pending=pending)
        return replays.of(one).hit_ratio

    return [[hit_ratio(policy, percent) for policy in POLICIES] for percent in PERCENTS]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pending", type=int, default=0, help="requests whose stores overlap")
    parser.add_argument("--device", type=float, default=0, help="accelerator's cache, in %%")
    chosen = parser.parse_args()
    every: list[tuple[float, float]] = []
    for name in NAMES:
        cells = hit_ratios(name, chosen.pending, chosen.device)
        print(f"{name}: hit ratio with the guard (change by it; above the better classic)")
        for percent, (lru, arc, unguarded, guarded) in zip(PERCENTS, cells, strict=True):
            over = guarded - max(lru, arc)
            print(f"  {percent:4} %  {guarded:.4f} ({guarded - unguarded:+.4f}; {over:+.4f})")
        ratios = [(unguarded / lru, guarded / lru) for lru, _, unguarded, guarded in cells if lru]
        report("  mean x LRU", ratios)
        every += ratios
    change = report("all, mean x LRU", every)
    verdict = "kept" if change >= -MOST_LOSS else "MISSED"
    print(f"loss by the guard <= {MOST_LOSS:.1%}: {verdict}")


def report(name: str, ratios: list[tuple[float, float]]) -> float:
    """Print both means; return how much the guard changes."""
    unguarded, guarded = (statistics.mean(column) for column in zip(*ratios, strict=True))
    change = guarded / unguarded - 1
    print(f"{name}: {unguarded:.4f} without, {guarded:.4f} with ({change:+.2%})", flush=True)
    return change


if __name__ == "__main__":
    main()
