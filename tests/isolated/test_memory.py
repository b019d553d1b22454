"""When an allocation fails: MemoryError, nothing changed, and the next call works."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvoffload.policies import registry
from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

ONE_IN_EACH_CHANGE = [
    pytest.param(name, marks=[] if name == "arc" else pytest.mark.nightly)
    for name in registry.names()
]

PRELUDE = """
import gc
import importlib
import os
import sys

twin = importlib.import_module("tests._compiled")
name = sys.argv[1]
gc.disable()
from kvoffload import BlockStatus, Hints
from tests.allocations import fail_after
from tests.observation import observe
from tests.policies.steps import idle, policy_of

KEYS = [bytes([number]) * (32 if number % 2 else 40) for number in range(1, 13)]
MANY = [number.to_bytes(4, "big") * (10 if number % 3 == 0 else 4) for number in range(3000)]


def manager():
    built = twin.CPUOffloadingManager(16, 6, name, True)
    built.prepare_store(KEYS[:6])
    built.complete_store(KEYS[:5])
    built.prepare_load(KEYS[:1])
    built.touch(KEYS[:3])
    return built


def policy():
    return policy_of(twin, name, 6, KEYS[:6])


def requested(loaded=False, stored=False, ends=False):
    built = manager()
    built.release(KEYS[4:6] if ends else [])
    built.served = built.begin([*KEYS[1:4], *KEYS[6:8]], hints=Hints(ends=ends))
    if loaded:
        built.served.prepare_load(0, 3)
    if stored:
        built.complete_store(KEYS)
        built.served.prepare_store()
    return built


def released():
    built = manager()
    built.release(KEYS[1:5])
    return built


def hinted():
    built = manager()
    built.served = built.begin([*KEYS[1:4], *KEYS[6:8]], hints=RETURNS, now=1.0)
    built.complete_store(KEYS)
    return built


ENDS = Hints(ends=True)
RETURNS = Hints(expect_s=2.5, source="one")
OTHERS = Hints(expect_s=9.0, source="other")
CALLS = {
    "begin": (manager, lambda m: m.begin(MANY)),
    "request load": (requested, lambda m: m.served.prepare_load(0, 3)),
    "request loaded": (lambda: requested(loaded=True), lambda m: m.served.complete_load(0, 3)),
    "request store": (requested, lambda m: m.served.prepare_store()),
    "request stored": (lambda: requested(stored=True), lambda m: m.served.complete_store()),
    "request failed": (lambda: requested(stored=True), lambda m: m.served.complete_store(False)),
    "request extended": (requested, lambda m: m.served.extend(MANY)),
    "request finished": (requested, lambda m: m.served.finish()),
    "request ended": (requested, lambda m: m.served.finish(hints=ENDS)),
    "last store": (lambda: requested(ends=True), lambda m: m.served.prepare_store()),
    "begin with a hint": (manager, lambda m: m.begin(MANY, hints=RETURNS, now=1.0)),
    "request finished with a hint": (requested, lambda m: m.served.finish(hints=RETURNS)),
    "begin of another source": (hinted, lambda m: m.begin(KEYS[:4], hints=OTHERS, now=3.0)),
    "hinted load": (hinted, lambda m: m.served.prepare_load(0, 3)),
    "hinted store": (hinted, lambda m: m.served.prepare_store()),
    "hinted finished": (hinted, lambda m: m.served.finish(hints=OTHERS, now=4.0)),
    "store behind hints": (hinted, lambda m: m.prepare_store(KEYS[8:12])),
    "release of hinted": (hinted, lambda m: m.release(KEYS)),
    "release": (manager, lambda m: m.release(KEYS[:6] + MANY)),
    "store for released": (released, lambda m: m.prepare_store(KEYS[6:9])),
    "touch of released": (released, lambda m: m.touch(KEYS)),
    "lookup": (manager, lambda m: m.lookup(MANY)),
    "touch": (manager, lambda m: m.touch(MANY)),
    "prepare_load": (manager, lambda m: m.prepare_load(KEYS[:5] * 100)),
    "complete_load": (manager, lambda m: m.complete_load(KEYS[:1])),
    "store": (manager, lambda m: m.prepare_store(KEYS[6:9])),
    "store long": (manager, lambda m: m.prepare_store([b"l" * 500, b"m" * 600])),
    "store refused": (manager, lambda m: m.prepare_store(MANY[:300])),
    "complete": (manager, lambda m: m.complete_store(KEYS)),
    "fail": (manager, lambda m: m.complete_store(KEYS, False)),
    "events": (manager, lambda m: m.take_events()),
    "reset": (manager, lambda m: m.reset_cache()),
    "get": (manager, lambda m: m.policy.get(KEYS[0])),
    "table": (manager, lambda m: m.block_table.tolist()),
    "stats": (manager, lambda m: m.stats()),
    "policy insert": (policy, lambda p: p.insert(b"n" * 99, BlockStatus(9))),
    "policy evict": (policy, lambda p: p.evict(3, KEYS[:2])),
    "policy touch": (policy, lambda p: p.touch(MANY)),
    "policy make_room": (policy, lambda p: p.make_room(KEYS[6:8], 0, KEYS[:1])),
    "policy begun": (policy, lambda p: p.begun(MANY, RETURNS)),
    "policy finished": (policy, lambda p: p.finished(KEYS, RETURNS)),
    "policy release": (policy, lambda p: p.release(KEYS)),
    "policy clear": (policy, lambda p: p.clear()),
}


