"""``kvoffload fleet``: engines behind a router, with shared or private tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import click

from kvoffload.advise import engine_of
from kvoffload.advise.accelerators import Accelerator, accelerator_names
from kvoffload.advise.accelerators import accelerator as accelerator_of
from kvoffload.advise.choice import Prices
from kvoffload.advise.findings import BUSY
from kvoffload.advise.remarks import workers_remark
from kvoffload.advise.setup import LINK_BANDWIDTH
from kvoffload.replay import Configuration, DecodedTrace, GroupChunks, Result, Tier, replay_all
from kvoffload.replay.configuration import DECODE_NS, MOST_ENGINES

from . import _fleet_options, _options
from ._decoding import Decoded
from ._fields import Row
from ._fleet_result import Fleets, pooled_of
from ._grid import Grid, check_trace, in_grid, slots_of
from ._loop_options import MOST_DECODE_MS, NS_A_MS, RECORDED, read_rate
from ._machines import Effort, check_dask, efforts
from ._output import Outputs, csv_option, plot_option
from ._sources import refuse_given
from ._terminal import note

NEEDS_RATE = (
    "needs a rate of prefill, got it without: give --prefill-tokens-per-second, or --accelerator "
    "and a known --model"
)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers that are compared, as given."""

    disks: tuple[_options.Capacity, ...]
    shared: tuple[_fleet_options.Shared, ...]
    tier_policy: str

    def of(
        self, read: Decoded, groups: GroupChunks, share: int
    ) -> Iterator[tuple[str | None, Tier | None]]:
        """Yield each in words, with its blocks; None for no tier."""
        if not self.shared and not self.disks:
            yield None, None
        for one in self.shared:
            if one.capacity is None:
                yield one.text, None
                continue
            blocks = slots_of(one.capacity, "--shared", read.trace, groups)
            yield f"shared {one.text}", Tier("shared", blocks, one.policy or self.tier_policy)
        for disk in self.disks:
            blocks = slots_of(disk, "--disk", read.trace, groups, share)
            yield f"own {disk.text}", Tier("private", blocks, self.tier_policy)


def _fleet(common: dict[str, Any], **own: Any) -> Configuration:
    try:
        return Configuration(**common, **own)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None


