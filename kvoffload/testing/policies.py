"""A suite of tests for every policy, built in or a user's own.

`PolicyConformance` is the contract of `CachePolicy` as tests: subclass it in a test file, implement
`make_policy`, and pytest finds the rest. `policy_machine` makes calls in orders that hypothesis
chooses, and shortens one that fails.

Both compare a policy with a dict of the resident blocks, and with a second policy that skips every
call that must not change anything: a difference shows that a call did. The suite assumes no order
of eviction.

The suite needs no package; `policy_machine` needs hypothesis.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kvoffload import (
    Backend,
    BlockHash,
    BlockNotFoundError,
    BlockStatus,
    CachePolicy,
    CPULoadStoreSpec,
    CPUOffloadingManager,
    Hints,
    OffloadingManager,
    Request,
)
from kvoffload.errors import describe

from ._expect import equal, make_keys, raises, require

__all__ = ["PolicyConformance", "check_invariants", "policy_machine"]

KEYS = tuple(
    BlockHash((b"%d." % index).ljust(length, b"#"))
    for index, length in enumerate((3, 16, 32, 36, 37, 64, 256, 300) * 3)
)
"""Blocks of the random calls: few, so that they meet again, and of many lengths."""

_HOOKS = ("begun", "missed", "inserted", "finished", "release")

Victims = Sequence[tuple[bytes, BlockStatus]]


def _status(block_id: int, ref_cnt: int = 0) -> BlockStatus:
    status = BlockStatus(block_id)
    status.ref_cnt = ref_cnt
    return status


def _live(policy: CachePolicy, key: bytes) -> BlockStatus:
    status = policy.get(key)
    if not isinstance(status, BlockStatus):
        raise AssertionError(f"get of resident block {key!r} must be its status, got {status!r}")
    return status


def _once(hashes: Iterable[BlockHash]) -> Iterator[BlockHash]:
    yield from list(hashes)


def _order(policy: CachePolicy) -> list[bytes]:
    """Empty a policy of its idle blocks, one by one, and return them."""
    order: list[bytes] = []
    while victims := policy.evict(1, frozenset()):
        order += [key for key, _ in victims]
        equal(len(set(order)), len(order), "number of different blocks that left")
    return order


class _Driven:
    """A policy under test, beside a model of its contents.

    Invariants
        ``_model`` holds (ref_cnt, block_id) of each resident block. ``_spared`` got the same calls,
        except those that must not change anything; None if calls do not determine the victims.
        ``_held`` are statuses of resident blocks, which must stay live; ``_departed`` those of
        blocks that left, with their last values.
    """

    def __init__(
        self,
        make_policy: Callable[[int], CachePolicy],
        capacity: int,
        is_deterministic: bool,
        verify: Callable[[CachePolicy], object],
    ) -> None:
        self._policy = make_policy(capacity)
        self._spared = make_policy(capacity) if is_deterministic else None
        self._verify = verify
        self._model: dict[bytes, tuple[int, int]] = {}
        self._held: dict[bytes, BlockStatus] = {}
        self._departed: list[tuple[BlockStatus, int, int]] = []
        self._next_id = 0

    def _both(self) -> list[CachePolicy]:
        return [self._policy] if self._spared is None else [self._policy, self._spared]

    def resident(self) -> list[bytes]:
        """Return the blocks that must be resident."""
        return list(self._model)

    def absent(self) -> list[BlockHash]:
        """Return the blocks that must not be resident."""
        return [key for key in KEYS if key not in self._model]

    def insert(self, key: bytes, ref_cnt: int) -> None:
        """Insert a block; the policy refuses a resident one."""
        self._next_id += 1
        if key in self._model:
            status = _status(self._next_id, ref_cnt)
            raises(
                ValueError, "insert of a resident block", lambda: self._policy.insert(key, status)
            )
            return
        for policy in self._both():
            policy.insert(key, _status(self._next_id, ref_cnt))
        self._model[key] = (ref_cnt, self._next_id)

    def remove(self, key: bytes) -> None:
        """Remove a block; the policy refuses one that is not resident."""
        if key not in self._model:
            raises(
                BlockNotFoundError,
                "remove of a block that is not resident",
                lambda: self._policy.remove(key),
            )
            return
        self._leaves(key)
        for policy in self._both():
            policy.remove(key)

    def touch(self, batch: list[BlockHash]) -> None:
        """Touch blocks; the form of the batch, and later changes to it, must not matter."""
        given = list(batch)
        self._policy.touch(given)
        equal(given, batch, "the list that touch was given")
        given[:] = [BlockHash(b"another")] * len(given)
        if self._spared is not None:
            self._spared.touch(_once(batch))

    def request(self, batch: list[BlockHash], hook: str) -> None:
        """Call a hook of requests; it neither changes nor keeps the list that it is given."""
        calls: dict[str, Callable[[CachePolicy, list[BlockHash]], None]] = {
            "begun": lambda policy, hashes: policy.begun(hashes, None),
            "finished": lambda policy, hashes: policy.finished(hashes, None),
            "missed": lambda policy, hashes: policy.missed(hashes),
            "inserted": lambda policy, hashes: policy.inserted(hashes),
            "release": lambda policy, hashes: policy.release(hashes),
        }
        for policy in self._both():
            given = list(batch)
            calls[hook](policy, given)
            equal(given, batch, f"the list that {hook} was given")
            given[:] = [BlockHash(b"another")] * len(given)

    def evict(self, n: int, protected: Collection[BlockHash]) -> None:
        """Evict blocks, and check the victims."""
        idle = {key for key, (ref_cnt, _) in self._model.items() if ref_cnt == 0}
        may_leave = idle.difference(protected)
        victims = self._policy.evict(n, protected)
        if victims is None:
            require(
                len(may_leave) < n, f"evict({n}) must not be None with {len(may_leave)} that may go"
            )
            return
        self._left(victims, n, may_leave, f"evict({n})")
        if self._spared is not None:
            self._agrees(victims, self._spared.evict(n, protected), f"evict({n})")

    def make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> None:
        """Ask for room, and check the answer; the blocks are not inserted."""
        idle = {key for key, (ref_cnt, _) in self._model.items() if ref_cnt == 0}
        given = list(hashes)
        room = self._policy.make_room(given, num_free, protected)
        equal(given, hashes, "the list that make_room was given")
        if room is None:
            return
        count, victims = room
        require(0 <= count <= len(hashes), f"make_room must store 0 ... {len(hashes)}: {count}")
        call = f"make_room of {count} blocks with {num_free} free"
        self._left(victims, max(0, count - num_free), idle.difference(protected), call)
        if self._spared is not None:
            other = self._spared.make_room(tuple(hashes), num_free, protected)
            require(other is not None and other[0] == count, f"{call}: something had changed")
            self._agrees(victims, None if other is None else other[1], call)

    def _left(self, victims: Victims, n: int, may_leave: set[bytes], call: str) -> None:
        keys = [key for key, _ in victims]
        equal(len(keys), n, f"number of victims of {call}")
        equal(len(set(keys)), n, f"number of different victims of {call}")
        for key, status in victims:
            require(type(key) is bytes, f"a victim of {call} must be bytes, got {key!r}")
            require(
                key in may_leave,
                f"a victim of {call} must be resident, idle and not protected, got {key!r} "
                f"with (ref_cnt, block_id) {self._model.get(key)}",
            )
            equal((status.ref_cnt, status.block_id), self._model[key], f"status of victim {key!r}")
            self._leaves(key)
            self._departed.append((status, status.ref_cnt, status.block_id))

    def _leaves(self, key: bytes) -> None:
        ref_cnt, block_id = self._model.pop(key)
        if key in self._held:
            self._departed.append((self._held.pop(key), ref_cnt, block_id))

    def _agrees(self, victims: Victims, others: Victims | None, call: str) -> None:
        equal(
            [key for key, _ in victims],
            None if others is None else [key for key, _ in others],
            f"victims of {call}, after calls that may change nothing,",
        )

    def write(self, key: bytes, ref_cnt: int) -> None:
        """Write a resident block's ``ref_cnt``, as a manager does."""
        if self._spared is not None:
            _live(self._spared, key).ref_cnt = ref_cnt
        live = self._held.get(key) or _live(self._policy, key)
        live.ref_cnt = ref_cnt
        self._model[key] = (ref_cnt, self._model[key][1])

    def hold(self, key: bytes) -> None:
        """Keep a resident block's status."""
        self._held[key] = _live(self._policy, key)

    def clear(self) -> None:
        """Empty the policy, if it can be."""
        try:
            self._policy.clear()
        except NotImplementedError:
            return
        for key in self.resident():
            self._leaves(key)
        if self._spared is not None:
            self._spared.clear()

    def refused_counts(self) -> None:
        """Make calls that must be refused."""
        raises(ValueError, "evict(-1)", lambda: self._policy.evict(-1, frozenset()))

    def check(self) -> None:
        """Compare all readable state with the model."""
        self._verify(self._policy)
        for key in KEYS:
            status = self._policy.get(key)
            found = None if status is None else (status.ref_cnt, status.block_id)
            equal(found, self._model.get(key), f"(ref_cnt, block_id) of {key!r}")
        count = _count(self._policy)
        require(count in (None, len(self._model)), f"len must be {len(self._model)}, got {count}")
        for held, status in self._held.items():
            found = (status.ref_cnt, status.block_id)
            equal(found, self._model[held], f"a held status of {held!r}")
        for status, *last in self._departed:
            equal([status.ref_cnt, status.block_id], last, "a status of a block that left")

    def finish(self) -> None:
        """Compare the order in which everything would leave."""
        if self._spared is not None:
            for key in self.resident():
                self.write(key, 0)
            self.check()
            expected = _order(self._spared)
            equal(_order(self._policy), expected, "victims after calls that change nothing")


