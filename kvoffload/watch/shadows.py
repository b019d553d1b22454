"""The shadows of a manager: the list of LRU in the core, and miniatures that lookups serve."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from kvoffload.managers._watching import SAMPLE_RANGE, WatchPlan

from .minis import AT_ONCE, Key, Miniatures, Totals

SNAPSHOTS = 15
"""Snapshots of the counters per window; its length is exact to one such part."""
IN_FLIGHT = 0.02
"""Points are marked above this share of requests that met a block being stored or were refused;
miniatures of LRU begin earlier if they can."""
OVERLAPPING = 16
"""Number of such requests in a window from which LRU has miniatures."""
LEAST_OVERLAPPING = 4
"""The same if their share is larger than `IN_FLIGHT`; fewer may be chance."""
GOLDEN = 0.618034
"""Its multiples spread requests whose stores end early evenly among the others."""
OF_OVERLAP = ("requests", "met_pending", "refused", "long_requests")
"""The counters that tell whether stores overlap."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment."""

    time: int  # ms
    counts: dict[str, Any]
    minis: dict[Key, Totals]


class Window(NamedTuple):
    """The change of all counters since a snapshot."""

    seconds: float
    counts: dict[str, Any]
    minis: dict[Key, Totals]
    before: Snapshot
    overall: dict[str, Any]  # of the whole run


