"""``kvoffload info``: the contents of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from kvoffload.advise.answer import column
from kvoffload.advise.units import latency_text, percent_text
from kvoffload.traces import Survey
from kvoffload.traces.breaks import PrefixBreaks
from kvoffload.traces.returns import Returns

from . import _options
from ._breaks import Broken, show_text_option
from ._fields import rounded
from ._output import Outputs, in_outputs, plot_option
from ._sources import BlockTokens, Reading, Source, note_order, open_source, order_object
from ._terminal import note_bad_lines, print_tables


@click.command(
    epilog=_options.examples(
        "kvoffload info trace.jsonl",
        "kvoffload info lookup_hashes/ --model-name Qwen/Qwen3-8B --json",
    )
)
@_options.traces_argument
@plot_option("the hit ratio over the time for which blocks are kept")
@_options.block_tokens_option
@show_text_option
@_options.reading_options
@_options.json_option
@in_outputs
def info(
    traces: tuple[str, ...],
    *,
    block_tokens: int | None,
    show_text: bool,
    reading: Reading,
    outputs: Outputs,
) -> None:
    """Describe a trace: requests, blocks and their reuse, and when sessions return.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input.
    """
    outputs.check(traces)
    returns, sample = Returns(), PrefixBreaks()
    with open_source(traces, reading, block_tokens, sample) as source:
        survey = source.survey("reading", reading.limit, returns=returns, block_tokens=block_tokens)
        size = BlockTokens.of(source, survey, block_tokens)
        note_order(survey, source)
        ratio = survey.ideal_hit_ratio
        broken = Broken.of(source, sample, ratio, shows_text=show_text)
        outputs.show(Description(source, survey, size, returns, broken))


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a trace, as `kvoffload info` prints them."""

    source: Source
    survey: Survey
    size: BlockTokens
    returns: Returns
    broken: Broken

    def draw(self, path: str) -> None:
        """Draw the hit ratio over the time for which blocks are kept into a file."""
        from ._plot import draw_kept

        draw_kept(self.source.name, self.returns.blocks, path)

    def as_object(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        source, survey, kept = self.source, self.survey, self.returns.blocks
        ratios = zip(kept.seconds, kept.ratios, strict=True)
        return {
            "trace": source.name,
            "files": len(source.trace.paths) or None,
            "id_spaces": source.trace.id_spaces,
            **{name: value for name, value, _, _ in self._facts()},
            "bad_lines": source.trace.bad_lines,
            "types": dict(survey.types.most_common()),
            "most_turns": survey.most_turns or None,
            **order_object(survey),
            "sessions": self._sessions() if self.returns.sessions.sessions else None,
            "kept": [{"seconds": seconds, "hit_ratio": ratio} for seconds, ratio in ratios]
            if self.returns.has_times
            else None,
            **self.broken.as_object(),
        }

    def print(self) -> None:
        """Print a table of all that is known."""
        survey = self.survey
        rows = [(title, text) for _, _, title, text in self._facts()]
        rows += [
            (f"requests of type {kind}", f"{count:,} ({percent_text(count / survey.requests)})")
            for kind, count in survey.types.most_common()
        ]
        if survey.most_turns:
            rows.append(("turns, the most stated", f"{survey.most_turns:,}"))
        rows += [*self.broken.rows(), *self._returns()]
        names, values = zip(*rows, strict=True)
        leading = [column("", [*names], numeric=False)]
        print_tables(self.source.names, leading, [[column("", [*values])]])
        note_bad_lines(self.source.trace.bad_lines)

    def _facts(self) -> list[tuple[str, object, str, str]]:
        """Return what is known of any trace: name and value in JSON, title and text in a table."""
        source, survey, size = self.source, self.survey, self.size
        unique, tokens = survey.unique_blocks or 0, survey.input_tokens
        reuse = survey.blocks / unique if unique else 0.0
        reuse_text = f"{reuse:.2f}" if unique else "none"
        tokens_text = _NO_SIZE[tokens > 0] if size.count is None else f"{size.count:,}"
        if size.origin == "option":  # the trace has no lengths
            tokens_text += " (as given)"
            tokens = survey.blocks * (size.count or 0)
        ideal, longest = survey.ideal_hit_ratio, survey.longest
        ideal_text = percent_text(ideal)
        return [
            ("format", source.trace.format, "format", source.trace.format or ""),
            ("requests", survey.requests, "requests", f"{survey.requests:,}"),
            ("blocks", survey.blocks, "blocks", f"{survey.blocks:,}"),
            ("unique_blocks", survey.unique_blocks, "unique blocks", f"{unique:,}"),
            ("reuse", reuse, "reuse, blocks per unique block", reuse_text),
            ("block_tokens", size.count, "block size, tokens", tokens_text),
            ("ideal_hit_ratio", ideal, "ideal hit ratio, cache without bounds", ideal_text),
            ("seconds", survey.seconds, "span", latency_text(survey.seconds)),
            ("input_tokens", tokens, "input tokens", f"{tokens:,}"),
            ("output_tokens", survey.output_tokens, "output tokens", f"{survey.output_tokens:,}"),
            ("longest_request_blocks", longest, "longest request, blocks", f"{longest:,}"),
        ]

    def _sessions(self) -> dict[str, Any]:
        """Return when sessions return, and what a turn adds to the one before."""
        found = self.returns.sessions
        return {
            "number": found.sessions,
            "turns": _quantiles(found.turns),
            "gap_seconds": _quantiles(found.gaps),
            "added_blocks": _quantiles(found.added),
            "kept_share": found.kept,
        }

    def _returns(self) -> list[tuple[str, str]]:
        """Return when sessions and blocks return as rows of a table."""
        rows, kept, found = [], self.returns.blocks, self._sessions()
        if found["number"]:
            turns = _joined(found["turns"], rounded)
            rows += [
                ("sessions", f"{found['number']:,}"),
                ("turns of a session: median, 90 %, most", turns),
            ]
        if found["kept_share"] is not None:
            gaps, added = _joined(found["gap_seconds"], latency_text), found["added_blocks"]
            rows += [
                ("gap between two turns: median, 90 %, most", gaps),
                ("blocks that a next turn adds: median, 90 %, most", _joined(added, rounded)),
                ("share of a turn that the next repeats", percent_text(found["kept_share"])),
            ]
        if self.returns.has_times:
            rows += [
                (f"hit ratio where blocks are kept {seconds // 60} min", percent_text(ratio))
                for seconds, ratio in zip(kept.seconds, kept.ratios, strict=True)
                if seconds < self.survey.seconds  # beyond the trace's span nothing is dropped
            ]
        return rows


_NO_SIZE = {True: "no size fits all requests", False: "not known: no lengths"}


def _quantiles(values: Any) -> list[float] | None:
    """Return the median, the 90th percentile and the greatest; None if there is no value."""
    if not len(values):
        return None
    return [float(value) for value in np.quantile(values, (0.5, 0.9, 1.0), method="inverted_cdf")]


def _joined(values: list[float] | None, text: Callable[[float], str]) -> str:
    return ", ".join(map(text, values or ()))
