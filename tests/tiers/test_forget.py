"""A slab stays forgotten: through failing headers, frozen disks, kills and restarts."""

import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.tiers import FileTier, Region, State, Status, TierInUseError
from kvoffload.tiers.engine.native import Twin
from kvoffload.tiers.epoch import new_epoch
from kvoffload.tiers.local.slab import find_slabs, verify_slab
from kvoffload.tiers.local.slab.layout import Header
from tests.tiers.inside import files_of

from .attack import (
    NAMESPACE,
    Universe,
    _run,
    fuse_mounted,
    make_image,
    mounted,
    need,
    open_slab,
    start,
)
from .servers import stop

pytestmark = pytest.mark.attack

NUM_SLOTS = 16


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `forget` wait for a disk that hangs less than it does."""
    monkeypatch.setattr("kvoffload.tiers.local.slab.tier.FORGET_S", 0.2)


def header_of(folder: Path) -> Header:
    with (folder / "slots.tbl").open("rb") as file:
        header = Header.unpack(file.read(4096))
    assert header is not None
    return header


def filled(path: Path, universe: Universe, twin: Twin) -> tuple[FileTier, Region]:
    """Return a slab with the first eight blocks, and its region."""
    tier, region = open_slab(path, NUM_SLOTS, twin=twin)
    assert not universe.put(tier, region, universe.keys[:8]).any()
    return tier, region


def found_after(path: Path, universe: Universe, twin: Twin) -> list[int]:
    """Open a slab again; return the numbers of the blocks that it serves."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            tier, region = open_slab(path, NUM_SLOTS, twin=twin)
            break
        except TierInUseError:  # who was killed holds the lock until the disk lets go
            assert time.monotonic() < until
            time.sleep(0.02)
    found = universe.check(tier, region)
    tier.close()
    assert not (tier.folder / "forgetting").exists()
    return [i for i, key in enumerate(universe.keys) if found[key] == Status.OK]


def wait_confirmed(tier: FileTier) -> None:
    until = time.monotonic() + PATIENCE_S
    while not tier.health().forgotten:
        assert time.monotonic() < until
        time.sleep(0.01)


# -- a header that cannot be written ---------------------------------------------------------------


