"""The stores of this machine, in Python: a second region, and the slots of a file.

``kvoffload._core.io`` has the same in compiled code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Status
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import SEAL_BYTES, Seal, seed_of

from .contract import Block, Store
from .transfer import copy, sum_of, transfer

__all__ = ["FileStore", "MemoryStore", "valid_records"]

REWRITE_S = 0.0001
"""Seconds after which a block that is being written is read again."""


class MemoryStore(Store):
    """Blocks in a second region: slot i is its block i.

    `sums` ((slots,) uint64) has the sum of the bytes in each slot and is kept up to date.
    """

    direct = True

    def __init__(self, region: Region, fingerprint: bytes, sums: npt.NDArray[np.uint64]) -> None:
        self.region = region
        self.block_bytes = self.slot_bytes = region.block_bytes
        self.fingerprint = fingerprint
        self.sums = sums
        self.writing = np.zeros(len(sums), np.uint8)  # slots that are being written

    def read(self, run: Sequence[Block], generation: int) -> None:  # noqa: ARG002
        """Copy the bytes and check the copy; repeat if the slot was written meanwhile."""
        for block in run:
            slot, seed = block.slot, seed_of(self.fingerprint, block.key)
            while True:
                writing, expected = self.writing[slot], self.sums[slot]
                copy(self.region.views_unchecked(slot), block.views)
                if sum_of(block.views, seed) == int(expected):
                    block.status = Status.OK
                    break
                if not (writing or self.writing[slot]) and self.sums[slot] == expected:
                    block.status = Status.CORRUPT
                    break
                time.sleep(REWRITE_S)

    def write(self, run: Sequence[Block], generation: int) -> None:  # noqa: ARG002
        """Copy the bytes and keep their sum."""
        for block in run:
            slot = block.slot
            self.writing[slot] = 1
            found = sum_of(block.views, seed_of(self.fingerprint, block.key))
            copy(block.views, self.region.views_unchecked(slot))
            self.sums[slot] = found
            self.writing[slot] = 0
            block.status = Status.UNAVAILABLE if block.taken_back else Status.OK


@dataclass(eq=False, repr=False)
class FileStore(Store):
    """Blocks in the slots of a file, their seals in the table of another; neither is closed here.

    `direct` passes the region's memory to the kernel. `slot_bytes` is the stride of slots, and
    `records_offset` the offset of slot 0's seal in the table. Two arrays are kept up to date:
    `sums` ((slots,) uint64), the sum of the bytes in each slot, and `written` ((slots,) uint8),
    whether the table may have a seal of the slot.
    """

    data_fd: int
    table_fd: int
    _: KW_ONLY
    direct: bool
    block_bytes: int
    slot_bytes: int
    records_offset: int
    fingerprint: bytes
    sums: npt.NDArray[np.uint64]
    written: npt.NDArray[np.uint8]

    def read(self, run: Sequence[Block], generation: int) -> None:  # noqa: ARG002
        """Read a run in one call; a block that does not match its sum also loses its seal."""
        views = [view for block in run for view in block.slot_views]
        got = transfer(os.preadv, self.data_fd, views, run[0].slot * self.slot_bytes)
        for index, block in enumerate(run):
            whole = got >= (index + 1) * self.slot_bytes
            if whole and self._sum(block) == int(self.sums[block.slot]):
                block.status = Status.OK
            else:
                block.status = Status.CORRUPT
                with contextlib.suppress(OSError):  # it would be found corrupt again
                    self._clear([block])

    def write(self, run: Sequence[Block], generation: int) -> None:
        """Clear the seals, write the bytes, write the seals, in this order and without a sync."""
        self._clear(run)
        records = []
        for block in run:
            seal = Seal(block.key, self.block_bytes, self._sum(block))
            records.append(seal.pack(generation))
            self.sums[block.slot] = seal.sum
        views = [view for block in run for view in block.slot_views]
        offset = run[0].slot * self.slot_bytes
        if transfer(os.pwritev, self.data_fd, views, offset) < len(run) * self.slot_bytes:
            raise OSError(errno.EIO, "the file system wrote nothing")
        if run[0].taken_back:  # the bytes may have changed between sum and write
            for block in run:
                block.status = Status.UNAVAILABLE
            return
        for block in run:
            self.written[block.slot] = 1
        self._write_table(b"".join(records), self._record_offset(run[0].slot))
        for block in run:
            block.status = Status.OK

    def chore(self, offset: int, data: bytes) -> None:
        self._write_table(data, offset)

    def _sum(self, block: Block) -> int:
        return sum_of(block.views, seed_of(self.fingerprint, block.key))

    def _record_offset(self, slot: int) -> int:
        return self.records_offset + slot * SEAL_BYTES

    def _clear(self, run: Sequence[Block]) -> None:
        """Clear the seals that adjacent slots may have."""
        first, last = run[0].slot, run[-1].slot
        if self.written[first : last + 1].any():
            self._write_table(bytes((last + 1 - first) * SEAL_BYTES), self._record_offset(first))
            self.written[first : last + 1] = 0

    def _write_table(self, data: bytes, offset: int) -> None:
        if transfer(os.pwritev, self.table_fd, [memoryview(data)], offset) < len(data):
            raise OSError(errno.EIO, "the file system wrote nothing")


def valid_records(
    table: bytes | memoryview, block_bytes: int, generation: int
) -> tuple[npt.NDArray[np.int64], list[bytes], npt.NDArray[np.uint64], int]:
    """Read the seals of a table, 64 bytes per slot, for blocks of a length and of a generation.

    Return the slots with such a seal ((n,) int64), their stored keys, the sums of their bytes ((n,)
    uint64), and the number of slots with neither such a seal nor zeros.
    """
    slots, keys, sums, others = [], [], [], 0
    for slot in range(len(table) // SEAL_BYTES):
        record = bytes(table[slot * SEAL_BYTES : (slot + 1) * SEAL_BYTES])
        seal = Seal.unpack(record, generation)
        if seal is not None and seal.nbytes == block_bytes:
            slots.append(slot)
            keys.append(seal.key)
            sums.append(seal.sum)
        elif any(record):
            others += 1
    return np.array(slots, np.int64), keys, np.array(sums, np.uint64), others
