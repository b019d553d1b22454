"""A watch beside a manager: its cost per request, and its report."""

from __future__ import annotations

import statistics
import time
from typing import Any

from .common import CAPACITY, LENGTH, FreshRequests, block_hashes, fill, new_manager, public, serve


class Watching(FreshRequests):
    """Requests that evict, with a watch of the manager and without."""

    params = [False, True]
    param_names = ("watch",)
    manager: Any = None

    def setup(self, watched: bool) -> None:
        """Fill the cache once; make new requests for each sample."""
        if self.manager is None:
            create = public("kvoffload.watch", "Watch")
            options = {"watch": create()} if watched else {}
            self.manager = new_manager("lru", CAPACITY, **options)
            fill(self.manager, block_hashes(0, CAPACITY + LENGTH))
        self.renew()

    def time_request(self, watched: bool) -> None:
        serve(self.manager, self.requests.pop())


class Longest:
    """The longest of many watched lookups: a drain is spread over them."""

    unit = "microseconds"

    def track_longest_lookup(self) -> float:
        """Return the median of the longest of 2,000 lookups in each of 5 rounds."""
        manager = new_manager("lru", CAPACITY, watch=public("kvoffload.watch", "Watch")())
        blocks = block_hashes(0, CAPACITY)
        fill(manager, blocks)
        longest = []
        for _ in range(5):
            spent = []
            for number in range(2_000):
                start = number * 7 % (CAPACITY // LENGTH) * LENGTH
                request = manager.begin(blocks[start : start + LENGTH])
                begun = time.perf_counter_ns()
                request.lookup()
                spent.append(time.perf_counter_ns() - begun)
                request.finish()
            longest.append(max(spent) / 1000)
        return statistics.median(longest)


class Report:
    """The report of a watch, with the curve of hits over memory."""

    watch: Any = None

    def setup(self) -> None:
        """Let a watch observe 500 requests."""
        if self.watch is None:
            self.watch = public("kvoffload.watch", "Watch")()
            manager = new_manager("lru", 10_000, watch=self.watch)
            blocks = block_hashes(0, 200 * LENGTH)
            for number in range(500):
                start = number * 7 % 200 * LENGTH
                serve(manager, blocks[start : start + LENGTH])

    def time_report(self) -> None:
        self.watch.report()
