"""``kvoffload advise``: from a trace to a configuration."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import click

from kvoffload._printable import printable
from kvoffload.advise import (
    Accelerator,
    Advice,
    Disk,
    Engine,
    ModelShape,
    RecordedTrace,
    Setup,
    accelerator_names,
    details,
    engine_of,
)
from kvoffload.advise import accelerator as accelerator_of
from kvoffload.advise import advise as advise_on
from kvoffload.advise.advice import DEVICE_SHARES
from kvoffload.advise.report import require_report, write_report
from kvoffload.advise.retention import RetentionCell, compared, retentions
from kvoffload.advise.subject import Subject
from kvoffload.policies import registry
from kvoffload.replay import HintOptions, Selection
from kvoffload.replay.groups import STEP_TOKENS
from kvoffload.replay.offline import CEILINGS
from kvoffload.traces import Survey
from kvoffload.traces.lines import STDIN

from ._advice_result import as_object, print_advice
from ._hint_options import (
    hint_options,
    hint_words,
    hints_object,
    hints_text,
    told_by_trace,
)
from ._model_options import CacheOptions, Interval, model_options, unique_chunks
from ._options import (
    MAX_BLOCKS,
    Capacity,
    block_tokens_option,
    device_memory_option,
    examples,
    jobs_option,
    json_option,
    policy_option,
    read_capacity,
    read_policy,
    read_size,
    reading_options,
    step_tokens_option,
    traces_argument,
    usable_cores,
    value_of,
    values_of,
)
from ._output import check_outputs
from ._sources import (
    BlockTokens,
    Reading,
    Source,
    check_order,
    note_order,
    open_source,
    order_object,
)
from ._terminal import note_bad_lines, print_json, progress_bar

DEFAULT_ACCELERATOR = "h100"
"""Accelerator whose cache is assumed where a model is named and no accelerator is."""


def read_rate(text: str) -> float:
    """Read a number above 0."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"must be a number > 0, got {text!r}")
    return rate


