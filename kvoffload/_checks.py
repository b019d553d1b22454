"""Checks of arguments, with one text per rule in every implementation.

A message names the argument, the rule and the value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from .errors import describe, unknown_name
from .types import BlockHash, BlockStatus, Hints

# Slots are counted in an int32 by the engines that use them.
MAX_NUM_BLOCKS = 2**31 - 1
MAX_REF_CNT = 2**31 - 1
_INT64_MAX = 2**63 - 1

_BYTES_ONLY = frozenset({bytes})


def check_int(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = _INT64_MAX
) -> int:
    """Return `value` as an int within bounds; TypeError if it is a bool or has no ``__index__``."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe(value)}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {describe(number)}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be <= {maximum}, got {describe(number)}")
    return number


def check_number(name: str, value: Any, maximum: float) -> float:
    """Return `value` as a float in ``(0, maximum]``; TypeError if it is no number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if not 0 < value <= maximum:
        raise ValueError(f"{name} must be in (0, {maximum:g}], got {describe(value)}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is a bool of Python or numpy; TypeError if not."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {describe(value)}")
    return bool(value)


def check_instance(name: str, value: Any, kinds: Any, text: str) -> Any:
    """Return `value` if it is an instance of `kinds`, in words `text`; TypeError if not."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {text}, got {describe(value)}")
    return value


def check_word(name: str, value: Any, words: Collection[str]) -> str:
    """Return `value` if it is one of `words`; TypeError if it is no string, ValueError if not."""
    if check_instance(name, value, str, "a string") not in words:
        raise unknown_name(name, value, words)
    return str(value)


def check_hints(hints: Any) -> Hints | None:
    """Return `hints` if they are ``Hints`` or None; TypeError if not."""
    checked: Hints | None = check_instance("hints", hints, Hints | None, "Hints or None")
    return checked


def check_part(start: Any, stop: Any, size: int) -> tuple[int, int]:
    """Return the bounds of a part of `size` blocks as ints, ``0 <= start <= stop <= size``.

    A `stop` of None is the end.
    """
    start = check_int("start", start, 0, size)
    return start, size if stop is None else check_int("stop", stop, start, size)


def check_block_size(block_size: Any) -> int:
    """Return `block_size`, tokens per block, as an int >= 1."""
    return check_int("block_size", block_size, 1)


def check_num_blocks(num_blocks: Any) -> int:
    """Return `num_blocks` as an int in ``0 ... 2**31 - 1``."""
    return check_int("num_blocks", num_blocks, 0, MAX_NUM_BLOCKS)


def check_cache_capacity(cache_capacity: Any) -> int:
    """Return `cache_capacity`, in blocks, as an int in ``0 ... 2**31 - 1``."""
    return check_int("cache_capacity", cache_capacity, 0, MAX_NUM_BLOCKS)


def check_hash(block_hash: Any) -> BlockHash:
    """Return `block_hash` if it is exactly ``bytes``, else TypeError; ValueError if it is empty."""
    if type(block_hash) is not bytes:
        raise TypeError(f"block_hash must be bytes, got {type(block_hash).__name__}")
    if not block_hash:
        raise ValueError("block_hash must not be empty, got b''")
    return BlockHash(block_hash)


def check_status(status: Any, name: str = "status") -> BlockStatus:
    """Return `status` if it is a ``BlockStatus``, else TypeError."""
    checked: BlockStatus = check_instance(name, status, BlockStatus, "a BlockStatus")
    return checked


def _iterate(name: str, hashes: Any) -> Iterable[Any]:
    if isinstance(hashes, bytes | bytearray | memoryview | str):
        hint = ": wrap it in a list" if type(hashes) is bytes else ""
        raise TypeError(f"{name} must be an iterable of block hashes, got {describe(hashes)}{hint}")
    try:
        iterator: Iterable[Any] = iter(hashes)
    except TypeError:
        raise TypeError(
            f"{name} must be an iterable of block hashes, got {describe(hashes)}"
        ) from None
    return iterator


def as_batch(hashes: Iterable[bytes], name: str = "hashes") -> list[BlockHash]:
    """Consume an iterable of block hashes whole and return it as a list of checked elements.

    A list is returned itself, not copied. TypeError if an element is not exactly ``bytes``, or
    `hashes` is itself a hash; ValueError if an element is empty; both give its position.
    """
    batch = hashes if type(hashes) is list else list(_iterate(name, hashes))
    # Both tests run at C speed; the position is looked for only when one of them fails.
    if not (_BYTES_ONLY.issuperset(map(type, batch)) and all(batch)):
        raise batch_error(batch, name)
    return batch


def batch_error(batch: Sequence[Any], name: str = "hashes") -> TypeError | ValueError:
    """Build the error of the first element of `batch` that is not a block hash."""
    for position, block_hash in enumerate(batch):
        if type(block_hash) is not bytes:
            return TypeError(f"{name}[{position}] must be bytes, got {type(block_hash).__name__}")
        if not block_hash:
            return ValueError(f"{name}[{position}] must not be empty, got b''")
    return ValueError(f"{name} changed while it was read")
