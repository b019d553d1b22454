"""A lock in a shared folder that a stopped process cannot keep forever.

The lock is a file. Its holder has an ``flock`` on it, which ends with the process, and renews its
time of change while it works. A process that is stopped, or whose machine is disconnected, renews
nothing: after `LEASE_S` another process replaces the file and has the lock. When the stopped
process resumes, it finds that its file has been replaced.

Invariants
    At most one process acts as the holder for longer than `LEASE_S`. For shorter times two can, so
    the work under the lock must be safe if both do it. Only times from one file server are
    compared, never those of two machines. If the file system has no locks, the file records whether
    it is held.
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
"""Renewals within a lease, if the process is not delayed."""
_HELD, _DONE = b"0", b"1"
_FLAGS = os.O_RDWR | os.O_CREAT


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
                return cls._begin(folder, name, fd, lease_s)
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
        fd = folder.create(new)
        try:
            _lock(fd)
            with contextlib.suppress(FileNotFoundError):
                found = folder.stat(name)
                age = os.fstat(fd).st_mtime - found.st_mtime
                # A time in the future would keep the lock forever.
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
            with contextlib.suppress(OSError):  # it is gone if it was renamed
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
