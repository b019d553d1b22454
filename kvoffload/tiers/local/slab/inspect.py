"""Inspect, verify and delete slabs offline."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvoffload.tiers.base import Closing, TierError
from kvoffload.tiers.deletion import Deleted
from kvoffload.tiers.folder import transfer
from kvoffload.tiers.namespace import FINGERPRINT_BYTES, NAMESPACE, fields_in, is_hex
from kvoffload.tiers.native import io
from kvoffload.tiers.seal import seed_of, xxh3_64

from .files import data_pieces, read_header, read_seals
from .folder import LockedFolder, OpenFolder, holder_of, lock_shared
from .layout import BLOCKS, FILES, TABLE, Header

OLDER = "its blocks are of kvoffload 0.4, and a tier opens it empty"


@dataclass(frozen=True, slots=True)
class SlabFolder:
    """The contents of a slab's folder.

    Attributes
    ----------
    folder : Path
        The folder.
    namespace : dict
        Its namespace, from the JSON; empty if it cannot be read.
    header : Header or None
        The table's header; None if it is older, damaged or missing.
    is_older : bool
        Whether the table is of kvoffload 0.4, so that a tier opens it empty.
    num_blocks : int
        Slots with a valid seal.
    num_stale : int
        Slots with anything else: a seal of another generation, or damage.
    disk_bytes : int
        Bytes of the files on the disk.
    pid : int or None
        The process that has it open; 0 if it is unknown, None if no process has.
    """

    folder: Path
    namespace: dict[str, Any]
    header: Header | None
    is_older: bool
    num_blocks: int
    num_stale: int
    disk_bytes: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `verify_slab`.

    Attributes
    ----------
    sound : int
        Blocks whose bytes match their seals.
    corrupt : list of bytes
        Stored keys of the others.
    """

    sound: int
    corrupt: list[bytes]


