"""The result of ``kvoffload replay`` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffload.advise.remarks import group_remarks
from kvoffload.advise.units import percent_text
from kvoffload.replay import GroupChunks, ReplayResult
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import implementation_of
from kvoffload.replay.results import HitRatios, LoopTimes

from ._loop_options import duration_text, times_object
from ._sources import BlockTokens, Source
from ._terminal import Column, print_tables


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one capacity."""

    policy: str  # policy string
    given: str  # capacity as it was given
    capacity: int  # slots
    result: ReplayResult


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the table: its title, and the text for a cell."""

    title: str
    text: Callable[[Cell], str]
    numeric: bool = True

    def of(self, cells: list[Cell]) -> Column:
        """Return the column."""
        return Column(self.title, [self.text(cell) for cell in cells], self.numeric)


def milliseconds(nanoseconds: int) -> str:
    """Return a duration in milliseconds with three significant digits."""
    return duration_text(nanoseconds / 1e6)


def timed(text: Callable[[LoopTimes], str]) -> Callable[[Cell], str]:
    """Return a function that gives the text of a cell's closed-loop times."""
    return lambda cell: "-" if cell.result.loop is None else text(cell.result.loop)


def known(text: Callable[[ReplayResult], str]) -> Callable[[Cell], str]:
    """Return a function that gives the text of a policy's cell and a dash for a ceiling's."""
    return lambda cell: "-" if cell.policy in CEILINGS else text(cell.result)


WHICH = [
    Field("policy", lambda cell: cell.policy, numeric=False),
    Field("capacity\nblocks", lambda cell: f"{cell.capacity:,}"),
]
GIVEN = Field("given", lambda cell: cell.given)
FOUND = [
    Field("requests", lambda cell: f"{cell.result.requests:,}"),
    Field("blocks", lambda cell: f"{cell.result.blocks:,}"),
    Field("hits", lambda cell: f"{cell.result.hit_blocks:,}"),
    Field("hit ratio", lambda cell: percent_text(cell.result.hit_ratio)),
    Field("tokens hit", lambda cell: percent_text(cell.result.token_hit_ratio)),
]
KEPT = [
    Field("stored", lambda cell: f"{cell.result.stored_slots:,}"),
    Field("evicted", known(lambda result: f"{result.evicted_slots:,}")),
    Field("refused", known(lambda result: f"{result.refused:,}")),
]
WHICH_SLOTS = [WHICH[0], Field("capacity\nslots", WHICH[1].text)]
FOUND_TOKENS = [
    FOUND[0],
    Field("tokens\nasked for", lambda cell: f"{cell.result.asked_tokens:,}"),
    Field("tokens hit", lambda cell: f"{cell.result.loaded_tokens:,}"),
    FOUND[3],
]
KEPT_SLOTS = [
    Field("slots\nstored", KEPT[0].text),
    Field("slots\nevicted", KEPT[1].text),
    KEPT[2],
]
NOT_ADMITTED = Field("not\nadmitted", known(lambda result: f"{result.not_admitted:,}"))
TIME = [
    Field("p50\nms", known(lambda result: milliseconds(result.times.percentile(50)))),
    Field("p99\nms", known(lambda result: milliseconds(result.times.percentile(99)))),
    Field("max\nms", known(lambda result: milliseconds(result.times.max))),
    Field("blocks/s", known(lambda result: f"{result.blocks_per_second:,.0f}")),
]
LOOP = [
    Field("first token\np50 s", timed(lambda times: duration_text(times.ttft_p50))),
    Field("p95\ns", timed(lambda times: duration_text(times.ttft_p95))),
    Field("mean\ns", timed(lambda times: duration_text(times.ttft_mean))),
    Field("whole\nmean s", timed(lambda times: duration_text(times.latency_mean))),
    Field("requests\n/s", timed(lambda times: f"{times.requests_per_second:.3g}")),
    Field("tokens\n/s", timed(lambda times: f"{times.tokens_per_second:,.0f}")),
    Field("busy", timed(lambda times: percent_text(times.busy))),
]
RAN_BY = Field(
    "implementation",
    lambda cell: "-" if cell.policy in CEILINGS else implementation_of(cell.policy),
    numeric=False,
)


def steps_text(step_tokens: int) -> str:
    """Return how prompts are offered, in words."""
    return f"offered in steps of {step_tokens:,} tokens"


UNKNOWN_OF_CEILINGS = (
    "evicted",
    "refused",
    "not_admitted",
    "implementation",
    "manager_seconds",
    "request_seconds",
    "blocks_per_second",
)


class Apart(Protocol):
    """The hit ratios of honest and lying sessions, None if none lies."""

    @property
    def honest_hit_ratio(self) -> float | None: ...

    @property
    def liar_hit_ratio(self) -> float | None: ...


