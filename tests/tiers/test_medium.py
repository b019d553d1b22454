"""File systems that are cut off, full, failing or frozen; real ones, mounted from files."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import FileTier, Region, Status, TierSpaceError
from tests.isolated.scripts import run_script
from tests.tiers.inside import slots_of, wait_until

from .attack import (
    BLOCK_BYTES,
    NAMESPACE,
    Universe,
    _run,
    frozen,
    kill,
    make_image,
    mounted,
    need,
    new_disk,
    new_fuse_disk,
    open_slab,
    report,
    rounds,
    start,
    start_clock,
    stop_clock,
)
from .servers import stop

pytestmark = pytest.mark.attack

# -- power -----------------------------------------------------------------------------------------


def _fill(path: Path, universe: Universe, options: dict, seed: int) -> None:
    """Put without end."""
    chance = random.Random(seed)
    tier, region = open_slab(path, 400, **options)
    while True:
        keys = chance.sample(universe.keys, 16)
        ids = chance.sample(range(32), 16)
        for block_id, key in zip(ids, keys, strict=True):
            region.write(block_id, universe.data[key])
        job = tier.put(keys, ids)
        tier.wait([job], 1.0)
        tier.poll()


def test_power_cuts(tmp_path: Path, seed: int) -> None:
    """Copy the image of a file system that is being written to, and mount the copy. Stated: 50.

    The copy is made while the kernel goes on writing, so that it is not the state of one moment but
    a mixture of several: worse than what a loss of power leaves. The kernel writes back at random
    moments, as it does by itself every few seconds.
    """
    need("mkfs.ext4", "e2fsck", "sync")
    universe = Universe(800)
    chance = random.Random(seed)
    image, copy = tmp_path / "disk.img", tmp_path / "copy.img"
    make_image(image, 40)
    cuts, compared, corrupt = rounds(50), 0, 0
    options: dict[str, bool] = {}
    with mounted(image, tmp_path / "disk") as folder:
        tier, region = open_slab(folder / "kv", 400, **options)  # a cut may come before any store
        universe.put(tier, region, universe.keys[: region.num_blocks])
        tier.close()
        for number in range(cuts):
            options["staged"] = chance.random() < 0.5
            child = start(partial(_fill, folder / "kv", universe, options, seed + number))
            time.sleep(chance.uniform(0.05, 0.2))
            _run("sync", "-f", folder)
            time.sleep(chance.uniform(0, 0.1))
            with subprocess.Popen(["sync", "-f", folder]) as flush:  # while it is copied
                shutil.copyfile(image, copy)
                flush.wait()
            kill(child)
            subprocess.run(["e2fsck", "-fy", copy], capture_output=True, check=False)
            with mounted(copy, tmp_path / "copy") as after:
                tier, region = open_slab(after / "kv", 400, **options)
                found = universe.check(tier, region, reset_every=8)
                tier.close()
            compared += sum(status == Status.OK for status in found.values())
            corrupt += sum(status == Status.CORRUPT for status in found.values())
    assert compared or cuts < 10  # a busy machine may have stored nothing in a few rounds
    report(f"{cuts} images, {compared} blocks compared, none wrong; {corrupt} caught as corrupt")


# -- space -----------------------------------------------------------------------------------------


def fill(path: Path, *sizes: int) -> None:
    """Write until there is no room, in pieces of each size in turn."""
    with path.open("wb", buffering=0) as filler:
        for size in sizes:
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """The error comes at once, and nothing is left; a smaller slab then fits, and stays."""
    universe = Universe(200)
    with new_disk(tmp_path, 32) as folder:
        before = sorted(folder.rglob("*")), os.statvfs(folder).f_bfree
        for capacity in (2**30, 10 * 2**40):
            with pytest.raises(TierSpaceError, match="No space left on device"):
                FileTier(folder / "new" / "kv", capacity, namespace=NAMESPACE)
            assert (sorted(folder.rglob("*")), os.statvfs(folder).f_bfree) == before
        tier, region = open_slab(folder / "kv", 600)
        assert not universe.put(tier, region).any()
        tier.close()
        # A larger capacity that does not fit leaves the slab as it was.
        with pytest.raises(TierSpaceError):
            open_slab(folder / "kv", 6000)
        tier, region = open_slab(folder / "kv", 600)
        assert set(universe.check(tier, region).values()) == {Status.OK}
        assert (tier.folder / "blocks.dat").stat().st_size == 600 * BLOCK_BYTES
        # What fills up the rest does no harm: the space of the slab is its own.
        fill(folder / "filler", 2**16)
        other = Universe(600)
        assert not other.put(tier, region).any()
        assert set(other.check(tier, region).values()) == {Status.OK}
        tier.close()


def keep_what_fits(path: Path, capacities: tuple[int, ...]) -> None:
    """Fill a slab of 300 blocks, and open it with other capacities."""
    universe = Universe(300)
    tier, region = open_slab(path, 300)
    universe.put(tier, region)
    slots = dict(zip(universe.keys, slots_of(tier, universe.keys), strict=True))
    tier.close()
    for num_slots in capacities:
        tier, region = open_slab(path, num_slots)
        slots = {key: slot for key, slot in slots.items() if slot < num_slots}
        found = universe.check(tier, region)
        assert {key for key, status in found.items() if status == Status.OK} == set(slots)
        assert Status.CORRUPT not in found.values()
        assert tier.num_restored == len(slots)
        assert (tier.folder / "blocks.dat").stat().st_size == num_slots * BLOCK_BYTES
        tier.close()


def test_another_capacity_keeps_what_fits(tmp_path: Path) -> None:
    keep_what_fits(tmp_path, (450, 120, 120, 400))
    extra = Universe(300)
    tier, region = open_slab(tmp_path, 400)
    assert not extra.put(tier, region).any()
    assert set(extra.check(tier, region).values()) == {Status.OK}
    tier.close()


def test_a_slab_shrinks_on_a_full_disk(tmp_path: Path) -> None:
    """By one slot only, where even the new table has no room."""
    with new_disk(tmp_path, 32) as disk:
        open_slab(disk / "kv", 300)[0].close()
        fill(disk / "filler", 2**20, 4096, 512)
        keep_what_fits(disk / "kv", (299, 100))


# -- errors ----------------------------------------------------------------------------------------


def test_a_disk_without_room_below(tmp_path: Path) -> None:
    """Space that the file system has given fails in the medium below it: FULL or FAILED.

    A sparse image on a memory file system that has no room for it, as thin volumes are.
    """
    need("mkfs.ext4")
    outer = tmp_path / "outer"
    outer.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", outer)
    try:
        make_image(outer / "disk.img", 64)
        with mounted(outer / "disk.img", tmp_path / "disk") as folder:
            tier, region = open_slab(folder / "kv", 1000)
            stop_clock(tier)
            universe, other = Universe(16), Universe(1000)
            assert not universe.put(tier, region).any()
            fill(outer / "filler", 2**16)
            statuses = other.put(tier, region, other.keys[100:420]).tolist()
            assert {Status.FULL, Status.FAILED}.intersection(statuses)
            assert statuses[-1] == Status.UNAVAILABLE
            assert tier.health().writes == "open"
            # What was stored before is read all the while, and what failed is not there.
            assert set(universe.check(tier, region).values()) == {Status.OK}
            found = other.check(tier, region, other.keys[100:420])
            for status, after in zip(statuses, found.values(), strict=True):
                # what the kernel took and lost nevertheless is corrupt, or unreadable
                assert after == Status.MISS or status == Status.OK
            tier.close()
    finally:
        _run("umount", "-l", outer)


INJECTED = """
    import errno, logging, os, sys
    from pathlib import Path
    from unittest.mock import Mock
    from kvoffload.tiers import State, Status
    from tests.tiers.attack import BLOCK_BYTES, Universe, open_slab, stop_clock

    fault = Path(os.environ["KVO_FAULT"])
    path, staged = Path(sys.argv[1]), sys.argv[2] == "staged"
    data_bytes = 64 * BLOCK_BYTES

    def during(call, number, size):
        fault.write_text(f"{call} {number} {size}")

    universe = Universe(64)
    tier, region = open_slab(path, 64, staged=staged, ack="stored", enable_events=True)
    stop_clock(tier)
    assert not universe.put(tier, region, universe.keys[:16]).any()
    pwritev, preadv = sys.argv[3:5]
    for number, expected in (
        (errno.ENOSPC, Status.FULL), (errno.EDQUOT, Status.FULL), (errno.EROFS, Status.FULL),
        (errno.EIO, Status.FAILED), (errno.ENXIO, Status.FAILED),
    ):
        during(pwritev, number, data_bytes)
        for turn in range(5):
            keys = universe.keys[16 + 4 * turn : 20 + 4 * turn]
            found = universe.put(tier, region, keys).tolist()
            assert found == [expected] * 4, (number, turn, found)
            assert all(tier.state(key) == State.MISS for key in keys)
        assert tier.health().writes == "open", tier.health()
        refused = universe.put(tier, region, universe.keys[16:20])
        assert set(refused.tolist()) == {Status.UNAVAILABLE}
        fault.write_text("")
        assert set(universe.check(tier, region, universe.keys[:16]).values()) == {Status.OK}
        assert tier.health(reset=True).ok
        assert tier.stats()["blocks"] == 16, tier.stats()
    # errors of the table, not of the blocks: one line about all seals that stay
    logging.getLogger("kvoffload.tiers").addHandler(handler := Mock(level=0))
    during(sys.argv[5], errno.EIO, 4096)
    tier.discard(universe.keys[12:16])
    found = universe.put(tier, region, universe.keys[16:20])
    assert set(found.tolist()) == {Status.FAILED}, found
    assert handler.handle.call_count == 1, handler.handle.mock_calls
    fault.write_text("")
    assert not universe.put(tier, region, universe.keys[12:16]).any()
    # reading: what fails is dropped, neighbours are not
    list(tier.take_events())
    during(preadv, errno.EIO, data_bytes)
    assert set(universe.check(tier, region, universe.keys[:4]).values()) == {Status.FAILED}
    fault.write_text("")
    events = [event for event in tier.take_events() if event.removed]
    assert [(event.keys, event.reason) for event in events] == [(universe.keys[:4], "failed")]
    found = universe.check(tier, region)
    assert [found[key] for key in universe.keys[:16]] == [Status.MISS] * 4 + [Status.OK] * 12
    # and all is well again
    assert not universe.put(tier, region, universe.keys[:32]).any()
    assert set(universe.check(tier, region, universe.keys[:32]).values()) == {Status.OK}
    # a generation that cannot be written is said
    fsync, os.fsync = os.fsync, Mock(side_effect=OSError(errno.EIO, "no"))
    assert tier.forget("new") is False
    os.fsync = fsync
    assert tier.forget("new") is True
    assert tier.close()
