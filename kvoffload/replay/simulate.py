"""A replay of a decoded trace by one policy at one capacity, counted and not timed.

The protocol is that of `serve`, with two additions that an engine has: a cache of its own in front
(see ``device``), and stores that take some time.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, CPUOffloadingManager

from .counts import Counts, prompt_tokens
from .decoded import DecodedTrace
from .group_simulate import belady_of_groups, count_groups, serve_groups
from .groups import GroupChunks
from .offline import BELADY, CEILINGS, INFINITE, belady, infinite_hits_of_each
from .policies import new_manager
from .protocol import Served, serve
from .steps import StepServed, StepServer

# by field of Counts, the counter of a manager
_COUNTED = {
    "hits": "hit_blocks",
    "stored": "stored_blocks",
    "evicted": "evicted_blocks",
    "refused": "refused_stores",
    "not_admitted": "not_admitted",
}


def simulate(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    *,
    device_hits: npt.NDArray[np.int64],
    pending: int = 0,
    block_tokens: int | None = None,
    groups: GroupChunks | None = None,
    step_tokens: int | None = None,
) -> Counts:
    """Replay a decoded trace.

    The manager is asked for the blocks of a request behind the leading ones that the device has,
    and offered all of them to store. With `step_tokens` it is driven as vLLM's scheduler drives its
    own, by `StepServer`.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    keys : list of BlockHash
        ``trace.keys()``, computed once for many calls.
    policy : str
        A policy string, or ``"belady"`` or ``"infinite"``.
    capacity : int
        Number of blocks; ``"infinite"`` ignores it.
    device_hits : (requests,) int64
        Leading blocks of each request that the device's own cache has.
    pending : int
        Number of further requests during which a store is in flight; 0: it completes at once.
    block_tokens : int, optional
        Tokens per block, for the share of tokens that were hit.
    groups : GroupChunks, optional
        The KV groups of the model: its rules are followed, by `GroupServer`. Capacities are slots
        then, and `device_hits` is what `group_device_tokens` returns.
    step_tokens : int, optional
        Tokens of a prompt that a scheduler step computes at most; it needs `block_tokens`, and has
        no effect with `groups`, which have their own, or on a ceiling.

    Returns
    -------
    Counts

    Raises
    ------
    ValueError
        If `step_tokens` is below 1, or is given without `block_tokens`.
    """
    (counts,) = simulate_in_parts(
        trace,
        keys,
        policy,
        capacity,
        device_hits=device_hits,
        pending=pending,
        parts=1,
        block_tokens=block_tokens,
        groups=groups,
        step_tokens=step_tokens,
    )
    return counts


def simulate_in_parts(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    *,
    device_hits: npt.NDArray[np.int64],
    pending: int = 0,
    parts: int,
    block_tokens: int | None = None,
    groups: GroupChunks | None = None,
    step_tokens: int | None = None,
) -> list[Counts]:
    """Replay a decoded trace and count each part separately; the cache is kept between parts.

    Parameters
    ----------
    trace, keys, policy, capacity, device_hits, pending, block_tokens, groups, step_tokens
        As in `simulate`.
    parts : int
        Number of parts, of equally many requests give or take one.

    Returns
    -------
    list of Counts
        One per part; for a ceiling a single one, of the whole trace.
    """
    if groups is not None and policy == BELADY:
        return [belady_of_groups(trace, capacity, groups, device_hits)]
    if groups is not None:
        of_each = serve_groups(
            trace, keys, policy, capacity, groups, device_tokens=device_hits, pending=pending
        )
        return list(count_groups(trace, of_each, 1 if policy in CEILINGS else parts))
    if policy in CEILINGS:
        return [_ceiling(trace, policy, capacity, device_hits, block_tokens)]
    manager = new_manager(policy, capacity)
    one = _server(manager, block_tokens, step_tokens, ends_stores=not pending)
    in_flight: deque[Served | StepServed] = deque()
    key_of = keys.__getitem__
    rows = zip(trace.rows(), device_hits.tolist(), trace.lengths.tolist(), strict=True)
    before = manager.stats()
    found = []
    for part in range(parts):
        start, end = (trace.num_requests * n // parts for n in (part, part + 1))
        asked = blocks = tokens = hit_tokens = 0
        for row, on_device, length in itertools.islice(rows, end - start):
            hashes = list(map(key_of, row))
            blocks += len(hashes)
            asked += len(hashes) - on_device
            tokens += length
            served = one(hashes, on_device)
            if block_tokens is not None:
                hit_tokens += prompt_tokens(on_device, served.hits, block_tokens, length)
            in_flight.append(served)
            if len(in_flight) > pending:
                in_flight.popleft().complete()
        after = manager.stats()
        counted = {field: after[name] - before[name] for field, name in _COUNTED.items()}
        known = None if block_tokens is None else hit_tokens
        found.append(Counts(end - start, blocks, asked, **counted, tokens=tokens, hit_tokens=known))
        before = after
    return found


def simulate_requests(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    *,
    device_hits: npt.NDArray[np.int64],
    block_tokens: int | None = None,
    groups: GroupChunks | None = None,
    step_tokens: int | None = None,
) -> npt.NDArray[np.int64]:
    """Replay a decoded trace and return the hits of each request; stores complete at once.

    Parameters
    ----------
    trace, keys, policy, capacity, device_hits, block_tokens, groups, step_tokens
        As in `simulate`; `policy` is no ceiling.

    Returns
    -------
    (requests,) int64
    """
    if groups is not None:
        served = serve_groups(trace, keys, policy, capacity, groups, device_tokens=device_hits)
        of_each = (one.hits for one in served)
        return np.fromiter(of_each, dtype=np.int64, count=trace.num_requests)
    manager = new_manager(policy, capacity)
    one = _server(manager, block_tokens, step_tokens, ends_stores=True)
    key_of = keys.__getitem__

    def hits() -> Iterator[int]:
        for row, on_device in zip(trace.rows(), device_hits.tolist(), strict=True):
            served = one(list(map(key_of, row)), on_device)
            served.complete()
            yield served.hits

    return np.fromiter(hits(), dtype=np.int64, count=trace.num_requests)


def _server(
    manager: CPUOffloadingManager,
    block_tokens: int | None,
    step_tokens: int | None,
    *,
    ends_stores: bool,
) -> Callable[[list[BlockHash], int], Served | StepServed]:
    """Return a function that passes a request through a manager."""
    if step_tokens is None:
        return functools.partial(serve, manager)
    return StepServer(manager, block_tokens, step_tokens, ends_stores=ends_stores).serve


def _ceiling(
    trace: DecodedTrace,
    policy: str,
    capacity: int,
    device_hits: npt.NDArray[np.int64],
    block_tokens: int | None,
) -> Counts:
    asked = trace.num_blocks - int(device_hits.sum())
    lengths = trace.lengths.tolist()
    hit_tokens = None
    if policy == INFINITE:
        of_each = infinite_hits_of_each(trace, device_hits)
        hits, stored = int(of_each.sum()), trace.unique_blocks
        if block_tokens is not None:
            rows = zip(device_hits.tolist(), of_each.tolist(), lengths, strict=True)
            hit_tokens = sum(
                prompt_tokens(on_device, found, block_tokens, length)
                for on_device, found, length in rows
            )
    else:
        hits, stored = belady(trace, capacity, device_hits)
    return Counts(
        trace.num_requests,
        trace.num_blocks,
        asked,
        hits,
        stored=stored,
        tokens=sum(lengths),
        hit_tokens=hit_tokens,
    )
