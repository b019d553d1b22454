"""Samples of blocks, drawn by a keyed hash: whoever chooses keys does not choose the sample.

All samples of blocks are drawn with the hash of ``_core/hash.h`` and 64 secret bytes. They come
from the operating system where clients are served; a replay, which must give the same figures every
time, uses `REPEATABLE`, which everyone knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

SECRET_BYTES = 64

REPEATABLE = blake2b(b"kvoffload samples", digest_size=SECRET_BYTES).digest()
"""The secret of replays."""

_given: ContextVar[bytes | None] = ContextVar("_given", default=None)

_MASK = 2**64 - 1

Words = npt.NDArray[np.uint64]


def new_secret() -> bytes:
    """Return a secret for a sample: random, unless `secrets_from` gives one."""
    secret = _given.get()
    return os.urandom(SECRET_BYTES) if secret is None else secret


@contextmanager
def secrets_from(secret: bytes | None) -> Iterator[None]:
    """Let `new_secret` return a secret in this context; None changes nothing."""
    token = _given.set(_given.get() if secret is None else secret)
    try:
        yield
    finally:
        _given.reset(token)


def words_of(secret: bytes) -> list[int]:
    """Return the eight words of a secret."""
    return [int.from_bytes(secret[at : at + 8], "little") for at in range(0, SECRET_BYTES, 8)]


def hash_key(key: bytes, secret: Sequence[int]) -> int:
    """Hash a key with eight secret words; ``_core/hash.h`` does the same."""
    read, length = int.from_bytes, len(key)
    state = secret[0] ^ length
    if length in (32, 36):
        words = [read(key[i : i + 8], "little") ^ secret[1 + i // 8] for i in range(0, 32, 8)]
        tail = read(key[32:], "little")
        left, right = _fold(words[0], words[1]), _fold(words[2], words[3])
        return _fold(left ^ tail ^ secret[5], right ^ state ^ secret[6])
    index = 0
    while length - index > 16:
        first = read(key[index : index + 8], "little")
        second = read(key[index + 8 : index + 16], "little")
        state = _fold(first ^ secret[1] ^ state, second ^ secret[2])
        index += 16
    rest = key[index:]
    left_over = len(rest)
    if left_over >= 4:
        width = 8 if left_over >= 8 else 4
        first, second = read(rest[:width], "little"), read(rest[-width:], "little")
    else:
        first, second = rest[0] << 16 | rest[left_over >> 1] << 8 | rest[-1], 0
    return _fold(
        _fold(first ^ secret[3], second ^ secret[4] ^ state) ^ secret[5], state ^ secret[6]
    )


def hash_ids(ids: Words, secret: bytes = REPEATABLE) -> Words:
    """Return `hash_key` of each id as a key of 8 bytes, little end first."""
    words = [np.uint64(word) for word in words_of(secret)]
    state = words[0] ^ np.uint64(8)
    folded = _fold_all(ids ^ words[3], ids ^ words[4] ^ state)
    return _fold_all(folded ^ words[5], state ^ words[6])


def sample_of(hashed: int) -> int:
    """Return the 24 bits of a hash that determine the sample."""
    return hashed >> 32 & 0xFFFFFF


def _fold(a: int, b: int) -> int:
    """Fold the 128-bit product of two words."""
    product = a * b
    return (product & _MASK) ^ (product >> 64)


def _fold_all(a: Words, b: Words | np.uint64) -> Words:
    """Fold the 128-bit products of pairs of words, of half words at a time."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle, other = a_low * b_high, a_high * b_low
    carry = ((a_low * b_low >> half) + (middle & low) + (other & low)) >> half
    folded: Words = (a * b) ^ (a_high * b_high + (middle >> half) + (other >> half) + carry)
    return folded
