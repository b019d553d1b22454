"""A shared directory into which a stranger puts links, pipes and folders: what is outside stays.

Each place of the layout is taken by each kind of thing, and each call is the first to meet it. What
the links lead to is compared byte by byte and time by time afterwards. Calls are answered with
statuses, and what was in the way gives way, but for the folder of the namespace itself, which is
refused.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import DirectoryTier, Namespace, Region, Status
from kvoffload.tiers.folder import MAX_DEPTH, Folder
from kvoffload.tiers.remote.sweeper import LEASE_S, Lease
from tests.tiers.attack import kill, report, rounds, start
from tests.tiers.inside import ask_anew, attached, doubt, medium_of, path_of, settle
from tests.tiers.planted import KINDS, NUMBER, Victim, everything
from tests.tiers.seals import Seal

pytestmark = pytest.mark.thorough

BLOCK = 4096
NAMESPACE, OTHERS = Namespace("planted", BLOCK), Namespace("others", BLOCK)
KEYS = [b"key-%03d" % number for number in range(64)]
NOBODY = 65_534
READ, REPLACE = Folder.read, Folder.replace

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def open_tier(path: Path, capacity: int = 64, **options) -> tuple[DirectoryTier, Region]:
    """Open a tier whose thread does not sweep by itself, and give it the bytes of the keys."""
    options = {"namespace": NAMESPACE, "sweep_s": 1e6, "threads": 2, "ack": "stored", **options}
    tier = DirectoryTier(path, capacity * BLOCK, **options)
    if options["sweep_s"] > 1000:
        tier._files.on_written = lambda: None  # nor early
    return tier, attached(tier, 2 * len(KEYS), KEYS)


@contextlib.contextmanager
def opened(path: Path, capacity: int = 64, **options) -> Iterator[tuple[DirectoryTier, Region]]:
    tier, region = open_tier(path, capacity, **options)
    try:
        yield tier, region
    finally:
        assert tier.close(PATIENCE_S)


def put(tier: DirectoryTier, count: int = 8) -> list[int]:
    return run(tier, tier.put(KEYS[:count], range(count), PATIENCE_S)).status.tolist()


def get(tier: DirectoryTier, region: Region, count: int = 8) -> list[int]:
    """Get keys; compare the bytes of those that are there; return the statuses."""
    ids = range(len(KEYS), len(KEYS) + count)
    statuses = run(tier, tier.get(KEYS[:count], ids, PATIENCE_S)).status.tolist()
    for block_id, key, status in zip(ids, KEYS, statuses, strict=False):
        assert status != Status.OK or region.read(block_id) == block_bytes_of(key, BLOCK)
    return statuses


def calm(tier: DirectoryTier) -> None:
    """Let removals that were asked for be done, and failures be forgotten."""
    settle(tier)
    tier.poll()
    tier.health(reset=True)
    ask_anew(tier)


def sweep(tier: DirectoryTier) -> int:
    while (removed := tier.sweep()) is None:
        pass
    return removed


def use_another(tier: DirectoryTier, _: Region) -> list[int]:
    with opened(tier.folder.parent, 4) as (another, region):
        return put(another) + get(another, region)


CALLS: dict[str, Callable[[DirectoryTier, Region], object]] = {
    "put": lambda tier, _: put(tier),
    "get": get,
    "query": lambda tier, _: run(tier, tier.query(KEYS[:8], PATIENCE_S)).status.tolist(),
    "touch": lambda tier, _: tier.touch(KEYS[:8]),
    "discard": lambda tier, _: tier.discard([KEYS[0], *KEYS[4:6]]),
    "sweep": lambda tier, _: tier.sweep(),
    "forget": lambda tier, _: tier.forget(),
    "open": use_another,
}


def do(call: str, tier: DirectoryTier, region: Region) -> list[int]:
    """Make a call; return its statuses, which are the only answers."""
    try:
        found = CALLS[call](tier, region)
    except OSError:
        assert call == "sweep"  # as documented
        return []
    statuses = found if isinstance(found, list) else []
    assert set(statuses) <= set(Status)
    return statuses


def use(tier: DirectoryTier, region: Region) -> None:
    """Make the calls that keep the generation."""
    for call in ("put", "get", "query", "touch", "discard"):
        do(call, tier, region)
    calm(tier)
    do("sweep", tier, region)
    calm(tier)


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "victim", f"{KEYS[0].hex()}.kv")


# -- everything at every place -------------------------------------------------------------------


BLOCK_PLACES: dict[str, Callable[[Path], Path]] = {
    "folder of a generation": lambda path: path.parents[1],
    "folder of a block": lambda path: path.parent,
    "block": lambda path: path,
}
PLACES: dict[str, Callable[[DirectoryTier], Path]] = {
    "namespace": lambda tier: tier.folder,
    "namespace.json": lambda tier: tier.folder / "namespace.json",
    "sweep.lock": lambda tier: tier.folder / "sweep.lock",
    **{place: lambda tier, of=of: of(path_of(tier, KEYS[0])) for place, of in BLOCK_PLACES.items()},
}


def sealed(key: bytes, namespace: Namespace, generation: int) -> bytes:
    """Return a block as its file has it."""
    block = block_bytes_of(namespace.model.encode() + key, BLOCK)
    seal = Seal.of(namespace.fingerprint, key, block).pack(generation)
    return (block + seal).ljust(2 * BLOCK, b"\0")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda data: data[:100],
    "cut": lambda data: data[:-1],
    "long": lambda data: data + bytes(100 * BLOCK),
    "flipped": lambda data: flipped(data, 777),
    "flipped seal": lambda data: flipped(data, BLOCK + 9),
    "flipped length": lambda data: flipped(data, BLOCK + 4),
    "other bytes": lambda data: b"x" * len(data),
    "of another key": lambda _: sealed(KEYS[1], NAMESPACE, 0),
    "of another model": lambda _: sealed(KEYS[0], OTHERS, 0),
    "of another generation": lambda _: sealed(KEYS[0], NAMESPACE, 5),
}
"""What may be done to the file of a block."""


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_outside_is_read_written_or_removed(
    tmp_path: Path, victim: Victim, call: str, place: str
) -> None:
    aside = tmp_path / "aside"
    with (
        opened(tmp_path / "kv", 4) as (tier, region),
        opened(tmp_path / "kv", namespace=OTHERS) as (others, others_region),
    ):
        medium_of(tier).visit_s = 0.0  # learn everything anew
        put(others)
        put(tier)
        for kind in (*(CHANGES if place == "block" else ()), *KINDS):
            sweep(tier)
            calm(tier)
            assert put(tier) == [Status.OK] * 8
            path = PLACES[place](tier)
            path.rename(aside)
            if kind in CHANGES:
                path.write_bytes(CHANGES[kind](aside.read_bytes()))
            else:
                KINDS[kind](path, victim)
            calm(tier)
            statuses = do(call, tier, region)
            if place in BLOCK_PLACES and call in ("get", "query")[: 1 if kind in CHANGES else 2]:
                assert statuses[0] in (Status.MISS, Status.CORRUPT), kind
            calm(tier)
            if kind in CHANGES:
                get(tier, region)  # only who reads it learns of it
                calm(tier)
            put(tier)
            calm(tier)
            found = put(tier)
            calm(tier)
            found += get(tier, region)
            if place == "namespace" and kind != "folder":
                assert Status.OK not in found, kind
                calm(tier)
                path.unlink()
                aside.rename(path)
                calm(tier)
            else:
                assert found == [Status.OK] * 16, kind
                remove(aside)
            assert victim.file.read_bytes() == b"of someone else", kind
            assert victim.is_untouched() or kind == "hard link", kind  # which comes last
        assert tier.forget()
        assert Status.OK not in get(tier, region)
        assert get(others, others_region) == [Status.OK] * 8, "another namespace is not concerned"


def test_a_temporary_file_that_is_there_is_not_written_to(
    tmp_path: Path, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name cannot be foreseen; here it can."""
    for module in ("folder", "remote.directory"):
        name = f"kvoffload.tiers.{module}.temporary_name"
        monkeypatch.setattr(name, lambda name: f"{name}.foreseen.tmp")
    with opened(tmp_path / "kv") as (tier, _):
        assert put(tier) == [Status.OK] * 8
        path = path_of(tier, KEYS[0])
        path.unlink()
        ask_anew(tier)
        (path.with_name(f"{path.stem}.foreseen.tmp")).symlink_to(victim.file)
        assert put(tier)[0] == Status.FAILED
        (tier.folder / "namespace.json").unlink()
        (tier.folder / "namespace.json.foreseen.tmp").symlink_to(victim.file)
        doubt(tier)
        tier.health(reset=True)
        ask_anew(tier)
        assert set(put(tier)) == {Status.FAILED}
    assert victim.is_untouched()


