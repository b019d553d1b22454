"""The question that advice answers: which policy, in which memory, of which engines."""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, NamedTuple, get_args

from kvoffload._checks import check_bool, check_instance, check_int, check_word
from kvoffload.replay import Configuration, GroupChunks, Tier
from kvoffload.replay.configuration import DECODE_NS, MOST_ENGINES, Loop, TierKind
from kvoffload.replay.groups import STEP_TOKENS, check_step_tokens
from kvoffload.replay.offline import BELADY
from kvoffload.replay.policies import read_policy
from kvoffload.replay.routers import ROUTERS, parse_router

from .choice import POLICIES, ROUND_ROBIN, Prices
from .economy import Engine

SIZES = (Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
"""The memories that are compared, as multiples of the one asked for."""

VLLM_DEFAULT = "lru"
"""The policy of vLLM if none is named."""

STACK_ROUTERS = tuple(name for name in ROUTERS if name not in ("random", "earliest"))
"""The routers that are compared if none is named: those of stacks, except ``random``."""

LINK_BANDWIDTH = 50 * 10**9
"""Bytes per second from host memory to an engine if no accelerator is known."""

TIER_BANDWIDTH = 10 * 10**9
"""The same from a tier."""


@dataclass(frozen=True, slots=True)
class FleetTier:
    """A tier behind host memory.

    Attributes
    ----------
    kind : {"shared", "private"}
        One that all engines reach, or one behind each.
    memory : int
        Its size, or that of each if it is private, bytes.
    policy : str
        Its policy.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule.
    """

    kind: TierKind
    memory: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        check_word("kind", self.kind, get_args(TierKind))
        check_int("memory", self.memory, 0, None)  # of any block size
        read_policy(self.policy)


class Case(NamedTuple):
    """A deployment that is compared with others, its sizes in bytes.

    Attributes
    ----------
    memory : int
        Host memory of each engine, bytes; 0: no offloading.
    tier : FleetTier or None
        The tier behind it.
    policy : str
        Its policy; without host memory, vLLM's default.
    router : str
        The router in front.
    """

    memory: int
    tier: FleetTier | None = None
    policy: str = VLLM_DEFAULT
    router: str = ROUND_ROBIN

    @property
    def offloads(self) -> bool:
        """Whether there is host memory."""
        return self.memory > 0


@dataclass(frozen=True, slots=True)
class Setup:
    """The question: which policy, in which memory, for which blocks; and of a fleet, which router.

    Attributes
    ----------
    memory : int
        Host memory of each engine for KV blocks, bytes.
    block_tokens : int
        Tokens per block.
    token_bytes : int
        Bytes of KV cache per token; has no effect with `groups`.
    device_memory : int
        Memory of the accelerator's own prefix cache, bytes; 0 for none in front.
    full_blocks : bool
        Whether every block holds `block_tokens` tokens of its prompt, as far as the trace tells.
    policies : tuple of str
        Policy strings to compare, none of them a ceiling.
    others : tuple of int
        Memories to compare it with, bytes; by default those of `SIZES`.
    engine : Engine or None
        The engine; without both of its rates, whether a policy pays is not known.
    device_is_assumed : bool
        Whether `device_memory` is a typical size, which the user did not give.
    groups : GroupChunks or None
        The groups of the model, for blocks of `block_tokens` tokens; None where all layers are one
        full group. With them memories hold slots, and hits are tokens.
    step_tokens : int or None
        Tokens of a prompt that a scheduler step computes at most; None offers prompts whole. Has no
        effect with `groups`, which have their own, and of a fleet.
    engines : int
        Number of engines behind a router, 1 to 256; 0 for one engine without a router, on which the
        others have no effect.
    routers : tuple of str
        Routers to compare; ``round-robin`` is compared besides.
    tiers : tuple of FleetTier or None
        Tiers to compare behind host memory; None for no tier.
    tier_bandwidth : int
        Bytes per second from a tier to an engine.
    decode_ns : int
        Nanoseconds per token of an answer.
    slots : int
        Most requests of an engine that are computed or answered at once; 0: any.
    loop : {"open", "closed", "recorded"}
        When a session's later requests come, as in `Configuration`.
    prices : Prices or None
        Prices of memory; without them the least host memory is cheapest, then the smallest tier.

    Raises
    ------
    TypeError, ValueError
        If a value breaks its rule.
    """

    memory: int
    block_tokens: int
    token_bytes: int
    device_memory: int = 0
    _: KW_ONLY
    full_blocks: bool = False
    policies: tuple[str, ...] = POLICIES
    others: tuple[int, ...] = ()
    engine: Engine | None = None
    device_is_assumed: bool = False
    groups: GroupChunks | None = None
    step_tokens: int | None = STEP_TOKENS
    engines: int = 0
    routers: tuple[str, ...] = STACK_ROUTERS
    tiers: tuple[FleetTier | None, ...] = (None,)
    tier_bandwidth: int = TIER_BANDWIDTH
    decode_ns: int = DECODE_NS
    slots: int = 0
    loop: Loop = "open"
    prices: Prices | None = None

    def __post_init__(self) -> None:
        check_int("memory", self.memory, 1, None)
        check_int("device_memory", self.device_memory, 0, None)
        for name in ("block_tokens", "tier_bandwidth"):
            check_int(name, getattr(self, name), 1)
        for name in ("decode_ns", "slots"):
            check_int(name, getattr(self, name), 0)
        check_int("engines", self.engines, 0, MOST_ENGINES)
        check_int("token_bytes", self.token_bytes, 1 if self.groups is None or self.engines else 0)
        if self.step_tokens is not None:
            check_step_tokens(self.step_tokens)
        for name in ("full_blocks", "device_is_assumed"):
            check_bool(name, getattr(self, name))
        check_word("loop", self.loop, get_args(Loop))
        check_instance("engine", self.engine, Engine | None, "an Engine or None")
        check_instance("groups", self.groups, GroupChunks | None, "GroupChunks or None")
        check_instance("prices", self.prices, Prices | None, "Prices or None")
        for name in ("policies", "routers", "tiers", "others"):
            value = getattr(self, name)
            check_instance(name, value, tuple | list, "a tuple")
            if not value and name != "others":
                raise ValueError(f"{name} must not be empty, got {value}")
        for policy in self.policies:
            read_policy(policy)
        for router in self.routers:
            parse_router(router)
        for memory in self.others:
            check_int("others", memory, 1, None)
        for tier in self.tiers:
            check_instance("tiers", tier, FleetTier | None, "of FleetTier or None")

    @property
    def rates(self) -> Engine | None:
        """The engine, where both of its rates are known."""
        return self.engine if self.engine is not None and self.engine.is_known else None

    @property
    def chunks(self) -> GroupChunks:
        """The groups; of a model whose layers are one full group, blocks of the trace."""
        if self.groups is not None and not self.engines:
            return self.groups
        return GroupChunks.of_blocks(
            self.block_tokens,
            block_bytes=self.block_tokens * self.token_bytes,
            step_tokens=None if self.engines else self.step_tokens,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes per slot."""
        return self.chunks.slot_bytes

    @property
    def counted(self) -> str:
        """The word for what hits are counted in: ``"blocks"``, or ``"tokens"`` with `groups`."""
        return self.chunks.hit_name

    @property
    def kept_in(self) -> str:
        """The word for what memory is divided into: ``"blocks"``, or ``"slots"`` with `groups`."""
        return f"{self.chunks.slot_name}s"

    def memories(self) -> list[int]:
        """Return the memories that are compared, bytes, ascending.

        The first of a fleet is 0: without offloading.
        """
        found = [int(self.memory * size) for size in SIZES]
        if self.others:
            found = sorted({self.memory, *self.others})
        return [0, *found] if self.engines else found

    @property
    def replayed(self) -> tuple[str, ...]:
        """The policies to compare; of one engine vLLM's default besides."""
        default = () if self.engines else (VLLM_DEFAULT,)
        return tuple(dict.fromkeys((*self.policies, *default)))

    def capacity(self, memory: int) -> int:
        """Return how many slots fit into `memory` bytes."""
        return memory // self.block_bytes

    def capped(self, memory: int, unique_blocks: int) -> int:
        """Return the capacity to replay: a cache that holds all blocks never evicts, so no more."""
        most = unique_blocks * len(self.chunks.layout.groups)
        return min(self.capacity(memory), max(1, most))

    def cases(self) -> list[Case]:
        """Return what is compared, by memory, tier, policy and router.

        The first of a fleet are without offloading, one per router.
        """
        if not self.engines:
            pairs = itertools.product(self.memories(), self.replayed)
            return [Case(memory, policy=policy) for memory, policy in pairs]
        routers = dict.fromkeys((ROUND_ROBIN, *self.routers))
        seeing = {one for one in routers if parse_router(one).options.get("sees") == "tier"}
        _, *memories = self.memories()
        every = itertools.product(memories, self.tiers, self.replayed, routers)
        none = [Case(0, router=router) for router in routers]
        return [
            case
            for case in (*none, *itertools.starmap(Case, every))
            if case.tier is not None or case.router not in seeing or not any(self.tiers)
        ]

    def configuration(self, case: Case, unique_blocks: int) -> Configuration:
        """Return a case as it is replayed over a trace with that many distinct blocks."""
        tier = None
        if case.tier is not None:
            slots = self.capped(case.tier.memory, unique_blocks)
            tier = Tier(case.tier.kind, slots, case.tier.policy)
        more: dict[str, Any] = {"device": self.capacity(self.device_memory)}
        if self.engines:
            more = {
                "device": self.capped(self.device_memory, unique_blocks),
                "engines": self.engines,
                "router": case.router,
                "rate": self.rate,
                "link": self.link,
                "tier_link": self.tier_bandwidth,
                "decode_ns": self.decode_ns,
                "slots": self.slots,
                "loop": self.loop,
            }
        return Configuration(
            policy=case.policy,
            host=self.capped(case.memory, unique_blocks),
            groups=self.chunks,
            tier=tier,
            **more,
        )

    def configurations(self, unique_blocks: int) -> dict[Case, Configuration]:
        """Return what is replayed: `cases`, and of one engine the ceiling in each memory.

        Without a full group no ceiling is known.
        """
        cases = self.cases()
        if not self.engines and self.chunks.num_full:
            cases += [Case(memory, policy=BELADY) for memory in self.memories()]
        return {case: self.configuration(case, unique_blocks) for case in cases}

    @property
    def rate(self) -> int | None:
        """Tokens of prompts that an engine computes per second; None if not known."""
        return None if self.engine is None else int(self.engine.prefill_rate) or None

    @property
    def knows_times(self) -> bool:
        """Whether it is known how long prompts take; of one engine its link, too."""
        return (self.rate if self.engines else self.rates) is not None

    @property
    def link(self) -> int:
        """Bytes per second from host memory to an engine of a fleet."""
        known = None if self.engine is None else int(self.engine.link_bandwidth)
        return known or LINK_BANDWIDTH

    @property
    def saved(self) -> str:
        """The word for what a fleet saves: ``"prefill"``, or without a rate ``"tokens"``."""
        return "tokens" if self.rate is None else "prefill"
