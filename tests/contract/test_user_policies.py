"""A user's own policy in `CPUOffloadingManager`: by class, by instance, and when it misbehaves."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvoffload import IMPLEMENTATION, BlockHash, BlockStatus, CachePolicy, PolicyError
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.blocks import A, B, C, D, E, F, names, once, slots, store
from tests.observation import observe
from tests.parts import ListPolicy, RebuiltListPolicy


class Admitting(ListPolicy):
    """A policy that stores `admitted` of the hashes it is asked about, at most."""

    admitted = 0

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.asked: list[tuple[list[bytes], int, set[bytes]]] = []

    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        self.asked.append((list(hashes), num_free, {h for h in (A, B, C, D, E) if h in protected}))
        number = min(self.admitted, len(hashes))
        victims = self.evict(max(0, number - num_free), protected)
        return None if victims is None else (number, victims)


def test_a_class_is_called_by_keyword(twin: ModuleType) -> None:
    class OnlyByKeyword(ListPolicy):
        def __init__(self, *, cache_capacity: int) -> None:
            super().__init__(cache_capacity)

    assert twin.CPUOffloadingManager(16, 3, OnlyByKeyword).policy.cache_capacity == 3


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="a watch needs the extensions")
def test_a_watch_sees_the_policy_that_a_reset_builds(twin: ModuleType) -> None:
    watch = Watch()
    manager = twin.CPUOffloadingManager(16, 3, RebuiltListPolicy, watch=watch)
    store(manager, [A])
    before = watch.explain([A])[0].state
    manager.reset_cache()
    assert watch.explain([A])[0].state != before
    store(manager, [A])
    assert watch.explain([A])[0].state == before


@pytest.mark.parametrize("given", [ListPolicy, ListPolicy(99)], ids=["a class", "an instance"])
def test_a_policy_with_clear_is_kept_by_a_reset(twin: ModuleType, given: Any) -> None:
    manager = twin.CPUOffloadingManager(16, 2, given)
    policy = manager.policy
    assert policy.cache_capacity == (2 if given is ListPolicy else 99)
    assert given in (policy, ListPolicy)
    store(manager, [A, B])
    assert names(store(manager, [C]).block_hashes_evicted) == "A"
    manager.reset_cache()
    assert manager.policy is policy
    assert len(policy) == 0


def test_a_reset_of_an_instance_without_clear_changes_nothing(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 3, RebuiltListPolicy(3))
    store(manager, [A, B])
    before = observe(manager)
    with pytest.raises(NotImplementedError):
        manager.reset_cache()
    assert observe(manager) == before


def test_a_built_in_policy_can_be_extended(twin: ModuleType) -> None:
    class MostRecent(twin.LRUCachePolicy):  # type: ignore[misc, name-defined]
        def evict(self, n: int, protected: Any) -> Any:
            others = [block for block in self.blocks if block not in protected]
            return super().evict(n, {*protected, *others[: len(others) - n]})

    manager = twin.CPUOffloadingManager(16, 3, MostRecent)
    store(manager, [A, B, C])
    assert names(store(manager, [D]).block_hashes_evicted) == "C"
    assert names(store(manager, [E, F]).block_hashes_evicted) == "BD"
    check_invariants(manager)


def test_an_extended_policy_hears_every_call(twin: ModuleType) -> None:
    calls: list[str] = []

    class Listening(twin.ARCCachePolicy):  # type: ignore[misc, name-defined]
        def touch(self, hashes: Any) -> None:
            calls.append("touch")
            super().touch(hashes)

        def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
            calls.append("insert")
            super().insert(block_hash, status)

        def remove(self, block_hash: BlockHash) -> None:
            calls.append("remove")
            super().remove(block_hash)

    manager = twin.CPUOffloadingManager(16, 3, Listening)
    manager.prepare_store([A])
    manager.touch([A])
    manager.complete_store([A], success=False)
    assert calls == ["insert", "touch", "remove"]


def admitting(twin: ModuleType, admitted: int) -> tuple[Any, Admitting]:
    policy = Admitting(3)
    policy.admitted = admitted
    return twin.CPUOffloadingManager(16, 3, policy, enable_events=True), policy


def test_a_policy_may_store_a_leading_part(twin: ModuleType) -> None:
    manager, policy = admitting(twin, 2)
    store(manager, [A])
    output = manager.prepare_store(once([B, A, C, B, D]))
    assert names(output.block_hashes_to_store) == "BC"
    assert slots(output.store_spec) == [1, 2]
    assert manager.stats()["not_admitted"] == 1
    assert manager.stats()["refused_stores"] == 0
    assert D not in manager
    hashes, num_free, protected = policy.asked[-1]
    assert (names(hashes), num_free) == ("BCD", 2)
    assert {A, B, C, D} <= protected


def test_a_policy_that_admits_some_or_none_evicts_for_them_alone(twin: ModuleType) -> None:
    manager, policy = admitting(twin, 3)
    store(manager, [A, B, C])
    before = manager.stats()
    for admitted, stored, evicted in ((0, "", ""), (1, "D", "A")):
        policy.admitted = admitted
        list(manager.take_events())
        output = manager.prepare_store([D, E, D])
        assert names(output.block_hashes_to_store) == stored
        assert names(output.block_hashes_evicted) == evicted
        assert len(slots(output.store_spec)) == admitted
        assert len(list(manager.take_events())) == admitted
    after = manager.stats()
    assert after["not_admitted"] - before["not_admitted"] == 2 + 1
    assert after["stored_blocks"] - before["stored_blocks"] == 1


class UserFailedError(Exception):
    """An exception of a user's own code."""


