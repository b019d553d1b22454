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
    full_blocks : bool
        Whether blocks that a prompt fills only in part were left out.
    command : str
        The command that makes the same advice.
    """

    trace: str
    advice: Advice
    model: ModelShape | None
    dtype: str
    full_blocks: bool
    command: str

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    def trace_text(self) -> str:
        """Return what was replayed."""
        survey, setup = self.advice.survey, self.advice.setup
        full = "full " if self.full_blocks else ""
        span = f" in {_duration(survey.seconds)}" if survey.seconds else ""
        return (
            f"{survey.requests:,} requests{span}, {survey.blocks:,} {full}blocks of "
            f"{setup.block_tokens:,} tokens, {survey.unique_blocks:,} of them distinct"
        )

    def memory_text(self) -> str:
        """Return what a block takes, and how much of the trace the memory holds."""
        setup = self.advice.setup
        model = "" if self.model is None else f"{self.model.name}, {self.dtype}: "
        capacity = self.advice.capacities[self.advice.ASKED]
        share = capacity / (self.advice.survey.unique_blocks or 1)
        part = f"{share * 100:.3g} %" if share < 1 else "more than all"
        return (
            f"{model}{setup.token_bytes:,} bytes a token, {bytes_text(setup.block_bytes)} a block; "
            f"{bytes_text(setup.memory)} hold {capacity:,} blocks, "
            f"{count_text(capacity * setup.block_tokens)} tokens ({part} of the distinct blocks)"
        )

    def remarks(self) -> list[str]:
        """Return what a reader must know to judge the figures."""
        device = (
            "The replay has no accelerator: hits that the engine's own prefix cache would serve "
            "are counted, and stores end at once."
        )
        if self.model is None or not self.model.remark:
            return [device]
        return [device, f"{self.model.name}: {self.model.remark}."]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
