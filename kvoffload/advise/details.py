"""Details of an advice: hits over time and per request, reuse distances, a disk."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.replay import Result
from kvoffload.replay.loop import Replays
from kvoffload.replay.offline import stack_distances
from kvoffload.replay.results import Log, percentiles

from .advice import LEAST_SECONDS, Advice, RecordedTrace
from .setup import VLLM_DEFAULT, Case, FleetTier

POINTS = 50
"""Parts of a trace, of equally many requests, for hits over time."""

SHARES = tuple(n / 10 for n in range(1, 10))
"""Upper ends of the classes of requests by the share of their blocks that is hit."""

SECONDS_PER_DAY = 86_400

LITTLE = 0.005
"""Gain in hit ratio below which it is called hardly any."""


@dataclass(frozen=True, slots=True)
class PolicyDetails:
    """Distribution of a policy's hits over the trace.

    Attributes
    ----------
    policy : str
        Policy string.
    over_time : list of float
        Hit ratio in each of `POINTS` parts of equally many requests.
    first_tenth, second_half : float
        Hit ratio in these parts of the requests.
    requests_by_share : list of int
        Requests by the share of the tokens asked for that is hit: none, up to each of
        `SHARES`, less than all, all. Those that ask for no block are left out.
    """

    policy: str
    over_time: list[float]
    first_tenth: float
    second_half: float
    requests_by_share: list[int]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse distances: the data between two uses of a block.

    Attributes
    ----------
    reused : float
        Share of all uses that are not the first of their block.
    bytes_at : dict of int to float
        By percent of those uses, the bytes of distinct blocks between a use and the one before
        that they do not exceed.
    sampled : float
        Share of the blocks that was examined.
    """

    reused: float
    bytes_at: dict[int, float]
    sampled: float


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times in which prompts are read and computed, without waiting for one another.

    The tokens that are not hit are computed at the engine's rate, and what is hit is read over its
    link; with several groups every token that is hit takes its share of all slots that are loaded.

    Attributes
    ----------
    policy : str or None
        Policy of host memory; None without offloading.
    p50, p95 : float
        Median and 95th percentile of the seconds per prompt (nearest rank).
    missed_p50, missed_p95 : int
        The same of the tokens that are computed.
    """

    policy: str | None
    p50: float
    p95: float
    missed_p50: int
    missed_p95: int


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk behind host memory.

    Attributes
    ----------
    size : int
        Bytes.
    policies : tuple of str
        Policy strings for it, to compare.
    """

    size: int
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiskCell:
    """Results of a disk with a policy behind a host memory.

    Attributes
    ----------
    policy, host_policy : str
        The disk's policy, and that of the host memory in front.
    memory : int
        Host memory in front, bytes.
    counts : Result
        Hits and blocks written; with groups tokens and slots.
    alone : float
        Hit ratio of the same host memory without a disk.
    bytes_per_day : float or None
        Bytes written to the disk per day, at the trace's rate; None if it has no times.
    writes_per_day : float or None
        The same as a multiple of the disk's size, in which makers of drives state endurance.
    """

    policy: str
    host_policy: str
    memory: int
    counts: Result
    alone: float
    bytes_per_day: float | None
    writes_per_day: float | None


@dataclass(frozen=True, slots=True)
class Details:
    """Details of an advice.

    Attributes
    ----------
    policies : list of PolicyDetails
        Of the policy that is recommended, or hits most, and of vLLM's default.
    reuse : Reuse
        Reuse distances.
    disk : Disk or None
        The disk that was asked for.
    disk_cells : list of DiskCell
        Of each of its policies behind each host memory with the first policy above, and behind the
        memory that was asked for with vLLM's default.
    first_tokens : list of FirstTokens
        Of `policies`, then without offloading, behind the accelerator's own cache; empty where the
        engine's rates are not known.
    """

    policies: list[PolicyDetails]
    reuse: Reuse
    disk: Disk | None
    disk_cells: list[DiskCell]
    first_tokens: list[FirstTokens] = field(default_factory=list)

    def disk_worth(self, memory: int, host_policy: str) -> tuple[int, str] | None:
        """Return the bytes and the policy of the disk behind a host memory, if it adds hits."""
        cells = [c for c in self.disk_cells if (c.memory, c.host_policy) == (memory, host_policy)]
        best = max(cells, key=lambda cell: cell.counts.hit_ratio, default=None)
        if self.disk is None or best is None or best.counts.hit_ratio - best.alone < LITTLE:
            return None
        return self.disk.size, best.policy


