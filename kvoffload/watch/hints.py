"""Clients' hints about their sessions, by source, and what a policy has learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvoffload.types import MOST_SOURCES, HintSource

__all__ = ["HeardHints", "heard"]


@dataclass(frozen=True, slots=True)
class HeardHints:
    """The hints of one source.

    Attributes
    ----------
    source : str or None
        Its name; None for all sources that are not told apart.
    ends, expects : int
        Requests with a hint that the session ends, and with one of when it returns. A hint repeated
        at the finish counts once.
    returns : int or None
        Requests that came back to blocks with a hint of when, since the start or the last reset.
        None if the policy does not rank by such hints.
    factor, requests_per_s : float or None
        The greatest of the factors of `kvoffload.types.HintSource`, by which a hint multiplies the
        chance that a block is used, and the number of requests per stated second at which it does.
        Hints that mean nothing have a factor between 1 and 2, by chance, or more where sessions
        return after few fixed times. None without evidence.
    """

    source: str | None
    ends: int
    expects: int
    returns: int | None = None
    factor: float | None = None
    requests_per_s: float | None = None


def heard(
    sources: Sequence[str], said: Sequence[Sequence[int]], policy: Any
) -> tuple[HeardHints, ...]:
    """Return the hints of each source that gave any.

    `said` counts the ends and expectations of each of `sources` and, at index `MOST_SOURCES`, those
    of all others. `policy` is that of the manager, None when the manager no longer exists.
    """
    learned: dict[str | None, HintSource] = {
        each.name: each for each in getattr(policy, "hint_sources", ())
    }
    names: list[str | None] = list(sources)
    if {*learned} - {None} != {*names}:
        learned.pop(None, None)  # the policy's "others" are not the same sources
    found = []
    for index, name in [*enumerate(names), (MOST_SOURCES, None)]:
        ends, expects = said[index]
        if not ends and not expects:
            continue
        known = learned.get(name)
        if known is None:
            found.append(HeardHints(name, ends, expects))
        else:
            best = max(known.factors, key=itemgetter(1), default=(None, None))
            found.append(HeardHints(name, ends, expects, known.returns, best[1], best[0]))
    return tuple(found)
