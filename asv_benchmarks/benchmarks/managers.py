"""One call of a manager on a request's blocks, in each implementation, policy and capacity."""

import hashlib
import importlib
from typing import Any


def block_hashes(first: int, count: int) -> list[bytes]:
    """Make `count` keys of 36 bytes: a digest and a group suffix, as an engine makes them."""
    return [
        hashlib.sha256(number.to_bytes(8, "big")).digest() + b"\0\0\0\0"
        for number in range(first, first + count)
    ]


def implementation(name: str) -> Any:
    """Give the module that holds one implementation's classes; asv skips what a commit lacks."""
    try:
        return importlib.import_module(f"kvoffload._{name}")
    except ImportError as cause:
        raise NotImplementedError(f"not built: {name}") from cause


class FullCache:
    """Calls on a manager whose every slot holds an idle block."""

    params = (["python", "compiled"], ["lru", "arc"], [10_000, 100_000], [128])
    param_names = ("implementation", "policy", "capacity", "request_length")

    def setup(self, name: str, policy: str, capacity: int, length: int) -> None:
        """Fill the cache, and choose a request from its middle."""
        self.manager = implementation(name).CPUOffloadingManager(16, capacity, policy)
        resident = block_hashes(0, capacity)
        for start in range(0, capacity, 1_000):
            output = self.manager.prepare_store(resident[start : start + 1_000])
            self.manager.complete_store(output.block_hashes_to_store)
        middle = capacity // 2
        self.request = resident[middle : middle + length]
        self.fresh = block_hashes(capacity, 2 * capacity)
        self.offset = 0

    def time_lookup(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.lookup(self.request)

    def time_touch(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.touch(self.request)

    def time_load(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.prepare_load(self.request)
        self.manager.complete_load(self.request)

    def time_store_with_eviction(self, name: str, policy: str, capacity: int, length: int) -> None:
        # Walks over twice as many blocks as there are slots, so that every block is evicted before
        # it is stored again.
        blocks = self.fresh[self.offset : self.offset + length]
        self.offset = (self.offset + length) % (len(self.fresh) - length)
        output = self.manager.prepare_store(blocks)
        self.manager.complete_store(output.block_hashes_to_store)
