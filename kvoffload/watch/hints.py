"""What clients said of their sessions, by source, and what a policy has made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.managers._watching import MOST_SOURCES
from kvoffload.types import HintGain, HintSource

__all__ = ["HeardHints", "gain_of", "heard"]


@dataclass(frozen=True, slots=True)
class HeardHints:
    """The hints of one source.

    Attributes
    ----------
    source : str or None
        Its name; None for all sources that are not told apart.
    ends, expects : int
        Requests of which it said that the session ends, and when it returns. The same words again
        at the finish count once.
    returns : int or None
        Requests that came back to blocks of which it had said when, since the policy knows nothing
        older: the start or the last reset. None, as the next two, where the policy does not rank by
        that.
    slope, spread : float or None
        How good its words are, as in `kvoffload.HintSource`: by how much ln of what came rises with
        ln of what it said, and the standard deviation around that. None below 10 returns.
    """

    source: str | None
    ends: int
    expects: int
    returns: int | None = None
    slope: float | None = None
    spread: float | None = None


def heard(
    sources: Sequence[str], said: Sequence[Sequence[int]], policy: Any
) -> tuple[HeardHints, ...]:
    """Return the hints of each source that said something.

    `said` counts ends and expectations of each of `sources`, and behind `MOST_SOURCES` those of all
    others. `policy` is that of the manager, None where there is none any more.
    """
    learned: dict[str | None, HintSource] = {
        each.name: each for each in getattr(policy, "hint_sources", ())
    }
    names: list[str | None] = list(sources)
    if {*learned} - {None} != {*names}:
        learned.pop(None, None)  # others than these
    found = []
    for index, name in [*enumerate(names), (MOST_SOURCES, None)]:
        ends, expects = said[index]
        if not ends and not expects:
            continue
        known = learned.get(name)
        if known is None:
            found.append(HeardHints(name, ends, expects))
        else:
            found.append(HeardHints(name, ends, expects, known.returns, known.slope, known.spread))
    return tuple(found)


def gain_of(policy: Any) -> HintGain | None:
    """Return what a policy finds that hints bring; None where it cannot tell."""
    gain: HintGain | None = getattr(policy, "hint_gain", None)
    return gain
