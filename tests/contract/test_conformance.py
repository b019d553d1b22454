"""The suite for policies: every policy passes it, and a wrong one does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload import BlockHash, BlockStatus, CachePolicy
from kvoffload.policies import registry
from kvoffload.testing.policies import PolicyConformance, check_invariants, policy_machine
from tests.observation import observe
from tests.parts import KeepingListPolicy, ListPolicy


class TestBuiltIn(PolicyConformance):
    """Every policy of the table, in both twins."""

    checks_arguments = True
    num_random_runs = 20

    @pytest.fixture(autouse=True, params=registry.names())
    def choose(self, twin: ModuleType, request: pytest.FixtureRequest) -> None:
        self.twin = twin
        self.policy_class: Any = twin.policy_class(request.param)

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        policy: CachePolicy = self.policy_class(cache_capacity)
        return policy

    def make_manager(self, num_blocks: int, policy: CachePolicy) -> Any:
        return self.twin.CPUOffloadingManager(16, num_blocks, policy)

    def verify(self, policy: Any) -> None:
        check_invariants(policy)

    def observe(self, policy: CachePolicy) -> object:
        return observe(policy)

    def test_in_any_order(self) -> None:
        run_state_machine_as_test(policy_machine(self.make_policy, verify=self.verify))


class TestListPolicy(PolicyConformance):
    """A user's policy, which copies the statuses that it is given."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return ListPolicy(cache_capacity)


