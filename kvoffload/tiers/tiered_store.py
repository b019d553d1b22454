"""Host memory backed by tiers, for a custom engine: a manager's verbs that also move bytes.

Structure
    The manager decides which blocks are in host memory, a `Region`; the tiers, nearest first, have
    the others. Blocks of the region beyond the manager's are buffers: in the mode ``"demote"`` the
    bytes of blocks that leave are copied to them and written from them.
Invariants
    A block that a tier reads from is pinned in the manager, or is a buffer. A block that a tier
    writes to is pending in the manager. After `forget` neither holds for the jobs from before it:
    until they have ended no block is handed out. `_owner[id]` is the key whose bytes block `id`
    has, or had last.
Cost
    O(1) per block and tier besides theirs; one copy per demoted block.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload import (
    BlockHash,
    BlockIDsLoadStoreSpec,
    CachePolicy,
    Hints,
    OffloadingManager,
    PrepareStoreOutput,
    Request,
)
from kvoffload._checks import as_batch, check_bool, check_hints, check_instance, check_part
from kvoffload._hold import Hold
from kvoffload.errors import block_not_pinned, describe, request_finished
from kvoffload.managers import calls
from kvoffload.tiers.engine.tier import check_deadline, check_timeout, transfer_deadline

from .base import Closing, Done, State, Status, Tier
from .generation import Generation
from .region import Region

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("kvoffload.tiers")

_Prepared: TypeAlias = PrepareStoreOutput[BlockIDsLoadStoreSpec]

NO_BLOCKS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The end of a `TieredStore.fetch`.

    Attributes
    ----------
    job : int
        The number that `TieredRequest.fetch` or `TieredStore.fetch` returned.
    num_blocks : int
        Number of leading blocks in host memory, pinned until `complete_load`.
    block_ids : numpy.ndarray
        ``(num_blocks,)`` int64: their block ids.
    """

    job: int
    num_blocks: int
    block_ids: npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch under way: what it holds and `awaited` are the distinct keys of its prefix."""

    job: int
    hashes: list[BlockHash]
    deadline: float
    hold: Hold[BlockHash]
    request: TieredRequest | None  # the one that it is for
    start: int  # position of its first block in the request
    awaited: set[BlockHash] = field(default_factory=set)

    def end(self, block_ids: npt.NDArray[np.int64]) -> Fetched:
        """Return its end with these blocks, whose pins are the request's from now on."""
        if self.request is not None:
            stop = self.start + len(block_ids)
            calls.note_loaded(self.request._request, self.start, stop)
            self.request._note_pins(self.start, stop)
        return Fetched(self.job, len(block_ids), block_ids)


@dataclass(slots=True, eq=False)
class _Load:
    """A block being loaded from a tier, with its fetches and its deadline."""

    block_id: int
    deadline: float
    fetches: list[_Fetch]


@dataclass(slots=True, eq=False)
class _Storing:
    """A block that the engine is writing."""

    block_id: int


@dataclass(slots=True, eq=False)
class _Job:
    """A job of a tier: its blocks, its purpose, and whether they were forgotten since."""

    kind: Literal["load", "write", "promote", "demote"]
    keys: list[BlockHash]
    ids: npt.NDArray[np.int64]
    is_forgotten: bool = False


