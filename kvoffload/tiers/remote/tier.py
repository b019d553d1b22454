"""Tiers on media that other processes share: a directory, a server."""

from __future__ import annotations

from kvoffload.errors import describe
from kvoffload.tiers.engine.contract import Medium, Pool
from kvoffload.tiers.engine.jobs import Jobs
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.engine.transfer import staging_buffers
from kvoffload.tiers.native import io
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.region import Region

from .shared import SharedStore
from .store import RemoteStore
from .verdicts import Beliefs

__all__ = ["RemoteTier"]


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
    queued later. Beyond that `discard` forgets everything, as ``forget()`` does, and logs a line.

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
        self._shared = shared
        super().__init__(
            jobs, Beliefs(jobs, store), _SharedMedium(jobs, shared, store), capacity_bytes
        )

    @property
    def place(self) -> str:
        """The address of the medium, without credentials."""
        return self._shared.medium.place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r}, name={self.name!r})"


class _SharedMedium(Medium):
    """The threads that call a `RemoteStore`."""

    def __init__(self, jobs: Jobs, shared: SharedStore, store: RemoteStore) -> None:
        self.namespace = store.namespace
        self._jobs = jobs
        self._shared = shared
        self._store = store
        self._is_closed = False

    def open_pool(self, region: Region) -> Pool:
        options, store = self._jobs.options, self._store
        buffers = staging_buffers(options.staging_bytes, store.block_bytes)
        store.use(buffers)
        calls = io.CallStore(
            self._shared,
            block_bytes=store.content_bytes,
            slot_bytes=buffers.block_bytes,
            fingerprint=store.fingerprint,
            blocks_per_call=store.blocks_per_call,
            keys_per_query=store.keys_per_query,
        )
        pool: Pool = io.Pool(region, calls, options.threads, buffers, ack_copied=options.ack_copied)
        try:
            store.start()
        except BaseException:
            pool.close(0.0)
            raise
        return pool

    def before_close(self) -> None:
        self._store.stop()

    def close(self, until: float, *, has_ended: bool) -> bool:  # noqa: ARG002
        if not self._is_closed:
            self._is_closed = True
            if has_ended:
                self._store.close()
        return has_ended

    def leave(self) -> None:
        self._store.abandon()