@click.command(
    epilog=examples(
        "kvoffload advise trace.jsonl --capacity 64GiB --model Qwen/Qwen3-8B",
        "kvoffload advise logs/ --capacity 1TiB --model path/config.json",
        "kvoffload advise trace.jsonl --capacity 5% --model glm-4.5 --disk 4TB",
    )
)
@traces_argument
@click.option(
    "--capacity",
    "capacities",
    required=True,
    multiple=True,
    metavar="SIZE",
    callback=values_of(read_capacity),
    help="Host memory for KV blocks: a size (512GiB), blocks, or a share of the unique blocks "
    "(5%). Half, twice and four times it are compared; of several, comma-separated or "
    "repeated, the first is advised on and the others are compared.",
)
@policy_option(",".join(registry.names()))
@model_options
@click.option(
    "--kv-bytes-per-token",
    metavar="BYTES",
    callback=value_of(read_size),
    help="Bytes of KV cache per token, for any other model; known from LMCache's log.",
)
@block_tokens_option
@step_tokens_option(STEP_TOKENS, "")
@device_memory_option
@click.option(
    "--accelerator",
    metavar="NAME",
    callback=value_of(accelerator_of),
    help="Accelerator of the model, for the size of its own cache and for times: "
    f"{', '.join(accelerator_names())}.",
)
@click.option(
    "--prefill-tokens-per-second",
    metavar="RATE",
    callback=value_of(read_rate),
    help="Measured prefill of all workers; estimated from --model and --accelerator if not given.",
)
@click.option(
    "--link-bandwidth",
    metavar="SIZE",
    callback=value_of(read_size),
    help="Measured bytes per second between accelerators and host memory, one way, all links "
    "together (50GB); estimated from --accelerator if not given.",
)
@click.option(
    "--disk",
    metavar="SIZE",
    callback=value_of(read_size),
    help="Size of a disk behind host memory, such as 2TB; its hits and writes are added.",
)
@click.option(
    "--disk-policy",
    "disk_policies",
    multiple=True,
    metavar="POLICY",
    callback=values_of(read_policy),
    help="Policies of the disk to compare, comma-separated or repeated.  "
    "[default: lru,hit-density]",
)
@click.option(
    "--report", metavar="FILE", help="Write the advice as one HTML page that needs no other file."
)
@click.option(
    "--unchained-ids",
    is_flag=True,
    help="Advise on a trace whose ids are not prefix-chained, where blocks are reused at any place "
    "of a prompt.",
)
@hint_options
@jobs_option
@reading_options
@json_option
def advise(
    traces: tuple[str, ...],
    *,
    capacities: tuple[Capacity, ...],
    policies: tuple[str, ...],
    model: ModelShape | None,
    kv_bytes_per_token: int | None,
    kv_cache_dtype: str | None,
    tensor_parallel: int | None,
    retention: Interval | None,
    block_tokens: int | None,
    step_tokens: int,
    device_memory: Capacity | None,
    accelerator: Accelerator | None,
    prefill_tokens_per_second: float | None,
    link_bandwidth: int | None,
    disk: int | None,
    disk_policies: tuple[str, ...],
    report: str | None,
    unchained_ids: bool,
    hints: HintOptions | None,
    jobs: int | None,
    reading: Reading,
    as_json: bool,
    quiet: bool,
) -> None:
    """Recommend a policy for a trace, a model and a memory.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    them or a pattern; several are merged by time. - is standard input.

    The trace is replayed through every policy, in the memory given, in half of it, twice and four
    times it, or in each that is given. The simplest policy within noise of the best is recommended,
    as configuration that can be pasted, and compared with vLLM's default and with no offloading.
    There is no recommendation if the trace is too short, has no reuse, or no policy saves more
    prefill than moving blocks takes. With --model and without --device-memory there are several
    answers side by side: behind all of the cache that the accelerator typically has, behind a half
    and a quarter of it, and without one.
    """
    engine = engine_of(
        model,
        accelerator or (accelerator_of(DEFAULT_ACCELERATOR) if model else None),
        workers=tensor_parallel,
        prefill_rate=prefill_tokens_per_second,
        link_bandwidth=link_bandwidth,
    )
    cache = CacheOptions(model, kv_cache_dtype, tensor_parallel, retention, step_tokens)
    size = _TokenSize(cache.on_workers(engine.workers), kv_bytes_per_token)
    size.check()
    if disk is not None and size.cache.layout() is not None:
        raise click.UsageError(
            "--disk must go with a model whose layers all keep every token, got "
            f"{size.cache.model and size.cache.model.name}, which has windows or states: leave "
            "--disk out for the advice on host memory alone"
        )
    if disk_policies and disk is None:
        raise click.UsageError(f"--disk-policy must go with --disk, got {disk_policies[0]} without")
    check_outputs(traces, {"--report": report})
    if report is not None:
        require_report()
    with open_source(traces, reading) as source:
        with progress_bar("reading", reading.limit, quiet=quiet) as progress:
            survey = Survey.of(
                source.requests, unique=False, block_tokens=block_tokens, progress=progress
            )
        note_bad_lines(source.bad_lines, quiet=quiet)
        if not unchained_ids:
            check_order(survey, source)
        note_order(survey, source, quiet=quiet)
        known = BlockTokens.of(source, survey, block_tokens)
        if known.count is None:
            raise click.UsageError(f"--block-tokens is needed: {_why_no_block_tokens(survey)}")
        full = survey.block_lengths.fits(known.count)
        with told_by_trace():
            recorded = RecordedTrace.of(
                Selection(source.requests, full_block_tokens=known.count if full else None),
                hints=hints,
            )
        told = recorded.trace.hints
        setup = _setup(
            capacities,
            device_memory,
            recorded.trace.unique_blocks,
            block_tokens=known.count,
            token_bytes=size.of(source, known.count),
            cache=size.cache,
            full_blocks=full,
            policies=tuple(policy for policy in policies if policy not in CEILINGS),
            step_tokens=step_tokens,
        )
        advice, alone, shares = _by_device_memory(
            recorded,
            replace(setup, engine=engine),
            0 if device_memory else engine.device_memory,
            jobs=jobs or usable_cores(),
            quiet=quiet,
        )
        behind = None if disk is None else Disk(disk, disk_policies or ("lru", "hit-density"))
        subject = Subject(
            source.name,
            advice,
            model,
            size.cache.dtype,
            _Command(
                traces,
                setup,
                size,
                engine if accelerator or not model else replace(engine, accelerator=None),
                behind,
                report,
                reading,
                unchained_ids,
                hints,
            ).text(),
            known.origin or "lengths",
            alone,
            details(recorded, advice, behind),
            source.files,
            source.id_spaces,
            source.ids_text,
            _retentions(recorded, advice, jobs=jobs or usable_cores(), quiet=quiet),
            shares,
            None if hints is None or told is None else hints_text(hints, told),
        )
        fault = None if report is None else _write(subject, report)
        if as_json:
            said = {"hints": hints_object(hints, told)}
            print_json({**as_object(subject), **said, **order_object(survey)})
        else:
            print_advice(subject)
        if fault is not None:
            raise fault


