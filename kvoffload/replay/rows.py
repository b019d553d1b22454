"""The requests of a trace in the order in which a replay serves them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash

from .arrivals import NONE
from .device import Found, device_hits
from .groups import GroupChunks
from .hints import Told
from .requests import Blocks, DecodedTrace


class Rows:
    """The requests of a trace, numbered from 0.

    With arrivals they are in the order of these, then of the trace; else in that of the trace.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    groups : GroupChunks
        The KV groups of the model.
    keys : callable
        Returns ``trace.keys()``.

    Attributes
    ----------
    order : (requests,) int64
        The place of each row in the trace.
    starts : (requests + 1,) int64
        Index in `blocks` of each row's first block, then the length of `blocks`.
    blocks : (n,) uint32
        The blocks of all rows as numbers.
    nodes : (unique_blocks,) uint32
        Where an engine found each block last.
    unique_blocks : int
        Distinct blocks of all rows.
    whole : (requests,) int64
        Tokens of each row's prompt as `groups` count them: see `GroupChunks.length_of`.
    tokens : (requests,) int64
        Tokens of its prompt; where they are not known, those of its blocks, or 0 if these are not
        known either.
    """

    def __init__(
        self, trace: DecodedTrace, groups: GroupChunks, keys: Callable[[], list[BlockHash]]
    ) -> None:
        self._trace, self._keys = trace, keys
        self._arrivals: Any = trace.arrivals
        self.groups = groups
        sizes = np.diff(trace.starts)
        self.order = np.arange(len(sizes))
        if trace.arrivals is not None:
            self.order = np.argsort(trace.arrivals.recorded, kind="stable")
        self.starts, self.blocks = trace.starts, trace.blocks
        lengths = trace.lengths
        if not self.is_as_recorded:
            sizes, lengths = sizes[self.order], lengths[self.order]
            self.starts = np.cumsum(np.append(0, sizes))
            places = np.repeat(trace.starts[self.order] - self.starts[:-1], sizes)
            self.blocks = trace.blocks[places + np.arange(len(places))]
        self.unique_blocks = trace.unique_blocks
        self.nodes = np.zeros(self.unique_blocks, dtype=np.uint32)
        self.lengths = lengths
        self.whole = sizes * groups.block_tokens
        if not groups.is_plain:
            pairs = map(groups.length_of, lengths.tolist(), sizes.tolist())
            self.whole = np.fromiter(pairs, dtype=np.int64, count=len(sizes))
        self.tokens = np.where(lengths > 0, lengths, self.whole if groups.knows_tokens else 0)
        self._found: dict[int, Found] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts) - 1

    @property
    def is_as_recorded(self) -> bool:
        """Whether the rows are in the order of the trace."""
        return bool((self.order[1:] > self.order[:-1]).all())

    def blocks_of(self, row: int) -> Blocks:
        """Return the blocks of a row, first block first, as numbers: (blocks,) uint32."""
        first, end = self._bounds[row]
        return self.blocks[first:end]

    def hashes_of(self, row: int) -> list[BlockHash]:
        """Return the hashes of a row's blocks."""
        first, end = self._bounds[row]
        found: list[BlockHash] = self._hashes[self.blocks[first:end]].tolist()
        return found

    @functools.cached_property
    def keys(self) -> list[BlockHash]:
        """The hash of each block."""
        return self._keys()

    @functools.cached_property
    def numbers(self) -> dict[BlockHash, int]:
        """The number of each block; built if managers report hashes."""
        return {key: number for number, key in enumerate(self.keys)}

    @functools.cached_property
    def _hashes(self) -> npt.NDArray[np.object_]:
        return np.array(self.keys, dtype=object)

    @functools.cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        starts = self.starts.tolist()
        return list(itertools.pairwise(starts))

    def on_device(self, slots: int) -> Found:
        """Return what an accelerator's own cache of `slots` slots has of each row."""
        if slots not in self._found:
            self._found[slots] = device_hits(self, slots)
        return self._found[slots]

    @property
    def has_hints(self) -> bool:
        """Whether the clients of the trace give hints."""
        return self._trace.hints is not None

    def told(self) -> Iterator[Told | None]:
        """Return the hints of each row, None without hints."""
        hints = self._trace.hints
        return itertools.repeat(None, len(self)) if hints is None else hints.of_each(self.order)

    @functools.cached_property
    def lies(self) -> npt.NDArray[np.bool_]:
        """Whether the session of each row gives false hints."""
        hints = self._trace.hints
        return np.zeros(len(self), np.bool_) if hints is None else hints.lies[self.order]

    # -- in time -------------------------------------------------------------------------------

    def column(self, name: str) -> list[int]:
        """Return a column of the arrivals: see `Arrivals`."""
        found: list[int] = getattr(self._arrivals, name)[self.order].tolist()
        return found

    @functools.cached_property
    def answers(self) -> list[int]:
        """The tokens of the answers; 0 without arrivals."""
        return [0] * len(self) if self._trace.arrivals is None else self.column("answers")

    @functools.cached_property
    def sessions(self) -> list[int]:
        """The numbers of the sessions, -1 for none."""
        return self.column("sessions")

    @functools.cached_property
    def names(self) -> list[bytes]:
        """The name of each session."""
        found: list[bytes] = self._arrivals.session_names()
        return found

    @functools.cached_property
    def following(self) -> list[int]:
        """The next row of each row's session, or -1."""
        numbers = np.empty_like(self.order)
        numbers[self.order] = np.arange(len(self))
        following = self._arrivals.following[self.order]
        has_next = following != NONE
        following[has_next] = numbers[following[has_next]]
        found: list[int] = following.tolist()
        return found
