"""Many replays of one trace, divided among processes or machines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .configuration import Configuration
from .loop import Replays
from .offline import BELADY
from .processes import Elsewhere, spread
from .requests import DecodedTrace
from .results import Result

__all__ = ["replay_all"]


def replay_all(
    trace: DecodedTrace,
    configurations: Iterable[Configuration],
    *,
    parts: int = 1,
    jobs: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Result]:
    """Replay a trace through configurations; yield each result when it is known, without a log.

    The order is not that of the configurations: each is replayed once, the longest replays first.
    `Result.configuration` says whose a result is. The trace is decoded once into files that all
    processes map. A script that starts processes does so below ``if __name__ == "__main__":``, as
    with `multiprocessing`.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    configurations : iterable of Configuration
        What to replay.
    parts : int
        As in `replay`.
    jobs : int
        Number of processes; 1 computes in this one.
    elsewhere : Elsewhere, optional
        Other machines, which compute them instead.
    progress : callable, optional
        Called with the number of results that have been yielded and used.

    Raises
    ------
    TypeError, ValueError
        As `replay` does.
    ChildProcessError
        If a process is killed.
    """
    ordered = sorted(dict.fromkeys(configurations), key=_shortness)
    for configuration in ordered:
        configuration.check_trace(trace)
    make = functools.partial(_replaying, parts=parts)
    for done, result in enumerate(spread(trace, ordered, make, jobs, elsewhere), start=1):
        yield result
        if progress is not None:
            progress(done)


def _shortness(one: Configuration) -> tuple[Any, ...]:
    """Return a rank, the lower the longer a replay takes; those that start last should be short."""
    if one.policy == BELADY:
        rank = 0
    elif one.engines > 1 and one.spec.sees is not None:
        rank = 1
    else:
        rank = 2 if one.tier is not None else 3 if not one.is_in_turn else 4
    return rank, one.policy, one.host, one.device


def _replaying(trace: DecodedTrace, parts: int) -> Callable[[Configuration], Result]:
    """Return a function that replays a configuration."""
    replays = Replays(trace)

    def compute(configuration: Configuration) -> Result:
        return replays.of(configuration, parts=parts, log=False)

    return compute
