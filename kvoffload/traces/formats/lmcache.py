"""The lookup-hash log of LMCache: JSON Lines of `chunk_hashes`, a line per lookup.

Source: LMCache's `lookup_hash` logging subscriber and its cache simulator (``lmcache server
--lookup-hash-log-dir``). `timestamp` is Unix time, seconds; `chunk_hashes` are hexadecimal and
cover full chunks of `chunk_size` tokens only, `seq_len` counts all tokens of the prompt. The answer
is not known. The `shapes` and `dtypes` of a chunk's tensors give its bytes. Models do not share
chunks, so the hash of a chunk counts together with `model_name`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import (
    MAX_SECONDS,
    Agreed,
    Format,
    HexadecimalIds,
    Parser,
    field,
    integer,
    json_object,
    number,
    text,
)

MOST_MODELS = 5  # that a message names, and whose chunks are remembered
MOST_TENSORS = 256  # of a chunk, and dimensions of one
MAX_LENGTH = 2**40
_ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


class LMCacheParser(Parser):
    """A parser of lines in this format; time counts from the first line, and is never negative."""

    def __init__(self) -> None:
        self._tokens, self._bytes = Agreed(), Agreed()
        self._ids: dict[bytes, HexadecimalIds] = {}
        self._models: dict[str, None] = {}  # some of them, for messages

    @property
    def nothing_text(self) -> str:
        """The models named so far in words, or an empty text."""
        return "requests to " + ", ".join(self._models) if self._models else ""

    def requests(self, line: bytes) -> Sequence[Request]:
        """Parse a line."""
        row = json_object(line)
        seconds = number(field(row, "timestamp"), "timestamp", MAX_SECONDS)
        chunk_size = integer(field(row, "chunk_size"), "chunk_size", least=1)
        length = integer(field(row, "seq_len"), "seq_len")
        hashes = field(row, "chunk_hashes")
        if not isinstance(hashes, list) or not all(type(value) is str for value in hashes):
            raise BadLineError(f"chunk_hashes must be a list of strings, got {describe(hashes)}")
        model = row.get("model_name", "")
        namespace = text(model, "model_name").encode()  # bounded: each chunk is hashed with it
        if len(self._models) < MOST_MODELS:
            self._models[describe(model)] = None
        if self.model_name not in (None, model):
            return ()
        if namespace not in self._ids and len(self._ids) >= MOST_MODELS:
            self._ids.clear()
        ids = self._ids.setdefault(namespace, HexadecimalIds(namespace))
        hash_ids = ids.of(hashes, "chunk_hashes[{}]")
        if self.start is None:
            self.start = seconds
        self.block_tokens = self._tokens.with_one(chunk_size)
        self.block_bytes = self._bytes.with_one(_chunk_bytes(row))
        since = max(0, seconds - self.start)
        return (Request(round(since * 1000), length, 0, hash_ids),)


def _chunk_bytes(row: dict[str, Any]) -> int | None:
    """Return the bytes of a chunk by the shapes and types of its tensors; None without these."""
    shapes, dtypes = row.get("shapes"), row.get("dtypes")
    if not (isinstance(shapes, list) and isinstance(dtypes, list)):
        return None
    if not 1 <= len(shapes) == len(dtypes) <= MOST_TENSORS:
        return None
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        element = _ELEMENT_BYTES.get(dtype.removeprefix("torch.")) if type(dtype) is str else None
        if element is None or not isinstance(shape, list) or not 1 <= len(shape) <= MOST_TENSORS:
            return None
        if not all(type(length) is int and 1 <= length <= MAX_LENGTH for length in shape):
            return None
        total += math.prod(shape) * element
    return total if total <= MAX_LENGTH else None


LMCACHE = Format("lmcache", LMCacheParser, has_hashes=True)
