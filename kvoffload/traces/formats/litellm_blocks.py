"""Rows of LiteLLM with the ids of prompts' blocks in place of their text.

Source: LiteLLM 1.111, callback `prefix_block_hashes`: chained and keyed hashes of 16 hexadecimal
digits, in the metadata of a row, the last one of a block that may be filled in part. The tokens of
a block are those that the callback is configured with; a row may state them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvoffload.traces.errors import BadLineError

from .base import integer
from .logs import Hashes, Row

FIELD = "prefix_block_hashes"
_LISTS = ("hash_ids", "hashes", "ids", "block_hashes", FIELD)
_SIZES = ("block_size", "block_tokens")
MOST_LEVELS = 3


def hashes_of(row: Row) -> Hashes | None:
    """Return the hashes of a row and the tokens of a block, as far as it states them."""
    found = next(_lists(row, row.given, MOST_LEVELS), None)
    if found is None:
        return None
    holder, hashes = found
    if not all(type(text) is str for text in hashes):
        raise BadLineError(f"{FIELD} must be a list of strings, got another list")
    sizes = (holder.get(name) for name in _SIZES)
    size = next((value for value in sizes if value is not None), None)
    return hashes, None if size is None else integer(size, "block_size", least=1)


def _lists(
    row: Row, holder: dict[str, Any], levels: int
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield the list of hashes in a row or in its metadata, and the object that it is in."""
    given = row.parsed(holder, FIELD) if FIELD in holder else None
    if isinstance(given, list):
        yield holder, given
    elif isinstance(given, dict):
        lists = (given.get(name) for name in _LISTS)
        yield from ((given, found) for found in lists if isinstance(found, list))
    if levels > 1:
        for name in holder:
            if "metadata" in name:
                inner = row.parsed(holder, name)
                if isinstance(inner, dict):
                    yield from _lists(row, inner, levels - 1)
