"""Resident memory per block, and per remembered block that has left."""

import os
from pathlib import Path
from typing import Any

from .common import IMPLEMENTATIONS, LARGEST, block_hashes, fill, new_manager, policy_names

BLOCKS = min(200_000, LARGEST)
REQUEST = 128


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


class Ghosts:
    """Growth while BLOCKS blocks are stored and as many ghosts are made as a policy remembers.

    The keys of the ghosts are made as they are needed: no key object stays.
    """

    params = (["compiled"], policy_names())
    param_names = ("implementation", "policy")
    timeout = 300

    def setup(self, name: str, policy: str) -> None:
        """Warm the allocators up."""
        self.serve(new_manager(name, policy, 1_000), 1_000)

    def serve(self, manager: Any, blocks: int) -> None:
        """Fill the cache, push it out twice, and ask for what is not stored, once and again."""
        self.store(manager, 0, blocks)
        self.store(manager, blocks, 2 * blocks)
        for start in range(3 * blocks, 6 * blocks, REQUEST):
            request = block_hashes(start, REQUEST)
            manager.touch(request)
            manager.touch(block_hashes(0, 1))
            manager.touch(request)
        for start in range(6 * blocks, 12 * blocks, REQUEST):
            manager.touch(block_hashes(start, REQUEST))

    def store(self, manager: Any, first: int, blocks: int) -> None:
        for start in range(first, first + blocks, REQUEST):
            request = block_hashes(start, REQUEST)
            manager.touch(request)
            output = manager.prepare_store(request)
            manager.touch(request)
            manager.complete_store(output.block_hashes_to_store)

    def track_bytes_a_block_with_ghosts(self, name: str, policy: str) -> float:
        before = resident_bytes()
        manager = new_manager(name, policy, BLOCKS)
        self.serve(manager, BLOCKS)
        return (resident_bytes() - before) / len(manager)


Ghosts.track_bytes_a_block_with_ghosts.unit = "bytes"  # type: ignore[attr-defined]
