"""Tiers on shared media: verdicts instead of an index.

What a shared directory or a server holds is not known here: others write to it and remove from it.
What was found out is a *verdict*, believed for some time: that a block is there for `HIT_S`, that
it is not for `MISS_S`. For other keys `state` is UNKNOWN, and `query` asks.

Invariants
    A key is in `_storing` from a put to its settling, and in `_dropping` while a chore that removes
    it has not been done: such keys are MISS without I/O. Writes wait for chores, so that a block
    that is dropped and stored again stays. What is believed belongs to `_gone_by`, the epoch that
    jobs are submitted under: with another one it is cleared.
Cost
    `state` is one look into a dict. A job costs what its store costs; a server that does not answer
    costs one deadline, and then nothing until the breaker lets a probe through.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import describe
from kvoffload.tiers.base import State, Status
from kvoffload.tiers.engine.contract import DROP, FORGET, MEET, QUERY, TOUCH, Pool
from kvoffload.tiers.engine.jobs import ANSWERED, QUERY_DEADLINE_S, PooledTier, Record
from kvoffload.tiers.engine.threads import Pool as Threads
from kvoffload.tiers.logs import write_line
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import MAX_KEY_BYTES, stored_key, stored_keys

from .shared import EPOCH_S, SharedStore, pack_keys
from .store import RemoteStore

__all__ = ["RemoteTier", "Verdicts"]

OK, MISS, FULL = np.int8(Status.OK), np.int8(Status.MISS), np.int8(Status.FULL)
HIT, ABSENT, UNKNOWN = int(State.HIT), int(State.MISS), int(State.UNKNOWN)

HIT_S = 30.0
"""Seconds for which a block that was there is believed to be there."""
MISS_S = 1.0
MAX_VERDICTS = 100_000
MAX_QUEUED_KEYS = 100_000
"""Keys that the queries under way ask for together, at most."""
LEAST_QUEUED_KEYS = 16
"""Keys that a query counts as at least, for the memory that it takes besides its keys."""
KEYS_PER_CHORE = 1024
FORGET_S = 1.0
"""Seconds that `RemoteTier.forget` waits for the medium."""
RETRY_DROPS_S = 1.0
CORRUPT_LOG_S = 60.0


class Verdicts:
    """Beliefs about keys, each held for some time.

    Parameters
    ----------
    limit : int
        Keys that are remembered at most; the oldest verdict leaves first.
    clock : callable
        Seconds that only grow.

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
        # Until when; below zero: until when it is believed to be absent.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def state(self, key: bytes) -> int:
        """Return what is believed of a key, a `State`."""
        until = self._until.get(key)
        if until is None:
            return UNKNOWN
        if until > 0:
            return HIT if self._clock() < until else UNKNOWN
        return ABSENT if self._clock() < -until else UNKNOWN

    def there(
        self, keys: Iterable[bytes], seconds: float = HIT_S, asked_at: float = math.inf
    ) -> None:
        """Believe that keys are there, unless one was found absent after `asked_at`."""
        until = self._clock() + seconds
        for key in keys:
            if not -self._until.get(key, 0.0) - MISS_S > asked_at:
                self._believe(key, until)

    def absent(self, keys: Iterable[bytes], asked_at: float = math.inf) -> None:
        """Believe that keys are not there, unless one was found there after `asked_at`."""
        until = self._clock() + MISS_S
        for key in keys:
            if not self._until.get(key, 0.0) - HIT_S > asked_at:
                self._believe(key, -until)

    def _believe(self, key: bytes, until: float) -> None:
        known = self._until
        known[key] = until
        known.move_to_end(key)
        if len(known) > self._limit:
            known.popitem(last=False)

    def clear(self) -> None:
        """Believe nothing."""
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)


