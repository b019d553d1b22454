"""The question that advice answers: which policy, in which memory, of which engines."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Literal

from kvoffload.replay import Configuration, GroupChunks, Tier
from kvoffload.replay.configuration import DECODE_NS, Loop
from kvoffload.replay.groups import STEP_TOKENS
from kvoffload.replay.routers import ROUTERS

from .choice import POLICIES
from .economy import Engine

__all__ = ["SIZES", "STACK_ROUTERS", "VLLM_DEFAULT", "FleetTier", "Prices", "Setup"]

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
class Prices:
    """Prices of memory per GiB, in any money.

    Attributes
    ----------
    host, tier : float
        That of host memory, and of a tier.
    """

    host: float
    tier: float


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
    """

    kind: Literal["shared", "private"]
    memory: int
    policy: str = "lru"


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

    @property
    def rates(self) -> Engine | None:
        """The engine, where both of its rates are known."""
        return self.engine if self.engine is not None and self.engine.is_known else None

    @property
    def chunks(self) -> GroupChunks:
        """The groups; of a model whose layers are one full group, blocks of the trace."""
        if self.groups is not None:
            return self.groups
        return GroupChunks.of_blocks(
            self.block_tokens,
            block_bytes=self.block_tokens * self.token_bytes,
            step_tokens=self.step_tokens,
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

    def capped(self, memory: int, unique_blocks: int) -> int:
        """Return the capacity to replay: a cache that holds all blocks never evicts, so no more."""
        most = unique_blocks * len(self.chunks.layout.groups)
        return max(1, min(self.capacity(memory), most))

    def configuration(self, policy: str, slots: int, tier: Tier | None = None) -> Configuration:
        """Return one engine with a policy in that many slots of host memory."""
        return Configuration(
            policy=policy, host=slots, device=self.device_blocks, groups=self.chunks, tier=tier
        )

    def memories(self) -> list[int]:
        """Return the memories that are compared, bytes, ascending.

        The first of a fleet is 0: without offloading.
        """
        found = [int(self.memory * size) for size in SIZES]
        if self.others:
            found = sorted({self.memory, *self.others})
        return [0, *found] if self.engines else found

    @property
    def device_blocks(self) -> int:
        """Slots of the accelerator's own prefix cache."""
        return self.capacity(self.device_memory)

    @property
    def replays(self) -> int:
        """Number of replays needed, the ceilings counted as one per memory."""
        return self.replays_per_memory * len(self.memories())

    @property
    def replays_per_memory(self) -> int:
        """Number of replays per memory: of the policies, and of the ceiling where there is one."""
        return len(self.replayed) + (self.chunks.num_full > 0)

    @property
    def replayed(self) -> tuple[str, ...]:
        """The policies to compare, and vLLM's default."""
        return tuple(dict.fromkeys((*self.policies, VLLM_DEFAULT)))

    def capacity(self, memory: int) -> int:
        """Return how many slots fit into `memory` bytes."""
        return memory // self.block_bytes

    @property
    def rate(self) -> int | None:
        """Tokens of prompts that an engine computes per second; None if not known."""
        return None if self.engine is None else int(self.engine.prefill_rate) or None

    @property
    def link(self) -> int:
        """Bytes per second from host memory to an engine of a fleet."""
        known = None if self.engine is None else int(self.engine.link_bandwidth)
        return known or LINK_BANDWIDTH

    @property
    def saved(self) -> str:
        """The word for what a fleet saves: ``"prefill"``, or without a rate ``"tokens"``."""
        return "tokens" if self.rate is None else "prefill"
