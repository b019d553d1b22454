"""Reading a whole trace for many replays, with the size of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.replay import DecodedTrace, HintOptions
from kvoffload.traces import Survey

from ._hint_options import told_by_trace
from ._sources import BlockTokens, Reading, Source, open_source
from ._terminal import progress_bar


@dataclass(frozen=True, slots=True)
class Decoding:
    """A trace as other machines read it: plain values, and paths from the root."""

    traces: tuple[str, ...]
    reading: Reading
    block_tokens: int | None
    hints: HintOptions | None
    full_blocks: bool
    arrivals: bool

    def __call__(self) -> DecodedTrace:
        """Read it."""
        with open_source(self.traces, self.reading, self.block_tokens) as source:
            decoded, _, _ = decode(
                source,
                self.block_tokens,
                self.reading.limit,
                self.hints,
                full_blocks=self.full_blocks,
                arrivals=self.arrivals,
                quiet=True,
            )
        return decoded


def decode(
    source: Source,
    block_tokens: int | None,
    limit: int | None,
    hints: HintOptions | None,
    *,
    full_blocks: bool,
    arrivals: bool,
    quiet: bool,
) -> tuple[DecodedTrace, BlockTokens, Survey]:
    """Decode the trace in one pass and determine its block size, which full blocks depend on.

    The survey covers whole and partial blocks.
    """
    survey = Survey.of((), unique=False, block_tokens=block_tokens)
    requests = survey.counting(source.requests)
    with progress_bar("reading", limit, quiet=quiet) as progress, told_by_trace():
        shown = source.watched(progress)
        decoded = DecodedTrace.of(requests, shown, hints=hints, arrivals=arrivals)
    known = BlockTokens.of(source, survey, block_tokens)
    if full_blocks:
        decoded = decoded.full_blocks(known.of_full_blocks(quiet=quiet))
    return decoded, known, survey
