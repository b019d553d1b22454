"""Block hashes and the few steps that nearly every test takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from kvoffload import BlockHash

METHODS = (
    "lookup",
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "release",
)
"""The methods of a manager that take a batch."""

KEY_LENGTHS = (1, 2, 16, 32, 35, 36, 37, 64, 255, 256, 300, 5000)
"""Lengths on each side of every size at which an index might change its ways."""


@cache
def _digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def block_hash(number: int, length: int = 32) -> BlockHash:
    """Return the `number`-th block hash, `length` bytes long (from 4 up all are distinct).

    Each call returns an object of its own.
    """
    digest = _digest(number)
    return BlockHash((digest * (length // len(digest) + 1))[:length])


def block_hashes(*numbers: int) -> list[BlockHash]:
    """Return the hashes with these numbers."""
    return [block_hash(number) for number in numbers]


A, B, C, D, E, F, G, H = block_hashes(*range(8))
"""Eight hashes for tests that name each block."""

NAMES: dict[bytes, str] = dict(zip((A, B, C, D, E, F, G, H), "ABCDEFGH", strict=True))


def names(hashes: Iterable[bytes]) -> str:
    """Return the named hashes as letters, for comparisons that read well when they fail."""
    return "".join(NAMES[block] for block in hashes)


def once(hashes: Iterable[BlockHash]) -> Iterator[BlockHash]:
    """Return a generator over the hashes, which can be read once."""
    yield from list(hashes)


def store(manager: Any, hashes: Iterable[bytes]) -> Any:
    """Store a batch to the end and return what `prepare_store` gave, which must not be None."""
    output = manager.prepare_store(hashes)
    assert output is not None, "the store was refused"
    manager.complete_store(output.block_hashes_to_store)
    return output


def slots(spec: Any) -> list[int]:
    """Return the block ids of a load or store spec."""
    return [int(block_id) for block_id in spec.block_ids]
