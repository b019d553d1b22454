"""Slabs from outside: what is in a folder, whether it is sound, and how to be rid of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvoffload.tiers._io_py import transfer
from kvoffload.tiers.base import TierError
from kvoffload.tiers.namespace import FINGERPRINT_BYTES
from kvoffload.tiers.seal import seed_of, xxh3_64
from kvoffload.tiers.twins import chosen

from .files import read_header, read_seals
from .layout import BLOCKS, LOCK, NAMESPACE, TABLE, Header
from .lock import lock_folder

__all__ = ["SlabFolder", "Verdict", "find_slabs", "remove_slab", "verify_slab"]

_LARGEST_JSON = 2**20
_NAME_LENGTH = 2 * FINGERPRINT_BYTES


@dataclass(frozen=True, slots=True)
class SlabFolder:
    """What a slab's folder holds.

    Attributes
    ----------
    folder : Path
        The folder.
    namespace : dict
        Its namespace, as JSON has it; empty if it cannot be read.
    header : Header or None
        The table's header; None if it is damaged or missing.
    num_blocks : int
        Slots with a valid seal.
    num_stale : int
        Slots with anything else: of an epoch that was forgotten, or damaged.
    disk_bytes : int
        Bytes that the files take on the disk.
    pid : int or None
        The process that has it open; 0 if that is not known.
    """

    folder: Path
    namespace: dict[str, Any]
    header: Header | None
    num_blocks: int
    num_stale: int
    disk_bytes: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify_slab` found.

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
    """Return the slabs in a folder, or the one that it is, by name.

    Raises
    ------
    TierError
        If there is none.
    OSError
        If a file cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if (path / TABLE).exists():
        return [_look(path)]
    found = sorted(
        folder
        for folder in path.iterdir()
        if len(folder.name) == _NAME_LENGTH and (folder / TABLE).exists()
    )
    if not found:
        raise TierError(f"{path}: no slab is here")
    return [_look(folder) for folder in found]


def _look(folder: Path) -> SlabFolder:
    num_blocks = num_stale = 0
    with _opened(folder / TABLE) as fd:
        header = read_header(fd)
        if header is not None:
            for seals, others in _valid_seals(fd, header):
                num_blocks += len(seals)
                num_stale += others
    namespace: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError), (folder / NAMESPACE).open() as f:
        read = json.loads(f.read(_LARGEST_JSON))
        namespace = read if isinstance(read, dict) else {}
    disk_bytes = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
    return SlabFolder(folder, namespace, header, num_blocks, num_stale, disk_bytes, _holder(folder))


def _holder(folder: Path) -> int | None:
    """Return the process that has a slab open, 0 if it is not known which; None for none."""
    try:
        with _opened(folder / LOCK) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(ValueError):
                    return int(os.pread(fd, 32, 0))
                return 0
    except FileNotFoundError:
        pass
    return None


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    try:
        yield fd
    finally:
        os.close(fd)


def verify_slab(folder: str | Path, progress: Callable[[int], None] | None = None) -> Verdict:
    """Read every block of a slab and compare it with its seal; nothing is changed.

    Parameters
    ----------
    folder : str or Path
        The slab's folder; nobody may have it open.
    progress : callable, optional
        Called with the number of blocks that are done.

    Raises
    ------
    TierInUseError
        If someone has it open.
    TierError
        If the table's header is damaged.
    OSError
        If a file cannot be opened.
    """
    folder = Path(folder)
    lock = lock_folder(folder)
    try:
        with _opened(folder / TABLE) as table_fd, _opened(folder / BLOCKS) as data_fd:
            header = read_header(table_fd)
            if header is None:
                raise TierError(f"{folder}: the table is damaged, and no block can be found")
            return _verify(header, table_fd, data_fd, progress)
    finally:
        os.close(lock)


def _valid_seals(fd: int, header: Header) -> Iterator[tuple[list[tuple[int, bytes, int]], int]]:
    """Yield slot, key and sum of valid seals, piece by piece, and how many others there are."""
    for first, records in read_seals(fd, header):
        slots, keys, sums, others = chosen().valid_records(
            records, header.block_bytes, header.epoch
        )
        yield list(zip((slots + first).tolist(), keys, sums.tolist(), strict=True)), others


def _verify(
    header: Header, table_fd: int, data_fd: int, progress: Callable[[int], None] | None
) -> Verdict:
    data_bytes = os.fstat(data_fd).st_size
    seals = chain.from_iterable(piece for piece, _ in _valid_seals(table_fd, header))
    corrupt = []
    block = memoryview(b"")
    done = 0
    for done, (slot, key, block_sum) in enumerate(seals, start=1):
        start, num_read = slot * header.slot_bytes, 0
        if start + header.block_bytes <= data_bytes:  # else no memory is taken for it either
            block = block or memoryview(bytearray(header.block_bytes))
            with contextlib.suppress(OSError):  # of 2 GiB and more one call reads a part
                num_read = transfer(os.preadv, data_fd, [block], start)
        seed = seed_of(header.fingerprint, key)
        if num_read != header.block_bytes or xxh3_64(block, seed) != block_sum:
            corrupt.append(key)
        if progress is not None:
            progress(done)
    return Verdict(done - len(corrupt), corrupt)


def remove_slab(folder: str | Path) -> int:
    """Delete a slab and return the bytes that its files took on the disk.

    Raises
    ------
    TierInUseError
        If someone has it open.
    OSError
        If a file cannot be deleted.
    """
    folder = Path(folder)
    lock = lock_folder(folder)
    try:
        freed = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
        for name in (TABLE, f"{TABLE}.new", BLOCKS, NAMESPACE, f"{NAMESPACE}.new", LOCK):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # someone keeps a file of their own there
            folder.rmdir()
    finally:
        os.close(lock)
    return freed
