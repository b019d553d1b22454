"""A user's own policy in `CPUOffloadingManager`: by class, by instance, and when it misbehaves."""

from __future__ import annotations

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


def test_an_instance_must_be_empty(twin: ModuleType) -> None:
    for policy in (ListPolicy(2), twin.LRUCachePolicy(2), twin.ARCCachePolicy(2)):
        policy.insert(A, BlockStatus(0))
        with pytest.raises(ValueError, match="cache_policy must be empty"):
            twin.CPUOffloadingManager(16, 2, policy)


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


def test_a_policy_that_admits_nothing_gives_an_output(twin: ModuleType) -> None:
    manager, _ = admitting(twin, 0)
    output = manager.prepare_store([A, B, A])
    assert output.block_hashes_to_store == []
    assert output.block_hashes_evicted == []
    assert slots(output.store_spec) == []
    assert manager.stats()["not_admitted"] == 2
    assert (len(manager), manager.stats()["stored_blocks"]) == (0, 0)
    assert list(manager.take_events()) == []


def test_a_policy_that_admits_some_evicts_for_them_alone(twin: ModuleType) -> None:
    manager, policy = admitting(twin, 3)
    store(manager, [A, B, C])
    policy.admitted = 1
    output = manager.prepare_store([D, E])
    assert names(output.block_hashes_to_store) == "D"
    assert names(output.block_hashes_evicted) == "A"
    assert manager.stats()["not_admitted"] == 1


class Wrong(ListPolicy):
    """A policy whose `evict` answers whatever `answer` makes of the right answer."""

    answer: Callable[[Wrong, Any], Any] = staticmethod(lambda policy, victims: victims)

    def evict(self, n: int, protected: Any) -> Any:
        return type(self).answer(self, super().evict(n, protected))


def swap_for(block: BlockHash) -> Callable[[Wrong, Any], Any]:
    def answer(policy: Wrong, victims: Any) -> Any:
        wrong = (block, policy.get(block))
        policy.remove(block)
        return [*victims[:-1], wrong]

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            lambda _, victims: [*victims[:-1], (b"never stored", victims[-1][1])],
            id="a block that is not resident",
        ),
        pytest.param(
            lambda _, victims: [*victims[:-1], ([], victims[-1][1])], id="something that is no hash"
        ),
        pytest.param(lambda _, victims: victims[:-1], id="too few"),
        pytest.param(lambda policy, victims: [*victims, policy.order.pop(0)], id="too many"),
        pytest.param(swap_for(A), id="protected"),
        pytest.param(swap_for(B), id="pinned"),
        pytest.param(swap_for(C), id="pending"),
        pytest.param(lambda _, victims: [victims[0]] * len(victims), id="one victim twice"),
    ],
)
def test_a_policy_that_evicts_wrongly(
    twin: ModuleType, answer: Callable[[Wrong, Any], Any]
) -> None:
    class Faulty(Wrong):
        pass

    manager = twin.CPUOffloadingManager(16, 6, Faulty, enable_events=True)
    store(manager, [A, B])
    manager.prepare_store([C])
    store(manager, [D, E, F])
    manager.prepare_load([B])
    list(manager.take_events())
    Faulty.answer = staticmethod(answer)
    new = [b"first new", b"second new"]
    before = manager.stats()
    with pytest.raises(PolicyError) as caught:
        manager.prepare_store([A, *new])
    assert isinstance(caught.value, RuntimeError)
    after = manager.stats()
    assert after["stored_blocks"] == before["stored_blocks"]
    assert after["pending"] <= 1
    assert not any(block in manager for block in new)
    assert all(block in manager for block in (A, B, C))
    check_invariants(manager)
    manager.complete_load([B])
    manager.complete_store([C])
    assert manager.lookup([A, B, C]) == 3


