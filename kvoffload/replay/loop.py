"""The one loop of all replays: requests through a configuration, in turn or in simulated time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace as replaced
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, OffloadingManager
from kvoffload._checks import MAX_NUM_BLOCKS, check_instance, check_int
from kvoffload.traces import Request, TraceError

from .arrivals import NONE
from .configuration import Configuration
from .engines import ROWS_AT_ONCE, Engine, new_engines
from .events import ARRIVAL, FINISH, INDEX_HEARS, NANOSECONDS, PREFILL_END, Event
from .groups import GroupChunks
from .index import Change
from .offline import BELADY, CEILINGS, INFINITE, belady_of_groups
from .requests import DecodedTrace
from .results import COUNTS, TIMES, Columns, Result
from .rows import Rows

PROGRESS_REQUESTS = 64  # between two calls of the progress function

_NS_A_MS = 10**6
_MOST_NS = 2**63

Progress = Callable[[int], object]


def replay(
    trace: DecodedTrace | Iterable[Request],
    configuration: Configuration,
    *,
    manager: OffloadingManager | None = None,
    parts: int = 1,
    progress: Progress | None = None,
) -> Result:
    """Replay a trace through a configuration.

    Host memory is asked for the blocks of a request after the leading ones that the accelerator
    has, and is offered all of them to store. It receives the hints of the trace's clients at once,
    a tier when a request ends.

    Parameters
    ----------
    trace : DecodedTrace or iterable of Request
        The requests, and their hints. With arrivals they come in that order, else in the order of
        the trace; a rate, a loop and several engines need arrivals.
    configuration : Configuration
        The engines.
    manager : OffloadingManager, optional
        The host memory of the one engine, empty and of as many blocks, instead of the one that the
        configuration describes; a `CPUOffloadingManager` with several groups or steps. Its calls
        are timed, all calls of a request together; with several groups or in steps with the rules
        in Python. It keys its samples with a secret of its own, so the hits of ``hit-density``
        differ by up to 2 % from run to run; without `manager` they are always the same.
    parts : int
        Number of parts of the trace whose results are counted apart, too; not for ``"belady"``.
    progress : callable, optional
        Called regularly with the number of requests so far.

    Returns
    -------
    Result

    Raises
    ------
    TraceError
        As the trace does.
    TypeError, ValueError
        If an argument is of another type; if the trace lacks what the configuration needs
        (`NoSessionsError` if a loop has no sessions), or its times exceed 2**63 ns; if a manager is
        given with several engines or a ceiling, or its ``stats()`` tell that it is not empty, or
        has not `Configuration.host` blocks.

    Complexity: O(blocks) besides the policies; with an index O(blocks + engines) per request.

    Notes
    -----
    While it is cached, the hash of a block is always the same object, while an engine would create
    a new one per request; this saves a manager in Python the hashing of the key.
    """
    check_instance("trace", trace, DecodedTrace | Iterable, "requests")
    check_instance("configuration", configuration, Configuration, "a Configuration")
    check_int("parts", parts, 1)
    check_instance("progress", progress, Callable | None, "callable or None")
    if manager is not None:
        _check_manager(manager, configuration)
    if not isinstance(trace, DecodedTrace):
        trace = DecodedTrace.of(trace, arrivals=not configuration.is_in_turn)
    return Replays(trace).of(configuration, manager=manager, parts=parts, progress=progress)


def _check_manager(manager: OffloadingManager, configuration: Configuration) -> None:
    """Raise if a manager is not the empty host memory of the one engine of a configuration."""
    check_instance("manager", manager, OffloadingManager, "an OffloadingManager or None")
    if configuration.policy in CEILINGS or configuration.engines > 1:
        raise ValueError("manager must be None with several engines or a ceiling, got one")
    counts: dict[str, int] = getattr(manager, "stats", dict)()
    if counts.get("resident", 0) or counts.get("free", configuration.host) != configuration.host:
        rule = f"manager must be empty and have room for {configuration.host} blocks"
        raise ValueError(f"{rule}, as host says, got {manager!r}")


class Replays:
    """Many replays of one trace, which share the keys of its blocks."""

    def __init__(self, trace: DecodedTrace) -> None:
        self._trace = trace
        self._keys = functools.cache(trace.keys)
        self._rows: dict[GroupChunks, Rows] = {}
        self._behind_everything = functools.cache(self.of)

    def keys(self) -> list[BlockHash]:
        """Return the hash of each block of the trace."""
        return self._keys()

    def of(
        self,
        configuration: Configuration,
        *,
        manager: OffloadingManager | None = None,
        parts: int = 1,
        log: bool = True,
        progress: Progress | None = None,
    ) -> Result:
        """Replay the trace; other arguments and the result are those of `replay`."""
        configuration.check_trace(self._trace)
        groups = configuration.groups
        if groups not in self._rows:
            self._rows[groups] = Rows(self._trace, groups, self._keys)
        rows = self._rows[groups]
        if configuration.policy == BELADY:
            return self._belady(rows, configuration)
        used = configuration
        if configuration.policy == INFINITE:
            most = min(self._trace.unique_blocks * len(groups.chunk_tokens), MAX_NUM_BLOCKS)
            pending = 0 if groups.is_plain else configuration.pending
            used = replaced(configuration, policy="lru", host=max(1, most), pending=pending)
        counts = np.zeros((len(rows), len(COUNTS)), dtype=np.int64, order="F")
        engines = [*new_engines(rows, counts, used, manager)]
        served, times = None, None
        if used.is_in_turn:
            _in_turn(rows, engines[0], progress)
        else:
            served, times = _in_time(rows, used, engines, progress)
        columns = _columns(rows, counts, served, times)
        result = Result.of(columns, configuration, parts, log=log)
        return result if manager is None else replaced(result, times=engines[0].times)

    def _belady(self, rows: Rows, configuration: Configuration) -> Result:
        """Return the upper bound of every policy's hits.

        What the accelerator keeps of windows depends on what is loaded behind it. So with several
        groups it is as in front of a host memory that keeps everything, which asks for most.
        """
        groups = configuration.groups
        device, junctions = rows.on_device(configuration.device)
        if configuration.device and not groups.is_plain:
            log = self._behind_everything(replaced(configuration, policy=INFINITE, host=1)).log
            device = log["device"][rows.order] // groups.block_tokens
            junctions = log["junction"]
        hits, stored = belady_of_groups(rows, configuration.host, groups, device)
        counts = np.zeros((len(rows), len(COUNTS)), dtype=np.int64, order="F")
        counts[:, COUNTS.index("device")] = device * groups.block_tokens
        whole = Result.of(_columns(rows, counts), configuration, log=False)
        return replaced(
            whole,
            host_tokens=hits,
            loaded=hits // groups.block_tokens if groups.is_plain else None,
            stored=stored,
            missed_tokens=None,
            missed_p50=None,
            missed_p95=None,
            liar_hits=None,
            has_junctions=bool(junctions.any()),
        )


def _in_turn(rows: Rows, engine: Engine, progress: Progress | None) -> None:
    """Let an engine serve all rows, and let no time pass."""
    told = rows.told()
    step = ROWS_AT_ONCE if progress is None else PROGRESS_REQUESTS
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        engine.serve(start, stop, told)
        if progress is not None and stop - start == step:
            progress(stop)


def _in_time(
    rows: Rows,
    configuration: Configuration,
    engines: Sequence[Engine],
    progress: Progress | None,
) -> tuple[list[int], dict[str, list[int]]]:
    """Let all rows arrive, be computed and finish; return the engine and the times of each."""
    tokens, size, loop = rows.tokens.tolist(), rows.groups.block_tokens, configuration.loop
    spec = configuration.spec
    router = spec.router(rows, configuration)
    served = [0] * len(rows)
    arrived, started, first, ended = ([0] * len(rows) for _ in TIMES)
    told = list(rows.told())
    lag = round(Fraction(str(spec.options.get("lag_ms", 0))) * _NS_A_MS)
    recorded, wait, service = map(rows.column, ("recorded", "wait", "service"))
    following = rows.following
    queues = [deque[int]() for _ in engines]
    is_computing, running = [False] * len(engines), [0] * len(engines)
    messages: dict[int, tuple[int, Sequence[Change]]] = {}
    events: list[Event] = []
    push = functools.partial(heappush, events)
    published = computed = 0
    has_before = {row for row in following if row != NONE} if loop != "open" else set()
    coming = (row for row in range(len(rows)) if row not in has_before)

    def let_one_come() -> None:  # rows are in the order of their arrival: one at a time is enough
        for row in coming:
            push((recorded[row], ARRIVAL, 0, row))
            break

    let_one_come()
    while events:
        now, kind, place, row = heappop(events)
        if kind == INDEX_HEARS:
            engine, changes = messages.pop(place)
            router.hear(engine, changes)
            continue
        if kind == ARRIVAL:
            if row not in has_before:
                let_one_come()
            engine = router.route(row)
            served[row], arrived[row] = engine, now
            queues[engine].append(row)
            after = following[row]
            if loop == "recorded" and after != NONE:
                push((now + service[row] + wait[after], ARRIVAL, 0, after))
        elif kind == PREFILL_END:
            engine = place
            changes = engines[engine].end()
            is_computing[engine] = False
            first[row] = now
            router.prefilled(row, engine)
            if lag:
                messages[published] = engine, changes
                push((now + lag, INDEX_HEARS, published, row))
                published += 1
            else:
                router.hear(engine, changes)
            answer = (
                0 if configuration.rate is None else rows.answers[row] * configuration.decode_ns
            )
            push((now + answer, FINISH, engine, row))
            computed += 1
            if progress is not None and computed % PROGRESS_REQUESTS == 0:
                progress(computed)
        else:
            engine = place
            running[engine] -= 1
            ended[row] = now
            router.finishes(row, engine)
            after = following[row]
            if loop == "closed" and after != NONE:
                push((now + wait[after], ARRIVAL, 0, after))
        queue = queues[engine]
        if queue and not is_computing[engine] and not 0 < configuration.slots <= running[engine]:
            row = queue.popleft()
            is_computing[engine] = True
            running[engine] += 1
            router.begins(engine)
            said = told[row]
            hits = engines[engine].begin(
                row, None if said is None else said._replace(now_s=now / NANOSECONDS)
            )
            missed = max(0, tokens[row] - sum(hits) * size)
            needed = configuration.prefill_ns(missed, hits.host, hits.tier)
            started[row] = now
            push((now + needed, PREFILL_END, engine, row))
    times = dict(zip(TIMES, (arrived, started, first, ended), strict=True))
    latest = max((max(column, default=0) for column in times.values()), default=0)
    if latest >= _MOST_NS:
        raise TraceError("the trace", None, f"times must be below {_MOST_NS} ns, got {latest}")
    return served, times


def _columns(
    rows: Rows,
    counts: npt.NDArray[np.int64],
    served: list[int] | None = None,
    times: dict[str, list[int]] | None = None,
) -> Columns:
    """Return the columns of a log, in the order of the trace, from the counts by engines."""
    nothing = np.zeros(len(rows), dtype=np.int64)
    found: Columns = dict(zip(COUNTS, counts.T, strict=True))
    found["blocks"] = np.diff(rows.starts)
    found["tokens"], found["lies"] = rows.tokens, rows.lies
    found["answer"] = np.array(rows.answers, dtype=np.int64)
    found["asked"] = rows.whole - found["device"]
    found["missed"] = nothing
    if rows.groups.knows_tokens:
        in_caches = found["device"] + found["host"] + found["tier"]
        found["missed"] = np.maximum(0, rows.tokens - in_caches)
    found["engine"] = np.array(nothing if served is None else served, dtype=np.uint16)
    for name in TIMES:
        found[name] = nothing if times is None else np.array(times[name], dtype=np.int64)
    if rows.is_as_recorded:
        return found
    places = np.empty_like(rows.order)
    places[rows.order] = np.arange(len(rows))
    return {name: column[places] for name, column in found.items()}