"""


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_injected_errors(tmp_path: Path, mode: str) -> None:
    """Every error that a disk may report, from the system calls of the native threads."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    shim, fault = tmp_path / "shim.so", tmp_path / "fault"
    _run("gcc", "-shared", "-fPIC", "-o", shim, Path(__file__).with_name("shim.c"), "-ldl")
    fault.write_text("")
    preload = f"{os.environ.get('LD_PRELOAD', '')} {shim}".strip()
    environment = {"LD_PRELOAD": preload, "KVO_FAULT": str(fault), "KVOFFLOAD_PURE_PYTHON": "0"}
    arguments = (str(tmp_path / "kv"), mode, *_called_by_threads())
    run_script(INJECTED, *arguments, environment=environment)


def _called_by_threads() -> list[str]:
    """Return the names under which the extension calls pwritev, preadv and pwrite here."""
    from kvoffload._core import io

    names = subprocess.run(["nm", "-D", io.__file__], capture_output=True, text=True, check=True)
    found = {line.split()[-1].split("@")[0] for line in names.stdout.splitlines()}
    return [
        f"{name}64" if f"{name}64" in found else name for name in ("pwritev", "preadv", "pwrite")
    ]


# -- hangs -----------------------------------------------------------------------------------------


def test_a_frozen_file_system_and_a_direct_tier(tmp_path: Path) -> None:
    """``fsfreeze``: writes hang. A late job ends when the kernel lets go; the breaker is open."""
    universe = Universe(100)
    with new_disk(tmp_path, 32, "fsfreeze") as folder:
        tier, region = open_slab(folder / "kv", 100, threads=4)
        assert tier.direct
        stop_clock(tier)
        assert not universe.put(tier, region, universe.keys[:32]).any()
        for block_id, key in enumerate(universe.keys[32:64]):
            region.write(block_id, universe.data[key])
        with frozen(folder):
            jobs = [
                tier.put(universe.keys[32 + i : 36 + i], range(i, i + 4), 0.1) for i in (0, 4, 8)
            ]
            assert not tier.wait(jobs, 0.3)
            health = tier.health()
            assert health.writes == "open"
            assert health.late_jobs >= 1
            ends = {done.job: done.status.tolist() for done in tier.poll()}
            again = tier.put(universe.keys[90:92], [30, 31], 0.1)
            assert run(tier, again).status.tolist() == [Status.UNAVAILABLE] * 2
        assert tier.wait(jobs, PATIENCE_S)
        ends.update({done.job: done.status.tolist() for done in tier.poll()})
        assert set(ends) == set(jobs)
        assert {status for job in jobs for status in ends[job]} <= {Status.OK, Status.TIMEOUT}
        start_clock(tier)
        found = universe.check(tier, region)
        assert Status.CORRUPT not in found.values()
        assert [found[key] for key in universe.keys[:32]] == [Status.OK] * 32
        assert tier.close(PATIENCE_S)


