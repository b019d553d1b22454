"""The folder of a slab: its lock and its open files.

Anyone who may write to the folder could replace a file with a link, a pipe or a device. So anything
but an ordinary file is refused, and one that is written must have this name only. The path *to* the
folder is the user's own choice, including links in it.

Only one tier in all processes has a slab open. Its lock is that of ``flock``, which belongs to the
open file description, not to a process: a forked child has it too. Closing a folder unlocks it for
all of them. In case the holder is killed, a child first closes every folder that its parent had
open, at any stage of opening; and a folder whose lock a fork may have copied without the child
knowing is opened once more.

Readers share the lock, for a moment or to read all blocks. A tier waits briefly for readers, but
not for another tier.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from pathlib import Path

from kvoffload.tiers.base import Closing, TierError, TierInUseError
from kvoffload.tiers.folder import Folder, make_folders

from .layout import LOCK

READERS_S = 2.0
"""Seconds that `LockedFolder` waits for readers."""


class OpenFolder(Folder, Closing):
    """An open folder and its open files.

    Parameters
    ----------
    path : Path
        The folder; a link with its name is not followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, int] = {}  # open descriptors, by name
        super().__init__(-1)  # the descriptor while it is closed
        if path.is_symlink():
            raise TierError(f"{path}: is a link, which is not followed")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of an ordinary file; TierError if it is refused."""
        path = self.path / name
        try:
            fd = super().open(name, flags)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise TierError(f"{path}: is no ordinary file")
            if flags & os.O_RDWR and found.st_nlink > 1:
                raise TierError(f"{path}: has {found.st_nlink} names, must have this one only")
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def keep(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file until `close`, as `open` does; return its descriptor."""
        fd = self.files[name] = self.open(name, flags)
        return fd

    def has(self, name: str) -> bool:
        """Return whether anything has a name, a link included."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Close the folder and its files."""
        while self.files:
            os.close(self.files.popitem()[1])
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# -- the lock -------------------------------------------------------------------------------------


class LockedFolder(OpenFolder):
    """A folder that only this object has open, made if needed; TierInUseError if another has it."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        until = time.monotonic() + READERS_S
        while True:
            fork = _last_fork
            try:
                super().__init__(path)
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
        """Take the lock; False if the caller must start over."""
        fd = self.keep(LOCK, os.O_RDWR | os.O_CREAT)
        if _forking or fork is not _last_fork:
            time.sleep(0.001)
            return False  # a child may share the file without knowing it
        _take(fd, self.path, until)
        if not os.path.samestat(os.fstat(fd), self.stat(LOCK)):
            return False  # the lock was removed before it was taken
        with contextlib.suppress(OSError):  # of a full disk: then the lock names no process
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return True

    def close(self) -> None:
        """Close the folder and its files, and release the lock, also in forked children."""
        lock = self.files.get(LOCK, -1)
        if lock >= 0 and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        super().close()
        _HELD.discard(self)


def _take(fd: int, path: Path, until: float) -> None:
    """Lock a file exclusively."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        _share(fd, path)
        fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() > until:
            raise TierInUseError(f"{path} is in use: its blocks are being verified")
        time.sleep((1 + secrets.randbelow(5)) / 1000)  # so that two tries do not stay in step


def lock_shared(folder: OpenFolder) -> None:
    """Keep other processes from opening a folder until it is closed; nothing is written.

    Raises TierInUseError if one has it open.
    """
    with contextlib.suppress(FileNotFoundError):
        _share(folder.keep(LOCK), folder.path)


def holder_of(folder: OpenFolder) -> int | None:
    """Return the process that has a folder open, 0 if it is unknown; None if no process has."""
    try:
        fd = folder.open(LOCK)
    except FileNotFoundError:
        return None
    try:
        _share(fd, folder.path)
    except TierInUseError as error:
        return error.pid or 0
    finally:
        os.close(fd)
    return None


def _share(fd: int, path: Path) -> None:
    """Lock a file for reading; TierInUseError if a process has it locked exclusively."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = None
        with contextlib.suppress(ValueError):
            pid = int(os.pread(fd, 32, 0))
        who = "" if pid is None else f" by process {pid}"
        raise TierInUseError(f"{path} is in use{who}", pid) from None


# -- forked children -----------------------------------------------------------------------------

_HELD: set[LockedFolder] = set()
_forking: list[None] = []  # one per fork under way
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
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
