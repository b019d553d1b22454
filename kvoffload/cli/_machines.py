"""The machines behind a Dask scheduler that run the jobs of ``--dask``."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvoffload import IMPLEMENTATION
from kvoffload._extras import require
from kvoffload.replay.processes import DifferentMachineError, Elsewhere, check_code, code_here
from kvoffload.traces.lines import STDIN

from ._decoding import Decoding
from ._terminal import note, progress_bar

FEW_BLOCKS, FEW_BLOCKS_IN_PYTHON = 20_000, 1_000
"""Most blocks of a trace for which no process is started unless --jobs asks for some."""

CONNECT_SECONDS = 10
FIRST_NOTE_SECONDS = 5
LONGEST_PAUSE_SECONDS = 600
"""Most seconds between two notes that there is no worker."""


def check_dask(address: str | None, traces: Sequence[str]) -> None:
    """Refuse a cluster that is not available or could not read the trace."""
    if address is None:
        return
    if STDIN in traces:
        raise click.UsageError("--dask needs files that all machines read, got standard input")
    if not re.search(r":\d+$", address):
        raise click.UsageError(f"--dask must have a port, as in tcp://host:8786, got {address!r}")
    require("distributed", "--dask", "dask")


@dataclass(frozen=True, slots=True)
class Effort:
    """The processes or machines that compute, and whether progress is shown."""

    jobs: int
    elsewhere: Elsewhere | None

    @contextlib.contextmanager
    def on(self, description: str, total: int, unit: str) -> Iterator[dict[str, Any]]:
        """Provide the arguments of a function that computes, with a bar of its progress."""
        with progress_bar(description, total, unit=unit) as progress:
            yield {"jobs": self.jobs, "elsewhere": self.elsewhere, "progress": progress}


@contextlib.contextmanager
def efforts(
    jobs: int | None, address: str | None, decoding: Decoding, num_blocks: int
) -> Iterator[Effort]:
    """Provide what computes: `jobs` processes, or a Dask cluster.

    By default one per core, and one for a trace of few blocks, whose replays take less time than
    another process does to start.
    """
    with _on_machines(address, decoding) as elsewhere:
        few = FEW_BLOCKS if IMPLEMENTATION == "compiled" else FEW_BLOCKS_IN_PYTHON
        yield Effort(jobs or (1 if num_blocks <= few else _usable_cores()), elsewhere)


def _usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _on_machines(address: str | None, decoding: Decoding) -> Iterator[Elsewhere | None]:
    """Provide the machines behind a Dask scheduler for a grid; None if no scheduler was named.

    A machine with other code or another trace is an error, as is the end of the scheduler. While
    there is no machine, a note says so.
    """
    if address is None:
        yield None
        return
    distributed = importlib.import_module("distributed")  # which has no types
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # errors are raised, too
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise click.UsageError(f"--dask {address}: no scheduler answers: {reason}") from None
    with client:
        files = tuple(str(Path(name).absolute()) for name in decoding.traces)
        workers = _Workers(client, address)
        try:
            yield Elsewhere(client.get_executor(), replace(decoding, traces=files), workers.watch)
        except DifferentMachineError as error:
            raise click.UsageError(f"--dask {address}: {error}") from None
        except CancelledError:
            raise ConnectionError(f"--dask {address}: the scheduler has ended") from None
        except distributed.KilledWorker as error:
            raise ChildProcessError(f"--dask {address}: {' '.join(str(error).split())}") from None


class _Workers:
    """The workers of a scheduler: whether there are any, and whether they have the same code.

    Each job checks the code, too; only a worker of an earlier version, or without kvoffload, cannot
    do so.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self._known: set[str] = set()
        self._missed_from = time.monotonic()
        self._pause = FIRST_NOTE_SECONDS

    def watch(self, jobs: int) -> None:
        """Check new workers; note from time to time that `jobs` wait and there is no worker."""
        try:
            present = set(self._client.nthreads())
        except OSError:
            raise CancelledError from None
        now = time.monotonic()
        if present:
            self._missed_from, self._pause = now, FIRST_NOTE_SECONDS
            new = sorted(present - self._known)
            self._known |= present
            for worker, answer in self._ask(code_here, new).items():
                found = self._version(worker) if isinstance(answer, Exception) else answer
                if found is not None:
                    check_code(worker, code_here(), found)
        elif now - self._missed_from >= self._pause:
            count = f"{jobs:,} job{'s wait' if jobs > 1 else ' waits'}"
            note(
                f"--dask {self._address}: no worker for {now - self._missed_from:.0f} s, "
                f"{count} for one; start: dask worker {self._address}"
            )
            self._pause += min(self._pause, LONGEST_PAUSE_SECONDS)

    def _version(self, worker: str) -> str | None:
        """Return what a worker that does not know `code_here` has; None if it is gone."""
        version = self._ask(pkgutil.resolve_name, [worker], "kvoffload:__version__").get(worker)
        return f"no kvoffload ({version})" if isinstance(version, Exception) else version

    def _ask(self, function: Any, workers: list[str], *arguments: str) -> dict[str, Any]:
        """Return the answers of workers, or the exceptions that they raise.

        A worker that is gone, or hangs, has no answer.
        """
        try:
            answers = self._client.run(
                function,
                *arguments,
                workers=workers,
                on_error="return",
                callback_timeout=CONNECT_SECONDS,
            )
        except (OSError, TimeoutError):
            return {}
        return {who: what for who, what in answers.items() if not isinstance(what, OSError)}
