"""Advice with its context, as the command and the report present it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload.replay.policies import is_own, summary

from .advice import Advice
from .answer import Answer, Column, Curve, Curves, Snippet, Table, best, column
from .configuration import DISK_PATH, python_text, vllm_text
from .details import Details
from .economy import Engine, balance
from .remarks import group_remarks, prompt_text
from .retention import RetentionCell, vllm_flag, worth
from .units import bytes_text, count_text, duration_text, percent_text, rate_text
from .wording import (
    Finding,
    assumed_workers_text,
    findings,
    fits_text,
    headline,
    noise_text,
    rates_text,
    verdict,
    workers_text,
)

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True)
class Subject(Answer):
    """Advice on one engine and its context."""

    FIRST = (
        "Changes",
        "Capacity",
        "Prefixes",
        "Time",
        "First token",
        "Retention",
        "Accelerator",
        "More memory",
    )

    advice: Advice
    alone: Advice | None = None  # without the typical cache on the accelerator that `advice` has
    details: Details | None = None
    retentions: tuple[RetentionCell, ...] = ()  # empty if the model has no windows or states
    shares: tuple[Advice, ...] = ()  # behind parts of that cache, in the memory asked for only

    @property
    def heading(self) -> str:
        """The heading of a page."""
        return "Offloading advice"

    @property
    def is_recommended(self) -> bool:
        """Whether a policy is recommended."""
        return self.advice.policy is not None

    def headline(self) -> str:
        """Return the advice in one sentence."""
        text = headline(self.advice)
        if len({verdict(one) for one in self.by_device_memory()}) > 1:
            text += (
                f" This holds with {bytes_text(self.setup.device_memory)} of prefix cache "
                "on the accelerator; with less of it the recommendation differs."
            )
        if not self.is_recommended:
            text += fits_text(self.setup, self.advice.facts)
        return text

    def own_findings(self) -> list[Finding]:
        """Return the findings on what is recommended."""
        return findings(self.advice, self.alone, self.details, self.retentions, shares=self.shares)

    def by_device_memory(self) -> list[Advice]:
        """Return the advice by the size of an assumed cache on the accelerator, none first."""
        return [] if self.alone is None else [self.alone, *self.shares, self.advice]

    def curves(self) -> Curves:
        """Return the hit ratios over memory, a line per policy, and the ceilings."""
        advice, counted = self.advice, self.setup.counted
        columns = range(len(advice.memories))
        lines = [
            Curve(policy, [advice.cell(policy, index).hit_ratio for index in columns])
            for policy in self.setup.replayed
        ]
        ceilings = [Curve("infinite", [advice.unbounded for _ in columns], is_flat=True)]
        if self.setup.chunks.num_full:
            ceilings.append(Curve("belady", advice.ceilings))
        return Curves(
            "Hit ratio over memory",
            f"A hit is a {counted.removesuffix('s')} of a prompt whose keys and values are loaded "
            "from host memory instead of computed again.",
            [bytes_text(memory) for memory in advice.memories],
            advice.memory_index,
            "asked for",
            advice.policy,
            lines,
            ceilings,
        )

    def tables(self) -> list[Table]:
        """Return the policies, the sizes of the accelerator's cache, and those of a disk."""
        return [self._policies(), *self._devices(), *self._disks()]

    def _policies(self) -> Table:
        advice, engine = self.advice, self.engine
        ranking, asked = advice.ranking(), bytes_text(self.setup.memory)
        cells = [advice.cell(policy) for policy in ranking]

        def of_cells(title: str, texts: Iterable[str], marked: set[int] | None = None) -> Column:
            return column(title, [*texts, "-", "-"], marked)  # nothing of the ceilings

        ratios = []
        for index, memory in enumerate(advice.memories):
            is_asked, title = index == advice.memory_index, f"hit ratio\n{bytes_text(memory)}"
            ratios.append(_ratios(advice, index, title, ranking, first=is_asked))
        if self.alone is not None:
            title = f"{asked}, no\ndevice cache"
            ratios.append(_ratios(self.alone, self.alone.memory_index, title, ranking))
        rest = [
            of_cells(f"hit ratio\n{who}", [percent_text(getattr(c, name)) for c in cells])
            for who, name in (("honest", "honest_hit_ratio"), ("liars", "liar_hit_ratio"))
            if any(cell.liar_hit_ratio is not None for cell in cells)
        ]
        apart = "hit ratios of honest sessions and liars, " if rest else ""
        saved = [count_text(cell.saved_tokens) for cell in cells]
        saved += ["-" if n is None else count_text(n) for n in advice.ceiling_tokens()]
        per_hit = ["-" if c.stored_per_hit is None else f"{c.stored_per_hit:.2f}" for c in cells]
        least = best([-(c.stored_per_hit or math.inf) for c in cells])
        to_host = [rate_text(cell.store_rate) for cell in cells]
        rest += [
            column("tokens saved", saved, best([c.saved_tokens for c in cells]), first=True),
            of_cells("stored\nper hit", per_hit, least),
            of_cells("to host", to_host, best([-c.stored for c in cells])),
            of_cells("from host", [rate_text(cell.load_rate) for cell in cells]),
        ]
        if engine is not None:
            found = [balance(advice, cell, engine) for cell in cells]
            saves = [one.prefill_seconds for one in found]
            takes = [one.moving_seconds for one in found]
            fastest = best([-one for one in takes])
            rest.append(of_cells("prefill\nsaved", map(duration_text, saves), best(saves)))
            rest.append(of_cells("moving\nblocks", map(duration_text, takes), fastest))
        return Table(
            "Policies",
            f"{apart}tokens saved, stores and rates are for {asked}",
            "policy",
            [*ranking, "belady", "infinite"],
            [ratios, rest],
            advice.policy,
        )

    def _devices(self) -> list[Table]:
        """Return the advice by sizes of the accelerator's cache; nothing if none is assumed."""
        found, engine = self.by_device_memory(), self.engine
        if not found:
            return []
        whole = self.setup.device_memory
        cells = [one.cell(one.policy or one.choices[one.memory_index].best) for one in found]
        sizes = [one.setup.device_memory for one in found]
        columns = [
            column("serves", [percent_text(one.device_hit_ratio) for one in found]),
            column("recommended", [verdict(one) for one in found], numeric=False),
            column("hit ratio", [percent_text(cell.hit_ratio) for cell in cells]),
            column("tokens saved", [count_text(cell.saved_tokens) for cell in cells]),
        ]
        if engine is not None:
            pairs = zip(found, cells, strict=True)
            gained = [balance(one, cell, engine).net_seconds for one, cell in pairs]
            columns.append(column("time gained", [*map(duration_text, gained)]))
        asked = bytes_text(self.setup.memory)
        title = f"with {asked} of host memory, for sizes of the accelerator's own prefix cache"
        names = [
            f"{bytes_text(size)}, {size / whole * 100:.0f} %" if size else "none" for size in sizes
        ]
        return [_detail("Accelerator", title, "prefix cache", names, columns)]

    def _disks(self) -> list[Table]:
        """Return the disk's hits and what is written to it; nothing without one."""
        if self.details is None or self.details.disk is None:
            return []
        cells = self.details.disk_cells
        written = ["-" if c.bytes_per_day is None else bytes_text(c.bytes_per_day) for c in cells]
        wear = ["-" if c.writes_per_day is None else f"{c.writes_per_day:.3g}" for c in cells]
        columns = [
            column("host", [cell.host_policy for cell in cells], numeric=False),
            column("host memory", [bytes_text(cell.memory) for cell in cells]),
            column("hit ratio\nof both", [percent_text(cell.counts.hit_ratio) for cell in cells]),
            column("written\nper day", written),
            column("times\nits size", wear),
        ]
        title = f"with a disk of {bytes_text(self.details.disk.size)} behind host memory"
        return [_detail("Disk", title, "disk", [cell.policy for cell in cells], columns)]

    def meanings(self) -> list[tuple[str, str]]:
        """Return an explanation of each row of the table of policies."""
        found = [(policy, summary(policy)) for policy in self.advice.ranking()]
        found.append(("belady", "Belady's choice with bypass, which knows the future"))
        found.append(("infinite", "a cache that keeps everything"))
        return found

    def snippets(self) -> list[Snippet]:
        """Return vLLM's configuration, and the manager in Python."""
        advice, setup = self.advice, self.setup
        if advice.policy is None:
            return []
        capacity = advice.capacities[advice.memory_index]
        vllm = vllm_text(advice.policy, setup.memory, setup.chunks, self.disk())
        flag = self.vllm_flag()
        found = []
        if vllm is not None:
            found.append(Snippet("vLLM, --kv-transfer-config", "vllm", vllm))
        if flag is not None:
            found.append(Snippet("vLLM, in addition", "vllm-argument", flag))
        python = python_text(advice.policy, capacity, setup.block_tokens)
        return [*found, Snippet("Python", "python", python)]

    def disk(self) -> tuple[int, str] | None:
        """Return the bytes and the policy of the disk, if it is a part of the recommendation."""
        policy, details = self.advice.policy, self.details
        if policy is None or details is None:
            return None
        return details.disk_worth(self.setup.memory, policy)

    def vllm_flag(self) -> str | None:
        """Return the argument of ``vllm serve`` beside the configuration; None for its default."""
        groups = self.setup.chunks
        better = worth(self.retentions, groups.retention)
        interval = groups.retention if better is None else better.interval
        return None if interval == 0 else vllm_flag(interval)

    @property
    def engine(self) -> Engine | None:
        """The engine, if both of its rates are known."""
        return self.setup.rates

    def memory_text(self) -> str:
        """Return the bytes per block or slot, and how much of the trace the memory holds."""
        setup, model = self.setup, self.model_text
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
        setup = self.setup
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
        found = [noise_text(), device] if self.is_recommended else [device]
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
        if self.disk() is not None:
            found.append(
                f"{DISK_PATH} stands for a folder on the disk; each engine needs one of its own."
            )
        return found

    def _counted_for_one_worker(self) -> list[str]:
        """Return a remark if blocks are counted for one worker and the engine's differ."""
        model, setup = self.model, self.setup
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


def _ratios(
    advice: Advice, index: int, title: str, ranking: Sequence[str], *, first: bool = False
) -> Column:
    """Return the hit ratios of policies and ceilings in one memory as a column."""
    ratios = [advice.cell(policy, index).hit_ratio for policy in ranking]
    texts = [percent_text(ratio) for ratio in (*ratios, advice.ceilings[index], advice.unbounded)]
    return column(title, texts, best(ratios), first=first)


def _detail(
    heading: str, title: str, name: str, rows: Sequence[str], columns: Sequence[Column]
) -> Table:
    return Table(heading, title, name, rows, [columns], kind="plain", is_detail=True)