class TieredRequest:
    """A prompt in a `TieredStore`: a manager's `Request` with `fetch`.

    ``store.begin(hashes)`` returns one. A part is a half-open slice of its blocks, from `start` to
    `stop`, ``0 <= start <= stop <= len(request)``, else ValueError.

    Any number of requests may be open, in any order, and several may have the same blocks. After
    the store's `forget` a request stays open and finds nothing, and to end the loads and stores
    that it began before has no effect.

    As a context manager, a request finishes at the end of the ``with`` block, also on an exception.

    After `finish`, everything except `complete_load`, `complete_store`, ``len`` and the properties
    raises RequestFinishedError. After the store's `close`, everything except `finish`, ``len`` and
    the properties raises RuntimeError.

    Notes
    -----
    Thread-safety: that of the store.

    Complexity: each call is O(n) in the blocks of its part, and per tier for those not in host
    memory.
    """

    __slots__ = ("_has_looked", "_hints", "_pins", "_request", "_store", "_storing")

    def __init__(
        self, store: TieredStore, request: Request[BlockIDsLoadStoreSpec], hints: Hints | None
    ) -> None:
        self._store = store
        self._request = request
        self._hints = hints
        self._storing: dict[BlockHash, _Storing] = {}  # its stores that have not ended
        self._has_looked = False  # whether its lookup was counted
        self._pins = np.zeros(len(request), np.int64)  # of its blocks, that it has to release

    def lookup(self, start: int = 0) -> tuple[int, int]:
        """Count the blocks from `start` on that are ready, and those that are reachable.

        Parameters
        ----------
        start : int
            Number of leading blocks that the accelerator already has.

        Returns
        -------
        (int, int)
            As `TieredStore.lookup` of these blocks.
        """
        self._require_open("lookup")
        ready = self._request.lookup(start)
        self._has_looked = True
        return ready, self._store._reachable(self._part(start, None), ready)

    def fetch(
        self, start: int = 0, stop: int | None = None, *, deadline_s: float | None = None
    ) -> int:
        """Load the leading blocks of a part into host memory and pin all that are there.

        Without a `lookup` before, the first fetch makes that of host memory, which a watch and a
        recording take as the request.

        Parameters
        ----------
        start, stop : int
            The part; None means the end of the request.
        deadline_s : float, optional
            Seconds from now, > 0; by default 1 s and 50 MB/s.

        Returns
        -------
        int
            The job. When `TieredStore.step` returns its `Fetched`, the blocks ``start ... start +
            num_blocks - 1`` are pinned until `complete_load`.
        """
        self._require_open("fetch")
        part, resident = self._part(start, stop), self._store._resident
        num_found = next((at for at, key in enumerate(part) if key not in resident), len(part))
        check_deadline(deadline_s, 0.0)
        if not self._has_looked:
            self._request.lookup(start)
            self._has_looked = True
        job = self._store._fetch(part, deadline_s, self, int(start))
        calls.note_own(self._request, int(start) + num_found)  # the others are not its own
        return job

    def prepare_load(self, start: int, stop: int) -> BlockIDsLoadStoreSpec:
        """Pin the blocks of a part, which must be ready, and return their block ids."""
        self._require_open("prepare_load")
        spec = self._request.prepare_load(start, stop)
        self._note_pins(start, stop)
        return spec

    def complete_load(self, start: int, stop: int) -> None:
        """Release one pin of each block of a part, also after `finish`.

        Raises BlockNotPinnedError for a block without a pin of this request: those of tiers protect
        bytes that are being copied.
        """
        self._store._refuse()
        part, pins = self._part(start, stop), self._pins[start:stop]
        if len(pins) < len(part) or not pins.all():
            at = len(pins) if pins.all() else int(pins.argmin())
            raise block_not_pinned("complete_load", part[at])
        self._request.complete_load(start, stop)
        pins -= 1

    def _note_pins(self, start: int, stop: int) -> None:
        if len(self._pins) < stop:  # it was extended
            self._pins = np.pad(self._pins, (0, len(self) - len(self._pins)))
        self._pins[start:stop] += 1

    def prepare_store(
        self, start: int = 0, stop: int | None = None
    ) -> PrepareStoreOutput[BlockIDsLoadStoreSpec] | None:
        """Make room for the blocks of a part that are not resident, and make them pending.

        It may be called several times if a prompt is computed in steps.

        Returns
        -------
        PrepareStoreOutput or None
            As `TieredStore.prepare_store` of these blocks.
        """
        self._require_open("prepare_store")
        if self._store._forgotten_jobs:
            self._part(start, stop)
            return None
        output = self._request.prepare_store(start, stop)
        if output is not None:
            self._storing |= self._store._begin_stores(output)
        return output

    def complete_store(self, success: bool = True) -> None:
        """Make the blocks of this request's stores readable, or drop them; also after `finish`.

        It ends every open store of this request, like `TieredStore.complete_store`.
        """
        self._store._refuse()
        under_way = self._store._storing
        self._store._end_stores(
            [key for key, own in self._storing.items() if under_way.get(key) is own], success
        )
        self._storing.clear()

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Use further blocks, those of an answer, and append them to the request."""
        self._require_open("extend")
        num_blocks = len(self)
        self._request.extend(hashes)
        self._store._touch_tiers(self.hashes[num_blocks:])

    def finish(self, *, hints: Hints | None = None, now: float | None = None) -> None:
        """Use all blocks once more in host memory, last hash first, and end the request.

        A policy that counts uses does not count this one. A second call does nothing.

        Parameters
        ----------
        hints : Hints, optional
            The client's hints about its session, which replace those of `TieredStore.begin`. If the
            session ends, the blocks that no other session shares are released in host memory, and
            those of them that are resident there also in every tier that decides which blocks
            leave.
        now : float, optional
            Seconds on the clock of `TieredStore.begin`, finite.
        """
        hints = self._hints if hints is None else hints
        is_first = not self.is_finished
        self._request.finish(hints=hints, now=now)
        if is_first and hints is not None and hints.ends and not self._store._closed:
            self._store._release_in_tiers(self.hashes)

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """The blocks of the request, first block first."""
        return self._request.hashes

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called."""
        return self._request.is_finished

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._request)

    def __bool__(self) -> bool:
        """Return True, even for a request without blocks."""
        return True

    def __enter__(self) -> Self:
        """Return the request."""
        self._require_open("with")
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the request."""
        self.finish()

    def _require_open(self, call: str) -> None:
        """Raise RequestFinishedError after `finish`, RuntimeError if the store refuses calls."""
        self._store._refuse()
        if self.is_finished:
            raise request_finished(call)

    def _part(self, start: int, stop: int | None) -> tuple[BlockHash, ...]:
        """Return the hashes of a part."""
        first, end = check_part(start, stop, len(self))
        return self.hashes[first:end]


class TieredStore(Closing):
    """Blocks in host memory and in tiers, nearest first.

    A scheduler uses it like a manager. It begins a `TieredRequest` per prompt, calls `fetch` for
    the reachable blocks, `complete_load` after the engine's reads, and `prepare_store` and
    `complete_store` around its writes. It regularly calls `step`, which returns the fetches that
    ended. Tiers work in their own threads. The store's calls that take hashes define those of a
    request.

    **A failure shortens the prefix and is never an error**: if a tier does not return a block, the
    next tier that may have it is asked, within the fetch's deadline; after that it is a miss.

    **With a tier, host memory declines nothing** while a block may leave, whatever its policy: the
    tiers are offered only blocks that host memory stores, and are read through its slots. Each
    tier's own policy decides which blocks it keeps. After `close` the manager's policy declines
    again.

    Parameters
    ----------
    region : Region
        Host memory. The blocks ``0 ... n - 1`` are the manager's; those beyond are buffers for
        ``write="demote"``, which needs at least one.
    manager : OffloadingManager
        A manager of ``n`` blocks, such as a `CPUOffloadingManager`, which only this store changes.
    tiers : sequence of Tier
        The tiers, nearest first. This region is attached to each that does not have it already.
    write : str
        ``"through"``: a block is put to every tier when its store completes. ``"demote"``: a block
        is put to the nearest tier that accepts it when it leaves host memory.
    promote : bool
        Whether a block found in a tier is put to the nearer ones.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    Thread-safety: callers serialise; there are no locks. It belongs to the process that made it: in
    a forked child, which may share memory with the parent, every method raises RuntimeError except
    `stats`, and `close`, which does nothing.
    """

    def __init__(
        self,
        region: Region,
        manager: OffloadingManager[BlockIDsLoadStoreSpec],
        tiers: Sequence[Tier],
        write: Literal["through", "demote"] = "through",
        *,
        promote: bool = True,
    ) -> None:
        check_instance("region", region, Region, "a Region")
        if write not in ("through", "demote"):
            raise ValueError(f"write must be 'through' or 'demote', got {describe(write)}")
        stats = getattr(manager, "stats", None)
        if stats is None or not isinstance(manager, OffloadingManager):
            raise TypeError(f"manager must be a manager with stats(), got {describe(manager)}")
        sizes = stats()
        if sizes["resident"]:
            raise ValueError(f"manager must be empty, got {sizes['resident']} blocks")
        num_blocks = sizes["free"]
        least = num_blocks + (write == "demote")
        if region.num_blocks < least:
            raise ValueError(f"region must have {least} or more blocks, got {region.num_blocks}")
        promote = check_bool("promote", promote)
        tiers = _check_tiers(tiers)
        self._pid = os.getpid()
        self._closed = False
        self.region = region
        self.manager = manager
        self._resident: Any = manager  # for calls outside the contract of managers
        self.tiers = tiers
        self.write = write
        self.promote = promote
        for tier in self.tiers:
            tier.attach(region)
        self._set_declining(allowed=not self.tiers)
        self._owner: list[BlockHash | None] = [None] * num_blocks
        self._buffers = list(range(num_blocks, region.num_blocks))
        self._storing: dict[BlockHash, _Storing] = {}  # prepared and not completed
        self._loads: dict[BlockHash, _Load] = {}  # keys being loaded from a tier
        self._jobs: list[dict[int, _Job]] = [{} for _ in self.tiers]
        self._forgotten_jobs = 0  # forgotten jobs that still use blocks of the manager
        self._fetches: dict[int, _Fetch] = {}
        self._ended: list[tuple[_Fetch, npt.NDArray[np.int64]]] = []  # not returned by `step`
        self._next_job = 0
        self._counters = dict.fromkeys(
            ("fetches", "fetched_blocks", "fetch_failed_blocks", "demoted_blocks",
             "demote_dropped_blocks", "promoted_blocks", "written_blocks"),
            0,
        )  # fmt: skip

    def _set_declining(self, *, allowed: bool) -> None:
        """Allow the policy of host memory, and its watch's estimates, to decline blocks, or not."""
        policy = getattr(self.manager, "policy", None)
        if isinstance(policy, CachePolicy):
            policy.set_declining(allowed)
            if (watch := getattr(self.manager, "watch", None)) is not None:
                watch.set_declining(allowed=allowed)

    def _refuse(self) -> None:
        """Raise RuntimeError in a forked child and after `close`."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"this TieredStore belongs to process {self._pid}")
        if self._closed:
            raise RuntimeError("this TieredStore is closed")

    def begin(
        self, hashes: Iterable[bytes], *, hints: Hints | None = None, now: float | None = None
    ) -> TieredRequest:
        """Begin a request, which uses its blocks for the first time, like `touch`.

        Parameters
        ----------
        hashes : iterable of bytes
            The blocks of a prompt, in the order of its tokens; checked and copied.
        hints : Hints, optional
            The client's hints about its session, passed to the policy of host memory.
        now : float, optional
            Seconds on the caller's clock, finite, as for `OffloadingManager.begin`.

        Returns
        -------
        TieredRequest

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash, `hints` is not a ``Hints`` or `now` is not a finite
            number.
        """
        self._refuse()
        # Blocks of tiers are read through slots of host memory, so an ending session must not
        # prevent their stores: host memory gets this hint when the request finishes.
        at_begin = check_hints(hints)
        if self.tiers and at_begin is not None:
            at_begin = replace(at_begin, ends=False)
        request = TieredRequest(self, self.manager.begin(hashes, hints=at_begin, now=now), hints)
        self._touch_tiers(request.hashes)
        return request

    # -- lookups -----------------------------------------------------------------------------

    def lookup(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Count the leading blocks that are ready, and those that are reachable.

        Returns
        -------
        ready : int
            Leading blocks in host memory.
        reachable : int
            Leading blocks in host memory or in a tier, as far as known without I/O.
        """
        self._refuse()
        batch = as_batch(hashes)
        ready = self.manager.lookup(batch)
        return ready, self._reachable(batch, ready)

    def _reachable(self, batch: Sequence[BlockHash], ready: int) -> int:
        """Count the leading blocks that are reachable, given the number of ready ones."""
        return ready + sum(1 for _ in itertools.takewhile(self._is_somewhere, batch[ready:]))

    def _is_ready(self, key: BlockHash) -> bool:
        """Return whether a block is in host memory, without counting a lookup."""
        return key in self._resident and key not in self._loads and key not in self._storing

    def _is_somewhere(self, key: BlockHash, *, maybe: bool = False) -> bool:
        """Return whether a block is reachable or, with `maybe`, may be."""
        if key in self._loads or self._is_ready(key):
            return True
        return key not in self._storing and self._find(key, 0, maybe=maybe) is not None

    def _find(self, key: BlockHash, first: int, *, maybe: bool = False) -> int | None:
        """Return the nearest tier from `first` on that has a key or, with `maybe`, may have it."""
        for index in range(first, len(self.tiers)):
            state = self.tiers[index].state(key)
            if state == State.HIT or (maybe and state == State.UNKNOWN):
                return index
        return None

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last hash first, in host memory and in every tier.

        Policies that count uses count each call, so call it once per request, before the reads.
        """
        self._refuse()
        batch = as_batch(hashes)
        self.manager.touch(batch)
        self._touch_tiers(batch)

    def release(self, hashes: Iterable[bytes]) -> None:
        """Let blocks leave before all others, like `OffloadingManager.release`, also in tiers.

        Only host memory knows which blocks several sessions share, so that the tiers keep those
        that are not resident there.
        """
        self._refuse()
        batch = as_batch(hashes)
        self.manager.release(batch)
        self._release_in_tiers(batch)

    def _release_in_tiers(self, batch: Sequence[BlockHash]) -> None:
        unshared = calls.unshared(self._resident, batch)
        for tier in self.tiers:
            tier.release(unshared)

    def _touch_tiers(self, batch: Sequence[BlockHash]) -> None:
        for tier in self.tiers:
            tier.touch(batch)

    # -- from the tiers ----------------------------------------------------------------------

    def fetch(self, hashes: Iterable[bytes], deadline_s: float | None = None) -> int:
        """Load the leading blocks that tiers have into host memory and pin all that are there.

        It makes no `lookup`, which a watch and a recording would take as a request.

        Parameters
        ----------
        hashes : iterable of bytes
            A request's blocks, in the order of its tokens.
        deadline_s : float, optional
            Seconds from now, > 0; by default 1 s and 50 MB/s.

        Returns
        -------
        int
            The job; `step` returns its `Fetched`. Its blocks are pinned from then on, until
            `complete_load`.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong.
        """
        self._refuse()
        return self._fetch(as_batch(hashes), deadline_s)

    def _fetch(
        self,
        batch: Sequence[BlockHash],
        deadline_s: float | None,
        request: TieredRequest | None = None,
        start: int = 0,
    ) -> int:
        given = check_deadline(deadline_s, 0.0)
        wanted = [] if self._forgotten_jobs else self._wanted(batch)
        seconds = given or transfer_deadline(len(wanted) * self.region.block_bytes)
        self._next_job += 1
        pin, unpin = self.manager.prepare_load, self.manager.complete_load
        hold: Hold[BlockHash] = Hold(pin, unpin, self._room)
        until = time.monotonic() + seconds
        fetch = _Fetch(self._next_job, list(batch), until, hold, request, start)
        self._counters["fetches"] += 1
        self._fetches[fetch.job] = fetch
        self._start_loads(fetch, wanted[: len(self._owner)])
        self._end_if_done(fetch)
        return fetch.job

    def _wanted(self, batch: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the distinct leading keys that are, or may be, reachable."""
        may_be = partial(self._is_somewhere, maybe=True)
        return list(dict.fromkeys(itertools.takewhile(may_be, batch)))

    def _room(self) -> int:
        """Return the number of blocks that are free or may leave."""
        sizes = self._resident.stats()
        room: int = sizes["free"] + sizes["resident"] - sizes["pending"] - sizes["pinned"]
        return room

    def _start_loads(self, fetch: _Fetch, keys: list[BlockHash]) -> None:
        """Hold the blocks in host memory, make room for the others, and ask the nearest tiers.

        The prefix ends at the first block without room, or that left for one before it.
        """
        hold = fetch.hold
        hold.expect([key for key in keys if self._is_ready(key)])
        missing: list[BlockHash] = []
        for is_resident, run in itertools.groupby(keys, self._resident.__contains__):
            some = list(run)
            if is_resident:
                kept = list(
                    itertools.takewhile(lambda key: key in hold or key in self._loads, some)
                )
                hold.add([key for key in kept if key not in self._loads])
                for key in kept:
                    if key in self._loads:  # another fetch is loading it
                        self._loads[key].fetches.append(fetch)
                        fetch.awaited.add(key)
            else:
                kept = some[: hold.make_room(len(missing) + len(some)) - len(missing)]
                missing += kept
            if len(kept) < len(some):
                break
        hold.end_walk()
        while (output := self.manager.prepare_store(missing)) is None:  # a policy may refuse more
            missing = missing[: len(missing) // 2]
        ids = self._take_over(output)
        for key, block_id in zip(output.block_hashes_to_store, ids.tolist(), strict=True):
            self._loads[key] = _Load(block_id, fetch.deadline, [fetch])
            fetch.awaited.add(key)
        self._ask(output.block_hashes_to_store, 0)

    def _ask(self, keys: Collection[BlockHash], first: int) -> None:
        """Ask the tiers from `first` on for keys; keys that no tier may have are lost."""
        by_tier: dict[int, list[BlockHash]] = {}
        lost = []
        now = time.monotonic()
        for key in keys:
            index = self._find(key, first, maybe=True)
            if index is None or self._loads[key].deadline <= now:
                lost.append(key)
            else:
                by_tier.setdefault(index, []).append(key)
        for index, some in by_tier.items():
            ids = np.array([self._loads[key].block_id for key in some], np.int64)
            seconds = min(self._loads[key].deadline for key in some) - now
            if any(self._find(key, index + 1, maybe=True) is not None for key in some):
                seconds /= 2  # leave the next tier the other half
            if not self._begin_job(index, _Job("load", some, ids), self.tiers[index].get, seconds):
                self._ask(some, index + 1)
        if lost:
            self._lose(lost)

    def _lose(self, keys: list[BlockHash]) -> None:
        """Free the slots of blocks that no tier returned."""
        self._counters["fetch_failed_blocks"] += len(keys)
        for key in keys:
            load = self._loads.pop(key)
            self._owner[load.block_id] = None  # its contents are undefined
            for fetch in load.fetches:
                fetch.awaited.discard(key)
        self.manager.complete_store(keys, success=False)

    def _loaded(self, index: int, job: _Job, done: Done) -> None:
        """Accept the blocks that a tier returned, and ask the next for the others."""
        is_ok = (done.status == Status.OK).tolist()
        found = [key for key, ok in zip(job.keys, is_ok, strict=True) if ok]
        others = [key for key, ok in zip(job.keys, is_ok, strict=True) if not ok]
        self.manager.complete_store(found)
        self._counters["fetched_blocks"] += len(found)
        for key in found:
            for fetch in self._loads.pop(key).fetches:
                if key in fetch.awaited:
                    fetch.awaited.discard(key)
                    fetch.hold.add([key])
        if self.promote:
            for nearer in range(index):
                self._put(nearer, "promote", found)
        self._ask(others, index + 1)

    def _end_if_done(self, fetch: _Fetch) -> None:
        """End a fetch that waits for nothing, or whose time is over."""
        if fetch.awaited and time.monotonic() < fetch.deadline:
            return
        del self._fetches[fetch.job]
        held = itertools.takewhile(fetch.hold.keys.__contains__, fetch.hashes)
        count = sum(1 for _ in held)
        fetch.awaited.clear()  # later blocks are for other fetches
        try:
            ids = self.manager.prepare_load(fetch.hashes[:count]).block_ids
            fetch.hold.let_go()
        except Exception:  # of a user's policy or backend
            log.exception("fetch %d: its blocks cannot be pinned", fetch.job)
            ids = NO_BLOCKS
        self._ended.append((fetch, ids))

    # -- the engine's reads and writes -------------------------------------------------------

    def prepare_load(self, hashes: Iterable[bytes]) -> BlockIDsLoadStoreSpec:
        """Pin blocks that are ready, and return their block ids."""
        self._refuse()
        return self.manager.prepare_load(hashes)

    def complete_load(self, hashes: Iterable[bytes]) -> None:
        """Release one pin per occurrence of each block."""
        self._refuse()
        self.manager.complete_load(hashes)

    def prepare_store(
        self, hashes: Iterable[bytes]
    ) -> PrepareStoreOutput[BlockIDsLoadStoreSpec] | None:
        """Make room for the blocks that are not resident; see `OffloadingManager.prepare_store`.

        In the mode ``"demote"`` the bytes of blocks that leave have been saved when it returns. It
        also returns None while jobs from before a `forget` use blocks.
        """
        self._refuse()
        if self._forgotten_jobs:
            as_batch(hashes)
            return None
        output = self.manager.prepare_store(hashes)
        if output is not None:
            self._begin_stores(output)
        return output

    def _begin_stores(self, output: _Prepared) -> dict[BlockHash, _Storing]:
        """Record and return the blocks that the engine is about to write."""
        ids = map(_Storing, self._take_over(output).tolist())
        begun = dict(zip(output.block_hashes_to_store, ids, strict=True))
        self._storing |= begun
        return begun

    def complete_store(self, hashes: Iterable[bytes], success: bool = True) -> None:
        """Make blocks readable whose bytes are in place, or drop them.

        In the mode ``"through"`` they are put to every tier and stay pinned until each has them.
        """
        self._refuse()
        stored = [key for key in dict.fromkeys(as_batch(hashes)) if key in self._storing]
        self._end_stores(stored, success)

    def _end_stores(self, stored: list[BlockHash], success: bool) -> None:
        self.manager.complete_store(stored, success)
        for key in stored:
            block_id = self._storing.pop(key).block_id
            if not success:
                self._owner[block_id] = None  # its contents are undefined
        if success and self.write == "through":
            for index in range(len(self.tiers)):
                self._put(index, "write", stored)

    def _take_over(self, output: _Prepared) -> npt.NDArray[np.int64]:
        """Record the new owners of a store's blocks, after saving those that left."""
        ids = output.store_spec.block_ids
        if self.write == "demote" and output.block_hashes_evicted:
            self._demote(set(output.block_hashes_evicted), ids)
        for key, block_id in zip(output.block_hashes_to_store, ids.tolist(), strict=True):
            self._owner[block_id] = key
        return ids

    def _demote(self, evicted: set[BlockHash], ids: npt.NDArray[np.int64]) -> None:
        """Copy the bytes of blocks that left to buffers, and put them to the nearest tier.

        Their slots are among the new ones: a manager that evicts has no other free slots.
        """
        keys, buffers = [], []
        for block_id in ids.tolist():
            key = self._owner[block_id]
            if key is None or key not in evicted or self._find(key, 0) is not None:
                continue
            if not self._buffers:
                self._counters["demote_dropped_blocks"] += 1
                continue
            buffer = self._buffers.pop()
            for source, target in zip(
                self.region.views_unchecked(block_id),
                self.region.views_unchecked(buffer),
                strict=True,
            ):
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            keys.append(key)
            buffers.append(buffer)
        if keys:
            self._offer(0, keys, np.array(buffers, np.int64))

    def _offer(self, index: int, keys: list[BlockHash], buffers: npt.NDArray[np.int64]) -> None:
        """Put blocks from buffers to the nearest tier that may accept them."""
        if index == len(self.tiers):
            self._counters["demote_dropped_blocks"] += len(keys)
            self._buffers.extend(buffers.tolist())
            return
        if not self._begin_job(index, _Job("demote", keys, buffers), self.tiers[index].put):
            self._offer(index + 1, keys, buffers)

    def _begin_job(
        self, index: int, job: _Job, begin: Callable[..., int], *arguments: float
    ) -> bool:
        """Begin a job of a tier; return whether it has begun."""
        try:
            number = begin(job.keys, job.ids, *arguments)
        except Exception:  # a user's policy may raise any exception
            log.exception("tier %r: a job could not begin", self.tiers[index].name)
            return False
        self._jobs[index][number] = job
        return True

    def _put(self, index: int, kind: Literal["write", "promote"], keys: list[BlockHash]) -> None:
        """Put blocks of host memory, pinned meanwhile, to a tier."""
        tier = self.tiers[index]
        absent = [key for key in keys if tier.state(key) != State.HIT]
        if absent:
            ids = self.manager.prepare_load(absent).block_ids
            if not self._begin_job(index, _Job(kind, absent, ids), tier.put):
                self.manager.complete_load(absent)

    # -- progress ----------------------------------------------------------------------------

    def step(self) -> list[Fetched]:
        """Process the results of the tiers and return the fetches that ended."""
        self._refuse()
        self._go_on()
        ended, self._ended = self._ended, []
        return [fetch.end(block_ids) for fetch, block_ids in ended]

    def _go_on(self) -> None:
        for index, tier in enumerate(self.tiers):
            for done in tier.poll():
                job = self._jobs[index].pop(done.job, None)
                if job is None:  # another caller's query
                    continue
                try:
                    self._take_in(index, job, done)
                except Exception:  # of a user's policy or backend
                    log.exception("tier %r: the end of a job was not processed", tier.name)
                    self._fail(job)
        for fetch in list(self._fetches.values()):
            self._end_if_done(fetch)

    def _take_in(self, index: int, job: _Job, done: Done) -> None:
        if job.is_forgotten:
            if job.kind == "demote":
                self._buffers.extend(job.ids.tolist())
            else:
                self._forgotten_jobs -= 1
            return
        if job.kind == "load":
            self._loaded(index, job, done)
            return
        is_ok = done.status == Status.OK
        if job.kind == "demote":
            self._counters["demoted_blocks"] += int(np.count_nonzero(is_ok))
            self._buffers.extend(job.ids[is_ok].tolist())
            if not is_ok.all():
                left = np.flatnonzero(~is_ok)
                keys = [job.keys[position] for position in left.tolist()]
                self._offer(index + 1, keys, job.ids[left])
            return
        name = "promoted_blocks" if job.kind == "promote" else "written_blocks"
        self._counters[name] += int(np.count_nonzero(is_ok))
        self.manager.complete_load(job.keys)

    def _fail(self, job: _Job) -> None:
        """Let fetches no longer wait for a load whose end could not be processed."""
        asked = {key for jobs in self._jobs for other in jobs.values() for key in other.keys}
        with contextlib.suppress(Exception):  # of the same policy or backend
            self._lose([key for key in job.keys if key in self._loads and key not in asked])

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until `step` has something to do."""
        self._refuse()
        until = time.monotonic() + check_timeout(timeout_s)
        return bool(self._ended) or self._wait(until)

    def _wait(self, until: float) -> bool:
        until = min([until, *(fetch.deadline for fetch in self._fetches.values())])
        poller = select.poll()
        for tier in self.tiers:
            poller.register(tier.fileno(), select.POLLIN)
        left = max(0.0, until - time.monotonic())
        return bool(poller.poll(math.ceil(left * 1000))) or any(
            fetch.deadline <= time.monotonic() for fetch in self._fetches.values()
        )

    @property
    def busy(self) -> bool:
        """Whether a fetch, or a job of a tier, is under way."""
        return bool(self._fetches or self._ended or any(self._jobs))

    def stats(self) -> dict[str, int]:
        """Return the counters since construction, without those of the manager and the tiers.

        Returns
        -------
        dict of str to int
            ``fetches`` (calls), ``fetched_blocks`` (returned by tiers), ``fetch_failed_blocks``
            (returned by no tier), ``written_blocks``, ``promoted_blocks`` and ``demoted_blocks``
            (accepted by a tier), ``demote_dropped_blocks`` (without a buffer or a tier); and the
            present ``free_buffers``.
        """
        return {**self._counters, "free_buffers": len(self._buffers)}

    def forget(self, generation: str | None = None, *, timeout_s: float = 5.0) -> bool:
        """Drop all blocks in host memory, and have those of another generation in every tier.

        Call it after new weights: see `Tier.forget`.

        Host memory comes first: whatever a tier does, host memory serves nothing once this call has
        begun, and the fetches whose end `step` has not returned end with no block. The engine must
        hold no block: its pins and pending stores are dropped. Blocks that tiers' jobs still use
        are handed out again when these have ended; until then every store is refused, and every
        fetch returns no block.

        Parameters
        ----------
        generation : str, optional
            As for `Tier.forget`; by default a random one, the same for all tiers.
        timeout_s : float
            Most seconds to wait for these jobs. `step` processes the end of later ones.

        Returns
        -------
        bool
            Whether it holds even if power fails from now on, that is, whether every tier's
            `Tier.forget` returned True.

        Raises
        ------
        Exception
            The first error of a tier's `Tier.forget`, after all tiers were called.
        """
        self._refuse()
        timeout_s = check_timeout(timeout_s)
        chosen = Generation.random() if generation is None else Generation.of(generation)
        self._abandon()
        self._resident.reset_cache()
        certain, fault = [], None
        for tier in self.tiers:
            try:
                certain.append(tier.forget(chosen.name))
            except Exception as error:  # noqa: BLE001, PERF203 - the next ones must forget, too
                fault = fault or error
        until = time.monotonic() + timeout_s
        while self._forgotten_jobs and time.monotonic() < until:
            self._wait(until)
            self._go_on()
        if fault is not None:
            raise fault
        return all(certain)

    def _abandon(self) -> None:
        """End all fetches that `step` has not returned with no block, and ignore jobs under way."""
        fetches = [*(fetch for fetch, _ in self._ended), *self._fetches.values()]
        self._ended = [(fetch, NO_BLOCKS) for fetch in fetches]
        self._fetches.clear()
        self._loads.clear()
        self._storing.clear()
        self._owner = [None] * len(self._owner)
        for jobs in self._jobs:
            for job in jobs.values():
                if not job.is_forgotten:
                    job.is_forgotten = True
                    self._forgotten_jobs += job.kind != "demote"

    def close(self, timeout_s: float = 5.0) -> bool:
        """Close every tier and return whether no call hangs.

        Every other method except `stats` then raises RuntimeError. Fetches under way do not end.
        """
        if os.getpid() != self._pid:
            return True
        clean = [tier.close(timeout_s) for tier in self.tiers]
        if not self._closed:  # else the manager may be another store's by now
            self._set_declining(allowed=True)
        self._closed = True
        return all(clean)


def _check_tiers(tiers: Any) -> tuple[Tier, ...]:
    """Return distinct tiers; TypeError, ValueError if they are invalid."""
    found: list[Any] = list(tiers) if isinstance(tiers, Iterable) else [tiers]
    for tier in found:
        if not isinstance(tier, Tier):
            raise TypeError(f"tiers must be a sequence of tiers, got {describe(tier)}")
    if len(set(map(id, found))) < len(found):
        raise ValueError(f"tiers must be distinct, got {describe(found)}")
    return tuple(found)
