"""Transfers of bytes between files and memory, and the buffers of staged tiers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from kvoffload.tiers.base import Status
from kvoffload.tiers.region import ALIGNMENT, Region, round_up

__all__ = ["NO_SPACE", "num_buffers", "staging_buffers", "status_of", "transfer"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
# Linux and macOS accept no more views in one call.
MAX_VIEWS = 1024
LEAST_BUFFERS = 2


def status_of(error: OSError) -> Status:
    """Return the status of a block after an error of the operating system."""
    return Status.FULL if error.errno in NO_SPACE else Status.FAILED


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


def num_buffers(staging_bytes: int, nbytes: int) -> int:
    """Return the number of buffers of `nbytes`, at least 2: to write from, and to read into."""
    return max(LEAST_BUFFERS, staging_bytes // round_up(nbytes))


def staging_buffers(staging_bytes: int, nbytes: int) -> Region:
    """Return new buffers of `nbytes` each, rounded up to a page, as a region.

    They are the tier's own, so that a call that does not return holds none of the caller's memory.
    """
    return Region.allocate(num_buffers(staging_bytes, nbytes), round_up(nbytes))