class Shadows:
    """The shadows of one manager, and their counters in a window.

    The list models neither releases nor stores that overlap: from the first of them on, LRU also
    has miniatures.
    """

    def __init__(
        self,
        policy: str | None,
        capacity: int,
        memory: tuple[float, ...],
        shadowed: list[Key],
        *,
        plan: WatchPlan,
        window: float,
    ) -> None:
        self.policy = policy
        self.capacity = capacity  # blocks
        self.memory = memory
        self.plan = plan
        # Sampled slots at the present size, and those that the policies have of them.
        self.slots = plan.sample_below / SAMPLE_RANGE * capacity
        self.policy_slots = plan.policy_below / SAMPLE_RANGE * capacity
        self.minis = [self._new_miniatures(*key) for key in shadowed]
        self.lru: list[Miniatures] = []  # those of LRU, by size
        self.lru_resets = 0  # before they began
        self.core: Any = None
        self.snapshots: deque[Snapshot] = deque()
        self.serving: Iterator[int] | None = None  # taken requests to the miniatures
        self._window = window * 1000  # ms
        # Time and counters when the sample was last taken, which the miniatures then catch up with.
        self._as_taken: tuple[int, dict[str, Any]]
        self._overlaps = False  # the stores of the miniatures do
        self._is_serving = False

    def _new_miniatures(self, policy: str, memory: float) -> Miniatures:
        return Miniatures(policy, memory, self.policy_slots * memory, self.plan.quarters)

    def join(self, core: Any) -> None:
        """Begin to observe the manager of a core."""
        self.core = core
        self._as_taken = core.now(), core.counts()
        self.snapshots = deque([self._snapshot(*self._as_taken)])
        self._set_due(core.now())

    # -- serving -------------------------------------------------------------------------------

    def serve(self, *, at_once: bool) -> bool:
        """Serve collected requests to the miniatures: all, or the share of one lookup.

        Return whether a snapshot was due.
        """
        if self._is_serving:
            return False  # Python code runs meanwhile, a clock or a signal's, and calls the manager
        self._is_serving = True
        try:
            if at_once:
                for serving in (self.serving, self._serve_collected()):
                    deque(serving or (), maxlen=0)
                self.serving = None
            else:
                serving = self.serving or self._serve_collected()
                share = next(serving, 0)
                goes_on = share > 0 and sum(1 for _ in islice(serving, share)) == share
                self.serving = serving if goes_on else None
                self.core.due = goes_on
            return self.serving is None and self._snap()
        finally:
            self._is_serving = False

    def _serve_collected(self) -> Iterator[int]:
        """Take the collected requests; serve one to one miniature at each step.

        Yield the number of steps that a lookup should take: all in half of the lookups that it took
        to collect the requests.
        """
        core, counts, start = self.core, self.core.counts(), self._as_taken[1]["requests"]
        self._as_taken = core.now(), counts
        num_requests = counts["requests"] - start
        overlaps = self._overlaps or self._stores_overlap(counts)
        releases = self.policy is not None and core.hears_releases
        begins = not self.lru and (overlaps or releases)
        if begins:
            self.lru = [self._new_miniatures("lru", memory) for memory in self.memory]
            self.minis.extend(self.lru)
        changes = begins or overlaps != self._overlaps
        self._overlaps = overlaps
        lag, waits = (max(0.0, core.lag), core.waits_for_stores) if overlaps else (AT_ONCE, False)
        taken = core.take_requests()
        num_steps = len(self.minis) * sum(len(each) for each in chain(*taken))
        share = max(1, 2 * num_steps // max(1, num_requests))
        for quarter, stretches in enumerate(taken):
            # The sample has no positions: its requests are spread evenly over all since last time.
            step = num_requests / max(1, sum(map(len, stretches)))
            position = float(start)
            for after, requests in enumerate(stretches):
                positions = [position + (index + 1) * step for index in range(len(requests))]
                position += len(requests) * step
                # An answer is collected by itself.
                shares = (core.early if stop else core.early_answers for _, _, stop, *_ in requests)
                early = [index * GOLDEN % 1.0 < each for index, each in enumerate(shares)]
                for mini in self.minis:
                    if after:
                        mini.reset(quarter)
                    for request, position, is_early in zip(requests, positions, early, strict=True):
                        mini.feed(quarter, request, position, lag, waits=waits, early=is_early)
                        yield share
        if changes and (start or not self.plan.keeps_keys):
            if begins:
                self._note_lru()
            self.snapshots = deque([self._snapshot(*self._as_taken)])

    def _stores_overlap(self, counts: dict[str, Any]) -> bool:
        """Return whether the manager's stores overlap in the window and miniatures can model it."""
        if self.policy is None or not (self.plan.keeps_keys or self.core.hears_releases):
            return False
        past = self.snapshots[0].counts
        new = {name: difference(counts[name], past[name]) for name in OF_OVERLAP}
        found = overlapping(new, self.memory.index(1.0))
        return found >= LEAST_OVERLAPPING and (
            found >= OVERLAPPING or found > IN_FLIGHT * new["requests"]
        )

    def _note_lru(self) -> None:
        """Note what only the list of LRU has counted and held when its miniatures begin."""
        counts, held = self._as_taken[1], self.core.overall()["held"]
        share = self.plan.policy_below / self.plan.sample_below
        for size, mini in enumerate(self.lru):
            missed, own = sum(lru_misses(counts["policy_judged"], size)), mini.totals()
            mini.before = missed - sum(own.missed), missed - sum(own.stored)
            mini.lacking = share * held[size] - sum(own.resident)
        self.lru_resets = counts["resets"]

    # -- counters ------------------------------------------------------------------------------

    def totals(self, counts: dict[str, Any]) -> dict[Key, tuple[int, int]]:
        """Return the misses and stores of each shadow since the start."""
        found = {}
        for size, memory in enumerate(self.memory):
            missed = sum(lru_misses(counts["policy_judged"], size))
            found["lru", memory] = (missed, missed)
        for mini in self.minis:
            own = mini.totals()
            found[mini.key] = (mini.before[0] + sum(own.missed), mini.before[1] + sum(own.stored))
        return found

    def window(self) -> Window:
        """Return the change of the counters in the window."""
        after = self._snapshot(self.core.now(), self.core.counts())
        self._drop_old_snapshots(after.time)
        before = self.snapshots[0]
        return Window(
            (after.time - before.time) / 1000,
            difference(after.counts, before.counts),
            {key: total.since(before.minis.get(key)) for key, total in after.minis.items()},
            before,
            self.core.overall(),
        )

    def _snap(self) -> bool:
        """Take a snapshot if one is due, and return whether it was."""
        now: int = self.core.now()
        if now < self.core.next_due:
            return False
        self._set_due(now)
        self.snapshots.append(self._snapshot(*self._as_taken))
        self._drop_old_snapshots(now)
        return True

    def _set_due(self, now: int) -> None:
        self.core.next_due = now + max(1, int(self._window / SNAPSHOTS))

    def _snapshot(self, time: int, counts: dict[str, Any]) -> Snapshot:
        return Snapshot(time, counts, {mini.key: mini.totals() for mini in self.minis})

    def _drop_old_snapshots(self, now: int) -> None:
        """Drop the snapshots older than the window, except the newest of them."""
        while len(self.snapshots) > 1 and self.snapshots[1].time <= now - self._window:
            self.snapshots.popleft()


def lru_misses(judged: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the misses of LRU at a size, by quarter."""
    return [sum(counts[size + 1 :]) for counts in judged]


def overlapping(counts: dict[str, Any], present: int) -> int:
    """Return the requests that met a block being stored or were refused because of such blocks."""
    # Requests longer than the memory are refused regardless of transfers under way.
    refused: int = max(0, counts["refused"] - counts["long_requests"][present])
    met: int = counts["met_pending"]
    return met + refused


def difference(after: Any, before: Any) -> Any:
    """Subtract counters that are nested alike."""
    if isinstance(after, dict):
        return {name: difference(value, before[name]) for name, value in after.items()}
    if isinstance(after, list):
        return [difference(new, old) for new, old in zip(after, before, strict=True)]
    return after - before