def _count(policy: CachePolicy) -> int | None:
    try:
        return len(policy)
    except NotImplementedError:
        return None


def check_invariants(subject: CachePolicy | OffloadingManager | Backend[Any]) -> None:
    """Verify the invariants of the library's own policies, managers and host backend.

    Parameters
    ----------
    subject : CachePolicy or OffloadingManager or Backend
        A manager is verified with its policy and its backend.

    Raises
    ------
    AssertionError
        If an invariant is broken; the message names it.
    TypeError
        If `subject` is of a user's own class, whose invariants are not known.

    Notes
    -----
    Complexity: O(n) in the blocks that it knows.
    """
    check = getattr(subject, "_check", None)
    if check is None:
        raise TypeError(f"subject must be of a class of kvoffload, got {describe(subject)}")
    check()


class PolicyConformance(ABC):
    """The contract of `CachePolicy` as tests.

    Subclass it, name the class ``Test...``, and implement `make_policy`.
    """

    is_deterministic = True
    """Whether equal calls make equal policies. If not, calls that must change nothing are checked
    only by the readable state."""
    checks_arguments = False
    """Whether the policy checks the types of its arguments. Most leave that to the manager, which
    passes only checked ones."""
    num_random_runs = 30
    """Number of runs of random calls."""

    @abstractmethod
    def make_policy(self, cache_capacity: int) -> CachePolicy:
        """Return a new, empty policy of this capacity."""

    def make_manager(self, num_blocks: int, policy: CachePolicy) -> CPUOffloadingManager:
        """Return a new manager over a policy."""
        return CPUOffloadingManager(16, num_blocks, policy)

    def verify(self, policy: CachePolicy) -> None:
        """Verify the invariants of a policy, after each random call. By default, only read it."""
        policy.get(KEYS[0])

    def observe(self, policy: CachePolicy) -> object:
        """Return the observable state of a policy, to be compared if nothing may change."""
        return _count(policy)

    # -- for the tests -----------------------------------------------------------------------

    def filled(self, count: int = 6, capacity: int = 8) -> tuple[CachePolicy, list[BlockHash]]:
        """Return a policy with `count` idle blocks, block n in slot n, and their hashes."""
        policy = self.make_policy(capacity)
        keys = make_keys(count)
        for block_id, key in enumerate(keys):
            policy.insert(key, _status(block_id))
        return policy, keys

    def _unchanged(self, what: str, call: Callable[[CachePolicy, list[BlockHash]], object]) -> None:
        """Check that a call changes neither the resident blocks nor the next victims."""
        policy, keys = self.filled()
        policy.touch(keys[1:3])
        before = self.observe(policy)
        call(policy, keys)
        for block_id, key in enumerate(keys):
            live = _live(policy, key)
            equal(live.block_id, block_id, f"block_id after {what}")
            live.ref_cnt = 0
        equal(self.observe(policy), before, f"the observable state after {what}")
        order = _order(policy)
        if self.is_deterministic:
            other, _ = self.filled()
            other.touch(keys[1:3])
            equal(order, _order(other), f"what leaves after {what}")
        equal(sorted(order), sorted(keys), f"blocks after {what}")

    # -- what is there -----------------------------------------------------------------------

    def test_a_new_policy_is_empty_and_true(self) -> None:
        policy = self.make_policy(4)
        require(isinstance(policy, CachePolicy), "a policy must be a CachePolicy")
        equal(policy.cache_capacity, 4, "cache_capacity")
        require(_count(policy) in (None, 0), "a new policy must be empty")
        equal(bool(policy), True, "bool of an empty policy")
        equal(policy.get(b"a"), None, "get of an absent block")
        equal(policy.evict(1, frozenset()), None, "evict(1) of an empty policy")

    def test_a_capacity_is_checked(self) -> None:
        for capacity in (-1, 2**31, 2**70):
            raises(ValueError, f"capacity {capacity}", partial(self.make_policy, capacity))
        make: Callable[[Any], object] = self.make_policy
        for other in (True, 1.5, "4", None):
            raises(TypeError, f"capacity {other!r}", partial(make, other))

    def test_policies_share_nothing(self) -> None:
        policy, keys = self.filled()
        other = self.make_policy(8)
        require(_count(other) in (None, 0), "a second policy must be empty")
        equal([other.get(key) for key in keys], [None] * 6, "what a second policy holds")
        other.insert(keys[0], _status(9))
        equal(_live(policy, keys[0]).block_id, 0, "block_id in the first policy")

    def test_get_finds_what_was_inserted(self) -> None:
        policy, keys = self.filled()
        found = [(_live(policy, key).ref_cnt, _live(policy, key).block_id) for key in keys]
        equal(found, [(0, index) for index in range(6)], "(ref_cnt, block_id)")
        equal(policy.get(b"absent"), None, "get of an absent block")

    def test_get_changes_no_order(self) -> None:
        self._unchanged("get", lambda policy, keys: [policy.get(key) for key in keys[::-1]])

    def test_more_than_the_capacity_can_be_inserted(self) -> None:
        for capacity in (0, 1, 2):
            policy, keys = self.filled(6, capacity)
            self.verify(policy)
            require(_count(policy) in (None, 6), f"len with capacity {capacity}")
            equal(sorted(_order(policy)), sorted(keys), f"blocks with capacity {capacity}")

    # -- statuses ----------------------------------------------------------------------------

    def test_a_status_is_live(self) -> None:
        policy, keys = self.filled(1)
        held = _live(policy, keys[0])
        for ref_cnt in (-1, 1, 2**31 - 1):
            held.ref_cnt = ref_cnt
            equal(_live(policy, keys[0]).ref_cnt, ref_cnt, "ref_cnt as written")
            equal(policy.evict(1, frozenset()), None, f"evict(1) with ref_cnt {ref_cnt}")
        held.ref_cnt = 0
        equal(_order(policy), keys, "victims when it is idle again")

    def test_a_pending_block_becomes_idle(self) -> None:
        policy = self.make_policy(4)
        (key,) = make_keys(1)
        policy.insert(key, BlockStatus(7))
        live = _live(policy, key)
        equal((live.ref_cnt, live.block_id), (-1, 7), "(ref_cnt, block_id)")
        equal(policy.evict(1, frozenset()), None, "evict(1) of a pending block")
        live.ref_cnt = 0
        equal(_order(policy), [key], "victims when the store is complete")

    def test_a_status_of_a_block_that_left_never_shows_another(self) -> None:
        policy, keys = self.filled(4)
        held = {key: _live(policy, key) for key in keys}
        policy.remove(keys[0])
        given = dict(policy.evict(2, frozenset()) or ())
        for index, key in enumerate(make_keys(30, 100)):
            policy.insert(key, _status(10 + index))
            _live(policy, key).ref_cnt = 3
        for index, key in enumerate(keys):
            shown = (held[key].ref_cnt, held[key].block_id)
            equal(shown, (0, index), f"a status of block {index}, held")
        for victim, status in given.items():
            shown = (status.ref_cnt, status.block_id)
            equal(keys[shown[1]], victim, "the block of the status that evict gave")
            equal(shown[0], 0, "ref_cnt of the status that evict gave")

    # -- insert and remove -------------------------------------------------------------------

    def test_a_resident_block_is_not_inserted_again(self) -> None:
        def insert_again(policy: CachePolicy, keys: list[BlockHash]) -> None:
            for key in keys[:2]:
                insert = partial(policy.insert, key, _status(9))
                raises(ValueError, "insert of a resident block", insert)

        self._unchanged("an insert that fails", insert_again)

    def test_an_absent_block_is_not_removed(self) -> None:
        def remove(policy: CachePolicy, keys: list[BlockHash]) -> None:  # noqa: ARG001
            raises(BlockNotFoundError, "remove of an absent block", lambda: policy.remove(b"x"))

        self._unchanged("a remove that fails", remove)

    def test_a_block_that_left_is_absent(self) -> None:
        policy, keys = self.filled()
        gone: list[bytes] = [key for key, _ in policy.evict(2, frozenset()) or ()]
        policy.remove(next(key for key in keys if key not in gone))
        gone += [key for key in keys if policy.get(key) is None and key not in gone]
        equal(len(gone), 3, "blocks that left")
        for key in gone:
            raises(BlockNotFoundError, "remove of it", partial(policy.remove, key))
            policy.insert(BlockHash(key), _status(20))
            equal(_live(policy, key).block_id, 20, "block_id after a second insert")

    def test_blocks_of_every_state_can_be_removed(self) -> None:
        policy, keys = self.filled(3)
        _live(policy, keys[0]).ref_cnt = -1
        _live(policy, keys[1]).ref_cnt = 3
        for key in keys:
            policy.remove(key)
            equal(policy.get(key), None, "get of a removed block")
            self.verify(policy)
        require(_count(policy) in (None, 0), "len must be 0")
        equal(_order(policy), [], "what leaves")

    # -- touch -------------------------------------------------------------------------------

    def test_touch_takes_any_hashes_once(self) -> None:
        policy, keys = self.filled(4)
        policy.touch([])
        policy.touch(_once([BlockHash(b"unknown"), keys[2], keys[2], BlockHash(b"another")]))
        policy.touch((keys[1], keys[0]))
        equal(policy.get(b"unknown"), None, "get of an unknown block that was touched")
        require(_count(policy) in (None, 4), "touch must not change len")
        equal(sorted(_order(policy)), sorted(keys), "blocks after touch")

    def test_the_form_of_a_batch_does_not_matter(self) -> None:
        if not self.is_deterministic:
            return
        orders = []
        for form in (list, tuple, _once):
            policy, keys = self.filled()
            policy.touch(form([keys[3], keys[1], keys[1]]))
            orders.append(_order(policy))
        equal(orders[1:], [orders[0]] * 2, "victims after touches of a tuple and a generator")
        policy, keys = self.filled()
        batch = [keys[3], keys[1], keys[1]]
        policy.touch(batch)
        equal(batch, [keys[3], keys[1], keys[1]], "the list that touch was given")
        batch[:] = [keys[5]]
        equal(_order(policy), orders[0], "victims after the list of a touch changes later")

    def test_touch_takes_blocks_of_every_state(self) -> None:
        policy, keys = self.filled(3)
        _live(policy, keys[0]).ref_cnt = -1
        _live(policy, keys[1]).ref_cnt = 3
        policy.touch(keys)
        self.verify(policy)
        found = [(_live(policy, key).ref_cnt, _live(policy, key).block_id) for key in keys]
        equal(found, [(-1, 0), (3, 1), (0, 2)], "(ref_cnt, block_id) after touch")
        equal(_order(policy), [keys[2]], "what leaves after touch")

    # -- requests ----------------------------------------------------------------------------

    def test_hearing_of_requests_changes_no_state(self) -> None:
        policy, keys = self.filled(4)
        _live(policy, keys[0]).ref_cnt = -1
        _live(policy, keys[1]).ref_cnt = 3
        for hints in (None, Hints(ends=True, expect_s=2.5, source="suite")):
            batch = [*keys, BlockHash(b"unknown"), keys[2]]
            policy.begun(batch, hints)
            policy.missed([BlockHash(b"unknown")])
            policy.inserted(keys[:1])
            policy.finished(batch, hints)
            policy.release(batch)
            self.verify(policy)
        policy.begun([])
        policy.finished([])
        found = [(_live(policy, key).ref_cnt, _live(policy, key).block_id) for key in keys]
        equal(found, [(-1, 0), (3, 1), (0, 2), (0, 3)], "(ref_cnt, block_id) after requests")
        equal(policy.get(b"unknown"), None, "get of an unknown block of a request")
        require(_count(policy) in (None, 4), "requests must not change len")
        equal(sorted(_order(policy)), sorted(keys[2:]), "what leaves after requests")

    # -- evict -------------------------------------------------------------------------------

    def test_evicting_nothing_changes_nothing(self) -> None:
        def evict(policy: CachePolicy, keys: list[BlockHash]) -> None:
            equal(policy.evict(0, frozenset()), [], "evict(0)")
            equal(policy.evict(0, frozenset(keys)), [], "evict(0), all protected,")

        self._unchanged("evict(0)", evict)

    def test_a_negative_number_is_refused(self) -> None:
        def evict(policy: CachePolicy, keys: list[BlockHash]) -> None:  # noqa: ARG001
            for n in (-1, -5, -(2**70)):
                raises(ValueError, f"evict({n})", partial(policy.evict, n, frozenset()))

        self._unchanged("evict of a negative number", evict)

    def test_eviction_is_all_or_nothing(self) -> None:
        def evict(policy: CachePolicy, keys: list[BlockHash]) -> None:
            _live(policy, keys[1]).ref_cnt = 1
            _live(policy, keys[4]).ref_cnt = -1
            equal(policy.evict(5, frozenset()), None, "evict(5) with 4 idle")
            equal(policy.evict(4, {keys[0]}), None, "evict(4) with 3 idle and not protected")
            equal(policy.evict(2**40, frozenset()), None, "evict(2**40)")

        self._unchanged("evict with too few", evict)

    def test_victims_are_exactly_as_many_idle_blocks(self) -> None:
        for n in range(1, 5):
            policy, keys = self.filled()
            _live(policy, keys[1]).ref_cnt = 1
            _live(policy, keys[4]).ref_cnt = -1
            victims = list(policy.evict(n, frozenset()) or ())
            gone = [key for key, _ in victims]
            equal(len(set(gone)), n, f"number of different victims of evict({n})")
            require({keys[1], keys[4]}.isdisjoint(gone), "pinned and pending blocks must stay")
            for key, status in victims:
                require(isinstance(status, BlockStatus), "victims must come with their status")
                equal((status.ref_cnt, keys[status.block_id]), (0, key), "(ref_cnt, block)")
            equal([policy.get(key) for key in gone], [None] * n, "get of victims")
            rest = [key for key in keys if key not in gone]
            equal([key for key in keys if policy.get(key)], rest, "what is left")
            require(_count(policy) in (None, 6 - n), f"len after evict({n})")
            self.verify(policy)

    def test_protected_blocks_stay(self) -> None:
        forms: list[Callable[[list[BlockHash]], Collection[BlockHash]]] = [
            frozenset,
            set,
            list,
            tuple,
            dict.fromkeys,
        ]
        for form in forms:
            policy, keys = self.filled(4)
            protected = form([*keys[:2], BlockHash(b"absent")])
            equal(policy.evict(3, protected), None, "evict(3) with 2 not protected")
            gone = [key for key, _ in policy.evict(2, protected) or ()]
            equal(sorted(gone), sorted(keys[2:]), "victims")

    # -- make_room ---------------------------------------------------------------------------

    def test_make_room_evicts_what_falls_short(self) -> None:
        policy, keys = self.filled()
        new = make_keys(4, 50)
        for num_free in (9, 4, 2):
            given = list(new)
            room = policy.make_room(given, num_free, frozenset([*keys[:3], *new]))
            equal(given, new, "the list that make_room was given")
            if room is None:  # it may refuse any store
                continue
            count, victims = room
            require(0 <= count <= 4, f"make_room must store 0 ... 4, got {count}")
            equal(len(victims), max(0, count - num_free), "number of victims")
            require(all(key in keys[3:] for key, _ in victims), "protected blocks must stay")
            equal([policy.get(key) for key in new], [None] * 4, "blocks that are not inserted yet")
            self.verify(policy)

    def test_make_room_of_nothing(self) -> None:
        policy, keys = self.filled()
        room = policy.make_room([], 0, frozenset())
        if room is not None:
            equal((room[0], list(room[1])), (0, []), "make_room([])")
        require(all(policy.get(key) for key in keys), "all must stay")

    def test_a_refused_store_changes_nothing(self) -> None:
        def make_room(policy: CachePolicy, keys: list[BlockHash]) -> None:
            if policy.make_room(make_keys(2, 50), 0, frozenset(keys)) is None:
                return
            require(all(policy.get(key) for key in keys), "protected blocks must stay")

        self._unchanged("make_room with all protected", make_room)

    # -- clear -------------------------------------------------------------------------------

    def test_clear_makes_it_as_new(self) -> None:
        policy, keys = self.filled()
        for batch in (keys[:3], keys[1:2], keys[::-1], keys[:2]):
            policy.touch(batch)
        policy.evict(2, frozenset())
        policy.touch(keys)
        before = [key for key in keys if policy.get(key)]
        try:
            policy.clear()
        except NotImplementedError:
            equal([key for key in keys if policy.get(key)], before, "blocks without a clear")
            return
        self.verify(policy)
        require(_count(policy) in (None, 0), "len after clear must be 0")
        equal([policy.get(key) for key in keys], [None] * 6, "get after clear")
        equal(policy.evict(1, frozenset()), None, "evict(1) after clear")
        orders = []
        for each in (policy, self.make_policy(8)):
            for index, key in enumerate(keys):
                each.insert(key, _status(index))
            each.touch(keys[2:4])
            orders.append(_order(each))
        if self.is_deterministic:
            equal(orders[0], orders[1], "victims after clear, as of a new policy,")

    # -- arguments ---------------------------------------------------------------------------

    def test_arguments_are_checked(self) -> None:
        if not self.checks_arguments:
            return

        def check(policy: CachePolicy, keys: list[BlockHash]) -> None:
            made: Any = policy
            wrong: list[tuple[type[Exception], Any]] = [(TypeError, 5), (TypeError, "x")]
            wrong += [(TypeError, None), (TypeError, bytearray(b"x")), (ValueError, b"")]
            for kind, bad in wrong:
                calls: dict[str, Callable[[], object]] = {
                    "get": partial(made.get, bad),
                    "insert": partial(made.insert, bad, _status(9)),
                    "remove": partial(made.remove, bad),
                    "touch": partial(made.touch, [keys[0], bad]),
                    "evict": partial(made.evict, 1, [bad]),
                    "make_room": partial(made.make_room, [bad], 1, ()),
                }
                for name, call in calls.items():
                    raises(kind, f"{name} of {bad!r}", call)
            for other in (None, 5, (0, 1)):
                raises(TypeError, f"insert of {other}", partial(made.insert, b"new", other))
            for count in (True, 1.0, "1", None):
                raises(TypeError, f"evict({count!r})", partial(made.evict, count, ()))
            raises(TypeError, "touch of a hash", lambda: made.touch(keys[0]))
            raises(TypeError, "a hash as protected", lambda: made.evict(1, keys[0]))
            raises(ValueError, "make_room with -1", lambda: made.make_room([b"new"], -1, ()))

        self._unchanged("calls with wrong arguments", check)

    # -- all together ------------------------------------------------------------------------

    def test_random_calls_keep_to_the_contract(self) -> None:
        for seed in range(self.num_random_runs):
            chooser = random.Random(seed)  # noqa: S311
            driven = _Driven(self.make_policy, seed % 12, self.is_deterministic, self.verify)
            for _ in range(120):
                name, arguments = _random_call(driven, chooser)
                getattr(driven, name)(*arguments)
                driven.check()
            driven.finish()

    def test_a_manager_can_work_with_it(self) -> None:
        for seed in range(5):
            chooser = random.Random(seed)  # noqa: S311
            policy = self.make_policy(8)
            manager = self.make_manager(8, policy)
            keys = make_keys(20)
            pending: list[Request[CPULoadStoreSpec]] = []
            for _ in range(150):
                batch = [keys[n] for n in range(chooser.randrange(14), 20, chooser.randint(1, 5))]
                request = manager.begin(batch)
                num_hits = request.lookup()
                request.prepare_load(0, num_hits)
                output = request.prepare_store()
                if output is not None:
                    gone = set(output.block_hashes_evicted)
                    require(gone.isdisjoint(batch), "no block of the batch may leave")
                    pending.append(request)
                if chooser.random() < 0.2:
                    request.extend([chooser.choice(keys)])
                if chooser.random() < 0.9:
                    request.finish()
                while len(pending) > chooser.randrange(3):
                    pending.pop(0).complete_store(chooser.random() < 0.8)
                request.complete_load(0, num_hits)
                self._compare(manager, policy, keys)
            for storing in pending:
                storing.complete_store()
            try:
                manager.reset_cache()
            except NotImplementedError:
                continue
            equal(manager.stats()["resident"], 0, "resident blocks after a reset")
            self._compare(manager, policy, keys)

    def _compare(
        self, manager: CPUOffloadingManager, policy: CachePolicy, keys: list[BlockHash]
    ) -> None:
        stats = manager.stats()
        equal(stats["resident"] + stats["free"], 8, "resident and free blocks")
        stored = stats["stored_blocks"] - stats["failed_blocks"] - stats["evicted_blocks"]
        if stats["resident"]:
            equal(stats["resident"], stored, "stored blocks that neither failed nor left")
        held = sum(policy.get(key) is not None for key in keys)
        equal(held, stats["resident"], "blocks that the policy holds for its manager")
        self.verify(policy)


