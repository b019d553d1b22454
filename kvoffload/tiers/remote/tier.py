"""Tiers on media that other processes share: a directory, a server."""

from __future__ import annotations

import logging

from kvoffload.errors import describe
from kvoffload.tiers.engine.contract import FORGET, MEET, Medium, Pool, Wait
from kvoffload.tiers.engine.jobs import Jobs
from kvoffload.tiers.engine.threads import Pool as Threads
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.metrics import write_line
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.region import Region

from .shared import EPOCH_S, SharedStore
from .store import RemoteStore
from .verdicts import Beliefs

__all__ = ["RemoteTier"]

FORGET_S = 1.0
"""Seconds that `RemoteTier.forget` waits for the medium."""


class RemoteTier(ComposedTier):
    """A tier on a medium that other processes share and that may not answer.

    The tier is staged: a call that does not return holds none of the region's memory.

    Parameters
    ----------
    store : RemoteStore
        The medium, which no other tier uses; the tier closes it. It is not called before a region
        is attached.
    options : TierOptions, optional
        Threads, buffers and the like.
    capacity_bytes : int, optional
        Most bytes of blocks that are kept, if known.

    Raises
    ------
    TypeError
        If an argument is wrong.

    Notes
    -----
    At most 100,000 removals are queued for the medium, and 100,000 further keys are kept to be
    queued later. Beyond that `discard` forgets everything, without waiting for the medium, and logs
    a line. Before `attach`, `forget` returns False, and `attach` then forgets on the medium. Until
    the medium has confirmed it, it is retried every second, with or without jobs, and puts are
    dropped.

    The store determines the cost of a job. A server that does not answer costs one deadline, and
    then nothing until the breaker allows a probe.
    """

    def __init__(
        self,
        store: RemoteStore,
        options: TierOptions = TierOptions(),  # noqa: B008 # it is frozen
        capacity_bytes: int | None = None,
    ) -> None:
        if not isinstance(store, RemoteStore):
            raise TypeError(f"store must be a RemoteStore, got {describe(store)}")
        store.name = options.name
        jobs = Jobs(options, store.content_bytes, is_shared=True)
        shared = SharedStore(store)
        jobs.metrics.lost = shared.lost
        self._shared = shared
        super().__init__(
            jobs, Beliefs(jobs, shared, store), _SharedMedium(jobs, shared, store), capacity_bytes
        )

    @property
    def place(self) -> str:
        """The address of the medium, without credentials."""
        return self._shared.medium.place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r}, name={self.name!r})"


class _SharedMedium(Medium):
    """The threads that call a `RemoteStore`, and the chores that read or write its epoch."""

    def __init__(self, jobs: Jobs, shared: SharedStore, store: RemoteStore) -> None:
        self.namespace = store.namespace
        self._jobs = jobs
        self._shared = shared
        self._store = store
        self._orders = 0  # chores that read or write the epoch and have not been done
        self._is_closed = False

    def open_pool(self, region: Region) -> Pool:
        options = self._jobs.options
        pool = Threads(
            region,
            self._shared,
            options.threads,
            options.staging_bytes,
            ack_copied=options.ack_copied,
        )
        try:
            self._store.start()
        except BaseException:
            pool.close(0.0)
            raise
        return pool

    def attached(self, wait: Wait) -> None:
        """Learn the medium's epoch.

        A put that is submitted before the epoch is known is dropped, since it may be older than the
        medium's last `forget`. If the medium does not answer, the next job asks again.
        """
        self._order(MEET)
        wait(self._has_no_order, EPOCH_S)

    def _order(self, kind: int) -> None:
        """Queue the chore that reads or writes the epoch."""
        self._orders += 1
        self._jobs.chore(self._order_ended, kind, b"")

    def _order_ended(self, status: int) -> None:  # noqa: ARG002
        self._orders -= 1

    def _has_no_order(self) -> bool:
        return not self._orders

    def forget(self) -> None:
        if self._jobs.pool is not None:
            self._order(FORGET)

    def confirm(self, wait: Wait) -> bool:
        if self._jobs.pool is None:
            return False
        wait(self._has_no_order, FORGET_S)
        if self._shared.owed:
            write_line(
                logging.ERROR,
                "tier %r could not tell its medium to forget; it will try again",
                self._jobs.options.name,
            )
            return False
        return True

    @property
    def has_forgotten(self) -> bool:
        return not self._shared.owed

    def before_close(self) -> None:
        """Try once more to write a pending epoch."""
        if self._shared.owed:
            self._order(FORGET)
        self._store.stop()

    def close(self, until: float, *, has_ended: bool) -> bool:  # noqa: ARG002
        if not self._is_closed:
            self._is_closed = True
            if self._shared.owed:
                write_line(
                    logging.ERROR,
                    "tier %r was closed before its medium could be told to forget",
                    self._jobs.options.name,
                )
            if has_ended:
                self._shared.close()
        return has_ended

    def leave(self) -> None:
        self._store.abandon()
