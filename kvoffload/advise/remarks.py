"""The assumptions behind the figures, as the command and the report say them."""

from __future__ import annotations

from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.policies import is_own
from kvoffload.replay.results import ERROR_PARTS

from .accelerators import SHARE_OF_LINK, SHARE_OF_PEAK
from .choice import LEAST_NOISE, POLICIES
from .configuration import DISK_PATH
from .economy import WORKERS, Engine, workers_for
from .model_shape import ModelShape
from .subject import Subject
from .units import bytes_text, count_text, percent_text, rate_text
from .wording import points

NOT_MODELLED = (
    "Simplifications: an engine computes one prompt at a time, without chunks, batches, preemption "
    "or slower decoding; running requests take no accelerator memory; links are not shared; "
    "stores, routing, tokenizing and the network take no time; nothing fails, scales or fetches "
    "from its peers. Times compare designs and do not predict milliseconds; differences of .01 "
    "between routers are noise."
)

NOISE = (
    f"{POLICIES[1]} is recommended, or {POLICIES[0]} where it is at most {points(LEAST_NOISE)} "
    "behind; any other policy must be ahead of both by more than noise. Noise: half of the 98 % "
    f"confidence interval of a difference over {ERROR_PARTS} consecutive parts of the trace, at "
    f"least {points(LEAST_NOISE)}."
)

LOOPS = {
    "open": "Requests come as recorded, however long the queues.",
    "closed": "Each request of a session comes once the previous one is answered.",
    "recorded": "Requests of a session keep their recorded waits.",
}


def group_remarks(groups: GroupChunks) -> list[str]:
    """Return remarks on chunks that differ from vLLM's, and on windows stored incompletely."""
    found: list[str] = []
    if not groups.is_exact:
        theirs = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(groups.engine_chunk_tokens))
        ours = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(groups.chunk_tokens))
        found.append(
            f"The trace has blocks of {groups.block_tokens:,} tokens: chunks of {ours} tokens "
            f"stand for vLLM's of {theirs}."
        )
    pairs = zip(groups.layout.groups, groups.engine_chunk_tokens, strict=True)
    for window, chunk in dict.fromkeys((g.window, c) for g, c in pairs if g.kind == "window"):
        chunks, more = divmod(window, chunk)
        if chunks and more == 1:
            found.append(
                f"A window of {window:,} tokens is one more than {chunks:,} × {chunk:,}: vLLM "
                "stores a chunk less of it than a hit needs, so fewer prompts hit. Another size of "
                "chunk avoids that."
            )
    return found


def remarks(subject: Subject) -> list[str]:
    """Return the assumptions behind the figures."""
    setup, advice, model = subject.setup, subject.advice, subject.model
    is_fleet, rates, policy = setup.engines > 0, setup.rates, advice.policy
    workers = 1 if setup.engine is None else setup.engine.workers
    found = [NOISE] if policy is not None and not is_fleet else []
    found.append(_device(subject))
    if is_fleet:
        found.append(LOOPS[setup.loop])
    if subject.hints_text is not None:
        found.append(f"Replayed with {subject.hints_text}.")
    if is_fleet and setup.rate is None:
        found.append(
            "The trace has no times of arrival, so prompts take no time."
            if rates is not None
            else "No prefill rate is known, so prompts take no time: "
            "--prefill-tokens-per-second gives times to first tokens."
        )
    elif rates is not None:
        found.append(f"{'Each engine: ' * is_fleet}{_rates(rates)}")
    elif not is_fleet and model is not None and not model.active_parameters:
        found.append(
            f"The parameters of {model.name} are not known, so neither its prefill nor "
            "the cache that an accelerator has beside its weights is estimated: "
            "--prefill-tokens-per-second and --device-memory give them."
        )
    if model is not None and setup.engine is not None:
        found += filter(None, [workers_remark(setup.engine, model)])
    found += [NOT_MODELLED] if is_fleet else _counted_for_one_worker(subject, workers)
    found += group_remarks(setup.chunks)
    if policy is not None and not is_own(policy):
        found.append(
            "vLLM's cpu_bytes_to_use is the memory of all workers of an engine together, not of "
            f"each: of {workers} here, --tensor-parallel {workers}."
        )
    if policy is not None and advice.case.tier is not None:
        found.append("This configuration does not include the tier; see the pages on tiers.")
    if subject.disk() is not None:
        found.append(
            f"{DISK_PATH} stands for a folder on the disk; each engine needs one of its own."
        )
    return found


