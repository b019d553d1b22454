"""Jobs divided among processes, which always end with the process that started them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import kvoffload
from kvoffload.traces.scratch import scratch_file

from .arrivals import Arrivals
from .hints import TraceHints
from .requests import DecodedTrace, digest_of

__all__ = [
    "Code",
    "DifferentMachineError",
    "Elsewhere",
    "check_code",
    "code_here",
    "mapped_arrays",
    "shared_arrays",
    "spread",
]

ASK_SECONDS = 1.0
"""Longest wait for the end of a job without a call of `Elsewhere.watch`."""

_ENDING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_BLOCKED = set(_ENDING) - {signal.SIGTERM}

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextlib.contextmanager
def shared_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, str]]:
    """Write arrays to temporary files for `mapped_arrays`, and provide the path of each."""
    with contextlib.ExitStack() as opened:
        paths = {}
        for name, array in arrays.items():
            stream, paths[name] = opened.enter_context(scratch_file())
            # not the stream itself: numpy writes to a file in C, and loses the reason of an error
            np.save(SimpleNamespace(write=stream.write), array, allow_pickle=False)
            stream.flush()
        yield paths


def mapped_arrays(paths: Mapping[str, str]) -> dict[str, npt.NDArray[Any]]:
    """Map arrays that `shared_arrays` wrote; processes that map the same share memory."""
    return {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}


Code = tuple[str, str]
"""The version of this package, and a digest of its code in Python."""


class DifferentMachineError(ValueError):
    """A machine has other code or another trace than the one that asks."""


@functools.cache
def code_here() -> Code:
    """Return the code of this process."""
    folder, found = Path(kvoffload.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return kvoffload.__version__, found.hexdigest()[:12]


def check_code(worker: str, wanted: Code, got: Code | str) -> None:
    """Refuse a worker whose code is not the wanted one; a text tells what it has instead."""
    if got != wanted:
        rule = f"worker {worker} must have kvoffload {wanted[0]}, code {wanted[1]}"
        found = got if isinstance(got, str) else f"{got[0]}, code {got[1]}"
        raise DifferentMachineError(
            f"{rule}, got {found}; install the same on all machines and restart the worker"
        )


def _watch_nothing(_: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Machines that run jobs, and their function to read the trace.

    Attributes
    ----------
    executor : concurrent.futures.Executor
        Only its `submit` is used. It must handle jobs lost with a machine.
    read : callable
        Returns the trace; picklable, with paths valid on the machines.
    watch : callable, optional
        Called with the number of jobs that have not ended: at the start, when none has ended for a
        second, and when one fails. It may raise.
    """

    executor: Executor
    read: Callable[[], DecodedTrace]
    watch: Callable[[int], None] = _watch_nothing


def spread(
    trace: DecodedTrace,
    jobs: Sequence[Job],
    make: Callable[[DecodedTrace], Callable[[Job], Result]],
    processes: int,
    elsewhere: Elsewhere | None = None,
) -> Iterator[Result]:
    """Run jobs over a trace; yield each result as soon as it is ready.

    The processes map the trace and start the jobs in the given order; with 1, or for a single job,
    no process is started. `make` is called once per process, before its first job, and returns the
    function that runs one. It must be picklable in at most a few kilobytes: if a process were
    killed before it had read more than a pipe holds, the parent would wait for ever.

    ChildProcessError if a process is killed. If the iteration ends early for any other reason, the
    processes end too.

    With `elsewhere` its executor runs all jobs instead. A worker keeps one trace, and raises
    DifferentMachineError, a ValueError, if it reads a different one or has other code.
    """
    if elsewhere is not None:
        yield from _by_executor(trace, jobs, make, elsewhere)
        return
    if processes == 1 or len(jobs) < 2:
        yield from map(make(trace), jobs)
        return
    with contextlib.ExitStack() as opened:
        paths = {
            part: opened.enter_context(shared_arrays(arrays))
            for part, arrays in _parts(trace).items()
        }
        yield from _in_processes(jobs, processes, (paths, make))


