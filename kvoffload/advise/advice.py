"""Advice on policy and memory from a trace: the figures, and whether they suffice to choose."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvoffload.replay import DecodedTrace, HintOptions, Result
from kvoffload.replay.loop import Replays
from kvoffload.replay.offline import BELADY, INFINITE
from kvoffload.replay.processes import Elsewhere
from kvoffload.traces import Request

from .choice import Choice, choose
from .economy import balance_of
from .grid import evicts_early, part_seconds, replay_grid
from .setup import VLLM_DEFAULT, Setup
from .units import bytes_text, percent_text

__all__ = [
    "DEVICE_SHARES",
    "LEAST_REQUESTS",
    "LEAST_REUSE",
    "Advice",
    "Cell",
    "RecordedTrace",
    "advise",
]

DEVICE_SHARES = (Fraction(1, 4), Fraction(1, 2))
"""Parts of an assumed cache on the accelerator that are compared with all of it."""

LEAST_REQUESTS = 200
"""Fewest requests of a trace for a recommendation: forty per part from which errors come."""

LEAST_SECONDS = 1e-6
"""Shortest trace, or part of one, with rates: below, they would show rounding errors."""

LEAST_REUSE = 0.01
"""Least hit ratio of an unbounded cache for a recommendation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of a policy in one memory.

    Attributes
    ----------
    hit_ratio : float
        Share of the tokens asked for that are hits.
    saved_tokens : int
        Tokens, over the trace, that need no prefill: those of the blocks that are hits.
    stored : int
        Slots stored.
    stored_per_hit : float or None
        Slots stored per block hit; None without a hit.
    store_rate, load_rate : float or None
        Bytes per second to host memory and back, at the trace's rate; None if it has no times.
    busiest_store_rate, busiest_load_rate : float or None
        The same in the part of the trace where the sum of both is highest.
    loaded : int
        Slots loaded for the hits.
    device_tokens : int
        Tokens that the accelerator's own cache has; of windows it keeps less in front of loads.
    honest_hit_ratio, liar_hit_ratio : float or None
        `hit_ratio` of the honest sessions and of those that give false hints; None without such.
    """

    hit_ratio: float
    saved_tokens: int
    stored: int
    stored_per_hit: float | None
    store_rate: float | None
    load_rate: float | None
    busiest_store_rate: float | None
    busiest_load_rate: float | None
    loaded: int
    device_tokens: int
    honest_hit_ratio: float | None = None
    liar_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts of a trace.

    Attributes
    ----------
    requests : int
        Number of requests.
    seconds : float
        From the first arrival to the last; 0 if it has no times.
    input_tokens : int
        Prompt tokens of all requests; 0 if the lengths are not known.
    blocks, unique_blocks : int
        Blocks of all requests, and the distinct ones among them.
    asked_tokens : int
        Tokens of the blocks that the manager is asked for: those that the accelerator's own cache
        does not have; 0 of a fleet.
    """

    requests: int
    seconds: float
    input_tokens: int
    blocks: int
    unique_blocks: int
    asked_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice that a trace gives.

    Attributes
    ----------
    setup : Setup
        The question.
    facts : Facts
        Counts of the trace.
    memories, capacities : list of int
        The memories that were compared, bytes and blocks.
    cells : dict of (str, int) to Cell
        By policy and index in `memories`.
    choices : list of Choice
        The choice in each memory, whether or not the trace suffices: among the policies that pay,
        where that is known and there are any.
    paying : list of tuple of str, or None
        In each memory, the policies that save more prefill than moving blocks takes; None where the
        rates of the engine are not known.
    reuse : float
        The hit ratio of an unbounded cache without an accelerator's cache in front.
    ceilings : list of float or None
        In each memory, the hit ratio that no policy can exceed at this retention interval; None
        where it is not known, because no group is full.
    unbounded : float
        The hit ratio of an unbounded cache.
    unbounded_is_ceiling : bool
        Whether no policy can exceed `unbounded` at this retention interval, with any memory (see
        `GroupChunks.is_bounded`).
    objections : list of str
        Why the trace does not suffice for a recommendation; empty if it does.
    all_tokens : int
        Tokens of all blocks: those asked for, and those that the accelerator's own cache has.
    """

    setup: Setup
    facts: Facts
    memories: list[int]
    capacities: list[int]
    cells: dict[tuple[str, int], Cell]
    choices: list[Choice]
    paying: list[tuple[str, ...]] | None
    ceilings: list[float | None]
    unbounded: float
    unbounded_is_ceiling: bool
    reuse: float
    objections: list[str]
    all_tokens: int

    @property
    def lacks_reuse(self) -> bool:
        """Whether a long enough trace has almost nothing that offloading could bring back."""
        is_long = self.facts.requests >= LEAST_REQUESTS
        return is_long and self.setup.chunks.is_plain and self.unbounded < LEAST_REUSE

    @property
    def memory_index(self) -> int:
        """Index in `memories` of the one that was asked for."""
        return self.memories.index(self.setup.memory)

    @property
    def policy(self) -> str | None:
        """The recommended policy; None if the trace does not suffice, or where none pays."""
        if self.objections or self.pays is False:
            return None
        return self.choices[self.memory_index].policy

    @property
    def pays(self) -> bool | None:
        """Whether a policy saves more prefill than moving blocks takes, in the memory asked for.

        None if the trace does not suffice, or where the rates of the engine are not known.
        """
        if self.objections or self.paying is None:
            return None
        return bool(self.paying[self.memory_index])

    @property
    def device_hit_ratio(self) -> float:
        """Share of all tokens that the accelerator's own cache serves."""
        return 1 - self.facts.asked_tokens / self.all_tokens if self.all_tokens else 0.0

    @property
    def device_hits(self) -> int:
        """Blocks, or tokens with groups, that the accelerator's own cache serves."""
        return (self.all_tokens - self.facts.asked_tokens) // self.setup.chunks.hit_unit

    def cell(self, policy: str, memory_index: int | None = None) -> Cell:
        """Return the results of a policy in the memory asked for, or in that of another index."""
        return self.cells[policy, self.memory_index if memory_index is None else memory_index]

    @property
    def vllm_default(self) -> Cell:
        """Results of vLLM's default in the memory that was asked for."""
        return self.cell(VLLM_DEFAULT)

    def ceiling_tokens(self) -> tuple[int | None, int]:
        """Return the tokens that the best possible cache, and one without bounds, would save."""
        unit = self.setup.chunks.hit_unit

        def tokens(ratio: float) -> int:
            return round(ratio * (self.facts.asked_tokens // unit)) * unit

        best = self.ceilings[self.memory_index]
        return None if best is None else tokens(best), tokens(self.unbounded)

    def ranking(self) -> list[str]:
        """Return the policies, the one with the most hits in the memory asked for first."""
        return sorted(self.setup.policies, key=lambda p: -self.cell(p).hit_ratio)


def advise(
    requests: Iterable[Request] | RecordedTrace,
    setup: Setup,
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> Advice:
    """Replay a trace through the policies in several memories and return the advice.

    Parameters
    ----------
    requests : iterable of Request or RecordedTrace
        The trace; it is iterated over once.
    setup : Setup
        What is to be advised on; the smallest memory must hold a block.
    jobs : int
        Number of processes that share the replays.
    elsewhere : Elsewhere, optional
        Other machines, which compute them instead.
    progress : callable, optional
        Called with the number of replays done, out of `setup.replays`.

    Raises
    ------
    TraceError
        As the trace does.
    ValueError
        If the setup is that of a fleet, for `advise_fleet`.
    """
    if setup.engines:
        raise ValueError(f"engines must be 0 without a router, got {setup.engines:,}")
    memories = setup.memories()
    capacities = [setup.capacity(memory) for memory in memories]
    recorded = requests if isinstance(requests, RecordedTrace) else RecordedTrace.of(requests)
    trace = recorded.trace
    replays = Replays(trace)
    everything = setup.configuration(INFINITE, 1)
    ideal = replays.of(everything)
    used = [setup.capped(memory, trace.unique_blocks) for memory in memories]
    distinct = sorted(set(used), reverse=True)
    spared = setup.replays - setup.replays_per_memory * len(distinct)
    has_ceilings = setup.chunks.num_full > 0
    grid = replay_grid(
        trace,
        setup,
        (*setup.replayed, BELADY) if has_ceilings else setup.replayed,
        distinct,
        jobs=jobs,
        elsewhere=elsewhere,
        progress=None if progress is None else lambda done: progress(spared + done),
    )
    seconds = part_seconds(recorded.times)
    asked_slots = used[memories.index(setup.memory)]
    asked_tokens = grid[VLLM_DEFAULT, asked_slots].asked_tokens
    facts = replace(recorded.facts(), seconds=sum(seconds), asked_tokens=asked_tokens)
    cells = {
        (policy, index): _cell(grid[policy, capacity], setup, seconds)
        for policy in setup.replayed
        for index, capacity in enumerate(used)
    }
    paying = _paying(cells, setup, len(used))
    choices = [
        choose(
            [grid[policy, capacity] for policy in setup.policies],
            among=() if paying is None else paying[index],
        )
        for index, capacity in enumerate(used)
    ]
    asked, whole = ideal.asked_tokens or 1, ideal.asked_tokens + ideal.device_tokens
    unbounded = reuse = ideal.hit_ratio
    if ideal.device_tokens:
        reuse = replays.of(replace(everything, device=0)).hit_ratio
    is_bounded = setup.chunks.is_bounded(junctions=ideal.has_junctions)
    return Advice(
        setup=setup,
        facts=facts,
        memories=memories,
        capacities=capacities,
        cells=cells,
        choices=choices,
        paying=paying,
        ceilings=[
            min(grid[BELADY, capacity].host_tokens / asked, unbounded if is_bounded else 1.0)
            if has_ceilings
            else None
            for capacity in used
        ],
        unbounded=unbounded,
        unbounded_is_ceiling=is_bounded,
        reuse=reuse,
        objections=_objections(
            facts,
            setup,
            ideal=unbounded,
            on_device=1 - facts.asked_tokens / whole if whole else 0.0,
            evicts=any(evicts_early(grid[policy, asked_slots]) for policy in setup.policies),
        ),
        all_tokens=whole,
    )


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace decoded once, with the times and lengths that advice needs.

    Attributes
    ----------
    trace : DecodedTrace
        The blocks of its requests.
    times : (requests,) float64
        Arrival of each request, milliseconds.
    tokens : int
        Prompt tokens of all requests; 0 if the lengths are not known.
    has_think : bool
        Whether any request says how long its client waited before it.
    """

    trace: DecodedTrace
    times: npt.NDArray[np.float64]
    tokens: int
    _: KW_ONLY
    has_think: bool = False

    @classmethod
    def of(
        cls,
        requests: Iterable[Request],
        progress: Callable[[int], object] | None = None,
        *,
        hints: HintOptions | None = None,
        arrivals: bool = False,
    ) -> RecordedTrace:
        """Record a trace in one pass; the other arguments are as in `DecodedTrace.of`."""
        times = array("d")
        tokens, has_think = 0, False

        def noted() -> Iterator[Request]:
            nonlocal tokens, has_think
            for request in requests:
                times.append(request.timestamp)
                tokens += request.input_length
                has_think = has_think or request.think is not None
                yield request

        trace = DecodedTrace.of(noted(), progress, hints=hints, arrivals=arrivals)
        return cls(trace, np.frombuffer(times, dtype=np.float64), tokens, has_think=has_think)

    def facts(self) -> Facts:
        """Return the counts of the trace; no token is asked for yet."""
        trace = self.trace
        return Facts(
            requests=trace.num_requests,
            seconds=float(np.ptp(self.times)) / 1000 if len(self.times) else 0.0,
            input_tokens=self.tokens,
            blocks=trace.num_blocks,
            unique_blocks=trace.unique_blocks,
        )


def _cell(result: Result, setup: Setup, seconds: Sequence[float]) -> Cell:
    loaded = [part.loaded or 0 for part in result.parts]
    rates = [
        (part.stored * setup.block_bytes / time, count * setup.block_bytes / time)
        for part, count, time in zip(result.parts, loaded, seconds, strict=True)
        if time >= LEAST_SECONDS
    ]
    busiest = max(rates, key=sum, default=(None, None))
    span = sum(seconds)
    has_times = span >= LEAST_SECONDS
    saved = result.offloaded_tokens
    blocks_hit = saved / setup.block_tokens
    return Cell(
        hit_ratio=result.hit_ratio,
        saved_tokens=saved,
        stored=result.stored,
        stored_per_hit=result.stored / blocks_hit if saved else None,
        store_rate=result.stored * setup.block_bytes / span if has_times else None,
        load_rate=sum(loaded) * setup.block_bytes / span if has_times else None,
        busiest_store_rate=busiest[0],
        busiest_load_rate=busiest[1],
        loaded=sum(loaded),
        device_tokens=result.device_tokens,
        honest_hit_ratio=result.honest_hit_ratio,
        liar_hit_ratio=result.liar_hit_ratio,
    )


def _paying(
    cells: dict[tuple[str, int], Cell], setup: Setup, num_memories: int
) -> list[tuple[str, ...]] | None:
    """Return the policies that pay in each memory; None where that is not known."""
    rates = setup.rates
    if rates is None:
        return None
    return [
        tuple(p for p in setup.policies if balance_of(setup, cells[p, index], rates).pays)
        for index in range(num_memories)
    ]


def reuse_objection(ideal: float, setup: Setup) -> str:
    """Return that a cache without bounds would hit hardly anything."""
    plain = setup.chunks.is_plain
    at = "" if plain else " at this retention interval"
    objection = (
        f"there is almost no reuse{at}: a cache without bounds would hit {percent_text(ideal)} of "
        f"the {setup.counted}, and at least {percent_text(LEAST_REUSE)} is needed"
    )
    if plain:  # with groups, resume points may be missing
        objection += ". Offloading gains nothing on such requests"
    return objection


def too_few(requests: int) -> list[str]:
    """Return why there are too few requests; nothing if they suffice."""
    if requests >= LEAST_REQUESTS:
        return []
    return [
        f"the trace is too short: {requests:,} requests, and at least {LEAST_REQUESTS} are needed"
    ]


def _objections(
    facts: Facts, setup: Setup, *, ideal: float, on_device: float, evicts: bool
) -> list[str]:
    """Return why a trace does not suffice: few requests, no reuse, or a memory it never fills."""
    if ideal < LEAST_REUSE <= on_device:
        size = bytes_text(setup.device_memory)
        objection = (
            "the accelerator's own prefix cache, "
            f"{'assumed to have' if setup.device_is_assumed else 'of'} {size}, serves "
            f"{percent_text(on_device)} of the {setup.counted} itself, which leaves almost no "
            f"reuse: behind it a cache without bounds would hit {percent_text(ideal)} "
            f"of the others, and at least {percent_text(LEAST_REUSE)} is needed. Running "
            "requests share that memory; --device-memory sets what they leave, 0 leaves it out"
        )
        return [objection]
    if ideal < LEAST_REUSE:
        return [reuse_objection(ideal, setup)]
    found = too_few(facts.requests)
    if not evicts:
        change = "record for longer, or ask for less --capacity"
        way_out = change.capitalize()
        if setup.chunks.is_plain:  # with groups, what all blocks take is not counted
            size = bytes_text(facts.unique_blocks * setup.block_bytes)
            way_out = f"All of its {facts.unique_blocks:,} distinct blocks take {size}; {change}"
        found.append(
            "the trace is too short for this memory: in the first half of its requests nothing is "
            f"evicted from {bytes_text(setup.memory)}, so the policies cannot be compared. "
            f"{way_out}"
        )
    return found