def faulty(**faults: Callable[..., Any]) -> Any:
    """Return a class of policies with other methods, each in effect while the policy is armed."""

    def method(name: str) -> Callable[..., Any]:
        def call(policy: Any, *arguments: Any) -> Any:
            chosen = faults[name] if policy.armed else getattr(ListPolicy, name)
            return chosen(policy, *arguments)

        return call

    members = {name: method(name) for name in faults}
    return type("Faulty", (ListPolicy,), {"armed": False, **members})


@pytest.mark.parametrize(
    "answer",
    [5, (1,), (1, 2, 3), ("1", []), (1, 5), (1, [A]), (2, []), (-1, []), (1, [(A, None)])],
    ids=repr,
)
def test_a_policy_that_answers_nonsense(twin: ModuleType, answer: Any) -> None:
    policy = faulty(make_room=lambda *_: answer)(2)
    manager = twin.CPUOffloadingManager(16, 2, policy)
    store(manager, [A])
    policy.armed = True
    with pytest.raises(PolicyError, match="Faulty"):
        manager.prepare_store([C])
    assert C not in manager
    policy.armed = False
    assert manager.stats()["resident"] + manager.stats()["free"] == 2


def test_a_policy_that_loses_what_was_inserted(twin: ModuleType) -> None:
    policy = faulty(get=lambda policy, block: None if block == B else ListPolicy.get(policy, block))
    manager = twin.CPUOffloadingManager(16, 2, policy)
    store(manager, [A])
    manager.policy.armed = True
    with pytest.raises(PolicyError, match=r"Faulty.get must return the status"):
        manager.prepare_store([B])
    assert manager.stats()["free"] == 1
    assert A in manager


def test_an_instance_that_cannot_count_its_blocks(twin: ModuleType) -> None:
    class Uncounted(ListPolicy):
        __len__ = CachePolicy.__len__

    manager = twin.CPUOffloadingManager(16, 2, Uncounted(2))
    store(manager, [A])
    assert len(manager) == 1


class UserFailedError(Exception):
    """An exception of a user's own code."""


def fail(policy: ListPolicy, *_: Any) -> Any:
    raise UserFailedError


def drop_and_fail(policy: ListPolicy, *_: Any) -> Any:
    """A block that the manager holds and the policy does not know could never be evicted."""
    del policy.order[:2]
    raise UserFailedError


@pytest.mark.parametrize("fault", [fail, drop_and_fail])
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("touch", lambda manager: manager.touch([A])),
        ("evict", lambda manager: manager.prepare_store([E])),
        ("remove", lambda manager: manager.complete_store([D], success=False)),
        ("clear", lambda manager: manager.reset_cache()),
    ],
)
def test_what_a_users_policy_raises_passes_through_and_changes_nothing(
    twin: ModuleType, method: str, call: Callable[[Any], Any], fault: Callable[..., Any]
) -> None:
    policy = faulty(**{method: fault})(4)
    manager = twin.CPUOffloadingManager(16, 4, policy, enable_events=True)
    store(manager, [A, B, C])
    manager.prepare_store([D])
    list(manager.take_events())
    before, order = manager.stats(), list(policy.order)
    policy.armed = True
    with pytest.raises(UserFailedError):
        call(manager)
    policy.armed = False
    check_invariants(manager)
    assert (manager.stats(), list(manager.take_events())) == (before, [])
    assert policy.order == order or fault is drop_and_fail
    manager.complete_store([D])
    assert sorted(names(store(manager, [E, F, b"g", b"h"]).block_hashes_evicted)) == [*"ABCD"]


def evict_and_interrupt(policy: ListPolicy, *arguments: Any) -> Any:
    ListPolicy.evict(policy, *arguments)
    raise KeyboardInterrupt


def evict_and_refuse(policy: ListPolicy, *arguments: Any) -> Any:
    ListPolicy.evict(policy, *arguments)


def drop_and_answer_nonsense(policy: ListPolicy, *_: Any) -> Any:
    return policy.order.pop() and "nonsense"


