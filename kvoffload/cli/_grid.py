"""Policies at capacities, as ``kvoffload replay``, ``sweep`` and ``fleet`` compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvoffload.replay import Configuration, DecodedTrace, GroupChunks
from kvoffload.replay.arrivals import NoSessionsError
from kvoffload.replay.offline import BELADY, INFINITE

from . import _options
from ._decoding import Decoded, Decoding
from ._hint_options import hint_options
from ._model_options import CacheOptions, model_options, unique_chunks
from ._options import Capacity, CommandFunction, bundled
from ._output import in_outputs
from ._sources import refuse_given
from ._terminal import note


@dataclass(frozen=True, slots=True)
class Grid:
    """A trace, and the policies and the memory that are compared over it, as given."""

    decoding: Decoding
    policies: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    device_memory: Capacity | None
    block_bytes: int | None
    cache: CacheOptions
    loop: Mapping[str, Any] | None  # as from `loop_options`; None for a command without them

    def groups(self, read: Decoded) -> GroupChunks:
        """Return the groups of the cache."""
        size = self.block_bytes or read.source.trace.block_bytes
        return self.cache.groups(read.block_tokens.count, size)

    def device(self, read: Decoded, groups: GroupChunks, share: int = 1) -> int:
        """Return the slots of each accelerator's own cache."""
        if self.device_memory is None:
            return 0
        return slots_of(self.device_memory, "--device-memory", read.trace, groups, share, least=0)

    def hosts(self, read: Decoded, groups: GroupChunks, share: int = 1) -> list[tuple[str, int]]:
        """Return each capacity as it was given, and in slots."""
        every = self.capacities
        return [(one.text, slots_of(one, "--capacity", read.trace, groups, share)) for one in every]

    def cells(
        self,
        read: Decoded,
        *,
        unasked: bool = False,
        pending: int = 0,
    ) -> list[tuple[str, Configuration]]:
        """Return every policy at every capacity, each with its capacity as it was given.

        A loop excludes options. A ceiling that cannot be computed is left out; a note says so,
        unless the policies are `unasked`, those of the command itself.
        """
        steps, policies, loop = self.cache.step_tokens, self.policies, self.loop or {}
        if steps is not None and read.block_tokens.count is None:
            raise click.UsageError(
                f"--step-tokens needs --block-tokens, got {steps} without: no block size fits all "
                "requests"
            )
        groups = self.groups(read)
        if not groups.num_full:
            reason = f"{BELADY} cannot be computed for a model without a full group"
            policies = _without_belady(policies, reason, is_noted=not unasked)
        if loop:
            _check_loop(loop, groups)
            reason = f"{BELADY} needs to know what comes next, which depends on the hits"
            policies = _without_belady(policies, reason, is_noted=not unasked)
        hosts, device = self.hosts(read, groups), self.device(read, groups)
        if INFINITE in policies and not groups.is_bounded(junctions=device > 0):
            note(
                f"{INFINITE} may not be a ceiling: a policy that hits less computes more, and "
                "stores its windows or states"
            )
        common: dict[str, Any] = {"device": device, "groups": groups, "pending": pending, **loop}
        cells = [
            (text, Configuration(policy=policy, host=host, **common))
            for text, host in hosts
            for policy in policies
        ]
        if loop:
            no_times = "--closed-loop needs times of arrival, got timestamp 0 in all requests"
            check_trace(cells[0][1], read, no_times)
        return cells


def in_grid(function: CommandFunction) -> CommandFunction:
    """Add the options of a trace, its blocks and memory, and combine all: ``grid``, ``outputs``."""
    options = (
        _options.json_option,
        _options.reading_options,
        hint_options,
        _options.full_blocks_option,
        _options.block_tokens_option,
        model_options,
        _options.block_bytes_option,
        _options.device_memory_option,
    )
    return bundled("decoding", Decoding, *options)(bundled("grid", Grid)(in_outputs(function)))


def slots_of(
    asked: Capacity,
    option: str,
    trace: DecodedTrace,
    groups: GroupChunks,
    share: int = 1,
    *,
    least: int = 1,
) -> int:
    """Return a capacity in slots, those of one engine if it is shared by several."""
    unique = unique_chunks(groups, trace.unique_blocks)
    size, unit = groups.slot_bytes, groups.slot_name
    return asked.resolve(size, unique, option, least * share, unit=unit) // share


def check_trace(one: Configuration, read: Decoded, no_times: str) -> None:
    """Refuse a trace that has no sessions for a loop, or for which a message says `no_times`."""
    try:
        one.check_trace(read.trace)
    except NoSessionsError as error:
        raise click.UsageError(f"--closed-loop: {error}") from None
    except ValueError:
        raise click.UsageError(no_times) from None


def _without_belady(policies: tuple[str, ...], reason: str, *, is_noted: bool) -> tuple[str, ...]:
    """Leave out a ceiling that cannot be computed for that reason."""
    left = tuple(policy for policy in policies if policy != BELADY)
    if not left:
        raise click.UsageError(f"--policy must name another policy: {reason}")
    if is_noted and len(left) < len(policies):
        note(f"{reason}: it is left out")
    return left


def _check_loop(loop: Mapping[str, Any], groups: GroupChunks) -> None:
    """Refuse a closed loop if prompts have no length, or with options that it excludes."""
    refuse_given("must go without --closed-loop, got both", "step_tokens", "pending", "results")
    if not groups.is_plain:
        raise click.UsageError("--closed-loop needs a model with one group, got several")
    if loop["rate"] is not None and not groups.knows_tokens:
        raise click.UsageError(
            f"--closed-loop needs --block-tokens, got {loop['rate']} without: no block size fits "
            "all requests"
        )
