"""The knee of the hits over memory: the memory above which doubling it is hardly worth it.

Each size of a ladder, 1, 1½, 2, 3, 4, 6, ... times a power of two, is replayed exactly. A doubling
is worth it if it gains a point. The knee is the least memory from which on no doubling is worth it;
the errors of the gains, as in `kvoffload.advise.choice`, say between which sizes it may lie. A
memory that is not full in the first half of the trace, for which advice is refused, is never
chosen: then the trace does not show the knee.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffload.replay import Configuration, Result
from kvoffload.replay.processes import Elsewhere

from .advice import PARTS, RecordedTrace, evicts_early, replayed
from .choice import difference_error
from .setup import Case, Setup

WORTH = 0.01
"""Share of the tokens asked for that twice the memory must gain to be worth it."""

LEAST_SHARE = 512
"""Bytes of all blocks over the least memory of the ladder."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One memory, with the policy that hits most in it.

    Attributes
    ----------
    memory : int
        Bytes.
    policy : str
        Policy string; the first of several that hit equally often.
    hit_ratio : float
        Share of the tokens asked for that it hits.
    gain : float
        Additional share that twice the memory hits, with the policy that hits most there.
    error : float
        The possible error of `gain`.
    """

    memory: int
    policy: str
    hit_ratio: float
    gain: float
    error: float


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee, and the curve on which it was found.

    Attributes
    ----------
    memory : int
        The least memory from which on doubling is not worth it, bytes. If the trace does not show
        the knee, the greatest memory of the curve that advice can be given on.
    least, most : int
        The least and the greatest memory at which the knee of the curve may lie within the errors,
        bytes; without `is_shown` a longer trace has a higher one.
    is_shown : bool
        Whether the trace is long enough to show the knee.
    curve : tuple of Rung
        All memories, ascending.
    """

    memory: int
    least: int
    most: int
    is_shown: bool = field(kw_only=True)
    curve: tuple[Rung, ...]

    @property
    def rung(self) -> Rung:
        """The knee's place on the curve."""
        return next(rung for rung in self.curve if rung.memory == self.memory)


def ladder(least: int, most: int) -> list[int]:
    """Return 2**n and 3 * 2**(n - 1) bytes from `least` up to the first size >= `most`."""
    sizes = sorted({size << power for power in range(63) for size in (2, 3)})
    first = next((index for index, size in enumerate(sizes) if size >= least), len(sizes) - 1)
    last = next((index for index, size in enumerate(sizes) if size >= most), len(sizes) - 1)
    return sizes[first : max(first, last) + 1]


def knee_configurations(recorded: RecordedTrace, setup: Setup) -> dict[Case, Configuration]:
    """Return what `find_knee` replays: each policy in each memory of the curve, ascending."""
    unique = recorded.trace.unique_blocks
    whole = max(1, unique * len(setup.chunks.layout.groups) * setup.block_bytes)
    memories = ladder(max(setup.block_bytes, whole // LEAST_SHARE), whole)
    cases = (Case(memory, policy=policy) for memory in memories for policy in setup.policies)
    return {case: setup.configuration(case, unique) for case in cases}


def find_knee(
    recorded: RecordedTrace,
    setup: Setup,
    *,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> Knee:
    """Replay a trace in memories of all sizes, and find the knee of the curve.

    Parameters
    ----------
    recorded : RecordedTrace
        The trace.
    setup : Setup
        The question; its memories are ignored.
    jobs : int
        Number of processes that share the replays.
    elsewhere : Elsewhere, optional
        Other machines, which compute them instead.
    progress : callable, optional
        Called with the number of replays done, out of the different ones among
        `knee_configurations`.

    Complexity: about twenty replays per policy of `setup`.
    """
    found: dict[int, list[Result]] = {}
    rows = replayed(
        recorded.trace,
        knee_configurations(recorded, setup),
        parts=PARTS,
        jobs=jobs,
        elsewhere=elsewhere,
        progress=progress,
    )
    for case, result in rows.items():
        found.setdefault(case.memory, []).append(result)
    best = {
        memory: max(some, key=operator.attrgetter("offloaded_tokens"))
        for memory, some in found.items()
    }
    everything = best[max(best)]
    curve = [_rung(memory, now, best.get(2 * memory, everything)) for memory, now in best.items()]
    knee = _from_which_on(curve, lambda rung: rung.gain < WORTH)
    filled = [memory for memory, some in found.items() if any(map(evicts_early, some))]
    greatest = max(filled, default=curve[0].memory)
    return Knee(
        memory=min(knee, greatest),
        least=_from_which_on(curve, lambda rung: rung.gain - rung.error < WORTH),
        most=_from_which_on(curve, lambda rung: rung.gain + rung.error < WORTH),
        is_shown=knee <= greatest,
        curve=tuple(curve),
    )


def _rung(memory: int, now: Result, twice: Result) -> Rung:
    """Return a memory's place on the curve."""
    gain = error = 0.0
    if twice.asked_tokens:
        gain = twice.hit_ratio - now.hit_ratio
        error = difference_error(twice.parts, now.parts)
    return Rung(memory, now.configuration.policy, now.hit_ratio, gain, error)


def _from_which_on(curve: Sequence[Rung], holds: Callable[[Rung], bool]) -> int:
    """Return the least memory from which on `holds` is true; the greatest if it never is."""
    found = curve[-1].memory
    for rung in reversed(curve):
        if not holds(rung):
            break
        found = rung.memory
    return found
