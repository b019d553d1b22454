"""Folders that others can write to, each opened by name in the previous one, never by a link.

The system resolves a path again in every call, so that anyone who can write to one of its folders
may redirect the next call with a link. An open folder stays the same: every operation in it - open,
link, rename, remove - takes its descriptor and the name of one file.

Invariants
    No call follows a link below the folder that was opened first. No call waits for the other end
    of a pipe. The removal of a tree follows no link, does not enter another file system, and has a
    bounded depth.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from kvoffload.errors import describe

from .base import Status
from .region import ALIGNMENT

MAX_DEPTH = 8
"""Levels of folders that are removed below the named one; the tier makes two."""
LAST_STREAM = 2
"""Descriptor of standard error."""
MAX_VIEWS = 1024
"""Most pieces of memory in one call: Linux and macOS accept no more."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})  # a file or link; varies by system
_A_FOLDER = frozenset({errno.EISDIR, errno.EPERM})  # from unlinking a folder: Linux, POSIX
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP})


def check_path(path: object) -> Path:
    """Return the path of a caller's directory; TypeError, ValueError if it is not a path."""
    if not isinstance(path, str | Path) or not str(path):
        raise TypeError(f"path must be the path of a directory, got {describe(path)}")
    if "\0" in str(path):
        raise ValueError(f"path must not have a null character, got {describe(path)}")
    return Path(path)


def make_folders(path: Path, made: list[Path] | None = None) -> None:
    """Make a directory and its missing parents, each accessible only to this user.

    Parameters
    ----------
    path : Path
        The directory; it may exist.
    made : list of Path, optional
        The new directories are added to it, the outermost first, also if this raises.
    """
    missing = [path]
    while not missing[-1].exists() and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if made is not None:
                made.append(folder)


