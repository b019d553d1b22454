"""``kvoffload workload``: the requests of a trace for a benchmark of an engine."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial

import click

from kvoffload.replay import Selection
from kvoffload.traces import write_prompts
from kvoffload.traces.outputs import open_output

from . import _options
from ._output import check_output_option, output_option, write_output
from ._sources import BlockTokens, Reading, note_order, open_source
from ._terminal import note, note_bad_lines


@click.command(
    epilog=_options.examples(
        "kvoffload workload trace.jsonl --limit 500 --output prompts.jsonl",
        "vllm bench serve --dataset-name custom --dataset-path prompts.jsonl \\",
        "    --num-prompts 500 --custom-output-len -1 --disable-shuffle \\",
        "    --skip-chat-template --no-oversample --backend vllm --model MODEL",
    )
)
@_options.traces_argument
@output_option("")
@_options.block_tokens_option
@_options.full_blocks_option
@_options.reading_options
def workload(
    traces: tuple[str, ...],
    *,
    output: str,
    block_tokens: int | None,
    full_blocks: bool,
    reading: Reading,
) -> None:
    """Write a trace as prompts for vllm bench serve.

    They serve to compare a prediction with an engine.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input.

    The prompts are JSON Lines for its custom dataset: made-up words, about one token each. Two
    prompts are equal exactly as far as their requests share blocks. Times are not kept: vllm bench
    serve sends the prompts at --request-rate, in the order of the lines with --disable-shuffle.
    """
    check_output_option(traces, output)
    reading = replace(reading, drawn=secrets.token_hex())  # the words are made of ids
    with open_source(traces, reading, block_tokens) as source:
        survey = source.survey("reading", reading.limit, unique=False, block_tokens=block_tokens)
        if source.ids_text is not None:
            note(source.ids_text)
        note_bad_lines(source.trace.bad_lines)
        note_order(survey, source)
        known = BlockTokens.of(source, survey, block_tokens)
        if known.count is None:
            raise click.UsageError("--block-tokens is needed: no block size fits all requests")
        requests = source.requests
        if full_blocks:
            requests = Selection(requests, full_block_tokens=known.count, cut_length=True)
        try:
            write = partial(write_prompts, block_tokens=known.count)
            write_output(requests, output, write, open_output)
        except OverflowError as error:
            raise click.UsageError(str(error)) from None
