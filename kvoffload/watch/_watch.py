"""Live shadow simulation of a manager: other hit ratios, causes of misses, wasted stores."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from kvoffload._checks import as_batch, check_int
from kvoffload._implementation import require_compiled
from kvoffload._sampling import secrets_from
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
from .minis import AT_ONCE, Miniatures, Totals, miniature_bias
from .overdue import Overdue, find_overdue

__all__ = ["Explanation", "Watch", "WatchReport"]

LIVE_MEMORY = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the shadows of a live policy other than LRU."""
SNAPSHOTS = 15
"""Snapshots of the counters per window; its length is exact to one such part."""
IN_FLIGHT = 0.02
"""Points are marked above this share of requests that met a block being stored or were refused;
miniatures of LRU begin earlier if they can."""
TAILS = 0.05
"""Points are marked above this ratio of tokens that windows or states kept from being loaded to hit
tokens."""
OVERLAPPING = 16
"""Number of such requests in a window from which LRU has miniatures."""
LEAST_OVERLAPPING = 4
"""The same if their share is larger than `IN_FLIGHT`; fewer may be chance."""
MOST_SIZES = 12
REMEMBERED = 8.0
"""Least length of the LRU list as a multiple of the memory, whatever the requested sizes."""
LONGEST = 1e9  # seconds
COUNTED = (
    *("requests", "asked", "missed", "stored", "evicted", "declined", "refused", "failed"),
    *("resets", "tail_missed_tokens"),
)
"""The counters that a report copies."""

