"""The sweeper, which keeps a shared directory within its capacity, one process at a time.

A sweep lists every block of the namespace, of whatever generation, with its time of change. If they
do not all fit, the oldest are removed until a sixteenth of the capacity is free. Folders of
generations without blocks and abandoned temporary files are removed, too. A block that cannot be
removed is skipped, and another is removed instead.

One process at a time sweeps, by a lock that a stopped process cannot keep forever. The lock is a
file. Its holder has an ``flock`` on it, which ends with the process, and renews its time of change
while it works. A process that is stopped, or whose machine is disconnected, renews nothing: after
`LEASE_S` another process replaces the file and has the lock. When the stopped process resumes, it
finds that its file has been replaced.

Invariants
    Nothing is read before the namespace's JSON was compared, and files are removed only with a
    descriptor of a folder below the namespace's and a name in it. A process that was stopped and
    resumes removes at most one file before it learns that another process sweeps.
    At most one process acts as the holder of the lock for longer than `LEASE_S`. For shorter times
    two can, so the work under the lock must be safe if both do it. Only times from one file server
    are compared, never those of two machines. If the file system has no locks, the file records
    whether it is held.
Cost
    Two passes over the directory and 8 bytes of memory per block; four passes if removals fail that
    were possible in the last sweep.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from kvoffload.tiers.folder import Folder, temporary_name
from kvoffload.tiers.generation import NUMBER_BYTES
from kvoffload.tiers.namespace import is_hex
from kvoffload.tiers.seal import DIGESTED_BYTES

FREE_SHARE = 16
"""A sweep that removes blocks leaves one part in this many of the capacity free."""
TEMPORARY_S = 3600.0
"""Age in seconds at which temporary files and empty folders are removed."""
MAX_SWEPT = 100_000
"""Most swept blocks that wait to be reported; of more, neither events nor counters know."""
MAX_LISTED = 1_000_000
"""Files beyond twice the capacity whose times a sweep keeps; the next sweep continues."""
LOCK = "sweep.lock"
LEASE_S = 60.0
"""Seconds without a renewal after which another process may take the lock."""
RENEWALS = 6
"""Renewals within a lease, if the process is not delayed."""
_HELD, _DONE = b"0", b"1"
_FLAGS = os.O_RDWR | os.O_CREAT


class _EndedError(Exception):
    """The end of a sweep: the tier is being closed, or another process sweeps."""


class Sweeper:
    """A thread that sweeps one namespace's folder from time to time.

    Parameters
    ----------
    open_namespace : callable
        Returns the open folder of the namespace, after the comparison, or None if it is missing;
        raises if it belongs to another namespace.
    max_blocks : int
        Most blocks that are kept.
    period_s : float
        Seconds between two sweeps, by any process.
    say : callable
        Logs a line, at a level.

    Attributes
    ----------
    lease_s : float
        Seconds for which a stopped process prevents others from sweeping.
    """

    lease_s = LEASE_S

    def __init__(
        self,
        open_namespace: Callable[[], Folder | None],
        max_blocks: int,
        period_s: float,
        say: Callable[[str, int], None],
    ) -> None:
        self._open_namespace = open_namespace
        self._max_blocks = max_blocks
        self._period_s = period_s
        self._say = say
        self._stopped = False
        self._early = False
        self._changed = threading.Condition()
        self._written = 0  # blocks that this process wrote since it last swept
        self._swept: list[tuple[int, bytes]] = []
        self._stuck = 0  # old blocks that the last sweep could not remove
        self._left: OSError | None = None  # why something could not be removed in this sweep
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sweep from now on; MemoryError if no thread can be started."""
        thread = threading.Thread(target=self._serve, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError("no thread for a sweeper") from error
        self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End the thread, or leave it if a file system blocks it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def count_written(self) -> None:
        """Count a block that was written; after many, sweep early."""
        with self._changed:
            self._written += 1
            if self._written * FREE_SHARE >= self._max_blocks and not self._early:
                self._early = True
                self._changed.notify_all()

    def take_swept(self) -> list[tuple[int, bytes]]:
        """Return generation and key of blocks that were swept here since the last call."""
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
            except Exception as error:  # noqa: BLE001 # else a stranger's file could end all sweeps
                # The text of an error may have a stranger's file name.
                why = error.strerror if isinstance(error, OSError) else type(error).__name__
                self._say(f"could not sweep: {why}", logging.WARNING)
                with self._changed:  # after a period at the earliest
                    self._early = False
                    self._written = 0

    def sweep(self, *, early: bool = True) -> int | None:
        """Sweep once, unless another process does.

        Parameters
        ----------
        early : bool
            Whether to sweep although a process did within the period.

        Returns
        -------
        int or None
            Number of blocks removed to make room; None if there was no sweep.
        """
        with self._changed:
            self._early = False
            self._written = 0
        folder = self._open_namespace()
        if folder is None:
            return None
        lease = Lease.take(folder, LOCK, 0.0 if early else self._period_s, self.lease_s)
        if lease is None:
            return None
        try:
            removed = self._sweep_blocks(folder, lease)
            self._remove_left(folder, lease)
            lease.release()
        except _EndedError:
            return None
        finally:
            lease.give_up()
            left, self._left = self._left, None
            if left is not None:
                self._say(f"left what it could not remove: {left.strerror}", logging.WARNING)
        return removed

    # -- steps of a sweep --------------------------------------------------------------------

    def _go_on(self, lease: Lease) -> None:
        """End the sweep if the tier is being closed or another process sweeps."""
        if self._stopped or not lease.renew():
            raise _EndedError

    def _sweep_blocks(self, folder: Folder, lease: Lease) -> int:
        """Remove the oldest blocks until the others fit; return their number."""
        removed = 0
        while True:
            known = self._stuck
            times = self._list_times(folder, lease)
            excess = len(times) - self._max_blocks
            if excess <= 0:
                self._stuck = 0
                break
            # Blocks that cannot be removed are among the oldest, so the same number is added.
            excess = min(excess + self._max_blocks // FREE_SHARE + known, len(times) - 1)
            gone, self._stuck = self._remove_oldest(folder, times, excess, lease)
            removed += gone
            if self._stuck <= known:
                break
        return removed

    def _list_times(self, folder: Folder, lease: Lease) -> array[int]:
        """Return the times of change of blocks, and remove abandoned temporary files."""
        times = array("q")
        most = 2 * self._max_blocks + MAX_LISTED
        for _, hh, entry, found in self._entries(folder, lease):
            if entry.name.endswith(".tmp"):
                if found.st_mtime < lease.now - TEMPORARY_S:
                    self._note(hh.remove_tree(entry.name, lambda: self._go_on(lease)))
            elif _is_block(entry, found):
                times.append(_time(found))
                if len(times) == most:
                    break
        return times

    def _remove_oldest(
        self, folder: Folder, times: array[int], count: int, lease: Lease
    ) -> tuple[int, int]:
        """Remove the oldest blocks; return the numbers of removed and of failed ones."""
        known = np.frombuffer(times, np.int64)
        limit = int(np.partition(known, count - 1)[count - 1])
        # Blocks with exactly the limit's time are removed in any order until enough are gone.
        equal = count - int(np.count_nonzero(known < limit))
        removed = stuck = 0
        for number, hh, entry, found in self._entries(folder, lease):
            if not _is_block(entry, found) or _time(found) > limit:
                continue
            if _time(found) == limit:
                if not equal:
                    continue
                equal -= 1
            try:
                hh.unlink(entry.name)
            except OSError as error:
                self._note(error)
                stuck += 1
                continue
            removed += 1
            self._report(number, entry.name)
            if removed + stuck == count:
                break
        return removed, stuck

    def _entries(
        self, folder: Folder, lease: Lease
    ) -> Iterator[tuple[str, Folder, os.DirEntry[str], os.stat_result]]:
        """Yield every file of all generations: the number, the folder, the file and its status.

        Links are not followed.
        """
        for number in self._generations(folder, lease):
            try:
                blocks = folder.below(number)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for index in range(256):
                try:
                    hh = blocks.below(f"{index:02x}")
                    with os.scandir(hh.fd) as entries:
                        for entry in entries:
                            self._go_on(lease)
                            if (found := _stat(entry)) is not None:
                                yield number, hh, entry, found
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:  # such as missing permission
                    self._note(error)

    def _generations(self, folder: Folder, lease: Lease) -> Iterator[str]:
        """Yield the names of the generations' folders."""
        with os.scandir(folder.fd) as entries:
            for entry in entries:
                self._go_on(lease)
                if is_hex(entry.name, NUMBER_BYTES) and entry.is_dir(follow_symlinks=False):
                    yield entry.name

    def _remove_left(self, folder: Folder, lease: Lease) -> None:
        """Remove old temporary files of the namespace, and old folders without blocks."""
        old = lease.now - TEMPORARY_S
        with os.scandir(folder.fd) as entries:
            for entry in entries:
                self._go_on(lease)
                name, found = entry.name, _stat(entry)
                if found is None or found.st_mtime >= old:
                    continue
                is_left = name.endswith(".tmp")
                if is_hex(name, NUMBER_BYTES) and stat.S_ISDIR(found.st_mode):
                    is_left = self._is_empty(folder, name, old)
                if is_left:
                    self._note(folder.remove_tree(name, lambda: self._go_on(lease)))

    def _is_empty(self, folder: Folder, number: str, old: float) -> bool:
        """Return whether a generation has no file, and no folder that has changed of late."""
        try:
            blocks = folder.below(number)
            for name in os.listdir(blocks.fd):
                hh = blocks.below(name)
                if os.fstat(hh.fd).st_mtime >= old or os.listdir(hh.fd):
                    return False
        except OSError:  # something else is there, or it is gone
            return False
        return True

    def _note(self, error: OSError | None) -> None:
        """Keep the first error of a removal."""
        self._left = self._left or error

    def _report(self, number: str, name: str) -> None:
        stem = name.removesuffix(".kv")
        with contextlib.suppress(ValueError):  # a name that is not a key
            key = bytes.fromhex(stem)
            if key.hex() == stem and 0 < len(key) <= DIGESTED_BYTES:
                with self._changed:
                    if len(self._swept) < MAX_SWEPT:
                        self._swept.append((int(number, 16), key))


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:  # it is gone
        return None


def _time(found: os.stat_result) -> int:
    """Return a time of change, nanoseconds, clipped to 64 bits, since a stranger may set any."""
    return min(max(found.st_mtime_ns, -(2**63)), 2**63 - 1)


def _is_block(entry: os.DirEntry[str], found: os.stat_result) -> bool:
    return entry.name.endswith(".kv") and stat.S_ISREG(found.st_mode)


# -- the lock ------------------------------------------------------------------------------------


class Lease:
    """A lock that is held until it is released, given up or lost.

    `take` makes it from the descriptor of the locked file, which the object closes.
    """

    def __init__(self, folder: Folder, name: str, fd: int, lease_s: float) -> None:
        self._folder = folder
        self._name = name
        self._fd = fd
        self._period_s = lease_s / RENEWALS
        self._renewed_at = time.monotonic()

    @classmethod
    def take(
        cls, folder: Folder, name: str, rest_s: float = 0.0, lease_s: float = LEASE_S
    ) -> Lease | None:
        """Take the lock.

        Parameters
        ----------
        folder : Folder
            Folder of the file, which may be missing.
        name : str
            Name of the file.
        rest_s : float
            Seconds after a release during which it cannot be taken.
        lease_s : float
            Seconds without a renewal after which it is taken from its holder.

        Returns
        -------
        Lease or None
            None if another process has it, or had it within `rest_s`.
        """
        renewed_within_s = lease_s
        fd = _open(folder, name)
        if fd is not None:
            free = _lock(fd)
            resting = _rests(fd, rest_s)
            if free and not resting:
                return cls(folder, name, fd, lease_s)._begin()
            if free is None and os.pread(fd, 1, 0) != _HELD:
                renewed_within_s = 0.0  # there are no locks, and the file records that it is free
            os.close(fd)
            if resting:
                return None
        return cls._replace(folder, name, renewed_within_s, lease_s)

    @classmethod
    def _replace(
        cls, folder: Folder, name: str, renewed_within_s: float, lease_s: float
    ) -> Lease | None:
        """Replace a file that has not been renewed with a new one."""
        new = temporary_name(name)
        lease = cls(folder, name, folder.create(new), lease_s)
        try:
            _lock(lease._fd)
            with contextlib.suppress(FileNotFoundError):
                found = folder.stat(name)
                # A time in the future would keep the lock forever.
                is_lock = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
                if is_lock and abs(lease.now - found.st_mtime) < renewed_within_s:
                    lease.give_up()
                    return None
            folder.replace(new, name)
            return lease._begin()
        except BaseException:
            lease.give_up()
            raise
        finally:
            with contextlib.suppress(OSError):  # it is gone if it was renamed
                folder.unlink(new)

    def _begin(self) -> Lease | None:
        """Record that the lock is held; None, and it is given up, if another process has it."""
        try:
            if self.is_mine():
                os.pwrite(self._fd, _HELD, 0)
                os.utime(self._fd)
                return self
        except OSError:
            self.give_up()
            raise
        self.give_up()
        return None

    @property
    def now(self) -> float:
        """The time of the last renewal, by the clock of the file system."""
        return os.fstat(self._fd).st_mtime

    def renew(self) -> bool:
        """Renew the lock if it is due; return False if another process has it."""
        if time.monotonic() - self._renewed_at < self._period_s:
            return True
        try:
            if not self.is_mine():
                return False
            os.utime(self._fd)
        except OSError:  # a file server reports so that the file is gone
            return False
        self._renewed_at = time.monotonic()
        return True

    def release(self) -> None:
        """Release the lock, and record the time in the file."""
        try:
            os.pwrite(self._fd, _DONE, 0)
            os.utime(self._fd)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Release the lock as if it had not been taken."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child also has the descriptor
            os.close(fd)

    def is_mine(self) -> bool:
        """Return whether no other process has taken the lock; I/O."""
        # Opened, since the client may cache a file server's answer about the name for a minute.
        fd = _open(self._folder, self._name, 0)
        if fd is None:
            return False
        try:
            return os.path.sameopenfile(fd, self._fd)
        finally:
            os.close(fd)


def _open(folder: Folder, name: str, flags: int = _FLAGS) -> int | None:
    """Return a descriptor of the file; None if no writable file exists."""
    try:
        fd = folder.open(name, flags)
    except OSError:
        return None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # else it has another name elsewhere
        return fd
    os.close(fd)
    return None


def _lock(fd: int) -> bool | None:
    """Lock a file; return False if another process has locked it, None if there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _rests(fd: int, rest_s: float) -> bool:
    found = os.fstat(fd)
    since = time.time() - found.st_mtime
    return os.pread(fd, 1, 0) == _DONE and 0 <= since < rest_s
