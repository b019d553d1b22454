"""One call, or one request, of a manager of 100,000 blocks; 128 blocks each, per policy."""

from __future__ import annotations

from typing import Any

from .common import (
    CAPACITY,
    LENGTH,
    POLICIES,
    FreshRequests,
    block_hashes,
    fill,
    new_manager,
    public,
    serve,
    serve_by_calls,
)


class Full:
    """Calls that find their blocks in a full cache, and leave it as it is."""

    params = POLICIES
    param_names = ("policy",)
    number = 100
    repeat = 10
    manager: Any = None

    def setup(self, policy: str) -> None:
        """Fill the cache once, and choose a request from its middle."""
        if self.manager is None:
            self.manager = new_manager(policy, CAPACITY)
            resident = block_hashes(0, CAPACITY)
            fill(self.manager, resident)
            self.hits = resident[CAPACITY // 2 : CAPACITY // 2 + LENGTH]
            self.misses = block_hashes(CAPACITY, LENGTH)

    def time_lookup(self, policy: str) -> None:
        self.manager.lookup(self.hits)

    def time_lookup_miss(self, policy: str) -> None:
        self.manager.lookup(self.misses)

    def time_touch(self, policy: str) -> None:
        self.manager.touch(self.hits)

    def time_load(self, policy: str) -> None:
        self.manager.prepare_load(self.hits)
        self.manager.complete_load(self.hits)

    def time_request_hit(self, policy: str) -> None:
        serve(self.manager, self.hits)

    def time_request_hit_by_calls(self, policy: str) -> None:
        serve_by_calls(self.manager, self.hits)

    def time_extend(self, policy: str) -> None:
        request = self.manager.begin(self.hits[: LENGTH // 2])
        request.extend(self.hits[LENGTH // 2 :])
        request.finish()

    def time_release(self, policy: str) -> None:
        self.manager.release(self.hits)
        self.manager.touch(self.hits)  # takes them back


class StoreFree(FreshRequests):
    """Stores into free slots."""

    params = POLICIES
    param_names = ("policy",)

    def setup(self, policy: str) -> None:
        """Make an almost empty cache: what only the first store costs is not measured."""
        self.manager = new_manager(policy, CAPACITY)
        fill(self.manager, block_hashes(0, LENGTH))
        self.renew()

    def time_store(self, policy: str) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)


class StoreEvicting(FreshRequests):
    """Stores and requests that evict as many blocks as they store."""

    params = POLICIES
    param_names = ("policy",)
    manager: Any = None

    def setup(self, policy: str) -> None:
        """Fill the cache once; make new requests for each sample."""
        if self.manager is None:
            self.manager = new_manager(policy, CAPACITY)
            fill(self.manager, block_hashes(0, CAPACITY + LENGTH))
        self.renew()

    def time_store(self, policy: str) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)

    def time_request_miss(self, policy: str) -> None:
        serve(self.manager, self.requests.pop())


class StoreWithEvents(FreshRequests):
    """Stores that evict, and the events of stored and removed blocks taken after each."""

    manager: Any = None

    def setup(self) -> None:
        """Fill the cache once; make new requests for each sample."""
        if self.manager is None:
            self.manager = new_manager("lru", CAPACITY, enable_events=True)
            fill(self.manager, block_hashes(0, CAPACITY + LENGTH))
        self.renew()

    def time_store(self) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)
        list(self.manager.take_events())


class StoreBesidePinned(FreshRequests):
    """Stores that evict while half of the blocks, the oldest, are pinned."""

    params = POLICIES
    param_names = ("policy",)
    number = 4
    repeat = 4

    def setup(self, policy: str) -> None:
        """Fill a cache and pin its oldest half."""
        self.manager = new_manager(policy, CAPACITY)
        resident = block_hashes(0, CAPACITY)
        fill(self.manager, resident)
        self.manager.prepare_load([key for key in resident[: CAPACITY // 2] if key in self.manager])
        self.renew()

    def time_store(self, policy: str) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)


class FirstStorePastPinned(FreshRequests):
    """The first store that evicts after nine tenths of the blocks, the oldest, were pinned."""

    params = POLICIES
    param_names = ("policy",)
    number = 1
    repeat = 4

    def setup(self, policy: str) -> None:
        """Fill a cache and pin its oldest blocks."""
        self.manager = new_manager(policy, CAPACITY)
        resident = block_hashes(0, CAPACITY)
        fill(self.manager, resident)
        oldest = resident[: CAPACITY * 9 // 10]
        self.manager.prepare_load([key for key in oldest if key in self.manager])
        self.renew()

    def time_store(self, policy: str) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)


class Refused(FreshRequests):
    """Stores that are refused, since every block is pinned."""

    params = POLICIES
    param_names = ("policy",)
    manager: Any = None

    def setup(self, policy: str) -> None:
        """Fill the cache once and pin it; make new requests for each sample."""
        if self.manager is None:
            self.manager = new_manager(policy, CAPACITY)
            resident = block_hashes(0, CAPACITY)
            fill(self.manager, resident)
            self.manager.prepare_load([key for key in resident if key in self.manager])
        self.renew()

    def time_store(self, policy: str) -> None:
        self.manager.prepare_store(self.requests.pop())


class Reset:
    """The reset of a full cache."""

    params = POLICIES
    param_names = ("policy",)
    number = 1
    repeat = 4
    warmup_time = 0

    def setup(self, policy: str) -> None:
        """Fill the cache."""
        self.manager = new_manager(policy, CAPACITY)
        fill(self.manager, block_hashes(0, CAPACITY))

    def time_reset(self, policy: str) -> None:
        self.manager.reset_cache()


class LongPrompt(FreshRequests):
    """A prompt of 100,000 blocks: once new, then in the cache."""

    params = POLICIES
    param_names = ("policy",)
    number = 1
    repeat = 4

    def setup(self, policy: str) -> None:
        """Fill a cache of twice the blocks; make a new request for each sample."""
        self.manager = new_manager(policy, 2 * CAPACITY)
        fill(self.manager, block_hashes(0, 2 * CAPACITY))
        self.renew(CAPACITY)

    def time_twice(self, policy: str) -> None:
        request = self.requests.pop()
        serve(self.manager, request)
        serve(self.manager, request)


class LargeEviction(FreshRequests):
    """One store that evicts 4,096 blocks."""

    params = POLICIES
    param_names = ("policy",)
    number = 1
    manager: Any = None

    def setup(self, policy: str) -> None:
        """Fill the cache once; make a new request for each sample."""
        if self.manager is None:
            self.manager = new_manager(policy, CAPACITY)
            fill(self.manager, block_hashes(0, CAPACITY))
        self.renew(4_096)

    def time_store(self, policy: str) -> None:
        output = self.manager.prepare_store(self.requests.pop())
        self.manager.complete_store(output.block_hashes_to_store)


class Hints(FreshRequests):
    """Requests that evict and say when their session returns, under hit density."""

    params = [False, True]
    param_names = ("hints",)
    manager: Any = None

    def setup(self, hints: bool) -> None:
        """Fill the cache once; make new requests for each sample."""
        create = public("kvoffload", "Hints")
        self.options = {"hints": create(expect_s=60.0, source="app")} if hints else {}
        if self.manager is None:
            self.manager = new_manager("hit-density", CAPACITY)
            fill(self.manager, block_hashes(0, CAPACITY + LENGTH))
        self.renew()

    def time_request(self, hints: bool) -> None:
        serve(self.manager, self.requests.pop(), **self.options)


CYCLE = """
os.environ["KVOFFLOAD_PURE_PYTHON"] = "1"
import kvoffload
assert kvoffload.IMPLEMENTATION == "python"
manager = kvoffload.CPUOffloadingManager(16, 10_000, "lru")
fresh = itertools.count()
def store():
    number = next(fresh)
    request = [b"%032d" % block for block in range(128 * number, 128 * number + 128)]
    output = manager.prepare_store(request)
    manager.complete_store(output.block_hashes_to_store)
    manager.lookup(request)
for _ in range(80):
    store()
"""


class Python:
    """A store that evicts and a lookup, in the Python twin, in a process of its own."""

    number = 20
    repeat = 3

    def timeraw_store_and_lookup(self) -> tuple[str, str]:
        return "store()", f"import itertools, os\n{CYCLE}"
