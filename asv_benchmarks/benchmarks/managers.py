"""One call of a manager on a request's blocks: implementation, policy, capacity, length."""

from .common import (
    CAPACITIES,
    IMPLEMENTATIONS,
    MIDDLE,
    REQUEST_LENGTHS,
    block_hashes,
    fill,
    new_manager,
    policy_names,
)

PARAMS = (IMPLEMENTATIONS, policy_names(), CAPACITIES, REQUEST_LENGTHS)
PARAM_NAMES = ("implementation", "policy", "capacity", "request_length")


class FullCache:
    """Calls on a manager whose every slot holds an idle block."""

    params = PARAMS
    param_names = PARAM_NAMES
    timeout = 300

    def setup(self, name: str, policy: str, capacity: int, length: int) -> None:
        """Fill the cache, and choose a request from its middle."""
        self.manager = new_manager(name, policy, capacity)
        resident = block_hashes(0, capacity)
        fill(self.manager, resident)
        middle = capacity // 2
        request = resident[middle : middle + length]
        self.request = request[: self.manager.lookup(request)]

    def time_lookup(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.lookup(self.request)

    def time_touch(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.touch(self.request)

    def time_load(self, name: str, policy: str, capacity: int, length: int) -> None:
        self.manager.prepare_load(self.request)
        self.manager.complete_load(self.request)


class Stores:
    """Stores of blocks that were never seen, each once: the number of calls is fixed."""

    params = PARAMS
    param_names = PARAM_NAMES
    timeout = 300
    number = 8
    repeat = 5
    warmup_time = 0
    rounds = 1

    def setup(self, name: str, policy: str, capacity: int, length: int) -> None:
        """Fill one cache, leave another almost empty, and make new requests for each call.

        Each has stored a request before: what only the first store costs is not measured.
        """
        self.full = new_manager(name, policy, capacity)
        fill(self.full, block_hashes(0, capacity + length))
        self.empty = new_manager(name, policy, max(capacity, (self.number + 1) * length))
        fill(self.empty, block_hashes(0, length))
        fresh = block_hashes(capacity + length, self.number * length)
        self.requests = [fresh[start : start + length] for start in range(0, len(fresh), length)]

    def time_store_with_eviction(self, name: str, policy: str, capacity: int, length: int) -> None:
        request = self.requests.pop()
        output = self.full.prepare_store(request)
        self.full.complete_store(output.block_hashes_to_store)

    def time_store_without_eviction(
        self, name: str, policy: str, capacity: int, length: int
    ) -> None:
        request = self.requests.pop()
        output = self.empty.prepare_store(request)
        self.empty.complete_store(output.block_hashes_to_store)


class Pinned:
    """A store with eviction while half of the blocks, the oldest, are pinned."""

    params = (IMPLEMENTATIONS, policy_names(), [0, MIDDLE // 2])
    param_names = ("implementation", "policy", "pinned")
    number = 8
    repeat = 5
    warmup_time = 0
    rounds = 1

    def setup(self, name: str, policy: str, pinned: int) -> None:
        """Fill a cache and pin its oldest half."""
        self.manager = new_manager(name, policy, MIDDLE)
        resident = block_hashes(0, MIDDLE)
        fill(self.manager, resident)
        self.manager.prepare_load([key for key in resident[:pinned] if key in self.manager])
        fresh = block_hashes(MIDDLE, self.number * 128)
        self.requests = [fresh[start : start + 128] for start in range(0, len(fresh), 128)]

    def time_store(self, name: str, policy: str, pinned: int) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)


class LargeEviction:
    """One store that evicts 4,096 blocks, or half of a smaller cache."""

    params = (IMPLEMENTATIONS, policy_names())
    param_names = ("implementation", "policy")
    number = 1
    repeat = 5
    warmup_time = 0
    rounds = 1

    def setup(self, name: str, policy: str) -> None:
        """Fill a cache."""
        self.manager = new_manager(name, policy, MIDDLE)
        fill(self.manager, block_hashes(0, MIDDLE))
        self.request = block_hashes(MIDDLE, min(4_096, MIDDLE // 2))

    def time_large_eviction(self, name: str, policy: str) -> None:
        self.manager.prepare_store(self.request)
