"""``kvoffload advise``: from a trace to a configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click

from kvoffload.advise import Advice, Disk, RecordedTrace, Setup, details, engine_of
from kvoffload.advise import accelerator as accelerator_of
from kvoffload.advise import advise as advise_on
from kvoffload.advise.accelerators import Accelerator, accelerator_names
from kvoffload.advise.advice import DEVICE_SHARES
from kvoffload.advise.choice import POLICIES, Prices
from kvoffload.advise.comparison import Comparison, compared_advice, read_advice
from kvoffload.advise.knee import Knee, find_knee, knee_configurations
from kvoffload.advise.report import require_report, write_report
from kvoffload.advise.retention import compared, retentions
from kvoffload.advise.setup import STACK_ROUTERS, FleetTier
from kvoffload.advise.subject import Subject
from kvoffload.advise.units import bytes_text
from kvoffload.replay import DecodedTrace, GroupChunks
from kvoffload.replay.configuration import MOST_ENGINES, Loop
from kvoffload.replay.groups import STEP_TOKENS
from kvoffload.replay.offline import CEILINGS
from kvoffload.traces import Survey
from kvoffload.traces.breaks import PrefixBreaks

from . import _fleet_options, _options
from ._advice_result import as_object, print_answer
from ._breaks import Broken, show_text_option
from ._decoding import Decoding
from ._grid import slots_of
from ._hint_options import hint_options, hints_object, hints_text
from ._loop_options import read_rate
from ._machines import Effort, check_dask, efforts
from ._model_options import CacheOptions, model_options
from ._output import check_outputs, note_fonts, write_files
from ._sources import (
    BlockTokens,
    Source,
    check_order,
    note_order,
    open_source,
    order_object,
    refuse_given,
)
from ._terminal import note, note_bad_lines, print_json

DEFAULT_ACCELERATOR = "h100"
"""Accelerator whose cache is assumed if a model is named and no accelerator is."""


NEEDS_RATES = (
    "needs both rates, got it without: give --model, or --prefill-tokens-per-second with "
    "--link-bandwidth or --accelerator"
)
AUTO = "auto"
MORE = 4
"""Multiple of the memory to try if the knee of one cache is too little for several."""

_SOME = _options.Capacity("2", blocks=2)
"""Stands in for the memory that is to be found."""


def _read_capacity(text: str) -> _options.Capacity | None:
    """Read a capacity; None for the knee."""
    return None if text == AUTO else _options.read_capacity(text)


def _read_earlier(path: str) -> tuple[str, dict[str, Any]]:
    return path, read_advice(path)


@click.command(
    epilog=_options.examples(
        "kvoffload advise trace.jsonl --capacity 64GiB --model Qwen/Qwen3-8B",
        "kvoffload advise logs/ --capacity 1TiB --model path/config.json",
        "kvoffload advise trace.jsonl --capacity 5% --model glm-4.5 --disk 4TB",
        "kvoffload advise log.jsonl --model glm-4.5 --engines 8",
    )
)
@_options.traces_argument
@click.option(
    "--capacity",
    "capacities",
    **_options.of_list("SIZE|auto", _read_capacity, AUTO),
    help="Host memory for KV blocks: a size (512GiB), blocks, or a share of the unique blocks "
    "(5%). Half, twice and four times as much are compared, too. Of several sizes, "
    "comma-separated or repeated, the advice is on the first, and the others are compared. auto "
    "is the knee of the hits over memory. With --engines, the memory of each engine.",
)
@_options.policy_option(",".join(POLICIES))
@model_options
@click.option(
    "--kv-bytes-per-token",
    **_options.of_text("BYTES", _options.read_size),
    help="Bytes of KV cache per token, for any other model; LMCache's log states it.",
)
@_options.block_tokens_option
@_options.step_tokens_option(STEP_TOKENS, "")
@_options.device_memory_option
@click.option(
    "--accelerator",
    **_options.of_text("NAME", accelerator_of),
    help="Accelerator that runs the model; it sets the size of its own cache and the times: "
    f"{', '.join(accelerator_names())}.  [default: {DEFAULT_ACCELERATOR}, with --model]",
)
@click.option(
    "--prefill-tokens-per-second",
    **_options.of_text("RATE", read_rate),
    help="Measured prefill of all workers; estimated from --model and --accelerator if not given.",
)
@click.option(
    "--link-bandwidth",
    **_options.of_text("SIZE", _options.read_bandwidth),
    help="Measured bytes per second between accelerators and host memory, one way, all links "
    "together (50GB); estimated from --accelerator if not given.",
)
@click.option(
    "--disk",
    **_options.of_text("SIZE", _options.read_capacity),
    help="Disk behind host memory: a size (2TB), blocks, or a share of the unique blocks; its hits "
    "and writes are reported, too.",
)
@click.option(
    "--disk-policy",
    "disk_policies",
    **_options.of_list("POLICY", _options.read_policy),
    help="Policies of the disk to compare, comma-separated or repeated.  "
    "[default: lru,hit-density; with --engines lru]",
)
@click.option(
    "--engines",
    **_options.of_text("N", _fleet_options.read_engines),
    help=f"Advise on this many engines behind a router, 1 to {MOST_ENGINES}: which router, "
    "policy, memory and tier are enough, or that none offloads.",
)
@click.option(
    "--router",
    "routers",
    **_options.of_list("ROUTER", _fleet_options.read_router),
    help="With --engines, the routers that can be deployed, as in kvoffload fleet.  [default: "
    "those that stacks provide]",
)
@_fleet_options.shared_option
@_fleet_options.price_option
@click.option(
    "--compare",
    "earlier",
    **_options.of_text("FILE.json", _read_earlier),
    help="Report what changed since an earlier advice, as --json printed it.",
)
@click.option("--report", metavar="FILE", help="Write the advice as one self-contained HTML page.")
@click.option(
    "--unchained-ids",
    is_flag=True,
    help="Accept a trace whose ids are not prefix-chained, where blocks are reused at any "
    "position of a prompt.",
)
@hint_options
@show_text_option
@_options.jobs_option
@_options.dask_option
@_options.reading_options
@_options.json_option
@_options.bundled("decoding", Decoding)
def advise(
    decoding: Decoding,
    *,
    capacities: tuple[_options.Capacity | None, ...],
    policies: tuple[str, ...],
    cache: CacheOptions,
    device_memory: _options.Capacity | None,
    accelerator: Accelerator | None,
    prefill_tokens_per_second: int | None,
    link_bandwidth: int | None,
    disk: _options.Capacity | None,
    disk_policies: tuple[str, ...],
    engines: int | None,
    routers: tuple[str, ...],
    shared: tuple[_fleet_options.Shared, ...],
    price: Prices | None,
    earlier: tuple[str, dict[str, Any]] | None,
    report: str | None,
    unchained_ids: bool,
    show_text: bool,
    jobs: int | None,
    dask: str | None,
    as_json: bool,
) -> None:
    """Recommend a policy for a trace, a model and a memory.

    TRACE is a file in any of the formats, plain or compressed with gzip or zstandard, a folder of
    such files, or a pattern; several are merged by time. - means standard input.

    The trace is replayed through lru and hit-density, or the policies given, in the given memory
    and in half, twice and four times as much, or in each memory given. hit-density is recommended,
    or lru if it hits as much; another policy only if it hits more than both by more than noise. The
    recommendation is a configuration to paste, compared with vLLM's default and with no offloading.
    No policy is recommended if the trace is too short or has no reuse, or if no policy saves more
    prefill than moving blocks takes. With --model and without --device-memory, several answers
    stand side by side: behind the prefix cache that the accelerator typically has, behind a half
    and a quarter of it, and without one.

    With --engines, engines behind a router are replayed instead, with every combination of memory,
    router, policy and tier, and without offloading. The cheapest fleet that saves within a point of
    the best is recommended. If requests record how long their clients waited, each request of a
    session follows the answer to the previous one.
    """
    decoding = replace(decoding, full_blocks=False, arrivals=engines is not None)
    traces, block_tokens, hints = decoding.traces, decoding.block_tokens, decoding.hints
    model = cache.model
    engine = engine_of(
        model,
        accelerator or (accelerator_of(DEFAULT_ACCELERATOR) if model else None),
        workers=cache.tensor_parallel,
        prefill_rate=prefill_tokens_per_second,
        link_bandwidth=link_bandwidth,
    )
    cache = cache.on_workers(engine.workers)
    cache.check()
    _check(cache, capacities, is_fleet=engines is not None)
    if disk is None and not (engines and shared):
        refuse_given("must go with --disk, got it without", "disk_policies")
    if engines is None:
        refuse_given("must go with --engines, got it without", "routers", "shared", "price")
    if model is None and not (engine.prefill_rate if engines else engine.is_known):
        refuse_given(NEEDS_RATES, "accelerator", "prefill_tokens_per_second", "link_bandwidth")
    check_outputs(traces, {"--report": report})
    check_dask(dask, traces)
    if report is not None:
        note_fonts()
        require_report()
    sample = PrefixBreaks()
    with open_source(traces, decoding.reading, block_tokens, sample) as source:
        survey, recorded = decoding.surveyed(source, RecordedTrace.of)
        note_bad_lines(source.trace.bad_lines)
        if not unchained_ids:
            check_order(survey, source)
        note_order(survey, source)
        broken = Broken.of(source, sample, shows_text=show_text)
        known = BlockTokens.of(source, survey, block_tokens)
        if known.count is None:
            raise click.UsageError(f"--block-tokens is needed: {_why_no_block_tokens(survey)}")
        full = survey.block_lengths.fits(known.count)
        if full:
            recorded = replace(recorded, trace=recorded.trace.full_blocks(known.count))
            decoding = replace(decoding, full_blocks=True)
        told = recorded.trace.hints
        setup = _setup(
            [_SOME if capacity is None else capacity for capacity in capacities],
            device_memory,
            recorded.trace,
            block_tokens=known.count,
            source=source,
            cache=cache,
            full_blocks=full,
            policies=tuple(policy for policy in policies if policy not in CEILINGS),
        )
        behind = None
        if disk is not None:
            size_of_disk = _bytes_of(disk, "--disk", setup.chunks, recorded.trace)
            behind = Disk(size_of_disk, disk_policies or POLICIES)
        context: dict[str, Any] = {
            "trace": source.name,
            "model": model,
            "dtype": cache.dtype,
            "command": _options.typed_command(),
            "block_tokens_from": known.origin or "lengths",
            "assumed_text": source.assumed_text,
            "breaks_text": broken.text,
            "hints_text": hints_text(hints, told),
        }
        typical = 0 if device_memory else engine.device_memory
        with efforts(jobs, dask, decoding, recorded.trace.num_blocks) as effort:
            if None in capacities:
                knee = context["knee"] = _knee(recorded, setup, effort)
                each = max(2 * setup.block_bytes, knee.memory // (engines or 1))
                setup = replace(setup, memory=each)
            setup = replace(setup, engine=engine)
            if engines is None:
                subject = _subject(recorded, setup, typical, effort, behind=behind, **context)
            else:
                setup = replace(
                    setup,
                    engines=engines,
                    routers=routers or STACK_ROUTERS,
                    tiers=_tiers(shared, behind, disk_policies, setup, recorded.trace),
                    prices=price,
                )
                grows = None in capacities
                advice = _fleet_advice(recorded, setup, typical, effort, grows=grows)
                subject = Subject(advice=advice, **context)
        if earlier is not None:
            subject = replace(subject, since=_since(subject, source, *earlier))
        faults = write_files((report, functools.partial(write_report, subject)))
        if as_json:
            said = {"hints": hints_object(hints, told), **order_object(survey)}
            said |= broken.as_object()
            print_json({**source.head(), **as_object(subject), **said})
        else:
            print_answer(subject)
        if faults:
            raise faults[0]


def _check(
    cache: CacheOptions, capacities: tuple[_options.Capacity | None, ...], *, is_fleet: bool
) -> None:
    """Refuse options that contradict each other."""
    if None in capacities and len(capacities) > 1:
        raise click.UsageError(
            f"--capacity auto must be the only value, got {len(capacities)} values"
        )
    if is_fleet and len(capacities) > 1:
        raise click.UsageError(
            f"--capacity must be one size with --engines, got {len(capacities)}: half, twice and "
            "four times it are compared"
        )
    if is_fleet and cache.layout() is not None:
        raise click.UsageError("--model must have no windows or states for --engines, got some")
    if is_fleet:
        refuse_given("must go without --engines, got both", "step_tokens")


def _since(subject: Subject, source: Source, path: str, earlier: dict[str, Any]) -> Comparison:
    """Compare the advice with an earlier one."""
    try:
        return compared_advice(path, earlier, {**source.head(), **as_object(subject)})
    except ValueError as error:
        raise click.UsageError(f"--compare {error}") from None


def _knee(recorded: RecordedTrace, setup: Setup, effort: Effort) -> Knee:
    """Find the memory of one cache of all engines, behind the accelerators' cache of one.

    Those of all engines together would serve what no router keeps in them: each has its own copy of
    what several prompts share. A cache that is only assumed is left out: it may serve all reuse,
    and running requests share it.
    """
    total = len({*knee_configurations(recorded, setup).values()})
    with effort.on("finding the knee", total, "replays") as how:
        return find_knee(recorded, setup, **how)


def _fleet_advice(
    recorded: RecordedTrace,
    setup: Setup,
    typical: int,
    effort: Effort,
    *,
    grows: bool,
) -> Advice:
    """Replay the fleets; note what limits them.

    If memory `grows`, larger sizes are tried as long as the largest is needed: the knee was found
    for one cache of all engines, which has no block twice.
    """
    trace, engine = recorded.trace, setup.engine
    if trace.arrivals is not None and not trace.arrivals.recorded.any():
        note("the trace has no times of arrival: prompts take no time")
        engine = None
    loop: Loop = "open"
    if recorded.has_think and trace.arrivals is not None and trace.arrivals.has_sessions:
        loop = "closed"
    question = replace(
        setup,
        others=(),
        device_memory=setup.device_memory or typical,
        device_is_assumed=not setup.device_memory and typical > 0,
        engine=engine,
        loop=loop,
    )
    try:
        fleets = question.configurations(trace.unique_blocks)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None
    memories = {
        fleet: bytes_text(case.memory) for case, fleet in reversed(fleets.items()) if case.offloads
    }
    for policy in question.policies:
        _options.manager_of(policy, min(fleet.host for fleet in memories), "block")
    _fleet_options.note_limits(trace, memories, is_given=not grows)
    (advice,) = _advised(recorded, [question], effort, "fleets")
    while grows and advice.may_need_more:
        question = replace(question, memory=MORE * question.memory)
        (advice,) = _advised(recorded, [question], effort, "fleets")
    return advice


def _advised(
    recorded: RecordedTrace, questions: list[Setup], effort: Effort, unit: str
) -> list[Advice]:
    """Return the advice on each question, with one bar of progress."""
    unique = recorded.trace.unique_blocks
    totals = [len({*question.configurations(unique).values()}) for question in questions]
    found: list[Advice] = []
    with effort.on("replaying", sum(totals), unit) as how:
        show = how["progress"]
        for question in questions:
            before = sum(totals[: len(found)])

            def progress(done: int, before: int = before) -> None:
                if show is not None:
                    show(before + done)

            found.append(advise_on(recorded, question, **how | {"progress": progress}))
    return found


def _tiers(
    shared: Iterable[_fleet_options.Shared],
    disk: Disk | None,
    tier_policies: tuple[str, ...],
    setup: Setup,
    trace: DecodedTrace,
) -> tuple[FleetTier | None, ...]:
    """Return the tiers of a fleet to compare, none first."""
    policies = tier_policies or ("lru",)
    found: list[FleetTier | None] = [None]
    for one in shared:
        if one.capacity is not None:
            memory = _bytes_of(one.capacity, "--shared", setup.chunks, trace)
            given = policies if one.policy is None else (one.policy,)
            found += [FleetTier("shared", memory, policy) for policy in given]
    if disk is not None:
        found += [FleetTier("private", disk.size, policy) for policy in policies]
    return tuple(dict.fromkeys(found))


def _subject(
    recorded: RecordedTrace,
    setup: Setup,
    typical: int,
    effort: Effort,
    *,
    behind: Disk | None,
    **context: Any,
) -> Subject:
    """Replay one engine with everything that is compared.

    If a cache is assumed, also without one and with parts of it: `typical` is its size if none was
    given, bytes; 0 for none.
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
    advice, *others = _advised(recorded, setups, effort, "replays")
    intervals = len(compared(setup.chunks))
    if intervals:
        with effort.on("comparing intervals", intervals, "intervals") as how:
            context["retentions"] = tuple(retentions(recorded, advice, **how))
    return Subject(
        advice=advice,
        by_device=(*others, advice) if others else (),
        details=details(recorded, advice, behind),
        **context,
    )


