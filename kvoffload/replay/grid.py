"""Many replays of one trace, divided among processes or machines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvoffload._checks import check_instance, check_int

from .configuration import Configuration
from .loop import Replays
from .offline import BELADY
from .processes import Elsewhere, spread
from .requests import DecodedTrace
from .results import Result


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
    check_instance("trace", trace, DecodedTrace, "a DecodedTrace")
    check_instance("configurations", configurations, Iterable, "an iterable of Configuration")
    given = list(configurations)
    for position, one in enumerate(given):
        check_instance(f"configurations[{position}]", one, Configuration, "a Configuration")
        one.check_trace(trace)
    check_int("parts", parts, 1)
    check_int("jobs", jobs, 1)
    check_instance("elsewhere", elsewhere, Elsewhere | None, "Elsewhere or None")
    check_instance("progress", progress, Callable | None, "callable or None")
    ordered = sorted(dict.fromkeys(given), key=_shortness)
    found = spread(trace, ordered, functools.partial(_replaying, parts=parts), jobs, elsewhere)
    return found if progress is None else _counted(found, progress)


def _counted(results: Iterator[Result], progress: Callable[[int], object]) -> Iterator[Result]:
    """Yield results; call `progress` with how many have been used."""
    for done, result in enumerate(results, start=1):
        yield result
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
