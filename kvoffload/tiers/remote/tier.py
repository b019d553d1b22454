"""Tiers on media that other processes share, which have verdicts instead of an index.

The contents of a shared directory or server are unknown here: others write to it and remove from
it. The last observation of a key is a *verdict*, valid for some time: for `HIT_S` if the block was
present, for `MISS_S` if it was absent. Keys without a verdict need a query to the medium.

Invariants
    A key is in `_storing` from a put to its settling, and a block is in `_dropping` while a chore
    that removes it is unfinished: such keys are MISS without I/O. Writes wait for chores, so that a
    block that is dropped and stored again stays. Verdicts are of the present generation: another
    one clears them.
Cost
    `SharedMedium.known` is one lookup in a dict.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_instance
from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import ABSENT, DROP, HIT, OK, TOUCH, UNKNOWN, Medium
from kvoffload.tiers.engine.jobs import Job, Jobs
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.native import io
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.region import Region, staging_buffers

from .store import RemoteStore, pack_keys

HIT_S = 30.0
"""Seconds for which a present block is a hit."""
MISS_S = 1.0
MAX_VERDICTS = 100_000
KEYS_PER_CHORE = 1024
RETRY_DROPS_S = 1.0


class Verdicts:
    """Verdicts on keys, each valid for some time; beyond `limit` keys the oldest leaves first.

    Notes
    -----
    Thread-safety: callers serialise. Complexity: O(1) per key.
    """

    __slots__ = ("_clock", "_limit", "_until")

    def __init__(
        self, limit: int = MAX_VERDICTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._clock = clock
        # When a verdict expires; negative if the key is absent.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def state(self, key: bytes) -> int:
        """Return the verdict on a key, a `State`."""
        until = self._until.get(key)
        if until is None:
            return UNKNOWN
        if until > 0:
            return HIT if self._clock() < until else UNKNOWN
        return ABSENT if self._clock() < -until else UNKNOWN

    def there(
        self, keys: Iterable[bytes], seconds: float = HIT_S, asked_at: float = math.inf
    ) -> None:
        """Record keys as present, except those found absent after `asked_at`."""
        self._record(keys, 1, seconds, MISS_S, asked_at)

    def absent(self, keys: Iterable[bytes], asked_at: float = math.inf) -> None:
        """Record keys as absent, except those found present after `asked_at`."""
        self._record(keys, -1, MISS_S, HIT_S, asked_at)

    def _record(
        self, keys: Iterable[bytes], sign: int, seconds: float, other_s: float, asked_at: float
    ) -> None:
        """Record verdicts of a sign; those of the other are valid for `other_s` seconds."""
        known, until = self._until, self._clock() + seconds
        for key in keys:
            if -sign * known.get(key, 0.0) - other_s > asked_at:
                continue
            known[key] = sign * until
            known.move_to_end(key)
            if len(known) > self._limit:
                known.popitem(last=False)

    def clear(self) -> None:
        """Clear all verdicts."""
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)


class SharedMedium(Medium):
    """Verdicts about a shared medium, and the threads that call its `RemoteStore`."""

    asks = True

    def __init__(self, jobs: Jobs, store: RemoteStore) -> None:
        super().__init__(jobs, store.namespace)
        self.store = store
        self.place = store.place
        self.verdicts = Verdicts()
        self._touched = Verdicts()
        self._storing: dict[bytes, bool] = {}  # False: it was dropped meanwhile
        # By put from before a forget: the keys that were dropped meanwhile.
        self._unwanted: dict[int, list[bytes]] = {}
        # Blocks to remove, by generation and key: those of queued chores, and the others.
        self._dropping: set[tuple[int, bytes]] = set()
        self._undropped: dict[tuple[int, bytes], None] = {}
        self._drops_failed_at = 0.0
        self._is_touching = False  # a chore that touches is unfinished
        self._is_closed = False

    # -- forgetting --------------------------------------------------------------------------

    def forget(self) -> None:
        unwanted = {key for key, is_wanted in self._storing.items() if not is_wanted}
        for job in self.jobs.unsettled.values():
            if job.op == "put":
                self._unwanted.setdefault(job.job, [key for key in job.keys if key in unwanted])
        self._storing.clear()  # the puts under way are another generation's
        self.verdicts.clear()
        self._touched.clear()
        self.jobs.events.removed([], "forgotten")

    # -- states ------------------------------------------------------------------------------

    def known(self, key: bytes) -> int:
        if key in self._storing or self._is_hidden(key):
            return ABSENT
        return self.verdicts.state(key)

    def _is_hidden(self, key: bytes) -> bool:
        block = self.jobs.generation.number, key
        return block in self._dropping or block in self._undropped

    # -- put and get -------------------------------------------------------------------------

    def wanted(self, keys: list[bytes]) -> list[bytes]:
        wanted: dict[bytes, None] = {}
        for key in keys:
            if key in self._storing:
                self._storing[key] = True  # it is wanted again, if it was dropped meanwhile
            elif key not in wanted and self.known(key) != HIT:
                wanted[key] = None
        return list(wanted)

    def take(
        self, keys: list[bytes], room: int, refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        refused.update(dict.fromkeys(keys[room:], Status.FULL))
        taken = keys[:room]
        self._storing.update(dict.fromkeys(taken, True))
        for key in taken:
            self._undropped.pop((self.jobs.generation.number, key), None)
        return taken, np.arange(len(taken))

    def readable(self, keys: list[bytes]) -> list[bool]:
        return [not self._is_hidden(key) for key in keys]

    def pin(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """Return positions; nothing can be pinned here."""
        return np.arange(len(keys))

    # -- settling ----------------------------------------------------------------------------

    def settle(self, job: Job, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        if self.jobs.is_stale(job):
            self._remove(self._unwanted.pop(job.job, []), generation=job.generation.number)
            return
        keys = job.keys
        if job.op == "put":
            self._put_ended(keys, (statuses == OK).tolist())
            return
        if counts[Status.OK] == len(keys):
            self.verdicts.there(keys, asked_at=job.started)
            return
        found: dict[int, list[bytes]] = {}
        for key, status in zip(keys, statuses.tolist(), strict=True):
            found.setdefault(status, []).append(key)
        self.verdicts.there(found.get(Status.OK, ()), asked_at=job.started)
        self.verdicts.absent(found.get(Status.MISS, ()), asked_at=job.started)
        corrupt = found.get(Status.CORRUPT)
        if corrupt:
            self._remove(corrupt, "corrupt")
            self.jobs.log_corrupt(self.place)

    def _put_ended(self, keys: list[bytes], are_ok: list[bool]) -> None:
        stored, unwanted = [], []
        for key, is_ok in zip(keys, are_ok, strict=True):
            if not self._storing.pop(key, True):
                unwanted.append(key)
            elif is_ok:
                stored.append(key)
        self.verdicts.there(stored)
        self.jobs.events.stored(stored)
        if unwanted:
            self._remove(unwanted)

    # -- recency, removal --------------------------------------------------------------------

    def _remove(
        self, keys: list[bytes], reason: str | None = None, generation: int | None = None
    ) -> None:
        """Queue the removal of blocks, which are hidden until then; by default present ones."""
        keys = list(dict.fromkeys(keys))
        self.verdicts.absent(keys)
        if reason is not None:
            self.jobs.events.removed(keys, reason)
        generation = self.jobs.generation.number if generation is None else generation
        blocks = [(generation, key) for key in keys]
        # A chore may have removed its blocks already, and others may have stored them since.
        new = [block for block in blocks if block not in self._dropping]
        room = 0 if self.jobs.pool is None else max(0, MAX_VERDICTS - len(self._dropping))
        now = new[:room]
        self._remove_later([*new[room:], *(block for block in blocks if block in self._dropping)])
        for start in range(0, len(now), KEYS_PER_CHORE):
            part = now[start : start + KEYS_PER_CHORE]
            self._dropping.update(part)
            done = partial(self._dropped, part)
            self.jobs.chore(done, DROP, pack_keys(generation, [key for _, key in part]))

    def _dropped(self, blocks: list[tuple[int, bytes]], status: int) -> None:
        self._dropping.difference_update(blocks)
        if status != Status.OK:
            self._drops_failed_at = time.monotonic()
            present, storing = self.jobs.generation.number, self._storing
            self._remove_later(
                block for block in blocks if block[0] != present or block[1] not in storing
            )

    def _remove_later(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Hide blocks until a chore removes them; if there are too many, forget everything."""
        self._undropped.update(dict.fromkeys(blocks))
        if len(self._undropped) <= MAX_VERDICTS:
            return
        self.store.say(f"has more than {MAX_VERDICTS} blocks to remove: everything is forgotten")
        self._undropped.clear()
        self.jobs.generation = Generation.random()
        self.forget()

    def touch(self, keys: list[bytes]) -> None:
        seconds = self.store.touch_s
        if seconds is None or self.jobs.pool is None or self._is_touching:
            return
        there = [
            key
            for key in reversed(keys)
            if self.known(key) == HIT and self._touched.state(key) != HIT
        ][:KEYS_PER_CHORE]
        if there and self.jobs.writes.closed:
            self._touched.there(there, seconds)
            self._is_touching = True
            data = pack_keys(self.jobs.generation.number, there)
            self.jobs.chore(self._touch_ended, TOUCH, data)

    def _touch_ended(self, status: int) -> None:  # noqa: ARG002
        self._is_touching = False

    def discard(self, keys: list[bytes]) -> None:
        """Drop blocks; those being stored are dropped when they are stored."""
        gone = []
        for key in keys:
            if key in self._storing:
                self._storing[key] = False
            else:
                gone.append(key)
        if gone:
            self._remove(gone, "discarded")

    def tend(self) -> None:
        """Follow the medium's evictions; retry removals."""
        present = self.jobs.generation.number
        evicted = [key for number, key in self.store.take_evicted() if number == present]
        if evicted:
            self.verdicts.absent(evicted)
            self.jobs.events.removed(evicted, "evicted")
        if (
            self._undropped
            and self.jobs.writes.closed
            and time.monotonic() - self._drops_failed_at >= RETRY_DROPS_S
        ):
            undropped, self._undropped = self._undropped, {}
            self._drops_failed_at = time.monotonic()
            for generation in {number for number, _ in undropped}:
                keys = [key for number, key in undropped if number == generation]
                self._remove(keys, generation=generation)

    def sizes(self) -> dict[str, int]:
        return {"verdicts": len(self.verdicts)}

    # -- threads -----------------------------------------------------------------------------

    def open_pool(self, region: Region) -> Any:
        options, store = self.jobs.options, self.store
        buffers = staging_buffers(options.staging_bytes, store.block_bytes)
        calls = io.CallStore(
            store,
            block_bytes=store.content_bytes,
            slot_bytes=buffers.block_bytes,
            fingerprint=store.fingerprint,
            blocks_per_call=store.blocks_per_call,
            keys_per_query=store.keys_per_query,
        )
        pool = io.Pool(region, calls, options.threads, buffers, ack_copied=options.ack_copied)
        try:
            store.start()
        except BaseException:
            pool.close(0.0)
            raise
        return pool

    def before_close(self) -> None:
        self.store.stop()

    def close(self, until: float, *, has_ended: bool) -> bool:  # noqa: ARG002
        if not self._is_closed:
            self._is_closed = True
            if has_ended:
                self.store.close()
        return has_ended

    def leave(self) -> None:
        self.store.abandon()


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
        check_instance("store", store, RemoteStore, "a RemoteStore")
        store.name = options.name
        jobs = Jobs(options, store.content_bytes, is_shared=True)
        super().__init__(SharedMedium(jobs, store), capacity_bytes)

    @property
    def place(self) -> str:
        """The address of the medium, without credentials."""
        return self._medium.place