@pytest.mark.attack
@pytest.mark.parametrize("place", [*PLACES, "temporary files"])
def test_folders_and_files_that_turn_into_links_meanwhile(
    tmp_path: Path, victim: Victim, place: str
) -> None:
    """A thread swaps what is at a place with a link and back, as fast as it can."""
    ended = threading.Event()
    swaps = 0

    def swap(path: Path) -> None:
        nonlocal swaps
        aside = tmp_path / "aside"
        with contextlib.suppress(OSError):
            path.rename(aside)
            path.symlink_to(victim.path if aside.is_dir() else victim.file)
            swaps += 1
        time.sleep(random.random() * 0.002)
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            aside.rename(path)
        with contextlib.suppress(OSError):
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()

    def find() -> list[Path]:
        if place == "temporary files":
            return list(tier.folder.rglob("*.tmp"))
        if place not in BLOCK_PLACES:
            return [PLACES[place](tier)]
        found = list(tier.folder.glob("????????????????/??/*.kv"))
        return [BLOCK_PLACES[place](random.choice(found))] if found else []

    def swap_all() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):  # a folder is gone meanwhile
                for path in find():
                    swap(path)

    with opened(tmp_path / "kv", 4, sweep_s=0.01, threads=4) as (tier, region):
        medium_of(tier).visit_s = 0.0
        thread = threading.Thread(target=swap_all)
        thread.start()
        try:
            for number in range(rounds(300)):
                use(tier, region)
                if number % 10 == 9:
                    tier.forget()
        finally:
            ended.set()
            thread.join()
        calm(tier)
        assert put(tier) == [Status.OK] * 8
        assert tier.sweep() in (None, *range(17)), "at most what two generations have"
    report(f"{rounds(300)} rounds of all calls while {place} became a link {swaps} times")
    assert victim.is_untouched()


