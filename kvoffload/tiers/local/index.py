"""The medium of local tiers, with an index whose policy decides which blocks they keep.

Structure
    The index is a `CPUOffloadingManager` with one block per slot of the medium, so that any policy
    decides which blocks stay and, with admission, which are stored. ``_slot_of[id]`` is the slot of
    the index's block id, so that a restart can restore the blocks of a medium in any order.
    No caller may read the keys in `_storing`, whose store is under way, and in `_dropped`. A
    dropped key that is in no store is *dead*: the index keeps its slot until the policy evicts it,
    or until it is stored *again* there.
Invariants
    A slot that a thread may write belongs to a key that is pending in the index or pinned while it
    is stored again, or is counted in `_busy`: nothing else is written there meanwhile. A slot that
    a thread reads belongs to a pinned key or is in `_busy`.
Cost
    O(1) per block: the index's own calls, and a few in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload import CachePolicy, CPUOffloadingManager
from kvoffload._checks import MAX_NUM_BLOCKS, check_int
from kvoffload.errors import describe
from kvoffload.managers import calls
from kvoffload.policies import registry
from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import ABSENT, HIT, OK, Medium
from kvoffload.tiers.engine.jobs import Job, Jobs
from kvoffload.tiers.namespace import Namespace

Policy: TypeAlias = "str | type[CachePolicy] | CachePolicy"


def check_num_slots(capacity_bytes: int, slot_bytes: int) -> int:
    """Return the number of blocks in a capacity, at least one; ValueError if it is too large."""
    return check_int(
        "capacity_bytes / block bytes", capacity_bytes // slot_bytes, 1, MAX_NUM_BLOCKS
    )


class Index(Medium):
    """The slots of a medium, assigned to blocks by a manager, the index, and its policy."""

    notes_uses = False  # whether `used` does anything

    def __init__(self, jobs: Jobs, namespace: Namespace, policy: Policy, num_slots: int) -> None:
        super().__init__(jobs, namespace)
        self._index = _make_manager(policy, num_slots)
        self._num_slots = num_slots
        self._slot_of = np.arange(num_slots, dtype=np.int64)
        self._storing: set[bytes] = set()  # keys whose store is under way
        self._again: set[bytes] = set()  # those of them that are ready in the index, and pinned
        self._dropped: set[bytes] = set()  # keys that the index holds although they were dropped
        self._busy: Counter[int] = Counter()  # slots that threads use for jobs from before a forget

    # -- the slots of a medium ---------------------------------------------------------------

    def used(self, slots: npt.NDArray[np.int64]) -> None:
        """Record that blocks were used; the last of `slots` is the most recent."""

    def clear(self, slots: list[int]) -> None:
        """Forget the contents of slots whose blocks were dropped."""

    def not_stored(self, slots: npt.NDArray[np.int64]) -> None:
        """Forget the contents of slots that went to blocks that were then not stored."""

    def restore(self, keys: list[bytes], slots: npt.NDArray[np.int64]) -> int:
        """Restore the blocks of slots, the last as the most recent; return how many stay."""
        output = self._index.prepare_store(keys)
        stored: list[bytes] = output.block_hashes_to_store
        self._index.complete_store(stored)
        slot_of = dict(zip(keys, slots.tolist(), strict=True))
        in_use = np.array([slot_of[key] for key in stored], np.int64)
        is_free = np.ones(self._num_slots, bool)
        is_free[in_use] = False
        ids = output.store_spec.block_ids
        left = np.ones(self._num_slots, bool)
        left[ids] = False
        self._slot_of[ids] = in_use
        self._slot_of[left] = np.flatnonzero(is_free)
        return len(stored)

    # -- states ------------------------------------------------------------------------------

    def known(self, key: bytes) -> int:
        is_readable = key in self._index and key not in self._storing and key not in self._dropped
        return HIT if is_readable else ABSENT

    def readable(self, keys: list[bytes]) -> list[bool]:
        index, storing, dropped = self._index, self._storing, self._dropped
        if not storing and not dropped:
            return [key in index for key in keys]
        return [key in index and key not in storing and key not in dropped for key in keys]

    def states(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return the known states of keys, a `State` each."""
        return np.array(self.readable(keys), np.int8) ^ 1  # HIT is 0, MISS 1

    # -- put ---------------------------------------------------------------------------------

    def wanted(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys that are absent, then those that were dropped and keep a slot."""
        index = self._index
        absent = list(dict.fromkeys([key for key in keys if key not in index]))
        if not self._dropped:
            return absent
        again = [key for key in dict.fromkeys(keys) if key in self._dropped]
        self._dropped -= self._storing.intersection(again)  # they are wanted again
        return absent + [key for key in again if key in self._dropped]

    def take(
        self, keys: list[bytes], room: int, refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Begin to store keys; dropped ones reuse their slots."""
        if not self._dropped:
            return self._take_slots(keys, room, refused)
        dead = [key for key in keys if key in self._dropped]
        absent = [key for key in keys if key not in self._dropped]
        refused.update(dict.fromkeys(dead[room:], Status.FULL))
        dead = dead[:room]
        for keys_under_way in (self._storing, self._again):
            keys_under_way.update(dead)
        self._dropped.difference_update(dead)
        slots = self.pin(dead)  # first, so that they are not evicted for the others
        taken, more = self._take_slots(absent, room - len(dead), refused)
        return [*taken, *dead], np.concatenate([more, slots])

    def _take_slots(
        self, absent: list[bytes], room: int, refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Prepare a store of keys in the index."""
        index = self._index
        count = min(len(absent), room)
        output = index.prepare_store(absent[:count])
        while output is None:
            # Some blocks are better than none; pinned and pending blocks leave no room.
            count //= 2
            output = index.prepare_store(absent[:count])
        taken: list[bytes] = output.block_hashes_to_store
        if len(taken) < len(absent):
            refused.update(dict.fromkeys(absent[:count], Status.DECLINED))
            refused.update(dict.fromkeys(absent[count:], Status.FULL))
            for key in taken:
                del refused[key]
        self._evicted(output.block_hashes_evicted)
        slots: npt.NDArray[np.int64] = self._slot_of[output.store_spec.block_ids]
        if self._busy and taken:
            taken, slots = self._without_busy(taken, slots, refused)
        self._storing.update(taken)
        if taken:
            self.used(slots)
        return taken, slots

    def _without_busy(
        self, taken: list[bytes], slots: npt.NDArray[np.int64], refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Omit the keys whose slots a thread still uses for a job from before a forget."""
        free = np.array([slot not in self._busy for slot in slots.tolist()], bool)
        busy = [key for key, is_free in zip(taken, free, strict=True) if not is_free]
        self._index.complete_store(busy, success=False)
        refused.update(dict.fromkeys(busy, Status.FULL))
        return [key for key, is_free in zip(taken, free, strict=True) if is_free], slots[free]

    def _evicted(self, keys: list[bytes]) -> None:
        gone = self._dropped.intersection(keys)
        self._dropped -= gone
        keys = [key for key in keys if key not in gone]
        if keys:
            self.jobs.events.removed(keys, "evicted")

    # -- get ---------------------------------------------------------------------------------

    def pin(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        slots: npt.NDArray[np.int64] = self._slot_of[self._index.prepare_load(keys).block_ids]
        return slots

    # -- settling ----------------------------------------------------------------------------

    def settle(self, job: Job, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        if self.jobs.is_stale(job):
            self._busy.subtract(job.slots.tolist())
            self._busy = +self._busy
            if job.op == "put":
                self.clear(job.slots.tolist())
            return
        if job.op == "put":
            self._put_ended(job, (statuses == OK).tolist())
            if counts[Status.OK] < len(statuses):
                self.not_stored(job.slots[statuses != OK])
            return
        self._index.complete_load(job.keys)
        for status, reason in ((Status.CORRUPT, "corrupt"), (Status.FAILED, "failed")):
            if counts[status]:
                positions = np.flatnonzero(statuses == status).tolist()
                self._kill([job.keys[position] for position in positions], reason)

    def _put_ended(self, job: Job, are_ok: list[bool]) -> None:
        """Make stored blocks readable; hide or drop the others."""
        keys, index = job.keys, self._index
        self._storing.difference_update(keys)
        if all(are_ok) and not self._dropped and not self._again:
            index.complete_store(keys)
            self.jobs.events.stored(keys)
            return
        again = self._again.intersection(keys)
        stored: list[bytes] = []
        failed: list[bytes] = []
        dead: dict[bytes, int] = {}
        for key, slot, is_ok in zip(keys, job.slots.tolist(), are_ok, strict=True):
            if not is_ok and key not in again:
                failed.append(key)
            elif is_ok and key not in self._dropped:
                stored.append(key)
            else:
                dead[key] = slot
        index.complete_load(list(again))
        index.complete_store(failed, success=False)
        index.complete_store([*stored, *dead])
        self.jobs.events.stored(stored)
        if dead:
            self.clear(list(dead.values()))
        self._again -= again
        self._dropped.difference_update(failed)
        self._dropped.update(dead)

    def _kill(self, keys: Iterable[bytes], reason: str) -> None:
        """Drop blocks that are ready in the index, which keeps their slots until it evicts them."""
        there = [key for key in dict.fromkeys(keys) if self.known(key) == HIT]
        if there:
            self.clear(self.slots_of(there))
            self._dropped.update(there)
            self.jobs.events.removed(there, reason)
            if reason == "corrupt":
                self.jobs.log_corrupt(self.place)

    def slots_of(self, keys: list[bytes]) -> list[int]:
        """Return the slots of keys that are ready in the index."""
        slots: list[int] = self.pin(keys).tolist()
        self._index.complete_load(keys)
        return slots

    # -- recency, removal --------------------------------------------------------------------

    def touch(self, keys: list[bytes]) -> None:
        self._index.touch(keys)
        if not self.notes_uses:
            return
        there = [key for key, is_there in zip(keys, self.readable(keys), strict=True) if is_there]
        if there:
            self.used(np.array(self.slots_of(there[::-1]), np.int64))

    def release(self, keys: list[bytes]) -> None:
        self._index.release(keys)

    def served_at_once(self, keys: list[bytes], own: set[bytes], num_last: int) -> None:
        calls.end(self._index, keys, own, num_last)

    def discard(self, keys: list[bytes]) -> None:
        self._dropped |= self._storing.intersection(keys)
        self._kill(keys, "discarded")

    def forget(self) -> None:
        self._index.reset_cache()
        for keys in (self._storing, self._again, self._dropped):
            keys.clear()
        under_way = self.jobs.unsettled.values()
        self._busy = Counter(slot for job in under_way for slot in job.slots.tolist())
        self.jobs.events.removed([], "forgotten")

    def sizes(self) -> dict[str, int]:
        kept = len(self._index) - len(self._storing | self._dropped)
        used_bytes = kept * self.jobs.block_bytes
        return {"used_bytes": used_bytes, "blocks": kept, "slots": self._num_slots}


def _make_manager(policy: Policy, num_slots: int) -> Any:
    """Return the `CPUOffloadingManager` that is an index.

    Raises
    ------
    TypeError, ValueError
        If the policy is invalid; the message has the name that tiers use for the argument.
    """
    if isinstance(policy, str):
        registry.parse(policy, "policy")
    elif not issubclass(policy if isinstance(policy, type) else type(policy), CachePolicy):
        raise TypeError(
            f"policy must be a name, a CachePolicy subclass or an instance, got {describe(policy)}"
        )
    return CPUOffloadingManager(1, num_slots, policy)
