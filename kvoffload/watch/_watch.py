"""Live shadow simulation of a manager: other hit ratios, causes of misses, wasted stores."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from kvoffload._checks import as_batch, check_bool, check_instance, check_int, check_number
from kvoffload._implementation import require_compiled
from kvoffload._printable import plural
from kvoffload._sampling import secrets_from
from kvoffload.errors import describe
from kvoffload.managers._watching import CAUSES, COUNTERS, KINDS, SAMPLE_RANGE, WatchPlan
from kvoffload.policies import registry

from .ages import median_age
from .hints import heard
from .minis import Key
from .overdue import Overdue, find_overdue
from .points import points
from .report import Explanation, WatchReport, explanation
from .shadows import Shadows

LIVE_MEMORY = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the shadows of a live policy other than LRU."""
MOST_SIZES = 12
REMEMBERED = 8.0
"""Least length of the LRU list as a multiple of the memory, whatever the requested sizes."""
LONGEST = 1e9  # seconds
COUNTED = [each.name for each in fields(WatchReport) if each.name in COUNTERS]
"""The counters that a report copies."""

logger = logging.getLogger("kvoffload.watch")


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
        64 random bytes that determine the sample; new ones by default, so that no client can
        predict it.
    clock : callable, optional
        Returns seconds; by default the system's monotonic clock. If it goes back or fails, the time
        stands still.

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
        self.max_rate = check_number("max_rate", max_rate, 1.0)
        self.window = check_number("window", window, LONGEST)
        self.deadline = check_number("deadline", deadline, LONGEST)
        if secret is not None and (type(secret) is not bytes or len(secret) != 64):
            given = len(secret) if type(secret) is bytes else f"a {type(secret).__name__}"
            raise ValueError(f"secret must be 64 bytes, got {given}")  # without showing it
        self._secret = secret
        self._clock = check_instance("clock", clock, Callable | None, "a function or None")
        self._manager: Callable[[], Any] = lambda: None
        self._core: Any = None  # until a manager joins
        self._planned: Shadows
        self._shadows: Shadows
        self._logged: set[int] = set()
        self._lock = threading.RLock()

    # -- what a manager calls ------------------------------------------------------------------

    def _plan(self, manager: object, policy: str | None, capacity: int) -> WatchPlan:
        former = self._manager()
        if former is not None and former is not manager:
            raise ValueError("watch must be a Watch of its own, got that of another manager")
        rate = min(self.max_rate, self.slots / capacity if capacity else 1.0)
        sample_below = max(1, round(rate * SAMPLE_RANGE))
        sampled = sample_below / SAMPLE_RANGE * capacity
        policy_below = round(sample_below * min(1.0, self.policy_slots / max(sampled, 1e-9)))
        shadowed = self._shadowed(policy)
        clock = self._clock
        sizes = self.memory if self.memory[-1] >= REMEMBERED else (*self.memory, REMEMBERED)
        plan = WatchPlan(
            sample_below,
            policy_below,
            limits=[round(sampled * size / self._QUARTERS) for size in sizes],
            lengths=[int(capacity * size) for size in sizes],
            quarters=self._QUARTERS,
            keeps_keys=bool(shadowed),
            secret=self._secret,
            clock=None if clock is None else lambda: int(clock() * 1000),
        )
        with secrets_from(self._secret):
            self._planned = Shadows(
                policy, capacity, self.memory, shadowed, plan=plan, window=self.window
            )
        return plan

    def _join(self, manager: object, core: Any) -> None:
        self._manager = weakref.ref(manager)
        self._core = core
        self._logged.clear()
        self._shadows = self._planned
        self._shadows.join(core)

    def _drain(self) -> None:
        if self._lock.acquire(blocking=False):  # or else another thread drains
            try:
                self._serve(at_once=False)
            finally:
                self._lock.release()

    def _serve(self, *, at_once: bool) -> None:
        if self._shadows.serve(at_once=at_once):
            self.overdue()

    # -- what a user calls ---------------------------------------------------------------------

    def report(self) -> WatchReport:
        """Return the findings in the window.

        Notes
        -----
        Complexity: O(sizes + policies + transfers past their deadline).
        """
        self._require_joined()
        with self._lock:
            self._serve(at_once=True)
            core, shadows, window = self._core, self._shadows, self._shadows.window()
            counts = window.counts
            unused, used = counts["evicted_used"]
            policy = getattr(self._manager(), "policy", None)
            return WatchReport(
                policy=shadows.policy,
                capacity=shadows.capacity,
                sampling_rate=shadows.plan.sample_below / SAMPLE_RANGE,
                seconds=window.seconds,
                **{name: counts[name] for name in COUNTED},
                points=tuple(points(shadows, window)),
                sampled_missed=dict(zip(CAUSES, counts["causes"], strict=True)),
                sampled_evicted=unused + used,
                sampled_unused=unused,
                since_use=median_age(window.overall["unused_ages"]),
                since_stored=median_age(window.overall["stored_ages"]),
                overdue=tuple(self.overdue()),
                hints=heard(list(core.sources), counts["hints"], policy),
                hint_gain=getattr(policy, "hint_gain", None),
            )

    def explain(self, hashes: Iterable[bytes]) -> list[Explanation]:
        """Return the state of each block and, if it is sampled, the cause; change nothing.

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash.
        """
        self._require_joined()
        core, now = self._core, self._core.now()
        return [explanation(*core.explain(key, now)) for key in as_batch(hashes)]

    def overdue(self) -> list[Overdue]:
        """Return the transfers that are past their deadline, oldest first; each is logged once.

        Empty when the manager no longer exists.
        """
        self._require_joined()
        manager = self._manager()
        if manager is None:
            return []
        with self._lock:
            found = find_overdue(self._core, manager, self.deadline)
            for each in found:
                if each.id not in self._logged:
                    self._logged.add(each.id)
                    logger.warning(
                        "a %s of %s was prepared %.0f s ago and not completed; it still holds %s, "
                        "the first in slot %d",
                        each.kind,
                        plural(each.num_blocks, "block"),
                        each.seconds,
                        plural(len(each.block_ids), "block"),
                        each.block_ids[0],
                    )
            self._logged.intersection_update([each.id for each in found])
            return found

    def open_seconds(self) -> dict[str, float]:
        """Return the seconds since the oldest open ``"load"`` and ``"store"`` began; 0 for none."""
        self._require_joined()
        ages = dict.fromkeys(KINDS, 0.0)
        if (manager := self._manager()) is not None:
            with self._lock:
                find_overdue(self._core, manager, self.deadline)
        for _, kind, seconds, _ in self._core.open_transfers():
            ages[kind] = max(ages[kind], seconds)
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
            counts = self._core.counts()
            hints = {
                (each.source, kind): count
                for each in heard(list(self._core.sources), counts["hints"], None)
                for kind, count in (("ends", each.ends), ("expects", each.expects))
            }
            return {
                **counts,
                **self._core.overall(),
                "shadows": self._shadows.totals(counts),
                "policy": self._shadows.policy,
                "hints": hints,
            }

    def set_declining(self, *, allowed: bool) -> None:
        """Let estimated policies decline blocks that they could make room for, or forbid it.

        It follows what the manager's policy may do: above a tier, nothing is declined.

        Raises
        ------
        TypeError
            If `allowed` is no bool.
        """
        check_bool("allowed", allowed)
        self._require_joined()
        with self._lock:
            for each in self._shadows.minis:
                each.set_declining(allowed=allowed)

    # -- parts ---------------------------------------------------------------------------------

    def _require_joined(self) -> None:
        if self._core is None:
            raise RuntimeError("the watch looks at no manager: pass it as `watch` to one")

    def _shadowed(self, live: str | None) -> list[Key]:
        """Return the policies and sizes to estimate besides the LRU curve."""
        sizes = [] if live is None else [(live, memory) for memory in LIVE_MEMORY]
        keys = [*sizes, *((policy, 1.0) for policy in self.policies)]
        return [key for key in dict.fromkeys(keys) if key[0] != "lru"]


def _check_sequence(name: str, values: Any, of: str) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of {of}, got {describe(values)}")


def _check_memory(memory: Any) -> tuple[float, ...]:
    _check_sequence("memory", memory, "numbers")
    sizes = sorted({1.0, *(check_number("memory", size, 1024.0) for size in memory)})
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"memory must be at most {MOST_SIZES} sizes, got {len(sizes)}")
    return tuple(sizes)


def _check_policies(policies: Any) -> tuple[str, ...]:
    _check_sequence("policies", policies, "names")
    for policy in policies:
        if not isinstance(policy, str):
            raise TypeError(f"policies must be names, got {describe(policy)}")
        registry.parse(policy, "policies")
    return tuple(dict.fromkeys(policies))
