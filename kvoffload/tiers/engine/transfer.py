"""Bytes between files, buffers and regions, whose memory may lie in several pieces."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.tiers.base import Status
from kvoffload.tiers.region import ALIGNMENT
from kvoffload.tiers.seal import xxh3_64

__all__ = ["NO_SPACE", "SLICE_BYTES", "copy", "status_of", "sum_of", "transfer"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
# Linux and macOS take no more views in one call.
MAX_VIEWS = 1024
SLICE_BYTES = 2**20
"""Bytes that are copied between two looks at the deadlines, at most."""


def status_of(error: OSError) -> Status:
    """Return what an error of the operating system means for a block."""
    return Status.FULL if error.errno in NO_SPACE else Status.FAILED


def sum_of(views: Sequence[memoryview], seed: int) -> int:
    """Return the XXH3-64 of bytes that lie in several pieces."""
    return xxh3_64(views[0] if len(views) == 1 else b"".join(views), seed)


def copy(
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    must_stop: Callable[[], bool] | None = None,
) -> bool:
    """Copy bytes between two lists of pieces, as many as both have; without the lock, if large.

    `must_stop` is asked after every `SLICE_BYTES`; return False where it ended the copy.
    """
    pieces = [np.frombuffer(target, np.uint8) for target in targets]
    most = sys.maxsize if must_stop is None else SLICE_BYTES
    left = most
    for source in sources:
        data = np.frombuffer(source, np.uint8)
        while len(data) and pieces:
            count = min(len(data), len(pieces[0]), left)
            np.copyto(pieces[0][:count], data[:count])
            data = data[count:]
            pieces[0] = pieces[0][count:]
            if not len(pieces[0]):
                del pieces[0]
            left -= count
            if not left:
                if must_stop is not None and must_stop():
                    return False
                left = most
    return True


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write views at an offset, going on after short calls; return the bytes moved.

    Fewer than asked for only at the end of a file.
    """
    done = 0
    rest = list(views)
    while rest:
        moved = call(fd, rest[:MAX_VIEWS], offset + done)
        done += moved
        if moved == 0 or (call is os.preadv and moved % ALIGNMENT):
            break  # a short read of a file ends where the file does
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if moved:
            rest[0] = rest[0][moved:]
    return done