@pytest.mark.parametrize("ack", ["copied", "stored"])
def test_a_stopped_file_server(tmp_path: Path, ack: str) -> None:
    """SIGSTOP to the process that serves the file system: reads and writes hang."""
    universe = Universe(300)
    deadline_s = 0.15
    with new_fuse_disk(tmp_path, 32) as (folder, server):
        tier, region = open_slab(folder / "kv", 300, staged=True, ack=ack, threads=4)
        assert not universe.put(tier, region, universe.keys[:100]).any()
        stop_clock(tier)
        stop(server)
        try:
            statuses, puts = [], []
            for number in range(8):
                region.array[:] = 0xEE
                keys = universe.keys[4 * number : 4 * number + 4]
                statuses += run(tier, tier.get(keys, range(4), deadline_s)).status.tolist()
                keys = universe.keys[100 + number :][:1]
                puts += run(tier, tier.put(keys, [0], deadline_s)).status.tolist()
            assert set(statuses) == {Status.TIMEOUT, Status.UNAVAILABLE}
            if ack == "copied":
                assert puts[0] == Status.OK, "a hung server does not keep the caller waiting"
            assert set(puts) <= {Status.OK, Status.TIMEOUT, Status.UNAVAILABLE}
            assert tier.health().reads in {"open", "probing"}
            region.array[:] = 0xEE
            before = region.array.copy()
        finally:
            os.kill(server, signal.SIGCONT)
        start_clock(tier)

        def is_well() -> bool:
            tier.wait([tier.get(universe.keys[:1], [31]), tier.put(universe.keys[299:], [31])], 1)
            tier.poll()
            return tier.health().ok

        wait_until(is_well)
        before[31 * BLOCK_BYTES :] = region.array[31 * BLOCK_BYTES :]
        assert (region.array == before).all(), "calls that came back late have touched the memory"
        found = universe.check(tier, region, universe.keys[:100])
        assert set(found.values()) == {Status.OK}
        # What was put while the server slept has the bytes of that moment, whatever they were.
        assert tier.close(PATIENCE_S)


