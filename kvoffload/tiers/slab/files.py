"""The files of a slab: opened, laid out, read and given back.

Everything that is read may have been written by a stranger or torn by a power cut: no size is
believed that the file does not have, no memory is taken for more than the file holds, and what is
not right is as if it were not there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import TierError, TierSpaceError
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.region import round_up
from kvoffload.tiers.seal import SEAL_BYTES

from .layout import (
    BLOCKS,
    HEADER_BYTES,
    LOCK,
    NAMESPACE,
    OPEN_FLAGS,
    STAMP_BYTES,
    TABLE,
    Header,
    record_offset,
)
from .lock import lock_folder

__all__ = [
    "SlabFiles",
    "check_space",
    "new_epoch",
    "open_direct",
    "read_header",
    "read_seals",
    "read_table",
]

_LARGEST_JSON = 2**20
SEALS_AT_ONCE = 2**12
"""Seals that `read_seals` reads at once: 256 KiB."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def new_epoch() -> int:
    """Return an epoch that no slab ever had."""
    return int.from_bytes(os.urandom(8), "little")


def read_header(fd: int) -> Header | None:
    """Read the header of a table; None if there is none that can be right."""
    return Header.unpack(os.pread(fd, HEADER_BYTES, 0))


def read_seals(fd: int, header: Header) -> Iterator[tuple[int, memoryview]]:
    """Yield the seals of a table piece by piece, each with its first slot.

    A file may have a great size that takes nothing on the disk, so no more is held at once.
    """
    for slot in range(0, header.num_slots, SEALS_AT_ONCE):
        count = min(SEALS_AT_ONCE, header.num_slots - slot)
        records = memoryview(_read(fd, count * SEAL_BYTES, record_offset(slot)))
        found = len(records) // SEAL_BYTES
        if found:
            yield slot, records[: found * SEAL_BYTES]
        if found < count:
            return