def liar_columns(results: Sequence[Apart]) -> list[Column]:
    """Return the hit ratios of honest and lying sessions as columns; none if none lies."""
    if all(one.liar_hit_ratio is None for one in results):
        return []
    return [
        Column("hit ratio\nhonest", [percent_text(one.honest_hit_ratio) for one in results]),
        Column("hit ratio\nliars", [percent_text(one.liar_hit_ratio) for one in results]),
    ]


class Missing(Protocol):
    """The percentiles of the tokens that requests miss, None if they are not known."""

    @property
    def missed_p50(self) -> int | None: ...

    @property
    def missed_p95(self) -> int | None: ...


def missed_columns(results: Sequence[Missing]) -> list[Column]:
    """Return the tokens that a request misses, at the median and at 95 %; none if not known."""
    if all(one.missed_p50 is None for one in results):
        return []
    return [
        Column("tokens missed\np50", [tokens_text(one.missed_p50) for one in results]),
        Column("\np95", [tokens_text(one.missed_p95) for one in results]),
    ]


def tokens_text(count: int | None) -> str:
    """Return a number of tokens; a dash if it is not known."""
    return "-" if count is None else f"{count:,}"


def liars_object(result: HitRatios) -> dict[str, float | None]:
    """Return the hit ratios of honest and lying sessions, if some lie."""
    if result.liar_asked is None:
        return {}
    return {
        "honest_hit_ratio": result.honest_hit_ratio,
        "liar_hit_ratio": result.liar_hit_ratio,
    }


def as_object(cell: Cell) -> dict[str, object]:
    """Return a cell as the object that ``--json`` prints."""
    result = cell.result
    row = result.as_row()
    values: dict[str, object] = {
        "policy": cell.policy,
        "capacity": cell.capacity,
        "capacity_given": cell.given,
        "implementation": implementation_of(cell.policy),
        "requests": result.requests,
        "blocks": result.blocks,
        "asked": row["asked"],
        "hits": row["hits"],
        "hit_ratio": result.hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "missed_p50": result.missed_p50,
        "missed_p95": result.missed_p95,
        **liars_object(result),
        "stored": result.stored_slots,
        "evicted": result.evicted_slots,
        "refused": result.refused,
        "not_admitted": result.not_admitted,
        "manager_seconds": result.manager_seconds,
        "request_seconds": {
            "p50": result.times.percentile(50) / 1e9,
            "p99": result.times.percentile(99) / 1e9,
            "max": result.times.max / 1e9,
        },
        "blocks_per_second": result.blocks_per_second,
    }
    if cell.policy in CEILINGS:
        values.update(dict.fromkeys(UNKNOWN_OF_CEILINGS))
    if result.loop is not None:
        values.update(times_object(result.loop))
    return values


def print_cells(
    source: Source,
    cells: list[Cell],
    block_tokens: BlockTokens,
    unique_blocks: int | None,
    device_blocks: int,
    *,
    step_tokens: int | None = None,
    hints: str | None = None,
    loop: str | None = None,
    model: str | None = None,
    groups: GroupChunks,
) -> None:
    """Print the cells as one table, or as several if the terminal is too narrow for one."""
    facts = source.names
    if block_tokens.count is not None:
        facts.append(str(block_tokens))
    if unique_blocks is not None:
        facts.append(f"{unique_blocks:,} unique blocks")
    if device_blocks:
        result = cells[0].result
        facts.append(
            f"{device_blocks:,} slots on device"
            if result.asked_blocks is None
            else f"{result.blocks - result.asked_blocks:,} found in {device_blocks:,} on device"
        )
    if step_tokens is not None:
        facts.append(steps_text(step_tokens))
    which, found, kept = WHICH, FOUND, KEPT
    if not groups.is_plain:
        which, found, kept = WHICH_SLOTS, FOUND_TOKENS, KEPT_SLOTS
    if any(cell.given != str(cell.capacity) for cell in cells):
        found = [GIVEN, *found]
    if any(cell.result.not_admitted for cell in cells):
        kept = [*kept, NOT_ADMITTED]
    ran_by = sorted({RAN_BY.text(cell) for cell in cells} - {"-"})
    by_one = f", {ran_by[0]} implementation" if len(ran_by) == 1 else ""
    time = [*TIME, RAN_BY] if len(ran_by) > 1 else TIME
    title = ["; ".join(facts), *(remark for remark in (hints, loop, model) if remark)]
    title += group_remarks(groups)
    title.append(f"ms: time in the manager per request{by_one}")
    tables = [found, kept, *([LOOP] if any(cell.result.loop for cell in cells) else []), time]
    columns = [[field.of(cells) for field in fields] for fields in tables]
    columns[0] += liar_columns([cell.result for cell in cells])
    if cells[0].result.tokens:
        columns[0] += missed_columns([cell.result for cell in cells])
    print_tables(title, [field.of(cells) for field in which], columns)
