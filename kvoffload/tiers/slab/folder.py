"""The folder of a slab: its files are opened in it, never through a link, and never wait.

Whoever may write to the folder could put a link, a pipe or a device in a file's place, or leave a
file that they can change later. So a folder is opened once, and files in it by its descriptor; what
is not an ordinary file is refused, and for the tier itself so is what others may have written or
may still write. The path *to* the folder is the user's own choice, links in it included.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvoffload.tiers.base import TierError

__all__ = ["Folder"]

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Folder:
    """A folder that is open, and the files of it that are.

    Parameters
    ----------
    path : Path
        The folder; a link in its place is not followed.
    private : bool
        Whether it and its files must belong to the user of this process, be writable by nobody else
        and have one name each.

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
        self.fd = -1
        if path.is_symlink():
            raise TierError(f"{path}: is a link, which is not followed")
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            self._check(path, os.fstat(self.fd))
        except BaseException:
            self.close()
            raise

    def open(self, name: str, flags: int, *, keep: bool = True) -> int:
        """Open a file; return its descriptor, which `close` closes if it is to be kept.

        Raises
        ------
        TierError
            If it is no ordinary file, or not as it must be.
        OSError
            If it cannot be opened.
        """
        path = self.path / name
        try:
            # A pipe that has no other end would wait for one.
            fd = os.open(name, flags | _FLAGS | os.O_NONBLOCK, 0o600, dir_fd=self.fd)
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
        if keep:
            self.files[name] = fd
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

    def make(self, name: str) -> None:
        """Make an empty file.

        Raises
        ------
        OSError
            If there is anything of this name, or a file cannot be made.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        os.close(os.open(name, flags, 0o600, dir_fd=self.fd))

    def read(self, name: str, most: int) -> bytes | None:
        """Return the first bytes of a file, at most so many; None if there is none."""
        try:
            fd = self.open(name, os.O_RDONLY, keep=False)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(most)

    def stat(self, name: str) -> os.stat_result | None:
        """Return what is known about what has a name, not following a link; None for nothing."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Return whether anything has a name."""
        return self.stat(name) is not None

    def rename(self, old: str, new: str) -> None:
        """Give a file another's name; that one is gone."""
        os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        if old in self.files:
            self.close_file(new)
            self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error

    def close_file(self, name: str) -> None:
        """Close a file, if it is open."""
        fd = self.files.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the folder and its files."""
        for name in list(self.files):
            self.close_file(name)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
