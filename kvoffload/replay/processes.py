"""Jobs divided among processes, which end with the one that started them, whatever ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

__all__ = ["spread"]

Job = TypeVar("Job")
Result = TypeVar("Result")


def spread(
    jobs: Sequence[Job],
    do: Callable[[Job], Result],
    processes: int,
    begin: Callable[..., object],
    arguments: tuple[Any, ...],
) -> Iterator[tuple[Job, Result]]:
    """Do jobs in other processes; yield each with its result as soon as it is there.

    Parameters
    ----------
    jobs : sequence
        What to do, begun in this order.
    do : callable
        Does one; a function of a module.
    processes : int
        How many to start at most.
    begin : callable
        Called with `arguments` once in each, before its first job; likewise.
    arguments : tuple
        What can be pickled, some kilobytes at most: a process that is killed before it has read
        more than a pipe holds would leave this one waiting.

    Raises
    ------
    ChildProcessError
        If a process is killed.
    """
    # A process that is started anew, not forked, is safe whatever threads there are.
    pool = ProcessPoolExecutor(
        min(processes, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(begin, arguments),
    )
    try:
        with _interrupts_held():
            running = {pool.submit(do, job): job for job in jobs}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        message = "a process was killed, perhaps for want of memory; fewer of them need less"
        raise ChildProcessError(message) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait while processes are started, and in them until they are ready for it.

    A pool that is interrupted while it starts a process loses count of them and may wait for one
    for ever; so the signal is noted, whichever thread the system gives it to, and sent again at the
    end. The processes inherit that it is blocked: one that it reached while it still imports
    modules would print where it was.
    """
    came: list[int] = []
    handler = None
    if threading.current_thread() is threading.main_thread():  # the only one that it interrupts
        handler = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    mask = None
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin(begin: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Make a new process ready: Ctrl-C ends it without a word, and so does its parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # where the parent was killed nobody else would end this process
