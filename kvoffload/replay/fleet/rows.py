"""The requests of a trace in the order of a fleet: by arrival, then by place in the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash
from kvoffload.replay.arrivals import NONE, Arrivals
from kvoffload.replay.requests import DecodedTrace

__all__ = ["Blocks", "FleetRows"]

Blocks = npt.NDArray[np.uint32]
"""Numbers of blocks: their indices among the distinct blocks of a trace."""


class FleetRows:
    """The requests of a trace, numbered from 0 by arrival, then by place in the trace.

    Parameters
    ----------
    trace : DecodedTrace
        The requests, with their `arrivals`.
    keys : list of BlockHash
        ``trace.keys()``.
    block_tokens : int
        Tokens per block: a prompt of unknown length counts as long as its blocks.

    Attributes
    ----------
    order : (requests,) int64
        The place of each row in the trace.
    blocks_of : callable
        Returns the blocks of a row, first block first, as numbers: (blocks,) uint32.
    hashes_of : callable
        Returns their hashes.
    keys : list of BlockHash
        The hash of each block.
    nodes : (unique_blocks,) uint32
        Where an engine found each block last.
    unique_blocks : int
        Distinct blocks of all rows.
    lengths : list of int
        Tokens of each row's prompt.

    Raises
    ------
    ValueError
        If the trace has no arrivals.
    """

    def __init__(self, trace: DecodedTrace, keys: list[BlockHash], block_tokens: int) -> None:
        if trace.arrivals is None:
            raise ValueError("trace must have arrivals, got none")
        arrivals: Arrivals = trace.arrivals
        self.order = np.argsort(arrivals.recorded, kind="stable")
        numbers = np.empty_like(self.order)
        numbers[self.order] = np.arange(len(self.order))
        self.recorded, self.wait, self.service, self.answers, self.sessions = (
            column[self.order].tolist()
            for column in (
                arrivals.recorded,
                arrivals.wait,
                arrivals.service,
                arrivals.answers,
                arrivals.sessions,
            )
        )
        following = arrivals.following[self.order]
        has_next = following != NONE
        following[has_next] = numbers[following[has_next]]
        self.following = following.tolist()
        self.names: list[bytes] = arrivals.session_names()
        starts, ends = trace.starts[:-1][self.order], trace.starts[1:][self.order]
        lengths = trace.lengths[self.order]
        lengths = np.where(lengths == 0, (ends - starts) * block_tokens, lengths)
        self.lengths: list[int] = lengths.tolist()
        self.block_tokens = block_tokens
        self.unique_blocks = len(keys)
        self.keys = keys
        self.nodes = np.zeros(len(keys), dtype=np.uint32)
        self.blocks_of = _blocks_of(trace, starts.tolist(), ends.tolist())
        self.hashes_of = _hashes_of(keys, self.blocks_of)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @functools.cached_property
    def numbers(self) -> dict[BlockHash, int]:
        """The number of each block; built if managers report hashes."""
        return {key: number for number, key in enumerate(self.keys)}


def _blocks_of(trace: DecodedTrace, starts: list[int], ends: list[int]) -> Callable[[int], Blocks]:
    blocks = trace.blocks

    def of(row: int) -> Blocks:
        return blocks[starts[row] : ends[row]]

    return of


def _hashes_of(
    keys: list[BlockHash], blocks_of: Callable[[int], Blocks]
) -> Callable[[int], list[BlockHash]]:
    hashes = np.array(keys, dtype=object)

    def of(row: int) -> list[BlockHash]:
        found: list[BlockHash] = hashes[blocks_of(row)].tolist()
        return found

    return of
