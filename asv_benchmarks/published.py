"""Print published figures of public traces, and ours beside them.

Each line has a figure as its source gives it and the same from a replay here. Nothing is fitted:
where a source does not say how it counts, the figures may differ by more than their rounding::

    python asv_benchmarks/published.py --mooncake FOLDER --cloudphysics FILE --sessions FILE

The options name what is at hand: the folder ``FAST25-release/traces`` of kvcache-ai/Mooncake, the
file ``data/cloudPhysicsIO.oracleGeneral.bin`` of 1a1a11a/libCacheSim, and sessions of
callanjfox/kv-cache-tester, one per line or a folder of them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvoffload.policies import registry
from kvoffload.replay import Configuration, DecodedTrace, GroupChunks, replay
from kvoffload.traces import Request, Trace

BLOCK_TOKENS = 512
LOCAL_TOKENS = 3_000_000  # of the cache of one node

# Qin et al., "Mooncake", FAST 2025: table 2, and the share of the greatest hit rate that a cache of
# `LOCAL_TOKENS` has in figure 9.
MOONCAKE = {
    "conversation": (12_031, 12_035, 343, 40, 41),
    "toolagent": (23_608, 8_596, 182, 59, 75),
    "synthetic": (3_993, 15_325, 149, 66, 46),
}
# The LRU curve that test/test_profilerLRU.c of libCacheSim expects: miss ratio by cached objects.
LRU_CURVE = {1: 0.976421, 2: 0.970607, 3: 0.965681, 4: 0.959024, 5: 0.956934, 20: 0.927015}
SHARES = (0.001, 0.01, 0.1, 0.2)
# README of kv-cache-tester: hits within each of its 739 conversations, percent.
SESSIONS = {"min": 61, "P25": 92, "median": 96, "P75": 97, "max": 100, "mean": 93}


def show(source: str, what: str, theirs: str, ours: str) -> None:
    """Print a line."""
    print(f"{source:22} {what:44} {theirs:>10} {ours:>10}")


def of_mooncake(name: str, path: Path) -> None:
    """Print the figures of one of Mooncake's traces."""
    requests, length, answer, ratio, local = MOONCAKE[name]
    rows = list(Trace(path))
    trace = DecodedTrace.of(rows)
    groups = GroupChunks.of_blocks(BLOCK_TOKENS)

    def hits(policy: str, tokens: int) -> float:
        host = tokens // BLOCK_TOKENS
        return replay(trace, Configuration(policy=policy, host=host, groups=groups)).host_tokens

    most = hits("infinite", BLOCK_TOKENS)
    tokens = sum(row.input_length for row in rows)
    answers = sum(row.output_length for row in rows)
    source = f"Mooncake, {name}"
    show(source, "requests", f"{requests:,}", f"{len(rows):,}")
    show(source, "tokens per prompt", f"{length:,}", f"{tokens / len(rows):,.0f}")
    show(source, "tokens per answer", f"{answer:,}", f"{answers / len(rows):,.0f}")
    show(source, "hits without a bound, of tokens", f"{ratio} %", f"{100 * most / tokens:.1f} %")
    share = 100 * hits("lru", LOCAL_TOKENS) / most
    show(source, "of these, LRU with 3 million tokens", f"{local} %", f"{share:.1f} %")


def of_objects(path: Path) -> None:
    """Print the LRU curve of cloudPhysicsIO, and what all policies miss, the least first."""
    trace = DecodedTrace.of(Trace(path))

    def misses(policy: str, host: int) -> float:
        return 1 - replay(trace, Configuration(policy=policy, host=host)).hit_ratio

    for objects, theirs in LRU_CURVE.items():
        what = f"misses of LRU with {objects} objects"
        show("cloudPhysicsIO", what, f"{theirs:.6f}", f"{misses('lru', objects):.6f}")
    for share in SHARES:
        host = int(share * trace.unique_blocks)
        found = sorted((misses(policy, host), policy) for policy in registry.names())
        every = ", ".join(f"{policy} {ratio:.3f}" for ratio, policy in found)
        print(f"{'cloudPhysicsIO':22} misses with {share:.1%} of the objects: {every}")


def sessions_of(path: Path) -> Iterator[list[Request]]:
    """Yield the requests of each conversation; those of its agents belong to it."""
    found = defaultdict(list)
    for row in Trace(path):
        found[(row.session or "").partition("/")[0]].append(row)
    yield from found.values()


def of_sessions(path: Path) -> None:
    """Print what share of the blocks of a conversation was in an earlier request of it."""
    ratios = []
    for rows in sessions_of(path):
        trace = DecodedTrace.of(rows)
        ratios.append(100 * replay(trace, Configuration(policy="infinite", host=1)).hit_ratio)
    quartiles = np.percentile(ratios, [25, 50, 75])
    ours = (min(ratios), *quartiles, max(ratios), sum(ratios) / len(ratios))
    for (name, theirs), value in zip(SESSIONS.items(), ours, strict=True):
        what = f"hits per conversation, {name} (here {len(ratios)} of 739)"
        show("kv-cache-tester", what, f"{theirs} %", f"{value:.1f} %")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mooncake", type=Path, metavar="FOLDER")
    parser.add_argument("--cloudphysics", type=Path, metavar="FILE")
    parser.add_argument("--sessions", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.mooncake is given.cloudphysics is given.sessions is None:
        parser.error("name at least one trace")
    show("source", "figure", "theirs", "ours")
    if given.mooncake is not None:
        for name in MOONCAKE:
            path = given.mooncake / f"{name}_trace.jsonl"
            if path.exists():
                of_mooncake(name, path)
    if given.cloudphysics is not None:
        of_objects(given.cloudphysics)
    if given.sessions is not None:
        of_sessions(given.sessions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