def read_table(fd: int, most: int) -> tuple[Header | None, memoryview, npt.NDArray[np.int64]]:
    """Read what a table holds of the first slots.

    Parameters
    ----------
    fd : int
        The table.
    most : int
        Number of slots that are read at most.

    Returns
    -------
    header : Header or None
        None if there is none that can be right; there is nothing else then.
    records : memoryview
        The seals, 64 bytes each, of as many of them as the header says and the file has.
    stamps : numpy.ndarray
        ``(n,)`` int64, of as many slots; 0 where the file has none.
    """
    size = os.fstat(fd).st_size
    header = read_header(fd)
    if header is None:
        return None, memoryview(b""), np.empty(0, np.int64)
    num_slots = min(most, header.num_slots, max(0, size - HEADER_BYTES) // SEAL_BYTES)
    records = memoryview(_read(fd, num_slots * SEAL_BYTES, record_offset(0)))
    num_slots = len(records) // SEAL_BYTES
    stamps = np.zeros(num_slots, np.int64)
    raw = _read(fd, num_slots * STAMP_BYTES, header.stamps_offset)
    known = np.frombuffer(raw[: len(raw) // STAMP_BYTES * STAMP_BYTES], "<i8")
    stamps[: len(known)] = known
    return header, records[: num_slots * SEAL_BYTES], stamps


def _read(fd: int, nbytes: int, offset: int) -> bytes:
    """Read as many bytes as there are."""
    pieces = []
    while nbytes:
        piece = os.pread(fd, min(nbytes, 2**26), offset)
        if not piece:
            break
        pieces.append(piece)
        nbytes -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def open_direct(path: Path) -> int | None:
    """Open a file of blocks for I/O past the page cache; None where that does not work."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(path, OPEN_FLAGS | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


class SlabFiles:
    """The files of one slab, open and locked.

    Parameters
    ----------
    path : Path
        Folder of all slabs; this one is in a folder named by its fingerprint.
    namespace : Namespace
        What the bytes mean.
    num_slots : int
        Number of slots to have; blocks in slots beyond it are dropped.

    Attributes
    ----------
    folder : Path
        Folder of the slab.
    header : Header
        What the table's header says.
    data_fd, table_fd : int
        The files.
    has_direct : bool
        Whether `data_fd` goes past the page cache.
    records : memoryview
        The seals that were found; empty for a new slab.
    stamps : numpy.ndarray
        ``(num_slots,)`` int64: the stamps that were found, 0 where there was none.

    Raises
    ------
    TierInUseError
        If someone has the slab open.
    TierSpaceError
        If the file system has too little space; nothing is left behind.
    TierError
        If a file cannot be made or opened.
    """

    def __init__(self, path: Path, namespace: Namespace, num_slots: int) -> None:
        self.folder = path / namespace.fingerprint.hex()
        self._fds: list[int] = []
        self._made: list[Path] = []  # what to remove if it comes to nothing
        self._locked = False
        self.data_fd = self.table_fd = -1
        try:
            self._make_folder()
            self._fds.append(lock_folder(self.folder))
            self._locked = True
            self._open(namespace, num_slots)
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError):
                self._explain(error, num_slots * round_up(namespace.block_bytes))
            raise

    def _make_folder(self) -> None:
        missing = [self.folder]
        while not missing[-1].exists() and missing[-1].parent != missing[-1]:
            missing.append(missing[-1].parent)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                self._made.append(folder)
        if not (self.folder / LOCK).exists():
            self._made.append(self.folder / LOCK)

    def _open(self, namespace: Namespace, num_slots: int) -> None:
        block_bytes = namespace.block_bytes
        same_namespace = self._settle_namespace(namespace)
        self.table_fd = self._open_file(TABLE)
        found, records, stamps = read_table(self.table_fd, num_slots)
        header = Header(
            namespace.fingerprint, block_bytes, round_up(block_bytes), num_slots, new_epoch()
        )
        fitting = found is not None and (
            (found.fingerprint, found.block_bytes) == (header.fingerprint, header.block_bytes)
        )
        if found is None or not fitting or not same_namespace:
            records, stamps = memoryview(b""), np.empty(0, np.int64)
        else:
            header = Header(
                header.fingerprint, block_bytes, header.slot_bytes, num_slots, found.epoch
            )
        self._grow_blocks(header)
        self.header = header
        self.records = records[: num_slots * SEAL_BYTES]
        self.stamps = np.zeros(num_slots, np.int64)
        kept = min(num_slots, len(stamps))
        self.stamps[:kept] = stamps[:kept]
        if found != header or os.fstat(self.table_fd).st_size != header.table_bytes:
            self._lay_table_out()
        # A tail that the table no longer names is given back only now.
        os.ftruncate(self.data_fd, header.data_bytes)
        direct_fd = open_direct(self.folder / BLOCKS)
        self.has_direct = direct_fd is not None
        if direct_fd is not None:
            self._fds.remove(self.data_fd)
            os.close(self.data_fd)
            self.data_fd = direct_fd
            self._fds.append(direct_fd)
        self._made.clear()

    def _open_file(self, name: str) -> int:
        path = self.folder / name
        if not path.exists():
            self._made.append(path)
        fd = os.open(path, OPEN_FLAGS | os.O_CREAT, 0o600)
        self._fds.append(fd)
        return fd

    def _settle_namespace(self, namespace: Namespace) -> bool:
        """Compare the JSON beside the data, or write it; False where it was another."""
        path = self.folder / NAMESPACE
        wanted = namespace.json.encode("ascii")
        try:
            with path.open("rb") as file:
                found: bytes | None = file.read(_LARGEST_JSON)
        except FileNotFoundError:
            found = None
            self._made.append(path)
        if found == wanted:
            return True
        temporary = self.folder / f"{NAMESPACE}.new"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write(fd, wanted, 0)
        finally:
            os.close(fd)
        temporary.replace(path)
        return found is None

    def _grow_blocks(self, header: Header) -> None:
        """Have space for all slots, or leave the file as it was."""
        self.data_fd = self._open_file(BLOCKS)
        before = os.fstat(self.data_fd).st_size
        try:
            _allocate(self.data_fd, header.data_bytes)
        except OSError:
            os.ftruncate(self.data_fd, before)
            raise

    def _lay_table_out(self) -> None:
        """Write the table anew, with what is kept of the old one, and put it in its place."""
        header = self.header
        temporary = self.folder / f"{TABLE}.new"
        self._made.append(temporary)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        self._fds.append(fd)
        _allocate(fd, header.table_bytes)
        _write(fd, bytes(self.records), record_offset(0))
        _write(fd, self.stamps.astype("<i8").tobytes(), header.stamps_offset)
        _write(fd, header.pack(), 0)
        os.fsync(fd)  # a rename that outlives its file's bytes would lose the whole slab
        temporary.replace(self.folder / TABLE)
        self._fds.remove(self.table_fd)
        os.close(self.table_fd)
        self.table_fd = fd

    def write_header(self, epoch: int) -> bytes:
        """Set the epoch; return the header's page, which the caller writes to the table."""
        old = self.header
        self.header = Header(old.fingerprint, old.block_bytes, old.slot_bytes, old.num_slots, epoch)
        return self.header.pack()

    def write_table(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        """Write to the table, in the caller's thread."""
        _write(self.table_fd, data, offset)
        if sync:
            os.fsync(self.table_fd)

    def close(self) -> None:
        """Close the files; the lock goes with them."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _undo(self) -> None:
        """Close everything and remove what was made."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    path.rmdir()  # only if it is empty
                elif self._locked:
                    path.unlink()
        self.close()

    def _explain(self, error: OSError, wanted: int) -> NoReturn:
        if error.errno in _NO_SPACE:
            raise _no_space(self.folder, wanted) from error
        raise TierError(f"{error.filename or self.folder}: {error.strerror}") from error


def _no_space(folder: Path, wanted: int) -> TierSpaceError:
    return TierSpaceError(
        f"{folder} needs {wanted} bytes for its capacity: {os.strerror(errno.ENOSPC)}"
    )


def check_space(path: Path, namespace: Namespace, num_slots: int) -> None:
    """Refuse a capacity that the file system cannot have room for, before anything is made for it.

    Raises
    ------
    TierSpaceError
        If it has not.
    """
    folder = path / namespace.fingerprint.hex()
    wanted = num_slots * round_up(namespace.block_bytes)
    held = 0
    with contextlib.suppress(OSError):
        held = 512 * (folder / BLOCKS).stat().st_blocks
    existing = folder
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    with contextlib.suppress(OSError):
        system = os.statvfs(existing)
        if wanted - held > system.f_bfree * system.f_frsize:
            raise _no_space(folder, wanted)


def _allocate(fd: int, nbytes: int) -> None:
    """Have space for so many bytes.

    Raises
    ------
    OSError
        If there is not enough.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    elif os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)
