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
namespace: bytes in the wrong slot, or written by another model, do not match. Seals of another
generation are not valid. The sums protect against accidents, not against forgery. The threads make
and compare seals (``kvoffload/_core/io.h``).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from kvoffload.errors import describe

from .native import io

SEAL_BYTES = 64
MAX_KEY_BYTES = 40
DIGEST_BYTES = 32
# Its length distinguishes a digest from keys that are stored unchanged.
DIGESTED_BYTES = MAX_KEY_BYTES + 1
_PADDING = bytes(DIGESTED_BYTES - DIGEST_BYTES)


def xxh3_64(data: Any, seed: int = 0) -> int:
    """Return the XXH3-64 of a buffer; release the interpreter's lock for a large one."""
    found: int = io.xxh3_64(data, seed)
    return found


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
