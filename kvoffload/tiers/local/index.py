"""Tiers that decide themselves what they keep: an index with a policy.

Structure
    The index is a `CPUOffloadingManager` of as many blocks as the medium has slots, so that any
    policy decides what stays and, with admission, what comes. ``_slot_of[id]`` is the slot of the
    index's block id, which lets a restart replay what is on the medium in any order. `_hidden` has
    the keys that the index holds and no caller may read.
Invariants
    A slot that a thread may write belongs to a key that is pending in the index, or pinned while it
    is stored again, or is counted in `_busy`: nothing else is written there meanwhile. A slot that
    a thread reads belongs to a key that is pinned, or is in `_busy`.
Cost
    O(1) per block: the index's own calls, and a few of Python.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvoffload import CachePolicy
from kvoffload._checks import MAX_NUM_BLOCKS, check_int
from kvoffload.errors import describe
from kvoffload.policies import registry
from kvoffload.tiers.base import State, Status
from kvoffload.tiers.engine.jobs import PooledTier, Record
from kvoffload.tiers.engine.native import Twin, chosen
from kvoffload.tiers.logs import write_line
from kvoffload.tiers.options import TierOptions
from kvoffload.tiers.seal import MAX_KEY_BYTES, stored_key, stored_keys

__all__ = ["IndexedTier", "check_num_slots"]

CORRUPT_LOG_S = 60.0
"""Corrupt blocks are logged at most so often."""

OK, MISS, FULL = np.int8(Status.OK), np.int8(Status.MISS), np.int8(Status.FULL)
HIT, ABSENT = int(State.HIT), int(State.MISS)


class _Hidden(Enum):
    """Why a key that the index holds may not be read."""

    STORING = "its first store is under way"
    DOOMED = "its first store is under way; it was dropped meanwhile"
    DEAD = "it was dropped; the index keeps its slot until the policy gives it away"
    RESTORING = "it was dropped, and is stored again in its slot"
    UNWANTED = "it was dropped, is stored again, and was dropped meanwhile"


_DROPPED = frozenset({_Hidden.DEAD, _Hidden.DOOMED, _Hidden.UNWANTED})
_RESTORED = frozenset({_Hidden.RESTORING, _Hidden.UNWANTED})


def check_num_slots(capacity_bytes: int, slot_bytes: int) -> int:
    """Return how many blocks a capacity holds, at least one; ValueError if they are too many."""
    return check_int(
        "capacity_bytes / block bytes", capacity_bytes // slot_bytes, 1, MAX_NUM_BLOCKS
    )


class IndexedTier(PooledTier):
    """A tier with slots for a fixed number of blocks, and a policy that decides which.

    Parameters
    ----------
    options : TierOptions
        Threads, buffers and the like.
    num_slots : int
        Number of blocks.
    block_bytes : int
        Bytes per block.
    policy : str, type or CachePolicy
        As ``cache_policy`` of `CPUOffloadingManager`.
    twin : Twin, optional
        The implementation; by default that of this process.
    """

    def __init__(
        self,
        options: TierOptions,
        num_slots: int,
        block_bytes: int,
        policy: str | type[CachePolicy] | CachePolicy = "lru",
        twin: Twin | None = None,
    ) -> None:
        if isinstance(policy, str):
            registry.parse(policy, "policy")  # the manager below calls it cache_policy
        elif not issubclass(policy if isinstance(policy, type) else type(policy), CachePolicy):
            raise TypeError(
                "policy must be a name, a CachePolicy subclass or an instance, "
                f"got {describe(policy)}"
            )
        if not isinstance(twin, Twin | None):
            raise TypeError(f"twin must be a Twin, got {describe(twin)}")
        super().__init__(options, num_slots * block_bytes, block_bytes)
        self.num_slots = num_slots
        self._twin = chosen() if twin is None else twin
        self._index = self._twin.manager(1, num_slots, policy)
        self._slot_of = np.arange(num_slots, dtype=np.int64)
        self._sums = np.zeros(num_slots, np.uint64)
        self._hidden: dict[bytes, _Hidden] = {}
        self._num_dropped = 0  # keys in `_hidden` that are dead, doomed or unwanted
        self._num_restored = 0  # keys in `_hidden` that are stored again
        self._place = "it"  # what a log names
        self._log_corrupt_at = -math.inf
        self._index_generation = 0  # that the index has been emptied for
        self._busy: Counter[int] = Counter()  # slots that threads use for jobs of before a forget

    def __repr__(self) -> str:
        name = type(self).__name__
        place = "" if self._place == "it" else f"{self._place!r}, "
        return f"{name}({place}capacity_bytes={self.capacity_bytes}, name={self.name!r})"

    # -- for the tiers that build on it ------------------------------------------------------

    def _used(self, keys: list[bytes], slots: npt.NDArray[np.int64]) -> None:
        """Record that blocks were used; the last of `slots` is the most recent."""

    def _cleared(self, slots: list[int]) -> None:
        """Make the medium forget the contents of slots."""

    # -- what is there -----------------------------------------------------------------------

    def state(self, key: bytes) -> int:
        """Return what is known about one key, a `State`."""
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            key = stored_key(key)
        if self._closed:
            self._refuse_closed()
        reads = self._reads
        if key in self._index and key not in self._hidden and (reads.closed or reads.would_allow()):
            self._metrics.hits += 1
            return HIT
        self._metrics.misses += 1
        return ABSENT

    def lookup(self, keys: Iterable[bytes]) -> npt.NDArray[np.int8]:
        """Return what is known about each key, a `State` each."""
        self._refuse_closed()
        return self._found(stored_keys(keys))

    def _found(self, stored: list[bytes]) -> npt.NDArray[np.int8]:
        """Return and count what is known about stored keys."""
        if not (self._reads.closed or self._reads.would_allow()):
            self._metrics.misses += len(stored)
            return np.full(len(stored), ABSENT, np.int8)
        index, hidden = self._index, self._hidden
        found = np.array([key in index and key not in hidden for key in stored], np.int8)
        hits = int(np.count_nonzero(found))
        self._metrics.hits += hits
        self._metrics.misses += len(stored) - hits
        return found  # True is HIT

    def _query(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        deadline_s: float | None,  # noqa: ARG002
    ) -> None:
        """Begin a query; here everything is known."""
        self._finish_at_once(job, "query", started, np.where(self._found(stored) == HIT, OK, MISS))

    # -- put ---------------------------------------------------------------------------------

    def _put(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a put."""
        status = np.zeros(len(stored), np.int8)
        index = self._index
        absent = [key for key in stored if key not in index]
        dead = self._dropped(stored) if self._num_dropped else []
        if not absent and not dead:
            self._finish_at_once(job, "put", started, status)
            return
        if not self._writes.allow():
            _mark(status, stored, {*absent, *dead}, Status.UNAVAILABLE)
            self._finish_at_once(job, "put", started, status)
            return
        room = self._room()
        _mark(status, stored, set(dead[room:]), Status.FULL)
        dead = dead[:room]
        slots = self._pin_dead(dead)  # first: the others' room must not be theirs
        more, more_slots = self._take_slots(stored, absent, room - len(dead), status)
        taken, slots = [*more, *dead], np.concatenate([more_slots, slots])
        if not taken:
            self._writes.withdraw()
            self._finish_at_once(job, "put", started, status)
            return
        places = None
        if len(taken) != len(stored) or taken != stored:
            first: dict[bytes, int] = {}
            for place, key in enumerate(stored):
                first.setdefault(key, place)
            places = np.array([first[key] for key in taken], np.int64)
            ids = ids[places]
        record = Record(job, "put", started, status, places, taken, slots, self._generation)
        self._submit(record, ids, timeout_s)

    def _dropped(self, stored: list[bytes]) -> list[bytes]:
        """Return those of the keys that are dead; doomed ones are wanted again."""
        hidden = self._hidden
        dead = []
        for key in dict.fromkeys(stored):
            why = hidden.get(key)
            if why is _Hidden.DEAD:
                dead.append(key)
            elif why is _Hidden.DOOMED:
                hidden[key] = _Hidden.STORING
                self._num_dropped -= 1
            elif why is _Hidden.UNWANTED:
                hidden[key] = _Hidden.RESTORING
                self._num_dropped -= 1
        return dead

    def _pin_dead(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """Pin the slots of keys that were dropped, to store them there again; return these keys."""
        if not keys:
            return np.empty(0, np.int64)
        pinned = self._index.prepare_load(keys)
        self._hidden.update(dict.fromkeys(keys, _Hidden.RESTORING))
        self._num_dropped -= len(keys)
        self._num_restored += len(keys)
        slots: npt.NDArray[np.int64] = self._slot_of[pinned.block_ids]
        return slots

    def _take_slots(
        self, stored: list[bytes], absent: list[bytes], room: int, status: npt.NDArray[np.int8]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Prepare a store of keys in the index; mark those that it does not take."""
        index = self._index
        count = len(absent)
        if count > room:
            absent = list(dict.fromkeys(absent))  # room is for distinct blocks
            count = min(len(absent), room)
        output = index.prepare_store(absent[:count])
        while output is None:
            # Part of the blocks is better than none; what is pinned or pending leaves no room.
            count //= 2
            output = index.prepare_store(absent[:count])
        taken = output.block_hashes_to_store
        if len(taken) < len(absent):
            declined = set(absent[:count]).difference(taken)
            _mark(status, stored, set(absent[count:]).difference(taken, declined), Status.FULL)
            _mark(status, stored, declined, Status.DECLINED)
        self._evicted(output.block_hashes_evicted)
        slots = self._slot_of[output.store_spec.block_ids]
        if self._busy and taken:
            taken, slots = self._without_busy(stored, taken, slots, status)
        self._hidden.update(dict.fromkeys(taken, _Hidden.STORING))
        if taken:
            self._used(taken, slots)
        return taken, slots

    def _without_busy(
        self,
        stored: list[bytes],
        taken: list[bytes],
        slots: npt.NDArray[np.int64],
        status: npt.NDArray[np.int8],
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Leave out the keys whose slots a thread still uses for a job of before a forget."""
        free = np.array([slot not in self._busy for slot in slots.tolist()], bool)
        refused = [key for key, is_free in zip(taken, free, strict=True) if not is_free]
        self._index.complete_store(refused, success=False)
        _mark(status, stored, set(refused), Status.FULL)
        kept = [key for key, is_free in zip(taken, free, strict=True) if is_free]
        return kept, slots[free]

    def _evicted(self, keys: list[bytes]) -> None:
        if self._num_dropped:
            gone = [key for key in keys if self._hidden.pop(key, None) is _Hidden.DEAD]
            self._num_dropped -= len(gone)
            if gone:
                dropped = set(gone)
                keys = [key for key in keys if key not in dropped]
        if keys:
            self._emit(keys, removed=True, reason="evicted")

    # -- get ---------------------------------------------------------------------------------

    def _get(
        self,
        job: int,
        started: float,
        stored: list[bytes],
        ids: npt.NDArray[np.int64],
        timeout_s: float,
    ) -> None:
        """Begin a get."""
        status = np.zeros(len(stored), np.int8)
        index, hidden = self._index, self._hidden
        wanted = [key for key in stored if key in index and key not in hidden]
        places = None
        if len(wanted) < len(stored):
            there = np.array([key in index and key not in hidden for key in stored], bool)
            status[~there] = MISS
            places = np.flatnonzero(there)
        if wanted and not self._reads.allow():
            status[slice(None) if places is None else places] = Status.UNAVAILABLE
            self._finish_at_once(job, "get", started, status)
            return
        room = self._room()
        if len(wanted) > room:
            places = np.arange(len(stored)) if places is None else places
            status[places[room:]] = FULL
            wanted, places = wanted[:room], places[:room]
            if not wanted:
                self._reads.withdraw()
        if not wanted:
            self._finish_at_once(job, "get", started, status)
            return
        pinned = index.prepare_load(wanted)
        slots = self._slot_of[pinned.block_ids]
        if places is not None:
            ids = ids[places]
        record = Record(job, "get", started, status, places, wanted, slots, self._generation)
        self._submit(record, ids, timeout_s)

    # -- what became of it -------------------------------------------------------------------

    def _settled(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        if record.generation != self._generation:
            self._busy.subtract(record.slots.tolist())
            self._busy = +self._busy
            return
        if record.op == "put":
            self._put_ended(record, (statuses == OK).tolist())
            return
        self._index.complete_load(record.keys)
        for status, reason in ((Status.CORRUPT, "corrupt"), (Status.FAILED, "failed")):
            if counts[status]:
                places = np.flatnonzero(statuses == status).tolist()
                self._kill([record.keys[place] for place in places], reason)

    def _put_ended(self, record: Record, are_ok: list[bool]) -> None:
        """Make blocks readable that were stored; hide or drop the others."""
        keys, hidden, index = record.keys, self._hidden, self._index
        if all(are_ok) and not self._num_dropped and not self._num_restored:
            index.complete_store(keys)
            self._emit(keys, removed=False)
            for key in keys:
                hidden.pop(key, None)
            return
        stored: list[bytes] = []
        failed: list[bytes] = []
        restored: list[bytes] = []
        dead: dict[bytes, int] = {}
        for key, slot, is_ok in zip(keys, record.slots.tolist(), are_ok, strict=True):
            why = hidden.get(key)
            if why is None or why is _Hidden.DEAD:
                continue  # it was done before an exception came
            if why in _RESTORED:
                restored.append(key)
            elif not is_ok:
                failed.append(key)
                continue
            if is_ok and why not in _DROPPED:
                stored.append(key)
            else:
                dead[key] = slot
        index.complete_load(restored)
        index.complete_store(failed, success=False)
        index.complete_store([*stored, *dead])
        if stored:
            self._emit(stored, removed=False)
        if dead:
            self._cleared(list(dead.values()))
        for key in dead:
            self._hide(key, _Hidden.DEAD)
        for key in [*stored, *failed]:
            self._hide(key, None)

    def _hide(self, key: bytes, why: _Hidden | None) -> None:
        """Say why a key may not be read; None: it may."""
        hidden = self._hidden
        before = hidden.get(key)
        if why is None:
            hidden.pop(key, None)
        else:
            hidden[key] = why
        self._num_dropped += (why in _DROPPED) - (before in _DROPPED)
        self._num_restored += (why in _RESTORED) - (before in _RESTORED)

    def _kill(self, keys: Iterable[bytes], reason: str | None = None) -> None:
        """Drop blocks that the index has ready; it keeps their slots until it gives them away.

        Without a reason there is no event: there was none when they came.
        """
        index, hidden = self._index, self._hidden
        there = [key for key in dict.fromkeys(keys) if key in index and key not in hidden]
        if there:
            self._cleared(self._slots_of(there))
            hidden.update(dict.fromkeys(there, _Hidden.DEAD))
            self._num_dropped += len(there)
            if reason is not None:
                self._emit(there, removed=True, reason=reason)
        if there and reason == "corrupt" and time.monotonic() >= self._log_corrupt_at:
            self._log_corrupt_at = time.monotonic() + CORRUPT_LOG_S
            write_line(
                logging.WARNING,
                "tier %r dropped corrupt blocks; %s had %d so far",
                self.name,
                self._place,
                self._metrics.evicted["corrupt"],
            )

    def _slots_of(self, keys: list[bytes]) -> list[int]:
        """Return the slots of keys that are ready in the index."""
        pinned = self._index.prepare_load(keys)
        self._index.complete_load(keys)
        slots: list[int] = self._slot_of[pinned.block_ids].tolist()
        return slots

    # -- recency, removal --------------------------------------------------------------------

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark blocks as recently used, last key first."""
        self._refuse_closed()
        self._change(self._touch, stored_keys(keys))

    def _touch(self, stored: list[bytes]) -> None:
        self._index.touch(stored)
        index, hidden = self._index, self._hidden
        there = [key for key in stored if key in index and key not in hidden]
        if there:
            there.reverse()
            self._used(there, np.array(self._slots_of(there), np.int64))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop blocks; unknown keys are no error."""
        self._refuse_closed()
        self._change(self._discard, stored_keys(keys))

    def _discard(self, stored: list[bytes]) -> None:
        hidden = self._hidden
        for key in stored if hidden else ():
            why = hidden.get(key)
            if why is _Hidden.STORING:
                self._hide(key, _Hidden.DOOMED)
            elif why is _Hidden.RESTORING:
                self._hide(key, _Hidden.UNWANTED)
        self._kill(stored, "discarded")

    def forget(self) -> bool:
        """Drop everything."""
        self._refuse_closed()
        self._generation += 1
        self._change(self._empty, [])
        self._emit([], removed=True, reason="forgotten")
        return True

    def _empty(self, stored: list[bytes]) -> None:  # noqa: ARG002
        """Empty the index for the present generation."""
        self._index.reset_cache()
        self._hidden.clear()
        self._num_dropped = self._num_restored = 0
        self._busy = self._slots_of_former()
        self._index_generation = self._generation

    def _slots_of_former(self) -> Counter[int]:
        """Return the slots of jobs under way that are of before the last forget."""
        return Counter(
            slot
            for record in self._records.values()
            if record.generation != self._generation
            for slot in record.slots.tolist()
        )

    # -- after an exception ------------------------------------------------------------------

    def _agree(self, keys: Sequence[bytes]) -> None:
        """Make the index agree with the records, for `keys` and the keys of jobs."""
        if self._index_generation != self._generation:
            self._empty([])
        index, hidden = self._index, self._hidden
        storing: set[bytes] = set()
        pins: Counter[bytes] = Counter()
        for record in self._records.values():
            if record.generation == self._generation:
                (storing if record.op == "put" else pins).update(record.keys)
        failed = []
        for key in {*keys, *hidden, *storing, *pins}:
            status = index.policy.get(key)
            if status is None:
                hidden.pop(key, None)
                continue
            why = hidden.get(key)
            if status.ref_cnt < 0:
                if key in storing:
                    hidden.setdefault(key, _Hidden.STORING)
                else:
                    failed.append(key)
                    hidden.pop(key, None)
                continue
            if why is not None and key not in storing:
                hidden[key] = _Hidden.DEAD
            excess = status.ref_cnt - pins[key] - (key in storing and why in _RESTORED)
            if excess > 0:
                index.complete_load([key] * excess)
            elif excess < 0:
                index.prepare_load([key] * -excess)
        index.complete_store(failed, success=False)
        self._num_dropped = sum(why in _DROPPED for why in hidden.values())
        self._num_restored = sum(why in _RESTORED for why in hidden.values())
        self._busy = self._slots_of_former()

    def _sizes(self) -> dict[str, int]:
        kept = len(self._index) - len(self._hidden)
        return {"used_bytes": kept * self.block_bytes, "blocks": kept, "slots": self.num_slots}


def _mark(
    status: npt.NDArray[np.int8], stored: list[bytes], chosen_keys: set[bytes], value: Status
) -> None:
    """Set the status of every occurrence of some keys."""
    if chosen_keys:
        status[[key in chosen_keys for key in stored]] = value
