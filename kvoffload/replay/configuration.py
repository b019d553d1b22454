"""Engines with their caches, behind a router, as an operator could deploy them.

One engine is a fleet of one, and host memory of 0 slots is no offloading. Where no time passes, one
engine serves the requests of a trace in turn. Otherwise each computes one prompt at a time, first
come first served. The how-to on fleets lists what the model omits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kvoffload._checks import MAX_NUM_BLOCKS, check_instance, check_int, check_word

from .events import duration
from .groups import GroupChunks
from .offline import BELADY, CEILINGS
from .policies import read_policy
from .requests import DecodedTrace
from .routers import RouterSpec, parse_router

MOST_ENGINES = 256
DECODE_NS = 20 * 10**6

Loop = Literal["open", "closed", "recorded"]
"""Arrivals of a session's later requests: as recorded; each after its wait from the finish of the
previous one; or after its wait and the recorded service from the arrival of the previous one."""

TierKind = Literal["shared", "private"]
"""One tier for all engines, or one per engine."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier behind host memory.

    Every block stored in host memory is also offered to the tier, whose own policy decides. A block
    from the tier needs a slot of host memory, and is resident there afterwards; without a slot it
    is a miss. So host memory declines nothing, regardless of its policy: otherwise the tier would
    receive no blocks and could not be read.

    Attributes
    ----------
    kind : {"shared", "private"}
        One tier for all engines, or one per engine.
    slots : int
        Its capacity; per engine if it is private.
    policy : str
        Its policy.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule.
    """

    kind: TierKind
    slots: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        check_word("kind", self.kind, get_args(TierKind))
        check_int("slots", self.slots, 0, MAX_NUM_BLOCKS)
        read_policy(self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Engines with their caches, behind a router.

    Attributes
    ----------
    policy : str
        The policy of host memory: a policy string, ``"module:Class"``, or a ceiling,
        ``"belady"`` or ``"infinite"``, which replaces host memory and tier.
    host : int
        Slots of each engine's host memory; 0: no offloading. ``"infinite"`` ignores it.
    device : int
        Slots of each accelerator's own LRU cache, which is asked first; 0 for none.
    tier : Tier or None
        The tier behind host memory.
    engines : int
        Number of engines, 1 to 256.
    router : str
        ``name`` or ``name?option=value&...``; see `kvoffload.replay.routers.ROUTERS`.
    groups : GroupChunks
        The KV groups of the model with the size of a block, and how prompts are offered; by default
        blocks of unknown size.
    pending : int
        Further requests of its engine during which a store is in flight; 0: it completes at once.
    rate : int or None
        Prompt tokens that an engine computes per second; None: prompts take no time.
    link, tier_link : int or None
        Bytes per second from host memory and from the tier; None: at once.
    decode_ns : int
        Nanoseconds per token of an answer, with a rate; answers do not wait for each other.
    loop : {"open", "closed", "recorded"}
        Arrivals of a session's later requests.
    slots : int
        Most requests of an engine between the beginning of their prefill and their finish; 0:
        unlimited.
    seed : int
        Seed of the router's random choices.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule, the router needs a tier or a rate that is missing, a rate goes
        with blocks of unknown size, or several engines or times go with several groups, steps,
        `pending` or a ceiling that they exclude.
    """

    policy: str = "lru"
    host: int
    device: int = 0
    tier: Tier | None = None
    engines: int = 1
    router: str = "round-robin"
    groups: GroupChunks = field(default_factory=GroupChunks.of_blocks)
    pending: int = 0
    rate: int | None = None
    link: int | None = None
    tier_link: int | None = None
    decode_ns: int = DECODE_NS
    loop: Loop = "open"
    slots: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in CEILINGS:
            read_policy(self.policy)
        check_int("engines", self.engines, 1, MOST_ENGINES)
        check_int("host", self.host, 0, None if self.policy in CEILINGS else MAX_NUM_BLOCKS)
        for name in ("device", "pending", "slots", "decode_ns", "seed"):
            check_int(name, getattr(self, name), 0)
        for name in ("rate", "link", "tier_link"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_word("loop", self.loop, get_args(Loop))
        check_instance("tier", self.tier, Tier | None, "a Tier or None")
        check_instance("groups", self.groups, GroupChunks, "GroupChunks")
        spec = self.spec
        if spec.options.get("sees") == "tier" and self.tier is None:
            raise ValueError(f"router {self.router!r} must have a tier to see, got none")
        if spec.options.get("lag_ms", 0) and self.rate is None:
            raise ValueError(f"router {self.router!r} must have a rate for its lag, got none")
        if self.tier is not None and self.policy in CEILINGS:
            raise ValueError(f"policy must not be a ceiling with a tier, got {self.policy!r}")
        if self.rate is not None and not self.groups.knows_tokens:
            raise ValueError("groups must know the tokens of a block with a rate")
        if not self.is_in_turn:
            self._check_excluded()

    def _check_excluded(self) -> None:
        what = "a closed loop" if self.loop != "open" else "time or several engines"
        if not self.groups.is_plain:
            raise ValueError(f"groups must be one with {what}, got several")
        if self.groups.step_tokens is not None:
            raise ValueError(f"groups must have no steps with {what}")
        if self.pending:
            raise ValueError(f"pending must be 0 with {what}, got {self.pending}")
        if self.policy == BELADY:
            raise ValueError(f"policy must not be {BELADY!r} with {what}")

    @property
    def spec(self) -> RouterSpec:
        """The router with its options."""
        return parse_router(self.router)

    @property
    def is_in_turn(self) -> bool:
        """Whether one engine serves the requests in turn, and no time passes."""
        return self.engines == 1 and self.rate is None and self.loop == "open"

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot; 0 if not known."""
        return self.groups.slot_bytes

    def prefill_ns(self, missed: int, from_host: int, from_tier: int) -> int:
        """Return the time of a prompt in nanoseconds, for its tokens and the blocks read."""
        if self.rate is None:
            return 0
        size = self.block_bytes
        return (
            duration(missed, self.rate)
            + duration(from_host * size, self.link)
            + duration(from_tier * size, self.tier_link)
        )

    def check_trace(self, trace: DecodedTrace) -> None:
        """Raise if a trace cannot be replayed: without times, or without sessions for a loop."""
        if self.is_in_turn:
            return
        if trace.arrivals is None:
            raise ValueError("trace must have arrivals, got none")
        if self.loop != "open":
            trace.arrivals.check_sessions()
        if self.rate is not None and not trace.arrivals.recorded.any():
            raise ValueError("trace must have times of arrival with a rate, got 0 in all requests")
