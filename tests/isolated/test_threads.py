"""Threads that hammer one compiled manager, policy or pool leave every invariant standing."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import read_budget
from tests.isolated.scripts import run_script

HAMMER = """
import importlib
import random
import sys
import threading

from kvoffload import BlockStatus, OffloadError

twin = importlib.import_module("tests._compiled")
kind, seconds = sys.argv[1], float(sys.argv[2])
sys.setswitchinterval(1e-6)
KEYS = [bytes([number]) * (32 if number % 3 else 40) for number in range(1, 25)]
deadline_passed = threading.Event()
failures = []


def drive_manager(manager, generator):
    batch = [generator.choice(KEYS) for _ in range(generator.randrange(1, 7))]
    choice = generator.randrange(8)
    if choice == 0:
        manager.lookup(iter(batch))
    elif choice == 1:
        manager.touch(batch)
    elif choice == 2:
        manager.prepare_load(batch)
        manager.complete_load(batch)
    elif choice in (3, 4):
        output = manager.prepare_store(batch)
        if output is not None:
            manager.complete_store(output.block_hashes_to_store, generator.random() < 0.8)
    elif choice == 5:
        list(manager.take_events())
    elif choice == 6:
        manager.stats()
        len(manager), batch[0] in manager
        list(manager.policy.blocks if hasattr(manager.policy, "blocks") else manager.policy.t1)
    elif generator.random() < 0.02:
        manager.reset_cache()


def drive_policy(policy, generator):
    key = generator.choice(KEYS)
    choice = generator.randrange(7)
    if choice in (0, 1):
        status = BlockStatus(7)
        status.ref_cnt = generator.choice([0, 0, 0, 1])
        policy.insert(key, status)
    elif choice == 2:
        policy.remove(key)
    elif choice == 3:
        policy.touch([generator.choice(KEYS) for _ in range(5)])
    elif choice == 4:
        policy.evict(generator.randrange(3), [key])
    elif choice == 5:
        policy.get(key)
    elif generator.random() < 0.02:
        policy.clear()


def drive_pool(pool, generator):
    try:
        taken = pool.allocate_blocks(KEYS[: generator.randrange(4)])
    except ValueError:
        return
    for status in taken:
        pool.free(status)


if kind in ("LRUOffloadingManager", "ARCOffloadingManager"):
    thing, drive = getattr(twin, kind)(twin.CPUBackend(16, 8), True), drive_manager
elif kind.startswith("cpu-"):
    thing, drive = twin.CPUOffloadingManager(16, 8, kind[4:], True), drive_manager
elif kind == "pool":
    thing, drive = twin.CPUBackend(16, 8), drive_pool
else:
    thing, drive = twin.policy_class(kind)(8), drive_policy


def work(seed):
    generator = random.Random(seed)
    while not deadline_passed.is_set():
        try:
            drive(thing, generator)
        except (OffloadError, ValueError):
            pass
        except BaseException as error:
            failures.append(repr(error))
            return


threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
for thread in threads:
    thread.start()
deadline_passed.wait(seconds)
deadline_passed.set()
for thread in threads:
    thread.join()
assert not failures, failures
thing._check()
if kind == "pool":
    assert thing.get_num_free_blocks() == 8
elif drive is drive_manager:
    stats = thing.stats()
    assert stats["resident"] == len(thing)
    assert stats["resident"] + stats["free"] == 8, stats
    counts = [stats[name] for name in ("lookups", "stored_blocks", "evicted_blocks")]
    assert all(counts), stats
print("standing")
"""

KINDS = ("cpu-lru", "cpu-arc", "LRUOffloadingManager", "ARCOffloadingManager", "lru", "arc", "pool")


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_one_compiled_thing(twins: tuple[ModuleType, ModuleType], kind: str) -> None:
    seconds = min(max(0.4, 0.4 * read_budget()), 10.0)
    assert run_script(HAMMER, kind, str(seconds)) == "standing\n"