@pytest.mark.parametrize(
    ("method", "fault", "error", "message"),
    [
        ("evict", evict_and_interrupt, KeyboardInterrupt, "^$"),
        (
            "evict",
            evict_and_refuse,
            PolicyError,
            "must drop exactly its 0 victims, got 1 blocks$",
        ),
        ("make_room", drop_and_answer_nonsense, PolicyError, "Faulty"),
    ],
)
def test_a_policy_that_has_dropped_blocks_gets_them_back(
    twin: ModuleType, method: str, fault: Any, error: type[BaseException], message: str
) -> None:
    policy = faulty(**{method: fault})(2)
    manager = twin.CPUOffloadingManager(16, 2, policy)
    store(manager, [A, B])
    policy.armed = True
    with pytest.raises(error, match=message):
        manager.prepare_store([C])
    assert manager.lookup([A, B]) == 2
    assert manager.stats()["refused_stores"] == 0
    check_invariants(manager)


def evict_and_drop(policy: ListPolicy, *arguments: Any) -> Any:
    victims = ListPolicy.evict(policy, *arguments)
    del policy.order[0]
    return victims


def evict_and_keep(policy: ListPolicy, *arguments: Any) -> Any:
    order = policy.order
    victims = ListPolicy.evict(policy, *arguments)
    policy.order = order
    return victims


@pytest.mark.parametrize(("fault", "dropped"), [(evict_and_drop, 2), (evict_and_keep, 0)])
def test_a_policy_that_drops_other_blocks_than_its_victims(
    twin: ModuleType, fault: Any, dropped: int
) -> None:
    policy = faulty(evict=fault)(3)
    manager = twin.CPUOffloadingManager(16, 3, policy, enable_events=True)
    store(manager, [A, B, C])
    list(manager.take_events())
    policy.armed = True
    with pytest.raises(PolicyError, match=f"exactly its 1 victims, got {dropped} blocks$"):
        manager.prepare_store([D])
    assert [(names(e.block_hashes), e.removed) for e in manager.take_events()] == [("A", True)]
    check_invariants(manager)
    policy.armed = False
    assert sorted(names(store(manager, [A, D, E]).block_hashes_evicted)) == [*"BC"]
    check_invariants(manager)


def test_an_insert_that_fails_gives_the_slots_back(twin: ModuleType) -> None:
    def fail_at_d(policy: ListPolicy, block: BlockHash, status: BlockStatus) -> None:
        fail(policy) if block == D else ListPolicy.insert(policy, block, status)

    policy = faulty(insert=fail_at_d)(3)
    manager = twin.CPUOffloadingManager(16, 3, policy, enable_events=True)
    store(manager, [A, B])
    list(manager.take_events())
    policy.armed = True
    with pytest.raises(UserFailedError):
        manager.prepare_store([C, D])
    assert (C in manager, D in manager) == (False, False)
    assert A not in manager
    assert (len(manager), manager.stats()["free"]) == (1, 2)
    assert [(names(e.block_hashes), e.removed) for e in manager.take_events()] == [("A", True)]
    assert manager.stats()["evicted_blocks"] == 1
    policy.armed = False
    assert len(store(manager, [C, D]).block_hashes_to_store) == 2
    check_invariants(manager)


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


def test_an_insert_that_fails_leaves_nothing_in_the_policy(twin: ModuleType) -> None:
    def insert_and_fail(policy: ListPolicy, *arguments: Any) -> None:
        ListPolicy.insert(policy, *arguments)
        fail(policy)

    policy = faulty(insert=insert_and_fail)(2)
    manager = twin.CPUOffloadingManager(16, 2, policy)
    store(manager, [A])
    policy.armed = True
    with pytest.raises(UserFailedError):
        manager.prepare_store([B])
    policy.armed = False
    assert [names([block]) for block, _ in policy.order] == ["A"]
    assert names(store(manager, [C, D]).block_hashes_evicted) == "A"


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
