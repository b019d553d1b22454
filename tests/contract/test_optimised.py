"""`python -O` changes nothing: one script of mistakes prints the same with it and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import sys
import importlib

twin = importlib.import_module(sys.argv[1])
from kvoffload import BackendError, Backend, BlockStatus, CachePolicy, OffloadError

A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))


class Short(Backend):
    def get_num_free_blocks(self):
        return 4

    def allocate_blocks(self, hashes):
        return []

    def free(self, block):
        raise RuntimeError("nothing was handed out")


class Wrong(twin.LRUCachePolicy):
    def evict(self, n, protected):
        return super().evict(n + 1, protected)


def attempt(call, *arguments, **named):
    try:
        print("returned", call(*arguments, **named))
    except Exception as error:
        print(type(error).__name__, error)


for name in ("lru", "arc"):
    manager = twin.CPUOffloadingManager(16, 2, name)
    attempt(manager.lookup, [5, A])
    attempt(manager.prepare_store, [A, b""])
    attempt(manager.prepare_load, [A])
    attempt(manager.complete_load, [A])
    manager.prepare_store([A, B])
    attempt(manager.prepare_load, [A])
    attempt(manager.complete_load, [A])
    manager.complete_store([A, B])
    attempt(manager.complete_load, [A])
    attempt(manager.prepare_store, [A, B, C])
    attempt(manager.prepare_load, [A, C])
    attempt(lambda: manager.stats()["pinned"])
    policy = twin.policy_class(name)(2)
    attempt(policy.evict, -1, ())
    attempt(policy.remove, A)
    policy.insert(A, BlockStatus(0))
    attempt(policy.insert, A, BlockStatus(1))
    attempt(policy.insert, B, None)
attempt(twin.CPUOffloadingManager, 0, 2)
attempt(twin.CPUOffloadingManager, 16, -1)
attempt(twin.CPUOffloadingManager, True, 2)
attempt(twin.CPUOffloadingManager, 16, 2, "nonesuch")
attempt(twin.LRUOffloadingManager, None)
attempt(twin.LRUOffloadingManager(Short(16, "X")).prepare_store, [A])
backend = twin.CPUBackend(16, 1)
attempt(backend.free, BlockStatus(0))
attempt(backend.allocate_blocks, [A, B])
manager = twin.CPUOffloadingManager(16, 2, Wrong)
manager.complete_store(manager.prepare_store([A, B]).block_hashes_to_store)
attempt(manager.prepare_store, [C])
print("debug", __debug__)
"""

MISTAKES = 2 * 12 + 9
"""Calls in the script that must raise."""


def run(twin: ModuleType, *options: str) -> list[str]:
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [sys.executable, *options, "-c", SCRIPT, twin.__name__],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    return completed.stdout.splitlines()


def test_optimised_python_changes_nothing(twin: ModuleType) -> None:
    plain, optimised, stripped = run(twin), run(twin, "-O"), run(twin, "-OO")
    assert (plain.pop(), optimised.pop(), stripped.pop()) == (
        "debug True",
        "debug False",
        "debug False",
    )
    assert plain == optimised == stripped
    assert sum("Error " in line for line in plain) == MISTAKES
    assert not any("AssertionError" in line for line in plain)
