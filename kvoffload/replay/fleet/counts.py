"""Counts and times of a fleet: per request during the run, and in total."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.replay.results import (
    ERROR_PARTS,
    HitRatios,
    missed_percentiles,
    nearest_rank,
)

from .engine import Hits
from .events import NANOSECONDS

__all__ = ["EngineCounts", "FleetResult", "Log"]

_PLACEMENT_DIGITS = 12


class Log:
    """The hits and times of each row of a fleet; times are whole nanoseconds of any size.

    Attributes
    ----------
    engines : array of int
        The engine that each row was sent to.
    device, host, tier : array of int
        Leading blocks found in each place.
    missed : array of int
        Tokens computed.
    prefill : list of int
        Time to read and compute the row's prompt.
    arrived : list of int
        Its arrival.
    first_tokens, latencies : list of int
        From its arrival to the end of its prefill, and to its end.
    """

    def __init__(self, num_rows: int) -> None:
        self.engines, self.missed, self.device, self.host, self.tier = (
            array("q", bytes(8 * num_rows)) for _ in range(5)
        )
        self.arrived, self.prefill, self.first_tokens, self.latencies = (
            [0] * num_rows for _ in range(4)
        )
        self.ended = 0  # the last finish

    def begins(self, row: int, hits: Hits, missed: int, prefill: int) -> None:
        """Note the hits of a row, and the duration of its prefill."""
        self.device[row], self.host[row], self.tier[row] = hits
        self.missed[row], self.prefill[row] = missed, prefill

    @property
    def span(self) -> int:
        """Nanoseconds from the first arrival to the last finish."""
        return self.ended - min(self.arrived, default=0)

    def found(self) -> npt.NDArray[np.int64]:
        """Return the blocks of each row that were found in any place."""
        device, host, tier = (
            np.array(column, dtype=np.int64) for column in (self.device, self.host, self.tier)
        )
        return device + host + tier

    def placement(self) -> str:
        """Return a digest of each row's engine: 12 hex digits."""
        engines = np.array(self.engines, dtype="<u2").tobytes()
        return hashlib.sha256(engines).hexdigest()[:_PLACEMENT_DIGITS]


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The counts of one engine; attributes are those of `FleetResult`."""

    requests: int
    device_hits: int
    host_hits: int
    tier_hits: int
    missed_tokens: int
    host_stored: int
    tier_stored: int
    ttft_p95: float | None
    busy: float | None


@dataclass(frozen=True, slots=True)
class FleetResult(HitRatios):
    """The result of a fleet; its times rank designs but do not predict milliseconds.

    Attributes
    ----------
    requests, blocks, tokens : int
        Requests, and the blocks and tokens of their prompts.
    device_hits, host_hits, tier_hits : int
        Blocks found in each place.
    hit_tokens, missed_tokens : int
        Prompt tokens found, and computed.
    missed_p50, missed_p95 : int
        Median and 95th percentile, by nearest rank, of the tokens computed for a prompt.
    host_stored, tier_stored : int
        Blocks written to host memory, including those from the tier, and to the tier.
    saved : float or None
        Share of the prefill time saved by caches; None without a rate.
    ttft_p50, ttft_p95, ttft_mean : float or None
        Seconds from a request's arrival to the end of its prefill; percentiles by nearest rank.
    ttft_p95_ns : int
        The exact 95th percentile, nanoseconds.
    latency_mean : float or None
        Seconds from its arrival to its end.
    busy : float or None
        Share of the engines' time spent on computing prompts.
    imbalance : float
        Most tokens computed by one engine, divided by the mean; 1 if none were computed.
    placement : str
        A digest of the engine of each request: equal for equal decisions.
    engines : tuple of EngineCounts
        The same by engine.
    ttft_p95_of_parts : tuple of float
        The 95th percentile in each of `ERROR_PARTS` parts of the requests; empty without a rate.
    liar_asked, liar_hits : int or None
        Of the blocks, and those found in any place, the part of the sessions that give false hints;
        None without such sessions.
    """

    requests: int
    blocks: int
    tokens: int
    device_hits: int
    host_hits: int
    tier_hits: int
    hit_tokens: int
    missed_tokens: int
    missed_p50: int
    missed_p95: int
    host_stored: int
    tier_stored: int
    saved: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_mean: float | None
    ttft_p95_ns: int
    latency_mean: float | None
    busy: float | None
    imbalance: float
    placement: str
    engines: tuple[EngineCounts, ...]
    ttft_p95_of_parts: tuple[float, ...] = ()
    liar_asked: int | None = None
    liar_hits: int | None = None

    @property
    def token_hit_ratio(self) -> float:
        """Share of the tokens that were found; 0 without tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def _counted(self) -> tuple[int, int]:
        """Return all blocks, and those found in any place."""
        return self.blocks, self.device_hits + self.host_hits + self.tier_hits

    @classmethod
    def of(
        cls,
        log: Log,
        lengths: Sequence[int],
        blocks: int,
        stored: Sequence[tuple[int, int]],
        *,
        uncached_ns: int | None,
        liars: tuple[int, int | None] | None = None,
    ) -> FleetResult:
        """Sum up a log.

        Parameters
        ----------
        log : Log
            Of all rows.
        lengths : sequence of int
            Tokens of each row's prompt.
        blocks : int
            Blocks of all rows.
        stored : sequence of (int, int)
            Blocks that each engine stored in host memory and in a tier.
        uncached_ns : int or None
            Time in prefill without caches; None without a rate.
        liars : (int, int), optional
            `liar_asked` and `liar_hits`.
        """
        engine_of, columns = np.array(log.engines, dtype=np.int64), _columns(log)
        by_engine = []
        for engine, (host_stored, tier_stored) in enumerate(stored):
            own = {name: column[engine_of == engine] for name, column in columns.items()}
            by_engine.append(
                EngineCounts(
                    requests=len(own["missed"]),
                    device_hits=int(own["device"].sum()),
                    host_hits=int(own["host"].sum()),
                    tier_hits=int(own["tier"].sum()),
                    missed_tokens=int(own["missed"].sum()),
                    host_stored=host_stored,
                    tier_stored=tier_stored,
                    ttft_p95=_seconds(
                        nearest_rank(sorted(own["first_tokens"].tolist()), 95), uncached_ns
                    ),
                    busy=_busy(int(own["prefill"].sum()), log.span, uncached_ns),
                )
            )
        of_parts = _p95_of_parts(log.first_tokens) if uncached_ns is not None else ()
        first_tokens = sorted(log.first_tokens)
        prefill, missed = sum(log.prefill), int(columns["missed"].sum())
        rows, tokens = max(1, len(first_tokens)), sum(lengths)
        p50, p95 = nearest_rank(first_tokens, 50), nearest_rank(first_tokens, 95)
        most = max(one.missed_tokens for one in by_engine)
        return cls(
            requests=len(first_tokens),
            blocks=blocks,
            tokens=tokens,
            device_hits=int(columns["device"].sum()),
            host_hits=int(columns["host"].sum()),
            tier_hits=int(columns["tier"].sum()),
            hit_tokens=tokens - missed,
            missed_tokens=missed,
            **missed_percentiles(log.missed),
            host_stored=sum(host for host, _ in stored),
            tier_stored=sum(tier for _, tier in stored),
            saved=1 - prefill / uncached_ns if uncached_ns else None,
            ttft_p50=_seconds(p50, uncached_ns),
            ttft_p95=_seconds(p95, uncached_ns),
            ttft_mean=_seconds(sum(first_tokens) / rows, uncached_ns),
            ttft_p95_ns=p95,
            latency_mean=_seconds(sum(log.latencies) / rows, uncached_ns),
            busy=_busy(prefill, log.span * len(stored), uncached_ns),
            imbalance=most * len(stored) / missed if missed else 1.0,
            placement=log.placement(),
            engines=tuple(by_engine),
            ttft_p95_of_parts=of_parts,
            liar_asked=None if liars is None else liars[0],
            liar_hits=None if liars is None else liars[1],
        )


def _columns(log: Log) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a log that are summed by engine, as arrays with a value per row."""
    counts = {name: getattr(log, name) for name in ("device", "host", "tier", "missed")}
    found = {name: np.array(column, dtype=np.int64) for name, column in counts.items()}
    for name in ("prefill", "first_tokens"):
        found[name] = np.array(getattr(log, name), dtype=np.object_)  # may exceed 64 bits
    return found


def _p95_of_parts(first_tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the 95th percentile of each part of the requests, seconds."""
    ends = [len(first_tokens) * part // ERROR_PARTS for part in range(ERROR_PARTS + 1)]
    parts = (sorted(first_tokens[start:end]) for start, end in itertools.pairwise(ends))
    return tuple(nearest_rank(part, 95) / NANOSECONDS for part in parts)


def _seconds(nanoseconds: float, uncached_ns: int | None) -> float | None:
    return None if uncached_ns is None else nanoseconds / NANOSECONDS


def _busy(prefill: int, span: int, uncached_ns: int | None) -> float | None:
    return None if uncached_ns is None or not span else prefill / span