def fail(policy: ListPolicy, *_: Any) -> Any:
    raise UserFailedError


def drop_and_fail(policy: ListPolicy, *_: Any) -> Any:
    """A block that the manager holds and the policy does not know could never be evicted."""
    del policy.order[:2]
    raise UserFailedError


def insert_and_fail(policy: ListPolicy, *arguments: Any) -> Any:
    ListPolicy.insert(policy, *arguments)
    raise UserFailedError


def evict_and_interrupt(policy: ListPolicy, *arguments: Any) -> Any:
    ListPolicy.evict(policy, *arguments)
    raise KeyboardInterrupt


def evict_and_refuse(policy: ListPolicy, *arguments: Any) -> Any:
    ListPolicy.evict(policy, *arguments)


def evict_and_drop(policy: ListPolicy, *arguments: Any) -> Any:
    victims = ListPolicy.evict(policy, *arguments)
    del policy.order[:1]
    return victims


def evict_and_keep(policy: ListPolicy, *arguments: Any) -> Any:
    order = policy.order
    victims = ListPolicy.evict(policy, *arguments)
    policy.order = order
    return victims


def evict_what_must_stay(policy: ListPolicy, n: int, protected: Any) -> Any:
    """Give a block that is in use or protected, if there is one, for the last victim."""
    victims = ListPolicy.evict(policy, n, protected) or []
    stays = [pair for pair in policy.order if pair[1].ref_cnt or pair[0] in protected]
    for block, _ in stays[-1:]:
        policy.remove(block)
    return [*victims[:-1], *stays[-1:]]