def _why_no_block_tokens(survey: Survey) -> str:
    if not survey.input_tokens:
        return "the trace does not say how long its requests are"
    if not survey.blocks:
        return "no request has a block"
    mean = survey.input_tokens / survey.blocks
    return f"no block size fits all requests; they have {mean:,.0f} tokens per block on average"


def _token_bytes(cache: CacheOptions, source: Source, block_tokens: int) -> int:
    """Return the bytes of KV cache per token; 0 for a model with groups, which has none."""
    if cache.layout() is not None:
        return 0
    known = cache.token_bytes() or cache.kv_bytes_per_token
    if known is not None:
        return known
    if source.trace.block_bytes is None or source.trace.block_tokens is None:
        raise click.UsageError(
            "one of --model and --kv-bytes-per-token must be given: the trace does not say "
            "how many bytes its blocks have"
        )
    return max(1, source.trace.block_bytes // block_tokens)


def _bytes_of(
    asked: _options.Capacity, option: str, groups: GroupChunks, trace: DecodedTrace, least: int = 1
) -> int:
    """Return a memory in bytes; refuse one that holds fewer than `least` blocks or slots."""
    blocks = slots_of(asked, option, trace, groups, least=least)
    return blocks * groups.slot_bytes if asked.size is None else asked.size


def _setup(
    capacities: Iterable[_options.Capacity],
    device_memory: _options.Capacity | None,
    trace: DecodedTrace,
    *,
    block_tokens: int,
    source: Source,
    cache: CacheOptions,
    full_blocks: bool,
    policies: tuple[str, ...],
) -> Setup:
    """Return the setup, with all sizes in bytes."""
    token_bytes = _token_bytes(cache, source, block_tokens)
    if not policies:
        raise click.UsageError("--policy must name a policy, got ceilings only")
    groups = cache.groups(block_tokens, block_tokens * token_bytes)
    memories = [_bytes_of(asked, "--capacity", groups, trace) for asked in capacities]
    device = 0
    if device_memory is not None:
        device = _bytes_of(device_memory, "--device-memory", groups, trace, least=0)
    setup = Setup(
        memory=memories[0],
        block_tokens=block_tokens,
        token_bytes=token_bytes,
        device_memory=device,
        full_blocks=full_blocks,
        policies=tuple(dict.fromkeys(policies)),
        others=tuple(memories[1:]),
        groups=groups,
        step_tokens=cache.step_tokens,
    )
    least, most = min(setup.memories()), max(setup.memories())
    if setup.capacity(least) < 1 or setup.capacity(most) > _options.MAX_BLOCKS:
        raise click.UsageError(
            f"--capacity must be 2 ... {_options.MAX_BLOCKS // 4} {setup.kept_in} of "
            f"{setup.block_bytes:,} bytes, got {setup.memory:,} bytes"
        )
    return setup
