"""``kvoffload advise``: from a trace to a configuration."""

from __future__ import annotations

import os
import shlex

import click

from kvoffload.advise import ModelShape, Setup, model_names, model_shape
from kvoffload.advise import advise as advise_on
from kvoffload.advise.models import DTYPE_BYTES
from kvoffload.advise.report import require_report, write_report
from kvoffload.advise.subject import Subject
from kvoffload.policies import registry
from kvoffload.replay import CEILINGS, Selection
from kvoffload.traces import Survey
from kvoffload.traces.errors import printable
from kvoffload.traces.lines import STDIN

from ._advice_result import as_object, print_advice
from ._options import (
    MAX_BLOCKS,
    Capacity,
    device_memory_option,
    jobs_option,
    json_option,
    policy_option,
    read_capacity,
    read_size,
    reading_options,
    usable_cores,
    value_of,
    values_of,
)
from ._output import check_outputs
from ._sources import BlockSize, open_source
from ._terminal import note, print_json, progress_bar


@click.command()
@click.argument("trace")
@click.option(
    "--capacity",
    "capacities",
    required=True,
    multiple=True,
    metavar="SIZE",
    callback=values_of(read_capacity),
    help="Host memory for KV blocks: a size (512GiB), blocks, or a share of the unique blocks "
    "(5%). Half, twice and four times it are compared; of several, as a comma list or repeated, "
    "the first is advised on and the others are compared.",
)
@policy_option(",".join(registry.names()))
@click.option(
    "--model",
    metavar="MODEL",
    callback=value_of(model_shape),
    help=f"Model whose KV cache is offloaded: {', '.join(model_names())}.",
)
@click.option(
    "--kv-bytes-per-token",
    metavar="SIZE",
    callback=value_of(read_size),
    help="Bytes of KV cache per token, for a model that is not in the list.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    help="Element type of the model's KV cache.  [default: bfloat16]",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    help="Workers that a layer of the model is divided among.  [default: 1]",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    help="Tokens per block; inferred where one size fits all requests.",
)
@device_memory_option
@click.option(
    "--report",
    metavar="FILE",
    help="Write the advice as one HTML page that needs no other file.",
)
@jobs_option
@reading_options
@json_option
def advise(
    trace: str,
    *,
    capacities: tuple[Capacity, ...],
    policies: tuple[str, ...],
    model: ModelShape | None,
    kv_bytes_per_token: int | None,
    kv_cache_dtype: str | None,
    tensor_parallel: int | None,
    block_tokens: int | None,
    device_memory: Capacity | None,
    report: str | None,
    jobs: int | None,
    format: str | None,
    limit: int | None,
    skip_bad: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say which policy to take, and what more memory would buy.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard; - is standard
    input. It is replayed through every policy, in the memory given, in half of it, twice and four
    times it, or in each that is given. The simplest policy within noise of the best is
    recommended, as configuration that can be pasted, unless the trace is too short or has no reuse.
    """
    token_bytes = _token_bytes(model, kv_bytes_per_token, kv_cache_dtype, tensor_parallel)
    check_outputs(trace, {"--report": report})
    if report is not None:
        require_report()
    sizes_asked = [*capacities, *([device_memory] if device_memory else [])]
    needs_unique = any(asked.percent is not None for asked in sizes_asked)
    with open_source(trace, format=format, skip_bad=skip_bad, limit=limit) as source:
        with progress_bar("reading", limit, quiet=quiet) as progress:
            survey = Survey.of(
                source.requests, unique=needs_unique, block_tokens=block_tokens, progress=progress
            )
        if source.bad_lines:
            note(f"{source.bad_lines:,} bad lines passed over", quiet=quiet)
        block_size = BlockSize.of(source, survey, block_tokens)
        block_tokens = block_size.tokens
        if block_tokens is None:
            raise click.UsageError(f"--block-tokens is needed: {_why_no_block_size(survey)}")
        full = survey.block_lengths.fits(block_tokens)
        setup = _setup(
            capacities,
            device_memory,
            survey.unique_blocks,
            block_tokens=block_tokens,
            token_bytes=token_bytes,
            full_blocks=full,
            policies=tuple(policy for policy in policies if policy not in CEILINGS),
        )
        requests = Selection(source.requests, full_block_tokens=block_tokens if full else None)
        with progress_bar("replaying", setup.replays, quiet=quiet, unit="replays") as progress:
            advice = advise_on(requests, setup, jobs=jobs or usable_cores(), progress=progress)
        dtype = kv_cache_dtype or "bfloat16"
        command = _command(
            trace,
            setup,
            model,
            dtype,
            tensor_parallel,
            report=report,
            format=format,
            limit=limit,
            skip_bad=skip_bad,
        )
        subject = Subject(
            source.name, advice, model, dtype, command, block_size.origin or "lengths"
        )
        fault = None if report is None else _write(subject, report)
        if as_json:
            print_json(as_object(subject))
        else:
            print_advice(subject)
        if fault is not None:
            raise fault


def _write(subject: Subject, report: str) -> OSError | None:
    """Write the page; return what went wrong, which must not keep the advice from the user."""
    try:
        write_report(subject, report)
    except OSError as error:
        return error
    return None


def _why_no_block_size(survey: Survey) -> str:
    if not survey.input_tokens:
        return "the trace does not say how long its requests are"
    mean = survey.input_tokens / (survey.blocks or 1)
    return f"no block size fits all requests; they have {mean:,.0f} tokens a block on average"


def _token_bytes(
    model: ModelShape | None, given: int | None, dtype: str | None, tensor_parallel: int | None
) -> int:
    if (model is None) == (given is None):
        raise click.UsageError("exactly one of --model and --kv-bytes-per-token must be given")
    if model is None:
        for option, value in (("kv-cache-dtype", dtype), ("tensor-parallel", tensor_parallel)):
            if value is not None:
                raise click.UsageError(f"--{option} must go with --model, got {value} without it")
        return given or 0
    try:
        return model.bytes_per_token(dtype or "bfloat16", tensor_parallel or 1)
    except ValueError as error:
        raise click.UsageError(f"--tensor-parallel: {error}") from None


def _command(
    trace: str,
    setup: Setup,
    model: ModelShape | None,
    dtype: str,
    tensor_parallel: int | None,
    *,
    report: str | None,
    format: str | None,
    limit: int | None,
    skip_bad: bool,
) -> str:
    """Return the command that writes the same page, every choice that it rests on written out."""
    is_like_an_option = trace.startswith("-") and trace != STDIN
    words = ["kvoffload", "advise", *[trace] * (not is_like_an_option)]
    given = [setup.memory, *(size for size in setup.others if size != setup.memory)]
    words += ["--capacity", ",".join(map(_exact, given))]
    if setup.policies != registry.names():
        words += ["--policy", ",".join(setup.policies)]
    if model is None:
        words += ["--kv-bytes-per-token", str(setup.token_bytes)]
    else:
        words += ["--model", model.name]
        words += ["--kv-cache-dtype", dtype] if dtype != "bfloat16" else []
        words += ["--tensor-parallel", str(tensor_parallel)] if tensor_parallel else []
    words += ["--device-memory", _exact(setup.device_memory)] if setup.device_memory else []
    words += ["--block-tokens", str(setup.block_tokens)]
    words += ["--format", format] if format else []
    words += ["--limit", str(limit)] if limit else []
    words += ["--skip-bad"] if skip_bad else []
    words += ["--report", report] if report else []
    words += ["--", trace] if is_like_an_option else []
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    """Return a word as a shell reads it; bytes that cannot be shown are escaped."""
    if printable(word) == word:
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, os.fsencode(word))) + "'"


def _escaped(byte: int) -> str:
    character = chr(byte)
    if character in "\\'":
        return f"\\{character}"
    return character if " " <= character <= "~" else f"\\{byte:03o}"


def _exact(size: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size % 2**power == 0:
            return f"{size >> power}{unit}"
    return f"{size}B"


def _setup(
    capacities: tuple[Capacity, ...],
    device_memory: Capacity | None,
    unique_blocks: int | None,
    *,
    block_tokens: int,
    token_bytes: int,
    full_blocks: bool,
    policies: tuple[str, ...],
) -> Setup:
    """Turn what was asked into bytes.

    Raises
    ------
    click.UsageError
        If a size comes to no block, or to more than a manager can have, or if there is no policy.
    """
    if not policies:
        raise click.UsageError("--policy must name a policy, got ceilings only")
    block_bytes = block_tokens * token_bytes

    def size(asked: Capacity, option: str, least: int) -> int:
        blocks = asked.resolve(block_bytes, unique_blocks, option, least)
        return blocks * block_bytes if asked.size is None else asked.size

    memories = [size(asked, "--capacity", 1) for asked in capacities]
    setup = Setup(
        memory=memories[0],
        block_tokens=block_tokens,
        token_bytes=token_bytes,
        device_memory=0 if device_memory is None else size(device_memory, "--device-memory", 0),
        full_blocks=full_blocks,
        policies=tuple(dict.fromkeys(policies)),
        others=tuple(memories[1:]),
    )
    least, most = min(setup.memories()), max(setup.memories())
    if setup.capacity(least) < 1 or setup.capacity(most) > MAX_BLOCKS:
        raise click.UsageError(
            f"--capacity must be 2 ... {MAX_BLOCKS // 4} blocks of {block_bytes:,} bytes, "
            f"got {setup.memory:,} bytes"
        )
    return setup
