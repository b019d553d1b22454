"""Output files, replaced whole or not at all.

A regular file is written under another name in its folder and replaces the old one when it is
complete, with the same mode. A symbolic link to it stays. Anything else is written to directly and
never replaced: a device, a named pipe, a descriptor of the process such as ``/dev/stdout``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from kvoffload._output_file import OutputFile

# click's `open_file(atomic=True)` would not do, even if the library depended on click: it replaces
# the file also when the block raises, replaces devices, pipes and read-only files, creates its
# temporary file beside a link and not beside the target, leaves it behind on a full disk, and its
# errors do not name the file.

_MOST_LINKS = 40  # followed, as on Linux
_DESCRIPTOR = re.compile(
    r"(?:/dev|/proc/(?P<process>\d+)(?:/task/\d+)?)/fd/(?P<descriptor>\d+)", re.ASCII
)
_CLOSED_IN_CHILDREN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED_IN_CHILDREN
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _CLOSED_IN_CHILDREN
_THROUGH = os.O_WRONLY | getattr(os, "O_NOCTTY", 0) | _CLOSED_IN_CHILDREN


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str], *, append: bool = False) -> Iterator[BinaryIO]:
    """Provide a binary stream whose content becomes the file when the block ends.

    If the block raises, a regular file stays as it was, and none is created. Appending is not all
    or nothing. An OSError names the file that cannot be written.
    """
    name = os.fspath(path)
    with _naming(name):
        descriptor = _open_through(name)
        if descriptor is None and append:
            descriptor = os.open(name, _APPEND, 0o666)
    if descriptor is not None:
        with _stream(descriptor, name) as stream:
            yield stream
        return
    with contextlib.ExitStack() as created:
        with _naming(name):
            target = _target(name)
            temporary, descriptor = created.enter_context(_created_beside(target))
            is_replaced = _take_after(target, descriptor)
        with _stream(descriptor, name, durable=is_replaced) as stream:
            yield stream
        with _naming(name):
            temporary.replace(target)


def check_output(path: str | os.PathLike[str], *, append: bool = False) -> None:
    """Check that `open_output` can open a file, and change nothing; an OSError names it."""
    name = os.fspath(path)
    with _naming(name):
        own = own_descriptor(name)
        if own is not None:
            os.fstat(own)
            return
        mode = _mode(name)
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if mode is not None and (append or not stat.S_ISREG(mode)):
            _check_writable(name)  # not opened: the reader of a pipe would see it begin and end
            return
        with _created_beside(_target(name)) as (temporary, descriptor):
            os.close(descriptor)
            temporary.unlink()


def own_descriptor(name: str) -> int | None:
    """Return the number of the process's own descriptor that a path leads to, or None."""
    found = _descriptor(name)
    is_own = found is not None and found["process"] in (None, str(os.getpid()))
    return int(found["descriptor"]) if found is not None and is_own else None


def _descriptor(name: str) -> re.Match[str] | None:
    """Follow links up to a descriptor, such as that of /dev/stdout."""
    path = Path(name)
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(path.parent))
        found = _DESCRIPTOR.fullmatch(str(folder / path.name))
        if found is not None:
            return found
        try:
            path = folder / path.readlink()
        except OSError:
            return None
    return None


def _open_through(name: str) -> int | None:
    """Open a file that must not be replaced; return None for a regular or missing one."""
    own = own_descriptor(name)
    if own is not None:
        return os.dup(own)  # opening it again would overwrite a file
    if _descriptor(name) is not None:
        return os.open(name, _THROUGH | os.O_APPEND)
    mode = _mode(name)
    if mode is None or stat.S_ISREG(mode):
        return None
    return os.open(name, _THROUGH)


def _mode(name: str) -> int | None:
    """Return the mode of the file that a name leads to, None without a file."""
    try:
        return Path(name).stat().st_mode
    except FileNotFoundError:
        return None


def _target(name: str) -> Path:
    """Return the path of the regular file that a name leads to; it need not exist."""
    if name.endswith((os.sep, os.altsep or os.sep)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if _mode(name) is not None:
        _check_writable(name)  # replacing needs only a writable folder
    return Path(os.path.realpath(name))


def _check_writable(name: str) -> None:
    effective = os.access in os.supports_effective_ids
    if not os.access(name, os.W_OK, effective_ids=effective):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _created_beside(target: Path) -> Iterator[tuple[Path, int]]:
    """Create a file in the folder of another; remove it if anything raises from then on."""
    temporary = target.with_name(f".kvoffload-{secrets.token_hex(8)}")
    try:
        try:
            descriptor = os.open(temporary, _NEW, 0o666)
        except PermissionError as error:
            reason = f"its folder must be writable: {error.strerror}"
            raise PermissionError(error.errno, reason) from None
        yield temporary, descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _take_after(target: Path, descriptor: int) -> bool:
    """Give a new file the mode of the one that it replaces, and its owner if allowed.

    Returns whether there is one to replace.
    """
    try:
        before = target.stat()
    except FileNotFoundError:
        return False
    if hasattr(os, "fchown"):  # not on Windows
        for owner, group in ((-1, before.st_gid), (before.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, owner, group)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    return True


@contextlib.contextmanager
def _stream(descriptor: int, name: str, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Provide a stream over a descriptor, which is closed when the block ends."""
    file = OutputFile(descriptor, name)
    stream = io.BufferedWriter(file)
    try:
        yield cast("BinaryIO", stream)
        stream.flush()
        if durable:  # or a power failure could lose both the old content and the new
            with _naming(name):
                os.fsync(descriptor)
    except BaseException:
        file.dropping = True
        with contextlib.suppress(OSError):
            stream.close()
        raise
    with _naming(name):
        stream.close()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Make system errors name the file as the caller does."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = name, None
        raise
