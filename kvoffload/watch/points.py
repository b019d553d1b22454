"""The points of a report: the misses of every shadow, relative to those of the present one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from .estimate import Point, make_point
from .minis import miniature_bias
from .shadows import IN_FLIGHT, Shadows, Window, lru_misses, overlapping

TAILS = 0.05
"""Points are marked above this ratio of tokens that windows or states kept from being loaded to hit
tokens."""

ENDS = 0.05
"""Points are marked above this share of requests that say that their session ends: a manager that
knows other blocks would release others."""


def points(shadows: Shadows, window: Window) -> Iterator[Point]:
    """Yield the points of the LRU curve, then those of the miniatures."""
    counts, policy = window.counts, shadows.policy
    others = [mini for mini in shadows.minis if mini not in shadows.lru]
    if policy is None or shadows.core.block_tokens is None:
        reason = "own_policy" if policy is None else "no_full_group"
        keys = [("lru", memory) for memory in shadows.memory] + [each.key for each in others]
        yield from (Point(*key, reason=reason, resets=counts["resets"]) for key in keys)
        return
    point = partial(
        make_point, asked=counts["asked"], missed=counts["missed"], resets=counts["resets"]
    )
    live = None if policy == "lru" else window.minis[policy, 1.0].missed
    learnt = {mini.key: mini.marks(window.minis[mini.key], counts["resets"]) for mini in others}
    of_live = learnt.get((policy, 1.0), ())  # whose misses all ratios are relative to
    own = {mini.memory: window.minis[mini.key].missed for mini in shadows.lru}
    lru: dict[float, Sequence[int]] = {**own} or _listed(shadows, counts["policy_judged"])
    base = policy_base = live or lru[1.0]
    slots = shadows.policy_slots if own else shadows.slots
    bias = miniature_bias(shadows.policy_slots)
    if live is None and not own:
        # Both sides of a ratio must be of the same sample, and these two are of the whole one.
        lru = _listed(shadows, counts["judged"])
        base, bias = lru[1.0], 0.0
    cold = lacking_hits(shadows, window, base)
    cold_base = 0.0 if live is not None else cold[1.0]
    for memory, missed in lru.items():
        yield point(
            "lru",
            memory,
            slots=slots * memory,
            base=base,
            shadow=missed,
            stored=missed,
            bias=bias + max(cold[memory], cold_base),
            marks=(*_marks(shadows, window, memory, overlaps=bool(own)), *of_live),
        )
    for mini in others:
        total = window.minis[mini.key]
        # The present configuration is counted.
        own_marks = () if total.missed is live else dict.fromkeys((*of_live, *learnt[mini.key]))
        at = shadows.policy_slots * mini.memory
        yield point(
            *mini.key,
            slots=at,
            base=policy_base,
            shadow=total.missed,
            stored=total.stored,
            bias=miniature_bias(at) + cold_base,
            marks=(*_marks(shadows, window, mini.memory, overlaps=False), *own_marks),
        )


def _listed(shadows: Shadows, judged: Sequence[Sequence[int]]) -> dict[float, Sequence[int]]:
    """Return the misses of the list of LRU at each size, by quarter."""
    return {memory: lru_misses(judged, size) for size, memory in enumerate(shadows.memory)}


def _marks(shadows: Shadows, window: Window, memory: float, *, overlaps: bool) -> tuple[str, ...]:
    """Return the marks of any point at a size; the shadow may model stores that overlap."""
    counts, sizes = window.counts, shadows.memory
    present = sizes.index(1.0)
    nearest = min(range(len(sizes)), key=lambda size: abs(sizes[size] - memory))
    room = math.floor(shadows.slots * memory * 0.99) - shadows.plan.quarters
    hit_tokens = (counts["asked"] - counts["missed"]) * shadows.core.block_tokens
    marks = {
        "tails": counts["tail_missed_tokens"] > TAILS * hit_tokens,
        "hints": sum(ends for ends, _ in counts["hints"]) > ENDS * counts["requests"],
        "filling": window.overall["fullest"][nearest] < room,
        # A miniature refuses as the manager does. The list did not refuse what the manager refused.
        "long_requests": not overlaps and counts["long_requests"][min(nearest, present)],
        "in_flight": not overlaps and overlapping(counts, present) > IN_FLIGHT * counts["requests"],
    }
    return tuple(name for name, applies in marks.items() if applies)


def lacking_hits(shadows: Shadows, window: Window, base: Sequence[int]) -> dict[float, float]:
    """Return by memory how far blocks that only the list had may shift a point.

    The miniatures of LRU began without the blocks that LRU had at that time. A miniature that
    is full when the window begins lacks none of them; after a reset LRU lacks them, too.
    """
    counts, before = window.counts, window.before
    shift = dict.fromkeys(shadows.memory, 0.0)
    if not counts["asked"] or before.counts["resets"] > shadows.lru_resets:
        return shift
    scale = counts["missed"] / counts["asked"] / (sum(base) or 1)
    for mini in shadows.lru:
        former = before.minis.get(mini.key)
        room = mini.slots - (sum(former.resident) if former else 0)
        shift[mini.memory] = scale * max(0.0, min(mini.lacking, room))
    return shift
