"""The slab: its restarts, blocks that it must not find again, windows, and a lock that ends."""

import os
import tarfile
import time
from pathlib import Path
from typing import Any

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
)
from kvoffload.tiers.local.slab import find_slabs
from tests.tiers.inside import files_of, settle

from .attack import (
    NAMESPACE,
    Universe,
    frozen,
    kill,
    new_disk,
    open_slab,
    start,
    stop_clock,
)

pytestmark = pytest.mark.attack

MODES = {
    "direct": {},
    "staged": {"staged": True},
    "staged, two buffers": {"staged": True, "staging_bytes": 0},
    "staged, one thread, stored": {"staged": True, "threads": 1, "ack": "stored"},
}


def test_a_namespace_of_any_length_is_found_again(tmp_path: Path) -> None:
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
    assert (looked.num_blocks, looked.num_stale) == (0, 5)


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


def test_an_interrupted_forget_has_to_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    universe = Universe(8)
    tier, region = open_slab(tmp_path, 8)
    universe.put(tier, region)

    def interrupted(generation: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files_of(tier), "change_generation", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.forget()
    assert tier.health().interrupted
    with pytest.raises(TierInterruptedError):
        tier.forget()
    assert tier.close()
    tier, _ = open_slab(tmp_path, 8)
    assert tier.num_restored == 8
    assert tier.forget()
    tier.close()
    tier, _ = open_slab(tmp_path, 8)
    assert tier.num_restored == 0
    tier.close()


def test_an_interrupted_close_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = open_slab(tmp_path, 8)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files_of(tier), "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.close()
    with pytest.raises(TierInUseError):
        open_slab(tmp_path, 8)
    assert tier.close()
    assert tier.close()
    open_slab(tmp_path, 8)[0].close()


def test_a_slab_of_0_4_opens_empty_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
        lines = [line for line in caplog.messages if "are of kvoffload 0.4 and dropped" in line]
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
    with FileTier(tmp_path, 8 * 4096, namespace=namespace, **options) as tier:
        tier.attach(Region.allocate(8, 4096))
        job = tier.put([b"gone", b"kept"], [0, 1])
        tier.discard([b"gone"])
        for generation in ("two", "three", ""):
            assert tier.forget(generation)
        run_job(tier, job)
        settle(tier)
    with FileTier(tmp_path, 8 * 4096, namespace=namespace) as tier:
        assert tier.lookup([b"gone", b"kept"]).tolist() == [State.MISS, State.HIT]


# -- forks -----------------------------------------------------------------------------------------


def opens(path: Path) -> FileTier:
    return FileTier(path, 2**20, namespace=NAMESPACE)


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "posix_fallocate", "fsync"])
def test_a_fork_while_a_slab_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
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
            tier = opens(tmp_path)
        assert children
        tier.close()
        opens(tmp_path).close()
    finally:
        for child in children:
            kill(child)


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
