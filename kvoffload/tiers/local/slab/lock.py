"""The lock of a slab: one tier has it open, of all processes that may.

The lock is one of ``flock``, which belongs to what was opened, not to a process: a forked child has
it too. Who closes a folder unlocks it, for all of them. For a holder that is killed, a child closes
every folder that its parent had open, at any stage of its life, as the first thing that it does;
and a folder whose lock may be open on both sides of a fork without the child's knowing it is opened
once more.

Those who only look take the lock shared, for a moment or to read all blocks. Who wants it alone
waits for them a little, but not for another who has it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from kvoffload.tiers.base import TierInUseError
from kvoffload.tiers.folder import make_folders

from .folder import OpenFolder
from .layout import LOCK

__all__ = ["LockedFolder", "holder_of", "lock_shared"]

READERS_S = 2.0
"""Seconds that `LockedFolder` waits for those who only look."""


class LockedFolder(OpenFolder):
    """A folder that this object alone has open; it is made if there is none.

    Raises
    ------
    TierInUseError
        If someone has it open.
    TierError
        If it, or the lock, is not as it must be.
    OSError
        If it, or the lock, cannot be opened.
    """

    def __init__(self, path: Path, *, private: bool) -> None:
        self._pid = os.getpid()
        until = time.monotonic() + READERS_S
        while True:
            fork = _last_fork
            try:
                super().__init__(path, private=private)
                _HELD.add(self)
                if self._lock(until, fork):
                    return
            except FileNotFoundError:
                pass  # the folder was removed meanwhile
            except BaseException:
                self.close()
                raise
            self.close()
            make_folders(path)

    def _lock(self, until: float, fork: object) -> bool:
        """Take the lock; False if it has to be tried again from the start."""
        fd = self.keep(LOCK, os.O_RDWR | os.O_CREAT)
        if _forking or fork is not _last_fork:
            time.sleep(0.001)
            return False  # a child may share the file, and does not know of it
        _take(fd, self.path, until)
        if not os.path.samestat(os.fstat(fd), self.stat(LOCK)):
            return False  # the lock was removed before it was taken
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return True

    def close(self) -> None:
        """Close the folder and its files, and let go of the lock, in forked children too."""
        lock = self.files.get(LOCK, -1)
        if lock >= 0 and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        super().close()
        _HELD.discard(self)


def _take(fd: int, path: Path, until: float) -> None:
    """Lock a file for us alone."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path, _pid_in(fd)) from None
        fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() > until:
            raise TierInUseError(f"{path} is in use: its blocks are being verified")
        time.sleep((1 + secrets.randbelow(5)) / 1000)  # two who try do not keep in step


def lock_shared(folder: OpenFolder) -> None:
    """Keep other processes from opening a folder until it is closed; nothing is written.

    Raises
    ------
    TierInUseError
        If someone has it open.
    OSError
        If there is a lock that cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = folder.keep(LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder.path, _pid_in(fd)) from None


def holder_of(folder: OpenFolder) -> int | None:
    """Return the process that has a folder open, 0 if it is not known which; None for none."""
    try:
        fd = folder.open(LOCK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd) or 0
    finally:
        os.close(fd)
    return None


def _pid_in(fd: int) -> int | None:
    with contextlib.suppress(ValueError):
        return int(os.pread(fd, 32, 0))
    return None


def _in_use(path: Path, pid: int | None) -> TierInUseError:
    who = "" if pid is None else f" by process {pid}"
    return TierInUseError(f"{path} is in use{who}", pid)


# -- forked children -----------------------------------------------------------------------------

_HELD: set[LockedFolder] = set()
_forking: list[None] = []  # one for each fork under way
_last_fork: object = None


def _before_fork() -> None:
    global _last_fork  # noqa: PLW0603
    _forking.append(None)
    _last_fork = object()


def _after_fork_in_parent() -> None:
    global _last_fork  # noqa: PLW0603
    _last_fork = object()
    _forking.pop()


def _after_fork_in_child() -> None:
    _forking.clear()
    for folder in list(_HELD):
        folder.close()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
