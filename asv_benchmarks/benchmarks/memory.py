"""What a block costs in resident memory."""

import os
from pathlib import Path

from .common import IMPLEMENTATIONS, LARGEST, block_hashes, fill, new_manager, policy_names

BLOCKS = min(200_000, LARGEST)


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Growth while BLOCKS blocks are stored; the key objects exist before."""

    params = (IMPLEMENTATIONS, policy_names())
    param_names = ("implementation", "policy")
    timeout = 300

    def setup(self, name: str, policy: str) -> None:
        """Make the keys, and warm the allocators up."""
        self.hashes = block_hashes(0, BLOCKS)
        fill(new_manager(name, policy, 1_000), self.hashes[:1_000])

    def peakmem_fill(self, name: str, policy: str) -> None:
        fill(new_manager(name, policy, BLOCKS), self.hashes)

    def track_bytes_a_block(self, name: str, policy: str) -> float:
        before = resident_bytes()
        manager = new_manager(name, policy, BLOCKS)
        fill(manager, self.hashes, 128)
        return (resident_bytes() - before) / len(manager)


Memory.track_bytes_a_block.unit = "bytes"  # type: ignore[attr-defined]
