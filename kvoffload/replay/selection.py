"""A part of a trace to be replayed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvoffload.traces import Request


class Selection:
    """The first requests of a trace, with all of their blocks or the full ones only.

    Parameters
    ----------
    requests : iterable of Request
        The trace.
    limit : int or None
        Most requests; None for all.
    full_block_tokens : int or None
        Where given, the block size, tokens: a prompt keeps its first ``input_length //
        full_block_tokens`` blocks, because an engine stores no partly filled block. A
        prompt of unknown length keeps all.
    cut_length : bool
        Whether a prompt that loses a block becomes as long as those that it keeps.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        limit: int | None = None,
        full_block_tokens: int | None = None,
        cut_length: bool = False,
    ) -> None:
        self._requests = requests
        self._limit = limit
        self._full_block_tokens = full_block_tokens
        self._cut_length = cut_length

    def __iter__(self) -> Iterator[Request]:
        most = None if self._limit is None else min(self._limit, sys.maxsize)
        chosen = itertools.islice(self._requests, most)
        if self._full_block_tokens is None:
            return chosen
        return map(self._cut, chosen)

    def _cut(self, request: Request) -> Request:
        block_tokens = self._full_block_tokens or 1
        full = request.input_length // block_tokens
        if self._cut_length and request.input_length:
            full = min(full, len(request.hash_ids))
            length = full * block_tokens
            return replace(request, input_length=length, hash_ids=request.hash_ids[:full])
        if request.input_length == 0 or full >= len(request.hash_ids):
            return request
        return replace(request, hash_ids=request.hash_ids[:full])
