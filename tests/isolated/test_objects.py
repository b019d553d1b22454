"""Managers, policies and pools as objects: collected, not pickled, not ended by misuse."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus, CPULoadStoreSpec, OffloadingEvent, PrepareStoreOutput
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, store
from tests.differential.pairs import Twins
from tests.isolated.scripts import run_script
from tests.observation import as_value, observe
from tests.parts import ListBackend, ListPolicy

pytestmark = pytest.mark.thorough


def things(twin: ModuleType) -> list[Any]:
    managers = [
        twin.CPUOffloadingManager(16, 4),
        twin.CPUOffloadingManager(16, 4, "arc", True),
        twin.CPUOffloadingManager(16, 4, ListPolicy),
        twin.LRUOffloadingManager(twin.CPUBackend(16, 4), True),
        twin.ARCOffloadingManager(ListBackend(16, 4)),
    ]
    for manager in managers:
        store(manager, [A, B])
        manager.prepare_load([A])
    policies = [twin.policy_class(name)(4) for name in registry.names()]
    for policy in policies:
        policy.insert(A, BlockStatus(0))
    return [*managers, *policies, twin.CPUBackend(16, 4)]


def test_pickling_is_refused_and_harmless(twin: ModuleType) -> None:
    for thing in things(twin):
        before = observe(thing)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=type(thing).__name__):
                pickle.dumps(thing, protocol)
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=type(thing).__name__):
                duplicate(thing)
        assert observe(thing) == before
        check_invariants(thing)


def test_what_managers_give_can_be_pickled(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 1, "lru", True)
    store(manager, [A])
    manager.prepare_load([A])
    spec = manager.prepare_load([A])
    manager.complete_load([A, A])
    output = store(manager, [B])
    given = [spec, output, *manager.take_events(), manager.policy.get(B)]
    kinds = [CPULoadStoreSpec, PrepareStoreOutput, *[OffloadingEvent] * 3, BlockStatus]
    for thing, kind in zip(given, kinds, strict=True):
        for back in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
            assert type(back) is type(thing) is kind
            assert as_value(back) == as_value(thing)


def test_a_manager_in_a_cycle_is_collected(twin: ModuleType) -> None:
    class Linked(twin.CPUOffloadingManager):  # type: ignore[misc, name-defined]
        pass

    class Watching(ListPolicy):
        watched: Any = None

    managers = [Linked(16, 4), twin.CPUOffloadingManager(16, 4, Watching(4))]
    managers += [twin.CPUOffloadingManager(16, 4, "lru", True)]
    for manager in managers:
        store(manager, [A])
    managers[0].myself = managers[0]
    managers[1].policy.watched = managers[1]
    managers[2].events[0].block_hashes.append(managers[2])
    died = [weakref.ref(manager) for manager in managers]
    del manager, managers
    gc.collect()
    assert [reference() for reference in died] == [None] * 3


def test_views_outlive_their_manager(twin: ModuleType) -> None:
    manager = twin.LRUOffloadingManager(twin.CPUBackend(16, 4))
    store(manager, [A, B])
    blocks, table, policy, events = (
        manager.blocks,
        manager.block_table,
        manager.policy,
        manager.take_events(),
    )
    del manager
    gc.collect()
    assert list(blocks) == [A, B]
    assert sorted(row[1] for row in table.tolist() if row[1] >= 0) == [0, 1]
    assert policy.get(B).block_id == 1
    assert list(events) == []


ABUSE = """
import importlib
import random
import sys

from kvoffload import BlockStatus
from tests.isolated.driven import Drive

twin = importlib.import_module(sys.argv[1])
name = sys.argv[2]
generator = random.Random(7)
keys = [bytes([number]) * (32 if number % 3 else 40) for number in range(1, 20)]
drives = Drive(keys, 4)
policy = twin.policy_class(name)(4)
backend = twin.CPUBackend(16, 4)
left = twin.CPUOffloadingManager(16, 4, policy, True)
right = twin.CPUOffloadingManager(16, 2, name)
over = twin.LRUOffloadingManager(backend)
alone = twin.policy_class(name)(4)


def abuse():
    manager, size = generator.choice([(left, 4), (right, 2), (over, 4)])
    part, key = generator.choice([policy, over.policy, alone]), generator.choice(keys)
    choice = generator.randrange(7)
    if choice == 0:
        part.insert(key, BlockStatus(generator.choice([0, 3, 10**9, -5, 2**62])))
    elif choice == 1:
        status = part.get(key)
        if status is not None:
            status.ref_cnt = generator.choice([-1, 0, 1, -7, 2**31 - 1])
            status.block_id = generator.choice([0, 1, 10**9, -5])
    elif choice == 2:
        backend.free(BlockStatus(generator.randrange(4)))
    elif choice == 3:
        try:
            drives.policy(part, generator)
        except AssertionError:  # a status has been written to
            pass
    else:
        drives.manager(manager, generator, size)


for _ in range(8_000):
    try:
        abuse()
    except AssertionError:
        raise
    except Exception:
        pass
    list(left.take_events())
    assert all(count >= 0 for manager in (left, over) for count in manager.stats().values())
print("survived")
"""


@pytest.mark.parametrize("name", registry.names())
def test_misuse_of_a_managers_parts_does_not_end_the_process(twin: ModuleType, name: str) -> None:
    assert run_script(ABUSE, twin.__name__, name) == "survived\n"


FAILED_AGAIN = """
import resource
import sys

from kvoffload import Hints
from tests import _compiled

keys = [bytes([number]) * 32 for number in (1, 2)]
policy = _compiled.policy_class("hit-density")(8)


def batch():
    yield keys[0]
    try:
        policy.__init__(10_000_000, ghosts=16.0)  # the blocks find room, the ghosts do not
    except MemoryError:
        print("failed")
    yield keys[1]


resource.setrlimit(resource.RLIMIT_AS, (2**31, resource.RLIM_INFINITY))
for call in (policy.touch, lambda hashes: policy.evict(1, hashes)):
    try:
        call(batch())
    except RuntimeError as error:
        print(error)
    policy.__init__(8)


def build_anew(frame, *_):
    if frame.f_code.co_name == "check_cache_capacity":
        sys.setprofile(None)
        policy.__init__(8, guard=0)


policy.begun(keys, Hints(expect_s=3.0))
sys.setprofile(build_anew)
print(policy.hint_gain, policy.guard)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_policy_is_built_anew_or_fails_to_be_in_a_call(twins: Twins) -> None:
    assert twins[1].__name__ == "tests._compiled"
    said = "failed\nthe policy is not initialised: call super().__init__() first\n"
    assert run_script(FAILED_AGAIN) == 2 * said + "None 0\n"
