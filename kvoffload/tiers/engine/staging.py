"""Buffers that a tier owns: a call that does not return then holds none of the caller's memory."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.tiers.region import Region, round_up

__all__ = ["Staging", "staging_buffers"]

LEAST_BUFFERS = 2


def staging_buffers(staging_bytes: int, block_bytes: int) -> int:
    """Return how many buffers of a block fit, at least 2: one to write from, one to read into."""
    return max(LEAST_BUFFERS, staging_bytes // round_up(block_bytes))


class Staging:
    """A fixed number of buffers of one block each, aligned to a page.

    Puts may hold half of them at most, so that blocks which wait to be written leave room to read.

    Parameters
    ----------
    staging_bytes : int
        Bytes for buffers; two are made at least.
    block_bytes : int
        Bytes per block.

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
        """Take up to `count` buffers; fewer, or none, where others hold them."""
        count = min(count, self.available(put=put))
        taken = [self._free.pop() for _ in range(count)]
        self._held_by_puts += count if put else 0
        return taken

    def give_back(self, buffers: Iterable[int], *, put: bool) -> None:
        """Give buffers back that `take` gave."""
        buffers = list(buffers)
        self._free.extend(buffers)
        self._held_by_puts -= len(buffers) if put else 0

    def view(self, buffer: int) -> memoryview:
        """Return the first `block_bytes` bytes of a buffer."""
        return self.region.views_unchecked(buffer)[0][: self.block_bytes]