def failures(build, call, fail, restore, most, stops):
    # One call with the n-th allocation failing, for every n; where `stops`, until none fails.
    failed = 0
    for n in range(most):
        thing = build()
        before = observe(thing)
        refused = False
        fail(n)
        try:
            call(thing)
        except MemoryError:
            refused = True
        finally:
            restore()
        thing._check()
        if not refused and stops:
            return failed
        if not refused:
            continue
        failed += 1
        assert observe(thing) == before, f"allocation {n}"
        if hasattr(thing, "served"):
            assert len(thing.served) == 5 and not thing.served.is_finished
        call(thing)
        thing._check()
    assert not stops, "an allocation fails however late it is"
    return failed


def survive(*how):
    # Every call with failing allocations; return how many failed.
    total = 0
    for label, (build, call) in CALLS.items():
        try:
            total += failures(build, call, *how)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error
    return total
"""

C_ALLOCATIONS = """
total = survive(fail_after, lambda: fail_after(None), 400, True)
assert total >= 8, total
for construct in (lambda: twin.CPUOffloadingManager(16, 4, name), lambda: twin.CPUBackend(16, 4),
                  lambda: twin.policy_class(name)(4)):
    for n in range(50):
        fail_after(n)
        try:
            construct()
        except MemoryError:
            continue
        finally:
            fail_after(None)
        break
    assert 0 < n < 49, n
print("nothing changed")
"""

UNFINISHED = """
# A constructor with the n-th allocation failing leaves an object that says so, whatever is called.
CALLS = {
    "get": [KEYS[0]], "insert": [KEYS[0], BlockStatus(0)], "remove": [KEYS[0]], "touch": [KEYS],
    "evict": [1, KEYS], "make_room": [KEYS, 0, KEYS], "clear": [], "_check": [], "__len__": [],
    "get_num_free_blocks": [], "allocate_blocks": [KEYS], "free": [BlockStatus(0)],
    "lookup": [KEYS], "prepare_store": [KEYS], "complete_store": [KEYS], "prepare_load": [KEYS],
    "complete_load": [KEYS], "take_events": [], "reset_cache": [], "stats": [],
    "__contains__": [KEYS[0]],
}
failed = 0
for cls, arguments in ((twin.policy_class(name), (6,)), (twin.CPUBackend, (16, 6)),
                       (twin.CPUOffloadingManager, (16, 6, name))):
    for fail, restore in kinds:
        for again in (False, True)[: 1 if cls is twin.CPUOffloadingManager else 2]:
            for n in range(60):
                thing = cls.__new__(cls)
                if again:
                    thing.__init__(*arguments)
                fail(n)
                try:
                    thing.__init__(*arguments)
                    refused = False
                except MemoryError:
                    refused = True
                except RuntimeError as error:  # Python 3.10's import of what is loaded already
                    assert str(error) == "can't allocate lock", error
                    refused = True
                except SystemError as error:  # Python 3.13's id
                    assert "id> returned a result with an exception set" in str(error), error
                    refused = True
                finally:
                    restore()
                if not refused:
                    break
                failed += 1
                if again:
                    try:
                        thing._check()
                        continue  # the old state is there, whole
                    except RuntimeError:
                        pass
                for method, given in CALLS.items():
                    if not hasattr(cls, method):
                        continue
                    try:
                        getattr(thing, method)(*given)
                    except RuntimeError as error:
                        assert "not initialised" in str(error), error
                    else:
                        raise AssertionError((cls, again, n, method))
assert failed > 8, failed
print("nothing works", flush=True)
if sys.version_info[:2] == (3, 13):
    # Where it had no memory CPython 3.13.0 has broken what it meets again as it ends.
    os._exit(0)
"""

LATE = """
# A store that fails when victims were chosen leaves nothing that a policy without its manager
# would use.
import _testcapi

def keys(first, count):
    return [number.to_bytes(4, "big") * 8 for number in range(first, first + count)]

def full():
    built = twin.CPUOffloadingManager(16, 6, name)
    built.prepare_store(KEYS[:6])
    built.complete_store(KEYS[:6])
    built.touch(keys(100, 30))
    return built

