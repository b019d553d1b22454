"""Replays of a trace: request by request with times, or decoded with counts.

Both serve requests with `serve`, or with `GroupServer` if a model has several KV groups or prompts
are offered step by step.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from kvoffload import IMPLEMENTATION, BlockHash, CPUOffloadingManager, OffloadingManager
from kvoffload._checks import MAX_NUM_BLOCKS
from kvoffload.errors import describe
from kvoffload.policies import registry
from kvoffload.traces import Request

from .device import DeviceCache, device_hits_and_junctions
from .groups import GroupChunks
from .hints import Told, TraceHints
from .offline import BELADY, CEILINGS, INFINITE, belady_of_groups, infinite_hits_of_each
from .policies import is_own, new_manager, new_miniature
from .requests import BlockKeys, DecodedTrace
from .results import DurationHistogram, ReplayResult, missed_percentiles
from .serving import GroupServed, GroupServer, Learning, Served, serve

__all__ = ["Demand", "replay", "simulate", "simulate_in_parts", "simulate_requests"]

PROGRESS_REQUESTS = 64  # between two calls of the progress function
ROWS_AT_ONCE = 1024  # requests served before Ctrl-C is handled

# by field of ReplayResult, the counter of a manager
COUNTED = {
    "loaded_slots": "loaded_blocks",
    "stored_slots": "stored_blocks",
    "evicted_slots": "evicted_blocks",
    "refused": "refused_stores",
    "not_admitted": "not_admitted",
}

Hits = npt.NDArray[np.int64]
Row = tuple[list[BlockHash], int]  # a prompt's blocks and tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of a trace behind the accelerator's own cache."""

    trace: DecodedTrace
    groups: GroupChunks
    device_hits: Hits  # (requests,) as `device_hits_and_junctions` returns them
    junctions: Hits  # likewise

    @classmethod
    def of(cls, trace: DecodedTrace, groups: GroupChunks, device_slots: int) -> Demand:
        """Return the demand behind a cache of `device_slots` slots."""
        return cls(trace, groups, *device_hits_and_junctions(trace, device_slots, groups))

    @property
    def whole(self) -> Hits:
        """The tokens of each request, as from `GroupChunks.length_of`."""
        blocks = np.diff(self.trace.starts)
        if self.groups.is_plain:
            return np.asarray(blocks * self.groups.block_tokens)
        lengths = map(self.groups.length_of, self.trace.lengths.tolist(), blocks.tolist())
        return np.fromiter(lengths, dtype=np.int64, count=len(blocks))

    @property
    def local(self) -> Hits:
        """The tokens of each request that the accelerator's own cache has."""
        return np.asarray(self.device_hits * self.groups.block_tokens)

    @property
    def asked(self) -> Hits:
        """The tokens of each request that the manager is asked for."""
        return np.asarray(self.whole - self.local)

    def missed(self, hits: Hits, part: slice) -> Hits:
        """Return the tokens that each request of a part must compute, from those it hit."""
        lengths = self.trace.lengths[part]
        if not lengths.all():
            lengths = np.where(lengths > 0, lengths, self.whole[part])
        return np.asarray(np.maximum(0, lengths - self.local[part] - hits))

    @property
    def is_bounded(self) -> bool:
        """Whether an unbounded cache bounds every policy's hits: `GroupChunks.is_bounded`."""
        return self.groups.is_bounded(junctions=bool(self.junctions.any()))

    def simulate(self, policy: str, capacity: int) -> ReplayResult:
        """Replay the trace by a policy at a capacity."""
        return self.in_parts(policy, capacity)[0]

    def in_parts(
        self,
        policy: str,
        capacity: int,
        keys: list[BlockHash] | None = None,
        pending: int = 0,
        parts: int = 1,
    ) -> list[ReplayResult]:
        """Replay the trace as `simulate_in_parts` does."""
        groups = self.groups
        parts = 1 if policy in CEILINGS else parts
        ends = [self.trace.num_requests * part // parts for part in range(parts + 1)]
        slices = list(itertools.starmap(slice, itertools.pairwise(ends)))
        if policy == BELADY:
            hits, stored = belady_of_groups(self.trace, capacity, groups, self.device_hits)
            counts = {"loaded_slots": None, "stored_slots": stored}
            return [_result(self, slices[0], hits, None, **counts)]
        if policy == INFINITE and groups.is_plain:
            found = infinite_hits_of_each(self.trace, self.device_hits) * groups.block_tokens
            return [counted(self, slices[0], found, stored_slots=self.trace.unique_blocks)]
        if policy == INFINITE:
            policy = "lru"
            capacity = min(self.trace.unique_blocks * len(groups.chunk_tokens), MAX_NUM_BLOCKS)
        serving = self.serving(policy, capacity, keys, pending)
        before = serving.stats()
        results = []
        for part in slices:
            found = serving.hits(part)
            after = serving.stats()
            counts = {field: after[name] - before[name] for field, name in COUNTED.items()}
            results.append(counted(self, part, found, **counts))
            before = after
        return results

    def hits(self, policy: str, capacity: int, keys: list[BlockHash] | None = None) -> Hits:
        """Replay the trace; return the tokens hit of each request. Stores complete at once."""
        everything = slice(0, self.trace.num_requests)
        return self.serving(policy, capacity, keys).hits(everything)

    def serving(
        self, policy: str, capacity: int, keys: list[BlockHash] | None = None, pending: int = 0
    ) -> RowServing | Serving:
        """Return an empty cache that serves the requests part by part.

        `keys` are ``trace.keys()``; None computes them. A store is in flight during `pending`
        further requests; with 0 it completes at once.
        """
        keys = self.trace.keys() if keys is None else keys
        in_steps = self.groups.step_tokens is not None
        is_plain = self.groups.is_plain and not (in_steps and IMPLEMENTATION == "python")
        if is_plain and self.trace.hints is None and not is_own(policy):
            return RowServing(policy, capacity, self, keys, pending)
        return Serving(new_manager(policy, capacity), self, keys, pending)


def replay(
    requests: Iterable[Request] | DecodedTrace,
    manager: OffloadingManager,
    *,
    groups: GroupChunks | None = None,
    block_tokens: int | None = None,
    device: DeviceCache | None = None,
    step_tokens: int | None = None,
    hints: TraceHints | None = None,
    keys: Sequence[BlockHash] | None = None,
    progress: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Drive a manager with the requests of a trace; each store completes at once.

    Only the manager's calls are timed, all calls of a request together; with several groups or in
    steps the times include the rules in Python.

    Parameters
    ----------
    requests : iterable of Request or DecodedTrace
        The trace; an iterable is passed over once, and takes 8 bytes per request.
    manager : OffloadingManager
        Any manager, usually an empty one; a `CPUOffloadingManager` with several groups or steps.
    groups : GroupChunks, optional
        The KV groups of the model; by default those of `GroupChunks.of_blocks`, with the next two
        arguments.
    block_tokens, step_tokens : int, optional
        As in `GroupChunks.of_blocks`. Steps drive the manager as vLLM drives its own.
    hints : TraceHints, optional
        The hints of these requests, by default those of a decoded trace; with hints the clock is
        that of the trace.
    keys : sequence of BlockHash, optional
        ``keys()`` of a decoded trace, computed once for many calls.
    device : DeviceCache, optional
        The accelerator's own cache, of the same groups, which is asked first.
    progress : callable, optional
        Called every 64 requests, between two requests, with the number of requests so far.

    Returns
    -------
    ReplayResult

    Raises
    ------
    TraceError
        As the trace does.
    TypeError, ValueError
        If `step_tokens` is below 1 or lacks the arguments that it needs, or the number of `hints`
        differs from that of the requests.

    Notes
    -----
    While it is cached, the hash of a block is always the same object, while an engine would create
    a new one per request; this saves a manager in Python the hashing of the key.
    """
    groups = groups or GroupChunks.of_blocks(block_tokens, step_tokens=step_tokens)
    size = groups.block_tokens
    server = _server(groups, manager)
    if isinstance(requests, DecodedTrace):
        hints = requests.hints if hints is None else hints
        rows = requests.hashes_and_lengths(requests.keys() if keys is None else keys)
    else:
        found = BlockKeys()
        rows = ((found.of(request), request.input_length) for request in requests)
    times = DurationHistogram()
    missed = array("q")
    requests_so_far = blocks = tokens = asked = hits = hit_tokens = 0
    loaded = stored = evicted = refused = 0
    liars = None if hints is None or not hints.lies.any() else (0, 0)
    told: Told | None
    for (hashes, input_length), told in _with_hints(rows, hints):
        on_device, junction = 0, 0
        if device is not None:
            on_device, junction = device.find(hashes, input_length)
        local = on_device * size
        length = groups.length_of(input_length, len(hashes))
        served: Served | GroupServed
        start = perf_counter_ns()
        if server is None:
            served = serve(manager, hashes, on_device, told)
        else:
            served = server.serve(hashes, length, local, junction * size, told)
        served.complete()
        times.add(perf_counter_ns() - start)
        if isinstance(served, Served):
            hit = served.hits * size
        else:
            hit, loaded = served.hit_tokens, loaded + len(served.loaded)
        if device is not None:
            device.leave(hashes, input_length, on_device, junction, hit)
        asked += length - local
        hits += hit
        if liars is not None and told is not None and told.lies:
            liars = liars[0] + length - local, liars[1] + hit
        hit_tokens += min(local + hit, input_length) - min(local, input_length)
        missed.append(max(0, (input_length or length) - local - hit))
        tokens += input_length
        blocks += len(hashes)
        stored += len(served.to_store)
        evicted += len(served.evicted)
        refused += served.refused
        requests_so_far += 1
        if progress is not None and requests_so_far % PROGRESS_REQUESTS == 0:
            progress(requests_so_far)
    return ReplayResult.of(
        groups,
        asked,
        hits,
        liars=liars,
        requests=requests_so_far,
        blocks=blocks,
        tokens=tokens,
        hit_tokens=hit_tokens if groups.knows_tokens else None,
        **(missed_percentiles(missed) if groups.knows_tokens else {}),
        loaded_slots=loaded,
        stored_slots=stored,
        evicted_slots=evicted,
        refused=refused,
        not_admitted=_not_admitted(manager),
        times=times,
    )


def simulate(
    trace: DecodedTrace,
    keys: list[BlockHash] | None,
    policy: str,
    capacity: int,
    *,
    device_hits: Hits | None = None,
    junctions: Hits | None = None,
    pending: int = 0,
    groups: GroupChunks | None = None,
) -> ReplayResult:
    """Replay a decoded trace by one policy at one capacity.

    The manager is asked for the blocks of a request after the leading ones that the device has, and
    is offered all of them to store.

    Parameters
    ----------
    trace : DecodedTrace
        The requests and their hints.
    keys : list of BlockHash or None
        ``trace.keys()``, computed once for many calls; None computes them if needed.
    policy : str
        A policy string, ``"module:Class"``, ``"belady"`` or ``"infinite"``.
    capacity : int
        Number of slots; ``"infinite"`` ignores it.
    device_hits, junctions : (requests,) int64, optional
        Leading blocks of each request that the device's own cache has, and its junctions, as
        `device_hits_and_junctions` returns them; 0 by default.
    pending : int
        Number of further requests during which a store is in flight; 0: it completes at once.
    groups : GroupChunks, optional
        The KV groups of the model, and how prompts are offered; by default those of
        `GroupChunks.of_blocks`.

    Returns
    -------
    ReplayResult
        Without times.

    Raises
    ------
    TypeError
        If `trace` or `policy` is of another type.
    """
    if not isinstance(trace, DecodedTrace):
        raise TypeError(
            f"trace must be a DecodedTrace, got {describe(trace)}; DecodedTrace.of(trace) makes one"
        )
    if not isinstance(policy, str):
        raise TypeError(
            f"policy must be a string, got {describe(policy)}; 'module:Class' names a class"
        )
    demand = _demand(trace, device_hits, junctions, groups)
    return demand.in_parts(policy, capacity, keys, pending)[0]


def simulate_in_parts(
    trace: DecodedTrace,
    keys: list[BlockHash] | None,
    policy: str,
    capacity: int,
    *,
    device_hits: Hits,
    junctions: Hits | None = None,
    pending: int = 0,
    parts: int,
    groups: GroupChunks | None = None,
) -> list[ReplayResult]:
    """Replay a decoded trace and count each part separately; the cache is kept between parts.

    Arguments are those of `simulate`, and the number of parts, whose requests differ by at most
    one. Returns one result per part; for a ceiling a single one for the whole trace.
    """
    demand = _demand(trace, device_hits, junctions, groups)
    return demand.in_parts(policy, capacity, keys, pending, parts)


def simulate_requests(
    trace: DecodedTrace,
    keys: list[BlockHash] | None,
    policy: str,
    capacity: int,
    *,
    device_hits: Hits,
    junctions: Hits | None = None,
    groups: GroupChunks | None = None,
) -> Hits:
    """Replay a decoded trace and return the tokens hit of each request; stores complete at once.

    Arguments are those of `simulate`; `policy` must not be a ceiling.
    """
    return _demand(trace, device_hits, junctions, groups).hits(policy, capacity, keys)


def _demand(
    trace: DecodedTrace,
    device_hits: Hits | None,
    junctions: Hits | None,
    groups: GroupChunks | None,
) -> Demand:
    if device_hits is None:
        device_hits = np.zeros(trace.num_requests, dtype=np.int64)
    if junctions is None:
        junctions = np.zeros_like(device_hits)
    return Demand(trace, groups or GroupChunks.of_blocks(), device_hits, junctions)


class RowServing:
    """A miniature that serves the requests of a trace, many in one call; see `Demand.serving`."""

    def __init__(
        self, policy: str, capacity: int, demand: Demand, keys: list[BlockHash], pending: int
    ) -> None:
        self._miniature, self._demand, self._keys = new_miniature(policy, capacity), demand, keys
        nodes = np.zeros(len(keys), dtype=np.uint32)
        self._serve_rows = functools.partial(self._miniature.serve_rows, nodes=nodes, lag=pending)
        if demand.groups.step_tokens is not None:
            learning = Learning.of(registry.parse(policy).entry)
            rows = import_module("kvoffload.replay._stepped_c").SteppedRows(
                self._miniature, **asdict(learning)
            )
            self._serve_rows = functools.partial(
                rows.serve_rows,
                block_tokens=demand.groups.block_tokens,
                step_tokens=demand.groups.step_tokens,
                lag=pending,
            )

    def hits(self, part: slice) -> Hits:
        """Serve the requests of a part; return the tokens hit by each."""
        trace, first = self._demand.trace, self._demand.device_hits
        hits = np.zeros(part.stop - part.start, dtype=np.int64)
        for start in range(part.start, part.stop, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, part.stop)
            hits[start - part.start : stop - part.start] = self._serve_rows(
                self._keys,
                trace.starts[start : stop + 1],
                trace.blocks,
                first[start:stop],
                position=start,
            )
        return hits * self._demand.groups.block_tokens

    def stats(self) -> dict[str, int]:
        """Return the counts of `COUNTED` so far."""
        served = self._miniature
        return {
            "loaded_blocks": served.hits,
            "stored_blocks": served.stored,
            "evicted_blocks": served.evicted,
            "refused_stores": served.refused,
            "not_admitted": served.not_admitted,
        }


class Serving:
    """A manager that serves the requests of a trace, one by one; see `Demand.serving`."""

    def __init__(
        self,
        manager: CPUOffloadingManager,
        demand: Demand,
        keys: list[BlockHash],
        pending: int = 0,
    ) -> None:
        self.manager = manager
        self._demand = demand
        self._keys = keys
        self._server = _server(demand.groups, manager, ends_stores=not pending)
        self._pending = pending
        self._in_flight: deque[Served | GroupServed] = deque()

    def stats(self) -> dict[str, int]:
        """Return the counts of `COUNTED` so far."""
        return self.manager.stats()

    def hits(self, part: slice) -> Hits:
        """Serve the requests of a part; return the tokens hit by each."""
        demand, size = self._demand, self._demand.groups.block_tokens
        if self._server is None:
            return self._hits_one_by_one(part) * size
        tokens = demand.whole, demand.local, demand.junctions * size
        hits = []
        for hashes, *given in zip(
            self._rows(part),
            *(each[part].tolist() for each in tokens),
            self._told(part),
            strict=True,
        ):
            served = self._server.serve(hashes, *given)
            hits.append(served.hit_tokens)
            self._complete_older(served)
        return np.array(hits, dtype=np.int64)

    def _hits_one_by_one(self, part: slice) -> Hits:
        """Return the blocks hit by each request, served one by one by `serve`."""
        hits = []
        on_device = self._demand.device_hits[part].tolist()
        rows, told = self._rows(part), self._told(part)
        for hashes, first, said in zip(rows, on_device, told, strict=True):
            served = serve(self.manager, hashes, first, said)
            hits.append(served.hits)
            self._complete_older(served)
        return np.array(hits, dtype=np.int64)

    def _rows(self, part: slice) -> Iterator[list[BlockHash]]:
        """Yield the hashes of each request."""
        return self._demand.trace.hashes(np.array(self._keys, dtype=object), part)

    def _told(self, part: slice) -> Iterable[Told | None]:
        """Return the hints of each request, or None without hints."""
        hints = self._demand.trace.hints
        if hints is None:
            return itertools.repeat(None, part.stop - part.start)
        return hints.of_each(part)

    def _complete_older(self, served: Served | GroupServed) -> None:
        """End the store of the request `pending` requests before the last."""
        self._in_flight.append(served)
        if len(self._in_flight) > self._pending:
            self._in_flight.popleft().complete()


def _with_hints(rows: Iterable[Row], hints: TraceHints | None) -> Iterable[tuple[Row, Told | None]]:
    """Return each row and its hints."""
    if hints is None:
        return zip(rows, itertools.repeat(None))
    return hints.beside(rows)


def _server(
    groups: GroupChunks, manager: OffloadingManager, *, ends_stores: bool = True
) -> GroupServer | None:
    """Return the server for these rules; None if that is `serve`."""
    if groups.is_plain and groups.step_tokens is None:
        return None
    return GroupServer(groups, manager, ends_stores=ends_stores)


def counted(demand: Demand, part: slice, hits: Hits, **counts: int | None) -> ReplayResult:
    """Return the result of a part, from the tokens hit by each of its requests."""
    lengths, local = demand.trace.lengths[part], demand.local[part]
    if demand.groups.knows_tokens:
        of_known = np.minimum(local + hits, lengths) - np.minimum(local, lengths)
        counts["hit_tokens"] = int(of_known.sum())
        counts |= missed_percentiles(demand.missed(hits, part).tolist())
    return _result(demand, part, int(hits.sum()), hits, **counts)


def _result(
    demand: Demand, part: slice, hits: int, of_each: Hits | None = None, **counts: int | None
) -> ReplayResult:
    """Return the result of a part; `of_each` are the tokens hit by each request, if known."""
    trace = demand.trace
    return ReplayResult.of(
        demand.groups,
        int(demand.asked[part].sum()),
        hits,
        liars=_liars(demand, part, of_each),
        requests=part.stop - part.start,
        blocks=int(trace.starts[part.stop] - trace.starts[part.start]),
        tokens=sum(trace.lengths[part].tolist()),
        **counts,
    )


def _liars(demand: Demand, part: slice, hits: Hits | None) -> tuple[int, int | None] | None:
    """Return the tokens asked for and hit by sessions that lie; None if none does."""
    told = demand.trace.hints
    return None if told is None else told.of_liars(demand.asked[part], hits, part)


def _not_admitted(manager: OffloadingManager) -> int:
    stats = getattr(manager, "stats", None)
    return 0 if stats is None else int(stats().get("not_admitted", 0))
