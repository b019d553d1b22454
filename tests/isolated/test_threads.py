"""Threads that hammer one compiled manager, policy or pool leave every invariant standing.

So do threads that ask the watch of a manager of either twin while one thread calls that.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import read_budget
from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

PRELUDE = """
import importlib
import logging
import random
import sys
import threading
from functools import partial

from kvoffload import OffloadError
from kvoffload.watch import Watch
from kvoffload.watch.metrics import samples
from tests.isolated.driven import Drive

twin = importlib.import_module(sys.argv[1])
kind, seconds = sys.argv[2], float(sys.argv[3])
sys.setswitchinterval(1e-6)
deadline_passed = threading.Event()
failures = []


def work(call, *expected):
    while not deadline_passed.is_set():
        try:
            call()
        except expected:
            pass
        except BaseException as error:
            failures.append(repr(error))
            return


def run(calls, *expected):
    threads = [threading.Thread(target=work, args=(call, *expected)) for call in calls]
    for thread in threads:
        thread.start()
    deadline_passed.wait(seconds)
    deadline_passed.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
"""

HAMMER = """
# Of so many rows numpy allocates a table without the interpreter's lock.
BLOCKS = 96
drives = Drive([n.to_bytes(2, "big") * (16 if n % 3 else 20) for n in range(1, 300)])

if kind in ("LRUOffloadingManager", "ARCOffloadingManager"):
    thing, drive = getattr(twin, kind)(twin.CPUBackend(16, BLOCKS), True), drives.manager
elif kind.startswith("cpu-"):
    thing, drive = twin.CPUOffloadingManager(16, BLOCKS, kind[4:], True), drives.manager
elif kind == "pool":
    thing, drive = twin.CPUBackend(16, 8), drives.pool
else:
    thing, drive = twin.policy_class(kind)(BLOCKS), drives.policy

run([partial(drive, thing, random.Random(seed)) for seed in (1, 2)], OffloadError, ValueError)
thing._check()
if kind == "pool":
    assert thing.get_num_free_blocks() == 8
elif drive == drives.manager:
    stats = thing.stats()
    assert stats["resident"] == len(thing)
    assert stats["resident"] + stats["free"] == BLOCKS, stats
    counts = [stats[name] for name in ("lookups", "stored_blocks", "evicted_blocks")]
    assert all(counts), stats
print("standing")
"""

KINDS = (
    *("cpu-lru", "cpu-arc", "cpu-hit-density", "cpu-s3fifo"),
    *("LRUOffloadingManager", "ARCOffloadingManager"),
    *("lru", "arc", "hit-density", "s3fifo"),
    "pool",
)


LOOKERS = """
logging.disable()
KEYS = [number.to_bytes(2, "big") * 16 for number in range(1, 1500)]
watch = Watch(max_rate=1.0, slots=512, deadline=1e-6, policies=("arc",), policy_slots=64)
manager = twin.CPUOffloadingManager(16, 400, kind, watch=watch)
generator = random.Random(1)


def serve():
    first = generator.randrange(len(KEYS) - 60)
    batch = KEYS[first : first + generator.randrange(1, 60)]
    manager.touch(batch)
    hits = manager.lookup(batch)
    manager.prepare_load(batch[:hits])
    manager.complete_load(batch[:hits])
    output = manager.prepare_store(batch)
    if output is not None and generator.random() < 0.9:  # the others become overdue
        manager.complete_store(output.block_hashes_to_store, generator.random() < 0.9)
    if generator.random() < 0.01:
        manager.reset_cache()


run([
    serve,
    lambda: list(samples(watch)),
    lambda: watch.explain(KEYS[::7]),
    watch.overdue,
    watch.open_seconds,
    watch.report,
])
manager._check()
assert watch.counters()["requests"] == manager.stats()["lookups"]
print("standing")
"""


def stand(script: str, twin: ModuleType, kind: str) -> None:
    """Run a script until its deadline; it must find all as it should be."""
    seconds = min(max(0.4, 0.4 * read_budget()), 10.0)
    assert run_script(PRELUDE + script, twin.__name__, kind, str(seconds)) == "standing\n"


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_one_compiled_thing(twins: tuple[ModuleType, ModuleType], kind: str) -> None:
    stand(HAMMER, twins[1], kind)


@pytest.mark.parametrize("policy", ["lru", "hit-density", "arc", "s3fifo"])
def test_threads_that_ask_a_watch_at_work(twin: ModuleType, policy: str) -> None:
    stand(LOOKERS, twin, policy)
