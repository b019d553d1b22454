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
_HINTS = ((), (None,), (Hints(ends=True, expect_s=2.5, source="suite"),))

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

    def _may_leave(self, protected: Collection[bytes]) -> set[bytes]:
        return {key for key, (ref_cnt, _) in self._model.items() if ref_cnt == 0} - {*protected}

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
            again = partial(self._policy.insert, key, _status(self._next_id, ref_cnt))
            raises(ValueError, "insert of a resident block", again)
            return
        for policy in self._both():
            policy.insert(key, _status(self._next_id, ref_cnt))
        self._model[key] = (ref_cnt, self._next_id)

    def remove(self, key: bytes) -> None:
        """Remove a block; the policy refuses one that is not resident."""
        if key not in self._model:
            remove = partial(self._policy.remove, key)
            raises(BlockNotFoundError, "remove of an absent block", remove)
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
            self._spared.touch(_once(batch) if len(self._model) % 2 else tuple(batch))

    def request(self, batch: list[BlockHash], hook: str, *hints: Hints | None) -> None:
        """Call a hook of requests; it neither changes nor keeps the list that it is given."""
        for policy in self._both():
            given = list(batch)
            getattr(policy, hook)(given, *hints)
            equal(given, batch, f"the list that {hook} was given")
            given[:] = [BlockHash(b"another")] * len(given)

    def evict(self, n: int, protected: Collection[BlockHash]) -> None:
        """Evict blocks, and check the victims."""
        may_leave = self._may_leave(protected)
        victims = self._policy.evict(n, protected)
        if victims is None:
            require(len(may_leave) < n, f"evict({n}) must not be None, {len(may_leave)} may go")
            return
        self._left(victims, n, may_leave, f"evict({n})")
        if self._spared is not None:
            self._agrees(victims, self._spared.evict(n, protected), f"evict({n})")

    def make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> None:
        """Ask for room, and check the answer; the blocks are not inserted."""
        may_leave = self._may_leave(protected)
        given = list(hashes)
        room = self._policy.make_room(given, num_free, protected)
        equal(given, hashes, "the list that make_room was given")
        if room is None:
            return
        count, victims = room
        require(0 <= count <= len(hashes), f"make_room must store 0 ... {len(hashes)}: {count}")
        call = f"make_room of {count} blocks with {num_free} free"
        self._left(victims, max(0, count - num_free), may_leave, call)
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
            require(isinstance(status, BlockStatus), f"a victim of {call} must have its status")
            found = self._model.get(key)
            require(key in may_leave, f"{call} must spare {key!r} of (ref_cnt, block_id) {found}")
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
        for n in (-1, -(2**70)):
            raises(ValueError, f"evict({n})", partial(self._policy.evict, n, frozenset()))

    def check(self) -> None:
        """Compare all readable state with the model."""
        self._verify(self._policy)
        known = {key: status for key in KEYS if (status := self._policy.get(key)) is not None}
        read = {key: (status.ref_cnt, status.block_id) for key, status in known.items()}
        if read != self._model:
            key = next(key for key in KEYS if read.get(key) != self._model.get(key))
            equal(read.get(key), self._model.get(key), f"(ref_cnt, block_id) of {key!r}")
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

    def test_what_is_refused_or_empty_changes_nothing(self) -> None:
        def evict_too_many(policy: CachePolicy, keys: list[BlockHash]) -> None:
            _live(policy, keys[1]).ref_cnt = 1
            _live(policy, keys[4]).ref_cnt = -1
            for n, protected in ((5, ()), (4, keys[:1]), (2**40, ())):
                equal(policy.evict(n, protected), None, f"evict({n}) with too few")

        def make_no_room(policy: CachePolicy, keys: list[BlockHash]) -> None:
            policy.make_room(make_keys(2, 50), 0, frozenset(keys))

        calls: dict[str, Callable[[CachePolicy, list[BlockHash]], object]] = {
            "get": lambda policy, keys: [policy.get(key) for key in keys[::-1]],
            "insert of a resident block": lambda policy, keys: raises(
                ValueError, "a second insert", partial(policy.insert, keys[1], _status(9))
            ),
            "remove of an absent block": lambda policy, _: raises(
                BlockNotFoundError, "remove", partial(policy.remove, b"x")
            ),
            "evict(0)": lambda policy, keys: equal(policy.evict(0, keys), [], "evict(0)"),
            "evict(-1)": lambda policy, _: raises(
                ValueError, "evict(-1)", partial(policy.evict, -1, frozenset())
            ),
            "evict with too few": evict_too_many,
            "make_room with all protected": make_no_room,
        }
        for what, call in calls.items():
            self._unchanged(what, call)

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
        if roll < 0.5:
            return "touch", (batch,)
        hook = chooser.choice(_HOOKS)
        told = chooser.choice(_HINTS) if hook in ("begun", "finished") else ()
        return "request", (batch, hook, *told)
    if roll < 0.8:
        form: Any = chooser.choice((frozenset, set, list, tuple, dict.fromkeys))
        protected = form(chooser.sample(KEYS, chooser.choice((0, 0, 2, 6))))
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
            self.driven.check()

        def teardown(self) -> None:
            if hasattr(self, "driven") and sys.exc_info()[0] is None:  # no step has failed
                self.driven.finish()

    return PolicyMachine
