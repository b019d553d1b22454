"""Objects whose construction failed, or was never run: every method says so, and nothing dies."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvoffload.integrations.vllm import KVOffloadManager, KVOffloadPrimaryTier
from kvoffload.integrations.vllm._manager_c import RequestManagerCore
from kvoffload.integrations.vllm._ranked_lru_c import LRURules, RankedLRU
from kvoffload.integrations.vllm._rules_c import ARCRules, ChainRules, UseRules
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after

KEY = bytes(make_offload_key(b"k" * 32, 0))
ARGUMENTS = {
    "key": KEY,
    "keys": [KEY],
    "protected": [KEY],
    "req_context": ReqContext("r"),
    "n": 1,
    "request": None,
    "name": "chunks",
    "success": True,
    "groups": None,
    "context": ScheduleEndContext(("r",), ()),
    "request_id": "r",
    "chunk_ids": [0],
}
CLASSES = [RequestManagerCore, KVOffloadManager, KVOffloadPrimaryTier]
#: What constructs.
CONSTRUCTION = {"_setup", "_require_new"}


def methods(of: type) -> list[str]:
    """Return the names of the methods that the library itself defines, public or not."""
    return sorted(
        {
            name
            for base in of.__mro__
            if base.__module__.startswith("kvoffload.")
            for name, member in vars(base).items()
            if callable(member) and not name.startswith("__") and name not in CONSTRUCTION
        }
    )


def skipping(of: type) -> type:
    return type("Skipping", (of,), {"__init__": lambda self: None})


def failing(of: type) -> type:
    """Return a subclass whose construction fails, and which goes on."""

    def construct(self):
        try:
            super(built, self).__init__(-1)
        except Exception:  # noqa: BLE001 (object.__init__ says TypeError)
            return
        raise AssertionError("the construction has not failed")

    built = type("Failing", (of,), {"__init__": construct})
    return built


@pytest.mark.parametrize("how", [skipping, failing])
@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_every_method_says_that_the_construction_is_missing(of, how):
    made = how(of)()
    tried = methods(of)
    assert len(tried) >= 10
    for name in tried:
        method = getattr(made, name)
        wanted = [one for one in inspect.signature(method).parameters if one != "options"]
        with pytest.raises(RuntimeError, match="is not initialised"):
            method(*[ARGUMENTS[one] for one in wanted])
    if how is skipping:
        with pytest.raises(RuntimeError, match="is not initialised"):
            made._require_ready()


@pytest.mark.parametrize("rules", [LRURules, UseRules, ChainRules, ARCRules])
def test_rules_need_a_policy_that_was_constructed(rules):
    text = {ARCRules: "arc", ChainRules: "hit-density"}.get(rules, "lfu")
    of = RankedLRU if rules is LRURules else registry.load(registry.parse(text).entry, "c")
    with pytest.raises(RuntimeError, match="the policy is not initialised"):
        rules(of.__new__(of))
    with pytest.raises(TypeError):
        rules(None)


@pytest.mark.refused_allocations
def test_a_failed_pool_leaves_no_manager():
    """The policy is there, the pool is not: nothing may be looked up in the first."""

    class Stubborn(KVOffloadManager):
        def __init__(self, allocations):
            fail_after(allocations)
            try:
                super().__init__(64, "arc")
            except MemoryError:
                self.failed = True
            else:
                self.failed = False
            finally:
                fail_after(None)

    failed = 0
    for allocations in range(40):
        manager = Stubborn(allocations)
        if not manager.failed:
            break
        failed += 1
        for call in (lambda: manager.lookup(KEY, ARGUMENTS["req_context"]), manager._check):  # noqa: B023
            with pytest.raises(RuntimeError, match="the manager is not initialised"):
                call()
    assert 3 <= failed < 39
    assert manager.lookup(KEY, ARGUMENTS["req_context"]) is LookupResult.MISS


class Region:
    """Memory of a tier that may be out of order."""

    def __init__(self, broken: bool = False):
        self.broken = broken
        self.memory = bytearray(64)

    def create_kv_memoryview(self) -> memoryview:
        if self.broken:
            raise OSError("no memory to map")
        self.view = memoryview(self.memory)
        return self.view


def test_a_tier_without_its_memory_is_none():
    class Stubborn(KVOffloadPrimaryTier):
        def __init__(self):
            with pytest.raises(OSError, match="no memory"):
                super().__init__(4, Region(broken=True))

    with pytest.raises(RuntimeError, match="the manager is not initialised"):
        Stubborn().lookup(KEY, ARGUMENTS["req_context"])


def test_a_tier_that_is_none_lets_its_memory_go():
    region = Region()
    with pytest.raises(ValueError, match="cache_policy must be one of"):
        KVOffloadPrimaryTier(4, region, "nonesuch")
    region.memory.append(1)  # an error while a view of it is held


@pytest.mark.parametrize("of", [KVOffloadManager, KVOffloadPrimaryTier])
def test_a_manager_is_constructed_once(of):
    """What runs its constructor again changes nothing."""
    context = ReqContext("r")
    arguments = (4,) if of is KVOffloadManager else (4, Region())
    manager = of(*arguments, "arc", enable_events=True)
    manager.prepare_store([KEY], context)
    manager.complete_store([KEY], context)
    with pytest.raises(RuntimeError, match="the manager is initialised already"):
        manager.__init__(*arguments)
    assert manager.lookup(KEY, context) is LookupResult.HIT
    assert list(manager._policy.t1) == [KEY]
    assert [list(event.keys) for event in manager.take_events()] == [[KEY]]
    check_invariants(manager)
