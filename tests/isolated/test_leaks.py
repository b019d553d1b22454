"""Leaks: each scenario runs in a process of its own, which asks the C library for what it has lent.

Python takes its memory from there too, so that a key, an output or an event that something keeps is
seen, and what the compiled core frees late or not at all. After a warm-up memory may not go on
growing by more than a small part of a byte per call; mappings, which are large, not at all.
"""

from __future__ import annotations

import platform
from types import ModuleType

import pytest

from tests.isolated.scripts import run_script

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks the GNU C library"),
]

PRELUDE = """
import ctypes
import gc
import importlib
import itertools
import os
import random
import sys

from kvoffload import OffloadError
from kvoffload.watch import Watch
from tests import _compiled, _python
from tests.blocks import METHODS
from tests.fuzz.calls import run_calls
from tests.isolated.driven import Drive
from tests.policies.steps import policy_of

twin = importlib.import_module(sys.argv[1])
KEYS = [bytes([number]) * (32 if number % 2 else 700) for number in range(1, 9)]
fresh = itertools.count()
generator = random.Random(1)


def new_keys(count):
    return [next(fresh).to_bytes(8, "big") * (100 if number % 2 else 6) for number in range(count)]


class Lent(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "chunks", "fast", "maps", "mapped", "_1", "_2", "used", "free", "top")]


ask = ctypes.CDLL(None).mallinfo2
ask.restype = Lent


def memory():
    gc.collect()
    arena = None
    while arena != (lent := ask()).arena:  # it may grow while the file is read
        arena = lent.arena
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") - arena
    return lent.used + lent.mapped, mapped
"""

MEASURE = """
for _ in range(6):
    before = memory()
    for _ in range(rounds):
        step()
    growths = [now - then for now, then in zip(memory(), before)]
    if growths[0] < 20_000 and growths[1] <= 0:
        break
else:
    raise AssertionError(f"{growths} bytes more after another {rounds} rounds")
print("tight")
"""

CALLS = """
def step():
    run_calls((_python, _compiled), generator.randbytes(300))
"""

SCENARIOS = {
    "mistakes": (
        1000,
        """
managers = [twin.CPUOffloadingManager(16, 8, name, True) for name in ("lru", "arc")]
def failing():
    yield KEYS[0]
    raise ZeroDivisionError
def step():
    for manager, method in itertools.product(managers, METHODS):
        for batch in (5, failing()):
            try:
                getattr(manager, method)(batch)
            except (TypeError, ZeroDivisionError):
                pass
""",
    ),
    "policies that come and go": (
        500,
        """
drives = Drive(KEYS)
def step():
    for name in ("lru", "arc", "hit-density"):
        policy = policy_of(twin, name, 6, KEYS[:2])
        for _ in range(12):
            try:
                drives.policy(policy, generator)
            except (OffloadError, ValueError):
                pass
""",
    ),
    "pools that come and go": (
        2000,
        """
def step():
    pool = twin.CPUBackend(16, 64)
    given = pool.allocate_blocks(KEYS)
    pool.get_load_store_spec(KEYS, given)
    for status in given:
        pool.free(status)
    twin.LRUOffloadingManager(pool).prepare_store(KEYS)
""",
    ),
    "a manager that is watched, and others with a watch": (
        1000,
        """
clock = [0.0]
def build():
    watch = Watch(max_rate=1.0, slots=64, policy_slots=64, clock=lambda: clock[0], window=30.0)
    return twin.CPUOffloadingManager(16, 6, "arc", watch=watch)
manager = build()
def step():
    clock[0] += 0.1
    for each in (manager, build() if generator.random() < 0.1 else manager):
        keys = new_keys(3)
        each.lookup(keys)
        output = each.prepare_store(keys)
        if output is not None:
            each.complete_store(keys, generator.random() < 0.9)
            each.prepare_load(keys[: each.lookup(keys)])  # some are never completed
            each.watch.explain(keys)
        if each is not manager or generator.random() < 0.02:
            each.watch.report()
    if generator.random() < 0.002:
        manager.reset_cache()
""",
    ),
}


def measure(twin: ModuleType, rounds: int, scenario: str) -> None:
    script = f"{PRELUDE}\nrounds = {rounds}\n{scenario}\n{MEASURE}"
    assert run_script(script, twin.__name__, environment={"PYTHONMALLOC": "malloc"}) == "tight\n"


def test_calls_of_managers_leak_nothing(twins: tuple[ModuleType, ModuleType]) -> None:
    """Managers of every policy come and go, with requests, hints, mistakes and statuses held."""
    measure(twins[0], 200, CALLS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_leaks(twin: ModuleType, scenario: str) -> None:
    measure(twin, *SCENARIOS[scenario])
