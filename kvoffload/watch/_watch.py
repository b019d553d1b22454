"""Live shadow simulation of a manager: hit ratios elsewhere, causes of misses, wasted stores."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvoffload._checks import as_batch, check_int
from kvoffload.errors import describe
from kvoffload.managers._watching import (
    CAUSES,
    EVICTED,
    KINDS,
    NEVER_OR_LONG_AGO,
    SAMPLE_RANGE,
    STORED,
    WatchPlan,
)
from kvoffload.policies import registry
from kvoffload.types import HintGain

from .estimate import Point, make_point
from .hints import HeardHints, gain_of, heard
from .minis import Miniature, Totals, miniature_bias
from .overdue import Overdue, find_overdue

__all__ = ["Explanation", "Watch", "WatchReport"]

LIVE_MEMORY = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the shadows of a live policy other than LRU."""
SNAPSHOTS = 15
"""Snapshots of the counters per window, which is exact to this part."""
IN_FLIGHT = 0.02
"""Share of requests that met a block being stored, or were refused, above which points are
marked; miniatures of LRU begin before that, if they can."""
TAILS = 0.05
"""Tokens that windows or states kept from being loaded, relative to the hits, above which points
are marked."""
OVERLAPPING = 16
"""Such requests in a window from which on LRU has miniatures."""
LEAST_OVERLAPPING = 4
"""The same where they are a larger share than `IN_FLIGHT`: one by chance says nothing."""
MOST_SIZES = 12
REMEMBERED = 8.0
"""Least length of the LRU list, times the memory, whatever sizes are asked about."""
LONGEST = 1e9  # seconds
COUNTED = (
    *("requests", "asked", "missed", "stored", "evicted", "declined", "refused", "failed"),
    *("resets", "tail_missed_tokens"),
)
"""The counters that a report takes as they are."""

logger = logging.getLogger("kvoffload.watch")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The knowledge of a watch about a block.

    Attributes
    ----------
    state : str
        ``"absent"``, ``"pending"``, ``"idle"`` or ``"pinned"``.
    sampled : bool
        Whether the block is in the sample; the rest is None if not, or if the watch has forgotten
        the block.
    cause : str or None
        Why the block is absent or pending: one of ``broken_prefix``, ``pending``, ``evicted``,
        ``declined``, ``refused``, ``failed``, ``reset``, ``never_or_long_ago``.
    used : bool or None
        Whether it was hit since it was last stored.
    since_use, since_stored, since_evicted : float or None
        Seconds; of the last two, the one that happened last.
    """

    state: str
    sampled: bool
    cause: str | None = None
    used: bool | None = None
    since_use: float | None = None
    since_stored: float | None = None
    since_evicted: float | None = None


@dataclass(frozen=True, slots=True)
class WatchReport:
    """The findings of a watch, in its window unless said otherwise.

    Attributes
    ----------
    policy : str or None
        The policy of the manager; None if it is a user's own.
    capacity : int
        Blocks that the manager has room for.
    sampling_rate : float
        Share of the blocks that are in the sample.
    seconds : float
        Length of the window so far.
    requests, asked, missed : int
        Lookups, their blocks, and those that were no hit. Exact, as the next seven are.
    stored, evicted, declined, refused, failed : int
        Blocks given a slot, evicted, not admitted; stores refused (calls); blocks whose store
        failed.
    resets : int
        Resets of the manager's cache, which empty the shadows, too.
    tail_missed_tokens : int
        Tokens that the full KV groups of an engine had and a window or a state kept from being
        loaded: a part of the misses. 0 where the manager is not told of groups.
    points : tuple of Point
        Hit ratios at other sizes and under other policies.
    sampled_missed : dict of str to int
        Sampled blocks that missed, by cause.
    sampled_evicted, sampled_unused : int
        Sampled blocks that were evicted, and those of them that were never hit since stored.
    since_use, since_stored : float or None
        Median age at eviction in seconds, of the whole run: since the last use, since the store.
    overdue : tuple of Overdue
        Transfers past their deadline.
    hints : tuple of HeardHints
        What clients said of their sessions, by source, the first heard first; 16 are told apart,
        and behind them is one for all others.
    hint_gain : HintGain or None
        What hints of returns bring, of late; None where the policy does not rank by them, has no
        guard, or has served too few requests since the first.
    """

    policy: str | None
    capacity: int
    sampling_rate: float
    seconds: float
    requests: int
    asked: int
    missed: int
    stored: int
    evicted: int
    declined: int
    refused: int
    failed: int
    resets: int
    tail_missed_tokens: int
    points: tuple[Point, ...]
    sampled_missed: dict[str, int]
    sampled_evicted: int
    sampled_unused: int
    since_use: float | None
    since_stored: float | None
    overdue: tuple[Overdue, ...]
    hints: tuple[HeardHints, ...]
    hint_gain: HintGain | None

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were hits; 0 if there are none."""
        return 1 - self.missed / self.asked if self.asked else 0.0

    @property
    def waste(self) -> float | None:
        """Share of the evicted blocks that were never hit since stored; None if there are none."""
        return self.sampled_unused / self.sampled_evicted if self.sampled_evicted else None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Counters at one moment."""

    time: int  # ms
    counts: dict[str, Any]
    minis: tuple[Totals, ...]


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The state when the miniatures' stores began to overlap, none for those of the start."""

    cold: dict[float, float]  # by memory: blocks that LRU held and a new miniature did not
    before: dict[tuple[str, float], tuple[int, int]]  # misses and stores that only the list had
    resets: int