def answering(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return an `evict` whose right answer is changed."""
    return lambda policy, *arguments: change(ListPolicy.evict(policy, *arguments))


def lose(policy: Any, block: BlockHash) -> Any:
    """Deny a new block once."""
    found = ListPolicy.get(policy, block)
    policy.armed = block not in NEW or found is None
    return found if policy.armed else None


OLD = [A, B, C, D, E, F]
NEW = [b"first new", b"second new"]
ANSWERS = [5, (1,), (1, 2, 3), ("1", []), (1, 5), (1, [A]), (9, []), (-1, []), (1, [(A, None)])]
EXACTLY = "must (drop|evict) exactly .* got"
CALLED = ("touch", "evict", "remove", "clear", "begun", "missed", "finished", "release")
FAULTS: list[tuple[str, Callable[..., Any], type[BaseException], str]] = [
    *((method, fail, UserFailedError, "") for method in ("insert", *CALLED)),
    *((method, drop_and_fail, UserFailedError, "") for method in CALLED),
    ("insert", insert_and_fail, UserFailedError, ""),
    ("inserted", fail, UserFailedError, ""),
    ("get", lose, PolicyError, "Faulty.get must return the status"),
    ("evict", evict_and_interrupt, KeyboardInterrupt, "^$"),
    ("evict", evict_and_refuse, PolicyError, EXACTLY),
    ("evict", evict_and_drop, PolicyError, EXACTLY),
    ("evict", evict_and_keep, PolicyError, EXACTLY),
    ("evict", evict_what_must_stay, PolicyError, "must"),
    ("evict", answering(lambda victims: victims and victims[:-1]), PolicyError, EXACTLY),
    ("evict", answering(lambda victims: victims and victims[:1] * 9), PolicyError, "not resident"),
    (
        "evict",
        answering(lambda victims: victims and [*victims[:-1], (b"x", victims[-1][1])]),
        PolicyError,
        "not resident: 78$",
    ),
    (
        "evict",
        answering(lambda victims: victims and [*victims[:-1], ([], victims[-1][1])]),
        PolicyError,
        r"not resident: \[\]$",
    ),
    *(("make_room", lambda *_, answer=each: answer, PolicyError, "Faulty") for each in ANSWERS),
]
"""Methods, what they do instead, and the error that it makes."""


def faulty(**faults: Callable[..., Any]) -> Any:
    """Return a class of policies with other methods, each in effect while the policy is armed."""

    def method(name: str) -> Callable[..., Any]:
        def call(policy: Any, *arguments: Any) -> Any:
            chosen = faults[name] if policy.armed else getattr(ListPolicy, name)
            return chosen(policy, *arguments)

        return call

    members = {name: method(name) for name in faults}
    return type("Faulty", (ListPolicy,), {"armed": False, **members})


def states(manager: Any) -> dict[bytes, int]:
    """Return the ``ref_cnt`` of each resident block."""
    known = [block for block in (*OLD, *NEW) if block in manager]
    return {block: manager.policy.get(block).ref_cnt for block in known}


def call(manager: Any, method: str, blocks: list[bytes], batch: list[bytes]) -> None:
    """Make a call of a manager in which it calls a method of its policy."""
    if method == "touch":
        manager.touch(batch)
    elif method == "remove":
        manager.complete_store(blocks, success=False)
    elif method == "clear":
        manager.reset_cache()
    elif method == "release":
        manager.release(blocks)
    elif method in ("begun", "finished"):
        manager.begin(batch).finish()
    else:
        manager.prepare_store(batch)


def meet(manager: Any, chance: random.Random, method: str) -> BaseException | None:
    """Let a call meet a fault, in any state, and check what it leaves; return its error."""
    blocks = chance.sample(OLD, chance.choice((4, 5, 6, 6)))
    manager.prepare_store(blocks)
    manager.complete_store(blocks[1:])  # the first stays pending
    pinned = blocks[1 : chance.choice((1, 2, 3))]
    manager.prepare_load(pinned)
    list(manager.take_events())
    before, held = manager.stats(), states(manager)
    batch = [*chance.sample(blocks, chance.randrange(3)), *NEW[: chance.choice((1, 2))]]
    manager.policy.armed = True
    caught: BaseException | None = None
    try:
        call(manager, method, blocks, batch)
    except (UserFailedError, PolicyError, KeyboardInterrupt) as raised:
        caught = raised
    manager.policy.armed = False
    if caught is None:  # it was not met, or refused the store
        assert states(manager).keys() >= {block for block in held if held[block] or block in batch}
        return None
    left = [block for block in held if block not in manager]
    assert all(held[block] == 0 and block not in batch for block in left)
    assert states(manager) == {block: held[block] for block in held if block not in left}
    events = [(set(event.block_hashes), event.removed) for event in manager.take_events()]
    assert events == [(set(left), True) for _ in left[:1]]
    assert manager.stats() == before | {
        "evicted_blocks": len(left),
        "resident": before["resident"] - len(left),
        "free": before["free"] + len(left),
    }
    check_invariants(manager)
    manager.complete_load(pinned)
    manager.complete_store(blocks)
    output = store(manager, [bytes([1 + number]) for number in range(6)])
    assert set(output.block_hashes_evicted) == set(blocks) - set(left)
    check_invariants(manager)
    return caught


@pytest.mark.parametrize(("method", "fault", "error", "message"), FAULTS)
def test_a_fault_of_a_policy_costs_no_slot_and_no_block_but_victims(
    twin: ModuleType, method: str, fault: Any, error: type[BaseException], message: str
) -> None:
    caught = []
    for number in range(30):
        policy = faulty(**{method: fault})(6)
        manager = twin.CPUOffloadingManager(16, 6, policy, enable_events=True)
        caught.append(meet(manager, random.Random(number), method))
    met = [each for each in caught if each is not None]
    assert len(met) > 5
    assert {type(each) for each in met} == {error}
    assert all(re.search(message, str(each)) for each in met)


def test_an_instance_that_cannot_count_its_blocks(twin: ModuleType) -> None:
    class Uncounted(ListPolicy):
        __len__ = CachePolicy.__len__

    manager = twin.CPUOffloadingManager(16, 2, Uncounted(2))
    store(manager, [A])
    assert len(manager) == 1


def test_a_policy_that_takes_nothing_back_loses_no_slot(twin: ModuleType) -> None:
    policy = faulty(insert=fail, evict=drop_and_fail)(2)
    manager = twin.CPUOffloadingManager(16, 2, policy)
    store(manager, [A, B])
    policy.armed = True
    with pytest.raises(UserFailedError):
        manager.prepare_store([C])
    assert manager.lookup([A, B]) == 2
    assert manager.stats()["resident"] + manager.stats()["free"] == 2
    policy.armed = False
    with pytest.raises(PolicyError):  # it lacks what the manager holds, and is given it now
        manager.prepare_store([C])
    assert names(store(manager, [C]).block_hashes_evicted) == "A"
    check_invariants(manager)


@pytest.mark.parametrize("name", registry.names())
def test_a_list_that_a_policys_own_code_changes_is_read_no_further(
    twin: ModuleType, name: str
) -> None:
    built_in = twin.policy_class(name)
    batch: list[Any] = []

    class Changing(built_in):  # type: ignore[misc, valid-type]
        def insert(self, block_hash: bytes, status: BlockStatus) -> None:
            super().insert(block_hash, status)
            batch[-1] = -7  # taken for a hash it would have a length of nearly 2**64

    manager = twin.CPUOffloadingManager(16, 4, Changing)
    batch[:] = [A, B]
    assert names(manager.prepare_store(batch).block_hashes_to_store) == "AB"
    manager.complete_store([A, B])
    assert manager.lookup([A, B]) == 2
    check_invariants(manager)
