"""The lock of a slab: one tier has it open, of all processes that may."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvoffload.tiers.base import TierInUseError

from .layout import LOCK, OPEN_FLAGS

__all__ = ["lock_folder"]


def lock_folder(folder: Path) -> int:
    """Lock a slab for this process and return the lock's file descriptor.

    Raises
    ------
    TierInUseError
        If someone has it open.
    OSError
        If the lock cannot be opened.
    """
    while True:
        fd = os.open(folder / LOCK, OPEN_FLAGS | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(folder, os.pread(fd, 32, 0)) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), (folder / LOCK).stat()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the folder was removed before it was locked
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _in_use(folder: Path, holder: bytes) -> TierInUseError:
    with contextlib.suppress(ValueError):
        pid = int(holder)
        return TierInUseError(f"{folder} is in use by process {pid}", pid)
    return TierInUseError(f"{folder} is in use")