def later(policy):
    # What the next search finds, and what is known of blocks that were to be stored.
    first = policy.evict(1, ())
    assert len(first) == 1
    policy.touch(keys(200, 2))
    policy.touch(keys(100, 30)[::-1])
    for key in keys(100, 30):
        policy.insert(key, idle(9))
    policy._check()
    return [key for key, _ in first], observe(policy)

declines = name == "hit-density"
failures = 0
for n in range(80):
    built = full()
    _testcapi.set_nomemory(n, n + 1)
    try:
        built.prepare_store(keys(100, 30 if declines else 3))
        refused = False
    except MemoryError:
        refused = True
    finally:
        _testcapi.remove_mem_hooks()
    if not refused:
        continue
    failures += 1
    before = observe(built.policy)
    policy = built.policy
    del built
    assert observe(policy) == before
    same = full().policy
    assert later(policy) == later(same)
assert failures, failures
print("nothing is left")
"""

GROWTH = """
pool = twin.CPUBackend(16, 6)
spared = 0
for n in range(40):
    grown = twin.policy_class(name)(2)
    fail_after(n)
    failures = 0
    for number, key in enumerate(MANY):
        try:
            grown.insert(key, BlockStatus(number))
        except MemoryError:
            failures += 1
            assert grown.get(key) is None
            fail_after(None)
            grown._check()
            grown.insert(key, BlockStatus(number))
    fail_after(None)
    assert len(grown) == len(MANY)
    grown._check()
    spared += failures
assert spared > 5, spared
print("nothing changed")
"""

PYTHON_ALLOCATIONS = """
import _testcapi

total = survive(lambda n: _testcapi.set_nomemory(n, n + 1), _testcapi.remove_mem_hooks, 120, False)
assert total > 50, total
print("nothing changed")
"""


@pytest.mark.refused_allocations
@pytest.mark.parametrize("policy", registry.names())
def test_a_failing_allocation_of_ours_changes_nothing(
    twins: tuple[ModuleType, ModuleType], policy: str
) -> None:
    assert run_script(PRELUDE + C_ALLOCATIONS, policy) == "nothing changed\n"


@pytest.mark.refused_allocations
@pytest.mark.parametrize("policy", registry.names())
def test_a_failing_allocation_while_the_storage_grows(
    twins: tuple[ModuleType, ModuleType], policy: str
) -> None:
    assert run_script(PRELUDE + GROWTH, policy) == "nothing changed\n"


OURS = "kinds = [(fail_after, lambda: fail_after(None))]\n"
PYTHONS = """
import _testcapi
kinds = [(lambda n: _testcapi.set_nomemory(n, n + 1), _testcapi.remove_mem_hooks)]
"""


@pytest.mark.parametrize(
    "whose", [pytest.param("ours", marks=pytest.mark.refused_allocations), "python's"]
)
@pytest.mark.parametrize("policy", registry.names())
def test_an_object_whose_construction_failed_says_so(
    twins: tuple[ModuleType, ModuleType], policy: str, whose: str
) -> None:
    if whose != "ours":
        pytest.importorskip("_testcapi", reason="this Python cannot make its allocations fail")
    script = PRELUDE + (OURS if whose == "ours" else PYTHONS) + UNFINISHED
    assert run_script(script, policy) == "nothing works\n"


@pytest.mark.parametrize("policy", ONE_IN_EACH_CHANGE)
def test_a_store_that_failed_late_leaves_nothing_to_the_next_search(
    twins: tuple[ModuleType, ModuleType], policy: str
) -> None:
    pytest.importorskip("_testcapi", reason="this Python cannot make its allocations fail")
    # What is freed is overwritten at once, so that its use is seen.
    said = run_script(PRELUDE + LATE, policy, environment={"PYTHONMALLOC": "debug"})
    assert said == "nothing is left\n"


@pytest.mark.parametrize("policy", ONE_IN_EACH_CHANGE)
def test_a_failing_allocation_of_pythons_changes_nothing(
    twins: tuple[ModuleType, ModuleType], policy: str
) -> None:
    pytest.importorskip("_testcapi", reason="this Python cannot make its allocations fail")
    assert run_script(PRELUDE + PYTHON_ALLOCATIONS, policy) == "nothing changed\n"


def test_more_blocks_than_memory_is_a_memory_error(twin: ModuleType) -> None:
    script = """
    import importlib, resource, sys
    twin = importlib.import_module(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (1 << 31, resource.RLIM_INFINITY))
    for name in sys.argv[2:]:
        try:
            manager = twin.CPUOffloadingManager(16, 2**31 - 1, name)
        except MemoryError:
            continue
        assert manager.prepare_store([b"x"]).store_spec.block_ids.tolist() == [0]
    print("alive")
    """
    assert run_script(script, twin.__name__, *registry.names()) == "alive\n"
