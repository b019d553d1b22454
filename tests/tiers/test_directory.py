"""The shared directory passes the suite of all tiers; and what several processes do to one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvoffload.testing.tiers import PATIENCE_S, TierConformance, run
from kvoffload.tiers import Namespace, Region, Status, Tier
from kvoffload.tiers.remote.directory import DirectoryTier

BLOCK = 4096


class TestDirectoryTier(TierConformance):
    @pytest.fixture(
        autouse=True, params=[{}, {"ack": "stored", "threads": 1}, {"staging_bytes": 0}], ids=str
    )
    def _setup(self, request: pytest.FixtureRequest, tmp_path: Path, namespace: Namespace) -> None:
        self.options, self.path, self.namespace = request.param, tmp_path, namespace
        self.folders = 0

    def open_tier(self, num_blocks: int) -> Tier:
        self.folders += 1
        self.blocks = num_blocks
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return DirectoryTier(
            self.path / str(self.folders),
            self.blocks * BLOCK,
            namespace=self.namespace,
            **self.options,
        )

    def settle(self, tier: Tier) -> None:
        super().settle(tier)
        assert isinstance(tier, DirectoryTier)
        while tier.sweep() is None:  # the tier's own thread sweeps
            pass
        tier.poll()


def test_a_sweep_before_anything_was_stored_makes_nothing(tmp_path: Path) -> None:
    with DirectoryTier(tmp_path / "kv", 2**20, namespace=Namespace("model", 4096)) as tier:
        assert tier.sweep() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("happens", "status"), [(False, Status.FAILED), (True, Status.OK)])
def test_an_answer_of_a_file_server_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool, status: Status
) -> None:
    """A link that was made counts, although the call reports an error; another does not."""
    link = os.link

    def lose(*arguments: Any, **options: Any) -> None:
        if happens:
            link(*arguments, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", lose)
    namespace = Namespace("model", 4096)
    with DirectoryTier(tmp_path, 2**20, namespace=namespace, ack="stored") as tier:
        tier.attach(Region.allocate(1, 4096))
        assert run(tier, tier.put([b"key"], [0], PATIENCE_S)).status.tolist() == [status]