def _parts(trace: DecodedTrace) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Return the arrays of the parts of a trace that a replay uses."""
    parts = {"trace": trace, "hints": trace.hints, "arrivals": trace.arrivals}
    return {name: part.arrays() for name, part in parts.items() if part is not None}


def _by_executor(
    trace: DecodedTrace,
    jobs: Sequence[Job],
    make: Callable[[DecodedTrace], Callable[[Job], Result]],
    elsewhere: Elsewhere,
) -> Iterator[Result]:
    elsewhere.watch(len(jobs))
    wanted = code_here(), _digest(trace)
    arguments = wanted, secrets.token_hex(16), elsewhere.read, make
    running = {elsewhere.executor.submit(_do_elsewhere, *arguments, job) for job in jobs}
    try:
        yield from _results(running, _ended(running), elsewhere.watch)
    finally:
        with _signals_held():
            for future in running:
                future.cancel()


def _ended(futures: Iterable[Future[Result]]) -> SimpleQueue[Future[Result]]:
    """Return a queue that each future joins when it ends.

    `concurrent.futures.wait` takes the locks of all futures, and keeps some if Ctrl-C comes in
    between; then a pool waits for ever for its thread, which waits for one of them.
    """
    ended: SimpleQueue[Future[Result]] = SimpleQueue()
    with _signals_held():
        for future in futures:
            future.add_done_callback(ended.put)
    return ended


def _results(
    running: set[Future[Result]],
    ended: SimpleQueue[Future[Result]],
    watch: Callable[[int], None],
) -> Iterator[Result]:
    """Yield each result as soon as it is ready; `watch` is that of `Elsewhere`."""
    while running:
        try:
            future = ended.get(timeout=ASK_SECONDS)
        except Empty:
            watch(len(running))
            continue
        if future.exception():
            watch(len(running))
        running.remove(future)
        yield future.result()


def _digest(trace: DecodedTrace) -> str:
    """Return a digest of the parts of a trace that a replay uses."""
    return ":".join(map(digest_of, _parts(trace).values()))


@dataclass(slots=True)
class _Kept:
    """A trace that a worker keeps between its jobs, and the function for those of one run."""

    digest: str
    trace: DecodedTrace
    run: str
    do: Callable[[Any], Any]


_kept_by_worker: _Kept | None = None
_keeping = threading.Lock()


def _do_elsewhere(
    wanted: tuple[Code, str],
    run: str,
    read: Callable[[], DecodedTrace],
    make: Callable[[DecodedTrace], Callable[[Any], Any]],
    job: Any,
) -> Any:
    """Run a job in a worker, which reads the trace unless it keeps it from another run.

    It must have the wanted code, and a trace with the wanted digest.
    """
    global _kept_by_worker  # noqa: PLW0603 - what a worker keeps between its jobs
    code, digest = wanted
    check_code(_own_name(), code, code_here())
    with _keeping:
        kept = _kept_by_worker
        if kept is None or kept.digest != digest:
            kept = _kept_by_worker = None
            trace = read()
            if _digest(trace) != digest:
                raise DifferentMachineError(
                    f"trace must be the same on all machines, got another one on {_own_name()}"
                )
            kept = _kept_by_worker = _Kept(digest, trace, run, make(trace))
        elif kept.run != run:
            kept.run, kept.do = run, make(kept.trace)
        do = kept.do
    return do(job)


def _own_name() -> str:
    """Return the address of this worker of Dask; elsewhere the name of the machine."""
    distributed = sys.modules.get("distributed")
    try:
        return str(distributed.get_worker().address)  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        return platform.node()


def _in_processes(jobs: Sequence[Any], processes: int, arguments: tuple[Any, ...]) -> Iterator[Any]:
    with _signals_held():
        # A spawned process is safe with any threads; a forked one is not.
        pool = ProcessPoolExecutor(
            min(processes, len(jobs)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=arguments,
        )
    try:
        with _signals_held():
            running = {pool.submit(_do, job) for job in jobs}
        yield from _results(running, _ended(running), _watch_nothing)
    except BrokenProcessPool:
        message = "a process was killed, perhaps for want of memory; fewer of them need less"
        raise ChildProcessError(message) from None
    except BaseException:  # cancelled here, a future would end the pool's thread in a traceback
        for process in list((pool._processes or {}).values()):  # public from 3.14 on
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Defer Ctrl-C while processes start, and within them until they are ready for it.

    A pool interrupted while it starts a process loses count of its processes and may wait for one
    for ever. So this signal, and any other that would raise here, is noted, whichever thread the
    system delivers it to, and sent again at the end. The processes inherit a blocked signal: one
    interrupted during its imports would print a traceback, and the resource tracker must outlive
    them all, although a closing terminal signals every process.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # signals interrupt only it
        for signum in _ENDING:
            if callable(signal.getsignal(signum)):
                handlers[signum] = signal.signal(signum, lambda signum, _: came.append(signum))
    mask = None
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])


_job_of_process: Callable[[Any], Any]


def _begin(
    paths: Mapping[str, Mapping[str, str]],
    make: Callable[[DecodedTrace], Callable[[Any], Any]],
) -> None:
    """Set up a new process: it ends silently on Ctrl-C, and when its parent ends."""
    global _job_of_process  # noqa: PLW0603 - what a pool's process keeps between its jobs
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        arrays = {part: mapped_arrays(files) for part, files in paths.items()}
        hints = TraceHints(**arrays["hints"]) if "hints" in arrays else None
        arrivals = Arrivals(**arrays["arrivals"]) if "arrivals" in arrays else None
        trace = DecodedTrace(**arrays["trace"], hints=hints, arrivals=arrivals)
        _job_of_process = make(trace)
    except OSError:  # its files are gone with it
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)
        raise


def _do(job: Any) -> Any:
    return _job_of_process(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # nothing else ends this process if the parent was killed