def _random_call(driven: _Driven, chooser: random.Random) -> tuple[str, tuple[Any, ...]]:
    """Draw a call and its arguments; calls that fill the policy are likelier while it is empty."""
    resident, absent = driven.resident(), driven.absent()
    roll = chooser.random()
    if roll < 0.3 or not resident:
        return "insert", (chooser.choice(absent or KEYS), chooser.choice((0, 0, 0, -1, 1)))
    if roll < 0.34:
        return "insert", (chooser.choice(KEYS), 0)
    if roll < 0.4:
        return "remove", (chooser.choice(KEYS),)
    if roll < 0.58:
        batch = chooser.choices(KEYS, k=chooser.randrange(7))
        return ("touch", (batch,)) if roll < 0.5 else ("request", (batch, chooser.choice(_HOOKS)))
    if roll < 0.8:
        protected = frozenset(chooser.sample(KEYS, chooser.choice((0, 0, 2, 6))))
        if roll < 0.7:
            return "evict", (chooser.choice((0, 1, 1, 2, 3, len(resident))), protected)
        count = chooser.randrange(min(5, len(absent) + 1))
        return "make_room", (chooser.sample(absent, count), chooser.randrange(3), protected)
    if roll < 0.92:
        ref_cnt = chooser.choice((-1, 0, 0, 0, 1, 2, 2**31 - 1))
        return "write", (chooser.choice(resident), ref_cnt)
    if roll < 0.97:
        return "hold", (chooser.choice(resident),)
    return ("refused_counts", ()) if roll < 0.99 else ("clear", ())