def _by_device_memory(
    recorded: RecordedTrace, setup: Setup, typical: int, *, jobs: int, quiet: bool
) -> tuple[Advice, Advice | None, tuple[Advice, ...]]:
    """Return the advice; where a cache is assumed, that without one, and with parts of it.

    `typical` is the size of the assumed cache where none was given, bytes; 0 for none.
    """
    setups = [setup]
    if setup.capacity(typical):
        whole = replace(setup, device_memory=typical, device_is_assumed=True)
        parts = [
            replace(whole, device_memory=int(typical * share), others=(setup.memory,))
            for share in DEVICE_SHARES
            if setup.capacity(int(typical * share))
        ]
        setups = [whole, setup, *parts]
    total = sum(one.replays for one in setups)
    found: list[Advice] = []
    with progress_bar("replaying", total, quiet=quiet, unit="replays") as progress:
        for one in setups:
            before = sum(other.setup.replays for other in found)

            def report_progress(done: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done)

            found.append(advise_on(recorded, one, jobs=jobs, progress=report_progress))
    return found[0], found[1] if len(found) > 1 else None, tuple(found[2:])


def _retentions(
    recorded: RecordedTrace, advice: Advice, *, jobs: int, quiet: bool
) -> tuple[RetentionCell, ...]:
    """Return the retention intervals compared; none where they make no difference."""
    total = len(compared(advice.setup.chunks))
    if not total:
        return ()
    with progress_bar("comparing intervals", total, quiet=quiet, unit="intervals") as progress:
        return tuple(retentions(recorded, advice, jobs=jobs, progress=progress))


def _write(subject: Subject, report: str) -> OSError | None:
    """Write the page; return the error, if any, so that the advice is still printed."""
    try:
        write_report(subject, report)
    except OSError as error:
        return error
    return None


def _why_no_block_tokens(survey: Survey) -> str:
    if not survey.input_tokens:
        return "the trace does not say how long its requests are"
    mean = survey.input_tokens / (survey.blocks or 1)
    return f"no block size fits all requests; they have {mean:,.0f} tokens per block on average"


