"""Leaks: each scenario runs in a process of its own, which watches its memory and its keys.

After a warm-up the resident set may not go on growing by more than a bound far below what one small
leak per round would add, and no key, output or event may keep a reference that it should have
dropped. The interpreter takes memory by the megabyte: what grows once is measured again.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.isolated.scripts import run_script

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm"),
]

PRELUDE = """
import gc
import importlib
import itertools
import os
import random
import sys

from kvoffload import OffloadError
from tests.isolated.driven import Drive
from tests.policies.steps import policy_of

twin = importlib.import_module(sys.argv[1])
SHORT = [bytes([number]) * 32 for number in range(1, 9)]
LONG = [bytes([number]) * 700 for number in range(1, 9)]
KEYS = SHORT[:4] + LONG[:4]
fresh = itertools.count()


def build(num_blocks=6, events=True):
    return twin.CPUOffloadingManager(16, num_blocks, name, events)  # `name` is the loop's


def new_keys(count, length=48):
    return [next(fresh).to_bytes(8, "big") * (length // 8) for _ in range(count)]


def memory():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""

MEASURE = """
for name in ("lru", "arc"):
    exec(scenario, globals())
    for _ in range(rounds // 4):
        step()
    growths = []
    while len(growths) < 4 and (not growths or growths[-1] >= 400_000):
        before = memory()
        references = [sys.getrefcount(key) for key in KEYS]
        for _ in range(rounds):
            step()
        growths.append(memory() - before)
        now = [sys.getrefcount(key) for key in KEYS]
        assert now == references, "references to keys have changed"
    assert growths[-1] < 400_000, f"{name} grew by {growths} bytes in {rounds} rounds each"
print("tight")
"""

STORES = """
manager = build()
def step():
    output = manager.prepare_store(new_keys(3, {length}))
    if output is not None:
        manager.complete_store(output.block_hashes_to_store)
    list(manager.take_events())
"""
SCENARIOS = {
    "stores that evict": (4000, STORES.format(length=48)),
    "stores of long keys that evict": (3000, STORES.format(length=800)),
    "stores that fail": (
        6000,
        """
manager = build()
def step():
    manager.prepare_store(KEYS[:2] + LONG[:2])
    manager.complete_store(KEYS + LONG, success=False)
""",
    ),
    "stores that are refused": (
        6000,
        """
manager = build(3)
def step():
    assert manager.prepare_store(KEYS + LONG) is None
""",
    ),
    "calls of a manager": (
        6000,
        """
manager, drives, generator = build(8), Drive(KEYS, 6), random.Random(1)
def step():
    for _ in range(15):
        try:
            drives.manager(manager, generator)
        except OffloadError:
            pass
    drives.requests.clear()
    manager.reset_cache()
    list(manager.take_events())
""",
    ),
    "calls of policies that come and go": (
        6000,
        """
drives, generator = Drive(KEYS), random.Random(1)
def step():
    policy = policy_of(twin, name, 6, KEYS[:2])
    for _ in range(12):
        try:
            drives.policy(policy, generator)
        except (OffloadError, ValueError):
            pass
""",
    ),
    "requests that finish, fail, are dropped or outlive a reset": (
        3000,
        """
manager = build(8)
kept = []
def step():
    request = manager.begin(KEYS[:4])
    found = request.lookup()
    request.prepare_load(0, found)
    request.complete_load(0, found)
    request.prepare_store()
    request.extend(new_keys(3))
    request.finish()
    request.complete_store()
    manager.begin(iter(LONG)).prepare_store(0, 2)
    with manager.begin(KEYS) as other:
        other.prepare_store(0, 3)
    other.complete_store(False)
    try:
        other.lookup()
    except OffloadError:
        pass
    kept.append(manager.begin(new_keys(40)))
    if len(kept) > 5:
        manager.reset_cache()
        kept.clear()
    list(manager.take_events())
""",
    ),
    "mistakes": (
        2000,
        """
manager = build(8)
manager.prepare_store(SHORT[:2])
def failing():
    yield KEYS[0]
    raise ZeroDivisionError
def step():
    for method in ("lookup", "touch", "prepare_load", "complete_load", "prepare_store",
                   "complete_store"):
        for batch in ([*KEYS, 5], [*KEYS, b""], 5, failing(), [b"absent"], SHORT[:1]):
            if method in ("prepare_store", "complete_store") and batch == [b"absent"]:
                continue
            try:
                getattr(manager, method)(batch)
            except (OffloadError, TypeError, ValueError, ZeroDivisionError):
                pass
    manager.complete_store(SHORT[:2], False)
    manager.prepare_store(SHORT[:2])
    list(manager.take_events())
""",
    ),
    "statuses held over evictions": (
        2500,
        """
manager = build(4)
def step():
    keys = new_keys(2)
    manager.prepare_store(keys)
    manager.complete_store(keys)
    held = [manager.policy.get(key) for key in keys]
    manager.prepare_store(new_keys(4))
    manager.reset_cache()
    list(manager.take_events())
    assert all(status is None or status.block_id >= 0 for status in held)
""",
    ),
    "managers that come and go": (
        1500,
        """
def step():
    manager = build(64)
    manager.prepare_store(KEYS + LONG)
    manager.complete_store(KEYS + LONG)
    table = manager.block_table
    status = manager.policy.get(KEYS[0])
    events = manager.take_events()
    next(events, None)
""",
    ),
    "pools that come and go": (
        3000,
        """
def step():
    pool = twin.CPUBackend(16, 64)
    given = pool.allocate_blocks(KEYS)
    pool.get_load_store_spec(KEYS, given)
    for status in given:
        pool.free(status)
    manager = twin.LRUOffloadingManager(pool)
    manager.prepare_store(KEYS)
""",
    ),
    "a manager that is watched": (
        3000,
        """
from kvoffload.watch import Watch
clock = [0.0]
watch = Watch(max_rate=1.0, slots=64, policy_slots=64, clock=lambda: clock[0], window=30.0)
manager = twin.CPUOffloadingManager(16, 6, name, watch=watch)
def step():
    clock[0] += 0.1
    keys = new_keys(3)
    manager.lookup(keys)
    output = manager.prepare_store(keys)
    if output is not None:
        manager.complete_store(keys, next(fresh) % 7 > 0)
        manager.prepare_load(keys[: manager.lookup(keys)])  # some are never completed
        watch.explain(keys)
    if next(fresh) % 50 == 0:
        watch.report()
    if next(fresh) % 500 == 0:
        manager.reset_cache()
""",
    ),
    "managers with a watch": (
        400,  # one that is not freed takes several kilobytes
        """
from kvoffload.watch import Watch
def step():
    manager = twin.CPUOffloadingManager(16, 6, name, watch=Watch(max_rate=1.0, slots=64))
    manager.lookup(KEYS)
    manager.prepare_store(KEYS[:3])
    manager.watch.report()
    if next(fresh) % 20 == 0:
        gc.collect()
""",
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_leaks(twin: ModuleType, scenario: str) -> None:
    rounds, body = SCENARIOS[scenario]
    script = f"{PRELUDE}\nrounds, scenario = {rounds}, {body!r}\n{MEASURE}"
    assert run_script(script, twin.__name__) == "tight\n"
