"""Many fleets over one trace, divided among processes, and their memory pooled as one cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.offline import BELADY
from kvoffload.replay.processes import Elsewhere, spread
from kvoffload.replay.requests import DecodedTrace
from kvoffload.replay.simulate import Demand

from .counts import FleetResult
from .fleet import Fleet, replay_rows
from .rows import FleetRows

__all__ = ["Pooled", "run_fleets"]


@dataclass(frozen=True, slots=True)
class Pooled:
    """One cache of the size of several, which serves every request in turn.

    Attributes
    ----------
    policy : str
        A policy, ``"belady"`` or ``"infinite"``.
    blocks, device_blocks : int
        Its capacity, and that of an accelerator's own cache in front.
    """

    policy: str
    blocks: int
    device_blocks: int = 0


def run_fleets(
    jobs: int,
    trace: DecodedTrace,
    work: Sequence[Fleet | Pooled],
    elsewhere: Elsewhere | None = None,
) -> Iterator[tuple[Fleet | Pooled, FleetResult | int]]:
    """Replay fleets, all with one block size; yield each with its result when it is done.

    The result of a `Pooled` is its hits in blocks. `jobs` processes share the work, the longest
    first; 1 computes in this one. ChildProcessError if one is killed. With `elsewhere` other
    machines compute.
    """
    ordered = sorted(dict.fromkeys(work), key=_shortness)
    yield from spread(trace, ordered, _computing, jobs, elsewhere)


def _shortness(job: Fleet | Pooled) -> int:
    """Return a rank, the lower the longer a job takes."""
    if isinstance(job, Pooled):
        return 0 if job.policy == BELADY else 4
    return 1 if job.spec.sees is not None else 2 if job.tier is not None else 3


def _computing(trace: DecodedTrace) -> Callable[[Fleet | Pooled], FleetResult | int]:
    keys = trace.keys()
    behind = functools.cache(lambda size: Demand.of(trace, GroupChunks.of_blocks(), size))
    numbered = functools.cache(lambda size: FleetRows(trace, keys, size))

    def compute(job: Fleet | Pooled) -> FleetResult | int:
        if isinstance(job, Fleet):
            job.check_trace(trace)
            return replay_rows(trace, numbered(job.block_tokens), job)
        demand = behind(job.device_blocks)
        on_device = int(demand.device_hits.sum())
        return on_device + (demand.simulate(job.policy, job.blocks).hit_blocks or 0)

    return compute
