"""Replays of a decoded trace of a model with several KV groups, counted and not timed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash
from kvoffload._checks import MAX_NUM_BLOCKS

from .counts import Counts
from .decoded import DecodedTrace
from .group_replay import GroupServed, GroupServer
from .groups import GroupChunks
from .offline import INFINITE, belady
from .policies import new_manager

__all__ = ["belady_of_groups", "count_groups", "serve_groups"]


def serve_groups(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    chunks: GroupChunks,
    *,
    device_tokens: npt.NDArray[np.int64],
    pending: int = 0,
) -> Iterator[GroupServed]:
    """Yield what each request makes a manager do.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    keys : list of BlockHash
        ``trace.keys()``.
    policy : str
        A policy string, or ``"infinite"``.
    capacity : int
        Slots; ``"infinite"`` ignores it.
    chunks : GroupChunks
        The rules.
    device_tokens : (requests, 2) int64
        What `group_device_tokens` returns.
    pending : int
        Number of further requests during which stores are in flight.
    """
    if policy == INFINITE:
        policy = "lru"
        capacity = min(trace.unique_blocks * len(chunks.chunk_tokens), MAX_NUM_BLOCKS)
    server = GroupServer(chunks, new_manager(policy, capacity), ends_stores=not pending)
    in_flight: deque[GroupServed] = deque()
    rows = zip(trace.rows(), trace.lengths.tolist(), device_tokens.tolist(), strict=True)
    for row, input_length, (local, junction) in rows:
        hashes = [keys[block] for block in row]
        length = chunks.length_of(input_length, len(row))
        served = server.serve(hashes, length, local, junction)
        in_flight.append(served)
        if len(in_flight) > pending:
            server.complete(in_flight.popleft())
        yield served


def count_groups(
    trace: DecodedTrace, served: Iterator[GroupServed], parts: int
) -> Iterator[Counts]:
    """Yield the counts of each part of a trace, of equally many requests give or take one."""
    for part in range(parts):
        start, end = (trace.num_requests * n // parts for n in (part, part + 1))
        asked = hits = loaded = stored = evicted = refused = declined = hit_tokens = 0
        lengths = trace.lengths[start:end].tolist()
        for length, one in zip(lengths, served, strict=False):
            asked += one.asked
            hits += one.hits
            hit_tokens += one.hits if length else 0  # as tokens, of prompts of known length
            loaded += len(one.loaded)
            stored += len(one.stored)
            evicted += len(one.evicted)
            refused += one.refused
            declined += one.not_admitted
        yield Counts(
            end - start,
            int(trace.starts[end] - trace.starts[start]),
            asked,
            hits,
            stored,
            evicted,
            refused,
            declined,
            sum(lengths),
            hit_tokens,
            loaded,
        )


def belady_of_groups(
    trace: DecodedTrace, capacity: int, chunks: GroupChunks, device_tokens: npt.NDArray[np.int64]
) -> Counts:
    """Return an upper bound of every policy's hits: Belady's choice over one of the full groups.

    Each full group stores every chunk, so that one has the slots divided by their number; all of
    the slots where the groups have chunks of several sizes, whose shares differ with the trace.

    Raises
    ------
    ValueError
        If no group is full: nothing bounds the hits then.
    """
    if not chunks.num_full:
        raise ValueError("policy must not be 'belady' where no group is full")
    full = chunks.full_chunk_tokens
    chunk = min(full)
    copies = len(full) if max(full) == chunk else 1
    stride = chunk // chunks.block_tokens
    rows, asked = [], 0
    for row, input_length, local in zip(
        trace.rows(), trace.lengths.tolist(), device_tokens[:, 0].tolist(), strict=True
    ):
        length = chunks.length_of(input_length, len(row))
        rows.append(row[stride - 1 : length // chunks.block_tokens : stride])
        asked += length - local
    of_group = DecodedTrace(
        starts=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        blocks=np.fromiter(itertools.chain.from_iterable(rows), dtype=np.uint32),
        ids=trace.ids,
        lengths=trace.lengths,
    )
    hits, stored = belady(of_group, capacity // copies, device_tokens[:, 0] // chunk)
    return Counts(
        trace.num_requests,
        trace.num_blocks,
        asked,
        hits * chunk,
        stored=stored * copies,
        tokens=sum(trace.lengths.tolist()),
    )