# -- sweeps --------------------------------------------------------------------------------------


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_a_sweep_goes_on_after_what_it_cannot_remove(tmp_path: Path, caplog) -> None:
    with opened(tmp_path, 16) as (tier, _):
        put(tier, 32)
        paths = [path_of(tier, key) for key in KEYS[:32]]
        for number, path in enumerate(paths):
            age(path, 1000 - number)
        (paths[0].parent / "x.kv").mkdir()
        (paths[0].parent / "x.kv" / "in it").touch()
        os.mkfifo(paths[1].parent / "y.kv")
        for path in (paths[0].parent / "x.kv", paths[1].parent / "y.kv"):
            age(path, 7200)
        stuck = paths[:3]
        if subprocess.run(["chattr", "+i", *stuck], capture_output=True, check=False).returncode:
            stuck = []
        try:
            assert sweep(tier) == 32 - 16 + 1, "others go for those that cannot"
            assert all(path.exists() for path in stuck)
            assert len(list(tier.folder.rglob("*.kv"))) == 17, "the folder is no block"
            assert sum(path.exists() for path in paths) == 15
            assert not stuck or "left what it could not remove" in caplog.text
            assert sweep(tier) == 0
        finally:
            if stuck:
                subprocess.run(["chattr", "-i", *stuck], check=True)
    if not stuck:
        pytest.skip("no file can be made immutable here; the rest passed")