@click.command(
    epilog=_options.examples(
        "kvoffload fleet trace.jsonl --engines 8 --capacity 1% --policy hit-density",
        "kvoffload fleet trace.jsonl --block-bytes 2MiB --capacity 64GiB --disk 1TB",
        "kvoffload fleet trace.jsonl --router session,'events?sees=device' --total",
    ),
)
@_options.traces_argument
@click.option(
    "--engines",
    **_options.of_list("N", _fleet_options.read_engines, "1,2,4,8"),
    help=f"Numbers of engines to compare, 1 to {MOST_ENGINES}.",
)
@click.option(
    "--router",
    "routers",
    **_options.of_list("ROUTER", _fleet_options.read_router, "round-robin,session,prefix,events"),
    help="Routers to compare, comma-separated or repeated: NAME or 'NAME?OPTION=VALUE'.",
)
@click.option(
    "--policy",
    "policies",
    **_options.of_list("POLICY", _options.read_policy, "lru,hit-density"),
    help="Policies of host memory to compare; see kvoffload policies.",
)
@_options.capacity_option("1%")
@click.option(
    "--disk",
    "disks",
    **_options.of_list("SIZE", _options.read_capacity),
    help="Private tier behind each engine's host memory: sizes to compare.",
)
@_fleet_options.shared_option
@click.option(
    "--tier-policy",
    default="lru",
    show_default=True,
    **_options.of_text("POLICY", _options.read_policy),
    help="Policy of tiers whose address does not name one.",
)
@click.option(
    "--total",
    is_flag=True,
    help="Take --capacity, --device-memory and --disk as sizes of all engines together.",
)
@click.option(
    "--accelerator",
    **_options.of_text("NAME", accelerator_of),
    help=f"Accelerator of each engine, for its rates: {', '.join(accelerator_names())}.",
)
@click.option(
    "--prefill-tokens-per-second",
    "rate",
    **_options.of_text("RATE", read_rate),
    help="Prompt tokens that an engine computes per second; estimated from --model and "
    "--accelerator by default. Without any of these, prompts take no time.",
)
@click.option(
    "--link-bandwidth",
    **_options.of_text("SIZE", _options.read_bandwidth),
    help="Bytes per second from host memory to an engine.  [default: that of --accelerator, "
    "else 50GB]",
)
@click.option(
    "--tier-bandwidth",
    default="10GB",
    show_default=True,
    **_options.of_text("SIZE", _options.read_bandwidth),
    help="Bytes per second from a tier to an engine.",
)
@click.option(
    "--decode-ms",
    type=_options.NumberRange(min=0, max=MOST_DECODE_MS),
    default=DECODE_NS / NS_A_MS,
    show_default=True,
    help="Milliseconds per token of an answer.",
)
@click.option(
    "--slots",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=0,
    show_default=True,
    help="Most requests that an engine computes or answers at once; 0: no limit.",
)
@click.option(
    "--closed-loop",
    type=click.Choice(["closed", RECORDED]),
    metavar=f"closed|{RECORDED}",
    help="Send each request of a session only after the previous one was answered: by the engines "
    "(closed), or after as long as recorded (recorded).",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of routers."
)
@_options.jobs_option
@_options.dask_option
@plot_option("the tokens hit over the memory of all engines")
@csv_option("fleet")
@_fleet_options.price_option
@in_grid
@_options.bundled("tiers", Tiers)
def fleet(
    grid: Grid,
    *,
    engines: tuple[int, ...],
    routers: tuple[str, ...],
    tiers: Tiers,
    total: bool,
    accelerator: Accelerator | None,
    rate: int | None,
    link_bandwidth: int | None,
    tier_bandwidth: int,
    decode_ms: float,
    slots: int,
    closed_loop: str | None,
    seed: int,
    jobs: int | None,
    dask: str | None,
    price: Prices | None,
    outputs: Outputs,
) -> None:
    """Compare engines behind a router: how many, which router, how much memory.

    TRACE is read as by kvoffload sweep; its timestamps are the times of arrival. Each engine has
    its own cache on the accelerator, its host memory and perhaps a tier behind that, its own or
    shared by all. Sizes are per engine unless --total is given. When a request arrives, the router
    picks an engine from what it knows at that time.
    """
    cache = grid.cache
    cache.check()
    decoding = replace(grid.decoding, arrivals=True)
    outputs.check(decoding.traces)
    check_dask(dask, decoding.traces)
    engine = engine_of(cache.model, accelerator, workers=cache.tensor_parallel)
    rate = rate or int(engine.prefill_rate) or None
    if rate is None:
        names = ("accelerator", "link_bandwidth", "tier_bandwidth", "decode_ms", "slots")
        refuse_given(NEEDS_RATE, *names)
    elif cache.model is not None and (assumed := workers_remark(engine, cache.model)):
        note(assumed)
    if not tiers.disks and all(one.capacity is None for one in tiers.shared):
        rule = "must go with --disk or --shared, got it without"
        refuse_given(rule, "tier_policy", "tier_bandwidth")
    read = decoding.read()
    trace = read.trace
    if read.block_tokens.count is None:
        raise click.UsageError("--block-tokens must be given: no block size fits all requests")
    groups = grid.groups(read)
    if not groups.is_plain:
        raise click.UsageError("--model must have no windows or states for a fleet, got some")
    if price is not None and not groups.slot_bytes:
        raise click.UsageError("--price needs --model or --block-bytes, got neither")
    if rate is not None and not groups.slot_bytes:
        raise click.UsageError(
            "--prefill-tokens-per-second needs --model or --block-bytes, for the times of reads, "
            f"got {rate} without"
        )
    common: dict[str, Any] = {
        "rate": rate,
        "link": link_bandwidth or int(engine.link_bandwidth) or LINK_BANDWIDTH,
        "tier_link": tier_bandwidth,
        "groups": groups,
        "decode_ns": round(decode_ms * NS_A_MS),
        "slots": slots,
        "loop": closed_loop or "open",
        "seed": seed,
    }

    cells = []
    for count in engines:
        share = count if total else 1
        device = grid.device(read, groups, share)
        for given, host in grid.hosts(read, groups, share):
            for text, tier in tiers.of(read, groups, share):
                own = {"engines": count, "host": host, "device": device, "tier": tier}
                cells += [
                    (_fleet(common, router=router, policy=policy, **own), given, text)
                    for policy in grid.policies
                    for router in routers
                ]
    cells = list(dict.fromkeys(cells))
    for one, _, _ in cells:
        _options.manager_of(one.policy, one.host, "block")
    check_trace(
        cells[0][0],
        read,
        "--prefill-tokens-per-second: trace must have times of arrival with a rate, got 0 in all "
        "requests",
    )
    _fleet_options.note_limits(trace, {one: given for one, given, _ in cells})
    with efforts(jobs, dask, decoding, trace.num_blocks) as effort:
        results = _replayed(trace, [one for one, _, _ in cells], effort)
    rows = [Row(one, results[one], given, tier) for one, given, tier in cells]
    view = Fleets(read, rows, cache.text(groups), results, price, is_total=total)
    _warn_of_load(view)
    outputs.show(view)


def _replayed(
    trace: DecodedTrace, fleets: list[Configuration], effort: Effort
) -> dict[Configuration, Result]:
    """Replay all fleets, and the same memory as one cache."""
    pooled = [one for fleet in fleets for one in pooled_of(fleet)]
    work = list(dict.fromkeys([*fleets, *pooled]))
    with effort.on("replaying", len(work), "fleets") as how:
        return {result.configuration: result for result in replay_all(trace, work, **how)}


def _warn_of_load(view: Fleets) -> None:
    """Note fleets whose engines cannot keep up with an open loop."""
    if view.first.loop != "open":
        return
    loaded = [row for row in view.rows if (row.result.busy or 0) >= BUSY]
    if loaded:
        note(
            f"{len(loaded):,} of {len(view.rows):,} fleets are busy {BUSY:.0%} of the time or "
            "more: in an open loop their queues only grow; with --closed-loop sessions wait"
        )
