"""The seal of a block: 64 bytes that bind its bytes to its key and to the tier's namespace.

====== ===== ==============================================================================
offset bytes meaning, little-endian
====== ===== ==============================================================================
0      2     magic, ``b"KV"``
2      1     version of this layout, 1
3      1     length of the key: 1 to 40; 41 for the BLAKE2b-32 of any other key
4      4     length of the block, bytes
8      40    the key, zeros behind it
48     8     XXH3-64 of the block's bytes, seeded by XXH3-64(fingerprint + key)
56     8     XXH3-64 of the 56 bytes before, seeded by the generation's number
====== ===== ==============================================================================

The seed makes the sum of the same bytes different under every other key and in every other
namespace: bytes in the wrong slot, or written by another model, do not match. Seals
of another generation are not valid. The sums protect against accidents, not against forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload import IMPLEMENTATION
from kvoffload._extras import require
from kvoffload.errors import describe

__all__ = ["SEAL_BYTES", "Seal", "seed_of", "stored_key", "stored_keys", "xxh3_64"]

SEAL_BYTES = 64
MAGIC = b"KV"
VERSION = 1
MAX_KEY_BYTES = 40
DIGEST_BYTES = 32
# Its length distinguishes a digest from keys that are stored unchanged.
DIGESTED_BYTES = MAX_KEY_BYTES + 1
_PADDING = bytes(DIGESTED_BYTES - DIGEST_BYTES)
_LAYOUT = struct.Struct("<2sBBI40sQ")
_SUM = struct.Struct("<Q")


if TYPE_CHECKING:

    def xxh3_64(data: Any, seed: int = 0) -> int:
        """Return the XXH3-64 of a buffer; release the interpreter's lock for a large one."""
        ...

elif IMPLEMENTATION == "python":
    xxh3_64 = require("xxhash", "kvoffload.tiers without the extensions", "tiers").xxh3_64_intdigest
else:
    from kvoffload._core.io import xxh3_64


def stored_key(key: bytes) -> bytes:
    """Return the stored form of a key: itself, or its BLAKE2b-32 padded with zeros to 41 bytes.

    Raises
    ------
    TypeError
        If `key` is not ``bytes``.
    """
    if type(key) is not bytes:
        raise TypeError(f"key must be bytes, got {type(key).__name__}")
    if 0 < len(key) <= MAX_KEY_BYTES:
        return key
    return blake2b(key, digest_size=DIGEST_BYTES).digest() + _PADDING


def stored_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Consume an iterable of keys and return their stored forms.

    A list of keys that are stored unchanged is returned without a copy. Raises TypeError, with the
    position, if an element is not exactly ``bytes``.
    """
    if type(keys) is not list:
        try:
            keys = list(keys)
        except TypeError:
            raise TypeError(f"keys must be an iterable of bytes, got {describe(keys)}") from None
    if not _BYTES_ONLY.issuperset(map(type, keys)):
        index, wrong = next((i, key) for i, key in enumerate(keys) if type(key) is not bytes)
        raise TypeError(f"keys[{index}] must be bytes, got {type(wrong).__name__}")
    if keys and not (max(map(len, keys)) <= MAX_KEY_BYTES and all(keys)):
        return [stored_key(key) for key in keys]
    return keys


_BYTES_ONLY = frozenset({bytes})


def seed_of(fingerprint: bytes, stored: bytes) -> int:
    """Return the seed of the sum of a block: XXH3-64 of the fingerprint and the stored key."""
    return xxh3_64(fingerprint + stored)


class Seal(NamedTuple):
    """The fields of a seal."""

    key: bytes  # the stored key; see `stored_key`
    nbytes: int  # length of the block
    sum: int  # XXH3-64 of its bytes, seeded by `seed_of`

    @classmethod
    def of(cls, fingerprint: bytes, stored: bytes, block: Any) -> Seal:
        """Return the seal of a block's bytes under a stored key."""
        view = memoryview(block).cast("B")
        return cls(stored, len(view), xxh3_64(view, seed_of(fingerprint, stored)))

    def pack(self, generation: int) -> bytes:
        """Return the 64 bytes."""
        fields = _LAYOUT.pack(
            MAGIC, VERSION, len(self.key), self.nbytes, self.key[:MAX_KEY_BYTES], self.sum
        )
        return fields + _SUM.pack(xxh3_64(fields, generation))

    @classmethod
    def unpack(cls, data: bytes | memoryview, generation: int) -> Seal | None:
        """Read 64 bytes; None if they are not a seal of this generation."""
        if len(data) != SEAL_BYTES or data[:2] != MAGIC:
            return None
        fields = data[: _LAYOUT.size]
        if _SUM.unpack(data[_LAYOUT.size :])[0] != xxh3_64(fields, generation):
            return None
        _, version, key_length, nbytes, key, block_sum = _LAYOUT.unpack(fields)
        if version != VERSION or not 1 <= key_length <= DIGESTED_BYTES:
            return None
        if key_length == DIGESTED_BYTES:
            key += b"\0"
        return cls(key[:key_length], nbytes, block_sum)
