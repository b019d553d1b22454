"""What tiers take of the process and the system, and give back: threads, descriptors and files.

Threads that cannot be started, handlers of logs that raise, disks that fail or hang before there is
a region, a process that is killed while it opens a slab, a daemon without standard streams.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    Namespace,
    Region,
    State,
    Status,
    Tier,
    TierError,
)
from kvoffload.tiers.local.slab import files
from tests.tiers.attack import start
from tests.tiers.inside import attached, descriptors, doubt, medium_of, settle
from tests.tiers.servers import make_bucket, s3_options, s3_server

BLOCK = 4096
KEYS = [b"key-%02d" % number for number in range(8)]


def in_directory(path: Path, namespace: Namespace) -> DirectoryTier:
    return DirectoryTier(path, 2**20, threads=2, namespace=namespace)


def in_slab(path: Path, namespace: Namespace) -> FileTier:
    return FileTier(path, 64 * BLOCK, threads=2, namespace=namespace)


OPENERS = [in_directory, in_slab]
Opener = Callable[[Path, Namespace], Tier]


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_an_attach_that_fails_leaves_no_thread_and_no_descriptor(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its threads cannot be started; the next call succeeds."""
    started = threading.Thread.start
    region = Region.allocate(8, BLOCK)
    with in_directory(tmp_path, namespace) as tier:
        before = threading.active_count(), descriptors()
        for count in range(3):
            left = [count]

            def start_some(thread: threading.Thread, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("can't start new thread")
                started(thread)

            monkeypatch.setattr(threading.Thread, "start", start_some)
            with pytest.raises(MemoryError, match="no thread"):
                tier.attach(region)
            monkeypatch.undo()
            assert (threading.active_count(), descriptors()) == before, count
            with pytest.raises(RuntimeError, match="has no region"):
                tier.put(KEYS, range(8))
        tier.attach(region)
        assert not run(tier, tier.put(KEYS, range(8))).status.any()


def test_an_attach_without_memory_leaves_nothing(tmp_path: Path) -> None:
    """In a process that may have no more memory, and so no more stacks of threads."""
    program = """
import os, resource, sys
from kvoffload.tiers import FileTier, Namespace, Region

def held():
    status = open("/proc/self/status").read()
    return int(status.partition("Threads:")[2].split()[0]), len(os.listdir("/proc/self/fd"))

namespace = Namespace("m", 4096)
tier = FileTier(sys.argv[1], 2**20, threads=1024, namespace=namespace)
region = Region.allocate(8, 4096)
before = held()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
for _ in range(5):
    try:
        tier.attach(region)
    except MemoryError:
        assert held() == before, (held(), before)
    else:
        raise SystemExit("there was enough memory")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tier.attach(region)
tier.close()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_a_handler_of_the_log_that_raises_ends_no_thread(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many jobs settles, on a directory that is a file until it is none."""
    handle = Mock(side_effect=ValueError("this handler is broken"))
    monkeypatch.setattr(logging.getLogger("kvoffload.tiers"), "handle", handle)
    place = tmp_path / "kv"
    place.write_text("in the way")
    with in_directory(place, namespace) as tier:
        attached(tier, 8)
        before = threading.active_count()
        for number in range(8):
            tier.health(reset=True)
            done = run(tier, tier.query([b"%d" % number], PATIENCE_S))
            assert done.status.tolist() == [Status.FAILED]
            medium_of(tier)._logged.clear()  # each is a line
        settle(tier)
        assert handle.call_count >= 8
        assert threading.active_count() == before
        place.unlink()
        tier.health(reset=True)
        doubt(tier)
        run(tier, tier.query(KEYS[:1], PATIENCE_S))
        assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()


def test_a_store_that_raises_what_no_store_may_costs_its_blocks(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_directory(tmp_path, namespace) as tier:
        attached(tier, 8)
        for name in ("call", "chore"):
            monkeypatch.setattr(tier._medium.store, name, Mock(side_effect=ZeroDivisionError))
        before = threading.active_count()
        for _ in range(4):
            tier.health(reset=True)
            jobs = [tier.query(KEYS), tier.put(KEYS, range(8)), tier.get(KEYS, range(8))]
            tier.discard(KEYS)
            assert tier.wait(jobs, PATIENCE_S)
            tier.poll()
        settle(tier)
        assert threading.active_count() == before


# -- before there is a region --------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
@pytest.mark.parametrize("opener", OPENERS)
def test_without_a_region_no_disk_is_waited_for(
    tmp_path: Path,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    opener: Opener,
    hangs: bool,
) -> None:
    """`discard`, `touch` and `forget` neither raise nor wait for a disk that hangs."""
    monkeypatch.setattr("kvoffload.tiers.local.slab.tier.FORGET_S", 0.1)
    with opener(tmp_path, namespace) as tier:
        attached(tier, 8)
        assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
        settle(tier)
    goes_on, waited_for = threading.Event(), []
    tier = opener(tmp_path, namespace)
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            if hangs and not goes_on.wait(PATIENCE_S):
                waited_for.append(threading.current_thread())
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        for name in ("open", "ftruncate", "pwritev", "fsync", "unlink", "stat", "rename", "utime"):
            patch.setattr(os, name, fail)
        tier.discard(KEYS[:4])
        tier.touch(KEYS[4:])
        assert tier.lookup(KEYS[:4]).tolist() == [State.MISS] * 4
        assert tier.forget() is (opener is in_directory)
        assert not (tier.lookup(KEYS) == State.HIT).any()
        tier.close(0.1)
        goes_on.set()
    assert waited_for == []
    tier.close(PATIENCE_S)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slots.tbl.new", "namespace.json.new"])
def test_what_was_killed_while_it_opened_a_slab_leaves_no_file(
    tmp_path: Path, namespace: Namespace, name: str
) -> None:
    """The next one deletes it, with a capacity that needs no new table, too."""

    def opened(num_blocks: int) -> FileTier:
        return FileTier(tmp_path, num_blocks * BLOCK, namespace=namespace)

    with opened(64) as tier:
        attached(tier, 8)
        assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
        folder = tier.folder

    def be_killed() -> None:
        if name.startswith("namespace"):
            (folder / "namespace.json").write_bytes(b"")
        files._write = lambda *_: os.kill(os.getpid(), 9)
        opened(32)

    _, status = os.waitpid(start(be_killed), 0)
    assert os.waitstatus_to_exitcode(status) == -9
    assert (folder / name).exists()
    (folder / "namespace.json").write_text(namespace.json)
    with opened(64) as tier:
        assert tier.num_restored == len(KEYS)
        assert not (folder / name).exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("opener", OPENERS)
def test_what_is_made_is_for_its_user_alone(
    tmp_path: Path, namespace: Namespace, opener: Opener, umask: int
) -> None:
    place = tmp_path / "one" / "two" / "three"
    before = os.umask(umask)
    try:
        with opener(place, namespace) as tier:
            attached(tier, 8)
            assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
            settle(tier)
    finally:
        os.umask(before)
    files = [path for path in tier.folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    made = [tmp_path / "one", tmp_path / "one" / "two", place, tier.folder]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 4


DAEMON = """
import contextlib, json, os, sys
from kvoffload.testing.tiers import run
from kvoffload.tiers import FileTier, Namespace, ObjectTier, Region
from kvoffload.tiers.folder import Folder

def warn():  # as a library does
    for stream in range(3):
        with contextlib.suppress(OSError):
            os.write(stream, b"warning: " * 1000)

for stream in range(3):
    os.close(stream)
place, options = sys.argv[1], {"namespace": Namespace("m", 4096), **json.loads(sys.argv[2])}
for restored in (0, 1, 1):
    if place.startswith("s3:"):
        tier = ObjectTier(place, ack="stored", **options)
    else:
        tier = FileTier(place, 2**20, **options)
        assert tier.num_restored == restored
    warn()
    region = Region.allocate(8, 4096)
    region.array[:4096] = 7
    tier.attach(region)
    run(tier, tier.query([b"any"], 60))
    assert run(tier, tier.put([b"key"], [0], 60)).status.tolist() == [0]
    warn()
    assert run(tier, tier.get([b"key"], [1], 60)).status.tolist() == [0]
    assert region.read(1) == region.read(0)
    assert tier.close(60)
    if restored and not place.startswith("s3:"):
        folder = Folder.at(place)
        assert folder.fd == 0
        del folder
        for stream in range(3):
            with contextlib.suppress(OSError):
                os.fstat(stream)
                raise SystemExit(f"descriptor {stream} was left open")
"""


@pytest.mark.parametrize("kind", ["slab", pytest.param("s3", marks=pytest.mark.servers)])
def test_no_file_or_socket_is_a_standard_stream_of_a_daemon(tmp_path: Path, kind: str) -> None:
    """What a library writes to standard error, where there is none, goes to no file of a tier.

    Folders may have a stream's number, and are closed all the same. The sockets of a client's
    process would be covered by its own streams.
    """
    with contextlib.ExitStack() as running:
        place, options = str(tmp_path), {}
        if kind == "s3":
            pytest.importorskip("obstore", reason="the tier needs the objects extra")
            server = running.enter_context(s3_server())
            make_bucket(server)
            place, options = "s3://blocks/daemon", s3_options(server)
        command = [sys.executable, "-c", DAEMON, place, json.dumps(options)]
        subprocess.run(command, check=True, timeout=PATIENCE_S)


def test_a_process_without_descriptors_is_told_so(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that a file is missing, which would be a miss."""

    def refuse(path: str | Path, *arguments: int, **options: int) -> int:
        if str(path).startswith("namespace.json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *arguments, **options)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TierError, match=r"namespace.json: Too many open files$"):
        in_slab(tmp_path, namespace)
    with in_directory(tmp_path, namespace) as tier:
        attached(tier, 1)
        assert run(tier, tier.get(KEYS[:1], [0])).status.tolist() == [Status.FAILED]
