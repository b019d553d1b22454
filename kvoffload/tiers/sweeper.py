"""Who keeps a shared directory within its capacity: one process at a time, by a lock.

A sweep lists every block of the present epoch with its time of change. If there are more than fit,
the oldest are removed until a sixteenth of the capacity is free. Folders of other epochs go too,
and files that a writer left behind.

Two passes over the directory and 8 bytes of memory per block; nothing is kept from sweep to sweep.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .namespace import FINGERPRINT_BYTES

__all__ = ["FREE_SHARE", "Sweeper"]

FREE_SHARE = 16
"""A sweep that removes blocks leaves this part of the capacity free."""
TEMPORARY_S = 3600.0
"""Files that are being written are removed when they are so old."""
MAX_SWEPT = 100_000
"""Keys of swept blocks that wait to be reported at most; of others only the number is known."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_EPOCH_CHARACTERS = FINGERPRINT_BYTES  # 8 bytes in hex


class Sweeper:
    """A thread that sweeps one namespace's folder from time to time.

    Parameters
    ----------
    folder : Path
        Folder of the namespace.
    read_epoch : callable
        Returns the directory's present epoch, None where it has none.
    max_blocks : int
        Blocks that are kept at most.
    period_s : float
        Seconds between two sweeps, of whichever process.
    say : callable
        Logs a line.
    """

    def __init__(
        self,
        folder: Path,
        read_epoch: Callable[[], int | None],
        max_blocks: int,
        period_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._read_epoch = read_epoch
        self._max_blocks = max_blocks
        self._period_s = period_s
        self._say = say
        self._stopped = False
        self._early = False
        self._changed = threading.Condition()
        self._written = 0  # blocks that this process wrote since it last swept
        self._swept: list[bytes] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sweep from now on."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, or leave it where a file system holds it up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def count_written(self) -> None:
        """Take note of a block that was written; after many, sweep early."""
        with self._changed:
            self._written += 1
            if self._written * FREE_SHARE >= self._max_blocks and not self._early:
                self._early = True
                self._changed.notify_all()

    def take_swept(self) -> list[bytes]:
        """Return the keys of blocks that sweeps of this process removed since the last call."""
        if not self._swept:
            return []
        with self._changed:
            swept, self._swept = self._swept, []
        return swept

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._early and not self._stopped:
                    self._changed.wait(self._period_s)
                if self._stopped:
                    return
                early = self._early
            try:
                self.sweep(early=early)
            except OSError as error:
                self._say(f"could not sweep: {error.strerror}")
                with self._changed:  # no sooner than after a period
                    self._early = False
                    self._written = 0

    def sweep(self, *, early: bool = True) -> int | None:
        """Sweep once, unless another process does.

        Parameters
        ----------
        early : bool
            Whether to sweep although someone did within the period.

        Returns
        -------
        int or None
            Blocks that were removed to make room; None where nothing was swept.

        Raises
        ------
        OSError
            If the directory cannot be read or locked.
        """
        with self._changed:
            self._early = False
            self._written = 0
        epoch = self._read_epoch()
        if epoch is None:
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._folder / "sweep.lock", flags, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            since = time.time() - os.fstat(fd).st_mtime
            fresh = os.fstat(fd).st_size > 0 and 0 <= since < self._period_s
            if fresh and not early:
                return None
            removed = self._sweep_blocks(self._folder / f"{epoch:016x}")
            self._remove_forgotten()
            os.pwrite(fd, b"1", 0)  # a file without a byte has just been made
            os.utime(fd)
            return removed
        finally:
            os.close(fd)

    # -- what a sweep does -------------------------------------------------------------------

    def _sweep_blocks(self, folder: Path) -> int:
        times = array("q")
        oldest_temporary = time.time() - TEMPORARY_S
        for fd, entry in self._entries(folder):
            found = _stat(entry)
            if found is None:
                continue
            if entry.name.endswith(".kv"):
                times.append(found.st_mtime_ns)
            elif entry.name.endswith(".tmp") and found.st_mtime < oldest_temporary:
                _unlink(entry.name, fd)
        excess = len(times) - self._max_blocks
        if excess <= 0:
            return 0
        excess += self._max_blocks // FREE_SHARE
        excess = min(excess, len(times) - 1)
        limit = int(np.partition(np.frombuffer(times, np.int64), excess - 1)[excess - 1])
        # Those of the limit's own time are removed as they come, until there are enough.
        equal = excess - int(np.count_nonzero(np.frombuffer(times, np.int64) < limit))
        removed = 0
        for fd, entry in self._entries(folder):
            found = _stat(entry)
            if found is None or not entry.name.endswith(".kv") or found.st_mtime_ns > limit:
                continue
            if found.st_mtime_ns == limit:
                if not equal:
                    continue
                equal -= 1
            _unlink(entry.name, fd)
            removed += 1
            self._report(entry.name)
        return removed

    def _entries(self, folder: Path) -> Iterator[tuple[int, os.DirEntry[str]]]:
        """Give every file of an epoch, and a descriptor of its folder; links are not followed."""
        with contextlib.suppress(FileNotFoundError), _opened(folder) as epoch_fd:
            for number in range(256):
                try:
                    fd = os.open(f"{number:02x}", _FOLDER_FLAGS, dir_fd=epoch_fd)
                except OSError as error:
                    if error.errno in _NO_FOLDER:
                        continue
                    raise
                try:
                    with os.scandir(fd) as entries:
                        for entry in entries:
                            if self._stopped:
                                return
                            yield fd, entry
                finally:
                    os.close(fd)

    def _remove_forgotten(self) -> None:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            epoch = self._read_epoch()  # again: someone may have forgotten since
            is_epoch = len(name) == _EPOCH_CHARACTERS and not set(name) - set("0123456789abcdef")
            if is_epoch and epoch is not None and name != f"{epoch:016x}":
                shutil.rmtree(self._folder / name, ignore_errors=True)
        oldest_temporary = time.time() - TEMPORARY_S
        for path in self._folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < oldest_temporary:
                    path.unlink()

    def _report(self, name: str) -> None:
        with contextlib.suppress(ValueError), self._changed:  # a name that is no key
            if len(self._swept) < MAX_SWEPT:
                self._swept.append(bytes.fromhex(name.removesuffix(".kv")))


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:  # it is gone
        return None


def _unlink(name: str, folder_fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder_fd)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, _FOLDER_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)
