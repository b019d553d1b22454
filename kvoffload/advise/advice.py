"""Advice from a trace: what was compared, what to take, and whether the figures suffice."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_instance
from kvoffload._printable import plural
from kvoffload.replay import Configuration, DecodedTrace, HintOptions, Result, replay_all
from kvoffload.replay.loop import Replays
from kvoffload.replay.offline import BELADY, INFINITE
from kvoffload.replay.processes import Elsewhere
from kvoffload.traces import Request

from .choice import Choice, balanced, choose, choose_fleet, saving
from .economy import balance
from .setup import VLLM_DEFAULT, Case, Setup
from .units import bytes_text, percent_text

DEVICE_SHARES = (Fraction(1, 4), Fraction(1, 2))
"""Parts of an assumed cache on the accelerator that are compared with all of it."""

LEAST_REQUESTS = 200
"""Fewest requests of a trace for a recommendation: forty per part from which errors come."""

LEAST_SECONDS = 1e-6
"""Shortest trace, or part of one, with rates: below, they would show rounding errors."""

LEAST_REUSE = 0.01
"""Least hit ratio of an unbounded cache for a recommendation."""

PARTS = 10
"""Parts of a trace, of equally many requests, that are counted apart."""


class Rates(NamedTuple):
    """Bytes per second to host memory and from it, at the trace's rate.

    The last two are those of the part of the trace where their sum is highest. All are None if the
    trace has no times.
    """

    store: float | None
    load: float | None
    busiest_store: float | None
    busiest_load: float | None


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
    """

    requests: int
    seconds: float
    input_tokens: int
    blocks: int
    unique_blocks: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice that a trace gives, on one engine or on several behind a router.

    Attributes
    ----------
    setup : Setup
        The question.
    facts : Facts
        Counts of the trace.
    rows : mapping of Case to Result
        What was compared, and its results.
    offloading : Case
        The choice among the cases with host memory. Of several engines the fleet that is enough,
        whether or not the trace suffices. Of one engine, in the memory asked for, with the policy
        that is recommended, or where none is, the one that hits most.
    case : Case
        The choice with no offloading among the cases. One engine does not offload if no policy
        saves more prefill than moving blocks takes.
    unbounded : float
        The hit ratio of an unbounded cache, of one engine behind the accelerator's.
    reuse : float
        The same without an accelerator's cache in front.
    objections : list of str
        Why nothing is recommended, such as a trace that is too short; empty otherwise.
    choices : mapping of int to Choice
        The choice of a policy in each memory of one engine, whether or not the trace suffices.
    ceilings : mapping of int to float or None
        In each memory of one engine, the hit ratio that no policy can exceed at this retention
        interval; None where it is not known, because no group is full.
    unbounded_is_ceiling : bool
        Whether no policy can exceed `unbounded` at this retention interval, with any memory (see
        `GroupChunks.is_bounded`).
    seconds : list of float
        How long each of `PARTS` parts of the trace lasts.
    """

    setup: Setup
    facts: Facts
    rows: Mapping[Case, Result] = field(repr=False)
    offloading: Case
    case: Case
    unbounded: float
    reuse: float
    objections: list[str]
    choices: Mapping[int, Choice] = field(default_factory=dict)
    ceilings: Mapping[int, float | None] = field(default_factory=dict)
    unbounded_is_ceiling: bool = True
    seconds: list[float] = field(default_factory=list)

    @property
    def policy(self) -> str | None:
        """The recommended policy; None if the trace does not suffice, or not to offload."""
        return self.case.policy if self.case.offloads and not self.objections else None

    @property
    def pays(self) -> bool | None:
        """Whether offloading saves enough to be recommended.

        False also if a long enough trace has almost no reuse. None if the trace does not suffice
        for another reason, or if offloading gains and the rates of the engine are not known.
        """
        is_long, plain = self.facts.requests >= LEAST_REQUESTS, self.setup.chunks.is_plain
        if is_long and plain and self.unbounded < LEAST_REUSE:
            return False
        if self.objections or (self.case.offloads and not self.setup.knows_times):
            return None
        return self.case.offloads

    @property
    def result(self) -> Result:
        """The result of the choice; of one engine that of `offloading`."""
        return self.rows[self.case if self.setup.engines else self.offloading]

    def like(self, **change: Any) -> Result | None:
        """Return the result of the choice with a change, fields of a `Case`; None if not compared.

        Without offloading, memory 0, tier and policy have no effect; if that is the choice, other
        memories are those of `offloading`.
        """
        same = self.case if self.case.offloads or "memory" not in change else self.offloading
        wanted = same._replace(**{"router": self.case.router} | change)
        return self.rows.get(wanted if wanted.offloads else Case(0, router=wanted.router))

    def of(self, policy: str, memory: int | None = None) -> Result:
        """Return the result of a policy on one engine, by default in the memory asked for."""
        return self.rows[Case(self.setup.memory if memory is None else memory, policy=policy)]

    @property
    def choice(self) -> Choice:
        """The choice of a policy of one engine in the memory asked for."""
        return self.choices[self.setup.memory]

    @property
    def vllm_default(self) -> Result:
        """Results of vLLM's default on one engine in the memory that was asked for."""
        return self.of(VLLM_DEFAULT)

    def ranking(self) -> list[str]:
        """Return the policies, the one with the most hits in the memory asked for first."""
        return sorted(self.setup.policies, key=lambda policy: -self.of(policy).hit_ratio)

    @property
    def candidates(self) -> list[Case]:
        """The fleets that may be recommended; the others are compared with them.

        These have a router that was named. If all such routers see a tier, which needs host memory,
        those without offloading are added. Without times of first tokens, only `balanced` ones.
        """
        return [*balanced({case: self.rows[case] for case in _named(self.rows, self.setup)})]

    @property
    def best(self) -> Case:
        """The candidate that saves most; of equal ones the first."""
        return max(self.candidates, key=lambda case: saving(self.rows[case]))

    @property
    def may_need_more(self) -> bool:
        """Whether the largest memory compared is needed, and does not hold all blocks."""
        most = self.setup.memories()[-1]
        return self.case.memory == most and self.setup.capacity(most) < self.facts.unique_blocks

    @property
    def device_hit_ratio(self) -> float:
        """Share of all tokens that the accelerator's own cache of one engine serves."""
        return _on_device(self.vllm_default)

    def ceiling_tokens(self) -> tuple[int | None, int]:
        """Return the tokens that the best possible cache, and one without bounds, would save."""
        unit = self.setup.chunks.hit_unit

        def tokens(ratio: float) -> int:
            return round(ratio * self.vllm_default.asked) * unit

        best = self.ceilings[self.setup.memory]
        return None if best is None else tokens(best), tokens(self.unbounded)

    def stored_per_hit(self, result: Result) -> float | None:
        """Return the slots stored per block hit; None without a hit."""
        hits = result.offloaded_tokens / self.setup.block_tokens
        return result.stored / hits if hits else None

    def rates(self, result: Result) -> Rates:
        """Return the bytes that one of `rows` moves per second."""
        size = self.setup.block_bytes
        span = sum(self.seconds)
        if span < LEAST_SECONDS:
            return Rates(None, None, None, None)
        parts = [
            (part.stored * size / time, (part.loaded or 0) * size / time)
            for part, time in zip(result.parts, self.seconds, strict=True)
            if time >= LEAST_SECONDS
        ]
        busiest = max(parts, key=sum, default=(None, None))
        return Rates(result.stored * size / span, (result.loaded or 0) * size / span, *busiest)


