"""Which part of a trace is replayed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvoffload.traces import Request


class Selection:
    """Iterate over the first requests of a trace, with all of their blocks or the full ones only.

    Parameters
    ----------
    requests : iterable of Request
        The trace.
    limit : int or None
        How many requests at most; None for all.
    full_block_tokens : int or None
        Where given, the block size, tokens: a prompt keeps its first ``input_length //
        full_block_tokens`` blocks, because an engine stores no block that is filled in part. A
        prompt of unknown length keeps all.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        limit: int | None = None,
        full_block_tokens: int | None = None,
    ) -> None:
        self._requests = requests
        self._limit = limit
        self._full_block_tokens = full_block_tokens

    def __iter__(self) -> Iterator[Request]:
        most = None if self._limit is None else min(self._limit, sys.maxsize)
        chosen = itertools.islice(self._requests, most)
        if self._full_block_tokens is None:
            return chosen
        return map(self._cut, chosen)

    def _cut(self, request: Request) -> Request:
        full = request.input_length // (self._full_block_tokens or 1)
        if request.input_length == 0 or full >= len(request.hash_ids):
            return request
        return replace(request, hash_ids=request.hash_ids[:full])