def workers_remark(engine: Engine, model: ModelShape) -> str | None:
    """Return how many accelerators an engine is assumed to have; None if nothing is assumed."""
    chip = engine.accelerator
    if chip is None or engine.workers_given:
        return None
    if engine.workers > 1:
        how = "--tensor-parallel sets another number"
        return f"{engine.name} per engine, to hold {model.name}; {how}."
    if workers_for(model, chip):
        return None
    return (
        f"{WORKERS[-1]} × {chip.name} do not hold {model.name}, so one is assumed: give "
        "--tensor-parallel, or another --accelerator."
    )


def _rates(engine: Engine) -> str:
    """Return the rates that the times are based on, and their origin."""
    prefill = f"prefill {count_text(round(engine.prefill_rate))} tokens/s"
    link = f"link {rate_text(engine.link_bandwidth)} each way"
    if engine.accelerator is None or (engine.prefill_given and engine.link_given):
        return f"Times: {prefill} and {link}, as given."
    share, part = f"{SHARE_OF_PEAK * 100:g} %", f"{SHARE_OF_LINK * 100:g} %"
    source = f"the data sheet, {engine.accelerator.source}"
    if engine.prefill_given:
        return f"Times: {prefill} as given; {link}, estimated as {part} of {source}."
    if engine.link_given:
        return f"Times: {link} as given; {prefill}, estimated as {share} of the peak of {source}."
    return (
        f"Times are estimated: {prefill}, {share} of the peak, and {link}, {part} of the nominal "
        f"rate, of {source}; --prefill-tokens-per-second and --link-bandwidth take measured ones."
    )


def _device(subject: Subject) -> str:
    """Return what the accelerator's own cache serves."""
    setup, advice = subject.setup, subject.advice
    if not setup.device_memory and setup.engines:
        return "No accelerator's own cache is modelled; --device-memory adds one."
    if not setup.device_memory:
        return (
            "No accelerator's cache is modelled: hits that the engine's own prefix cache would "
            "serve are counted; --device-memory adds one."
        )
    text = (
        f"An LRU prefix cache of {bytes_text(setup.device_memory)} on "
        f"{'each' if setup.engines else 'the'} accelerator "
        f"{'is assumed to be' if setup.device_is_assumed else 'is'} asked first and serves "
    )
    if setup.engines:
        share = advice.result.device_hits / (advice.facts.blocks or 1)
        return (
            f"{text}{percent_text(share)} of the blocks. Running requests share that memory; "
            "--device-memory sets what they leave, 0 leaves it out."
        )
    hits, served = advice.vllm_default.device_hits, percent_text(advice.device_hit_ratio)
    text += f"{hits:,} {setup.counted} ({served}); ratios are shares of the others."
    if setup.device_is_assumed:
        text += " --device-memory sets another size, 0 leaves it out."
    return text


def _counted_for_one_worker(subject: Subject, workers: int) -> list[str]:
    """Return a remark if blocks are counted for one worker and the engine's differ."""
    model, setup = subject.model, subject.setup
    if model is None or workers == 1:
        return []

    def is_counted(workers: int) -> bool:
        if not setup.chunks.is_plain:
            return setup.chunks.layout == model.layout(subject.dtype, workers)
        return setup.token_bytes == model.bytes_per_token(subject.dtype, workers)

    if not is_counted(1):
        return []
    reason = ""
    try:
        if is_counted(workers):
            return []
    except ValueError as error:
        reason = f" ({error})"
    whose = f"those of one worker, not of the {workers} that hold it{reason}"
    return [f"The bytes of {model.name} are {whose}: give --tensor-parallel."]
