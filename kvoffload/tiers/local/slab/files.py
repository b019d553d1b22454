"""The files of a slab: opening, layout, reading and release.

A stranger may have written the files, or a power cut may have torn them. So a size in a file counts
only up to the file's own size, memory is allocated only for bytes that the file holds, and invalid
parts are treated as missing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import TierError, TierSpaceError
from kvoffload.tiers.folder import make_folders, transfer
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.metrics import write_line
from kvoffload.tiers.namespace import NAMESPACE, Namespace
from kvoffload.tiers.region import round_up
from kvoffload.tiers.seal import SEAL_BYTES

from .folder import LockedFolder, OpenFolder
from .layout import (
    BLOCKS,
    HEADER_BYTES,
    LOCK,
    NEW_NAMESPACE,
    NEW_TABLE,
    STAMP_BYTES,
    TABLE,
    Header,
    record_offset,
)

SEALS_AT_ONCE = 2**12
"""Number of seals that `read_seals` reads at once: 256 KiB."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_header(fd: int) -> tuple[Header | None, bool]:
    """Read the header of a table, None if no copy is valid, and whether kvoffload 0.4 made it."""
    page = os.pread(fd, HEADER_BYTES, 0)
    return Header.unpack(page), Header.is_older(page)


def data_pieces(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece of data in a range of a file.

    A large file may take no space on the disk. If the file system does not report holes, the whole
    range is data.
    """
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                return
            stop = end
        if start < end:
            yield start, min(stop, end)
        start = stop


def read_seals(fd: int, header: Header) -> Iterator[tuple[int, memoryview]]:
    """Yield the seals of a table in pieces, each with its first slot.

    Only one piece is in memory at a time, and only data on the disk is read.
    """
    end = record_offset(header.num_slots)
    for piece, stop in data_pieces(fd, record_offset(0), end):
        first = (piece - record_offset(0)) // SEAL_BYTES
        last = -(-(stop - record_offset(0)) // SEAL_BYTES)
        for slot in range(first, last, SEALS_AT_ONCE):
            count = min(SEALS_AT_ONCE, last - slot)
            records = _read(fd, count * SEAL_BYTES, record_offset(slot))
            found = len(records) // SEAL_BYTES
            if found:
                yield slot, records[: found * SEAL_BYTES]
            if found < count:
                return


def read_table(fd: int, most: int) -> tuple[Header | None, bool, memoryview, npt.NDArray[np.int64]]:
    """Read a table's seals and stamps of the first slots.

    Parameters
    ----------
    fd : int
        The table.
    most : int
        Most slots to read.

    Returns
    -------
    header : Header or None
        None if no copy is valid; the rest is empty then.
    is_older : bool
        Whether it is of kvoffload 0.4, whose blocks a tier drops.
    records : memoryview
        The seals, 64 bytes each, as many as both the header and the file have.
    stamps : numpy.ndarray
        ``(n,)`` int64, of the same slots; 0 if the file has none.
    """
    size = os.fstat(fd).st_size
    header, is_older = read_header(fd)
    if header is None:
        return None, is_older, memoryview(b""), np.empty(0, np.int64)
    num_slots = min(most, header.num_slots, max(0, size - HEADER_BYTES) // SEAL_BYTES)
    records = _read(fd, num_slots * SEAL_BYTES, record_offset(0))
    num_slots = len(records) // SEAL_BYTES
    stamps = np.zeros(num_slots, np.int64)
    raw = _read(fd, num_slots * STAMP_BYTES, header.stamps_offset)
    known = np.frombuffer(raw[: len(raw) // STAMP_BYTES * STAMP_BYTES], "<i8")
    stamps[: len(known)] = known
    return header, is_older, records[: num_slots * SEAL_BYTES], stamps


def _read(fd: int, nbytes: int, offset: int) -> memoryview:
    """Read up to `nbytes` bytes, fewer at the end of the file."""
    data = memoryview(bytearray(nbytes))
    return data[: transfer(os.preadv, fd, [data], offset)]


def _write(fd: int, data: bytes, offset: int) -> None:
    transfer(os.pwritev, fd, [memoryview(data)], offset)


def open_direct(folder: OpenFolder) -> int | None:
    """Open the file of blocks for I/O without the page cache; None if that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = folder.open(BLOCKS, os.O_RDWR | os.O_DIRECT)
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
        Folder of all slabs; this one is in a folder named after its fingerprint.
    namespace : Namespace
        The namespace of the bytes.
    num_slots : int
        Number of slots; blocks in slots beyond it are dropped.
    generation : Generation
        That of the blocks; those of another one are dropped.

    Attributes
    ----------
    folder : Path
        Folder of the slab.
    header : Header
        The table's header.
    held : LockedFolder
        The folder and the files, open.
    has_direct : bool
        Whether `data_fd` bypasses the page cache.
    records : memoryview
        The seals that were found; empty for a new slab.
    stamps : numpy.ndarray
        ``(num_slots,)`` int64: the stamps that were found, 0 for none.
    """

    def __init__(
        self, path: Path, namespace: Namespace, num_slots: int, generation: Generation
    ) -> None:
        self.folder = path / namespace.fingerprint.hex()
        self._made_folders: list[Path] = []  # to remove if opening fails
        self._made_files: list[str] = []
        self._locked: LockedFolder | None = None
        try:
            make_folders(self.folder, self._made_folders)
            if not (self.folder / LOCK).exists():
                self._made_files.append(LOCK)
            self._locked = LockedFolder(self.folder)
            self._open(self._locked, namespace, num_slots, generation)
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError):
                self._explain(error, num_slots * round_up(namespace.block_bytes))
            raise
        self.held = self._locked

    @property
    def data_fd(self) -> int:
        """Descriptor of the blocks; -1 once they are closed."""
        return self.held.files.get(BLOCKS, -1)

    @property
    def table_fd(self) -> int:
        """Descriptor of the table; -1 once it is closed."""
        return self.held.files.get(TABLE, -1)

    @property
    def is_closed(self) -> bool:
        """Whether the files are closed, as in a forked child."""
        return self.held.fd < 0

    def _open(
        self, folder: LockedFolder, namespace: Namespace, num_slots: int, generation: Generation
    ) -> None:
        block_bytes = namespace.block_bytes
        for name in (NEW_NAMESPACE, NEW_TABLE):  # left by a process that was killed here
            folder.unlink(name)
        same_namespace = self._settle_namespace(folder, namespace)
        table_fd = self._open_file(folder, TABLE)
        found, is_older, records, stamps = read_table(table_fd, num_slots)
        header = Header(
            namespace.fingerprint, block_bytes, round_up(block_bytes), num_slots, generation
        )
        why = ""
        if is_older:
            why = "they are of kvoffload 0.4"
        elif found is None:
            gone = "the table is missing" if folder.has(BLOCKS) else ""
            why = gone if TABLE in self._made_files else "the table is damaged"
        elif not same_namespace:
            why = f"{NAMESPACE} is damaged"
        elif not records:
            why = "the table is cut short"
        elif found.generation != generation and np.frombuffer(records, np.uint8).any():
            names = found.generation.name, generation.name
            why = "they are of generation {!r}, this start has {!r}".format(*names)
        elif missing := min(num_slots, found.num_slots) - len(records) // SEAL_BYTES:
            line = "%s: the blocks of %d slots are dropped: the table is cut short"
            write_line(logging.WARNING, line, self.folder, missing)
        if why:
            write_line(logging.WARNING, "%s: its blocks are dropped: %s", self.folder, why)
        if not same_namespace or found is None or replace(found, num_slots=num_slots) != header:
            records, stamps = memoryview(b""), np.empty(0, np.int64)
        self._grow_blocks(folder, header)
        self.header = header
        self.records = records
        self.stamps = np.zeros(num_slots, np.int64)
        self.stamps[: len(stamps)] = stamps
        table_bytes = os.fstat(folder.files[TABLE]).st_size
        if found != header or table_bytes != header.table_bytes:
            try:
                self._lay_table_out(folder)
            except OSError as error:
                # A smaller slab still fits on a full disk.
                if error.errno not in _NO_SPACE or table_bytes < header.table_bytes:
                    raise
                self._change_table(folder)
        # A tail that the table no longer names is freed only now.
        os.ftruncate(folder.files[BLOCKS], header.data_bytes)
        direct_fd = open_direct(folder)
        self.has_direct = direct_fd is not None
        if direct_fd is not None:
            old, folder.files[BLOCKS] = folder.files[BLOCKS], direct_fd
            os.close(old)
        self._made_folders.clear()
        self._made_files.clear()

    def _open_file(self, folder: OpenFolder, name: str) -> int:
        if not folder.has(name):
            self._made_files.append(name)
        return folder.keep(name, os.O_RDWR | os.O_CREAT)

    def _settle_namespace(self, folder: OpenFolder, namespace: Namespace) -> bool:
        """Compare the JSON beside the data, or write it; False if it was different."""
        wanted = namespace.json.encode("ascii")
        found = folder.read(NAMESPACE, len(wanted))
        if found == wanted:
            return True
        if found is None:
            self._made_files.append(NAMESPACE)
        self._made_files.append(NEW_NAMESPACE)
        fd = folder.open(NEW_NAMESPACE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _write(fd, wanted, 0)
        finally:
            os.close(fd)
        folder.replace(NEW_NAMESPACE, NAMESPACE)
        return found is None

    def _grow_blocks(self, folder: OpenFolder, header: Header) -> None:
        """Allocate space for all slots, or leave the file as it was."""
        fd = self._open_file(folder, BLOCKS)
        before = os.fstat(fd).st_size
        try:
            _allocate(fd, header.data_bytes)
        except OSError:
            os.ftruncate(fd, before)
            raise

    def _lay_table_out(self, folder: OpenFolder) -> None:
        """Write a new table with the kept parts of the old one, and replace that."""
        fd = folder.open(NEW_TABLE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _allocate(fd, self.header.table_bytes)
            self._fill_table(fd)
            os.fsync(fd)  # if only the rename survived a power cut, the whole slab would be lost
            folder.replace(NEW_TABLE, TABLE)
        except BaseException:
            os.close(fd)
            folder.unlink(NEW_TABLE)
            raise
        old, folder.files[TABLE] = folder.files[TABLE], fd  # a descriptor is closed once
        os.close(old)

    def _change_table(self, folder: OpenFolder) -> None:
        """Write the table in place, and free its excess.

        A process that is killed meanwhile leaves seals that do not match, or stamps in the wrong
        order.
        """
        fd = folder.files[TABLE]
        self._fill_table(fd)
        os.fsync(fd)
        os.ftruncate(fd, self.header.table_bytes)

    def _fill_table(self, fd: int) -> None:
        header = self.header
        records = bytes(self.records)
        _write(fd, records.ljust(header.num_slots * SEAL_BYTES, b"\0"), record_offset(0))
        _write(fd, self.stamps.astype("<i8").tobytes(), header.stamps_offset)
        _write(fd, header.pack(), 0)

    def change_generation(self, generation: Generation) -> None:
        """Set the generation of the header; `write_header` writes it."""
        self.header = replace(self.header, generation=generation)

    def write_header(self) -> Header:
        """Write the header of another generation, remove all seals, and wait for the disk.

        Return the header that was written.

        Raises
        ------
        OSError
            If the disk does not take it. Then the table is removed, so that nothing has its old
            blocks again; if that fails, too, a line is logged.
        """
        header = self.header
        try:
            _write(self.table_fd, header.pack(), 0)
            # An earlier generation's seals would be valid again if it returned, of discarded blocks
            # too.
            os.ftruncate(self.table_fd, HEADER_BYTES)
            with contextlib.suppress(OSError):  # the table grows with its seals
                _allocate(self.table_fd, header.table_bytes)
            os.fsync(self.table_fd)
        except OSError:
            try:
                self.held.unlink(TABLE)
                os.fsync(self.held.fd)
            except OSError:
                path = self.folder / TABLE
                write_line(logging.ERROR, "%s: has forgotten blocks; it must be removed", path)
            raise
        return header

    def write_table(self, offset: int, data: bytes) -> None:
        """Write to the table, in the caller's thread."""
        _write(self.table_fd, data, offset)

    def close(self) -> None:
        """Close the files, which releases the lock."""
        self.held.close()

    def _undo(self) -> None:
        """Remove the new files and folders, and close everything."""
        folder = self._locked
        if folder is not None:
            for name in reversed(self._made_files):
                with contextlib.suppress(OSError):
                    folder.unlink(name)
        for path in reversed(self._made_folders):
            with contextlib.suppress(OSError):
                path.rmdir()  # only if it is empty
        if folder is not None:
            folder.close()

    def _explain(self, error: OSError, wanted: int) -> NoReturn:
        if error.errno in _NO_SPACE:
            raise _no_space(self.folder, wanted, error.strerror) from error
        path = Path(error.filename or self.folder)
        if self.folder not in (path, *path.parents) and path not in self.folder.parents:
            path = self.folder / path  # from a call in the open folder
        raise TierError(f"{path}: {error.strerror}") from error


def _no_space(folder: Path, wanted: int, why: str | None) -> TierSpaceError:
    return TierSpaceError(f"{folder} needs {wanted} bytes for its capacity: {why}")


def check_space(path: Path, namespace: Namespace, num_slots: int) -> None:
    """Check for room before anything is made; raise TierSpaceError if there is too little."""
    folder = path / namespace.fingerprint.hex()
    wanted = num_slots * round_up(namespace.block_bytes)
    held = 0
    with contextlib.suppress(OSError):
        held = 512 * (folder / BLOCKS).lstat().st_blocks
    existing = folder
    with contextlib.suppress(OSError):  # opening it gives the reason
        while not existing.exists() and existing.parent != existing:
            existing = existing.parent
        system = os.statvfs(existing)
        # A file system without blocks, as ramfs, does not know its size.
        if system.f_blocks and wanted - held > system.f_bfree * system.f_frsize:
            raise _no_space(folder, wanted, os.strerror(errno.ENOSPC))


def _allocate(fd: int, nbytes: int) -> None:
    """Allocate `nbytes` bytes of a file; OSError if there is not enough space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    elif os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)
