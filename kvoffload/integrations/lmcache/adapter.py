"""Tiers of ``kvoffload.tiers`` as LMCache's second level: objects of host memory by their keys.

Structure
    An object of LMCache is a block of a tier, and there is one tier per object size. A tier's
    region is LMCache's own memory, in windows at the steps of its allocator; an object in other
    memory is copied through the adapter's own blocks. Threads of LMCache submit jobs. One thread of
    the adapter processes their ends and notifies LMCache; a separate thread opens a tier, since
    that may take long.
Invariants
    One lock serialises the calls of the tiers. It is not held while a tier is opened or LMCache's
    listeners are called. Data that is not certainly the stored object is a miss. An error of a tier
    or an object is a miss or a failed store, never an exception: whatever is raised at the end of a
    job, that job is settled, as failed, and no other is touched.
Accounting
    Only the events of a tier show which objects are stored. ``counted`` has the objects reported to
    LMCache; ``offered`` those of puts whose event has not come. An object in neither was stored
    before a restart, and is counted when a lookup finds it.
Cost
    Per key of a lookup: a hash, and the cost of the tier's lookup. Per object in a tier: the memory
    of its key.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import prometheus_client
from lmcache import _version as lmcache_version
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvoffload._checks import check_int
from kvoffload._collector import TableCollector
from kvoffload._metrics import TIER_METRICS, TIER_PREFIX, Sample
from kvoffload.errors import describe
from kvoffload.integrations.tiers import CLOSE_S, TEXTS, check_options, opening
from kvoffload.tiers import Done, Namespace, Region, State, Status, Tier, TierEvent, open_tier
from kvoffload.tiers.engine.tier import transfer_deadline
from kvoffload.tiers.generation import GenerationSource
from kvoffload.tiers.options import split_url
from kvoffload.tiers.region import MAX_BLOCK_BYTES, allocate

log = logging.getLogger("kvoffload.lmcache")

LONGEST_S = 120.0
"""Most seconds of a transfer: LMCache's locks on its memory expire after 300."""
OPENING_S = 30.0
"""Most seconds that a store waits for its tier to be opened."""
RETRY_S = 60.0
"""Seconds until a tier that could not be opened is retried."""
POLL_S = 1.0
"""Seconds after which tiers are polled without a signal."""
COPY_BYTES = 64 * 2**20
"""Bytes per tier of blocks for objects outside of LMCache's memory; touched only when used."""
MAX_SIZES = 16
"""Most object sizes, and so most tiers."""
_OPTIONS = (*TEXTS, "object_bytes")
Result = TypeVar("Result")
Keys = list[ObjectKey]


