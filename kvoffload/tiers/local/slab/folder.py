"""The folder of a slab, and the files of it that stay open.

Whoever may write to the folder could put a link, a pipe or a device in a file's place, or leave a
file that they can change later. So what is not an ordinary file is refused, and for the tier itself
so is what others may have written or may still write. The path *to* the folder is the user's own
choice, links in it included.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvoffload.tiers.base import TierError
from kvoffload.tiers.folder import Folder

__all__ = ["OpenFolder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class OpenFolder(Folder):
    """A folder that is open, and the files of it that are.

    Parameters
    ----------
    path : Path
        The folder; a link in its place is not followed.
    private : bool
        Whether it and its files must belong to the user of this process, be writable by no other
        user and have one name each.

    Attributes
    ----------
    path : Path
        The folder.
    fd : int
        Its descriptor; -1 once it is closed.
    files : dict
        Descriptors of the files that are open, by name; empty once it is closed.

    Raises
    ------
    TierError
        If it is not as it must be.
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: Path, *, private: bool) -> None:
        self.path = path
        self.private = private
        self.files: dict[str, int] = {}
        super().__init__(-1)
        if path.is_symlink():
            raise TierError(f"{path}: is a link, which is not followed")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags)
        try:
            self._check(path, os.fstat(self.fd))
        except BaseException:
            self.close()
            raise

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of an ordinary file.

        Raises
        ------
        TierError
            If it is none, or not as it must be.
        OSError
            If it cannot be opened.
        """
        path = self.path / name
        try:
            fd = super().open(name, flags)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise TierError(f"{path}: is no ordinary file")
            self._check(path, found)
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def keep(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file until `close`, as `open` does; return its descriptor."""
        fd = self.files[name] = self.open(name, flags)
        return fd

    def _check(self, path: Path, found: os.stat_result) -> None:
        if not self.private:
            return
        if found.st_uid != os.geteuid():
            raise TierError(
                f"{path}: belongs to user {found.st_uid}, must belong to that of this process, "
                f"{os.geteuid()}"
            )
        if found.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(found.st_mode)
            raise TierError(f"{path}: others may write to it (mode {mode:04o}), must be their own")
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            raise TierError(f"{path}: has {found.st_nlink} names, must have this one only")

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