logger = logging.getLogger("kvoffload.watch")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of a block and the history that a watch has of it.

    Attributes
    ----------
    state : str
        ``"absent"``, ``"pending"``, ``"idle"`` or ``"pinned"``.
    sampled : bool
        Whether the block is in the sample. If not, or if the watch has forgotten the block, the
        fields below are None.
    cause : str or None
        Why the block is absent or pending: one of ``broken_prefix``, ``pending``, ``evicted``,
        ``declined``, ``refused``, ``failed``, ``reset``, ``never_or_long_ago``.
    used : bool or None
        Whether it was hit since it was last stored.
    since_use, since_stored, since_evicted : float or None
        Seconds. Only the later of the last two events is given.
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
        Lookups, their blocks, and the blocks that missed. Exact, like the next seven.
    stored, evicted, declined, refused, failed : int
        Blocks that got a slot, were evicted, or were not admitted; calls that were refused; blocks
        whose store failed.
    resets : int
        Resets of the manager's cache, which also empty the shadows.
    tail_missed_tokens : int
        Tokens that the engine's full KV groups had but that a window or a state kept from being
        loaded: a part of the misses. 0 if the manager does not know the groups.
    points : tuple of Point
        Hit ratios at other sizes and under other policies.
    sampled_missed : dict of str to int
        Sampled blocks that missed, by cause.
    sampled_evicted, sampled_unused : int
        Sampled blocks that were evicted, and those of them that were never hit since stored.
    since_use, since_stored : float or None
        Median age at eviction in seconds over the whole run: since the last use, since the store.
    overdue : tuple of Overdue
        Transfers past their deadline.
    hints : tuple of HeardHints
        The hints of each source, in order of first appearance; 16 are told apart, and a last entry
        sums all others.
    hint_gain : HintGain or None
        The recent gain from hints of returns; None if the policy does not rank by them, has no
        guard, or has served too few requests since the first hint.
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
        """Share of the requested blocks that were hits; 0 before the first lookup."""
        return 1 - self.missed / self.asked if self.asked else 0.0

    @property
    def waste(self) -> float | None:
        """Share of the evicted blocks never hit since they were stored; None before an eviction."""
        return self.sampled_unused / self.sampled_evicted if self.sampled_evicted else None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Counters at one moment."""

    time: int  # ms
    counts: dict[str, Any]
    minis: tuple[Totals, ...]


@dataclass(frozen=True, slots=True)
class _Began:
    """The state when miniatures of LRU began."""

    cold: dict[float, float]  # by memory: blocks that LRU had and a new miniature lacked
    before: dict[tuple[str, float], tuple[int, int]]  # misses and stores that only the list counted
    resets: int


@dataclass(frozen=True, slots=True)
class _Subject:
    """The manager that is watched, and its shadows."""

    policy: str | None
    capacity: int  # blocks
    slots: float  # sampled slots at the present size
    policy_slots: float  # the same in the part of the sample that policies have
    minis: list[Miniatures]
    plan: WatchPlan


class Watch:
    """An observer that estimates a manager's hit ratio elsewhere and changes no decision.

    A sample of the blocks, chosen by a keyed hash, goes through shadows: LRU at every size in
    `memory`, and miniatures of other policies. The misses of a shadow, relative to those of
    the shadow of the present configuration, scale the misses that the manager counts.

    Parameters
    ----------
    memory : sequence of float
        Sizes to estimate, as multiples of the present memory; 1 is always included. At most 12.
    policies : sequence of str
        Policy strings to estimate at the present memory.
    slots : int
        Sampled blocks at the present size, >= 4. Errors fall with the square root of this number;
        memory and time are proportional to it.
    policy_slots : int
        The same for miniatures.
    max_rate : float
        Largest share of blocks that is sampled, in (0, 1]. Nothing is estimated for memories below
        256 / `max_rate` blocks. Small memories cost most: at 10,000 blocks, one in 32 is sampled.
    window : float
        Seconds of history that the estimates cover, in (0, 1e9].
    deadline : float
        Seconds after which an uncompleted transfer is overdue, in (0, 1e9].
    secret : bytes, optional
        64 bytes that determine the sample; random by default, so that no client can predict it.
    clock : callable, optional
        Returns seconds; by default the system's monotonic clock.

    Raises
    ------
    TypeError, ValueError
        If an argument breaks its rule.
    MissingExtraError
        If the package runs in pure Python: a watch needs the extensions.

    Notes
    -----
    Every method raises RuntimeError until a manager is made with this watch.

    Thread-safety: that of the manager; the methods of a watch are safe in any thread.

    Memory: 40 bytes per sampled slot of the largest size, or of 8 times the memory if that is more,
    plus the miniatures. It does not grow.

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
        require_compiled("a watch")
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
        self._overlaps = False  # the stores of the miniatures do
        self._began: _Began | None = None  # None: LRU has no miniatures
        self._serving: Iterator[int] | None = None  # taken requests to the miniatures
        self._is_serving = False
        self._lock = threading.RLock()

    # -- what a manager calls ------------------------------------------------------------------

    def _plan(self, manager: object, policy: str | None, capacity: int) -> WatchPlan:
        former = None if self._manager is None else self._manager()
        if former is not None and former is not manager:
            raise ValueError("watch must be a Watch of its own, got that of another manager")
        rate = min(self.max_rate, self.slots / capacity if capacity else 1.0)
        sample_below = max(1, round(rate * SAMPLE_RANGE))
        sampled = sample_below / SAMPLE_RANGE * capacity
        policy_below = round(sample_below * min(1.0, self.policy_slots / max(sampled, 1e-9)))
        policy_slots = policy_below / SAMPLE_RANGE * capacity
        with secrets_from(self._secret):
            minis = [
                Miniatures(name, size, policy_slots * size, self._QUARTERS)
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
        self._serving = None
        self._overlaps = False
        self._began = None
        self._snapshots.clear()
        self._snapshots.append(self._snapshot())
        core.next_due = self._next_due(core.now())

    def _drain(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread drains
        try:
            self._serve(at_once=False)
        finally:
            self._lock.release()

    def _serve(self, *, at_once: bool) -> None:
        """Serve collected requests to the miniatures: all, or the share of one lookup."""
        if self._is_serving:
            return  # Python code has run meanwhile, a clock or a signal's, and calls the manager
        self._is_serving = True
        try:
            if at_once:
                for serving in (self._serving, self._serve_collected()):
                    deque(serving or (), maxlen=0)
                self._serving = None
                return
            serving = self._serving or self._serve_collected()
            share = next(serving, 0)
            goes_on = share > 0 and sum(1 for _ in islice(serving, share)) == share
            self._serving = serving if goes_on else None
            self._core.due = goes_on
        finally:
            self._is_serving = False

    def _serve_collected(self) -> Iterator[int]:
        """Take the collected requests; serve one to one miniature at each step.

        Yield the number of steps that a lookup should take: all in half of the lookups that it took
        to collect the requests.
        """
        core = self._core
        num_requests, *_, lag = core.progress()
        start, self._taken = self._taken, num_requests
        overlaps = self._overlaps or self._stores_overlap()
        begins = self._began is None and (overlaps or self._releases())
        if begins:
            self._add_lru()
        changes = begins or overlaps != self._overlaps
        self._overlaps = overlaps
        lag, waits = (lag, core.waits_for_stores) if overlaps else (AT_ONCE, False)
        taken = core.take_requests()
        num_steps = len(self._subject.minis) * sum(len(each) for each in chain(*taken))
        share = max(1, 2 * num_steps // max(1, num_requests - start))
        for quarter, stretches in enumerate(taken):
            # The sample has no positions: its requests are spread evenly over all since last time.
            step = (num_requests - start) / max(1, sum(map(len, stretches)))
            position = float(start)
            for after, requests in enumerate(stretches):
                positions = [position + (index + 1) * step for index in range(len(requests))]
                position += len(requests) * step
                for mini in self._subject.minis:
                    if after:
                        mini.reset(quarter)
                    for request, position in zip(requests, positions, strict=True):
                        mini.feed(quarter, request, position, lag, waits=waits)
                        yield share
        if changes and (start or not self._subject.plan.keeps_keys):
            self._start_anew(begins=begins)
        now = core.now()
        if now >= core.next_due:
            core.next_due = self._next_due(now)
            self._snapshots.append(self._snapshot())
            self._drop_old_snapshots(now)
            self.overdue()

    def _stores_overlap(self) -> bool:
        """Return whether the manager's stores overlap in the window and miniatures can model it."""
        subject, past = self._subject, self._snapshots[0].counts
        keeps_keys = subject.plan.keeps_keys or self._core.hears_releases
        if subject.policy is None or not keeps_keys:
            return False
        *taken, _ = self._core.progress()
        before = past["requests"], past["met_pending"], past["refused"]
        requests, met, refused = (new - old for new, old in zip(taken, before, strict=True))
        if met + refused < LEAST_OVERLAPPING:
            return False
        # Requests longer than the memory are refused regardless of transfers under way.
        present = self.memory.index(1.0)
        long_requests = self._core.counts()["long_requests"][present]
        overlapping: int = met + max(0, refused - (long_requests - past["long_requests"][present]))
        return overlapping >= LEAST_OVERLAPPING and (
            overlapping >= OVERLAPPING or overlapping > IN_FLIGHT * requests
        )

    def _releases(self) -> bool:
        """Return whether the manager has released blocks, which the list does not model."""
        return self._subject.policy is not None and self._core.hears_releases

    def _add_lru(self) -> None:
        """Also simulate LRU with miniatures: the list models neither releases nor overlap."""
        self._began = _Began({}, {}, 0)
        fresh = [
            Miniatures("lru", memory, self._subject.policy_slots * memory, self._QUARTERS)
            for memory in self.memory
        ]
        self._subject.minis.extend(fresh)
        nothing = tuple(mini.totals() for mini in fresh)
        self._snapshots = deque(
            replace(each, minis=each.minis + nothing) for each in self._snapshots
        )

    def _start_anew(self, *, begins: bool) -> None:
        """Begin a window; if LRU `begins` to have miniatures, note their misses so far."""
        if begins:
            self._note_lru()
        self._snapshots.clear()
        self._snapshots.append(self._snapshot())

    def _note_lru(self) -> None:
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
        self._began = _Began(cold, before, counts["resets"])

    # -- what a user calls ---------------------------------------------------------------------

    def report(self) -> WatchReport:
        """Return the findings in the window.

        Notes
        -----
        Complexity: O(sizes + policies + transfers past their deadline).
        """
        self._require_joined()
        with self._lock:
            return self._report()

    def _report(self) -> WatchReport:
        subject = self._subject
        self._serve(at_once=True)
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
        """Return the state of each block and, if it is sampled, the cause; change nothing.

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash.
        """
        self._require_joined()
        now = self._core.now()
        return [_explanation(self._core.explain(key), now) for key in as_batch(hashes)]

    def overdue(self) -> list[Overdue]:
        """Return the transfers that are past their deadline, oldest first; each is logged once.

        Empty when the manager no longer exists.
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
        """Return the counters since the start, for exporters.

        Returns
        -------
        dict of str to object
            Counts of the manager and of the sample; ``shadows``: misses and stores of each shadow,
            by policy and memory; ``policy``: the manager's; ``hints``: requests by source, None for
            sources that are not told apart, and kind, ``ends`` or ``expects``.
        """
        self._require_joined()
        with self._lock:
            self._serve(at_once=True)
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
            former = self._began.before.get(key, (0, 0)) if self._began else (0, 0)
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
        """Return the policy of the manager; None when the manager no longer exists."""
        manager = None if self._manager is None else self._manager()
        return getattr(manager, "policy", None)

    def _asked(self, live: str | None) -> list[tuple[str, float]]:
        """Return the policies and sizes to estimate besides the LRU curve."""
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
        """Drop the snapshots older than the window, except the newest of them."""
        start = now - self.window * 1000
        while len(self._snapshots) > 1 and self._snapshots[1].time <= start:
            self._snapshots.popleft()

    def _points(
        self, counts: dict[str, Any], after: _Snapshot, before: _Snapshot, fullest: list[int]
    ) -> Iterable[Point]:
        """Yield the points of the LRU curve, then those of the miniatures."""
        subject = self._subject
        quarters = self._QUARTERS
        present = self.memory.index(1.0)
        # Requests longer than the memory are refused regardless of transfers under way.
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
            # The shadow of the present size did not refuse what the manager refused.
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
        """Return by memory how far blocks that only the list had may shift a point.

        The miniatures of LRU began without the blocks that LRU had at that time. A miniature that
        is full when the window begins lacks none of them; after a reset LRU lacks them, too.
        """
        cold = dict.fromkeys(self.memory, 0.0)
        began = self._began
        if began is None or not counts["asked"] or before.counts["resets"] > began.resets:
            return cold
        scale = counts["missed"] / counts["asked"] / (sum(base) or 1)
        for mini, totals in zip(self._subject.minis, before.minis, strict=True):
            if mini.policy == "lru":
                lacking = min(began.cold.get(mini.memory, 0.0), mini.slots - sum(totals.resident))
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
    """Return the least age in a bin, ms."""
    if index < 8:
        return index
    return (8 + index % 8) << (index // 8 - 1)


def _lru_misses(judged: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the misses of LRU at a size, by quarter."""
    return [sum(counts[size + 1 :]) for counts in judged]


def _difference(after: Any, before: Any) -> Any:
    """Subtract counters that are nested alike."""
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
