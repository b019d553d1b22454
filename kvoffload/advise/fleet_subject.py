"""Advice on a fleet with its context, as the command and the page present it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload._printable import printable
from kvoffload.replay import Result
from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.policies import is_own

from .comparison import Comparison
from .configuration import vllm_text
from .fleet_wording import NOT_MODELLED, fleet_findings, fleet_headline
from .fleets import FleetAdvice, FleetTier
from .knee import Knee
from .model_shape import ModelShape
from .units import bytes_text, count_text, percent_text
from .wording import Finding, assumed_workers_text, context, rates_text, workers_text

__all__ = ["FleetSubject", "Heat"]


@dataclass(frozen=True, slots=True)
class Heat:
    """The savings of fleets with one policy and one tier: a row per router, by memory.

    `rows` are ascending by memory, None for what was not compared.
    """

    policy: str
    tier: FleetTier | None
    rows: dict[str, list[Result | None]]


@dataclass(frozen=True, slots=True)
class FleetSubject:
    """Advice on a fleet and its context."""

    trace: str  # its name as given by the user
    advice: FleetAdvice
    model: ModelShape | None  # None if bytes per token were given
    dtype: str  # element type of the model's KV cache
    command: str  # as it was typed
    block_tokens_from: str = "lengths"  # or ``"trace"``, or ``"option"`` if neither tells
    ids_text: str | None = None  # how the block ids of several files were treated
    hints_text: str | None = None  # what clients say of their sessions, in words
    knee: Knee | None = None  # None if the memory was given
    since: Comparison | None = None  # comparison with earlier advice

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    @property
    def is_recommended(self) -> bool:
        """Whether the trace suffices for a recommendation, be it not to offload."""
        return not self.advice.objections

    @property
    def offloads(self) -> bool:
        """Whether offloading is recommended."""
        return self.is_recommended and self.advice.case.offloads

    def is_enough(self, heat: Heat, router: str, memory: int) -> bool:
        """Return whether a cell of a heat map is the fleet that is enough."""
        case = self.advice.case
        same = not case.offloads or (heat.tier, heat.policy) == (case.tier, case.fleet.policy)
        return same and (router, memory) == (case.fleet.router, case.memory)

    def headline(self) -> str:
        """Return the advice in one sentence."""
        return fleet_headline(self.advice)

    def findings(self) -> list[Finding]:
        """Return the findings."""
        setup = self.advice.setup
        return [*context(self.since, self.knee, setup, setup.engines), *fleet_findings(self.advice)]

    def heats(self) -> Iterator[Heat]:
        """Yield the savings by router and memory, first with the policy and tier of `offloading`.

        The others follow, by tier, then policy.
        """
        advice, setup = self.advice, self.advice.setup
        chosen = advice.offloading.tier, advice.offloading.fleet.policy
        pairs = [(tier, policy) for tier in setup.tiers for policy in setup.policies]
        for tier, policy in dict.fromkeys((chosen, *pairs)):
            rows = {
                router: [
                    advice.like(memory=memory, tier=tier, policy=policy, router=router)
                    for memory in setup.memories()
                ]
                for router in self.routers()
            }
            yield Heat(policy, tier, rows)

    def routers(self) -> list[str]:
        """Return the routers that were compared, in order."""
        return list(dict.fromkeys(case.fleet.router for case in self.advice.cases))

    def trace_text(self) -> str:
        """Return a description of the trace."""
        advice = self.advice
        believed = " (as given; the trace has no lengths)" * (self.block_tokens_from == "option")
        return (
            f"{advice.requests:,} requests, {advice.blocks:,} blocks of "
            f"{advice.setup.block_tokens:,} tokens{believed}, {advice.unique_blocks:,} of them "
            "distinct" + ("" if self.ids_text is None else f"; {self.ids_text}")
        )

    def memory_text(self) -> str:
        """Return the bytes per block, and how much of the trace the memory holds."""
        setup = self.advice.setup
        model = "" if self.model is None else f"{self.model.name}, {self.dtype}: "
        blocks = setup.memory // setup.block_bytes
        share = blocks * setup.engines / (self.advice.unique_blocks or 1)
        part = f"{share * 100:.3g} % of the distinct blocks" if share < 1 else "more than all"
        return (
            f"{model}{bytes_text(setup.block_bytes)} per block; {setup.engines:,} engines of "
            f"{bytes_text(setup.memory)} hold {blocks:,} blocks each, "
            f"{count_text(blocks * setup.block_tokens)} tokens, together {part}"
        )

    @property
    def not_modelled(self) -> str:
        """The limits of the model, in words."""
        return NOT_MODELLED

    def remarks(self) -> list[str]:
        """Return the assumptions behind the figures."""
        setup = self.advice.setup
        if setup.device_memory:
            on_device = self.advice.result.device_hits / (self.advice.blocks or 1)
            device = (
                f"An LRU prefix cache of {bytes_text(setup.device_memory)} on each accelerator "
                f"{'is assumed to be' if setup.device_is_assumed else 'is'} asked first and serves "
                f"{percent_text(on_device)} of the blocks. Running requests share that memory; "
                "--device-memory sets what they leave, 0 leaves it out."
            )
        else:
            device = "No accelerator's own cache is modelled; --device-memory adds one."
        loops = {
            "open": "Requests come as recorded, however long the queues.",
            "closed": "Each request of a session comes once the previous one is answered.",
            "recorded": "Requests of a session keep their recorded waits.",
        }
        found = [device, loops[setup.loop]]
        if self.hints_text is not None:
            found.append(f"Replayed with {self.hints_text}.")
        if setup.rate is None:
            found.append(
                "No prefill rate is known, so prompts take no time: --accelerator or "
                "--prefill-tokens-per-second gives times to first tokens."
            )
        elif setup.engine is not None and setup.engine.is_known:
            found.append(f"Each engine: {rates_text(setup.engine)}")
        found += [*assumed_workers_text(setup.engine, self.model), NOT_MODELLED]
        if self.offloads and not is_own(self.advice.case.fleet.policy):
            found.append(workers_text(setup.engine))
        if self.offloads and self.advice.case.tier is not None:
            found.append("This configuration does not include the tier; see the pages on tiers.")
        return found

    def vllm_text(self) -> str | None:
        """Return vLLM's configuration of each engine, if there is one."""
        setup, case = self.advice.setup, self.advice.case
        groups = GroupChunks.of_blocks(setup.block_tokens, block_bytes=setup.block_bytes)
        return vllm_text(case.fleet.policy, case.memory, groups) if self.offloads else None
