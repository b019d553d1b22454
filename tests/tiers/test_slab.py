"""The slab tier passes the suite of all tiers, direct and staged."""

from pathlib import Path

import numpy as np
import pytest

from kvoffload.testing.tiers import TierConformance, run
from kvoffload.tiers import FileTier, Namespace, Region, State, Status, Tier
from tests.tiers.inside import settle

MODES = {
    "direct": {},
    "staged": {"staged": True},
    "staged, two buffers": {"staged": True, "staging_bytes": 0},
    "staged, one thread, stored": {"staged": True, "threads": 1, "ack": "stored"},
}


class TestFileTier(TierConformance):
    @pytest.fixture(autouse=True, params=MODES)
    def _setup(self, request: pytest.FixtureRequest, tmp_path: Path, namespace: Namespace) -> None:
        self.path, self.namespace = tmp_path, namespace
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
            **self.options,
        )


@pytest.mark.parametrize("options", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("block_bytes", [8192, 5000])
def test_windows_that_overlap(block_bytes: int, options: dict, tmp_path: Path) -> None:
    """Blocks of one job may overlap where it only reads them; others stay apart."""
    memory = Region.allocate(16, 4096)
    memory.array[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    region = Region.windows(memory.array, block_bytes, 4096)
    before = [region.read(block) for block in range(6)]
    namespace = Namespace("windows", block_bytes)
    options = {**options, "ack": "stored"}
    with FileTier(tmp_path, "1MiB", namespace=namespace, **options) as tier:
        tier.attach(region)
        keys = [bytes([block]) for block in range(6)]
        assert tier.wait([tier.put(keys, range(6))], 10)
        assert tier.poll()[0].status.tolist() == [Status.OK] * 6
        assert tier.wait([tier.get(keys[:5], [6, 8, 10, 12, 14])], 10)
        done = [done for done in tier.poll() if done.op == "get"]
        assert done[0].status.tolist() == [Status.OK] * 5
        assert [region.read(block) for block in (6, 8, 10, 12, 14)] == before[:5]


def test_new_blocks_take_the_slots_that_a_restart_left_free(tmp_path: Path) -> None:
    """And none of a restored block, whatever the slots that had blocks before."""
    namespace, keys = Namespace("slots", 4096), [bytes([number]) for number in range(8)]
    region = Region.allocate(8, 4096)
    for number in range(8):
        region.write(number, bytes([number]) * 4096)
    before = region.array.copy()
    with FileTier(tmp_path, 8 * 4096, namespace=namespace) as tier:
        tier.attach(region)
        assert run(tier, tier.put(keys, range(8))).status.tolist() == [Status.OK] * 8
        tier.discard(keys[:5])
    with FileTier(tmp_path, 8 * 4096, namespace=namespace, ack="stored") as tier:
        assert tier.num_restored == 3
        tier.attach(region)
        assert run(tier, tier.put(keys[:5], range(5))).status.tolist() == [Status.OK] * 5
        region.array[:] = 0
        assert run(tier, tier.get(keys, range(8))).status.tolist() == [Status.OK] * 8
    assert (region.array == before).all()


@pytest.mark.parametrize("options", MODES.values(), ids=list(MODES))
def test_what_is_discarded_while_it_is_stored_is_gone_after_a_restart(
    options: dict, tmp_path: Path, namespace: Namespace
) -> None:
    """Also if a `forget` came before the end of the put, and the generation comes back."""
    with FileTier(tmp_path, 8 * 4096, namespace=namespace, **options) as tier:
        tier.attach(Region.allocate(8, 4096))
        job = tier.put([b"gone", b"kept"], [0, 1])
        tier.discard([b"gone"])
        for generation in ("two", "three", ""):
            assert tier.forget(generation)
        run(tier, job)
        settle(tier)
    with FileTier(tmp_path, 8 * 4096, namespace=namespace) as tier:
        assert tier.lookup([b"gone", b"kept"]).tolist() == [State.MISS, State.HIT]
