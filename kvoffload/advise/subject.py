"""An advice together with what it is about, as the command and the report present it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.traces.errors import printable

from .advice import Advice
from .models import ModelShape
from .units import bytes_text, count_text

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was asked, and what came of it.

    Attributes
    ----------
    trace : str
        What the user calls the trace.
    advice : Advice
        What it says.
    model : ModelShape or None
        The model; None where bytes a token were given.
    dtype : str
        Element type of the model's KV cache.
    command : str
        The command that makes the same advice.
    block_tokens_from : str
        Who says how many tokens a block holds: ``"trace"``, ``"lengths"`` of its requests, or
        ``"option"``, where it was given because they are not known.
    """

    trace: str
    advice: Advice
    model: ModelShape | None
    dtype: str
    command: str
    block_tokens_from: str = "lengths"

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    def trace_text(self) -> str:
        """Return what was replayed."""
        facts, setup = self.advice.facts, self.advice.setup
        full = "full " if setup.full_blocks else ""
        believed = (
            " (as given, the trace has no lengths)" if self.block_tokens_from == "option" else ""
        )
        span = f" in {_duration(facts.seconds)}" if facts.seconds else ""
        return (
            f"{facts.requests:,} requests{span}, {facts.blocks:,} {full}blocks of "
            f"{setup.block_tokens:,} tokens{believed}, {facts.unique_blocks:,} of them distinct"
        )

    def memory_text(self) -> str:
        """Return what a block takes, and how much of the trace the memory holds."""
        setup = self.advice.setup
        model = "" if self.model is None else f"{self.model.name}, {self.dtype}: "
        capacity = self.advice.capacities[self.advice.asked]
        share = capacity / (self.advice.facts.unique_blocks or 1)
        part = f"{share * 100:.3g} %" if share < 1 else "more than all"
        return (
            f"{model}{setup.token_bytes:,} bytes a token, {bytes_text(setup.block_bytes)} a block; "
            f"{bytes_text(setup.memory)} holds {capacity:,} blocks, "
            f"{count_text(capacity * setup.block_tokens)} tokens ({part} of the distinct blocks)"
        )

    def remarks(self) -> list[str]:
        """Return what a reader must know to judge the figures."""
        setup, facts = self.advice.setup, self.advice.facts
        if setup.device_memory:
            device = (
                f"An LRU prefix cache of {bytes_text(setup.device_memory)} on the accelerator "
                f"stands in front and answers for {facts.blocks - facts.asked:,} blocks; the "
                "ratios are of the others."
            )
        else:
            device = (
                "No accelerator stands in front: hits that the engine's own prefix cache would "
                "serve are counted; --device-memory puts one there."
            )
        if self.model is None or not self.model.remark:
            return [device]
        return [device, f"{self.model.name}: {self.model.remark}."]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