@as_root
def test_a_sweep_goes_on_without_permission() -> None:
    """In a process of another user; root may do anything."""
    path = Path(tempfile.mkdtemp())
    try:
        path.chmod(0o755)
        os.chown(path, NOBODY, NOBODY)
        path = path / "kv"
        child = start(lambda: _sweep_without_permission(path, 64))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        folders = {file.parent for file in path.rglob("*.kv")}
        closed, others = sorted(folders)[:2]
        closed.chmod(0)
        os.chown(others, 0, 0)
        child = start(lambda: _sweep_without_permission(path, 0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(path.parent)


def _sweep_without_permission(path: Path, count: int) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tier, _ = open_tier(path, 8)
    if count:
        assert put(tier, count) == [Status.OK] * count
        return
    run(tier, tier.query(KEYS[:1]))
    assert sweep(tier) > 64 - 8 - 20
    assert tier.close(PATIENCE_S)


def test_more_files_than_can_be_listed_are_removed_over_several_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep keeps the times of twice the capacity, here, whatever a stranger has put there."""
    monkeypatch.setattr("kvoffload.tiers.remote.sweeper.MAX_LISTED", 0)
    with opened(tmp_path, 4) as (tier, region):
        put(tier, 1)
        folder = path_of(tier, KEYS[0]).parent
        for number in range(100):
            path = folder / f"{number:04x}.kv"
            path.touch()
            age(path, 1000 + number)
        removed = []
        while not removed or removed[-1]:
            removed.append(sweep(tier))
            assert removed[-1] <= 4, "of the eight that were listed, four may stay"
        assert sum(removed) == 101 - 4
        assert get(tier, region, 1) == [Status.OK], "it was the youngest"


def test_every_block_that_a_sweep_removes_is_reported(tmp_path: Path) -> None:
    with opened(tmp_path, 4, enable_events=True) as (tier, _):
        put(tier, 32)
        assert tier.sweep() == 28
        tier.poll()
        left = [key for event in tier.take_events() if event.removed for key in event.keys]
        assert len(set(left)) == len(left) == tier.stats()["removed_evicted"] == 28


@pytest.mark.parametrize("seconds", [2**31, 2**34, 2**40, -(2**34), -(2**40)])
def test_blocks_of_any_time_are_swept_like_others(tmp_path: Path, seconds: int) -> None:
    """From 2262 on, nanoseconds of them have more than 63 bits."""
    with opened(tmp_path, 2) as (tier, _):
        put(tier, 4)
        for path in [path_of(tier, key) for key in KEYS[:2]]:
            with contextlib.suppress(OSError, OverflowError):
                os.utime(path, (0, seconds))
        assert tier.sweep() == 2


def test_a_generation_without_blocks_leaves_with_its_folders(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as (tier, _):
        put(tier, 1)
        old = path_of(tier, KEYS[0]).parents[1]
        tier.forget("new")
        put(tier, 4)
        for path in (*old.rglob("*.kv"), *old.iterdir(), old):
            age(path, 7200)
        sweep(tier)
        for path in (*old.iterdir(), old):
            age(path, 7200)
        sweep(tier)
        assert not old.exists()
        assert path_of(tier, KEYS[3]).exists()


def test_only_what_a_dead_writer_left_long_ago_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as (tier, _):
        put(tier, 1)
        folders = [tier.folder, path_of(tier, KEYS[0]).parent]
        for folder in folders:
            for seconds in (3500, 3700):
                left = folder / f"{seconds}.tmp"
                left.touch()
                age(left, seconds)
        assert tier.sweep() == 0
        for folder in folders:
            assert [path.name for path in folder.glob("*.tmp")] == ["3500.tmp"]


def test_trees_are_removed_as_far_as_they_are_nested(tmp_path: Path, victim: Victim) -> None:
    folder = Folder.at(tmp_path)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(victim.path)
    (tmp_path / "tree" / "link").symlink_to(victim.file)
    os.mkfifo(tmp_path / "tree" / "pipe")
    assert folder.remove_tree("tree") is None
    assert not (tmp_path / "tree").exists()
    assert folder.remove_tree("tree") is None, "it is gone"
    deep = tmp_path / "tree" / "/".join("d" * (MAX_DEPTH + 3))
    deep.mkdir(parents=True)
    (tmp_path / "tree" / "file").touch()
    left = folder.remove_tree("tree")
    assert left is not None
    assert deep.exists()
    assert not (tmp_path / "tree" / "file").exists()
    assert victim.is_untouched()


@as_root
def test_another_file_system_in_a_tree_is_left(tmp_path: Path) -> None:
    mount = tmp_path / "tree" / "mounted"
    mount.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", mount], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (mount / "file").touch()
        assert Folder.at(tmp_path).remove_tree("tree") is not None
        assert (mount / "file").exists()
    finally:
        subprocess.run(["umount", mount], check=True)


# -- whose folder it is --------------------------------------------------------------------------


def test_a_tier_that_is_refused_sweeps_forgets_and_writes_nothing(tmp_path: Path, caplog) -> None:
    with opened(tmp_path, 4) as (tier, region):
        put(tier, 16)
        (tier.folder / "namespace.json").write_text('{"model":"another"}')
        for path in tier.folder.rglob("*.kv"):
            age(path, 7200)
        (tier.folder / NUMBER / "00").mkdir(parents=True)
        before = everything(tier.folder)
        medium_of(tier).visit_s = 0.0
        calm(tier)
        for _ in range(2):
            assert put(tier) == [Status.FAILED] * 8
            calm(tier)
            assert get(tier, region) == [Status.FAILED] * 8
            calm(tier)
            tier.discard(KEYS[:8])
            calm(tier)
            assert tier.sweep() is None
            assert tier.forget() is True, "it needs no call"
        assert everything(tier.folder) == before
    with opened(tmp_path, 4) as (tier, region):
        assert tier.sweep() is None
        use(tier, region)
        assert tier.forget() is True, "it needs no call"
        assert everything(tier.folder) == before
    assert "belongs to another namespace" in caplog.text


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"", Status.OK, id="empty"),
        pytest.param(NAMESPACE.json.encode()[:40], Status.OK, id="half"),
        pytest.param(bytes(200), Status.OK, id="zeros"),
        pytest.param(b"[" * 20_000, Status.OK, id="brackets"),
        pytest.param(b"\xff\xfe{", Status.OK, id="no text"),
        pytest.param(b"12", Status.OK, id="a number"),
        pytest.param(b'{"model":1}', Status.FAILED, id="another"),
        pytest.param(b"{" + b" " * 2**20, Status.FAILED, id="another, long"),
    ],
)
def test_another_namespace_is_refused_and_half_a_one_is_none(
    tmp_path: Path, data: bytes, status: Status
) -> None:
    """Half a one as a process leaves it that died before it had written it, or a server."""
    with opened(tmp_path) as (tier, region):
        put(tier)
    (tier.folder / "namespace.json").write_bytes(data)
    with opened(tmp_path) as (tier, region):
        assert get(tier, region) == [status] * 8
        left = NAMESPACE.json.encode() if status == Status.OK else data
        assert (tier.folder / "namespace.json").read_bytes() == left


def test_a_folder_that_everyone_can_write_to_is_told_once(tmp_path: Path, caplog) -> None:
    with opened(tmp_path) as (tier, region):
        put(tier)
        assert "everyone can write to" not in caplog.text
        tier.folder.chmod(0o777)
        medium_of(tier).visit_s = 0.0
        for _ in range(3):
            assert get(tier, region) == [Status.OK] * 8
        assert caplog.text.count("everyone can write to") == 1


# -- the lock of who sweeps ----------------------------------------------------------------------


def test_a_sweeper_that_is_stopped_is_replaced_and_notices(tmp_path: Path) -> None:
    with opened(tmp_path, 8) as (tier, _):
        put(tier, 32)
        lock = tier.folder / "sweep.lock"

        def sweep_and_stop() -> None:
            sweeper, _ = open_tier(tmp_path, 8)
            run(sweeper, sweeper.query(KEYS[:1]))
            sweeper._sweeper.lease_s = 0.06
            remove_oldest = sweeper._sweeper._remove_oldest

            def stop_first(*arguments):
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.1)
                return remove_oldest(*arguments)

            sweeper._sweeper._remove_oldest = stop_first
            assert sweeper.sweep() is None, "another process has swept"

        child = start(sweep_and_stop)
        try:
            _, status = os.waitpid(child, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            age(lock, 0)
            assert tier.sweep() is None, "it may only be slow"
            age(lock, 2 * LEASE_S)
            assert tier.sweep() == 32 - 8
            left = everything(tier.folder)
        finally:
            while os.WIFSTOPPED(status):  # more than once
                os.kill(child, signal.SIGCONT)
                _, status = os.waitpid(child, os.WUNTRACED)
        assert os.waitstatus_to_exitcode(status) == 0
        assert everything(tier.folder) == left


class TestLease:
    @pytest.mark.parametrize("locks", [True, False])
    def test_one_has_it(self, tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where there are no locks, the file says who."""
        if not locks:
            error = OSError(37, "No locks available")
            monkeypatch.setattr("fcntl.flock", Mock(side_effect=error))
        folder = Folder.at(tmp_path)
        lease = Lease.take(folder, "lock")
        assert lease is not None
        assert Lease.take(folder, "lock") is None
        assert lease.renew()
        lease.release()
        assert Lease.take(folder, "lock", 1000.0) is None, "it rests"
        again = Lease.take(folder, "lock")
        assert again is not None
        age(tmp_path / "lock", 2 * LEASE_S)
        assert Lease.take(folder, "lock") is not None
        again.give_up()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]

    def test_it_is_renewed_long_before_another_takes_it(self, tmp_path: Path) -> None:
        folder, lock = Folder.at(tmp_path), tmp_path / "lock"
        lease = Lease.take(folder, "lock")
        assert lease is not None
        for seconds, is_renewed in ((8, False), (12, True)):
            age(lock, 55)
            lease._renewed_at = time.monotonic() - seconds
            assert lease.renew()
            assert (time.time() - lock.stat().st_mtime < 50) == is_renewed
        age(lock, 55)
        assert Lease.take(folder, "lock") is None
        age(lock, 65)
        assert Lease.take(folder, "lock") is not None
        assert lease.is_mine() is False
        lease.give_up()

    def test_it_ends_with_its_process(self, tmp_path: Path) -> None:
        folder = Folder.at(tmp_path)

        def take_and_wait() -> None:
            Path(tmp_path / ("taken" if Lease.take(folder, "lock") else "")).touch()
            time.sleep(PATIENCE_S)

        child = start(take_and_wait)
        while not (tmp_path / "taken").exists():
            time.sleep(0.001)
        assert Lease.take(folder, "lock") is None
        kill(child)
        assert Lease.take(folder, "lock", 1000.0) is not None, "it did not finish"

    @pytest.mark.parametrize("years", [-1, 1], ids=["long ago", "yet to come"])
    def test_one_that_is_not_renewed_is_lost(self, tmp_path: Path, years: int) -> None:
        folder = Folder.at(tmp_path)
        old = Lease.take(folder, "lock", lease_s=1e-9)
        assert old is not None
        age(tmp_path / "lock", -years * 3e7)
        new = Lease.take(folder, "lock")
        assert new is not None
        assert not old.renew()
        assert new.renew()
        old.give_up()
        assert Lease.take(folder, "lock") is None
