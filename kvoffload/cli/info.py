"""``kvoffload info``: the contents of a trace."""

from __future__ import annotations

import click

from kvoffload.advise.units import percent_text
from kvoffload.traces import Survey

from ._options import examples, json_option, reading_options, traces_argument
from ._output import check_outputs
from ._sources import Reading, Source, note_order, open_source, order_object
from ._terminal import Column, note_bad_lines, print_json, print_tables, progress_bar


@click.command(
    epilog=examples(
        "kvoffload info trace.jsonl",
        "kvoffload info lookup_hashes/ --model-name Qwen/Qwen3-8B --json",
    )
)
@traces_argument
@reading_options
@json_option
def info(traces: tuple[str, ...], *, reading: Reading, as_json: bool, quiet: bool) -> None:
    """Describe a trace: requests, blocks and their reuse.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    them or a pattern; several are merged by time. - is standard input.
    """
    check_outputs(traces)
    with open_source(traces, reading) as source:
        with progress_bar("reading", reading.limit, quiet=quiet) as progress:
            survey = Survey.of(source.requests, progress=progress)
        note_order(survey, source, quiet=quiet)
        if as_json:
            print_json(as_object(source, survey))
            return
        names, values = zip(*as_rows(source, survey), strict=True)
        title = [source.name] if source.ids_text is None else [source.name, source.ids_text]
        print_tables(title, [Column("", [*names], numeric=False)], [[Column("", [*values])]])
        note_bad_lines(source.bad_lines, quiet=quiet)


def as_object(source: Source, survey: Survey) -> dict[str, object]:
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
        "block_tokens": source.block_tokens or survey.block_tokens,
        "ideal_hit_ratio": survey.ideal_hit_ratio,
        "seconds": survey.seconds,
        "input_tokens": survey.input_tokens,
        "output_tokens": survey.output_tokens,
        "longest_request_blocks": survey.longest,
        "bad_lines": source.bad_lines,
        **order_object(survey),
    }


def as_rows(source: Source, survey: Survey) -> list[tuple[str, str]]:
    """Return the survey as rows of a table."""
    unique = survey.unique_blocks or 0
    size = source.block_tokens or survey.block_tokens
    return [
        ("format", source.format or ""),
        ("requests", f"{survey.requests:,}"),
        ("blocks", f"{survey.blocks:,}"),
        ("unique blocks", f"{unique:,}"),
        ("reuse, blocks per unique block", f"{survey.blocks / unique:.2f}" if unique else "none"),
        ("block size, tokens", _NO_SIZE[survey.input_tokens > 0] if size is None else f"{size:,}"),
        ("ideal hit ratio, cache without bounds", percent_text(survey.ideal_hit_ratio)),
        ("span", duration(survey.seconds)),
        ("input tokens", f"{survey.input_tokens:,}"),
        ("output tokens", f"{survey.output_tokens:,}"),
        ("longest request, blocks", f"{survey.longest:,}"),
    ]


_NO_SIZE = {True: "no size fits all requests", False: "not known: no lengths"}


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([*[f"{hours:,} h"] * bool(hours), f"{minutes} min {rest} s"])
