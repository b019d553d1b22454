"""A collector that runs as often as it can, on garbage that calls the manager when it dies.

Nothing of that may happen between a call's first look at the state and its last change: the
finalisers are re-entrant calls, and they must find the state before or after.
"""

from __future__ import annotations

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Twins
from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

TRAP = """
import gc
import importlib
import random
import sys


class Trap:
    # Garbage in a cycle, so that only the collector finds it.
    def __init__(self):
        self.myself = self

    def __del__(self):
        spring()
"""

TRAPS = """
from kvoffload import OffloadError
from tests.isolated.driven import Drive

twin = importlib.import_module(sys.argv[1])
name, alone = sys.argv[2], sys.argv[3] == "alone"
generator = random.Random(11)
drives = Drive([bytes([number]) * (32 if number % 3 else 40) for number in range(1, 20)], 4)
sprung = 0
inside = False


def spring():
    global sprung, inside
    if inside:
        return
    inside = True
    sprung += 1
    try:
        step()
    finally:
        inside = False


def step():
    try:
        (drives.policy if alone else drives.manager)(thing, generator)
    except (OffloadError, ValueError):
        pass


gc.collect()
gc.freeze()  # the modules, which each collection would go through
thing = twin.policy_class(name)(6) if alone else twin.CPUOffloadingManager(16, 6, name, True)
gc.set_threshold(1, 1, 1)
for _ in range(3000):
    Trap()
    step()
    thing._check()
gc.set_threshold(0)
assert sprung > 100, sprung
print("standing")
"""


@pytest.mark.parametrize("how", ["managed", "alone"])
@pytest.mark.parametrize("policy", registry.names())
def test_finalisers_that_call_back(twins: Twins, policy: str, how: str) -> None:
    assert run_script(TRAP + TRAPS, twins[1].__name__, policy, how) == "standing\n"


RESETS = """
twin = importlib.import_module(sys.argv[1])
backend = twin.CPUBackend(16, 40)
other, manager = twin.LRUOffloadingManager(backend), twin.ARCOffloadingManager(backend)
keys = [number.to_bytes(8, "big") for number in range(4000)]
armed = False
sprung = 0
hoard = []


def spring():
    global sprung
    if armed:
        sprung += 1
        store(manager, 1)
        hoard.extend([] for _ in range(100))  # the free lists are empty: each list is new
        Trap()


def store(manager, count):
    batch = [keys.pop() for _ in range(count)]
    output = manager.prepare_store(batch)
    manager.complete_store(output.block_hashes_to_store)
    return batch


store(other, 3)
for number in range(20):
    again = store(manager, 20)
    manager.touch(again)
    blocks = [*again, *store(manager, 10)]
    manager.prepare_load(blocks)
    assert manager.prepare_store(keys[:30]) is None  # this search parks all of them
    manager.complete_load(blocks)
    gc.collect()
    Trap()
    armed = True
    gc.set_threshold(1, 1, 1)
    manager.reset_cache()
    gc.set_threshold(0)
    armed = False
    taken = 40 - backend.get_num_free_blocks()
    assert taken == len(manager) + len(other), (number, taken, len(manager), len(other))
    manager._check()
assert sprung >= 20, sprung
print("standing")
"""


def test_a_finaliser_that_stores_during_a_reset_loses_no_slot(twins: Twins) -> None:
    assert run_script(TRAP + RESETS, twins[1].__name__) == "standing\n"


STATUSES = """
from tests.policies.steps import idle

policy = importlib.import_module(sys.argv[1]).policy_class(sys.argv[2])(4)
armed = False
sprung = 0
hoard = []


def spring():
    global sprung
    if armed:
        sprung += 1
        if policy.evict(1, ()):
            policy.insert(b"other", other)
        hoard.extend((number, number) for number in range(3000))  # the free lists are empty
        Trap()


gc.collect()
gc.freeze()  # the modules, which each collection would go through
for late in range(12):
    policy.clear()
    policy.insert(b"mine", idle(7))
    other = idle(99)
    gc.collect()
    Trap()
    hoard.extend((number, number) for number in range(3000))
    armed = True
    gc.set_threshold(gc.get_count()[0] + late, 1, 1)
    status = policy.get(b"mine")
    gc.set_threshold(0)
    armed = False
    assert status is None or status.block_id == 7, (late, status.block_id)
    del status
assert sprung, "no trap was sprung"
print("standing")
"""


@pytest.mark.parametrize("policy", registry.names())
def test_a_finaliser_that_evicts_during_a_get_shows_no_other_block(
    twins: Twins, policy: str
) -> None:
    assert run_script(TRAP + STATUSES, twins[1].__name__, policy) == "standing\n"


READS = """
has_events = sys.argv[2] == "events"
manager = importlib.import_module(sys.argv[1]).CPUOffloadingManager(16, 8, "lru", has_events)
read = []


def spring():
    read.append(list(manager.take_events()) if has_events else output.block_hashes_evicted)


for number in range(1, 50):
    batch = [bytes([number, place]) * 16 for place in range(4)]
    output = manager.prepare_store(batch)
    manager.complete_store(batch)
    hoard = [[] for _ in range(300)]  # the free list is empty: each list is new
    gc.collect()
    gc.disable()
    gc.set_threshold(1)
    Trap()
    gc.enable()
    found = manager.events if has_events else output.block_hashes_evicted
    gc.disable()
    if not has_events:
        gc.collect()
        assert found is output.block_hashes_evicted is read[-1], (found, read[-1])
    elif found:
        assert found[-1].block_hashes == batch, found
        assert all(event.block_size == 16 for event in found)
    else:  # before: 3.10 allocates a frame, and from 3.12 on it runs between two instructions
        assert sys.version_info[:2] != (3, 11), number
assert len(read) > 40, len(read)
print("standing")
"""


@pytest.mark.parametrize("what", ["events", "evicted"])
def test_a_finaliser_that_takes_or_reads_what_is_copied_or_read_first(
    twins: Twins, what: str
) -> None:
    assert run_script(TRAP + READS, twins[1].__name__, what) == "standing\n"