@dataclass(eq=False)
class KVOffloadL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The options of a `KVOffloadL2Adapter`.

    Parameters
    ----------
    url : str
        The tier, as for `open_tier`, such as ``"slab:/nvme/kv?capacity=2TB"``. There is a tier per
        size of object, and each has that capacity.
    weights_id : str
        Identity of the weights of all models that the server caches: LMCache knows only their
        names.
    revision : str
        The revision of the weights.
    salt : str
        Anything else that keeps namespaces apart.
    generation, generation_file : str
        The weights' name, or a file that has it at the start; see `Tier.forget`.
    object_bytes : tuple of int
        Sizes of objects whose tiers are opened at the start.
    """

    url: str = field(repr=False)  # it may have a password
    weights_id: str
    revision: str = ""
    salt: str = ""
    _: KW_ONLY
    generation: str = ""
    generation_file: InitVar[str | None] = None
    object_bytes: tuple[int, ...] = ()

    def __post_init__(self, generation_file: str | None) -> None:
        self.generation = GenerationSource(self.generation, generation_file).first

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KVOffloadL2AdapterConfig:
        """Return the options of ``adapter_params``; TypeError or ValueError if one is wrong."""
        check_options(d, _OPTIONS)
        texts = {name: d[name] for name in TEXTS if d.get(name) is not None}
        split_url(texts["url"])
        if not texts.get("weights_id"):
            raise ValueError(
                "weights_id must name the weights, since LMCache knows only the model's name, "
                f"got {describe(texts.get('weights_id'))}"
            )
        sizes = d.get("object_bytes") or []
        if not isinstance(sizes, list):
            raise TypeError(f"object_bytes must be a list of sizes, got {describe(sizes)}")
        if len(sizes) > MAX_SIZES:
            raise ValueError(f"object_bytes must be at most {MAX_SIZES}, got {len(sizes)}")
        checked = [check_int("object_bytes", size, 1, MAX_BLOCK_BYTES) for size in sizes]
        return cls(**texts, object_bytes=tuple(dict.fromkeys(checked)))

    @classmethod
    def help(cls) -> str:
        """Return a description of the options."""
        return (
            "kvoffload L2 adapter, adapter_params:\n"
            "- url (str): the tier, as slab:/nvme/kv?capacity=2TB (required)\n"
            "- weights_id (str): identity of the weights (required)\n"
            "- revision (str): their revision\n"
            "- salt (str): anything else that keeps namespaces apart\n"
            "- generation (str): the weights' name, or\n"
            "- generation_file (str): a file that has it\n"
            "- object_bytes (list of int): sizes of objects whose tiers are opened at the start"
        )


@dataclass(eq=False)
class _Task:
    """A task of LMCache: a store, a lookup or a load."""

    id: int
    kind: str
    keys: Keys
    stored: list[bytes]  # the tiers' keys
    are_right: npt.NDArray[np.bool_]  # per key, as far as known
    waiting: int = 1  # number of jobs, tiers to open, and the submission itself
    nbytes: int = 0


@dataclass(eq=False)
class _Job:
    """A job of a tier, for some of the keys of a task."""

    task: _Task
    positions: npt.NDArray[np.int64]
    # By the adapter's own block: the index in `positions`, and the object that is copied.
    copied: dict[int, tuple[int, MemoryObj]] = field(default_factory=dict)


class _Sized:
    """The tier for objects of one size, and its region.

    TypeError, ValueError, TierError or MemoryError if it cannot be opened.
    """

    def __init__(
        self, url: str, namespace: Namespace, memory: L1MemoryDesc, generation: str
    ) -> None:
        self.nbytes = nbytes = namespace.block_bytes
        self.step = step = max(1, memory.align_bytes)
        self.first = memory.ptr
        self.end = memory.ptr + memory.size
        stride = -(-nbytes // step) * step
        num_own = max(2, COPY_BYTES // stride)
        self._own = allocate(num_own * stride + step)  # other objects are copied through it
        own = np.frombuffer(self._own, np.uint8).ctypes.data
        # One range of addresses covers LMCache's memory and the adapter's own, in either order. No
        # block in use has addresses between them.
        self.base = memory.ptr - max(0, -(-(memory.ptr - own) // step)) * step
        span = max(self.end, own + len(self._own)) - self.base
        buffer = np.frombuffer((ctypes.c_ubyte * span).from_address(self.base), np.uint8)
        self.region = Region.windows(buffer, nbytes, step)
        start = -(-(own - self.base) // step)
        self.free = [start + index * (stride // step) for index in range(num_own)]
        self.jobs: dict[int, _Job] = {}
        self.offered: dict[bytes, ObjectKey] = {}
        self.counted: dict[bytes, ObjectKey] = {}
        self.tier: Tier
        with opening(open_tier(url, namespace, generation)) as self.tier:
            self.tier.attach(self.region)

    def block_of(self, obj: MemoryObj) -> int:
        """Return the block at an object's memory, or -1."""
        address = obj.data_ptr
        block, rest = divmod(address - self.base, self.step)
        is_inside = self.first <= address and address + self.nbytes <= self.end
        return block if is_inside and not rest else -1

    def place(
        self, positions: list[int], objects: list[MemoryObj], *, are_read: bool
    ) -> tuple[list[int], list[int], dict[int, tuple[int, MemoryObj]]]:
        """Return the objects that have a block: positions, blocks, and `_Job.copied`.

        An object in other memory has none while all of the adapter's own blocks are in use. With
        `are_read`, the bytes of such objects are copied now. An object that raises has none.
        """
        where: list[int] = []
        ids: list[int] = []
        copied: dict[int, tuple[int, MemoryObj]] = {}
        for position, obj in zip(positions, objects, strict=True):
            try:
                block = self.block_of(obj)
                if block < 0:
                    if not self.free:
                        continue
                    if are_read:
                        self.region.write(self.free[-1], obj.byte_array)
                    block = self.free.pop()
                    copied[block] = len(where), obj
            except Exception:
                log.exception("an object is not moved")
                continue
            where.append(position)
            ids.append(block)
        return where, ids, copied

    def copy_back(self, block: int, obj: MemoryObj) -> bool:
        """Copy a loaded block to its object in other memory; return whether that succeeded."""
        try:
            (view,) = self.region.views(block)
            np.frombuffer(obj.byte_array, np.uint8)[:] = view
        except Exception:  # its memory is read-only, or was freed
            log.exception("an object cannot be written, which is a miss")
            return False
        return True


