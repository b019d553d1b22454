r"""The contents of a slab's files.

A slab is a folder, named after the fingerprint of its namespace in hex, with

``blocks.dat``
    Adjacent slots of `slot_bytes`, the bytes of a block rounded up to 4096.
``slots.tbl``
    A header of 4096 bytes; a seal of 64 bytes per slot (see ``kvoffload.tiers.seal``), zeros for
    none; from the next multiple of 4096 on, a stamp of 8 bytes per slot, which rises with the last
    use of the block. Stamps have no sum: a wrong one only costs a wrong order of eviction.
``namespace.json``
    The namespace, as its canonical JSON.
``lock``
    Locked by the process that has the slab open, with its process id.

====== ===== ==============================================================================
offset bytes meaning of the header, little-endian
====== ===== ==============================================================================
0      8     magic, ``b"KVSLAB\r\n"``
8      4     version of this layout, 2
12     4     bytes before the sum, 316
16     16    fingerprint of the namespace
32     8     bytes of a block
40     8     bytes of a slot
48     8     number of slots
56     4     bytes of the generation's name in UTF-8
60     256   the name, zeros behind it; seals of another generation are not valid
316    8     XXH3-64 of the 316 bytes before
====== ===== ==============================================================================

There are two copies of the header, at 0 and at 2048: the first with the right sum counts. A table
of version 1, of kvoffload 0.4, has no generation: its blocks count as forgotten.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

from kvoffload._checks import MAX_NUM_BLOCKS
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.namespace import FINGERPRINT_BYTES, NAMESPACE
from kvoffload.tiers.region import MAX_BLOCK_BYTES, round_up
from kvoffload.tiers.seal import SEAL_BYTES, xxh3_64

BLOCKS = "blocks.dat"
TABLE = "slots.tbl"
LOCK = "lock"

NEW_TABLE, NEW_NAMESPACE = f"{TABLE}.new", f"{NAMESPACE}.new"
"""Files that are being written to replace another each."""

FILES = (TABLE, NEW_TABLE, BLOCKS, NAMESPACE, NEW_NAMESPACE, "forgetting", LOCK)
"""All names in a slab's folder, those of kvoffload 0.4 too, in an order of removal."""

HEADER_BYTES = 4096
STAMP_BYTES = 8
_COPIES = (0, 2048)
_MAGIC = b"KVSLAB\r\n"
_VERSION = 2
_NAME_BYTES = 256
_FIELDS = struct.Struct(f"<8sII{FINGERPRINT_BYTES}sQQQI{_NAME_BYTES}s")
_SUM = struct.Struct("<Q")


def record_offset(slot: int) -> int:
    """Return the offset of a slot's seal in the table."""
    return HEADER_BYTES + slot * SEAL_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a table."""

    fingerprint: bytes  # of the namespace
    block_bytes: int
    slot_bytes: int  # from slot to slot
    num_slots: int
    generation: Generation  # seals of another one are not valid

    @property
    def stamps_offset(self) -> int:
        """Offset of the stamp of slot 0 in the table."""
        return round_up(record_offset(self.num_slots))

    @property
    def table_bytes(self) -> int:
        """Size of the table."""
        return round_up(self.stamps_offset + self.num_slots * STAMP_BYTES)

    @property
    def data_bytes(self) -> int:
        """Size of the file of blocks."""
        return self.num_slots * self.slot_bytes

    def pack(self) -> bytes:
        """Return the header's 4096 bytes."""
        name = self.generation.name.encode()
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            _FIELDS.size,
            self.fingerprint,
            self.block_bytes,
            self.slot_bytes,
            self.num_slots,
            len(name),
            name,
        )
        copy = fields + _SUM.pack(xxh3_64(fields))
        page = bytearray(HEADER_BYTES)
        for start in _COPIES:
            page[start : start + len(copy)] = copy
        return bytes(page)

    @classmethod
    def unpack(cls, page: bytes) -> Header | None:
        """Read a header; None if no copy is valid."""
        for start in _COPIES:
            fields = page[start : start + _FIELDS.size]
            end = start + _FIELDS.size
            if len(page) < end + _SUM.size:
                return None
            if _SUM.unpack(page[end : end + _SUM.size])[0] != xxh3_64(fields):
                continue
            magic, version, size, fingerprint, block, slot, num_slots, length, name = (
                _FIELDS.unpack(fields)
            )
            if (
                (magic, version, size) == (_MAGIC, _VERSION, _FIELDS.size)
                and 1 <= block <= MAX_BLOCK_BYTES
                and slot == round_up(block)
                and 1 <= num_slots <= MAX_NUM_BLOCKS
            ):
                with contextlib.suppress(ValueError):  # of a name that is none
                    generation = Generation.of(name[:length].decode())
                    return cls(fingerprint, block, slot, num_slots, generation)
        return None

    @staticmethod
    def is_older(page: bytes) -> bool:
        """Return whether a page is the header of a table that kvoffload 0.4 has made."""
        return page[: len(_MAGIC) + 4] == _MAGIC + (1).to_bytes(4, "little")
