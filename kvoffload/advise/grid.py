"""Every policy at every capacity, over processes, each replay in parts that can be compared.

The requests are written once, as arrays, into a folder that all processes map; so no process parses
the trace again and none holds a copy of it.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload import CPUOffloadingManager
from kvoffload.replay import ReplayResult, replay
from kvoffload.traces import Request

from .ceiling import belady_hits

__all__ = ["PARTS", "Outcome", "Part", "StoredTrace", "replay_grid"]

PARTS = 10
"""Parts of a trace, of equally many requests, over which results are compared."""

Item = TypeVar("Item", bound=np.generic)

CHUNK = 2**16  # requests or ids between two writes


class StoredTrace:
    """Iterate over requests kept as arrays in a folder, without their answers and sessions.

    Parameters
    ----------
    folder : Path
        Where `write` put them.

    Attributes
    ----------
    ids : (n,) uint64, block ids
        Those of all requests, one after the other.
    lengths : (m,) int64, blocks
        How many of them belong to each request.
    tokens : (m,) int64, tokens
        Length of each prompt.
    times : (m,) float64, milliseconds
        Arrival of each request.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids = _mapped(folder / "ids", np.uint64)
        self.lengths = _mapped(folder / "lengths", np.int64)
        self.tokens = _mapped(folder / "tokens", np.int64)
        self.times = _mapped(folder / "times", np.float64)

    @classmethod
    def write(cls, requests: Iterable[Request], folder: Path) -> StoredTrace:
        """Write requests into an empty folder; memory does not grow with their number."""
        with (
            (folder / "ids").open("wb") as ids,
            (folder / "lengths").open("wb") as lengths,
            (folder / "tokens").open("wb") as tokens,
            (folder / "times").open("wb") as times,
        ):
            for batch in _batches(requests):
                for request in batch:
                    _append(ids, request.hash_ids, np.uint64)
                _append(lengths, [len(request.hash_ids) for request in batch], np.int64)
                _append(tokens, [request.input_length for request in batch], np.int64)
                _append(times, [request.timestamp for request in batch], np.float64)
        return cls(folder)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Request]:
        start = 0
        rows = zip(self.times.tolist(), self.tokens.tolist(), self.lengths.tolist(), strict=True)
        for time, tokens, length in rows:
            yield Request(time, tokens, 0, tuple(self.ids[start : start + length].tolist()))
            start += length

    def part_ends(self) -> list[int]:
        """Return for each part the number of requests up to its end."""
        return [len(self) * part // PARTS for part in range(1, PARTS + 1)]

    def part_seconds(self) -> list[float]:
        """Return for each part the time from its first arrival to the next part's, seconds."""
        if not len(self):
            return [0.0] * PARTS
        ends = self.part_ends()
        times = np.maximum.accumulate(self.times)
        marks = [times[min(end, len(self) - 1)] for end in [0, *ends]]
        return [float(after - before) / 1000 for before, after in itertools.pairwise(marks)]


def _batches(requests: Iterable[Request]) -> Iterator[list[Request]]:
    batch: list[Request] = []
    blocks = 0
    for request in requests:
        batch.append(request)
        blocks += len(request.hash_ids)
        if len(batch) >= CHUNK or blocks >= CHUNK:
            yield batch
            batch, blocks = [], 0
    yield batch


def _append(file: BinaryIO, values: Sequence[float], dtype: npt.DTypeLike) -> None:
    file.write(np.array(values, dtype=dtype).tobytes())


def _mapped(path: Path, dtype: type[Item]) -> npt.NDArray[Item]:
    if path.stat().st_size == 0:  # nothing cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of a replay counted, blocks."""

    blocks: int
    hits: int
    stored: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one capacity.

    Attributes
    ----------
    policy : str
        Policy string.
    capacity : int
        Capacity, blocks.
    result : ReplayResult
        What came of the whole replay.
    parts : tuple of Part
        What came of each of its parts; the cache is not emptied between them.
    """

    policy: str
    capacity: int
    result: ReplayResult
    parts: tuple[Part, ...]


class _Counted:
    """Pass requests on and note a manager's counters where a part ends."""

    def __init__(self, trace: StoredTrace, manager: CPUOffloadingManager) -> None:
        self._trace = trace
        self._manager = manager
        self._notes: list[Part] = []

    def __iter__(self) -> Iterator[Request]:
        ends = self._trace.part_ends()
        for number, request in enumerate(self._trace):
            while number == ends[len(self._notes)]:
                self._note()
            yield request

    def _note(self) -> None:
        stats = self._manager.stats()
        self._notes.append(
            Part(
                stats["lookup_blocks"],
                stats["hit_blocks"],
                stats["stored_blocks"],
                stats["evicted_blocks"],
            )
        )

    def parts(self) -> tuple[Part, ...]:
        """Return what each part added, once all requests are through."""
        while len(self._notes) < PARTS:
            self._note()
        before = [Part(0, 0, 0, 0), *self._notes]
        return tuple(
            Part(
                new.blocks - old.blocks,
                new.hits - old.hits,
                new.stored - old.stored,
                new.evicted - old.evicted,
            )
            for old, new in zip(before, self._notes, strict=False)
        )


def replay_cell(
    trace: StoredTrace, policy: str, capacity: int, block_tokens: int | None = None
) -> Outcome:
    """Replay a trace through a manager of one policy and capacity."""
    manager = CPUOffloadingManager(block_tokens or 1, capacity, policy)
    counted = _Counted(trace, manager)
    result = replay(counted, manager, block_tokens=block_tokens)
    return Outcome(policy, capacity, result, counted.parts())


@dataclass(frozen=True, slots=True)
class Grid:
    """All outcomes, and the ceilings.

    Attributes
    ----------
    outcomes : dict of (str, int) to Outcome
        By policy and capacity.
    belady : dict of int to int
        By capacity, the blocks that no policy can hit more of.
    """

    outcomes: dict[tuple[str, int], Outcome]
    belady: dict[int, int]


def replay_grid(
    trace: StoredTrace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    block_tokens: int | None = None,
    processes: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Grid:
    """Replay a trace through every policy at every capacity, and find the ceilings.

    Parameters
    ----------
    trace : StoredTrace
        The requests.
    policies : sequence of str
        Policy strings.
    capacities : sequence of int
        Capacities, blocks.
    block_tokens : int, optional
        Tokens a block, for the share of tokens that were hit.
    processes : int
        How many to divide the work among; with 1 it is done in this one.
    progress : callable, optional
        Called with the number of replays done.

    Raises
    ------
    ValueError
        If a policy's options do not go with a capacity.
    """
    # the longest first, so that the last process is not left alone with one of them
    jobs: list[tuple[str | None, int]] = [(None, capacity) for capacity in capacities]
    jobs += [(policy, capacity) for policy in policies for capacity in capacities]
    grid = Grid({}, {})
    done = 0

    def take(job: tuple[str | None, int], found: Outcome | int) -> None:
        nonlocal done
        if isinstance(found, Outcome):
            grid.outcomes[found.policy, found.capacity] = found
        else:
            grid.belady[job[1]] = found
        done += 1
        if progress is not None:
            progress(done)

    if processes == 1:
        for job in jobs:
            take(job, _run(trace, job, block_tokens))
        return grid
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_quiet) as pool:
        running = {pool.submit(_run_at, trace.folder, job, block_tokens): job for job in jobs}
        try:
            for future in as_completed(running):
                take(running[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return grid


def _quiet() -> None:
    """Let Ctrl-C end a worker without a traceback; the parent says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_at(folder: Path, job: tuple[str | None, int], block_tokens: int | None) -> Outcome | int:
    return _run(StoredTrace(folder), job, block_tokens)


def _run(
    trace: StoredTrace, job: tuple[str | None, int], block_tokens: int | None
) -> Outcome | int:
    policy, capacity = job
    if policy is None:
        return belady_hits(trace.ids, trace.lengths, capacity)
    return replay_cell(trace, policy, capacity, block_tokens)
