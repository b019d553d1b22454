"""A collector that runs as often as it can, on garbage that calls the manager when it dies.

Nothing of that may happen between a call's first look at the state and its last change: the
finalisers are re-entrant calls, and they must find the state before or after.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from kvoffload.policies import registry
from tests.isolated.scripts import run_script

TRAPS = """
import gc
import importlib
import random
import sys

from kvoffload import BlockStatus, OffloadError

twin = importlib.import_module(sys.argv[1])
name, alone = sys.argv[2], sys.argv[3] == "alone"
generator = random.Random(11)
KEYS = [bytes([number]) * (32 if number % 3 else 40) for number in range(1, 20)]
sprung = 0
inside = False


class Trap:
    # Garbage in a cycle, so that only the collector finds it.
    def __init__(self):
        self.myself = self

    def __del__(self):
        global sprung, inside
        if inside:
            return
        inside = True
        sprung += 1
        try:
            step()
        finally:
            inside = False


def idle(block_id):
    status = BlockStatus(block_id)
    status.ref_cnt = 0
    return status


def step_policy():
    batch = generator.sample(KEYS, 3)
    choice = generator.randrange(6)
    if choice < 2:
        thing.insert(batch[0], idle(5))
    elif choice == 2:
        thing.evict(generator.randrange(4), batch)
    elif choice == 3:
        thing.touch(batch)
    elif choice == 4:
        thing.remove(batch[0])
    else:
        thing.get(batch[0])


def step_manager():
    batch = generator.sample(KEYS, 3)
    choice = generator.randrange(7)
    if choice < 3:
        output = thing.prepare_store(batch)
        if output is not None:
            thing.complete_store(output.block_hashes_to_store, generator.random() < 0.8)
    elif choice == 3:
        thing.prepare_load(batch[:1])
        thing.complete_load(batch[:1])
    elif choice == 4:
        thing.touch(batch)
    elif choice == 5:
        thing.lookup(batch)
        thing.policy.get(batch[0])
        thing.stats()
    elif generator.random() < 0.1:
        thing.reset_cache()
    list(thing.take_events())


def step():
    try:
        step_policy() if alone else step_manager()
    except (OffloadError, ValueError):
        pass


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
def test_finalisers_that_call_back(
    twins: tuple[ModuleType, ModuleType], policy: str, how: str
) -> None:
    assert run_script(TRAPS, twins[1].__name__, policy, how) == "standing\n"
