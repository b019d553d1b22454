"""The result of a replay: what became of each request, and sums over them."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .configuration import Configuration
from .durations import DurationHistogram
from .events import NANOSECONDS, duration

ERROR_PARTS = 5
"""Parts of a trace, of equally many requests, from which the errors of results are estimated."""

COUNTS = (
    *("device", "host", "tier", "loaded", "stored"),
    *("evicted", "refused", "not_admitted", "tier_stored", "junction"),
)
"""The columns of a log that the caches of an engine fill."""

PROMPT = ("blocks", "tokens", "answer", "asked", "missed")
"""The columns of a log that are counts of a prompt."""

SUMS = ("blocks", "tokens", *COUNTS[COUNTS.index("loaded") : COUNTS.index("junction")])
"""The columns of a log whose sums a result has by the same name."""

TIMES = ("arrival", "start", "first", "end")
"""The columns of a log that are times, nanoseconds."""

LOG = np.dtype(
    [
        ("engine", np.uint16),
        ("lies", np.bool_),
        *((name, np.int64) for name in (*PROMPT, *COUNTS, *TIMES)),
    ]
)
"""A row per request. Its prompt: its ``blocks`` and ``tokens``, and those of its ``answer``.
Tokens found on the ``device``, ``asked`` for behind it, had by ``host`` memory and ``tier``, and
``missed``: a block that a prompt fills only partly counts as full, except in ``tokens`` and
``missed``. Slots ``loaded``, ``stored`` in host memory, those from the tier included, ``evicted``
there, and ``tier_stored``; calls that were ``refused``, and blocks ``not_admitted``. Tokens of its
``junction``. Nanoseconds of its ``arrival``, the ``start`` of its prefill, its ``first`` token and
its ``end``; 0 where no time passes. Its ``engine``, and whether its session ``lies`` in hints."""

Log = npt.NDArray[np.void]
Columns = dict[str, npt.NDArray[Any]]
"""The columns of `LOG`, by name."""

_MOST = 2**63

_PLACEMENT_DIGITS = 12


def percentiles(values: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Return the median and the 95th percentile by nearest rank; 0 of no values."""
    if not len(values):
        return 0, 0
    ranks = [math.ceil(len(values) * percent / 100) - 1 for percent in (50, 95)]
    median, p95 = np.partition(values, ranks)[ranks].tolist()
    return median, p95


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a configuration, over a trace, one of its parts, or one of its engines.

    A slot holds a block of the trace, or a chunk of any group of a model with several KV groups.
    Times rank designs but do not predict milliseconds.

    Attributes
    ----------
    configuration : Configuration
        What was replayed.
    requests, blocks, tokens : int
        Requests, and the blocks and tokens of their prompts; a prompt of unknown length has the
        tokens of its blocks, and one more with several groups, or none if the size of a block is
        not known either.
    asked_tokens : int
        Tokens of the blocks that host memory was asked for: those that the accelerator's own cache
        did not have. A partly filled block counts as full, and as one token if the size of a
        block is not known.
    device_tokens, host_tokens, tier_tokens : int
        Tokens found in each place, counted likewise.
    missed_tokens : int or None
        Prompt tokens computed. None, as are the next two, if the size of a block is not known, and
        for ``"belady"``, which hits the most blocks and not the most tokens.
    missed_p50, missed_p95 : int or None
        Median and 95th percentile, by nearest rank, of the tokens computed for a prompt.
    loaded : int or None
        Slots loaded for the hits; None for ``"belady"`` over several groups.
    stored, evicted : int
        Slots that host memory filled, those from the tier included, and those that it evicted for
        them. For a ceiling only the filled slots are known; the other counts are 0.
    refused : int
        Calls to store that were refused, for want of blocks that may leave.
    not_admitted : int
        Blocks or chunks that the policy did not admit.
    tier_stored : int
        Slots written to the tier.
    liar_asked, liar_hits : int or None
        Of `asked` and `hits`, the part of the sessions that give false hints; None without such
        sessions, and `liar_hits` for ``"belady"``.
    has_junctions : bool
        Whether the accelerator's cache made resume points inside a hit; see
        `GroupChunks.is_bounded`.
    saved : float or None
        Share of the prefill time saved by caches; None, as are the next seven, without a rate.
    ttft_p50, ttft_p95, ttft_mean : float or None
        Seconds from a request's arrival to the end of its prefill; percentiles by nearest rank.
    latency_mean : float or None
        Seconds from its arrival to its end.
    requests_per_second, tokens_per_second : float or None
        Requests, and tokens of prompts and answers, from the first arrival to the last end.
    busy : float or None
        Share of the engines' time spent on computing prompts.
    ttft_p95_ns : int
        The exact 95th percentile, nanoseconds.
    ttft_p95_of_parts : tuple of float
        The 95th percentile in each of `ERROR_PARTS` parts of the requests; empty without a rate.
    imbalance : float
        Most tokens computed by one engine, divided by the mean; 1 if none were computed, or if
        that is not known.
    placement : str
        A digest of the engine of each request: equal for equal decisions.
    engines : tuple of Result
        The result of each of several engines.
    parts : tuple of Result
        The results of as many parts of equally many requests as were asked for; the caches are kept
        between them.
    times : DurationHistogram
        Time spent in the manager, one duration per request; empty if it was not measured.
    log : (requests,) structured array
        What became of each request, in the order of the trace: see `LOG`. Of a result of `replay`
        alone: others, that of ``"belady"``, parts and engines have none, and raise ValueError.
    """

    configuration: Configuration
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    asked_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    tier_tokens: int = 0
    missed_tokens: int | None = None
    missed_p50: int | None = None
    missed_p95: int | None = None
    loaded: int | None = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    not_admitted: int = 0
    tier_stored: int = 0
    liar_asked: int | None = None
    liar_hits: int | None = None
    has_junctions: bool = False
    saved: float | None = None
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    ttft_mean: float | None = None
    latency_mean: float | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    busy: float | None = None
    ttft_p95_ns: int = 0
    ttft_p95_of_parts: tuple[float, ...] = ()
    imbalance: float = 1.0
    placement: str = ""
    engines: tuple[Result, ...] = field(default=(), repr=False)
    parts: tuple[Result, ...] = field(default=(), repr=False)
    times: DurationHistogram = field(default_factory=DurationHistogram, repr=False, compare=False)
    _log: Log | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, columns: Columns, configuration: Configuration, parts: int = 1, *, log: bool = True
    ) -> Result:
        """Sum up the columns of a log, as a whole, by engine, and by part if there are several.

        `log` says whether the result has the log.
        """
        engine_of, count, span = columns["engine"], len(columns["engine"]), _span(columns)
        more: dict[str, Any] = {"_log": log_of(columns) if log else None}
        if configuration.engines > 1:
            each = [
                cls._of(_rows(columns, engine_of == engine), configuration, span, engines=1)
                for engine in range(configuration.engines)
            ]
            missed = [one.missed_tokens or 0 for one in each]
            more["engines"] = tuple(each)
            if sum(missed):
                more["imbalance"] = max(missed) * len(missed) / sum(missed)
        if parts > 1:
            ends = [count * part // parts for part in range(parts + 1)]
            more["parts"] = tuple(
                cls._of(_rows(columns, slice(start, end)), configuration, span)
                for start, end in itertools.pairwise(ends)
            )
        return replace(cls._of(columns, configuration, span), **more)

    @classmethod
    def _of(
        cls, columns: Columns, configuration: Configuration, span: int, engines: int | None = None
    ) -> Result:
        """Sum up some rows, which `engines` have served in `span` nanoseconds."""
        groups, lies = configuration.groups, columns["lies"]
        total = {name: _sum(columns[name]) for name in (*PROMPT, *COUNTS)}
        more: dict[str, Any] = {name: total[name] for name in SUMS}
        more |= {f"{name}_tokens": total[name] for name in ("asked", "device", "host", "tier")}
        if groups.knows_tokens:
            more["missed_tokens"] = total["missed"]
            more["missed_p50"], more["missed_p95"] = percentiles(columns["missed"])
        if lies.any():
            liars = _rows(columns, lies)
            more["liar_asked"] = _sum(liars["asked"]) // groups.hit_unit
            more["liar_hits"] = _sum(liars["host"] + liars["tier"]) // groups.hit_unit
        if configuration.rate is not None:
            more |= _times(columns, configuration, span, engines or configuration.engines)
        return cls(
            configuration=configuration,
            requests=len(lies),
            has_junctions=total["junction"] > 0,
            placement=placement_of(columns["engine"]),
            **more,
        )

    @property
    def log(self) -> Log:
        """The figures of each request, a row each."""
        if self._log is None:
            raise ValueError(
                "log must be of a result of replay, not of replay_all, a part, an engine or belady"
            )
        return self._log

    @property
    def unit(self) -> int:
        """Tokens per unit of `asked` and hits: those of a block, or 1 with several groups."""
        return self.configuration.groups.hit_unit

    @property
    def asked(self) -> int:
        """Blocks that host memory was asked for; tokens with several groups, as are all hits."""
        return self.asked_tokens // self.unit

    @property
    def hits(self) -> int:
        """Blocks of those that host memory or the tier had."""
        return self.offloaded_tokens // self.unit

    @property
    def device_hits(self) -> int:
        """Blocks that the accelerator's own cache had."""
        return self.device_tokens // self.unit

    @property
    def host_hits(self) -> int:
        """Blocks that host memory had."""
        return self.host_tokens // self.unit

    @property
    def tier_hits(self) -> int:
        """Blocks that the tier had."""
        return self.tier_tokens // self.unit

    @property
    def offloaded_tokens(self) -> int:
        """Tokens that host memory or the tier had."""
        return self.host_tokens + self.tier_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks, or tokens, asked for that were hits; 0 if none were asked for."""
        return _ratio(self.asked, self.hits)

    @property
    def liar_hit_ratio(self) -> float | None:
        """The hit ratio of the sessions that give false hints; None without such sessions."""
        if self.liar_asked is None or self.liar_hits is None:
            return None
        return _ratio(self.liar_asked, self.liar_hits)

    @property
    def honest_hit_ratio(self) -> float | None:
        """The hit ratio of the other sessions; None without such that give false hints."""
        if self.liar_asked is None or self.liar_hits is None:
            return None
        return _ratio(self.asked - self.liar_asked, self.hits - self.liar_hits)

    @property
    def hit_tokens(self) -> int | None:
        """Prompt tokens found in any place; None where `missed_tokens` is."""
        return None if self.missed_tokens is None else self.tokens - self.missed_tokens

    @property
    def token_hit_ratio(self) -> float | None:
        """Share of the prompt tokens that were found; None where that is not known."""
        if self.hit_tokens is None or not self.tokens:
            return None
        return self.hit_tokens / self.tokens

    @property
    def manager_seconds(self) -> float:
        """Time spent in the manager, seconds."""
        return self.times.total / 1e9

    @property
    def blocks_per_second(self) -> float:
        """Blocks per second of manager time; 0 if no time passed."""
        return self.blocks / self.manager_seconds if self.times.total else 0.0


def _ratio(asked: int, hits: int) -> float:
    return hits / asked if asked else 0.0


def _rows(columns: Columns, which: Any) -> Columns:
    """Return the columns of some rows."""
    return {name: column[which] for name, column in columns.items()}


def _sum(column: npt.NDArray[np.int64]) -> int:
    """Return the exact sum of counts, which may exceed 64 bits."""
    if int(column.max(initial=0)) * len(column) < _MOST:
        return int(column.sum())
    return sum(column.tolist())


def _span(columns: Columns) -> int:
    """Return the nanoseconds from the first arrival to the last end."""
    end, arrival = columns["end"], columns["arrival"]
    return int(end.max() - arrival.min()) if len(end) else 0


def _times(
    columns: Columns, configuration: Configuration, span: int, engines: int
) -> dict[str, Any]:
    """Return the times of a result, by name."""
    arrival, start, first, end = (columns[name] for name in TIMES)
    first_tokens = first - arrival
    count, (p50, p95) = max(1, len(first)), percentiles(first_tokens)
    prefill, tokens = _sum(first - start), columns["tokens"].tolist()
    uncached = sum(duration(length, configuration.rate) for length in tokens)
    ends = [len(first) * part // ERROR_PARTS for part in range(ERROR_PARTS + 1)]
    of_parts = (percentiles(first_tokens[a:b]) for a, b in itertools.pairwise(ends))
    seconds = span / NANOSECONDS
    return {
        "saved": 1 - prefill / uncached if uncached else None,
        "ttft_p50": p50 / NANOSECONDS,
        "ttft_p95": p95 / NANOSECONDS,
        "ttft_mean": _sum(first_tokens) / count / NANOSECONDS,
        "latency_mean": _sum(end - arrival) / count / NANOSECONDS,
        "requests_per_second": len(first) / seconds if span else 0.0,
        "tokens_per_second": (sum(tokens) + _sum(columns["answer"])) / seconds if span else 0.0,
        "busy": prefill / (span * engines) if span else None,
        "ttft_p95_ns": p95,
        "ttft_p95_of_parts": tuple(p95 / NANOSECONDS for _, p95 in of_parts),
    }


def log_of(columns: Columns) -> Log:
    """Return columns as a log."""
    log: Log = np.zeros(len(columns["engine"]), dtype=LOG)
    for name, column in columns.items():
        log[name] = column
    return log


def placement_of(engines: npt.NDArray[np.uint16]) -> str:
    """Return a digest of the engine of each request."""
    return hashlib.sha256(engines.astype("<u2").tobytes()).hexdigest()[:_PLACEMENT_DIGITS]
