"""The manager's side of a watch: the plan of the sample, and the names of its counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Protocol

from kvoffload.errors import describe
from kvoffload.policies import registry
from kvoffload.types import BlockHash, Hints

SAMPLE_RANGE = 2**24
"""A block is sampled if its 24 bits, ``0 ... SAMPLE_RANGE - 1``, are below the threshold."""

CAUSES = (
    "broken_prefix",
    "pending",
    "evicted",
    "declined",
    "refused",
    "failed",
    "reset",
    "never_or_long_ago",
)
"""Causes of a sampled block's miss; the first that applies counts."""

COUNTERS = (
    "requests",
    "asked",
    "missed",
    "met_pending",
    "stored",
    "evicted",
    "declined",
    "refused",
    "failed",
    "resets",
    "untracked",
    "tail_missed_tokens",
)
"""The names of a core's counters, in its order."""

SampledRequest = tuple[list[BlockHash], int, int, Hints | None]
"""The sampled keys of a request, the half-open slice of them that it asked for, and the hints of
its client when it began."""
FINISHED, RELEASED = -1, -2
"""In place of the first: these keys' request has finished, with these hints of a return; or the
manager has released these keys."""

KINDS = ("load", "store")
"""The kinds of open transfers."""
LOAD, STORE = range(2)

OTHERS = "others"
"""The name that stands for all others; a source of that name counts among them."""


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """The sample that a watch asks of a manager, and its use."""

    sample_below: int  # threshold of the sample
    policy_below: int  # and of the part of it that the policies see
    _: KW_ONLY
    limits: Sequence[int]  # by size, smallest first: blocks of one quarter; last: remembered ones
    lengths: Sequence[int]  # by size: blocks of the memory
    quarters: int = 4  # disjoint parts of the sample, each with its own shadow: 1, 2 or 4
    keeps_keys: bool = True  # those of the policies' part; if not, from the first release on
    secret: bytes | None = None  # 64 bytes that key the hash; None leaves the choice to the manager
    clock: Callable[[], int] | None = None  # gives milliseconds; None: the system's monotonic clock


class Watching(Protocol):
    """The methods that a manager calls on the object passed as ``watch``."""

    def _plan(self, manager: object, policy: str | None, capacity: int) -> WatchPlan:
        """Return the plan; ValueError if the watch belongs to another manager.

        The policy is None if it is a user's own, or an instance that its name does not build.
        """

    def _join(self, manager: object, core: Any) -> None:
        """Accept the core made from the plan; never fails."""

    def _drain(self) -> None:
        """Take the collected requests; called before a lookup once there are enough."""


class WatchRequest:
    """The watch of a manager under construction, and the policy as the user named it."""

    __slots__ = ("cache_policy", "watch")

    def __init__(self, watch: Watching, cache_policy: Any) -> None:
        self.watch = watch
        self.cache_policy = cache_policy

    def new_core(self, manager: object, capacity: int) -> Any:
        """Return a core made from the watch's plan for a manager."""
        core = import_module("kvoffload.managers._watch_c")  # a watch exists only beside it
        policy = _policy_text(self.cache_policy, capacity)
        return core.WatchCore(self.watch._plan(manager, policy, capacity), self.watch)


def watch_request(watch: Any, cache_policy: Any) -> WatchRequest | None:
    """Return the request for a watch, None for None; TypeError if `watch` is not a ``Watch``."""
    if watch is None:
        return None
    if isinstance(watch, type) or not (hasattr(watch, "_plan") and hasattr(watch, "_join")):
        raise TypeError(f"watch must be a Watch or None, got {describe(watch)}")
    return WatchRequest(watch, cache_policy)


def _policy_text(cache_policy: Any, capacity: int) -> str | None:
    """Return the string that builds a policy like this one; None if there is none."""
    if isinstance(cache_policy, str):
        return cache_policy
    is_class = isinstance(cache_policy, type)
    entry = registry.entry_of(cache_policy if is_class else type(cache_policy))
    if entry is None or not (is_class or _is_default(cache_policy, entry, capacity)):
        return None
    return entry.name


def _is_default(policy: Any, entry: registry.Entry, capacity: int) -> bool:
    """Return whether an instance decides like one of the defaults of its entry."""
    if not (entry.options or entry.learns_from_ghosts):
        return True  # whatever its own capacity
    return policy.cache_capacity == capacity and all(
        # Some policies show the number of blocks instead of the share that was given.
        getattr(policy, f"{option.name}_size", getattr(policy, option.name))
        in (option.default, int(option.default * capacity))
        for option in entry.options
    )