@contextlib.contextmanager
def no_writes() -> Iterator[None]:
    """Let no file be written to at all: the kernel's own error, for this process alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("end", "expected"), [("kill", []), ("close", []), ("heal", range(8, 16))])
def test_a_header_that_fails(
    tmp_path: Path, tier_twin: Twin, end: str, expected: list[int]
) -> None:
    """Tried until it is written, by itself; until then the marker keeps what was forgotten away."""
    universe = Universe(16)

    def work() -> None:
        logging.raiseExceptions = False  # what pytest captures is a file too
        tier, region = filled(tmp_path, universe, tier_twin)
        with no_writes():
            assert tier.forget() is False
            assert not tier.health().forgotten
            assert not tier.health().ok
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif end == "close":
                assert tier.close() is True
                assert not tier.health().forgotten
                return
        wait_confirmed(tier)
        assert not universe.put(tier, region, universe.keys[8:]).any()
        assert tier.close()

    _, status = os.waitpid(start(work), 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if end == "kill" else 0)
    (folder,) = tmp_path.iterdir()
    assert (folder / "forgetting").exists() == (end != "heal")
    assert found_after(tmp_path, universe, tier_twin) == list(expected)


STEPS = ("open", "pwrite", "fsync", "unlink")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_step(tmp_path: Path, tier_twin: Twin, step: str, when: str) -> None:
    """Before the first step nothing has happened; from then on nothing comes back."""
    universe = Universe(NUM_SLOTS)

    def work() -> None:
        tier, _ = filled(tmp_path, universe, tier_twin)
        call = getattr(os, step)

        def killed(*arguments, **options):
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            call(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, step, killed)
        tier.forget()

    child = start(work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    expected = list(range(8)) if (step, when) == ("open", "before") else []
    assert found_after(tmp_path, universe, tier_twin) == expected


def test_a_slab_with_a_marker_opens_empty(tmp_path: Path, tier_twin: Twin) -> None:
    universe = Universe(NUM_SLOTS)
    tier, _ = filled(tmp_path, universe, tier_twin)
    tier.close()
    before = header_of(tier.folder)
    (tier.folder / "forgetting").touch()
    (looked,) = find_slabs(tmp_path)
    assert (looked.num_blocks, looked.num_stale) == (0, 8)
    assert verify_slab(tier.folder).sound == 0
    assert found_after(tmp_path, universe, tier_twin) == []
    assert header_of(tier.folder).epoch > before.epoch
    tier, _ = filled(tmp_path, universe, tier_twin)
    tier.close()
    assert found_after(tmp_path, universe, tier_twin) == list(range(8)), "warm again"


def test_epochs_rise(tmp_path: Path, tier_twin: Twin) -> None:
    """A restart and each `forget` goes above what is on the disk, wherever its clock stood."""
    universe = Universe(NUM_SLOTS)
    tier, _ = filled(tmp_path, universe, tier_twin)
    ahead = new_epoch() + (10**10 << 20)
    files_of(tier).write_table(0, files_of(tier).write_header(ahead))
    tier.close()
    tier, _ = open_slab(tmp_path, NUM_SLOTS, twin=tier_twin)
    seen = [ahead]
    for _ in range(5):
        assert tier.forget()
        seen.append(header_of(tier.folder).epoch)
    assert seen == sorted(set(seen))
    tier.close()


# -- a disk that hangs -----------------------------------------------------------------------------


@contextlib.contextmanager
def frozen(folder: Path):
    _run("fsfreeze", "--freeze", folder)
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", folder)


@pytest.fixture
def disk(tmp_path: Path):
    need("mkfs.ext4", "fsfreeze")
    make_image(tmp_path / "disk.img", 16)
    with mounted(tmp_path / "disk.img", tmp_path / "disk") as folder:
        yield folder


def test_forgotten_while_the_disk_is_frozen(disk: Path, tier_twin: Twin) -> None:
    """Threads that all hang, or none yet, are no hindrance; of several headers the newest stays."""
    universe = Universe(NUM_SLOTS)
    tier, region = filled(disk / "kv", universe, tier_twin)
    bare = FileTier(disk / "bare", 2**20, namespace=NAMESPACE, twin=tier_twin)
    for block_id, key in enumerate(universe.keys):
        region.write(block_id, universe.data[key])
    with frozen(disk):
        jobs = [tier.put([universe.keys[i]], [i], 0.05) for i in range(8, 16)]
        assert not tier.wait(jobs, 0.2)
        for _ in range(3):
            assert tier.forget() is False
            assert bare.forget() is False
            bare.discard(universe.keys)
        assert not tier.health().forgotten
        assert (tier.lookup(universe.keys) == State.MISS).all()
        wanted = files_of(tier).header.epoch
    wait_confirmed(tier)
    wait_confirmed(bare)
    assert tier.wait(jobs, PATIENCE_S)
    tier.poll()
    tier.health(reset=True)
    assert header_of(tier.folder).epoch == wanted, "the last one wins"
    assert not universe.put(tier, region, universe.keys[8:]).any()
    assert tier.close()
    assert bare.close()
    assert found_after(disk / "kv", universe, tier_twin) == list(range(8, 16))


@pytest.mark.parametrize("end", ["kill", "exit", "close"])
def test_forgotten_and_gone_while_the_disk_is_frozen(disk: Path, tier_twin: Twin, end: str) -> None:
    """The one entry that the kernel has on its way is made when the disk goes on."""
    universe = Universe(NUM_SLOTS)
    ready, tell = os.pipe()

    def work() -> None:
        tier, _ = filled(disk / "kv", universe, tier_twin)
        _run("fsfreeze", "--freeze", disk)
        certain = tier.forget()
        os.write(tell, b"1" if certain else b"0")
        if end == "kill":
            time.sleep(60)
        elif end == "close":
            certain = tier.close(0.2)
            os.write(tell, b"1" if certain else b"0")

    child = start(work)
    try:
        answers = os.read(ready, 1)
        if end == "kill":
            os.kill(child, signal.SIGKILL)
        elif end == "close":
            answers += os.read(ready, 1)
        time.sleep(0.1)
    finally:
        _run("fsfreeze", "--unfreeze", disk)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert set(answers) == {ord("0")}
    assert found_after(disk / "kv", universe, tier_twin) == []


def test_forgotten_while_the_file_server_is_stopped(tmp_path: Path, tier_twin: Twin) -> None:
    need("mkfs.ext4", "fuse2fs")
    make_image(tmp_path / "disk.img", 16)
    universe = Universe(NUM_SLOTS)
    with fuse_mounted(tmp_path / "disk.img", tmp_path / "disk") as (folder, server):
        tier, _ = filled(folder / "kv", universe, tier_twin)
        stop(server)
        try:
            assert tier.forget() is False
        finally:
            os.kill(server, signal.SIGCONT)
        wait_confirmed(tier)
        assert tier.close()
        assert found_after(folder / "kv", universe, tier_twin) == []