class RemoteTier(PooledTier):
    """A tier on a medium that other processes share, and that may not answer.

    It is staged: a call that does not return holds none of the region's memory.

    Parameters
    ----------
    store : RemoteStore
        The medium, not used by another tier; the tier closes it. Nothing is asked of it before a
        region is attached.
    options : TierOptions, optional
        Threads, buffers and the like.
    capacity_bytes : int, optional
        Bytes of blocks that are kept at most, where that is known.

    Raises
    ------
    TypeError
        If an argument is wrong.
    """

    def __init__(
        self,
        store: RemoteStore,
        options: TierOptions = TierOptions(),  # noqa: B008 # it is frozen
        capacity_bytes: int | None = None,
    ) -> None:
        if not isinstance(store, RemoteStore):
            raise TypeError(f"store must be a RemoteStore, got {describe(store)}")
        super().__init__(options, capacity_bytes, store.content_bytes)
        self.namespace = store.namespace
        store.name = options.name
        self._verdicts = Verdicts()
        self._touched = Verdicts()
        self._storing: dict[bytes, bool] = {}  # False: it was dropped meanwhile
        self._dropping: set[bytes] = set()  # keys of chores that remove
        self._undropped: dict[bytes, None] = {}  # keys that no chore removes yet
        self._drops_failed_at = 0.0
        self._touches = 0  # chores that touch and have not been done
        self._gone_by = 0  # the epoch that jobs are submitted under
        self._adopted = 0  # epochs that the store had used when that one was learned
        self._corrupt_logged = -CORRUPT_LOG_S
        self._medium = store
        self._store = SharedStore(store)
        self._metrics.lost = self._store.lost
        self._open()

    @property
    def place(self) -> str:
        """The address of the medium, without credentials."""
        return self._medium.place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r}, name={self.name!r})"

    def _make_pool(self, region: Region) -> Pool:
        options = self._options
        return Threads(
            region, self._store, options.threads, options.staging_bytes, options.ack_copied
        )

    def attach(self, region: Region) -> None:
        """Name the host memory that jobs move blocks from and to; learn the medium's epoch.

        It waits for that: a put that is submitted before the epoch is known is dropped, since
        whether it is older than the medium's last `forget` could not be told. A medium that does
        not answer is asked again by the next job.
        """
        is_attached = self._region is not None
        super().attach(region)
        if not is_attached:
            self._give_order(MEET, EPOCH_S)

    def _give_order(self, kind: int, timeout_s: float) -> None:
        """Queue the chore that reads or writes the epoch, and wait for it a while."""
        pool = self._pool_or_raise()
        order = _Order()
        self._chore(("order", order), kind, b"")
        until = time.monotonic() + timeout_s
        while order.status is None and time.monotonic() < until:
            self._collect(pool)
            if order.status is None:
                pool.wait(max(0.0, until - time.monotonic()))
        if self._done:
            pool.notify()

    @property
    def _epoch(self) -> int:
        return self._gone_by

    def _follow(self) -> None:
        """Adopt the epoch of the store; where it is another one, clear all verdicts."""
        epoch, before = self._store.epoch, self._gone_by
        if epoch != before:
            adopted, self._adopted = self._store.adopted - self._adopted, self._store.adopted
            self._gone_by = epoch
            self._storing.clear()  # the puts under way will be dropped
            if before or adopted > 1:  # another process forgot, perhaps since a read under way
                self._generation += 1
                self._forgotten()

    def _is_stale(self, record: Record) -> bool:
        """Return whether a job belongs to what is forgotten; a read before any epoch does not."""
        self._follow()
        if record.generation != self._generation:
            return True
        return record.epoch != self._gone_by and (record.op == "put" or record.epoch != 0)

    # -- what is there -----------------------------------------------------------------------

    def _known(self, key: bytes) -> int:
        """Return what is known about a stored key, a `State`."""
        if key in self._dropping or key in self._undropped or key in self._storing:
            return ABSENT
        return self._verdicts.state(key)

    def state(self, key: bytes) -> int:
        """Return what is known about one key, a `State`."""
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            key = stored_key(key)
        if self._closed:
            self._refuse_closed()
        return self._state_of(key)

    def _state_of(self, key: bytes) -> int:
        """Return and count what is known about a stored key."""
        reads = self._reads
        state = self._known(key) if reads.closed or reads.would_allow() else ABSENT
        metrics = self._metrics
        if state == HIT:
            metrics.hits += 1
        elif state == ABSENT:
            metrics.misses += 1
        else:
            metrics.unknown += 1
        return state

    def lookup(self, keys: Iterable[bytes]) -> npt.NDArray[np.int8]:
        """Return what is known about each key, a `State` each."""
        self._refuse_closed()
        return np.array([self._state_of(key) for key in stored_keys(keys)], np.int8)

    def _query(
        self, job: int, started: float, stored: list[bytes], deadline_s: float | None
    ) -> None:
        """Begin a query; what is known is not asked for again."""
        pool = self._pool_or_raise()
        self._follow()
        states = np.array([self._known(key) for key in stored], np.int8)
        status = np.where(states == HIT, OK, MISS)
        places = np.flatnonzero(states == UNKNOWN)
        if not len(places):
            self._finish_at_once(job, "query", started, status)
            return
        if not self._reads.allow():
            status[places] = Status.UNAVAILABLE
            self._finish_at_once(job, "query", started, status)
            return
        room = max(0, MAX_QUEUED_KEYS - self._queued_keys)
        if len(places) > room:
            status[places[room:]] = Status.UNAVAILABLE
            places = places[:room]
            if not room:
                self._reads.withdraw()
                self._finish_at_once(job, "query", started, status)
                return
        asked = [stored[place] for place in places.tolist()]
        record = Record(
            job, "query", started, status, places, asked, places, self._generation
        )  # slots: none
        record.epoch = self._epoch
        self._register(record, 0, max(LEAST_QUEUED_KEYS, len(asked)))
        pool.submit(
            job,
            QUERY,
            asked,
            places,
            places,
            timeout_s=deadline_s or QUERY_DEADLINE_S,
            epoch=record.epoch,
        )

    # -- put and get -------------------------------------------------------------------------

    def _put(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a put."""
        self._follow()
        status = np.zeros(len(stored), np.int8)
        first: dict[bytes, int] = {}
        for place, key in enumerate(stored):
            if key in self._storing:
                self._storing[key] = True  # it is wanted again, if it was dropped meanwhile
            elif key not in first and self._known(key) != HIT:
                first[key] = place
        if not first:
            self._finish_at_once(job, "put", started, status)
            return
        if not self._writes.allow():
            _mark(status, stored, first, Status.UNAVAILABLE)
            self._finish_at_once(job, "put", started, status)
            return
        wanted = list(first)
        room = self._room()
        _mark(status, stored, wanted[room:], Status.FULL)
        wanted = wanted[:room]
        if not wanted:
            self._writes.withdraw()
            self._finish_at_once(job, "put", started, status)
            return
        places = np.array([first[key] for key in wanted], np.int64)
        record = Record(job, "put", started, status, places, wanted, places, self._generation)
        self._storing.update(dict.fromkeys(wanted, True))
        for key in wanted:
            self._undropped.pop(key, None)
        self._submit(record, ids[places], timeout_s)

    def _get(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a get."""
        self._follow()
        status = np.full(len(stored), MISS)
        hidden = self._dropping or self._undropped
        places = np.array(
            [
                place
                for place, key in enumerate(stored)
                if not hidden or not (key in self._dropping or key in self._undropped)
            ],
            np.int64,
        )
        if len(places) and not self._reads.allow():
            status[places] = Status.UNAVAILABLE
            self._finish_at_once(job, "get", started, status)
            return
        room = self._room()
        if len(places) > room:
            status[places[room:]] = FULL
            places = places[:room]
            if not len(places):
                self._reads.withdraw()
        if not len(places):
            self._finish_at_once(job, "get", started, status)
            return
        wanted = [stored[place] for place in places.tolist()]
        record = Record(job, "get", started, status, places, wanted, places, self._generation)
        self._submit(record, ids[places], timeout_s)

    # -- what became of it -------------------------------------------------------------------

    def _ended(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        if not any(counts[status] for status in ANSWERED) and counts[Status.TIMEOUT]:
            record.failed = True
            self._breaker(record).trip()  # a server that hangs costs one deadline, not five
        if record.op != "put" and self._is_stale(record):
            statuses = np.where(statuses == OK, MISS, statuses)
        if record.op != "query":
            super()._ended(record, statuses, counts)
            return
        record.status[record.places] = statuses
        self._finish(record.job, "query", record.started, record.status)

    def _count(self, record: Record, counts: list[int]) -> None:
        answered = any(counts[status] for status in ANSWERED)
        if not answered and counts[Status.TIMEOUT] and not record.failed:
            record.failed = True
            self._breaker(record).trip()
        if record.op == "put" and self._is_stale(record):
            self._metrics.dropped += counts[Status.OK]
            counts = [0 if status == Status.OK else n for status, n in enumerate(counts)]
            if not sum(counts):
                self._writes.withdraw()  # it says nothing about the medium
                return
        if record.op != "query":
            super()._count(record, counts)
        elif answered:
            self._reads.succeed()
        elif not record.failed:
            self._reads.fail()

    def _breaker(self, record: Record) -> Any:
        return self._writes if record.op == "put" else self._reads

    def _settled(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        if self._is_stale(record):
            return
        if record.op == "put":
            self._put_ended(record.keys, (statuses == OK).tolist())
            return
        keys = record.keys
        if counts[Status.OK] == len(keys):
            self._verdicts.there(keys, asked_at=record.started)
            return
        found: dict[int, list[bytes]] = {}
        for key, status in zip(keys, statuses.tolist(), strict=True):
            found.setdefault(status, []).append(key)
        self._verdicts.there(found.get(Status.OK, ()), asked_at=record.started)
        self._verdicts.absent(found.get(Status.MISS, ()), asked_at=record.started)
        corrupt = found.get(Status.CORRUPT)
        if corrupt:
            self._remove(corrupt, "corrupt")
            if time.monotonic() - self._corrupt_logged >= CORRUPT_LOG_S:
                self._corrupt_logged = time.monotonic()
                write_line(
                    logging.WARNING,
                    "tier %r dropped corrupt blocks, %d so far",
                    self.name,
                    self._metrics.evicted["corrupt"],
                )

    def _put_ended(self, keys: list[bytes], are_ok: list[bool]) -> None:
        stored, unwanted = [], []
        for key, is_ok in zip(keys, are_ok, strict=True):
            if not self._storing.get(key, True):
                unwanted.append(key)
            elif is_ok:
                stored.append(key)
        self._verdicts.there(stored)
        if stored:
            self._emit(stored, removed=False)
        if unwanted:
            self._remove(unwanted)
        for key in keys:
            self._storing.pop(key, None)

    def _agree(self, keys: Sequence[bytes]) -> None:
        """Store no key that no job stores."""
        live: set[bytes] = set()
        for record in self._records.values():
            if record.op == "put" and record.generation == self._generation:
                live.update(record.keys)
        for key in keys:
            if key not in live:
                self._storing.pop(key, None)
        self._touches = sum(kind == "touch" for kind, _ in self._chores.values())
        self._dropping.clear()
        for kind, some in self._chores.values():
            if kind == "drop":
                self._dropping.update(some)

    # -- recency, removal --------------------------------------------------------------------

    def _remove(self, keys: list[bytes], reason: str | None = None) -> None:
        """Queue blocks to be removed; until then they are hidden."""
        keys = list(dict.fromkeys(keys))
        self._verdicts.absent(keys)
        if reason is not None:
            self._emit(keys, removed=True, reason=reason)
        # A chore may have removed its keys already, and others may have stored them since.
        new = [key for key in keys if key not in self._dropping]
        room = 0 if self._pool is None else max(0, MAX_VERDICTS - len(self._dropping))
        now = new[:room]
        self._remove_later([*new[room:], *(key for key in keys if key in self._dropping)])
        for start in range(0, len(now), KEYS_PER_CHORE):
            part = now[start : start + KEYS_PER_CHORE]
            self._dropping.update(part)
            self._chore(("drop", part), DROP, pack_keys(part))

    def _remove_later(self, keys: Iterable[bytes]) -> None:
        """Hide blocks until a chore removes them; where they are too many, forget everything."""
        self._undropped.update(dict.fromkeys(keys))
        if len(self._undropped) <= MAX_VERDICTS:
            return
        self._medium.say(f"has more than {MAX_VERDICTS} blocks to remove: everything is forgotten")
        self._begin_to_forget()
        is_ordered = any(kind == "order" for kind, _ in self._chores.values())
        if self._pool is not None and not is_ordered:
            self._chore(("order", _Order()), FORGET, b"")

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last key first."""
        self._refuse_closed()
        self._change(self._touch, stored_keys(keys))

    def _touch(self, stored: list[bytes]) -> None:
        if self._medium.touch_s is None or self._pool is None or self._touches:
            return
        there = [
            key
            for key in reversed(stored)
            if self._known(key) == HIT and self._touched.state(key) != HIT
        ][:KEYS_PER_CHORE]
        if there and self._writes.closed:
            self._touched.there(there, self._medium.touch_s)
            self._touches += 1
            self._chore(("touch", there), TOUCH, pack_keys(there))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop blocks; unknown keys are no error.

        Until the medium has removed a block, it is a miss here. 100,000 removals are queued, and
        100,000 more keys are kept that are queued later. Beyond that the tier forgets everything,
        as `forget` does, without waiting for the medium, and logs a line: a block that was
        discarded must not come back, and no more keys are kept.
        """
        self._refuse_closed()
        self._change(self._discard, stored_keys(keys))

    def _discard(self, stored: list[bytes]) -> None:
        gone = []
        for key in stored:
            if key in self._storing:
                self._storing[key] = False
            else:
                gone.append(key)
        if gone:
            self._remove(gone, "discarded")

    def forget(self) -> bool:
        """Drop everything, for every process; a new epoch gives blocks other names and seals.

        Before `attach` it is False, and the medium is told by `attach`. Until the medium has
        confirmed it, it is tried again every second, whether jobs come or not, and what is put is
        dropped.
        """
        self._refuse_closed()
        self._begin_to_forget()
        if self._pool is None:
            return False
        self._give_order(FORGET, FORGET_S)
        if self._store.owed:
            write_line(
                logging.ERROR,
                "tier %r could not tell its medium to forget; it will try again",
                self.name,
            )
            return False
        return True

    def _begin_to_forget(self) -> None:
        """Forget everything here, under a new epoch that the medium has yet to be given."""
        self._generation += 1
        self._store.forget()
        self._gone_by = 0
        self._forgotten()

    def _forget_confirmed(self) -> bool:
        return not self._store.owed

    def _forgotten(self) -> None:
        self._storing.clear()  # the puts under way belong to what is forgotten
        self._verdicts.clear()
        self._touched.clear()
        self._undropped.clear()
        self._emit([], removed=True, reason="forgotten")

    def _chore_done(self, what: Any, status: int) -> None:
        kind, keys = what
        if kind == "order":
            keys.status = status
        elif kind == "touch":
            self._touches = max(0, self._touches - 1)
        elif kind == "drop":
            self._dropping.difference_update(keys)
            if status != Status.OK:
                self._drops_failed_at = time.monotonic()
                self._remove_later(key for key in keys if key not in self._storing)

    def _collect(self, pool: Pool) -> None:
        super()._collect(pool)
        self._follow()
        if (
            self._undropped
            and not self._closed
            and self._writes.closed
            and time.monotonic() - self._drops_failed_at >= RETRY_DROPS_S
        ):
            keys, self._undropped = list(self._undropped), {}
            self._drops_failed_at = time.monotonic()
            self._remove(keys)

    # -- the end -----------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let jobs under way end, and give everything back."""
        was_open = not self._closed and os.getpid() == self._pid
        is_clean = super().close(timeout_s)
        if was_open and self._store.owed:
            write_line(
                logging.ERROR,
                "tier %r was closed before its medium could be told to forget",
                self.name,
            )
        return is_clean

    def _before_close(self) -> None:
        if self._store.owed:
            self._chore(("order", _Order()), FORGET, b"")

    def _give_back(self) -> None:
        self._store.close()

    def _sizes(self) -> dict[str, int]:
        return {"verdicts": len(self._verdicts)}


class _Order:
    """An epoch that is being read or written."""

    status: int | None = None


def _mark(
    status: npt.NDArray[np.int8], stored: list[bytes], keys: Iterable[bytes], value: Status
) -> None:
    """Set the status of every occurrence of some keys."""
    chosen = set(keys)
    if chosen:
        status[[key in chosen for key in stored]] = value