def details(recorded: RecordedTrace, advice: Advice, disk: Disk | None = None) -> Details:
    """Replay once more, in the memory that was asked for, and return the details.

    Parameters
    ----------
    recorded : RecordedTrace
        The trace that the advice was made from.
    advice : Advice
        The advice.
    disk : Disk, optional
        A disk to put behind each of the memories.
    """
    replays, default = Replays(recorded.trace), Case(advice.setup.memory)
    policies, first_tokens = [], []
    for case in dict.fromkeys((advice.offloading, default)):
        log = replays.of(advice.rows[case].configuration).log
        hits, asked = log["host"], log["asked"]
        tenth, half = (
            float(hits[part].sum() / max(1, asked[part].sum()))
            for part in (slice(max(1, len(log) // 10)), slice(len(log) // 2, None))
        )
        curve, shares = _over_time(hits, asked), _by_share(hits, asked)
        policies.append(PolicyDetails(case.policy, curve, tenth, half, shares))
        first_tokens += _first_tokens(advice, case, log)
    none = Case(0)
    without = replays.of(advice.setup.configuration(none, advice.facts.unique_blocks))
    first_tokens += _first_tokens(advice, none, without.log)
    cells = [] if disk is None else _disk_cells(replays, advice, disk)
    return Details(policies, _reuse(recorded, advice), disk, cells, first_tokens)


def _over_time(hits: npt.NDArray[np.int64], asked: npt.NDArray[np.int64]) -> list[float]:
    count = min(POINTS, len(hits))
    ends = [len(hits) * n // count for n in range(count)] if count else []
    if not ends:
        return []
    sums = np.add.reduceat(hits, ends), np.maximum(1, np.add.reduceat(asked, ends))
    return [float(ratio) for ratio in sums[0] / sums[1]]


def _by_share(hits: npt.NDArray[np.int64], asked: npt.NDArray[np.int64]) -> list[int]:
    some = asked > 0
    shares = hits[some] / asked[some]
    # none | up to .1 | … | up to .9 | below 1 | all
    edges = [np.nextafter(0, 1), *(np.nextafter(share, 2) for share in SHARES), 1.0]
    classes = np.searchsorted(edges, shares, side="right")
    return [int(count) for count in np.bincount(classes, minlength=len(SHARES) + 3)]


def _first_tokens(advice: Advice, case: Case, log: Log) -> list[FirstTokens]:
    """Return the times of prompts; empty if rates are not known.

    Without offloading, nothing is hit or read.
    """
    engine, setup = advice.setup.rates, advice.setup
    if engine is None or not len(log):
        return []
    computed, hits = log["missed"], log["host"]
    seconds = computed / engine.prefill_rate
    if case.offloads and hits.any():
        loaded_bytes = (advice.rows[case].loaded or 0) * setup.block_bytes
        seconds = seconds + hits * (loaded_bytes / hits.sum() / engine.link_bandwidth)
    policy = case.policy if case.offloads else None
    return [FirstTokens(policy, *percentiles(seconds), *percentiles(computed))]


def _reuse(recorded: RecordedTrace, advice: Advice) -> Reuse:
    distances, share = stack_distances(recorded.trace)
    groups = advice.setup.chunks
    # a use of a block is one of its part of a chunk in each group that keeps every chunk
    chunks = groups.full_chunk_tokens or (min(groups.chunk_tokens),)
    block_bytes = groups.slot_bytes * sum(groups.block_tokens / tokens for tokens in chunks)
    at = {}
    if len(distances):
        for percent in (10, 25, 50, 75, 90, 99):
            rank = -(-len(distances) * percent // 100)
            at[percent] = float(distances[rank - 1]) * block_bytes
    blocks, unique = recorded.trace.num_blocks, recorded.trace.unique_blocks
    return Reuse((blocks - unique) / (blocks or 1), at, share)


def _disk_cells(replays: Replays, advice: Advice, disk: Disk) -> list[DiskCell]:
    setup, seconds, chosen = advice.setup, advice.facts.seconds, advice.offloading
    fronts = [chosen._replace(memory=memory) for memory in setup.memories()]
    fronts += [Case(setup.memory)] if chosen.policy != VLLM_DEFAULT else []
    cells = []
    for policy in disk.policies:
        for front in fronts:
            case = front._replace(tier=FleetTier("private", disk.size, policy))
            counts = replays.of(setup.configuration(case, advice.facts.unique_blocks))
            per_day = None
            if seconds >= LEAST_SECONDS:
                per_day = counts.tier_stored * setup.block_bytes * SECONDS_PER_DAY / seconds
            wear = None if per_day is None else per_day / disk.size
            alone = advice.rows[front].hit_ratio
            cells.append(DiskCell(policy, front.policy, front.memory, counts, alone, per_day, wear))
    return cells
