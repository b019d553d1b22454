"""Print the savings of a disk behind host memory on the traces, by the policies of both.

Each row is a trace with the sizes of host memory, in percent of the trace's unique blocks, and of
the disk, in host memories; then, per pair of policies, the blocks that a request recomputes, if
reading a block from the disk costs 0.2 of computing it, and the blocks written to the disk per
request. A request has its full blocks; its store is offered 16 blocks at a time. Usage::

    python asv_benchmarks/disk.py [--pending N] [--store] [TRACE HOST DISK]...

``--store`` prints, instead, the share of the blocks that a real `TieredStore` over a `MemoryTier`
serves to consecutive requests. Without arguments the traces are those of the
folder that ``KVOFFLOAD_TRACES`` names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ratios import trace_path

from kvoffload import CPUOffloadingManager
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    Result,
    Selection,
    Tier,
    replay,
)
from kvoffload.tiers import MemoryTier, Namespace, Region, TieredStore
from kvoffload.traces import Trace

ROWS = (
    ("mooncake_conversation", 2.0, 10.0),
    ("weka_cc_a", 1.0, 10.0),
    ("weka_cc_a", 2.0, 10.0),
    ("weka_cc_a", 0.5, 50.0),
    ("lmcache_agents_64c", 5.0, 10.0),
)
PAIRS = (("hit-density", "hit-density"), ("lru", "hit-density"), ("lru", "lru"))
FULL_BLOCK_TOKENS = {"mooncake_conversation": 512}  # in the others every block is full
READ_COST = 0.2  # of a block that is computed
STEP_BLOCKS = 16
BLOCK_BYTES = 16  # of a store whose contents do not matter
PATIENCE_S = 60.0


def decoded(name: str) -> DecodedTrace:
    """Read a trace, without the blocks that prompts fill in part."""
    trace = Trace(trace_path(name))
    tokens = FULL_BLOCK_TOKENS.get(name)
    return DecodedTrace.of(trace if tokens is None else Selection(trace, full_block_tokens=tokens))


def recomputed(trace: DecodedTrace, result: Result) -> float:
    """Return the blocks that a request recomputes, including the cost of reads from the disk."""
    missed = result.asked - result.hits
    return (missed + READ_COST * result.tier_hits) / trace.num_requests


def simulated(
    trace: DecodedTrace, host: str, disk: str, capacity: int, disk_capacity: int, pending: int
) -> str:
    """Return a cell of the table."""
    result = replay(
        trace,
        Configuration(
            policy=host,
            host=capacity,
            tier=Tier("private", disk_capacity, disk),
            groups=GroupChunks.of_blocks(1, step_tokens=STEP_BLOCKS),
            pending=pending,
        ),
    )
    written = result.tier_stored / trace.num_requests
    return f"{recomputed(trace, result):6.2f} ({written:5.2f} written)"


def served(
    trace: DecodedTrace, keys: list[bytes], host: str, disk: str, capacity: int, disk_capacity: int
) -> float:
    """Return the share of the blocks that a store of tiers serves to consecutive requests."""
    namespace = Namespace("disk", BLOCK_BYTES)
    manager = CPUOffloadingManager(1, capacity, host)
    tier = MemoryTier(disk_capacity * BLOCK_BYTES, disk, namespace=namespace)
    store = TieredStore(Region.allocate(capacity, BLOCK_BYTES), manager, [tier])
    found = 0
    for row in trace.rows():
        request = [keys[number] for number in row]
        store.touch(request)
        job = store.fetch(request, PATIENCE_S)
        ended = store.step()
        while not ended:
            store.wait(PATIENCE_S)
            ended = store.step()
        if ended[0].job != job:
            raise RuntimeError("a fetch ended that was not asked for")
        found += ended[0].num_blocks
        store.complete_load(request[: ended[0].num_blocks])
        output = store.prepare_store(request)
        if output is not None:
            store.complete_store(output.block_hashes_to_store)
        while store.busy:
            store.wait(PATIENCE_S)
            store.step()
    store.close()
    return found / trace.num_blocks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pending", type=int, default=0, help="stores that are in flight")
    parser.add_argument("--store", action="store_true", help="serve by a TieredStore")
    parser.add_argument("rows", nargs="*", metavar="TRACE HOST DISK")
    chosen = parser.parse_args()
    given = chosen.rows
    if len(given) % 3:
        parser.error(f"rows must be TRACE HOST DISK, got {len(given)} words")
    names, hosts, disks = given[::3], map(float, given[1::3]), map(float, given[2::3])
    rows = list(zip(names, hosts, disks, strict=True))
    for name, percent, times in rows or ROWS:
        trace = decoded(name)
        capacity = int(trace.unique_blocks * percent / 100)
        disk_capacity = int(capacity * times)
        print(f"{Path(name).name}, {percent:g} % and {times:g} times as much disk")
        for host, disk in PAIRS:
            sizes = capacity, disk_capacity
            if chosen.store:
                cell = f"{served(trace, trace.keys(), host, disk, *sizes):.3f} served"
            else:
                cell = simulated(trace, host, disk, *sizes, chosen.pending)
            print(f"  {host + ', ' + disk:26} {cell}", flush=True)


if __name__ == "__main__":
    main()
