"""The slab: restarts, blocks that it must not find again, forks, and a header that fails."""

import contextlib
import logging
import os
import pkgutil
import resource
import signal
import sys
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.testing.tiers import run as run_job
from kvoffload.tiers import (
    FileTier,
    Namespace,
    Region,
    State,
    Status,
    TierInterruptedError,
    TierInUseError,
    TierSpaceError,
)
from kvoffload.tiers.local.slab import find_slabs
from kvoffload.tiers.local.slab.layout import Header
from tests.tiers.inside import files_of, settle, wait_until

from .attack import (
    NAMESPACE,
    Universe,
    frozen,
    kill,
    new_disk,
    open_slab,
    open_when_free,
    start,
    stop_clock,
)

pytestmark = pytest.mark.attack

NUM_SLOTS = 16
MODES = {
    "direct": {},
    "staged": {"staged": True},
    "staged, two buffers": {"staged": True, "staging_bytes": 0},
    "staged, one thread, stored": {"staged": True, "threads": 1, "ack": "stored"},
}


def test_a_namespace_of_any_length_is_found_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_blocks=0, f_bfree=0, f_frsize=1))  # ramfs
    for length in (2**20, 3 * 2**20):
        namespace = Namespace("long", 4096, groups=["x" * length])
        for restored in (0, 4):
            tier = FileTier(tmp_path, 2**16, namespace=namespace)
            assert tier.num_restored == restored
            tier.attach(Region.allocate(4, 4096))
            run_job(tier, tier.put([b"%d" % number for number in range(4)], range(4)))
            tier.close()


@pytest.mark.parametrize("end", ["close", "attach", "exit"])
def test_dropped_before_there_is_a_region(tmp_path: Path, end: str) -> None:
    """`discard` and `forget` need no threads."""
    universe = Universe(8)
    tier, region = open_slab(tmp_path, 8)
    universe.put(tier, region)
    tier.close()

    def discard() -> None:
        tier = FileTier(tmp_path, 8 * 16_384, namespace=NAMESPACE)
        tier.discard(universe.keys[:3])
        tier.touch(universe.keys[:6])
        assert (tier.lookup(universe.keys) == [State.MISS] * 3 + [State.HIT] * 5).all()
        if end == "attach":
            tier.attach(region)
        if end == "exit":
            tier.__del__()
        else:
            assert tier.close()

    discard()
    tier = FileTier(tmp_path, 8 * 16_384, namespace=NAMESPACE)
    assert (tier.lookup(universe.keys) == [State.MISS] * 3 + [State.HIT] * 5).all()
    assert tier.forget()
    tier.close()
    (looked,) = find_slabs(tmp_path)
    assert (looked.num_blocks, looked.num_stale) == (0, 0)


def test_discarded_after_a_put_that_timed_out_had_evicted_it(tmp_path: Path) -> None:
    """The seal of what was evicted goes, though no thread came to write over it."""
    universe = Universe(16)
    with new_disk(tmp_path, 16, "fsfreeze") as disk:
        tier, region = open_slab(disk / "kv", 8, staged=True, ack="stored", threads=1)
        stop_clock(tier)
        universe.put(tier, region, universe.keys[:8])
        with frozen(disk):
            for key in universe.keys[8:11]:  # the first hangs, no thread takes the others
                region.write(0, universe.data[key])
                job = tier.put([key], [0], 0.1)
                assert tier.wait([job], PATIENCE_S)
                (done,) = tier.poll()
                assert done.status[0] in (Status.TIMEOUT, Status.UNAVAILABLE)
            tier.discard(universe.keys[:3])
        settle(tier)
        assert tier.close(PATIENCE_S)
        tier, region = open_slab(disk / "kv", 8)
        found = universe.check(tier, region)
        tier.close()
    assert {found[key] for key in universe.keys[:3]} == {Status.MISS}
    assert {found[key] for key in universe.keys[3:8]} == {Status.OK}