def test_close_of_a_hung_tier(tmp_path: Path) -> None:
    """`close` returns in time and says that something hangs; Python ends all the same.

    The process is gone when the disk answers: a thread whose request the file system has taken
    cannot be killed before.
    """
    with new_fuse_disk(tmp_path, 32) as (folder, server):
        script = f"""
import time
from pathlib import Path
from tests.tiers.attack import Universe, open_slab
from tests.tiers.servers import stop
universe = Universe(1000)
tier, region = open_slab(Path({str(folder)!r}) / "kv", 8, staged=True)
universe.put(tier, region, universe.keys[:8])
stop({server})
for key in universe.keys[8:]:  # new ones: what is there already is not written
    if tier.health(reset=True).late_jobs:  # a job that no thread took in time does not hang
        break
    tier.put([key], [8], 0.1)  # what is read may be in the kernel's cache
    time.sleep(0.15)
    tier.poll()
assert tier.close(0.2) is False
"""
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                wait_until(lambda: _has_ended(process))
            finally:
                os.kill(server, signal.SIGCONT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors


def _has_ended(process: subprocess.Popen) -> bool:
    """Return whether a program has ended, and at most threads in the kernel keep its process."""
    if process.poll() is not None:
        return True
    _, _, state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")
    return state.split()[0] == "Z"


def test_regions_that_are_not_aligned_are_staged(tmp_path: Path, caplog) -> None:
    tier = FileTier(tmp_path, 20 * BLOCK_BYTES, namespace=NAMESPACE)
    tier.attach(Region(memoryview(bytearray(4 * BLOCK_BYTES + 64))[3:], BLOCK_BYTES))
    assert not tier.direct
    assert "not aligned" in caplog.text
    tier.close()