class KVOffloadL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's objects in tiers of ``kvoffload.tiers``, one per size of object.

    Parameters
    ----------
    config : KVOffloadL2AdapterConfig
        The options.
    l1_memory_desc : L1MemoryDesc, optional
        From LMCache: its host memory.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong, or LMCache's host memory is not one piece.
    TierError
        If a tier of `object_bytes` cannot be opened.

    Notes
    -----
    Thread-safety: any thread may call any method at any time. `submit_unlock` and `close` wait for
    loads; no other method waits. Complexity: linear in the keys of a call and the number of sizes.
    """

    def __init__(
        self, config: KVOffloadL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        if l1_memory_desc is None or not l1_memory_desc.ptr or l1_memory_desc.size < 1:
            raise ValueError(
                "l1_memory_desc must describe host memory in one piece, "
                f"got {describe(l1_memory_desc)}"
            )
        super().__init__()  # without a capacity: the tiers evict, LMCache does not
        self._config = config
        self._memory = l1_memory_desc
        self.name = _METRICS.name_for(config.url)
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)  # a load ended
        self._sized: dict[int, _Sized] = {}
        self._opening: dict[int, threading.Thread] = {}
        self._retry_at: dict[int, float] = {}
        self._pending: list[tuple[float, int, _Task, list[int], list[MemoryObj]]] = []
        self._loading: Counter[bytes] = Counter()
        self._results: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._ids = count(1)
        self._news: deque[Callable[[], None]] = deque()  # notifications for LMCache
        self._is_closed = False
        self._logged: set[str] = set()  # what is said once
        try:
            for nbytes in config.object_bytes:
                self._sized[nbytes] = self._open(nbytes)
        except BaseException:
            for sized in self._sized.values():
                sized.tier.close(0.0)
            raise
        self._fds = {kind: create_event_notifier() for kind in self._results}
        self._wake = create_event_notifier()
        self._thread = threading.Thread(target=self._run, name="kvoffload-lmcache", daemon=True)
        self._thread.start()
        _METRICS.add(self)

    # -- tiers -------------------------------------------------------------------------------

    def _open(self, nbytes: int) -> _Sized:
        """Open the tier for objects of a size."""
        config = self._config
        namespace = Namespace(
            model="lmcache",  # the models' names are in the keys
            block_bytes=nbytes,
            engine=f"lmcache {'.'.join(lmcache_version.version.split('.')[:3])}",
            weights=[config.weights_id, config.revision],
            salt=config.salt,
        )
        url = _own_url(config.url, f"{self.name}-{nbytes}")
        sized = _Sized(url, namespace, self._memory, config.generation)
        capacities = [each.tier.capacity_bytes or 0 for each in [sized, *self._sized.values()]]
        log.info(
            "kvoffload: tier %r active for objects of %d bytes, namespace %s, %s objects found; "
            "%d tiers have a capacity of %d bytes in all",
            sized.tier.name,
            nbytes,
            namespace.fingerprint.hex(),
            sized.tier.stats().get("restored", "unknown"),
            len(capacities),
            sum(capacities),
        )
        return sized

    def _opened(self, nbytes: int) -> _Sized | None:
        """Return the tier for objects of a size; if it is missing, begin to open it."""
        sized = self._sized.get(nbytes)
        if sized is not None or not 0 < nbytes <= MAX_BLOCK_BYTES or nbytes in self._opening:
            return sized
        if time.monotonic() < self._retry_at.get(nbytes, -math.inf):
            return None
        if len(self._sized) + len(self._opening) >= MAX_SIZES:
            self._log_once(
                "objects must be of %d sizes at most, got another of %d bytes; objects of further "
                "sizes are not stored",
                MAX_SIZES,
                nbytes,
            )
            return None
        thread = threading.Thread(
            target=self._open_beside, args=(nbytes,), name="kvoffload-lmcache-open", daemon=True
        )
        self._opening[nbytes] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            del self._opening[nbytes]
            log.error("the tier for objects of %d bytes cannot be opened now: %s", nbytes, error)
        return None

    def _open_beside(self, nbytes: int) -> None:
        """Open a tier in a separate thread, and wake the adapter's for the stores that wait."""
        sized = None
        try:
            sized = self._open(nbytes)
        except Exception as error:  # noqa: BLE001  (a plug-in's tier may raise any)
            log.error(
                "the tier for objects of %d bytes cannot be opened, which is tried again in %.0f "
                "s: %s",
                nbytes,
                RETRY_S,
                error,
            )
        with self._lock:
            del self._opening[nbytes]
            if sized is None:
                self._retry_at[nbytes] = time.monotonic() + RETRY_S
            elif not self._is_closed:
                self._sized[nbytes] = sized
                sized = None
        if sized is not None:  # the adapter was closed meanwhile
            sized.tier.close(0.0)
        with contextlib.suppress(OSError, ValueError):  # closed
            self._wake.notify()

    def _begin_pending(self) -> None:
        """Begin the stores whose tier is open.

        Fail those whose tier cannot be opened, or that have waited long: LMCache's lock may expire.
        """
        overdue = time.monotonic() - OPENING_S
        for entry in [*self._pending]:
            since, nbytes, task, *_ = entry
            sized = None if self._is_closed else self._sized.get(nbytes)
            if sized is not None:
                self._try(self._move, sized, *entry[2:])
            elif nbytes in self._opening and since >= overdue and not self._is_closed:
                continue
            self._pending.remove(entry)
            self._try(self._settle, task)

    # -- event descriptors -------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when a store has ended."""
        return int(self._fds["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when a lookup has ended."""
        return int(self._fds["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when a load has ended."""
        return int(self._fds["load"].fileno())

    # -- stores ------------------------------------------------------------------------------

    def submit_store_task(self, keys: Keys, objects: list[MemoryObj]) -> int:
        """Begin to store objects; return the task, which succeeds or fails as a whole."""
        sizes = _sizes_of(keys, objects)
        if any(size != obj.metadata.get_size() for size, obj in zip(sizes, objects, strict=True)):
            self._log_once(
                "serde must not be set: it varies the sizes of objects, and a tier has blocks of "
                "one size; such objects are not stored"
            )
            sizes = []
        return self._transfer("store", keys, sizes, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the stores that ended since the last call, with the bytes that were written."""
        with self._lock:
            ended, self._results["store"] = self._results["store"], {}
            return ended

    # -- lookups -----------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: Keys, group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look objects up; return the task. No object is locked."""
        stored = [_stored_key(key) for key in keys]
        layouts = {group: _layout_bytes(layout) for group, layout in group_layout_descs.items()}
        sizes = [layouts.get(key.object_group_id, 0) for key in keys]
        with self._lock:
            task = self._task("lookup", keys, stored)
            for size, positions in _by_size(sizes):
                # Without a layout the size is 0, and every tier may have the object.
                tiers = [self._opened(size)] if size else self._sized.values()
                for sized in filter(None, tiers):
                    self._try(self._look_up, sized, task, positions)
            self._settle(task)
            return task.id

    def _look_up(self, sized: _Sized, task: _Task, positions: list[int]) -> None:
        """Look some of a task's keys up in a tier; query the medium for unknown ones."""
        stored = [task.stored[position] for position in positions]
        states = sized.tier.lookup(stored)
        where = np.array(positions, np.int64)
        self._find(sized, task, where[states == State.HIT])
        unknown = np.flatnonzero(states == State.UNKNOWN)
        if len(unknown):
            asked = [stored[index] for index in unknown.tolist()]
            self._submit(sized, _Job(task, where[unknown]), sized.tier.query, asked)

    def _find(self, sized: _Sized, task: _Task, positions: npt.NDArray[np.int64]) -> None:
        """Record which keys of a lookup are present; count those from before a restart."""
        task.are_right[positions] = True
        found = [(task.stored[position], task.keys[position]) for position in positions.tolist()]
        self._count(sized, [(key, name) for key, name in found if key not in sized.offered])

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return once which keys of a lookup were found; None if it has not ended."""
        return self._results["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: Keys) -> None:
        """Wait for loads of these keys: LMCache frees the memory of an abandoned load."""
        with self._ended:
            if not self._loading:
                return
            stored = {_stored_key(key) for key in keys}
            while not stored.isdisjoint(self._loading):
                self._ended.wait(POLL_S)

    # -- loads -------------------------------------------------------------------------------

    def submit_load_task(self, keys: Keys, objects: list[MemoryObj]) -> int:
        """Begin to load objects into LMCache's memory; return the task."""
        return self._transfer("load", keys, _sizes_of(keys, objects), objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return once which keys of a load were loaded; None if it has not ended."""
        return self._results["load"].pop(task_id, None)

    # -- tasks and jobs ----------------------------------------------------------------------

    def _task(self, kind: str, keys: Keys, stored: list[bytes]) -> _Task:
        """Begin a task; RuntimeError if the adapter is closed."""
        if self._is_closed:
            raise RuntimeError("the adapter is closed")
        return _Task(next(self._ids), kind, keys, stored, np.zeros(len(stored), bool))

    def _try(self, call: Callable[..., Result], *arguments: Any) -> Result | None:
        """Return the result of a call; if it raises, log that and return None."""
        try:
            return call(*arguments)
        except Exception:  # of a tier, a plug-in's policy or LMCache
            log.exception("%s failed", getattr(call, "__name__", call))
            return None

    def _transfer(self, kind: str, keys: Keys, sizes: list[int], objects: list[MemoryObj]) -> int:
        """Begin to store or load objects; return the task. A store waits for its tier."""
        stored = [_stored_key(key) for key in keys]
        with self._lock:
            task = self._task(kind, keys, stored)
            for size, positions in _by_size(sizes):
                sized = self._opened(size)
                chosen = [objects[position] for position in positions]
                if sized is not None:
                    self._try(self._move, sized, task, positions, chosen)
                elif kind == "store" and size in self._opening:
                    task.waiting += 1
                    self._pending.append((time.monotonic(), size, task, positions, chosen))
            self._settle(task)
            return task.id

    def _move(
        self, sized: _Sized, task: _Task, positions: list[int], objects: list[MemoryObj]
    ) -> None:
        """Begin the put or the get of some of a task's objects."""
        is_store = task.kind == "store"
        where, ids, copied = sized.place(positions, objects, are_read=is_store)
        stored = [task.stored[position] for position in where]
        if is_store:
            for position, key in zip(where, stored, strict=True):
                sized.offered.setdefault(key, task.keys[position])
        job = _Job(task, np.array(where, np.int64), copied)
        begin = sized.tier.put if is_store else sized.tier.get
        has_begun = self._submit(sized, job, begin, stored, ids, _seconds(len(ids), sized.nbytes))
        if has_begun and not is_store:
            self._loading.update(stored)
        elif is_store and not has_begun:
            self._forget_offers(sized, stored)

    def _forget_offers(self, sized: _Sized, stored: Iterable[bytes]) -> None:
        for key in stored:
            sized.offered.pop(key, None)

    def _submit(self, sized: _Sized, job: _Job, begin: Callable[..., int], *arguments: Any) -> bool:
        """Begin a job of a tier; return whether it has begun."""
        number = self._try(begin, *arguments)
        if number is None:
            sized.free.extend(job.copied)
            return False
        sized.jobs[number] = job
        job.task.waiting += 1
        return True

    def _settle(self, task: _Task) -> None:
        """Count down a task's pending parts; after the last, publish its result."""
        task.waiting -= 1
        if task.waiting:
            return
        if task.kind == "store":
            result: Any = L2StoreResult(bool(task.are_right.all()), task.nbytes)
        else:
            result = Bitmap(len(task.keys))
            result.batched_set(np.flatnonzero(task.are_right).tolist())
        self._results[task.kind][task.id] = result
        self._fds[task.kind].notify()

    def _log_once(self, text: str, *arguments: object) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.error(text, *arguments)

    # -- the adapter's thread ----------------------------------------------------------------

    def _run(self) -> None:
        """Process the ends of jobs, and notify LMCache of stored and evicted objects."""
        while True:
            poller = select.poll()
            poller.register(self._wake.fileno(), select.POLLIN)
            with self._lock:
                if self._is_closed:
                    return
                for sized in self._sized.values():
                    if (fd := self._try(sized.tier.fileno)) is not None:
                        poller.register(fd, select.POLLIN)
            poller.poll(POLL_S * 1000)
            self._wake.consume()
            try:
                with self._lock:
                    self._begin_pending()
                    for sized in [*self._sized.values()]:
                        self._try(self._collect, sized)
                self._tell()
            except Exception:  # LMCache waits for this thread's results
                log.exception("the adapter's thread continues after an error")

    def _collect(self, sized: _Sized) -> None:
        """Process the ends of a tier's jobs and its events; an interrupted tier is opened again."""
        ends = self._try(sized.tier.poll)
        if ends is None and sized.tier.health().interrupted:
            del self._sized[sized.nbytes]
            self._try(sized.tier.close, math.inf if sized.tier.direct else 0.0)
            ends = sized.tier.poll()
            events = [TierEvent([], removed=True, reason="forgotten")]  # counted anew
        else:
            events = self._try(_events_of, sized.tier) or []
        for event in events:
            self._try(self._note, sized, event)
        for done in ends or ():
            job = sized.jobs.pop(done.job, None)
            if job is not None:
                self._end(sized, job, done)

    def _end(self, sized: _Sized, job: _Job, done: Done) -> None:
        """Settle a job, as failed if its end cannot be processed."""
        task = job.task
        stored = [task.stored[position] for position in job.positions.tolist()]
        if self._try(self._take_in, sized, job, stored, done) is None:
            task.are_right[job.positions] = False
            if task.kind == "store":
                self._forget_offers(sized, stored)
        sized.free.extend(job.copied)
        if task.kind == "load":
            self._loading -= Counter(stored)  # a key without loads is dropped
            self._ended.notify_all()
        self._try(self._settle, task)

    def _take_in(self, sized: _Sized, job: _Job, stored: list[bytes], done: Done) -> bool:
        """Record the results of a job; return True."""
        task = job.task
        are_ok = done.status == Status.OK
        if done.op == "query":
            self._find(sized, task, job.positions[are_ok])
            return True
        if done.op == "put":
            task.are_right[job.positions] = are_ok | (done.status == Status.DECLINED)
            task.nbytes += done.nbytes
            self._end_offers(sized, stored, are_ok)
        else:
            for block, (index, obj) in job.copied.items():
                are_ok[index] = are_ok[index] and sized.copy_back(block, obj)
            task.are_right[job.positions] = are_ok
        there = [stored[index] for index in np.flatnonzero(are_ok).tolist()]
        is_use = done.op == "get" or not done.nbytes  # a put of objects that were present
        is_open = not self._is_closed and sized.nbytes in self._sized
        if there and is_use and is_open:
            self._try(sized.tier.touch, there)
        if done.op == "get":
            loaded = [sized.counted[key] for key in there if key in sized.counted]
            self._tell_later(self._notify_keys_accessed, loaded)
        return True

    # -- accounting --------------------------------------------------------------------------

    def _end_offers(
        self, sized: _Sized, stored: list[bytes], are_ok: npt.NDArray[np.bool_]
    ) -> None:
        """Process the end of a put after its events; objects that were present have no event."""
        left = dict.fromkeys(key for key in stored if key in sized.offered)
        states = None if self._is_closed else self._try(sized.tier.lookup, left)
        are_there = states == State.HIT if states is not None else np.zeros(len(left), bool)
        ended = {key for key, is_ok in zip(stored, are_ok.tolist(), strict=True) if not is_ok}
        there = [key for key, is_there in zip(left, are_there.tolist(), strict=True) if is_there]
        self._count(sized, [(key, sized.offered.pop(key)) for key in there])
        self._forget_offers(sized, ended)

    def _count(self, sized: _Sized, named: list[tuple[bytes, ObjectKey]]) -> None:
        """Count objects in a tier, and report those that were not counted before."""
        new = {key: name for key, name in named if key not in sized.counted}
        sized.counted.update(new)
        self._tell_later(self._notify_keys_stored, [*new.values()], [sized.nbytes] * len(new))

    def _note(self, sized: _Sized, event: TierEvent) -> None:
        """Process a tier's event of keys that were stored or left."""
        if not event.removed:
            offers = [(key, sized.offered.pop(key, None)) for key in event.keys]
            self._count(sized, [(key, name) for key, name in offers if name])
            return
        left = list(sized.counted) if event.reason == "forgotten" else event.keys
        names = [sized.counted.pop(key) for key in left if key in sized.counted]
        self._tell_later(self._notify_keys_deleted, names, [sized.nbytes] * len(names))

    def _tell_later(self, notify: Callable[..., None], keys: Keys, *sizes: list[int]) -> None:
        if keys:
            self._news.append(partial(notify, keys, *sizes))

    def _tell(self) -> None:
        """Notify LMCache without the lock, since its listeners may call the adapter."""
        while self._news:
            notify = self._news.popleft()
            try:
                notify()
            except Exception:
                log.exception("a listener of LMCache failed")

    def get_usage(self) -> AdapterUsage:
        """Return the bytes in all tiers, their capacity, and the bytes by cache salt."""
        with self._lock:
            used = sum(
                sized.tier.stats().get("used_bytes", len(sized.counted) * sized.nbytes)
                for sized in self._sized.values()
            )
            capacity = sum(sized.tier.capacity_bytes or 0 for sized in self._sized.values())
        return AdapterUsage(used, capacity, super().get_usage().bytes_by_cache_salt)

    def delete(self, keys: Keys) -> None:
        """Drop objects; LMCache's listeners are notified soon after."""
        stored = [_stored_key(key) for key in keys]
        with self._lock:
            if self._is_closed:
                return
            for sized in self._sized.values():
                self._try(sized.tier.discard, stored)
            self._wake.notify()

    # -- health and closing ------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """Return whether all tiers answer, and the counters and sizes of each."""
        with self._lock:
            tiers = {
                sized.tier.name: {"is_healthy": sized.tier.health().ok, **sized.tier.stats()}
                for sized in self._sized.values()
            }
            are_healthy = all(tier["is_healthy"] for tier in tiers.values())
            return {
                "is_healthy": are_healthy and not self._is_closed,
                "type": type(self).__name__,
                "object_bytes": sorted(self._sized),
                "tiers": tiers,
            }

    def close(self) -> None:
        """Close the tiers; return when no job has LMCache's memory. A second call does nothing.

        With ``staged=no`` this waits for the kernel, however long the disk takes.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._begin_pending()
            opening = list(self._opening.values())
        self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        until = time.monotonic() + CLOSE_S
        for thread in opening:
            thread.join(max(0.0, until - time.monotonic()))
        for sized in [*self._sized.values()]:  # one that does not close is removed
            self._close_tier(sized)
        self._tell()
        _METRICS.remove(self)
        for notifier in (*self._fds.values(), self._wake):
            notifier.close()

    def _close_tier(self, sized: _Sized) -> None:
        """Close a tier when no job has the region, and end the tasks that wait for it."""
        tier = sized.tier
        if tier.direct:
            while self._try(tier.wait, list(sized.jobs), POLL_S) is False:
                pass
        self._try(tier.close, CLOSE_S)
        with self._lock:
            self._collect(sized)


class _Metrics(TableCollector):
    """The metrics of the tiers of all adapters of the process, in prometheus_client's registry."""

    def __init__(self) -> None:
        super().__init__(TIER_PREFIX, TIER_METRICS, None, "tier")
        self._adapters: list[KVOffloadL2Adapter] = []
        self._lock = threading.Lock()

    def name_for(self, url: str) -> str:
        """Return a unique name for an adapter's tiers."""
        wanted = split_url(url)[2].get("name", "lmcache")
        taken = {adapter.name for adapter in self._adapters}
        names = (wanted if index == 1 else f"{wanted}{index}" for index in count(1))
        return next(name for name in names if name not in taken)

    def add(self, adapter: KVOffloadL2Adapter) -> None:
        """Export the metrics of an adapter."""
        with self._lock:
            self._adapters.append(adapter)
            if len(self._adapters) == 1:
                try:
                    prometheus_client.REGISTRY.register(self)
                except ValueError as error:  # the application exports its own tiers
                    log.warning("the tiers' metrics are not exported: %s", error)

    def remove(self, adapter: KVOffloadL2Adapter) -> None:
        """Stop the export of an adapter's metrics."""
        with self._lock:
            self._adapters.remove(adapter)
            if not self._adapters:
                with contextlib.suppress(KeyError):
                    prometheus_client.REGISTRY.unregister(self)

    def _sources(self) -> Iterator[tuple[str, Iterator[Sample]]]:
        for adapter in list(self._adapters):
            for sized in list(adapter._sized.values()):
                yield sized.tier.name, sized.tier.samples()  # type: ignore[attr-defined]


_METRICS = _Metrics()


def _own_url(url: str, name: str) -> str:
    """Return the address of one tier.

    LMCache's locks on its memory expire, so by default a slab is staged, and holds none of this
    memory beyond a deadline; and a store ends only when it is on the disk.
    """
    kind, place, options = split_url(url)
    if kind == "slab" and options.setdefault("staged", "yes").lower() in ("yes", "true", "1"):
        options.setdefault("ack", "stored")
    return f"{kind}:{place}?{urlencode({**options, 'name': name, 'events': 'yes'})}"


def _events_of(tier: Tier) -> list[TierEvent]:
    return list(tier.take_events())


def _stored_key(key: ObjectKey) -> bytes:
    """Return the tiers' key of an object, which depends on all fields of LMCache's key."""
    model, salt = key.model_name, key.cache_salt
    head = f"{key.kv_rank} {key.object_group_id} {len(model)} {len(salt)} {model}{salt}"
    text = head.encode("utf-8", "surrogatepass")
    return blake2b(text + key.chunk_hash, digest_size=32).digest()


def _layout_bytes(layout: MemoryLayoutDesc) -> int:
    """Return the bytes of an object; 0 if the layout is empty."""
    return sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )


def _sizes_of(keys: Keys, objects: list[MemoryObj]) -> list[int]:
    """Return the bytes of objects; ValueError if they are not as many as the keys."""
    if len(keys) != len(objects):
        raise ValueError(f"objects must be as many as keys, {len(keys)}, got {len(objects)}")
    return [int(obj.get_size()) for obj in objects]


def _by_size(sizes: list[int]) -> Iterable[tuple[int, list[int]]]:
    """Return the positions of each size."""
    found: dict[int, list[int]] = {}
    for position, size in enumerate(sizes):
        found.setdefault(size, []).append(position)
    return found.items()


def _seconds(num_blocks: int, nbytes: int) -> float:
    """Return the seconds of a transfer: a tier's default, but no longer than LMCache's locks."""
    return min(transfer_deadline(num_blocks * nbytes), LONGEST_S)
