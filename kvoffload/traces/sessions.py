"""Sessions as requests in the order of time.

Published sessions state when their requests came, counted from the session's own start, but not
when the sessions started, so the starts are drawn. Whether the times of subagents count from their
own start or from that of the session shows only once all sessions are read, so these are read into
a temporary file.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from kvoffload._checks import check_int
from kvoffload.errors import describe

from .formats.weka import Session
from .request import Request
from .scratch import Spool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options for sessions that were published without their starts.

    Attributes
    ----------
    starts_s : float
        Seconds over which the starts of sessions are drawn, >= 0; 0: all start together.
    seed : int
        Seed of that draw: ``random.Random(seed).uniform(0, starts_s)`` per session, in their order.
    until_s : float or None
        Seconds after which requests are left out.
    block_tokens : int or None
        Tokens of the blocks to make, a multiple of the sessions' own; None: as they are. Tokens
        that fill no block are dropped, and requests without a block are left out. For
        ``"mooncake-delta"``: the tokens that an id stands for.
    shared_prompts : bool
        Whether tools and system prompt are the same in all sessions with equal token counts of
        both; the ids do not show what sessions share.
    """

    starts_s: float = 0.0
    seed: int = 0
    until_s: float | None = None
    block_tokens: int | None = None
    shared_prompts: bool = False

    def __post_init__(self) -> None:
        for name, value in (("starts_s", self.starts_s), ("until_s", self.until_s)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {describe(value)}")
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.block_tokens is not None:
            check_int("block_tokens", self.block_tokens, 1, 2**31 - 1)


class SessionRows:
    """The rows of sessions, kept in a file until all are known; in memory some 40 bytes each.

    `stream` and `path` are those of a `scratch_file`.
    """

    def __init__(self, options: SessionOptions, stream: BinaryIO, path: str) -> None:
        self._options = options
        self._random = random.Random(options.seed)  # noqa: S311
        self._from_markers = False
        self._times, self._markers = array("d"), array("d")  # seconds
        self._nexts = array("q")  # the stream's next row, -1: none
        self._spool = Spool(stream, path)

    def add(self, session: Session) -> None:
        """Add a session."""
        start = self._random.uniform(0, self._options.starts_s)
        self._from_markers |= session.counts_from_markers
        last: dict[str | None, int] = {}
        for row in session.rows:
            stream = row.request.session
            if stream in last:
                self._nexts[last[stream]] = len(self._times)
            last[stream] = len(self._times)
            self._times.append(start + row.seconds)
            self._markers.append(row.marker)
            self._nexts.append(-1)
            self._spool.add(row.request)

    def requests(self) -> Iterator[Request]:
        """Yield the requests in the order of time; equal times keep the order of the sessions."""
        times = np.array(self._times)
        if self._from_markers:
            times += np.array(self._markers)
        until = math.inf if self._options.until_s is None else self._options.until_s
        order = np.argsort(times, kind="stable")
        order = order[times[order] <= until].tolist()
        for index, (request, ids) in zip(order, self._spool.read(order), strict=True):
            if self._options.block_tokens is not None and not ids:
                continue
            seconds = float(times[index])
            following = self._nexts[index]
            expect = None if following < 0 else round(1000 * float(times[following] - seconds))
            yield replace(
                request,
                timestamp=round(1000 * seconds),
                hash_ids=ids,
                ends=following < 0,
                expect=expect,
            )
