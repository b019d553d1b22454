"""The manager skeleton in Python: the lifecycle of a block, over a policy and a backend.

Structure
    The policy's ``_resident`` maps hashes to live statuses; only this module changes ``ref_cnt``. A
    user's own parts are called through the adapters of ``_user_parts``.
Invariants
    Every resident block owns one slot of the backend, and every slot given to this manager belongs
    to one resident block.
    A call checks everything, then changes the state (loads change pins while they check, and undo
    the changes): an error of its own leaves no trace, while an exception from outside
    (KeyboardInterrupt, MemoryError) may leave an intermediate state. If pool and policy are of the
    library and no one else's, slots left without a block are free again at the next store.
Cost
    O(1) per block, plus the victim search of the policy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from kvoffload import errors
from kvoffload._checks import MAX_REF_CNT, as_batch, batch_error, check_bool
from kvoffload.backends._cpu_py import CPUBackend
from kvoffload.backends.base import Backend
from kvoffload.policies import _ownership as ownership
from kvoffload.policies import registry
from kvoffload.policies._sessions import Sessions
from kvoffload.policies._twin_py import PythonPolicy, block_table
from kvoffload.policies.base import CachePolicy
from kvoffload.types import (
    BlockHash,
    BlockStatus,
    Hints,
    OffloadingEvent,
    PrepareStoreOutput,
    Spec_co,
)

from ._user_parts import EvictionFaultError, UserBackend, UserPolicy
from ._views import ManagerViews
from ._watching import LOAD, STORE, WatchRequest
from .base import InSession, take_contract

_COUNTERS = (
    "lookups",
    "lookup_blocks",
    "hit_blocks",
    "stored_blocks",
    "failed_blocks",
    "evicted_blocks",
    "refused_stores",
    "not_admitted",
    "loaded_blocks",
)


@take_contract
class Manager(ManagerViews[Spec_co]):
    """A manager over any policy and any backend.

    The contract gives its methods their docstrings.
    """

    _twin: Literal["py", "c"] = "py"
    _backend_class: type[CPUBackend] = CPUBackend
    _owns_pool = False  # a backend passed in may have other users

    _policy_object: CachePolicy
    _backend_object: Backend[Spec_co]
    _rebuild: Callable[[], CachePolicy] | None
    _policy: PythonPolicy | UserPolicy
    _backend: UserBackend[Spec_co]  # or a CPUBackend, which has the same protocol
    _find: Callable[[BlockHash], BlockStatus | None]
    _sessions: Sessions
    _events: list[OffloadingEvent] | None
    _counters: dict[str, int]
    _owner: weakref.ref[object]
    _watch: Any  # a ``WatchCore``, or None

    def _setup(
        self,
        policy: CachePolicy,
        backend: Backend[Spec_co],
        enable_events: bool,
        rebuild: Callable[[], CachePolicy] | None = None,
        owner: object | None = None,
        *,
        watch: WatchRequest | None = None,
    ) -> None:
        """Join the parts; `rebuild` builds a new policy if the first cannot be cleared.

        The policy belongs to `owner`, by default this manager; `watch` observes it.
        """
        owner = self if owner is None else owner
        if "_watch" in vars(self):
            raise errors.manager_initialised()
        core = None
        if watch is not None:
            core = watch.new_core(owner, backend.get_num_free_blocks())
        ownership.take(policy, owner)
        self._policy_object = policy
        self._backend_object = backend
        self._rebuild = rebuild
        self._policy = _trusted_policy(policy)
        self._backend = _trusted_backend(backend)
        self._find = self._policy._resident.get
        self._sessions = Sessions(self._policy._resident)
        self._events = [] if enable_events else None
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._owner = weakref.ref(owner)
        self._watch = core
        if core is not None:
            core.get = self._find
            core.watch._join(owner, core)

    def __getattr__(self, name: str) -> Any:
        # Reached only for a missing attribute: before __init__ has run, or an unknown name.
        if name in Manager.__annotations__:
            raise errors.not_initialised("manager")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise errors.cannot_pickle(self)

    # -- the life of a block -----------------------------------------------------------------

    def lookup(self, hashes: Iterable[bytes]) -> int:
        watch = self._watch
        if watch is not None and watch.due:
            watch.watch._drain()
        find = self._find
        # A list or tuple is read no further than necessary.
        batch: Sequence[BlockHash] = (
            hashes if type(hashes) is list or type(hashes) is tuple else as_batch(hashes)
        )
        num_hits = 0
        for block_hash in batch:
            if type(block_hash) is not bytes or not block_hash:
                raise batch_error(batch)
            status = find(block_hash)
            if status is None or status.ref_cnt < 0:
                break
            num_hits += 1
        counters = self._counters
        counters["lookups"] += 1
        counters["lookup_blocks"] += len(batch)
        counters["hit_blocks"] += num_hits
        if watch is not None:
            watch.looked_up(batch, num_hits)
        return num_hits

    def touch(self, hashes: Iterable[bytes]) -> None:
        _ = self._policy  # before the batch is consumed: a manager without __init__ has none
        batch = as_batch(hashes)
        self._policy._take_back(batch)
        self._policy._touch(batch)

    def release(self, hashes: Iterable[bytes]) -> None:
        self._let_go(self._sessions.unshared(as_batch(hashes)))

    def _use_first(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the first time."""
        self._policy._take_back(hashes)
        self._policy._begun(hashes, hints)

    def _use_more(self, added: list[BlockHash]) -> None:
        """Use the blocks that extend a request."""
        self._policy._take_back(added)
        self._policy._extended(added)
        if self._watch is not None:
            self._watch.extended(added)

    def _met(self, hashes: list[BlockHash], start: int) -> int:
        """Note whether a request goes on with its session; see `Sessions.meet`."""
        return self._sessions.meet(hashes, start)

    def _finished(self, hashes: list[BlockHash], hints: Hints | None, session: InSession) -> None:
        """Use the blocks of a request for the last time; release them if its session ends."""
        self._used_last(hashes, hints)
        met, own, num_last, first, last = session
        self._sessions.leave(hashes, met, own, num_last)
        if self._watch is not None:
            self._watch.finished(hashes, hints, first, last, len(hashes) + 1 - num_last)
        if hints is not None and hints.ends:
            self._let_go(self._sessions.unshared(hashes))

    def _used_last(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the last time."""
        self._policy._take_back(hashes)
        self._policy._finished(hashes, hints)

    def _served_at_once(
        self, hashes: list[BlockHash], own: Collection[BlockHash], num_last: int
    ) -> None:
        """Note the session of a request that made its calls without `begin`."""
        self._sessions.serve_at_once(hashes, own, num_last)

    def _unshared(self, hashes: Iterable[bytes]) -> list[BlockHash]:
        """Return the resident blocks that only one session uses."""
        return self._sessions.own(as_batch(hashes))

    def _let_go(self, unshared: list[BlockHash]) -> None:
        """Release blocks that only one session uses."""
        if unshared:
            self._policy._release(unshared)
        if self._watch is not None:
            self._watch.released(unshared)

    def _touch_inserted(self, hashes: Iterable[bytes], inserted: Collection[bytes]) -> None:
        """Touch blocks; those in `inserted` as if still being stored, which counts as no use.

        For a request that has stored them itself and whose stores have already ended.
        """
        batch = as_batch(hashes)
        own = filter(None, map(self._find, [key for key in batch if key in inserted]))
        shown = [(status, status.ref_cnt) for status in own]
        try:
            for status, _ in shown:
                status.ref_cnt = -1
            self._policy._take_back(batch)
            self._policy._touch(batch)
        finally:
            for status, ref_cnt in shown:
                status.ref_cnt = ref_cnt

    def prepare_load(self, hashes: Iterable[bytes]) -> Spec_co:
        find = self._find
        batch = as_batch(hashes)
        pinned: list[BlockStatus] = []
        try:
            for block_hash in batch:
                status = find(block_hash)
                if status is None:
                    raise errors.block_not_found("prepare_load", block_hash)
                ref_cnt = status.ref_cnt
                if ref_cnt < 0:
                    raise errors.block_not_ready("prepare_load", block_hash)
                if ref_cnt == MAX_REF_CNT:
                    raise errors.ref_count_overflow("prepare_load", block_hash)
                status.ref_cnt = ref_cnt + 1
                pinned.append(status)
            spec = self._backend._load_store_spec(batch, pinned)
        except BaseException:
            for status in pinned:
                status.ref_cnt -= 1
            raise
        self._counters["loaded_blocks"] += len(pinned)
        if self._watch is not None:
            self._watch.opened(LOAD, [status.block_id for status in pinned])
        return spec

    def complete_load(self, hashes: Iterable[bytes]) -> None:
        find = self._find
        batch = as_batch(hashes)
        released: list[BlockStatus] = []
        try:
            for block_hash in batch:
                status = find(block_hash)
                if status is None:
                    raise errors.block_not_found("complete_load", block_hash)
                ref_cnt = status.ref_cnt
                if ref_cnt <= 0:
                    raise errors.block_not_pinned("complete_load", block_hash)
                status.ref_cnt = ref_cnt - 1
                released.append(status)
        except BaseException:
            for status in released:
                status.ref_cnt += 1
            raise
        if self._watch is not None:
            self._watch.closed(LOAD, [status.block_id for status in released])

    def prepare_store(self, hashes: Iterable[bytes]) -> PrepareStoreOutput[Spec_co] | None:
        return self._store(hashes, is_last=False)

    def _store(
        self, hashes: Iterable[bytes], *, is_last: bool
    ) -> PrepareStoreOutput[Spec_co] | None:
        """Store the missing blocks; for a session that ends, without evicting regular blocks."""
        resident = self._policy._resident
        batch = as_batch(hashes)
        distinct = dict.fromkeys(batch)
        missing = [block_hash for block_hash in distinct if block_hash not in resident]
        if not missing:
            return PrepareStoreOutput([], self._backend._load_store_spec([], []), [])
        self._regain_slots()
        try:
            self._policy._missed(missing)
            decide = self._policy._make_room_of_released if is_last else self._policy._make_room
            room = decide(missing, self._backend._num_free(), distinct.keys())
        except EvictionFaultError as fault:
            self._release(fault.victims)
            raise fault.error from None
        if room is None:
            self._counters["refused_stores"] += 1
            if self._watch is not None:
                self._watch.offered(missing, -1, [])
            return None
        num_admitted, victims = room
        to_store = missing[:num_admitted]
        evicted = self._release(victims)
        spec = self._place(to_store)
        self._counters["stored_blocks"] += num_admitted
        self._counters["not_admitted"] += len(missing) - num_admitted
        if self._watch is not None:
            self._watch.offered(missing, num_admitted, evicted)
            stored = filter(None, map(self._find, to_store))
            self._watch.opened(STORE, [status.block_id for status in stored])
        return PrepareStoreOutput(to_store, spec, evicted)

    def complete_store(self, hashes: Iterable[bytes], success: bool = True) -> None:
        find = self._find
        success = check_bool("success", success)
        batch = as_batch(hashes)
        pending: dict[BlockHash, BlockStatus] = {}
        for block_hash in batch:
            status = find(block_hash)
            if status is not None and status.ref_cnt < 0:
                pending[block_hash] = status
        watched = batch if self._watch is not None else ()
        ids = [pending[key].block_id if key in pending else -1 for key in watched]
        if success:
            for status in pending.values():
                status.ref_cnt = 0
            self._emit(list(pending), removed=False)
        elif pending:
            self._fail(pending)
        if self._watch is not None:
            self._watch.closed(STORE, ids)
            if not success:
                self._watch.failed(list(pending))

    def take_events(self) -> Iterator[OffloadingEvent]:
        events = self._events
        if events is None:
            return iter(())
        self._events = []
        return iter(events)

    def _drop_all(self) -> None:
        statuses = list(self._policy._in_eviction_order())
        if self._rebuild is None:
            self._policy._clear()
        else:
            self._begin_anew(self._rebuild())
        self._sessions.clear()
        self._resets += 1
        self._backend._release_all(statuses)
        if self._watch is not None:
            self._watch.on_reset()

    # -- parts of the above ------------------------------------------------------------------

    def _begin_anew(self, policy: CachePolicy) -> None:
        """Replace the present policy, which cannot be cleared, with an empty one."""
        owner, former = self._owner(), self._policy_object
        ownership.take(policy, owner)
        self._policy_object = policy
        resident = self._policy._resident  # a call whose batch resets the manager looks there
        resident.clear()
        self._policy = UserPolicy(policy)
        self._policy._resident = resident
        if policy is not former:
            ownership.release(former, owner)

    def _regain_slots(self) -> None:
        """Free the slots that an exception from outside left without a block."""
        if not self._owns_pool or isinstance(self._policy, UserPolicy):
            return
        pool: Any = self._backend
        resident = self._policy._resident
        if pool._num_free() + len(resident) < pool._num_blocks:
            pool._free_all_but(resident.values())

    def _release(self, victims: list[tuple[BlockHash, BlockStatus]]) -> list[BlockHash]:
        """Free the slots of victims, count them, emit their event; return their hashes."""
        if not victims:
            return []
        evicted = [block_hash for block_hash, _ in victims]
        self._sessions.forget(evicted)
        self._counters["evicted_blocks"] += len(evicted)
        self._emit(evicted, removed=True)
        self._backend._free([status for _, status in victims])
        return evicted

    def _place(self, to_store: list[BlockHash]) -> Spec_co:
        """Give each hash a slot and make it pending."""
        if not to_store:
            return self._backend._load_store_spec([], [])
        statuses = self._backend._allocate(to_store)
        blocks = dict(zip(to_store, statuses, strict=True))
        try:
            spec = self._backend._load_store_spec(to_store, statuses)
            self._policy._insert(blocks)
        except BaseException:  # from a user's own part
            resident = self._policy._resident
            self._backend._give_up([blocks[h] for h in to_store if h not in resident])
            raise
        return spec

    def _fail(self, pending: Mapping[BlockHash, BlockStatus]) -> None:
        """Drop blocks that were not stored."""
        self._policy._remove(pending)
        self._sessions.forget(pending)
        self._counters["failed_blocks"] += len(pending)
        self._backend._free(list(pending.values()))

    def _emit(self, block_hashes: list[BlockHash], *, removed: bool) -> None:
        if self._events is not None and block_hashes:
            event = OffloadingEvent(list(block_hashes), self.block_size, self.medium, removed)
            self._events.append(event)

    # -- what can be seen --------------------------------------------------------------------

    def _stats(self) -> dict[str, int]:
        ref_cnts = [status.ref_cnt for status in self._policy._resident.values()]
        return {
            **self._counters,
            "resident": len(ref_cnts),
            "pending": sum(ref_cnt < 0 for ref_cnt in ref_cnts),
            "pinned": sum(ref_cnt > 0 for ref_cnt in ref_cnts),
            "free": self._backend._num_free(),
            "ghosts": self._policy.num_ghosts,
        }

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self._policy._resident)

    def __contains__(self, block_hash: object) -> bool:
        """Return whether a block is resident."""
        resident = self._policy._resident
        return type(block_hash) is bytes and block_hash in resident

    def _block_table(self) -> npt.NDArray[np.void]:
        return block_table(self._policy._resident.values())

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        self._policy._check()
        self._backend._check()
        self._sessions._check()
        if self._watch is not None:
            self._watch._check()
        block_ids = [status.block_id for status in self._policy._resident.values()]
        if len(set(block_ids)) != len(block_ids):
            raise AssertionError("every resident block owns a slot of its own")


Manager._base = Manager


def _trusted_policy(policy: CachePolicy) -> PythonPolicy | UserPolicy:
    """Return a built-in Python policy unchanged, any other behind an adapter."""
    if isinstance(policy, PythonPolicy) and registry.is_builtin(type(policy), "py"):
        return policy
    return UserPolicy(policy)


def _trusted_backend(backend: Backend[Any]) -> Any:
    """Return a Python pool unchanged, any other backend behind an adapter."""
    return backend if type(backend) is CPUBackend else UserBackend(backend)
