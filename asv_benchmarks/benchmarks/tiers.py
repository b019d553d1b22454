"""Tiers below host memory: puts and gets of 16 blocks of 64 KiB, from the call to the job's end."""

from __future__ import annotations

import itertools
import tempfile

from .common import block_hashes, public

BLOCK_BYTES = 65_536
BLOCKS = 16


class Tier:
    """A tier of 256 blocks."""

    params = ["memory", "slab", "dir"]
    param_names = ("tier",)
    number = 4
    repeat = 5
    warmup_time = 0

    def setup(self, tier: str) -> None:
        """Open the tier, and fill it."""
        names = ("Namespace", "Region", "open_tier")
        namespace, region, open_tier = public("kvoffload.tiers", *names)
        self.folder = tempfile.TemporaryDirectory()
        where = "" if tier == "memory" else f"{self.folder.name}/kv"
        size = 256 * BLOCK_BYTES
        url = f"{tier}:{where}?capacity={size}"
        self.tier = open_tier(url, namespace(model="benchmark", block_bytes=BLOCK_BYTES))
        self.region = region.allocate(BLOCKS, BLOCK_BYTES)
        self.tier.attach(self.region)
        self.ids = list(range(BLOCKS))
        self.numbers = itertools.count(step=BLOCKS)
        for _ in range(256 // BLOCKS):
            self.last = block_hashes(next(self.numbers), BLOCKS)
            self.finish(self.tier.put(self.last, self.ids))
        self.batches = [block_hashes(next(self.numbers), BLOCKS) for _ in range(self.number)]

    def teardown(self, tier: str) -> None:
        """Close the tier."""
        if hasattr(self, "tier"):
            self.tier.close()
            self.folder.cleanup()

    def finish(self, job: int) -> None:
        """Wait for a job."""
        if not self.tier.wait([job], 30):
            raise TimeoutError
        self.tier.poll()

    def time_put(self, tier: str) -> None:
        self.finish(self.tier.put(self.batches.pop(), self.ids))

    def time_get(self, tier: str) -> None:
        self.finish(self.tier.get(self.last, self.ids))
