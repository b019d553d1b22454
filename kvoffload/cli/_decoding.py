"""Reading a whole trace for many replays, with the size of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import click

from kvoffload.replay import DecodedTrace, HintOptions
from kvoffload.replay.hints import NothingToldError
from kvoffload.traces import Survey

from ._sources import BlockTokens, Reading, Source, note_order, open_source, order_object
from ._terminal import note_bad_lines, progress_bar

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Decoded:
    """A trace that has been read."""

    source: Source
    trace: DecodedTrace
    block_tokens: BlockTokens
    order: Mapping[str, object] = field(default_factory=dict)  # counts of what is out of order
    hints: HintOptions | None = None  # as asked for


@dataclass(frozen=True, slots=True)
class Decoding:
    """The reading of a trace, here or by other machines: plain values, and paths from the root."""

    traces: tuple[str, ...]
    reading: Reading
    block_tokens: int | None
    hints: HintOptions | None
    full_blocks: bool
    arrivals: bool

    def __call__(self) -> DecodedTrace:
        """Read it."""
        return self.read().trace

    def read(self) -> Decoded:
        """Open the trace and decode it."""
        with open_source(self.traces, self.reading, self.block_tokens) as source:
            return self.of(source)

    def of(self, source: Source) -> Decoded:
        """Decode a trace in one pass, and determine its block size, which full blocks depend on.

        Note what was skipped or is out of order, in whole and partial blocks.
        """
        survey, trace = self.surveyed(source, DecodedTrace.of)
        known = BlockTokens.of(source, survey, self.block_tokens)
        if self.full_blocks:
            trace = trace.full_blocks(known.of_full_blocks())
        note_bad_lines(source.trace.bad_lines)
        note_order(survey, source)
        return Decoded(source, trace, known, order_object(survey), self.hints)

    def surveyed(self, source: Source, decode: Callable[..., Found]) -> tuple[Survey, Found]:
        """Return the survey of a trace, and what a function decodes from it in the same pass."""
        survey = Survey.of((), unique=False, block_tokens=self.block_tokens)
        requests = survey.counting(source.requests)
        try:
            with progress_bar("reading", self.reading.limit) as progress:
                watched = source.watched(progress)
                return survey, decode(requests, watched, hints=self.hints, arrivals=self.arrivals)
        except NothingToldError as error:
            raise click.UsageError(f"--hints {str(error).removeprefix('told ')}") from None
