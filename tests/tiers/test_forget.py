"""A slab has the blocks of one generation: through failing headers, hanging disks, kills."""

import contextlib
import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.tiers import FileTier, Region, State, Status
from kvoffload.tiers.local.slab.layout import Header
from tests.tiers.inside import wait_until

from .attack import (
    NAMESPACE,
    Universe,
    frozen,
    new_disk,
    open_slab,
    open_when_free,
    start,
)

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


def filled(path: Path, universe: Universe) -> tuple[FileTier, Region]:
    """Return a slab with the first eight blocks, and its region."""
    tier, region = open_slab(path, NUM_SLOTS)
    assert not universe.put(tier, region, universe.keys[:8]).any()
    return tier, region


def found_after(path: Path, universe: Universe) -> list[int]:
    """Open a slab again; return the numbers of the blocks that it serves."""
    tier, region = open_when_free(path, NUM_SLOTS)
    found = universe.check(tier, region)
    tier.close()
    return [i for i, key in enumerate(universe.keys) if found[key] == Status.OK]


def wait_confirmed(tier: FileTier, generation: str) -> None:
    wait_until(lambda: tier.forget(generation))


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


@pytest.mark.parametrize("end", ["kill", "close", "heal"])
def test_a_header_that_fails(tmp_path: Path, end: str) -> None:
    """The table is removed instead: nothing is found again under the old name either."""
    universe = Universe(16)

    def work() -> None:
        logging.raiseExceptions = False  # what pytest captures is a file too
        tier, region = filled(tmp_path, universe)
        with no_writes():
            assert tier.forget("new") is False
            assert (tier.lookup(universe.keys) == State.MISS).all()
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif end == "close":
                assert tier.close() is True
                return
        assert tier.forget("new") is True
        assert not universe.put(tier, region, universe.keys[8:]).any()
        assert tier.close()

    _, status = os.waitpid(start(work), 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if end == "kill" else 0)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "slots.tbl").exists()
    assert found_after(tmp_path, universe) == []


def test_a_header_that_fails_with_a_table_that_stays_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, _ = filled(tmp_path, Universe(NUM_SLOTS))

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "unlink", fail)
        assert tier.forget() is False
    assert f"{tier.folder / 'slots.tbl'}: has forgotten blocks; it must be removed" in caplog.text
    tier.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["pwrite", "fsync"])
def test_killed_at_every_step(tmp_path: Path, step: str, when: str) -> None:
    """Before the first step nothing has happened; from then on nothing comes back."""
    universe = Universe(NUM_SLOTS)
    expected = list(range(8)) if (step, when) == ("pwrite", "before") else []

    def work() -> None:
        tier, _ = filled(tmp_path, universe)
        if not expected:  # some are under way when everything is forgotten
            tier.put(universe.keys[8:], range(8))
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
    assert found_after(tmp_path, universe) == expected


# -- a disk that hangs -----------------------------------------------------------------------------


def test_forgotten_while_the_disk_is_frozen(tmp_path: Path) -> None:
    """Threads that all hang, or none yet, are no hindrance; of several headers the newest stays."""
    with new_disk(tmp_path, 16, "fsfreeze") as disk:
        universe = Universe(NUM_SLOTS)
        tier, region = filled(disk / "kv", universe)
        bare = FileTier(disk / "bare", 2**20, namespace=NAMESPACE)
        for block_id, key in enumerate(universe.keys):
            region.write(block_id, universe.data[key])
        with frozen(disk):
            jobs = [tier.put([universe.keys[i]], [i], 0.05) for i in range(8, 16)]
            assert not tier.wait(jobs, 0.2)
            for number in range(3):
                assert tier.forget(f"step {number}") is False
                assert bare.forget(f"step {number}") is False
                bare.discard(universe.keys)
            assert (tier.lookup(universe.keys) == State.MISS).all()
        wait_confirmed(tier, "step 2")
        wait_confirmed(bare, "step 2")
        assert tier.wait(jobs, PATIENCE_S)
        tier.poll()
        tier.health(reset=True)
        assert header_of(tier.folder).generation.name == "step 2", "the last one wins"
        assert not universe.put(tier, region, universe.keys[8:]).any()
        assert tier.close()
        assert bare.close()
        tier, region = open_slab(disk / "kv", NUM_SLOTS, generation="step 2")
        found = universe.check(tier, region)
        assert [found[key] for key in universe.keys] == [Status.MISS] * 8 + [Status.OK] * 8
        tier.close()
