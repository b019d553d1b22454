"""Options that ``kvoffload fleet`` and ``kvoffload advise --engines`` share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import click
import numpy as np

from kvoffload._printable import plural
from kvoffload._sizes import parse_size
from kvoffload.advise.choice import Prices
from kvoffload.errors import describe
from kvoffload.replay import Configuration, DecodedTrace
from kvoffload.replay.arrivals import NONE
from kvoffload.replay.configuration import MOST_ENGINES
from kvoffload.replay.routers import parse_router

from ._options import Capacity, of_list, of_text, public, read_capacity, read_policy
from ._terminal import note

UNSHARED = "none"


def read_engines(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_ENGINES:
        raise ValueError(f"must be 1 ... {MOST_ENGINES}, got {describe(text)}")
    return int(text)


def read_router(text: str) -> str:
    return str(parse_router(text))


def read_prices(text: str) -> Prices:
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if text.count(",") != 1 or set(pairs) != {"host", "tier"}:
        raise ValueError(f"must have the form host=N,tier=N, got {describe(text)}")
    values = {}
    for name, value in pairs.items():
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = math.nan
        if not 0 <= values[name] < math.inf:
            raise ValueError(f"{name} must be a number >= 0, got {describe(value)}")
    return Prices(**values)


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tier as it was given, without passwords; `capacity` is None for none."""

    text: str
    capacity: Capacity | None = None
    policy: str | None = None


def read_shared(text: str) -> Shared:
    """Read a size, the address of a tier that gives one, or none."""
    if text == UNSHARED:
        return Shared(text)
    if ":" not in text:
        return Shared(text, read_capacity(text))
    from kvoffload.tiers.options import split_url  # needs an extra if it is not compiled

    kind, place, options = split_url(text)
    shown = public(f"{kind}:{place}")
    if "capacity" not in options:
        raise ValueError(f"address must have a capacity, got none in {describe(shown)}")
    try:
        size = parse_size(options["capacity"])
    except ValueError as error:
        raise ValueError(f"capacity {error}") from None
    policy = read_policy(options["policy"]) if "policy" in options else None
    shown += f"?capacity={options['capacity']}" + (f"&policy={policy}" if policy else "")
    return Shared(shown, Capacity(options["capacity"], size=size), policy)


shared_option = click.option(
    "--shared",
    **of_list("SIZE|ADDRESS|none", read_shared),
    help="One tier behind all engines: sizes to compare, or addresses with a capacity, such as "
    "'slab:PATH?capacity=2TB&policy=lru', which are not opened.",
)

price_option = click.option(
    "--price",
    **of_text("host=N,tier=N", read_prices),
    help="Prices of a GiB of host memory and of a tier, to choose the cheapest fleet that is "
    "enough. By default, the one with the least host memory is chosen, then the smallest tier.",
)


def note_limits(
    trace: DecodedTrace, fleets: Mapping[Configuration, str], *, is_given: bool = True
) -> None:
    """Note sessions that a fleet cannot balance, requests that it cannot store and useless tiers.

    `fleets` maps each to its host memory, in words. Unless that `is_given`, requests that are
    longer are not named: the memory is not the user's.
    """
    sizes = (trace.starts[1:] - trace.starts[:-1]).tolist()
    least = min(fleet.host for fleet in fleets)
    longer = sum(size for size in sizes if size > least)
    if longer and is_given:
        note(
            f"{longer:,} of {trace.num_blocks:,} blocks belong to requests that are longer than a "
            f"host memory of {plural(least, 'block')}, which refuses them"
        )
    small = [
        memory
        for fleet, memory in fleets.items()
        if fleet.tier is not None
        and fleet.tier.kind == "private"
        and fleet.tier.slots <= fleet.host
    ]
    if small:
        note(
            "an engine's own tier adds nothing if it is no larger than the host memory of "
            f"{small[0]}"
        )
    balanced = not any(fleet.spec.name in ("session", "sticky") for fleet in fleets)
    if balanced or trace.arrivals is None:
        return
    most, total = max(fleet.engines for fleet in fleets), int(trace.lengths.sum())
    is_named = trace.arrivals.sessions != NONE
    tokens = np.bincount(trace.arrivals.sessions[is_named], trace.lengths[is_named])
    largest = int(tokens.max(initial=0))
    if total and largest * most > total and most > 1:
        note(
            f"one session has {largest / total:.0%} of the tokens, more than 1 of {most} "
            "engines can take: session and sticky cannot balance it"
        )
