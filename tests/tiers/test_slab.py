"""The slab tier passes the suite of all tiers, in both implementations, direct and staged."""

from pathlib import Path

import pytest

from kvoffload.testing.tiers import TierConformance
from kvoffload.tiers import FileTier, Namespace, Tier
from kvoffload.tiers.engine.native import Twin

MODES = {
    "direct": {},
    "staged": {"staged": True},
    "staged, two buffers": {"staged": True, "staging_bytes": 0},
    "staged, one thread, stored": {"staged": True, "threads": 1, "ack": "stored"},
}


class TestFileTier(TierConformance):
    @pytest.fixture(autouse=True, params=MODES)
    def _setup(
        self, request: pytest.FixtureRequest, tier_twin: Twin, tmp_path: Path, namespace: Namespace
    ) -> None:
        self.twin, self.path, self.namespace = tier_twin, tmp_path, namespace
        self.options = MODES[request.param]
        self.blocks = 0

    def open_tier(self, num_blocks: int) -> Tier:
        self.blocks = num_blocks
        folders = len(list(self.path.iterdir()))
        self.last = self.path / str(folders)
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return FileTier(
            self.last,
            self.blocks * 4096,
            namespace=self.namespace,
            twin=self.twin,
            **self.options,
        )