@dataclass(frozen=True, slots=True)
class _Subject:
    """The manager that is watched, and its shadows."""

    policy: str | None
    capacity: int  # blocks
    slots: float  # sampled, of the present size
    policy_slots: float  # and of the policies' part of the sample
    minis: list[Miniature]
    plan: WatchPlan


class Watch:
    """An observer of a manager that estimates its hit ratio elsewhere; it changes no decision.

    A sample of the blocks, chosen by a keyed hash, goes through shadows: LRU at every size in
    `memory`, and miniature managers of other policies. Their misses, relative to those of the
    shadow of the present configuration, scale the misses that the manager counts.

    Parameters
    ----------
    memory : sequence of float
        Sizes to ask about, as multiples of the present memory; 1 is always one. At most 12.
    policies : sequence of str
        Policy strings to ask about, at the present memory.
    slots : int
        Sampled blocks at the present size, >= 4. Errors fall with the square root of their number;
        memory and time grow in proportion.
    policy_slots : int
        The same for miniature managers.
    max_rate : float
        Largest share of blocks that is sampled, in (0, 1]. Below 256 / `max_rate` blocks of memory
        nothing is estimated. Small memories cost most: of 10,000 blocks one in 32 is sampled.
    window : float
        Seconds that the estimates look back, in (0, 1e9].
    deadline : float
        Seconds after which a transfer that is not completed is overdue, in (0, 1e9].
    secret : bytes, optional
        64 bytes that choose the sample; random by default, so that no client can foresee it.
    clock : callable, optional
        Returns seconds; by default the system's monotonic clock.

    Raises
    ------
    TypeError, ValueError
        If an argument breaks its rule.

    Notes
    -----
    Every method raises RuntimeError if no manager was made with this watch.

    Thread-safety: that of the manager; the methods of a watch are safe in any thread.

    Memory: 40 bytes for each sampled slot of the largest size, or of 8 times the memory if that is
    more, and the miniature managers. It does not grow.

    Examples
    --------
    >>> from kvoffload import CPUOffloadingManager
    >>> from kvoffload.watch import Watch
    >>> manager = CPUOffloadingManager(16, 100_000, watch=Watch())
    >>> manager.lookup([b"block"])
    0
    >>> manager.watch.report().missed
    1
    """

    _QUARTERS = 4

    def __init__(
        self,
        *,
        memory: Sequence[float] = (0.25, 0.5, 1, 2, 4, 8),
        policies: Sequence[str] = ("hit-density",),
        slots: int = 1024,
        policy_slots: int = 512,
        max_rate: float = 1 / 32,
        window: float = 900.0,
        deadline: float = 60.0,
        secret: bytes | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.memory = _check_memory(memory)
        self.policies = _check_policies(policies)
        self.slots = check_int("slots", slots, 4, 2**20)
        self.policy_slots = check_int("policy_slots", policy_slots, 4, 2**20)
        self.max_rate = _check_number("max_rate", max_rate, 1.0)
        self.window = _check_number("window", window, LONGEST)
        self.deadline = _check_number("deadline", deadline, LONGEST)
        if secret is not None and (type(secret) is not bytes or len(secret) != 64):
            raise ValueError(f"secret must be 64 bytes, got {describe(secret)}")
        self._secret = secret
        self._clock = clock
        self._manager: weakref.ref[Any] | None = None
        self._core: Any = None  # until a manager joins
        self._planned: _Subject
        self._subject: _Subject
        self._snapshots: deque[_Snapshot] = deque()
        self._logged: set[int] = set()
        self._taken = 0  # number of requests when the sample was last taken
        self._overlap: _Overlap | None = None
        self._lock = threading.RLock()

    # -- what a manager calls ------------------------------------------------------------------

    def _plan(self, manager: object, policy: str | None, capacity: int) -> WatchPlan:
        former = None if self._manager is None else self._manager()
        if former is not None and former is not manager:
            raise ValueError("watch must be a Watch of its own, got one of another manager")
        rate = min(self.max_rate, self.slots / capacity if capacity else 1.0)
        sample_below = max(1, round(rate * SAMPLE_RANGE))
        sampled = sample_below / SAMPLE_RANGE * capacity
        policy_below = round(sample_below * min(1.0, self.policy_slots / max(sampled, 1e-9)))
        policy_slots = policy_below / SAMPLE_RANGE * capacity
        minis = [
            Miniature(name, size, policy_slots * size, self._QUARTERS)
            for name, size in self._asked(policy)
        ]
        clock = self._clock
        sizes = self.memory if self.memory[-1] >= REMEMBERED else (*self.memory, REMEMBERED)
        plan = WatchPlan(
            sample_below,
            policy_below,
            limits=[round(sampled * size / self._QUARTERS) for size in sizes],
            lengths=[int(capacity * size) for size in sizes],
            quarters=self._QUARTERS,
            keeps_keys=bool(minis),
            secret=self._secret,
            clock=None if clock is None else lambda: int(clock() * 1000),
        )
        self._planned = _Subject(policy, capacity, sampled, policy_slots, minis, plan)
        return plan

    def _join(self, manager: object, core: Any) -> None:
        self._manager = weakref.ref(manager)
        self._core = core
        self._subject = self._planned
        self._logged.clear()
        self._taken = 0
        self._overlap = None
        self._snapshots.clear()
        self._snapshots.append(self._snapshot())
        core.next_due = self._next_due(core.now())

    def _drain(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread does it
        try:
            self._take_requests()
        finally:
            self._lock.release()

    def _take_requests(self) -> None:
        core = self._core
        num_requests, *_, lag = core.progress()
        start, self._taken = self._taken, num_requests
        begins = self._overlap is None and self._stores_overlap()
        if begins:
            self._add_lru()
        for quarter, stretches in enumerate(core.take_requests()):
            # Which request is which is not kept: they are spread over those since the last time.
            step = (num_requests - start) / max(1, sum(map(len, stretches)))
            position = float(start)
            for after, requests in enumerate(stretches):
                positions = [position + (index + 1) * step for index in range(len(requests))]
                position += len(requests) * step
                for mini in self._subject.minis:
                    if after:
                        mini.reset(quarter)
                    if self._overlap is None:
                        mini.feed(quarter, requests)
                    else:
                        mini.feed_overlapping(
                            quarter, requests, positions, lag, waits=core.waits_for_stores
                        )
        if begins and start:
            self._start_anew()
        now = core.now()
        if now >= core.next_due:
            core.next_due = self._next_due(now)
            self._snapshots.append(self._snapshot())
            self._drop_old_snapshots(now)
            self.overdue()

    def _stores_overlap(self) -> bool:
        """Return whether the manager's stores overlap in the window, and minis can show how."""
        subject, past = self._subject, self._snapshots[0].counts
        if subject.policy is None or not subject.plan.keeps_keys:
            return False
        *taken, _ = self._core.progress()
        before = past["requests"], past["met_pending"], past["refused"]
        requests, met, refused = (new - old for new, old in zip(taken, before, strict=True))
        if met + refused < LEAST_OVERLAPPING:
            return False
        # Requests longer than the memory are refused whatever is under way.
        present = self.memory.index(1.0)
        long_requests = self._core.counts()["long_requests"][present]
        overlapping: int = met + max(0, refused - (long_requests - past["long_requests"][present]))
        return overlapping >= LEAST_OVERLAPPING and (
            overlapping >= OVERLAPPING or overlapping > IN_FLIGHT * requests
        )

    def _add_lru(self) -> None:
        """Simulate LRU by miniatures, too: the list knows no store that is under way."""
        self._overlap = _Overlap({}, {}, 0)
        fresh = [
            Miniature("lru", memory, self._subject.policy_slots * memory, self._QUARTERS)
            for memory in self.memory
        ]
        self._subject.minis.extend(fresh)
        nothing = tuple(mini.totals() for mini in fresh)
        self._snapshots = deque(
            replace(each, minis=each.minis + nothing) for each in self._snapshots
        )

    def _start_anew(self) -> None:
        """Begin a window now that there are miniatures of LRU, and note what they have missed."""
        subject, counts = self._subject, self._core.counts()
        share = subject.plan.policy_below / subject.plan.sample_below
        cold, before = {}, {}
        for mini in subject.minis:
            if mini.policy != "lru":
                continue
            size = self.memory.index(mini.memory)
            missed = sum(_lru_misses(counts["policy_judged"], size))
            own = mini.totals()
            cold[mini.memory] = share * counts["held"][size] - sum(own.resident)
            before["lru", mini.memory] = (missed - sum(own.missed), missed - sum(own.stored))
        self._overlap = _Overlap(cold, before, counts["resets"])
        self._snapshots.clear()
        self._snapshots.append(self._snapshot())

    # -- what a user calls ---------------------------------------------------------------------

    def report(self) -> WatchReport:
        """Return the findings in the window.

        Notes
        -----
        Complexity: O(sizes and policies), and O(transfers that are past their deadline).
        """
        self._require_joined()
        with self._lock:
            return self._report()

    def _report(self) -> WatchReport:
        subject = self._subject
        self._take_requests()
        after = self._snapshot()
        self._drop_old_snapshots(after.time)
        before = self._snapshots[0]
        counts = _difference(after.counts, before.counts)
        every = self._core.counts()
        unused, used = counts["evicted_used"]
        return WatchReport(
            policy=subject.policy,
            capacity=subject.capacity,
            sampling_rate=subject.plan.sample_below / SAMPLE_RANGE,
            seconds=(after.time - before.time) / 1000,
            **{name: counts[name] for name in COUNTED},
            points=tuple(self._points(counts, after, before, every["fullest"])),
            sampled_missed=dict(zip(CAUSES, counts["causes"], strict=True)),
            sampled_evicted=unused + used,
            sampled_unused=unused,
            since_use=median_age(every["unused_ages"]),
            since_stored=median_age(every["stored_ages"]),
            overdue=tuple(self.overdue()),
            hints=heard(self._core.sources(), counts["hints"], self._policy()),
            hint_gain=gain_of(self._policy()),
        )

    def explain(self, hashes: Iterable[bytes]) -> list[Explanation]:
        """Return the state of each block and, of a sampled one, its cause; nothing changes.

        Raises
        ------
        TypeError, ValueError
            If an element is no block hash.
        """
        self._require_joined()
        now = self._core.now()
        return [_explanation(self._core.explain(key), now) for key in as_batch(hashes)]

    def overdue(self) -> list[Overdue]:
        """Return the transfers that are past their deadline, oldest first; each is logged once.

        There are none when the manager no longer exists.
        """
        self._require_joined()
        manager = None if self._manager is None else self._manager()
        if manager is None:
            return []
        with self._lock:
            return self._overdue(manager)

    def _overdue(self, manager: object) -> list[Overdue]:
        found = find_overdue(self._core, manager, self.deadline)
        for each in found:
            if each.id not in self._logged:
                self._logged.add(each.id)
                logger.warning(
                    "a %s of %d blocks was prepared %.0f s ago and not completed; %d blocks are "
                    "still held, the first in slot %d",
                    each.kind,
                    each.num_blocks,
                    each.seconds,
                    len(each.block_ids),
                    each.block_ids[0],
                )
        self._logged.intersection_update([each.id for each in found])
        return found

    def open_seconds(self) -> dict[str, float]:
        """Return the seconds since the oldest open ``"load"`` and ``"store"`` began; 0 for none."""
        self._require_joined()
        now = self._core.now()
        ages = dict.fromkeys(KINDS, 0.0)
        for _, kind, time, _ in self._core.open_transfers():
            ages[KINDS[kind]] = max(ages[KINDS[kind]], (now - time) / 1000)
        return ages

    def counters(self) -> dict[str, Any]:
        """Return the counters since the start, as exporters need them.

        Returns
        -------
        dict of str to object
            Counts of the manager and of the sample; ``shadows``: misses and stores of each shadow,
            by policy and memory; ``policy``: the manager's; ``hints``: requests by source of
            hints, None for those that are not told apart, and kind, ``ends`` or ``expects``.
        """
        self._require_joined()
        with self._lock:
            self._take_requests()
            return self._counters()

    def _counters(self) -> dict[str, Any]:
        counts = self._core.counts()
        shadows = {}
        for size, memory in enumerate(self.memory):
            missed = sum(_lru_misses(counts["policy_judged"], size))
            shadows["lru", memory] = (missed, missed)
        for mini in self._subject.minis:
            own = mini.totals()
            key = (mini.policy, mini.memory)
            former = self._overlap.before.get(key, (0, 0)) if self._overlap else (0, 0)
            shadows[key] = (former[0] + sum(own.missed), former[1] + sum(own.stored))
        hints = {
            (each.source, kind): count
            for each in heard(self._core.sources(), counts["hints"], None)
            for kind, count in (("ends", each.ends), ("expects", each.expects))
        }
        return {**counts, "shadows": shadows, "policy": self._subject.policy, "hints": hints}

    # -- parts ---------------------------------------------------------------------------------

    def _require_joined(self) -> None:
        if self._core is None:
            raise RuntimeError("the watch looks at no manager: pass it as `watch` to one")

    def _policy(self) -> Any:
        """Return the policy of the manager, None when that no longer exists."""
        manager = None if self._manager is None else self._manager()
        return getattr(manager, "policy", None)

    def _asked(self, live: str | None) -> list[tuple[str, float]]:
        """Return the policies and sizes that are asked about besides the LRU curve."""
        asked = [(policy, 1.0) for policy in self.policies]
        if live is not None:
            sizes = [(live, size) for size in LIVE_MEMORY]
            asked = [*sizes, *(pair for pair in asked if pair not in sizes)]
        return [pair for pair in asked if pair[0] != "lru"]

    def _next_due(self, now: int) -> int:
        return now + max(1, int(self.window * 1000 / SNAPSHOTS))

    def _snapshot(self) -> _Snapshot:
        counts = self._core.counts()
        for name in ("unused_ages", "stored_ages", "held", "fullest", "open"):
            del counts[name]
        return _Snapshot(
            self._core.now(), counts, tuple(mini.totals() for mini in self._subject.minis)
        )

    def _drop_old_snapshots(self, now: int) -> None:
        """Drop snapshots that are older than the window, but for the newest of them."""
        start = now - self.window * 1000
        while len(self._snapshots) > 1 and self._snapshots[1].time <= start:
            self._snapshots.popleft()

    def _points(
        self, counts: dict[str, Any], after: _Snapshot, before: _Snapshot, fullest: list[int]
    ) -> Iterable[Point]:
        """Yield the points of the LRU curve, then those of the miniature managers."""
        subject = self._subject
        quarters = self._QUARTERS
        present = self.memory.index(1.0)
        # Requests longer than the memory are refused whatever is under way.
        refused = max(0, counts["refused"] - counts["long_requests"][present])
        in_flight = counts["met_pending"] + refused > IN_FLIGHT * counts["requests"]
        block_tokens = self._core.block_tokens
        hit_tokens = (counts["asked"] - counts["missed"]) * (block_tokens or 0)
        tails = ("tails",) if counts["tail_missed_tokens"] > TAILS * hit_tokens else ()
        totals = [new.since(old) for new, old in zip(after.minis, before.minis, strict=True)]
        live = next(
            (
                total.missed
                for mini, total in zip(self._subject.minis, totals, strict=True)
                if (mini.policy, mini.memory) == (subject.policy, 1.0) and mini.policy != "lru"
            ),
            None,
        )

        def marks(memory: float, *, overlaps: bool) -> tuple[str, ...]:
            nearest = min(range(len(self.memory)), key=lambda size: abs(self.memory[size] - memory))
            room = subject.slots * memory
            found = [*tails]
            if fullest[nearest] < math.floor(room * 0.99) - quarters:
                found.append("filling")
            if overlaps:
                return tuple(found)  # a miniature refuses as the manager does
            # What the manager refused, the shadow of the present size did not.
            if counts["long_requests"][min(nearest, present)]:
                found.append("long_requests")
            if in_flight:
                found.append("in_flight")
            return tuple(found)

        def point(
            policy: str,
            memory: float,
            slots: float,
            base: Sequence[int],
            shadow: Sequence[int],
            *,
            stored: Sequence[int],
            bias: float,
            more: tuple[str, ...] = (),
            overlaps: bool = False,
        ) -> Point:
            if self._subject.policy is None:
                return Point(policy, memory, reason="own_policy", resets=counts["resets"])
            if block_tokens is None:
                return Point(policy, memory, reason="no_full_group", resets=counts["resets"])
            return make_point(
                policy,
                memory,
                slots=slots,
                asked=counts["asked"],
                missed=counts["missed"],
                base=base,
                shadow=shadow,
                stored=stored,
                bias=bias,
                marks=(*marks(memory, overlaps=overlaps), *more),
                resets=counts["resets"],
            )

        # Both sides of a ratio must be of the same sample.
        judged = counts["judged" if live is None else "policy_judged"]
        lru: dict[float, Sequence[int]] = {
            memory: _lru_misses(judged, size) for size, memory in enumerate(self.memory)
        }
        slots = subject.slots
        own: dict[float, Sequence[int]] = {
            mini.memory: total.missed
            for mini, total in zip(subject.minis, totals, strict=True)
            if mini.policy == "lru"
        }
        if own:
            lru, slots = own, subject.policy_slots
        base = live if live is not None else lru[1.0]
        cold = self._cold(counts, before, base)
        cold_base = 0.0 if live is not None else cold[1.0]
        for memory, shadow in lru.items():
            bias = miniature_bias(subject.policy_slots) if own or live is not None else 0.0
            bias += max(cold[memory], cold_base)
            at = slots * memory
            yield point(
                "lru", memory, at, base, shadow, stored=shadow, bias=bias, overlaps=bool(own)
            )
        if live is None and not own:
            base = _lru_misses(counts["policy_judged"], present)
        for mini, total in zip(subject.minis, totals, strict=True):
            if mini.policy == "lru":
                continue
            at = subject.policy_slots * mini.memory
            counted = (mini.policy, mini.memory) == (subject.policy, 1.0)
            yield point(
                mini.policy,
                mini.memory,
                at,
                base,
                base if counted else total.missed,
                stored=total.stored,
                bias=miniature_bias(at) + cold_base,
                more=() if counted else mini.marks(total, counts["resets"]),
            )

    def _cold(
        self, counts: dict[str, Any], before: _Snapshot, base: Sequence[int]
    ) -> dict[float, float]:
        """Return by memory the possible shift of a point by blocks that only the list held.

        The miniatures of LRU began without the blocks that LRU held at that time. A miniature that
        is full when the window begins no longer lacks any; and a reset takes them from LRU, too.
        """
        cold = dict.fromkeys(self.memory, 0.0)
        overlap = self._overlap
        if overlap is None or not counts["asked"] or before.counts["resets"] > overlap.resets:
            return cold
        scale = counts["missed"] / counts["asked"] / (sum(base) or 1)
        for mini, totals in zip(self._subject.minis, before.minis, strict=True):
            if mini.policy == "lru":
                lacking = min(overlap.cold.get(mini.memory, 0.0), mini.slots - sum(totals.resident))
                cold[mini.memory] = scale * max(0.0, lacking)
        return cold


def median_age(bins: Sequence[int]) -> float | None:
    """Return the median of a histogram of ages, in seconds; None if it is empty."""
    rank = (sum(bins) + 1) // 2
    if not rank:
        return None
    for index, count in enumerate(bins):
        rank -= count
        if rank <= 0:
            return (bin_start(index) + bin_start(index + 1) - 1) / 2000
    return None


def bin_start(index: int) -> int:
    """Return the least age in ms of a bin."""
    if index < 8:
        return index
    return (8 + index % 8) << (index // 8 - 1)


def _lru_misses(judged: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return each quarter's misses of LRU at a size."""
    return [sum(counts[size + 1 :]) for counts in judged]


def _difference(after: Any, before: Any) -> Any:
    """Subtract counters of the same nesting."""
    if isinstance(after, dict):
        return {name: _difference(value, before[name]) for name, value in after.items()}
    if isinstance(after, list):
        return [_difference(new, old) for new, old in zip(after, before, strict=True)]
    return after - before


def _explanation(known: tuple[int | None, bool, tuple[int, ...] | None], now: int) -> Explanation:
    ref_cnt, sampled, record = known
    state = "absent"
    if ref_cnt is not None:
        state = "pending" if ref_cnt < 0 else "pinned" if ref_cnt else "idle"
    cause = None
    if sampled and state in ("absent", "pending"):
        fate = 0 if record is None else record[1]
        cause = CAUSES[fate if fate >= EVICTED else NEVER_OR_LONG_AGO]
        cause = "pending" if state == "pending" else cause
    if record is None:
        return Explanation(state, sampled, cause)
    _, fate, used, last_use, changed = record
    since_changed = (now - changed) % 2**32 / 1000
    return Explanation(
        state,
        sampled,
        cause,
        bool(used),
        (now - last_use) % 2**32 / 1000,
        since_changed if fate == STORED else None,
        since_changed if fate == EVICTED else None,
    )


def _check_number(name: str, value: Any, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if not 0 < value <= maximum:
        raise ValueError(f"{name} must be in (0, {maximum:g}], got {describe(value)}")
    return float(value)


def _check_memory(memory: Any) -> tuple[float, ...]:
    if isinstance(memory, str | bytes) or not isinstance(memory, Sequence):
        raise TypeError(f"memory must be a sequence of numbers, got {describe(memory)}")
    sizes = sorted({1.0, *(_check_number("memory", size, 1024.0) for size in memory)})
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"memory must be at most {MOST_SIZES} sizes, got {len(sizes)}")
    return tuple(sizes)


def _check_policies(policies: Any) -> tuple[str, ...]:
    if isinstance(policies, str | bytes) or not isinstance(policies, Sequence):
        raise TypeError(f"policies must be a sequence of names, got {describe(policies)}")
    for policy in policies:
        if not isinstance(policy, str):
            raise TypeError(f"policies must be names, got {describe(policy)}")
        registry.parse(policy, "policies")
    return tuple(dict.fromkeys(policies))
