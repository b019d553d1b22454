"""Advice with its context, as the command and the report present it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvoffload._printable import plural, printable
from kvoffload.replay.policies import summary

from .advice import Advice
from .answer import Snippet
from .comparison import Comparison
from .configuration import python_text, vllm_arguments
from .details import Details
from .knee import Knee
from .model_shape import ModelShape
from .retention import RetentionCell, vllm_flag, worth
from .setup import Setup
from .units import bytes_text, count_text, duration_text
from .wording import prompt_text


@dataclass(frozen=True, slots=True)
class Subject:
    """Advice and its context."""

    advice: Advice
    trace: str = ""  # its name as given by the user
    model: ModelShape | None = None  # None if bytes per token were given
    dtype: str = "bfloat16"  # element type of the model's KV cache
    command: str = ""  # as it was typed
    block_tokens_from: str = "lengths"  # or ``"trace"``, or ``"option"`` if neither tells
    assumed_text: str | None = None  # what was assumed when the trace was read, in words
    breaks_text: str | None = None  # what breaks the prefixes of its prompts, in words
    hints_text: str | None = None  # what clients say of their sessions, in words
    knee: Knee | None = None  # None if the memory was given
    since: Comparison | None = None  # comparison with earlier advice
    # of one engine
    details: Details | None = None
    retentions: tuple[RetentionCell, ...] = ()  # empty if the model has no windows or states
    # By the size of an assumed cache on the accelerator, none first, all of it as in `advice` last;
    # behind parts of it only in the memory asked for. Empty if none is assumed.
    by_device: tuple[Advice, ...] = ()

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    @property
    def setup(self) -> Setup:
        """The question."""
        return self.advice.setup

    def trace_text(self) -> str:
        """Return a description of the trace."""
        facts, setup = self.advice.facts, self.setup
        believed = " (as given; the trace has no lengths)" * (self.block_tokens_from == "option")
        span, full = "", ""
        if not setup.engines:
            span = f" in {duration_text(facts.seconds)}" if facts.seconds else ""
            full = "full " * setup.full_blocks
        return (
            f"{plural(facts.requests, 'request')}{span}, {plural(facts.blocks, full + 'block')} "
            f"of {plural(setup.block_tokens, 'token')}{believed}, {facts.unique_blocks:,} of them "
            "distinct" + ("" if self.assumed_text is None else f"; {self.assumed_text}")
        )

    def memory_text(self) -> str:
        """Return the bytes per block or slot, and how much of the trace the memory holds."""
        setup = self.setup
        model = "" if self.model is None else f"{self.model.name}, {self.dtype}: "
        capacity, size = setup.capacity(setup.memory), bytes_text(setup.block_bytes)
        if not setup.chunks.is_plain:
            return (
                f"{model}{size} per slot; {bytes_text(setup.memory)} holds "
                f"{plural(capacity, 'slot')}; {prompt_text(setup.chunks)}"
            )
        share = capacity * (setup.engines or 1) / (self.advice.facts.unique_blocks or 1)
        part = f"{share * 100:.3g} %" if share < 1 else "more than " * (share > 1) + "all"
        tokens = count_text(capacity * setup.block_tokens)
        if setup.engines:
            part += " of the distinct blocks" * (share < 1)
            return (
                f"{model}{size} per block; {plural(setup.engines, 'engine')} of "
                f"{bytes_text(setup.memory)} hold {plural(capacity, 'block')} each, {tokens} "
                f"tokens, together {part}"
            )
        return (
            f"{model}{setup.token_bytes:,} bytes per token, {size} per block; "
            f"{bytes_text(setup.memory)} holds {plural(capacity, 'block')}, {tokens} tokens "
            f"({part} of the distinct blocks)"
        )

    def meanings(self) -> list[tuple[str, str]]:
        """Return an explanation of each row of the table of policies; none of a fleet."""
        if self.setup.engines:
            return []
        return [
            *((policy, summary(policy)) for policy in self.advice.ranking()),
            ("belady", "Belady's choice with bypass, which knows the future"),
            ("infinite", "a cache that keeps everything"),
        ]

    def snippets(self) -> list[Snippet]:
        """Return vLLM's configuration, and of one engine the manager in Python.

        Nothing unless offloading is recommended.
        """
        case, setup = self.advice.case, self.setup
        if self.advice.policy is None:
            return []
        found = []
        vllm = vllm_arguments(case.policy, case.memory, setup.chunks, self.disk())
        if vllm is not None:
            title = f"vLLM, {'each engine, ' if setup.engines else ''}--kv-transfer-config"
            found.append(Snippet(title, "vllm", json.dumps(vllm, indent=2)))
        if setup.engines:
            return found
        flag = self.vllm_flag()
        if flag is not None:
            found.append(Snippet("vLLM, in addition", "vllm-argument", flag))
        python = python_text(case.policy, setup.capacity(case.memory), setup.block_tokens)
        return [*found, Snippet("Python", "python", python)]

    def disk(self) -> tuple[int, str] | None:
        """Return the bytes and the policy of the disk, if it is a part of the recommendation."""
        policy, details = self.advice.policy, self.details
        if policy is None or details is None:
            return None
        return details.disk_worth(self.setup.memory, policy)

    def vllm_flag(self) -> str | None:
        """Return the argument of ``vllm serve`` beside the configuration; None for its default."""
        groups = self.setup.chunks
        better = worth(self.retentions, groups.retention)
        interval = groups.retention if better is None else better.interval
        return None if interval == 0 else vllm_flag(interval)
