"""The lookup-hash log of LMCache: JSON Lines of `chunk_hashes`, a line a lookup.

Source: LMCache's `lookup_hash` logging subscriber and its cache simulator (``lmcache server
--lookup-hash-log-dir``). `timestamp` is Unix time, seconds; `chunk_hashes` are hexadecimal and
cover full chunks of `chunk_size` tokens only, `seq_len` counts all tokens of the prompt. The answer
is not known. Models do not share chunks, so the hash of a chunk counts together with `model_name`.
"""

from __future__ import annotations

from hashlib import blake2b

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import MAX_SECONDS, Format, field, hexadecimal_id, integer, json_object, number

MAX_NAMESPACE = 64  # bytes of a model's name that are taken as they are


class LMCacheParser:
    """Parse lines in this format; time counts from the first line, and never below it."""

    def __init__(self) -> None:
        self.block_tokens: int | None = None
        self._sizes: set[int] = set()  # two at most: more tell nothing more
        self._start: int | float | None = None

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        row = json_object(line)
        seconds = number(field(row, "timestamp"), "timestamp", MAX_SECONDS)
        chunk_size = integer(field(row, "chunk_size"), "chunk_size", least=1)
        length = integer(field(row, "seq_len"), "seq_len")
        hashes = field(row, "chunk_hashes")
        if not isinstance(hashes, list) or not all(type(value) is str for value in hashes):
            raise BadLineError(f"chunk_hashes must be a list of strings, got {describe(hashes)}")
        model = row.get("model_name", "")
        if type(model) is not str:
            raise BadLineError(f"model_name must be a string, got {describe(model)}")
        namespace = model.encode()
        if len(namespace) > MAX_NAMESPACE:  # it is hashed again with every chunk
            namespace = blake2b(namespace).digest()
        hash_ids = tuple(
            hexadecimal_id(value, f"chunk_hashes[{position}]", namespace)
            for position, value in enumerate(hashes)
        )
        if self._start is None:
            self._start = seconds
        if len(self._sizes) < 2:
            self._sizes.add(chunk_size)
            self.block_tokens = chunk_size if len(self._sizes) == 1 else None
        since = max(0, seconds - self._start)
        return Request(round(since * 1000), length, 0, hash_ids)


LMCACHE = Format(
    "lmcache", "JSON Lines with chunk_hashes, LMCache's lookup-hash log", LMCacheParser
)
