"""A lock in a shared folder that a stopped process cannot keep for ever.

The lock is a file. Who has it holds ``flock`` on it, which ends with the process, and renews its
time of change as long as it works. A process that is stopped, or whose machine is cut off, renews
nothing: after `LEASE_S` another one puts a new file in the place of the old one, and has the lock.
The one that was stopped finds, when it goes on, that its file is not in its place any more.

Invariants
    At most one process believes for longer than `LEASE_S` that it has the lock. For shorter times
    two can, so that what they do must do no harm when both do it. Times are compared that one file
    server gave, not those of two machines. Where the file system has no locks, the file says
    whether it is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time

from kvoffload.tiers.folder import Folder, temporary_name

__all__ = ["LEASE_S", "Lease"]

LEASE_S = 60.0
"""Seconds without a renewal after which another process may take the lock."""
RENEWALS = 6
"""Renewals within a lease, if nothing holds the process up."""
_HELD, _DONE = b"0", b"1"
_FLAGS = os.O_RDWR | os.O_CREAT


class Lease:
    """A lock that is held until it is released, given up or lost.

    `take` makes it, of the descriptor of the file, which is locked; the object closes it.
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
            Where the file is, or is to be.
        name : str
            Name of the file.
        rest_s : float
            Seconds after a release during which it cannot be taken.
        lease_s : float
            Seconds without a renewal after which it is taken from who has it.

        Returns
        -------
        Lease or None
            None where another process has it, or had it within `rest_s`.
        """
        renewed_within_s = lease_s
        fd = _open(folder, name)
        if fd is not None:
            free = _lock(fd)
            resting = _rests(fd, rest_s)
            if free and not resting:
                return cls._begin(folder, name, fd, lease_s)
            if free is None and os.pread(fd, 1, 0) != _HELD:
                renewed_within_s = 0.0  # there are no locks, and the file says that it is free
            os.close(fd)
            if resting:
                return None
        return cls._replace(folder, name, renewed_within_s, lease_s)

    @classmethod
    def _replace(
        cls, folder: Folder, name: str, renewed_within_s: float, lease_s: float
    ) -> Lease | None:
        """Put a new file in the place of one that has not been renewed."""
        new = temporary_name(name)
        fd = folder.create(new)
        try:
            _lock(fd)
            with contextlib.suppress(FileNotFoundError):
                found = folder.stat(name)
                age = os.fstat(fd).st_mtime - found.st_mtime
                # A time that is yet to come would keep the lock for ever.
                is_lock = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
                if is_lock and abs(age) < renewed_within_s:
                    os.close(fd)
                    fd = -1
                    return None
            folder.replace(new, name)
            kept, fd = fd, -1
            return cls._begin(folder, name, kept, lease_s)
        finally:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):  # renamed, it is gone
                folder.unlink(new)

    @classmethod
    def _begin(cls, folder: Folder, name: str, fd: int, lease_s: float) -> Lease | None:
        lease = cls(folder, name, fd, lease_s)
        try:
            if lease.is_mine():
                os.pwrite(fd, _HELD, 0)
                os.utime(fd)
                return lease
        except OSError:
            lease.give_up()
            raise
        lease.give_up()
        return None

    @property
    def now(self) -> float:
        """The time of the last renewal by the clock that gives files their times."""
        return os.fstat(self._fd).st_mtime

    def renew(self) -> bool:
        """Renew the lock, if it is time to; return False where another process has it."""
        if time.monotonic() - self._renewed_at < self._period_s:
            return True
        try:
            if not self.is_mine():
                return False
            os.utime(self._fd)
        except OSError:  # the file is gone, as a file server says it
            return False
        self._renewed_at = time.monotonic()
        return True

    def check(self) -> None:
        """Raise TimeoutError where another process has taken the lock; I/O."""
        if not self.is_mine():
            raise TimeoutError

    def release(self) -> None:
        """Release the lock, and record the time in the file."""
        try:
            os.pwrite(self._fd, _DONE, 0)
            os.utime(self._fd)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Give the lock back as if it had not been taken."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child has the descriptor, too
            os.close(fd)

    def is_mine(self) -> bool:
        """Return whether no other process has taken the lock; I/O."""
        # Opened, since what a file server said about the name may be believed for a minute.
        fd = _open(self._folder, self._name, 0)
        if fd is None:
            return False
        try:
            return os.path.sameopenfile(fd, self._fd)
        finally:
            os.close(fd)


def _open(folder: Folder, name: str, flags: int = _FLAGS) -> int | None:
    """Return a descriptor of the file; None where there is none that may be written to."""
    try:
        fd = folder.open(name, flags)
    except OSError:
        return None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # or it has another name elsewhere
        return fd
    os.close(fd)
    return None


def _lock(fd: int) -> bool | None:
    """Lock a file; return False where another process has, None where there are no locks."""
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