def policy_machine(
    make_policy: Callable[[int], CachePolicy],
    *,
    is_deterministic: bool = True,
    verify: Callable[[CachePolicy], object] = lambda policy: None,  # noqa: ARG005
) -> Any:
    """Return a state machine that compares a policy with a dict; its ``TestCase`` is a test.

    Parameters
    ----------
    make_policy : callable
        Returns a new, empty policy of the given capacity.
    is_deterministic : bool
        Whether equal calls make equal policies.
    verify : callable
        Verifies the invariants of a policy, after each step.

    Returns
    -------
    type
        A subclass of ``hypothesis.stateful.RuleBasedStateMachine``.
    """
    from hypothesis import note
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

    class PolicyMachine(RuleBasedStateMachine):
        @initialize(capacity=st.integers(0, 12))
        def start(self, capacity: int) -> None:
            self.driven = _Driven(make_policy, capacity, is_deterministic, verify)

        @rule(chooser=st.randoms(use_true_random=False))
        def call(self, chooser: random.Random) -> None:
            name, arguments = _random_call(self.driven, chooser)
            note(f"{name}{arguments}")
            getattr(self.driven, name)(*arguments)

        @invariant()
        def holds_what_it_was_given(self) -> None:
            if hasattr(self, "driven"):
                self.driven.check()

        def teardown(self) -> None:
            if hasattr(self, "driven") and sys.exc_info()[0] is None:  # no step has failed
                self.driven.finish()

    return PolicyMachine