class TestKeepingListPolicy(PolicyConformance):
    """A user's policy, which keeps the statuses that it is given."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return KeepingListPolicy(cache_capacity)


class TestPolicyThatSaysLittle(PolicyConformance):
    """Without `clear` and `len`, and with an order that equal calls do not decide."""

    is_deterministic = False

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        class Plain(ListPolicy):
            __len__ = CachePolicy.__len__
            clear = CachePolicy.clear

            def evict(self, n: int, protected: Any) -> Any:
                self.order.sort(key=id)
                return super().evict(n, protected)

        return Plain(cache_capacity)


# -- policies with a fault -----------------------------------------------------------------------


class EvictsPinned(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        able = [pair for pair in self.order if pair[1].ref_cnt >= 0 and pair[0] not in protected]
        return self.take(able, n)

    def take(self, pairs: list[tuple[BlockHash, BlockStatus]], n: int) -> Any:
        if n < 0:
            raise ValueError(n)
        if len(pairs) < n:
            return None
        for key, _ in pairs[:n]:
            self.remove(key)
        return pairs[:n]


class EvictsPending(EvictsPinned):
    def evict(self, n: int, protected: Any) -> Any:
        able = [pair for pair in self.order if pair[1].ref_cnt <= 0 and pair[0] not in protected]
        return self.take(able, n)


class EvictsProtected(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        return super().evict(n, ())


class EvictsFewer(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        idle = [pair for pair in self.order if pair[1].ref_cnt == 0 and pair[0] not in protected]
        return super().evict(min(n, len(idle)), protected)


class EvictsNothingOfTwo(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        return None if n == 2 else super().evict(n, protected)


class GivesOtherStatuses(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        victims = super().evict(n, protected)
        return victims and [(key, BlockStatus(0)) for key, _ in victims]


class TakesNegativeNumbers(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        return super().evict(max(0, n), protected)


class ReordersWhereItRefuses(ListPolicy):
    def evict(self, n: int, protected: Any) -> Any:
        victims = super().evict(n, protected)
        if victims is None:
            self.order.reverse()
        return victims


class OrdersByGet(ListPolicy):
    def get(self, block_hash: bytes) -> BlockStatus | None:
        self.touch([block_hash])
        return super().get(BlockHash(block_hash))


class ReadsRefCntAtInsert(ListPolicy):
    def own(self, status: BlockStatus) -> BlockStatus:
        own = super().own(status)
        self.idle = {**getattr(self, "idle", {}), own.block_id: status.ref_cnt == 0}
        return own

    def evict(self, n: int, protected: Any) -> Any:
        stays = [key for key, status in self.order if not self.idle[status.block_id]]
        return super().evict(n, {*protected, *stays})


class UsesStatusesAgain(ListPolicy):
    spare: list[BlockStatus]

    def remove(self, block_hash: BlockHash) -> None:
        status = self.get(block_hash)
        super().remove(block_hash)
        self.spare = [*getattr(self, "spare", []), *([status] if status else [])]

    def own(self, status: BlockStatus) -> BlockStatus:
        if not getattr(self, "spare", []):
            return super().own(status)
        own = self.spare.pop()
        own.block_id, own.ref_cnt = status.block_id, status.ref_cnt
        return own


class InsertsTwice(ListPolicy):
    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self.order = [pair for pair in self.order if pair[0] != block_hash]
        super().insert(block_hash, status)


class MovesWhatItRefuses(ListPolicy):
    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self.touch([block_hash])
        super().insert(block_hash, status)


class RemovesInSilence(ListPolicy):
    def remove(self, block_hash: BlockHash) -> None:
        if self.get(block_hash) is not None:
            super().remove(block_hash)


class RemovesOnlyIdle(ListPolicy):
    def remove(self, block_hash: BlockHash) -> None:
        status = self.get(block_hash)
        if status is None or status.ref_cnt == 0:
            super().remove(block_hash)


class TouchKnowsNoStrangers(ListPolicy):
    def touch(self, hashes: Any) -> None:
        hashes = list(hashes)
        if any(self.get(key) is None for key in hashes):
            raise KeyError(hashes)
        super().touch(hashes)


class TouchBringsIn(ListPolicy):
    def touch(self, hashes: Any) -> None:
        hashes = list(hashes)
        super().touch(hashes)
        self.order += [(key, self.own(BlockStatus(0))) for key in hashes if not self.get(key)]


class TouchReadsTwice(ListPolicy):
    def touch(self, hashes: Any) -> None:
        if list(hashes):
            super().touch(hashes)


class TouchKeepsTheList(ListPolicy):
    recent: Any = ()

    def touch(self, hashes: Any) -> None:
        self.recent = hashes if isinstance(hashes, list) else list(hashes)

    def evict(self, n: int, protected: Any) -> Any:
        super().touch(self.recent)
        return super().evict(n, protected)


class TouchLosesPending(ListPolicy):
    def touch(self, hashes: Any) -> None:
        super().touch(key for key in hashes)
        self.order = [pair for pair in self.order if pair[1].ref_cnt != -1 or pair[0] not in hashes]


class RemembersOverClear(ListPolicy):
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.uses: dict[bytes, int] = {}

    def touch(self, hashes: Any) -> None:
        for key in hashes:
            self.uses[key] = self.uses.get(key, 0) + 1

    def evict(self, n: int, protected: Any) -> Any:
        self.order.sort(key=lambda pair: self.uses.get(pair[0], 0))
        return super().evict(n, protected)


class ClearsInPart(ListPolicy):
    def clear(self) -> None:
        self.order = self.order[1:]


class CountsWrongly(ListPolicy):
    def __len__(self) -> int:
        return sum(status.ref_cnt >= 0 for _, status in self.order)


class IsFalseWhenEmpty(ListPolicy):
    def __bool__(self) -> bool:
        return bool(self.order)


class HasRoomForNoMore(ListPolicy):
    def insert(self, block_hash: BlockHash, status: BlockStatus) -> None:
        super().insert(block_hash, status)
        del self.order[: max(0, len(self.order) - self.cache_capacity)]


class TakesAnyCapacity(ListPolicy):
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(4)
        self.cache_capacity = cache_capacity


class SharesItsBlocks(ListPolicy):
    shared: list[tuple[BlockHash, BlockStatus]] = []

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order = self.shared


class StoresMoreThanItEvicts(ListPolicy):
    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        room = super().make_room(hashes, num_free + 1, protected)
        return room and (len(hashes), room[1])


class StoresMoreThanItIsAsked(ListPolicy):
    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        room = super().make_room(hashes, num_free, protected)
        return room and (room[0] + 1, room[1])


class InsertsWhatItMakesRoomFor(ListPolicy):
    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        room = super().make_room(hashes, num_free, protected)
        for key in hashes if room else ():
            self.insert(key, BlockStatus(0))
        return room


class DropsWhereItRefusesAStore(ListPolicy):
    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        room = super().make_room(hashes, num_free, protected)
        if room is None:
            self.order = self.order[1:]
        return room


class EmptiesTheBatch(ListPolicy):
    def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
        room = super().make_room(hashes, num_free, protected)
        if isinstance(hashes, list):
            hashes.clear()
        return room


FAULTY = {
    kind.__name__: kind
    for kind in list(globals().values())
    if inspect.isclass(kind)
    and issubclass(kind, ListPolicy)
    and kind not in (ListPolicy, KeepingListPolicy)
}


def failures(suite: object) -> list[str]:
    """Return the tests of a suite that fail."""
    found = []
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if name.startswith("test_"):
            try:
                test()
            except Exception:  # noqa: BLE001
                found.append(name)
    return found


def suite_of(make_policy: Callable[[int], CachePolicy], **members: Any) -> PolicyConformance:
    members["make_policy"] = lambda self, cache_capacity: make_policy(cache_capacity)
    suite: PolicyConformance = type("Suite", (PolicyConformance,), members)()
    return suite


IN_A_TEST_OF_THEIR_OWN = {
    "TakesAnyCapacity": "test_a_capacity_is_checked",
    "IsFalseWhenEmpty": "test_a_new_policy_is_empty_and_true",
    "RemembersOverClear": "test_clear_makes_it_as_new",
}


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_is_found(name: str) -> None:
    test = IN_A_TEST_OF_THEIR_OWN.get(name, "test_random_calls_keep_to_the_contract")
    with pytest.raises((AssertionError, ValueError, KeyError, TypeError)):
        getattr(suite_of(FAULTY[name]), test)()


def test_hypothesis_finds_a_fault() -> None:
    first = settings(
        max_examples=500, deadline=None, database=None, phases=[Phase.generate], derandomize=True
    )
    with pytest.raises(AssertionError, match=r"victims (of|after)"):
        run_state_machine_as_test(policy_machine(ReordersWhereItRefuses), settings=first)


def test_unchecked_arguments_are_found_where_the_policy_says_that_it_checks_them() -> None:
    assert failures(suite_of(ListPolicy)) == []
    assert failures(suite_of(ListPolicy, checks_arguments=True)) == ["test_arguments_are_checked"]


def test_the_invariants_of_the_library_s_own_classes_are_verified(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4)
    manager.begin([BlockHash(b"a")]).prepare_store()
    check_invariants(manager)
    check_invariants(manager.policy)
    with pytest.raises(TypeError, match="subject must be of a class of kvoffload, got "):
        check_invariants(ListPolicy(4))
