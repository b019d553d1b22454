"""The same mistake makes the same error with the same text in both twins.

Those whose whole text is compared on each twin are in ``tests/contract``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus, CachePolicy
from kvoffload.policies import registry
from tests.blocks import A, B, block_hash, store
from tests.contract.test_policies import MISTAKES as OF_POLICIES
from tests.contract.test_policies import filled
from tests.differential.pairs import Twins
from tests.parts import ListBackend

pytestmark = pytest.mark.fast

Mistake = Callable[[ModuleType], Any]
NUMBERS = (-1, 0, True, 1.5, "4", None, 2**31, -(2**70), 10**500, b"4", [4])
NAMES = ("", "LRU", "nonesuch", "lru?", "lru?x", "lru?x=1", "arc?=", "lru?a=1&a=2", "x" * 999)
POLICIES = (None, 5, object, int, b"lru", CachePolicy, ["lru"])


def outcome(twin: ModuleType, mistake: Mistake) -> tuple[str, str]:
    try:
        mistake(twin)
    except Exception as error:  # noqa: BLE001 - whatever it is, the twins must raise the same
        return type(error).__name__, str(error)
    return "returned", ""


def construct(name: str, *arguments: Any) -> Mistake:
    return lambda twin: getattr(twin, name)(*arguments)


def over_backend(name: str, method: str, *arguments: Any) -> Mistake:
    def call(twin: ModuleType) -> Any:
        manager = getattr(twin, name)(twin.CPUBackend(16, 2))
        store(manager, [A])
        manager.prepare_load([A])
        manager.prepare_store([B])
        return getattr(manager, method)(*arguments)

    return call


def on_policy(name: str, method: str, *arguments: Any) -> Mistake:
    return lambda twin: getattr(filled(twin.policy_class(name)), method)(*arguments)


def on_pool(method: str, argument: Any) -> Mistake:
    def call(twin: ModuleType) -> Any:
        pool = twin.CPUBackend(16, 3)
        pool.free(pool.allocate_blocks([A, B])[0])
        return getattr(pool, method)(argument)

    return call


MISTAKES: dict[str, Mistake] = {
    **{f"LRU capacity {n!r:.20}": construct("LRUCachePolicy", n) for n in NUMBERS},
    **{f"ARC capacity {n!r:.20}": construct("ARCCachePolicy", n) for n in NUMBERS},
    **{f"name {n!r:.20}": construct("CPUOffloadingManager", 16, 4, n) for n in NAMES},
    **{f"policy {p!r:.40}": construct("CPUOffloadingManager", 16, 4, p) for p in POLICIES},
    **{f"backend {b!r:.40}": construct("LRUOffloadingManager", b) for b in (None, 5, ListBackend)},
    **{f"ARC backend {b!r:.40}": construct("ARCOffloadingManager", b) for b in (None, 5, int)},
    **{
        f"{name} {method} {len(key)} bytes": over_backend(name, method, [A, key])
        for name in ("LRUOffloadingManager", "ARCOffloadingManager")
        for method in ("prepare_load", "complete_load")
        for key in (b"\0", block_hash(9), block_hash(9, 33), block_hash(9, 5000))
    },
    **{
        f"pool {method} {argument!r:.40}": on_pool(method, argument)
        for method, arguments in (
            ("free", [None, 5, b"x", *map(BlockStatus, (-2, -1, 0, 2, 3, 9, 2**40))]),
            ("allocate_blocks", [[b""], [A, 5], None, 5, b"x", [A, B, A]]),
        )
        for argument in arguments
    },
    **{
        f"{call} {value!r}": over_backend("ARCOffloadingManager", call, *given)
        for call, *given in (
            ("prepare_load", [A, B]),
            ("complete_load", [B]),
            ("lookup", [A, 5]),
            ("complete_store", 5, "no"),
            ("lookup", b"abc"),
            ("touch", "abc"),
            ("prepare_store", bytearray(b"abc")),
            ("prepare_store", [A, b""]),
        )
        for value in (given[-1],)
    },
    "pins": over_backend("LRUOffloadingManager", "complete_load", [A, A]),
    "hashes and hints": lambda twin: twin.CPUOffloadingManager(16, 2).begin(5, hints=5),
    "an unknown attribute": lambda twin: twin.CPUOffloadingManager(16, 2).nonesuch,
    **{
        f"{name} {option.name} out of bounds": (
            lambda twin, n=name, o=option: twin.policy_class(n)(-1, **{o.name: o.maximum + 1})
        )
        for name in registry.names()
        for option in registry.entry(name).options
    },
    **{
        f"{name} {method} {number}": on_policy(name, method, *arguments)
        for name in registry.names()
        for number, (method, arguments, *_) in enumerate(OF_POLICIES)
    },
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_same_mistake_makes_the_same_error(twins: Twins, mistake: Mistake) -> None:
    python, compiled = (outcome(twin, mistake) for twin in twins)
    assert compiled == python