def find_slabs(path: str | Path) -> list[SlabFolder]:
    """Return the slabs in a folder, or the slab that it is, by name.

    `path` may have links; links in the folder are skipped.

    Raises
    ------
    TierError
        If there is no slab.
    OSError
        If a folder cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if _is_slab(path):
        return [_look(path.resolve() if path.is_symlink() else path)]
    with os.scandir(path) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    names = sorted(
        entry.name
        for entry in folders
        if is_hex(entry.name, FINGERPRINT_BYTES) and _is_slab(Path(entry.path))
    )
    if not names:
        is_shared = any(os.path.lexists(Path(entry.path) / NAMESPACE) for entry in folders)
        hint = f"; dir:{path} is a shared directory" if is_shared else ""
        raise TierError(f"{path}: no slab is here{hint}")
    return [_look(path / name) for name in names]


def _is_slab(folder: Path) -> bool:
    """Return whether a folder is a slab, possibly without a table.

    A deletion that was killed, or a `forget` that a disk refused, leaves only the blocks.
    """
    if os.path.lexists(folder / TABLE):
        return True
    is_named_so = is_hex(folder.resolve().name, FINGERPRINT_BYTES)
    return is_named_so and os.path.lexists(folder / BLOCKS)


def _look(path: Path) -> SlabFolder:
    num_blocks = num_stale = 0
    with OpenFolder(path) as folder:
        header, older = None, False
        with contextlib.suppress(TierError, OSError):
            header, older = read_header(folder.keep(TABLE))
        if header is not None:
            for seals, others in _valid_seals(folder.files[TABLE], header):
                num_blocks += len(seals)
                num_stale += others
        disk_bytes = _disk_bytes(folder, FILES)
        holder = None
        with contextlib.suppress(TierError, OSError):
            holder = holder_of(folder)
        return SlabFolder(
            path, fields_in(folder), header, older, num_blocks, num_stale, disk_bytes, holder
        )


def _disk_bytes(folder: OpenFolder, names: Iterable[str]) -> int:
    """Return the bytes of files on the disk."""
    found = [folder.stat(name) for name in names if folder.has(name)]
    return sum(each.st_blocks * 512 for each in found if stat.S_ISREG(each.st_mode))


def verify_slab(folder: str | Path, progress: Callable[[int], None] | None = None) -> Verdict:
    """Read every block of a slab and compare it with its seal; change nothing.

    Parameters
    ----------
    folder : str or Path
        The slab's folder; no process may have it open.
    progress : callable, optional
        Called with the number of blocks read so far.

    Raises
    ------
    TierInUseError
        If another process has it open.
    TierError
        If the table's header is damaged, or of kvoffload 0.4.
    OSError
        If a file cannot be opened.
    """
    path = Path(folder)
    with OpenFolder(path) as opened:
        lock_shared(opened)
        data_fd, table_fd = opened.keep(BLOCKS), opened.keep(TABLE)
        header, older = read_header(table_fd)
        if older:
            raise TierError(f"{path}: {OLDER}")
        if header is None:
            raise TierError(f"{path}: the table is damaged, and no block can be found")
        seals = chain.from_iterable(piece for piece, _ in _valid_seals(table_fd, header))
        corrupt = []
        done = 0
        with _Block(data_fd, header.block_bytes) as block:
            for done, (slot, key, expected) in enumerate(seals, start=1):
                seed = seed_of(header.fingerprint, key)
                is_read = block.read(slot * header.slot_bytes)
                if not is_read or xxh3_64(block.memory, seed) != expected:
                    corrupt.append(key)
                if progress is not None:
                    progress(done)
        return Verdict(done - len(corrupt), corrupt)


def _valid_seals(fd: int, header: Header) -> Iterator[tuple[list[tuple[int, bytes, int]], int]]:
    """Yield slot, key and sum of valid seals, piece by piece, and the number of other slots."""
    for first, records in read_seals(fd, header):
        slots, keys, sums, others = io.valid_records(
            records, header.block_bytes, header.generation.number
        )
        yield list(zip((slots + first).tolist(), keys, sums.tolist(), strict=True)), others


class _Block(Closing):
    """Memory for one block of a file, used only for data that the file has on the disk."""

    def __init__(self, fd: int, block_bytes: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._block_bytes = block_bytes
        self.memory: mmap.mmap | bytes = b""

    def read(self, start: int) -> bool:
        """Read a block; return False if the file ends before it or has only a hole."""
        end = start + self._block_bytes
        if end > self._size:
            return False
        pieces = list(data_pieces(self._fd, start, end))
        if not pieces:
            return False
        if pieces != [(start, end)]:
            self.close()  # holes of the file read as zeros and take no memory here either
        if not self.memory:
            # Private: pages never written to are read without taking memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.memory = mmap.mmap(-1, self._block_bytes, flags)
        with memoryview(self.memory) as view:
            for first, last in pieces:
                with view[first - start : last - start] as piece:
                    try:  # one call reads less than 2 GiB
                        if transfer(os.preadv, self._fd, [piece], first) != len(piece):
                            return False
                    except OSError:
                        return False
        return True

    def close(self) -> None:
        """Release the memory."""
        if isinstance(self.memory, mmap.mmap):
            self.memory.close()
        self.memory = b""


def remove_slab(folder: str | Path) -> int:
    """Delete a slab and return the bytes that its files had on the disk.

    Raises
    ------
    TierInUseError
        If another process has it open.
    OSError
        If a file cannot be deleted.
    """
    with LockedFolder(Path(folder)) as opened:
        freed = _disk_bytes(opened, FILES)
        for name in FILES:
            opened.unlink(name)
        with contextlib.suppress(OSError):  # the folder may have other files
            opened.path.rmdir()
    return freed


def delete_blocks(url: str, _options: Mapping[str, str], number: int | None) -> Iterator[Deleted]:
    """Delete the slabs in a folder, those of a generation or all; see ``deletion``."""
    for slab in find_slabs(url.removeprefix("slab:")):
        if number is None or (slab.header and slab.header.generation.number == number):
            yield Deleted(slab.num_blocks, remove_slab(slab.folder))
