"""``kvoffload info``: the contents of a trace."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from kvoffload.advise.answer import column
from kvoffload.advise.units import percent_text
from kvoffload.traces import Survey
from kvoffload.traces.breaks import PrefixBreaks
from kvoffload.traces.returns import Returns

from ._breaks import Broken, show_text_option
from ._options import (
    block_tokens_option,
    examples,
    json_option,
    read_picture,
    reading_options,
    traces_argument,
    value_of,
)
from ._output import check_outputs, check_plot, write_files
from ._sources import BlockTokens, Reading, Source, note_order, open_source, order_object
from ._terminal import note_bad_lines, print_json, print_tables, progress_bar


@click.command(
    epilog=examples(
        "kvoffload info trace.jsonl",
        "kvoffload info lookup_hashes/ --model-name Qwen/Qwen3-8B --json",
    )
)
@traces_argument
@click.option(
    "--plot",
    metavar="FILE",
    callback=value_of(read_picture),
    help="Draw the hit ratio over the time for which blocks are kept: .png, .svg or .pdf.",
)
@block_tokens_option
@show_text_option
@reading_options
@json_option
def info(
    traces: tuple[str, ...],
    *,
    plot: str | None,
    block_tokens: int | None,
    show_text: bool,
    reading: Reading,
    as_json: bool,
) -> None:
    """Describe a trace: requests, blocks and their reuse, and when sessions return.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input.
    """
    check_outputs(traces, {"--plot": plot})
    check_plot(plot)
    returns, sample = Returns(), PrefixBreaks()
    with open_source(traces, reading, block_tokens, sample) as source:
        with progress_bar("reading", reading.limit) as progress:
            shown = source.watched(progress)
            survey = Survey.of(
                source.requests, returns=returns, block_tokens=block_tokens, progress=shown
            )
        size = BlockTokens.of(source, survey, block_tokens)
        note_order(survey, source)
        ratio = survey.ideal_hit_ratio
        broken = Broken.of(source, sample, ratio, shows_text=show_text)

        def draw(path: str) -> None:
            from ._plot import draw_kept

            draw_kept(source.name, returns.blocks, path)

        faults = write_files((plot, draw))
        if as_json:
            print_json(
                as_object(source, survey, size) | returns_object(returns) | broken.as_object()
            )
        else:
            _print(source, survey, size, returns, broken)
            note_bad_lines(source.bad_lines)
    if faults:
        raise faults[0]


def _print(
    source: Source, survey: Survey, size: BlockTokens, returns: Returns, broken: Broken
) -> None:
    rows = as_rows(source, survey, size) + broken.rows() + returns_rows(returns, survey.seconds)
    names, values = zip(*rows, strict=True)
    print_tables(source.names, [column("", [*names], numeric=False)], [[column("", [*values])]])


def as_object(source: Source, survey: Survey, size: BlockTokens) -> dict[str, object]:
    """Return the survey as the object that ``--json`` prints."""
    return {
        "trace": source.name,
        "files": source.files,
        "id_spaces": source.id_spaces,
        "format": source.format,
        "requests": survey.requests,
        "blocks": survey.blocks,
        "unique_blocks": survey.unique_blocks,
        "reuse": survey.blocks / survey.unique_blocks if survey.unique_blocks else 0.0,
        "block_tokens": size.count,
        "ideal_hit_ratio": survey.ideal_hit_ratio,
        "seconds": survey.seconds,
        "input_tokens": _input_tokens(survey, size),
        "output_tokens": survey.output_tokens,
        "longest_request_blocks": survey.longest,
        "bad_lines": source.bad_lines,
        "types": dict(survey.types.most_common()),
        "most_turns": survey.most_turns or None,
        **order_object(survey),
    }


def as_rows(source: Source, survey: Survey, size: BlockTokens) -> list[tuple[str, str]]:
    """Return the survey as rows of a table."""
    unique = survey.unique_blocks or 0
    tokens = _NO_SIZE[survey.input_tokens > 0] if size.count is None else f"{size.count:,}"
    return [
        ("format", source.format or ""),
        ("requests", f"{survey.requests:,}"),
        ("blocks", f"{survey.blocks:,}"),
        ("unique blocks", f"{unique:,}"),
        ("reuse, blocks per unique block", f"{survey.blocks / unique:.2f}" if unique else "none"),
        ("block size, tokens", f"{tokens}{' (as given)' * (size.origin == 'option')}"),
        ("ideal hit ratio, cache without bounds", percent_text(survey.ideal_hit_ratio)),
        ("span", duration(survey.seconds)),
        ("input tokens", f"{_input_tokens(survey, size):,}"),
        ("output tokens", f"{survey.output_tokens:,}"),
        ("longest request, blocks", f"{survey.longest:,}"),
        *(
            (f"requests of type {kind}", f"{count:,} ({percent_text(count / survey.requests)})")
            for kind, count in survey.types.most_common()
        ),
        *([("turns, the most stated", f"{survey.most_turns:,}")] if survey.most_turns else []),
    ]


def _input_tokens(survey: Survey, size: BlockTokens) -> int:
    """Return the tokens of all prompts; without lengths, those of blocks of a given size."""
    return survey.blocks * (size.count or 0) if size.origin == "option" else survey.input_tokens


_NO_SIZE = {True: "no size fits all requests", False: "not known: no lengths"}


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([*[f"{hours:,} h"] * bool(hours), f"{minutes} min {rest} s"])


def returns_object(returns: Returns) -> dict[str, object]:
    """Return when sessions and blocks return as fields of ``--json``."""
    counter = returns.sessions
    sessions = {
        "number": counter.sessions,
        "turns": _quantiles(counter.turns),
        "gap_seconds": _quantiles(counter.gaps),
        "added_blocks": _quantiles(counter.added),
        "kept_share": counter.kept,
    }
    kept = zip(returns.blocks.seconds, returns.blocks.ratios, strict=True)
    return {
        "sessions": sessions if counter.sessions else None,
        "kept": [{"seconds": seconds, "hit_ratio": ratio} for seconds, ratio in kept]
        if returns.has_times
        else None,
    }


def returns_rows(returns: Returns, span: float) -> list[tuple[str, str]]:
    """Return when sessions and blocks return as rows of a table; the trace spans `span` s."""
    rows = []
    counter = returns.sessions
    if counter.sessions:
        rows.append(("sessions", f"{counter.sessions:,}"))
        turns = _quantiles(counter.turns)
        rows.append(("turns of a session: median, 90 %, most", _joined(turns, "{:,.0f}".format)))
    if counter.kept is not None:
        gaps, added = _quantiles(counter.gaps), _quantiles(counter.added)
        rows += [
            ("gap between two turns: median, 90 %, most", _joined(gaps, duration)),
            ("blocks that a next turn adds: median, 90 %, most", _joined(added, "{:,.0f}".format)),
            ("share of a turn that the next repeats", percent_text(counter.kept)),
        ]
    if returns.has_times:
        counted = zip(returns.blocks.seconds, returns.blocks.ratios, strict=True)
        rows += [
            (f"hit ratio where blocks are kept {seconds // 60} min", percent_text(ratio))
            for seconds, ratio in counted
            if seconds < span  # beyond the trace's span nothing is dropped
        ]
    return rows


def _quantiles(values: Any) -> list[float] | None:
    """Return the median, the 90th percentile and the greatest; None if there is no value."""
    if not len(values):
        return None
    return [float(value) for value in np.quantile(values, (0.5, 0.9, 1.0), method="inverted_cdf")]


def _joined(values: list[float] | None, text: Any) -> str:
    return ", ".join(map(text, values or ()))
