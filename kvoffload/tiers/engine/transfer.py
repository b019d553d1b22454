"""Transfers of bytes between files, regions and buffers, whose memory may be in several pieces.

The buffers are a tier's own, so that a call that does not return holds none of the caller's memory.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvoffload.tiers.base import Status
from kvoffload.tiers.region import ALIGNMENT, Region, round_up
from kvoffload.tiers.seal import xxh3_64

__all__ = [
    "NO_SPACE",
    "SLICE_BYTES",
    "Staging",
    "copy",
    "staging_buffers",
    "status_of",
    "sum_of",
    "transfer",
]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
# Linux and macOS accept no more views in one call.
MAX_VIEWS = 1024
LEAST_BUFFERS = 2
SLICE_BYTES = 2**20
"""Most bytes that are copied between two checks of the deadlines."""


def status_of(error: OSError) -> Status:
    """Return the status of a block after an error of the operating system."""
    return Status.FULL if error.errno in NO_SPACE else Status.FAILED


def sum_of(views: Sequence[memoryview], seed: int) -> int:
    """Return the XXH3-64 of bytes in several pieces."""
    return xxh3_64(views[0] if len(views) == 1 else b"".join(views), seed)


def copy(
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    must_stop: Callable[[], bool] | None = None,
) -> bool:
    """Copy as many bytes as both lists of pieces have; release the lock for large copies.

    `must_stop` is called after every `SLICE_BYTES`; return False if it ended the copy.
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


def staging_buffers(staging_bytes: int, block_bytes: int) -> int:
    """Return the number of buffers of a block, at least 2: one to write from, one to read into."""
    return max(LEAST_BUFFERS, staging_bytes // round_up(block_bytes))


class Staging:
    """A fixed number of buffers of one block each, aligned to a page.

    Puts may hold at most half of them, so that blocks that wait to be written leave room for reads.

    Notes
    -----
    Thread-safety: callers serialise. Complexity: O(n) in buffers taken.
    """

    __slots__ = ("_free", "_held_by_puts", "block_bytes", "num_buffers", "region")

    def __init__(self, staging_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_buffers = staging_buffers(staging_bytes, block_bytes)
        self.region = Region.allocate(self.num_buffers, round_up(block_bytes))
        self._free = list(range(self.num_buffers))
        self._held_by_puts = 0

    @property
    def nbytes_held(self) -> int:
        """Bytes of the buffers that are in use."""
        return (self.num_buffers - len(self._free)) * self.region.block_bytes

    def available(self, *, put: bool) -> int:
        """Return how many buffers could be taken now."""
        if put:
            return min(len(self._free), self.num_buffers // 2 - self._held_by_puts)
        return len(self._free)

    def take(self, count: int, *, put: bool) -> list[int]:
        """Take up to `count` buffers, as far as they are free."""
        count = min(count, self.available(put=put))
        taken = [self._free.pop() for _ in range(count)]
        self._held_by_puts += count if put else 0
        return taken

    def give_back(self, buffers: Iterable[int], *, put: bool) -> None:
        """Give back buffers from `take`."""
        buffers = list(buffers)
        self._free.extend(buffers)
        self._held_by_puts -= len(buffers) if put else 0

    def view(self, buffer: int) -> memoryview:
        """Return the first `block_bytes` bytes of a buffer."""
        return self.region.views_unchecked(buffer)[0][: self.block_bytes]