@pytest.mark.parametrize(("call", "made"), [("forget", "change_generation"), ("close", "close")])
def test_an_interrupted_call_has_to_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, made: str
) -> None:
    universe = Universe(8)
    tier, region = open_slab(tmp_path, 8)
    universe.put(tier, region)
    tier.get(universe.keys, range(8), PATIENCE_S)
    with monkeypatch.context() as patched:
        patched.setattr(files_of(tier), made, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            getattr(tier, call)()
    if call == "forget":
        assert tier.health().interrupted
        with pytest.raises(TierInterruptedError):
            tier.forget()
    with pytest.raises(TierInUseError):
        open_slab(tmp_path, 8)
    for _ in range(2):
        assert tier.close()
    assert [done.status.dtype.name for done in tier.poll()] == ["int8"]
    for restored in (8, 0):
        tier, _ = open_slab(tmp_path, 8)
        assert tier.num_restored == restored
        assert tier.forget()
        tier.close()


def test_a_slab_of_0_4_opens_empty_and_says_so(tmp_path: Path, caplog) -> None:
    """That of 0.3 is the same: it has no generation, and which weights computed it is not known."""
    with tarfile.open(Path(__file__).parent / "data" / "slab-0.3.tar.xz") as archive:
        safely: dict[str, Any] = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # not before 3.11.4
        archive.extractall(tmp_path, **safely)
    keys = [b"kept-%d" % number for number in range(8)]
    for number in range(2):
        with FileTier(tmp_path, 6 * 4096, namespace=Namespace("kept", 4096), threads=2) as tier:
            assert tier.num_restored == 0
            tier.attach(Region.allocate(9, 4096))
            done = run_job(tier, tier.get(keys, range(8)))
            assert set(done.status.tolist()) == {Status.MISS}
        lines = [line for line in caplog.messages if "they are of kvoffload 0.4" in line]
        assert len(lines) == 1, f"after {number + 1} openings"


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


@pytest.mark.parametrize("options", MODES.values(), ids=list(MODES))
def test_what_is_discarded_while_it_is_stored_is_gone_after_a_restart(
    options: dict, tmp_path: Path, namespace: Namespace
) -> None:
    """Also if a `forget` came before the end of the put, and the generation comes back."""
    for generations, kept in ((), State.HIT), (("two", "three", ""), State.MISS):
        with FileTier(tmp_path, 8 * 4096, namespace=namespace, **options) as tier:
            tier.attach(Region.allocate(8, 4096))
            job = tier.put([b"gone", b"kept"], [0, 1])
            tier.discard([b"gone"])
            for generation in generations:
                assert tier.forget(generation)
            run_job(tier, job)
            settle(tier)
        with FileTier(tmp_path, 8 * 4096, namespace=namespace) as tier:
            assert tier.lookup([b"gone", b"kept"]).tolist() == [State.MISS, kept]


def test_what_is_discarded_beside_reads_is_gone_after_a_close_that_cuts_them(
    tmp_path: Path,
) -> None:
    keys, large = [b"%d" % number for number in range(8)], Namespace("large", 2**22)
    for restored in (0, 6):
        with FileTier(tmp_path, 2**25, namespace=large, threads=1) as tier:
            assert tier.num_restored == restored
            tier.attach(Region.allocate(8, 2**22))
            run_job(tier, tier.put(keys, range(8)))
            tier.get(keys, range(8))
            tier.discard(keys[:2])
            assert tier.close(0.0)


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "posix_fallocate", "fsync"])
def test_a_fork_while_a_slab_is_opened(tmp_path: Path, monkeypatch, call: str) -> None:
    """A child forked right after a system call of the opening keeps nothing locked."""
    made, children = getattr(os, call), []
    ready, tell = os.pipe()

    def live() -> None:
        os.write(tell, b"!")
        time.sleep(60)

    def forks(*arguments, **options):
        result = made(*arguments, **options)
        if len(children) < 3:
            children.append(start(live))
            assert os.read(ready, 1) == b"!"  # it runs
        return result

    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, call, forks)
            tier, _ = open_slab(tmp_path, 64)
        assert children
        tier.close()
        open_slab(tmp_path, 64)[0].close()
    finally:
        for child in children:
            kill(child)


@pytest.mark.parametrize("part", ["os.close", "numpy.zeros"])
def test_an_opening_that_is_interrupted_keeps_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Whichever of its calls raises."""
    owner, _, name = part.rpartition(".")
    made, left = pkgutil.resolve_name(part), [0]

    def interrupted(*arguments: Any) -> Any:
        result = made(*arguments)
        left[0] -= sys._getframe(1).f_globals["__name__"].startswith("kvoffload.tiers")
        if not left[0]:
            raise KeyboardInterrupt
        return result

    for call in range(1, 12):
        left[0] = call
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(pkgutil.resolve_name(owner), name, interrupted)
            open_slab(tmp_path, 8 * call)[0].close()
        open_slab(tmp_path, 8)[0].close()


def test_descriptors_are_gone_when_a_slab_is_closed(tmp_path: Path) -> None:
    """So that no call can write to a file that has their number by then."""
    universe = Universe(8)
    tier, region = open_slab(tmp_path, 8)
    universe.put(tier, region)

    def work() -> None:
        files = files_of(tier)
        assert (files.data_fd, files.table_fd, files.held.fd) == (-1, -1, -1)

    _, status = os.waitpid(start(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0, "in a child"
    files = files_of(tier)
    fds = [files.data_fd, files.table_fd, files.held.fd, files.held.files["lock"]]
    tier.close()
    assert (files.data_fd, files.table_fd, files.held.fd, files.held.files) == (-1, -1, -1, {})
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# -- forget ----------------------------------------------------------------------------------------


@pytest.fixture
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
            with pytest.raises(TierSpaceError, match="for its capacity: File too large"):
                FileTier(tmp_path / "another", 8 * 16_384, namespace=NAMESPACE)
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


def test_a_header_that_fails_with_a_table_that_stays_is_named(tmp_path: Path, caplog) -> None:
    tier, _ = filled(tmp_path, Universe(NUM_SLOTS))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "unlink"):
            patch.setattr(os, name, Mock(side_effect=OSError(5, "no")))
        assert tier.forget() is False
    assert f"{tier.folder / 'slots.tbl'}: has forgotten blocks; it must be removed" in caplog.text
    tier.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["pwritev", "ftruncate", "fsync"])
def test_killed_at_every_step(tmp_path: Path, step: str, when: str) -> None:
    """Before the first step nothing has happened; from then on nothing comes back."""
    universe = Universe(NUM_SLOTS)
    expected = list(range(8)) if (step, when) == ("pwritev", "before") else []

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


@pytest.mark.usefixtures("_short")
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
        for each in (tier, bare):
            wait_until(partial(each.forget, "step 2"))
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