class Folder:
    """An open folder, which is closed when the last reference to it is dropped.

    Notes
    -----
    A name is that of a single file, without a slash. Every call raises OSError if the system
    refuses it. Thread-safety: any thread; the threads that work in a folder keep it open.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                close(fd)

    @classmethod
    def at(cls, path: str | Path) -> Folder:
        """Open a folder by its path, following links: the caller chose the path."""
        return cls(os.open(path, _FOLDER_FLAGS))

    def below(self, name: str) -> Folder:
        """Open a folder in this one; NotADirectoryError if it is something else, such as a link."""
        try:
            return Folder(os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from None
            raise

    def make(self, name: str, mode: int = 0o700) -> Folder:
        """Open a folder in this one, and make it if needed; NotADirectoryError as in `below`."""
        try:
            return self.below(name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=self.fd)
            return self.below(name)

    def make_in_place(self, name: str) -> Folder:
        """Open a folder in this one; anything else with its name is replaced."""
        try:
            return self.make(name)
        except NotADirectoryError:
            self.take_away(name)
            return self.make(name)

    # -- single files ------------------------------------------------------------------------

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a file, or of a link itself."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def open(self, name: str, flags: int = _READ_FLAGS) -> int:
        """Return a descriptor of a file, without following a link or waiting for a pipe."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return above_streams(os.open(name, flags, 0o600, dir_fd=self.fd))

    def create(self, name: str) -> int:
        """Return a descriptor to write to a new file; FileExistsError if the name is taken."""
        return above_streams(os.open(name, _NEW_FLAGS, 0o600, dir_fd=self.fd))

    def read(self, name: str, most: int) -> bytes | None:
        """Return a small file's bytes; `most` + 1 bytes mean that it is too large.

        Returns
        -------
        bytes or None
            None if the name is free; no bytes if it is not a plain file.
        """
        try:
            fd = self.open(name)
        except FileNotFoundError:
            return None
        except OSError:
            with contextlib.suppress(FileNotFoundError):  # there may be no descriptor to find that
                if not stat.S_ISREG(self.stat(name).st_mode):
                    return b""
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return b""
            found = b""
            while len(found) <= most and (piece := os.read(fd, most + 1 - len(found))):
                found += piece
            return found
        finally:
            os.close(fd)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably, replacing anything with its name."""
        temporary = temporary_name(name)
        fd = self.create(temporary)
        try:
            try:
                if os.write(fd, data) != len(data):
                    raise OSError(errno.EIO, "only a part was written")
                os.fsync(fd)
            finally:
                os.close(fd)
            self.replace(temporary, name)
        finally:
            with contextlib.suppress(OSError):  # it is gone if it was renamed
                self.unlink(temporary)
        os.fsync(self.fd)

    def link(self, temporary: str, name: str) -> None:
        """Give a complete file its name and remove the temporary one; or FileExistsError."""
        fd = self.fd
        try:
            try:
                os.link(temporary, name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    # Bytes are equal, so the last writer's may stay.
                    os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
                    return
                # A server's answer may have been lost although the link exists.
                if isinstance(error, FileExistsError) or self.stat(temporary).st_nlink != 2:
                    raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=fd)

    def replace(self, old: str, new: str) -> None:
        """Rename a file, replacing anything with the new name."""
        try:
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except IsADirectoryError:
            self.take_away(new)
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    # -- removal -----------------------------------------------------------------------------

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def take_away(self, name: str) -> None:
        """Free a name: remove its file, or rename its folder to a temporary name."""
        try:
            self.unlink(name)
        except OSError as error:
            if error.errno not in _A_FOLDER or not stat.S_ISDIR(self.stat(name).st_mode):
                raise
            os.rename(name, temporary_name(""), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove_tree(
        self, name: str, each: Callable[[], None] = lambda: None, depth: int = MAX_DEPTH
    ) -> OSError | None:
        """Remove a folder and its contents, as far as possible.

        Links are removed, not followed. Folders on another file system stay, and so do those nested
        deeper than the tier nests folders.

        Parameters
        ----------
        name : str
            The folder's, or a file's.
        each : callable
            Called before each removal; an exception ends the removal.
        depth : int
            Most levels below it.

        Returns
        -------
        OSError or None
            The first reason why something is left; None if nothing is, except what others have
            added meanwhile.
        """
        each()
        try:
            folder = self.below(name)
        except NotADirectoryError:
            return self._why_not(os.unlink, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        if os.fstat(folder.fd).st_dev != os.fstat(self.fd).st_dev:
            return OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
        if depth == 0:
            return OSError(errno.ELOOP, "Nested too deep", name)
        first = None
        try:
            with os.scandir(folder.fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left = folder.remove_tree(entry.name, each, depth - 1)
                    else:
                        each()
                        left = folder._why_not(os.unlink, entry.name)
                    first = first or left
        except OSError as error:
            first = first or error
        return first or self._why_not(os.rmdir, name)

    def _why_not(self, remove: Callable[..., None], name: str) -> OSError | None:
        try:
            remove(name, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return None if error.errno == errno.ENOTEMPTY else error
        return None


def temporary_name(name: str) -> str:
    """Return an unpredictable name that begins with `name`; a sweep removes old ones."""
    return f"{name}.{os.urandom(8).hex()}.tmp"


def above_streams(fd: int) -> int:
    """Return a descriptor of the same file, above those of the standard streams.

    In a daemon whose standard streams are closed, the next open files get the descriptors 0 to 2. A
    child process has other files there, and a library that writes to standard error writes to the
    file with descriptor 2.

    A lower descriptor is closed, also if this raises. Children inherit neither.
    """
    if fd > LAST_STREAM:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LAST_STREAM + 1)
    finally:
        os.close(fd)


# -- bytes of files ------------------------------------------------------------------------------


def status_of(error: OSError) -> Status:
    """Return the status of a block after an error of the operating system."""
    return Status.FULL if error.errno in _NO_SPACE else Status.FAILED


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write views at an offset, continuing after short calls; return the bytes moved.

    Fewer are moved only at the end of a file.
    """
    done = 0
    rest = list(views)
    while rest:
        moved = call(fd, rest[:MAX_VIEWS], offset + done)
        done += moved
        if moved == 0 or (call is os.preadv and moved % ALIGNMENT):
            break  # the file ends here
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if moved:
            rest[0] = rest[0][moved:]
    return done
