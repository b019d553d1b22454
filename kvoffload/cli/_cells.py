"""Policies at capacities, as ``kvoffload replay`` and ``sweep`` compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from kvoffload.replay import Configuration, GroupChunks
from kvoffload.replay.arrivals import NoSessionsError
from kvoffload.replay.offline import BELADY, INFINITE

from ._decoding import Decoded
from ._model_options import CacheOptions, unique_chunks
from ._options import Capacity, check_sizes
from ._terminal import note


def cells_of(
    read: Decoded,
    cache: CacheOptions,
    policies: tuple[str, ...],
    capacities: tuple[Capacity, ...],
    *,
    block_bytes: int | None,
    device_memory: Capacity | None,
    loop: Mapping[str, Any],
    unasked: bool = False,
    pending: int = 0,
    results: str | None = None,
) -> list[tuple[str, Configuration]]:
    """Return every policy at every capacity, each with its capacity as it was given.

    `loop` is as from `loop_options`, and excludes options. A ceiling that cannot be computed is
    left out; a note says so, unless the policies are `unasked`, those of the command itself.
    """
    block_tokens, steps = read.block_tokens.count, cache.step_tokens
    if steps is not None and block_tokens is None:
        raise click.UsageError(
            f"--step-tokens needs --block-tokens, got {steps} without: no block size fits all "
            "requests"
        )
    groups = cache.groups(block_tokens, block_bytes or read.source.block_bytes)
    size, unit = groups.slot_bytes, groups.slot_name
    check_sizes(size, capacity=capacities, device_memory=[device_memory])
    if not groups.num_full:
        reason = f"{BELADY} cannot be computed for a model without a full group"
        policies = _without_belady(policies, reason, is_noted=not unasked)
    if loop:
        excluded = {"step-tokens": steps, "pending": pending, "results": results}
        _check_loop(loop, groups, excluded)
        reason = f"{BELADY} needs to know what comes next, which depends on the hits"
        policies = _without_belady(policies, reason, is_noted=not unasked)
    unique = unique_chunks(groups, read.trace.unique_blocks)
    slots = [(one.text, one.resolve(size, unique, unit=unit)) for one in capacities]
    device = 0
    if device_memory is not None:
        device = device_memory.resolve(size, unique, "--device-memory", least=0, unit=unit)
    if INFINITE in policies and not groups.is_bounded(junctions=device > 0):
        note(
            f"{INFINITE} may not be a ceiling: a policy that hits less computes more, and stores "
            "its windows or states"
        )
    common: dict[str, Any] = {"device": device, "groups": groups, "pending": pending, **loop}
    cells = [
        (text, Configuration(policy=policy, host=host, **common))
        for text, host in slots
        for policy in policies
    ]
    if loop:
        try:
            cells[0][1].check_trace(read.trace)
        except NoSessionsError as error:
            raise click.UsageError(f"--closed-loop: {error}") from None
        except ValueError:
            raise click.UsageError(
                "--closed-loop needs times of arrival, got timestamp 0 in all requests"
            ) from None
    return cells


def _without_belady(policies: tuple[str, ...], reason: str, *, is_noted: bool) -> tuple[str, ...]:
    """Leave out a ceiling that cannot be computed for that reason."""
    left = tuple(policy for policy in policies if policy != BELADY)
    if not left:
        raise click.UsageError(f"--policy must name another policy: {reason}")
    if is_noted and len(left) < len(policies):
        note(f"{reason}: it is left out")
    return left


def _check_loop(
    loop: Mapping[str, Any], groups: GroupChunks, excluded: Mapping[str, object]
) -> None:
    """Refuse a closed loop if prompts have no length, or with options that it excludes."""
    for option, value in excluded.items():
        if value:
            raise click.UsageError(f"--closed-loop and --{option} exclude each other, got both")
    if not groups.is_plain:
        raise click.UsageError("--closed-loop needs a model with one group, got several")
    if loop["rate"] is not None and not groups.knows_tokens:
        raise click.UsageError(
            f"--closed-loop needs --block-tokens, got {loop['rate']} without: no block size fits "
            "all requests"
        )
