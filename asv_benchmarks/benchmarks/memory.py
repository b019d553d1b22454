"""Memory per block, with and without policies' records of evicted blocks, and of a replay."""

from __future__ import annotations

import os
from pathlib import Path

from .common import LENGTH, POLICIES, block_hashes, fill, new_manager, new_replay, public

BLOCKS = 100_000


def resident_bytes() -> int:
    """Return the memory that this process holds now; Linux only."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Growth of the process while blocks are stored; the key objects exist before."""

    params = POLICIES
    param_names = ("policy",)

    def setup(self, policy: str) -> None:
        """Make the keys, and warm the allocators up."""
        self.hashes = block_hashes(0, BLOCKS)
        fill(new_manager(policy, 1_000), self.hashes[:1_000])

    def track_bytes_per_block(self, policy: str) -> float:
        before = resident_bytes()
        manager = new_manager(policy, BLOCKS)
        fill(manager, self.hashes)
        return (resident_bytes() - before) / len(manager)

    def track_bytes_per_block_with_evicted(self, policy: str) -> float:
        before = resident_bytes()
        manager = new_manager(policy, BLOCKS)
        for start in range(0, 3 * BLOCKS, LENGTH):  # keys of evicted blocks do not stay
            fill(manager, block_hashes(start, LENGTH))
        return (resident_bytes() - before) / len(manager)


Memory.track_bytes_per_block.unit = "bytes"  # type: ignore[attr-defined]
Memory.track_bytes_per_block_with_evicted.unit = "bytes"  # type: ignore[attr-defined]


class Peak:
    """Peak memory of the process, in a replay of 1,000 generated requests."""

    params = POLICIES
    param_names = ("policy",)

    def peakmem_replay(self, policy: str) -> None:
        workload = public("kvoffload.traces", "Workload")
        new_replay(policy, 10_000)(workload(1_000))
