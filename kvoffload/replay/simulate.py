"""A replay of a decoded trace by one policy at one capacity, counted and not timed.

The protocol is that of `serve`, with two additions that an engine has: a cache of its own in front
(see ``device``), and stores that take some time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash

from .counts import Counts
from .decoded import DecodedTrace
from .offline import CEILINGS, INFINITE, belady, infinite_hits
from .policies import new_manager
from .protocol import serve

# counters of a manager, in the order of the fields of Counts from `hits` on
_COUNTED = ("hit_blocks", "stored_blocks", "evicted_blocks", "refused_stores", "not_admitted")


def simulate(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    *,
    device_hits: npt.NDArray[np.int64],
    pending: int = 0,
) -> Counts:
    """Replay a decoded trace.

    Every request is touched whole, before and after its store; the manager is asked for the blocks
    behind the leading ones that the device has, and offered all of them to store.

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

    Returns
    -------
    Counts
    """
    (counts,) = simulate_in_parts(
        trace, keys, policy, capacity, device_hits=device_hits, pending=pending, parts=1
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
) -> list[Counts]:
    """Replay a decoded trace and count each part separately; the cache is kept between parts.

    Parameters
    ----------
    trace, keys, policy, capacity, device_hits, pending
        As in `simulate`.
    parts : int
        Number of parts, of equally many requests give or take one.

    Returns
    -------
    list of Counts
        One per part; for a ceiling a single one, of the whole trace.
    """
    if policy in CEILINGS:
        return [_ceiling(trace, policy, capacity, device_hits)]
    manager = new_manager(policy, capacity)
    in_flight: deque[list[BlockHash]] = deque()
    key_of = keys.__getitem__
    rows = zip(trace.rows(), device_hits.tolist(), strict=True)
    before = manager.stats()
    found = []
    for part in range(parts):
        start, end = (trace.num_requests * n // parts for n in (part, part + 1))
        asked = blocks = 0
        for row, on_device in itertools.islice(rows, end - start):
            hashes = list(map(key_of, row))
            blocks += len(hashes)
            asked += len(hashes) - on_device
            in_flight.append(serve(manager, hashes, on_device).to_store)
            if len(in_flight) > pending:
                manager.complete_store(in_flight.popleft())
        after = manager.stats()
        counted = (after[name] - before[name] for name in _COUNTED)
        found.append(Counts(end - start, blocks, asked, *counted))
        before = after
    return found


def simulate_requests(
    trace: DecodedTrace,
    keys: list[BlockHash],
    policy: str,
    capacity: int,
    *,
    device_hits: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Replay a decoded trace and return the hits of each request; stores complete at once.

    Parameters
    ----------
    trace, keys, policy, capacity, device_hits
        As in `simulate`; `policy` is no ceiling.

    Returns
    -------
    (requests,) int64
    """
    manager = new_manager(policy, capacity)
    key_of = keys.__getitem__

    def hits() -> Iterator[int]:
        for row, on_device in zip(trace.rows(), device_hits.tolist(), strict=True):
            served = serve(manager, list(map(key_of, row)), on_device)
            manager.complete_store(served.to_store)
            yield served.hits

    return np.fromiter(hits(), dtype=np.int64, count=trace.num_requests)


def _ceiling(
    trace: DecodedTrace, policy: str, capacity: int, device_hits: npt.NDArray[np.int64]
) -> Counts:
    asked = trace.num_blocks - int(device_hits.sum())
    if policy == INFINITE:
        hits, stored = infinite_hits(trace, device_hits), trace.unique_blocks
    else:
        hits, stored = belady(trace, capacity, device_hits)
    return Counts(trace.num_requests, trace.num_blocks, asked, hits, stored=stored)