@dataclass(frozen=True, slots=True)
class _TokenSize:
    """The options that give the bytes of KV cache per token, or per slot."""

    cache: CacheOptions
    given: int | None

    def check(self) -> None:
        """Refuse options that contradict each other or would have no effect."""
        if self.cache.model is not None and self.given is not None:
            raise click.UsageError("at most one of --model and --kv-bytes-per-token must be given")
        self.cache.check()

    def of(self, source: Source, block_tokens: int) -> int:
        """Return the bytes per token; 0 for a model with groups, which has none."""
        if self.cache.layout() is not None:
            return 0
        known = self.cache.token_bytes()
        if known is not None:
            return known
        if self.given is not None:
            return self.given
        if source.block_bytes is None or source.block_tokens is None:
            raise click.UsageError(
                "one of --model and --kv-bytes-per-token must be given: the trace does not say "
                "how many bytes its blocks have"
            )
        return max(1, source.block_bytes // block_tokens)


@dataclass(frozen=True, slots=True)
class _Command:
    """The command that writes the same page, with every default written out."""

    traces: Sequence[str]
    setup: Setup
    size: _TokenSize
    engine: Engine
    disk: Disk | None
    report: str | None
    reading: Reading
    unchained_ids: bool
    hints: HintOptions | None

    def text(self) -> str:
        """Return it quoted for a shell."""
        are_like_options = any(name.startswith("-") and name != STDIN for name in self.traces)
        words = ["kvoffload", "advise", *([] if are_like_options else self.traces)]
        words += self._sizes()
        words += self._engine()
        reading = self.reading
        for option, value in (
            ("--disk", self.disk and _exact(self.disk.size)),
            ("--disk-policy", self.disk and ",".join(self.disk.policies)),
            ("--format", reading.format),
            ("--model-name", reading.model_name),
            ("--limit", reading.limit and str(reading.limit)),
            ("--report", self.report),
        ):
            words += [option, value] if value else []
        words += ["--skip-bad"] if reading.skip_bad else []
        words += ["--same-ids"] if reading.same_ids else []
        words += ["--unchained-ids"] if self.unchained_ids else []
        words += hint_words(self.hints)
        words += ["--", *self.traces] if are_like_options else []
        return " ".join(map(_shell_word, words))

    def _sizes(self) -> list[str]:
        setup, size = self.setup, self.size
        given = [setup.memory, *(other for other in setup.others if other != setup.memory)]
        words = ["--capacity", ",".join(map(_exact, given))]
        if setup.policies != registry.names():
            words += ["--policy", ",".join(setup.policies)]
        cache = size.cache
        if cache.model is None:
            words += ["--kv-bytes-per-token", str(setup.token_bytes)]
        else:
            words += ["--model", cache.model.name]
            words += ["--kv-cache-dtype", cache.dtype] if cache.dtype != "bfloat16" else []
            workers = cache.tensor_parallel
            words += ["--tensor-parallel", str(workers)] if workers else []
            words += ["--retention", str(cache.retention)] if cache.retention else []
        if setup.device_memory:
            words += ["--device-memory", _exact(setup.device_memory)]
        words += ["--block-tokens", str(setup.block_tokens)]
        if setup.step_tokens not in (None, STEP_TOKENS):
            words += ["--step-tokens", str(setup.step_tokens)]
        return words

    def _engine(self) -> list[str]:
        engine = self.engine
        words = ["--accelerator", engine.accelerator.name] if engine.accelerator else []
        if engine.prefill_given:
            words += ["--prefill-tokens-per-second", f"{engine.prefill_rate:g}"]
        if engine.link_given:
            words += ["--link-bandwidth", _exact(int(engine.link_bandwidth))]
        return words


def _shell_word(word: str) -> str:
    """Return a word quoted for a shell; bytes that cannot be shown are escaped."""
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
    capacities: Iterable[Capacity],
    device_memory: Capacity | None,
    unique_blocks: int,
    *,
    block_tokens: int,
    token_bytes: int,
    cache: CacheOptions,
    full_blocks: bool,
    policies: tuple[str, ...],
    step_tokens: int,
) -> Setup:
    """Return the setup, with all sizes in bytes."""
    if not policies:
        raise click.UsageError("--policy must name a policy, got ceilings only")
    groups = cache.groups(block_tokens, token_bytes)
    block_bytes, unit = groups.slot_bytes, groups.slot_name
    unique = unique_chunks(groups, unique_blocks)

    def size(asked: Capacity, option: str, least: int) -> int:
        blocks = asked.resolve(block_bytes, unique, option, least, unit=unit)
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
        groups=groups,
        step_tokens=step_tokens,
    )
    least, most = min(setup.memories()), max(setup.memories())
    if setup.capacity(least) < 1 or setup.capacity(most) > MAX_BLOCKS:
        raise click.UsageError(
            f"--capacity must be 2 ... {MAX_BLOCKS // 4} {setup.kept_in} of {block_bytes:,} bytes, "
            f"got {setup.memory:,} bytes"
        )
    return setup
