"""Rows of LiteLLM with the ids of prompts' blocks in place of their text.

Source: LiteLLM 1.111, callback `prefix_block_hashes`: chained and keyed hashes of 16 hexadecimal
digits, in the metadata of a row, the last one of a block that may be filled in part. The tokens of
a block are those that the callback is configured with; a row may state them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvoffload._extras import require
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.prompt_blocks import PromptOptions
from kvoffload.traces.request import MAX_TOKENS, Request

from .base import HexadecimalIds, Parser, bounded_name, integer, json_object
from .clock import unix_seconds
from .gateways import LITELLM
from .logs import Log, Row, name_at, output_at

__all__ = ["LITELLM_BLOCKS", "LiteLLMBlocksParser"]

FIELD = "prefix_block_hashes"
_LISTS = ("hash_ids", "hashes", "ids", "block_hashes", FIELD)
_SIZES = ("block_size", "block_tokens")
MOST_LEVELS = 3


class LiteLLMBlocksParser(Parser):
    """A parser of lines in this format; times are Unix times, milliseconds."""

    def __init__(self, options: PromptOptions) -> None:
        msgspec = require("msgspec", "reading a trace")
        self._decode = msgspec.json.Decoder().decode
        self._faults = (msgspec.MsgspecError, UnicodeError, RecursionError)
        self._named = options.block_tokens
        self._sizes: set[int | None] = set()  # two at most
        self._ids: dict[str, HexadecimalIds] = {}
        self._without = 0

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        (request,) = self.requests(line) or (None,)
        if request is None:
            raise BadLineError(f"must have {FIELD}, got none")
        return request

    def requests(self, line: bytes) -> Sequence[Request]:
        """Parse a line; a row without ids is counted."""
        row = Row(json_object(line), self._unpacked)
        found = next(_lists(row, row.given, MOST_LEVELS), None)
        if found is None:
            self._without += 1
            return ()
        holder, hashes = found
        if not all(type(text) is str for text in hashes):
            raise BadLineError(f"{FIELD} must be a list of strings, got another list")
        sizes = (holder.get(name) for name in _SIZES)
        size = next((value for value in sizes if value is not None), self._named)
        if size is not None:
            integer(size, "block_size", least=1)
        if len(self._sizes) < 2:
            self._sizes.add(size)
        self.block_tokens = next(iter(self._sizes)) if len(self._sizes) == 1 else None
        _, time = row.first(LITELLM.fields.time)
        seconds = 0.0 if time is None else unix_seconds(time, "startTime")
        self.start = None if time is None else 0.0
        tokens = row.at("prompt_tokens")
        length = 0 if tokens is None else integer(tokens, "prompt_tokens", largest=MAX_TOKENS)
        _, model = name_at(row, LITELLM.fields.model)
        _, session = name_at(row, LITELLM.fields.session)
        _, output = output_at(row, LITELLM.fields.output)
        ids = self._ids.get(model)
        if ids is None:
            self._ids.clear()
            ids = self._ids[model] = HexadecimalIds(model.encode("utf-8", "surrogatepass"))
        return (
            Request(
                round(1000 * seconds),
                length,
                output,
                ids.of(hashes, FIELD + "[{}]"),
                bounded_name(session) if session else None,
            ),
        )

    @property
    def remarks(self) -> list[str]:
        """Rows without ids, in words."""
        return [f"{self._without:,} rows left out: without {FIELD}"] if self._without else []

    @property
    def nothing_text(self) -> str:
        """What the lines held instead of requests, in words, or an empty text."""
        return f"{self._without:,} rows without {FIELD}" if self._without else ""

    def _unpacked(self, value: str) -> Any:
        try:
            return self._decode(value)
        except self._faults:
            return value


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


def has_hashes(row: Row) -> bool:
    """Return whether a row has a list of hashes."""
    return next(_lists(row, row.given, MOST_LEVELS), None) is not None


LITELLM_BLOCKS = Log(
    "litellm-blocks",
    "rows of LiteLLM's callback prefix_block_hashes: ids of blocks, and no text",
    is_one=has_hashes,
)
