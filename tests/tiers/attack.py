"""Parts of the attacks: numbers of rounds, children to kill, file systems to cut off.

Without ``KVOFFLOAD_TEST_BUDGET`` they make a twentieth of the rounds that the documentation states;
``KVOFFLOAD_TEST_BUDGET=20`` makes all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import FileTier, Namespace, Region, Status, Tier, TierInUseError
from kvoffload.tiers.engine.tier import ComposedTier
from tests.conftest import read_budget
from tests.tiers.inside import attached, let_probe, set_clock, settle

STATED_BUDGET = 20
BLOCK_BYTES = 16_384
NAMESPACE = Namespace("attacked", BLOCK_BYTES)


def rounds(stated: int) -> int:
    """Return how many rounds to make of those that are stated, 2 at least."""
    return max(2, min(stated, round(stated * read_budget() / STATED_BUDGET)))


def report(what: str) -> None:
    """Print what an attack did, for those who look (``pytest -rP``)."""
    print(f"attack: {what}")


class Universe:
    """Keys, and the bytes of each."""

    def __init__(self, count: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.keys = [b"key-%032d" % number for number in range(count)]
        self.data = {key: block_bytes_of(key, block_bytes) for key in self.keys}

    def put(self, tier: Tier, region: Region, keys: list[bytes] | None = None) -> np.ndarray:
        """Put keys, as many at once as the region has blocks, and wait; return the statuses."""
        keys = self.keys if keys is None else keys
        statuses = []
        for start in range(0, len(keys), region.num_blocks):
            batch = keys[start : start + region.num_blocks]
            for block_id, key in enumerate(batch):
                region.write(block_id, self.data[key])
            statuses.append(run(tier, tier.put(batch, range(len(batch)))).status)
            settle(tier)
            tier.poll()
        return np.concatenate(statuses)

    def check(
        self, tier: Tier, region: Region, keys: list[bytes] | None = None, reset_every: int = 0
    ) -> dict[bytes, Status]:
        """Get keys, batch by batch; compare every byte of what is OK; return the statuses.

        Reads that corrupt blocks stop are allowed again after each `reset_every` keys.
        """
        found = {}
        keys = self.keys if keys is None else keys
        step = reset_every or region.num_blocks
        for start in range(0, len(keys), step):
            batch = keys[start : start + step]
            region.array[:] = 0xA5
            done = run(tier, tier.get(batch, range(len(batch))))
            for block_id, (key, status) in enumerate(zip(batch, done.status.tolist(), strict=True)):
                found[key] = Status(status)
                if status == Status.OK:
                    assert region.read(block_id) == self.data[key], f"WRONG BYTES under {key!r}"
            if reset_every:
                tier.health(reset=True)
        return found


def start(work: Callable[[], None]) -> int:
    """Run a function in a forked child, which ends with it; return the child's number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def kill(child: int) -> None:
    """End a child as nothing can prevent."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself: {os.waitstatus_to_exitcode(status)}"


def open_slab(path: Path, num_blocks: int, **options) -> tuple[FileTier, Region]:
    """Open a slab and give it a region of 32 blocks."""
    tier = FileTier(path, num_blocks * BLOCK_BYTES, namespace=NAMESPACE, **options)
    return tier, attached(tier, 32)


def open_when_free(path: Path, num_blocks: int, **options) -> tuple[FileTier, Region]:
    """Open a slab when nobody has its lock any longer, such as a child of who was killed."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return open_slab(path, num_blocks, **options)
        except TierInUseError:
            assert time.monotonic() < until
            time.sleep(0.01)


def stop_clock(tier: ComposedTier) -> None:
    """Let no time pass for the breakers: open ones stay open, however slow the machine."""
    set_clock(tier, lambda: 0.0)


def start_clock(tier: ComposedTier) -> None:
    """Let time pass again."""
    set_clock(tier, time.monotonic)
    let_probe(tier)


# -- file systems --------------------------------------------------------------------------------


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")


def need(*commands: str) -> None:
    """Skip a test where root, or a command, is missing."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")


def make_image(image: Path, megabytes: int) -> None:
    """Make an ext4 file system in a file."""
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """Mount the file system in a file, through a loop device."""
    folder.mkdir(exist_ok=True)
    try:
        _run("mount", "-o", "loop", image, folder)
    except OSError as error:
        if "permission denied" in str(error).lower() or "failed to setup loop" in str(error):
            pytest.skip(f"loop devices cannot be mounted here: {error}")
        raise
    try:
        yield folder
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                _run("umount", folder)
                break
            time.sleep(0.05)
        else:
            _run("umount", "-l", folder)


@contextlib.contextmanager
def new_disk(path: Path, megabytes: int, *commands: str) -> Iterator[Path]:
    """Mount a new file system, in a file in a folder; skip a test where a command is missing."""
    need("mkfs.ext4", *commands)
    make_image(path / "disk.img", megabytes)
    with mounted(path / "disk.img", path / "disk") as folder:
        yield folder


@contextlib.contextmanager
def new_fuse_disk(path: Path, megabytes: int) -> Iterator[tuple[Path, int]]:
    """Mount a new file system that a process serves; give the folder and the process."""
    need("mkfs.ext4", "fuse2fs")
    image, folder = path / "disk.img", path / "disk"
    make_image(image, megabytes)
    folder.mkdir(exist_ok=True)
    server = subprocess.Popen(
        ["fuse2fs", "-f", str(image), str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            if os.path.ismount(folder):
                break
            if server.poll() is not None:
                pytest.skip("fuse2fs cannot mount here")
            time.sleep(0.02)
        yield folder, server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            _run("umount", folder)
        server.terminate()
        server.wait(300)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Let every write to a file system hang."""
    _run("fsfreeze", "--freeze", folder)
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", folder)
