"""The assumptions behind the figures, as the command and the report say them."""

from __future__ import annotations

from kvoffload.replay.groups import GroupChunks
from kvoffload.replay.policies import is_own

from .configuration import DISK_PATH
from .subject import Subject
from .units import bytes_text, percent_text
from .wording import assumed_workers_text, noise_text, rates_text, workers_text

__all__ = ["NOT_MODELLED", "group_remarks", "remarks"]

NOT_MODELLED = (
    "Simplifications: an engine computes one prompt at a time, without chunks, batches, preemption "
    "or slower decoding; running requests take no accelerator memory; links are not shared; "
    "stores, routing, tokenizing and the network take no time; nothing fails, scales or fetches "
    "from its peers. Times compare designs and do not predict milliseconds; differences of .01 "
    "between routers are noise."
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
    is_fleet, rates = setup.engines > 0, setup.rates
    found = [noise_text()] if advice.policy is not None and not is_fleet else []
    found.append(_device(subject))
    found += [LOOPS[setup.loop]] if is_fleet else []
    if subject.hints_text is not None:
        found.append(f"Replayed with {subject.hints_text}.")
    if is_fleet and setup.rate is None:
        found.append(
            "No prefill rate is known, so prompts take no time: --accelerator or "
            "--prefill-tokens-per-second gives times to first tokens."
        )
    elif rates is not None:
        found.append(f"Each engine: {rates_text(rates)}" if is_fleet else rates_text(rates))
    elif not is_fleet and model is not None and not model.active_parameters:
        found.append(
            f"The parameters of {model.name} are not known, so neither its prefill nor "
            "the cache that an accelerator has beside its weights is estimated: "
            "--prefill-tokens-per-second and --device-memory give them."
        )
    found += assumed_workers_text(setup.engine, model)
    found += [NOT_MODELLED] if is_fleet else _counted_for_one_worker(subject)
    found += group_remarks(setup.chunks)
    if advice.policy is not None and not is_own(advice.policy):
        found.append(workers_text(setup.engine))
    if advice.policy is not None and advice.case.tier is not None:
        found.append("This configuration does not include the tier; see the pages on tiers.")
    if subject.disk() is not None:
        found.append(
            f"{DISK_PATH} stands for a folder on the disk; each engine needs one of its own."
        )
    return found


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
    text += (
        f"{advice.device_hits:,} {setup.counted} ({percent_text(advice.device_hit_ratio)}); ratios "
        "are shares of the others."
    )
    if setup.device_is_assumed:
        text += " --device-memory sets another size, 0 leaves it out."
    return text


def _counted_for_one_worker(subject: Subject) -> list[str]:
    """Return a remark if blocks are counted for one worker and the engine's differ."""
    model, setup = subject.model, subject.setup
    workers = 1 if setup.engine is None else setup.engine.workers
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
