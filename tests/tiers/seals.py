"""Seals as ``kvoffload.tiers.seal`` describes them, written a second time, in Python."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from kvoffload.tiers.seal import seed_of, xxh3_64

_LAYOUT = struct.Struct("<2sBBI40sQ")
_SUM = struct.Struct("<Q")


class Seal(NamedTuple):
    """The fields of a seal."""

    key: bytes
    nbytes: int
    sum: int

    @classmethod
    def of(cls, fingerprint: bytes, key: bytes, block: Any) -> Seal:
        """Return the seal of a block's bytes under a stored key."""
        return cls(key, len(block), xxh3_64(block, seed_of(fingerprint, key)))

    def pack(self, generation: int) -> bytes:
        """Return the 64 bytes."""
        fields = _LAYOUT.pack(b"KV", 1, len(self.key), self.nbytes, self.key[:40], self.sum)
        return fields + _SUM.pack(xxh3_64(fields, generation))