def advise(
    requests: Iterable[Request] | RecordedTrace,
    setup: Setup,
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> Advice:
    """Replay a trace through everything that is compared and return the advice.

    Parameters
    ----------
    requests : iterable of Request or RecordedTrace
        The trace; it is iterated over once. If it is recorded, for a fleet with its arrivals.
    setup : Setup
        What is to be advised on; the smallest memory must hold a block.
    jobs : int
        Number of processes that share the replays.
    elsewhere : Elsewhere, optional
        Other machines, which compute them instead.
    progress : callable, optional
        Called with the number of replays done, out of the different ones among
        `setup.configurations`.

    Raises
    ------
    TraceError
        As the trace does.
    TypeError, ValueError
        If `requests` is of another type, and as `Configuration` and `Configuration.check_trace` do.
    """
    recorded = requests
    if not isinstance(recorded, RecordedTrace):
        check_instance("requests", requests, Iterable, "Requests or a RecordedTrace")
        recorded = RecordedTrace.of(recorded, arrivals=setup.engines > 0)
    trace = recorded.trace
    configurations = setup.configurations(trace.unique_blocks)
    how = {"jobs": jobs, "elsewhere": elsewhere, "progress": progress}
    rows = replayed(trace, configurations, parts=1 if setup.engines else PARTS, **how)
    everything = Configuration(
        policy=INFINITE,
        host=1,
        device=0 if setup.engines else setup.capacity(setup.device_memory),
        groups=setup.chunks,
    )
    replays = Replays(trace)
    ideal = whole = replays.of(everything)
    if ideal.device_tokens:
        whole = replays.of(replace(everything, device=0))
    facts, seconds = recorded.facts(), part_seconds(recorded.times)
    objections = _objections(facts, setup, rows, ideal.hit_ratio)
    if setup.engines:
        decided = _on_fleet(setup, rows)
    else:
        decided = _on_engine(setup, rows, ideal, suffices=not objections)
    return Advice(
        setup=setup,
        facts=facts,
        rows=rows,
        unbounded=ideal.hit_ratio,
        reuse=whole.hit_ratio,
        objections=objections,
        seconds=seconds,
        **decided,
    )


def replayed(
    trace: DecodedTrace, configurations: Mapping[Case, Configuration], **how: Any
) -> dict[Case, Result]:
    """Return the result of each case; `how` are arguments of `replay_all`."""
    found = {
        result.configuration: result for result in replay_all(trace, configurations.values(), **how)
    }
    return {case: found[configuration] for case, configuration in configurations.items()}


def _on_fleet(setup: Setup, rows: Mapping[Case, Result]) -> dict[str, Any]:
    """Return what is enough of several engines, fields of `Advice`."""

    def enough(some: Iterable[Case]) -> Case:
        return choose_fleet({case: rows[case] for case in some}, setup.prices)

    named = _named(rows, setup)
    return {"case": enough(named), "offloading": enough(one for one in named if one.offloads)}


def _named(cases: Iterable[Case], setup: Setup) -> list[Case]:
    cases = list(cases)
    named = [case for case in cases if case.router in setup.routers]
    if all(case.offloads for case in named):
        named += [case for case in cases if not case.offloads]
    return named


def _on_engine(
    setup: Setup, rows: dict[Case, Result], ideal: Result, *, suffices: bool
) -> dict[str, Any]:
    """Return the choices on one engine and their ceilings, fields of `Advice`."""
    is_bounded = setup.chunks.is_bounded(junctions=ideal.has_junctions)
    ceilings: dict[int, float | None] = {}
    choices, rates = {}, setup.rates
    for memory in setup.memories():
        best = rows.pop(Case(memory, policy=BELADY), None)
        ratio = None if best is None else best.host_tokens / (ideal.asked_tokens or 1)
        most = ideal.hit_ratio if is_bounded else 1.0
        ceilings[memory] = None if ratio is None else min(ratio, most)
        found = {policy: rows[Case(memory, policy=policy)] for policy in setup.policies}
        paying = None
        if rates is not None:
            paying = [policy for policy in found if balance(setup, found[policy], rates).pays]
        choices[memory] = choose([*found.values()], paying)
    choice = choices[setup.memory]
    pays = choice.pays is not False
    offloading = Case(setup.memory, policy=choice.policy if pays and suffices else choice.best)
    return {
        "offloading": offloading,
        "case": offloading if pays else Case(0),
        "choices": choices,
        "ceilings": ceilings,
        "unbounded_is_ceiling": is_bounded,
    }


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
        """Return the counts of the trace."""
        trace = self.trace
        return Facts(
            requests=trace.num_requests,
            seconds=sum(part_seconds(self.times)),
            input_tokens=self.tokens,
            blocks=trace.num_blocks,
            unique_blocks=trace.unique_blocks,
        )


def evicts_early(result: Result) -> bool:
    """Return whether anything is evicted in the first half of the trace."""
    return any(part.evicted for part in result.parts[: PARTS // 2])


def part_seconds(times: Iterable[float]) -> list[float]:
    """Return how long each part lasts, from its first arrival to that of the next, seconds.

    `times` are the arrivals of all requests, milliseconds.
    """
    marks = np.maximum.accumulate(np.fromiter(times, dtype=np.float64))
    if not len(marks):
        return [0.0] * PARTS
    ends = [min(len(marks) * part // PARTS, len(marks) - 1) for part in range(PARTS + 1)]
    return [float(seconds) for seconds in np.diff(marks[ends]) / 1000]


def _on_device(result: Result) -> float:
    """Return the share of all tokens that the accelerator's own cache serves."""
    whole = result.device_tokens + result.asked_tokens
    return 1 - result.asked_tokens / whole if whole else 0.0


def _objections(facts: Facts, setup: Setup, rows: Mapping[Case, Result], ideal: float) -> list[str]:
    """Return why nothing is recommended: few requests, no reuse, no early eviction, no hits."""
    if not facts.requests:
        return ["the trace has no requests"]
    found = []
    if facts.requests < LEAST_REQUESTS:
        found.append(
            f"the trace is too short: {plural(facts.requests, 'request')}, and at least "
            f"{LEAST_REQUESTS} are needed"
        )
    needed = f"at least {percent_text(LEAST_REUSE)} is needed"
    on_device = 0.0 if setup.engines else _on_device(rows[Case(setup.memory)])
    if ideal < LEAST_REUSE <= on_device:
        size = bytes_text(setup.device_memory)
        served = (
            "the accelerator's own prefix cache, "
            f"{'assumed to have' if setup.device_is_assumed else 'of'} {size}, serves "
            f"{percent_text(on_device)} of the {setup.counted} itself, which leaves almost no "
            f"reuse: behind it a cache without bounds would hit {percent_text(ideal)} "
            f"of the others, and {needed}. Running "
            "requests share that memory; --device-memory sets what they leave, 0 leaves it out"
        )
        return [*found, served]
    plain = setup.chunks.is_plain
    if ideal < LEAST_REUSE:
        at = "" if plain else " at this retention interval"
        text = (
            f"there is almost no reuse{at}: a cache without bounds would hit {percent_text(ideal)} "
            f"of the {setup.counted}, and {needed}"
        )
        if plain:  # with groups, resume points may be missing
            text += ". Offloading gains nothing on such requests"
        return [*found, text]
    asked = [] if setup.engines else [Case(setup.memory, policy=p) for p in setup.policies]
    if asked and not any(evicts_early(rows[case]) for case in asked):
        way_out = change = "record for longer, or ask for less --capacity"
        if plain:  # with groups, what all blocks take is not counted
            size = bytes_text(facts.unique_blocks * setup.block_bytes)
            way_out = f"all of its distinct blocks take {size}; {change}"
        found.append(
            "the trace is too short for this memory: in the first half of its requests nothing is "
            f"evicted from {bytes_text(setup.memory)}, so the policies cannot be compared. "
            f"{way_out[0].upper()}{way_out[1:]}"
        )
    elif asked and setup.rates is None and not any(rows[case].host_tokens for case in asked):
        found.append(
            f"no policy hits anything with {bytes_text(setup.memory)}; a cache without bounds "
            f"would hit {percent_text(ideal)} of the {setup.counted}"
        )
    return found
