"""Advice with its context, as the command and the report present it."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload._printable import printable
from kvoffload.replay.policies import is_own

from .advice import Advice
from .comparison import Comparison
from .details import Details
from .economy import Engine, balance
from .knee import Knee
from .model_shape import ModelShape
from .remarks import group_remarks, prompt_text
from .retention import RetentionCell, vllm_flag, worth
from .units import bytes_text, count_text, duration_text, percent_text
from .wording import (
    Finding,
    assumed_workers_text,
    context,
    findings,
    headline,
    rates_text,
    verdict,
    workers_text,
)

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """Advice and its context."""

    trace: str  # its name as given by the user
    advice: Advice
    model: ModelShape | None  # None if bytes per token were given
    dtype: str  # element type of the model's KV cache
    command: str  # as it was typed
    block_tokens_from: str = "lengths"  # or ``"trace"``, or ``"option"`` if neither tells
    alone: Advice | None = None  # without the typical cache on the accelerator that `advice` has
    details: Details | None = None
    ids_text: str | None = None  # how the block ids of several files were treated
    retentions: tuple[RetentionCell, ...] = ()  # empty if the model has no windows or states
    shares: tuple[Advice, ...] = ()  # behind parts of that cache, in the memory asked for only
    hints_text: str | None = None  # what clients say of their sessions, in words
    knee: Knee | None = None  # None if the memory was given
    since: Comparison | None = None  # comparison with earlier advice

    def headline(self) -> str:
        """Return the advice in one sentence."""
        text = headline(self.advice)
        if len({verdict(one) for one in self.by_device_memory()}) > 1:
            text += (
                f" This holds with {bytes_text(self.advice.setup.device_memory)} of prefix cache "
                "on the accelerator; with less of it the recommendation differs."
            )
        return text

    def findings(self) -> list[Finding]:
        """Return the findings."""
        found = findings(self.advice, self.alone, self.details, self.retentions, shares=self.shares)
        return [*context(self.since, self.knee, self.advice.setup), *found]

    def by_device_memory(self) -> list[Advice]:
        """Return the advice by the size of an assumed cache on the accelerator, none first."""
        return [] if self.alone is None else [self.alone, *self.shares, self.advice]

    def device_table(self) -> list[tuple[str, ...]]:
        """Return a table of these, its titles first; empty if no cache is assumed."""
        found = self.by_device_memory()
        if not found:
            return []
        titles = ("prefix cache", "serves", "recommended", "hit ratio", "tokens saved")
        lines = [(*titles, *(["time gained"] if self.engine else []))]
        whole = self.advice.setup.device_memory
        for one in found:
            best = one.policy or one.choices[one.memory_index].best
            cell, size = one.cell(best), one.setup.device_memory
            name = f"{bytes_text(size)}, {size / whole * 100:.0f} %" if size else "none"
            texts = [name, percent_text(one.device_hit_ratio), verdict(one)]
            texts += [percent_text(cell.hit_ratio), count_text(cell.saved_tokens)]
            if self.engine:
                texts.append(duration_text(balance(one, cell, self.engine).net_seconds))
            lines.append(tuple(texts))
        return lines

    def vllm_flag(self) -> str | None:
        """Return the argument of ``vllm serve`` beside the configuration; None for its default."""
        groups = self.advice.setup.chunks
        better = worth(self.retentions, groups.retention)
        interval = groups.retention if better is None else better.interval
        return None if interval == 0 else vllm_flag(interval)

    @property
    def engine(self) -> Engine | None:
        """The engine, if both of its rates are known."""
        return self.advice.setup.rates

    @property
    def name(self) -> str:
        """The trace's name on one line."""
        return printable(self.trace)

    def trace_text(self) -> str:
        """Return a description of the trace."""
        facts, setup = self.advice.facts, self.advice.setup
        full = "full " if setup.full_blocks else ""
        believed = (
            " (as given; the trace has no lengths)" if self.block_tokens_from == "option" else ""
        )
        span = f" in {duration_text(facts.seconds)}" if facts.seconds else ""
        return (
            f"{facts.requests:,} requests{span}, {facts.blocks:,} {full}blocks of "
            f"{setup.block_tokens:,} tokens{believed}, {facts.unique_blocks:,} of them distinct"
            + ("" if self.ids_text is None else f"; {self.ids_text}")
        )

    def memory_text(self) -> str:
        """Return the bytes per block or slot, and how much of the trace the memory holds."""
        setup = self.advice.setup
        model = "" if self.model is None else f"{self.model.name}, {self.dtype}: "
        capacity = self.advice.capacities[self.advice.memory_index]
        if not setup.chunks.is_plain:
            return (
                f"{model}{bytes_text(setup.block_bytes)} per slot; {bytes_text(setup.memory)} "
                f"holds {capacity:,} slots; {prompt_text(setup.chunks)}"
            )
        share = capacity / (self.advice.facts.unique_blocks or 1)
        part = f"{share * 100:.3g} %" if share < 1 else "more than all"
        return (
            f"{model}{setup.token_bytes:,} bytes per token, {bytes_text(setup.block_bytes)} per "
            f"block; "
            f"{bytes_text(setup.memory)} holds {capacity:,} blocks, "
            f"{count_text(capacity * setup.block_tokens)} tokens ({part} of the distinct blocks)"
        )

    def remarks(self) -> list[str]:
        """Return the assumptions behind the figures."""
        setup = self.advice.setup
        if setup.device_memory:
            device = (
                f"An LRU prefix cache of {bytes_text(setup.device_memory)} on the accelerator "
                f"{'is assumed to be' if setup.device_is_assumed else 'is'} asked first and serves "
                f"{self.advice.device_hits:,} {setup.counted} "
                f"({percent_text(self.advice.device_hit_ratio)}); ratios are shares of the others."
            )
            if setup.device_is_assumed:
                device += " --device-memory sets another size, 0 leaves it out."
        else:
            device = (
                "No accelerator's cache is modelled: hits that the engine's own prefix cache would "
                "serve are counted; --device-memory adds one."
            )
        found = [device]
        if self.hints_text is not None:
            found.append(f"Replayed with {self.hints_text}.")
        if self.engine is None and self.model is not None and not self.model.active_parameters:
            found.append(
                f"The parameters of {self.model.name} are not known, so neither its prefill nor "
                "the cache that an accelerator has beside its weights is estimated: "
                "--prefill-tokens-per-second and --device-memory give them."
            )
        if self.engine is not None:
            found.append(rates_text(self.engine))
        found += assumed_workers_text(setup.engine, self.model)
        found += [*self._counted_for_one_worker(), *group_remarks(setup.chunks)]
        if self.advice.policy is not None and not is_own(self.advice.policy):
            found.append(workers_text(setup.engine))
        return found

    def _counted_for_one_worker(self) -> list[str]:
        """Return a remark if blocks are counted for one worker and the engine's differ."""
        model, setup = self.model, self.advice.setup
        workers = 1 if setup.engine is None else setup.engine.workers
        if model is None or workers == 1:
            return []

        def is_counted(workers: int) -> bool:
            if not setup.chunks.is_plain:
                return setup.chunks.layout == model.layout(self.dtype, workers)
            return setup.token_bytes == model.bytes_per_token(self.dtype, workers)

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
