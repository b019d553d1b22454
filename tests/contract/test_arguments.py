"""Arguments of the constructors: types, bounds, and messages that name argument, rule and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload import CachePolicy, OffloadingManager
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, slots, store
from tests.observation import observe
from tests.parts import ListBackend, ListPolicy


class Index:
    """An integer by `operator.index`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.fixture(params=["CPUOffloadingManager", "CPUBackend"])
def construct(twin: ModuleType, request: pytest.FixtureRequest) -> Any:
    """Return a constructor that is given one argument other than usual."""

    def construct(argument: str, value: Any) -> Any:
        return getattr(twin, request.param)(**{"block_size": 16, "num_blocks": 4, argument: value})

    return construct


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("num_blocks", -1, ">= 0, got -1"),
        ("num_blocks", 2**31, "<= 2147483647, got 2147483648"),
        ("block_size", 0, ">= 1, got 0"),
        ("block_size", -3, ">= 1, got -3"),
        *(
            pytest.param(argument, sign * 10**5000, ", got an integer of 16610 bits", id="long")
            for argument in ("num_blocks", "block_size")
            for sign in (-1, 1)
        ),
        ("num_blocks", np.array([[4], [5]]), "an integer, got array([[4], [5]])"),
        *(
            (argument, value, f"an integer, got {value!r}")
            for argument in ("num_blocks", "block_size")
            for value in (True, False, 4.0, "4", None, [4], b"4")
        ),
    ],
)
def test_what_is_no_number_of_blocks_or_tokens(
    construct: Any, argument: str, value: Any, said: str
) -> None:
    kind = TypeError if said.startswith("an integer") else ValueError
    with pytest.raises(kind) as caught:
        construct(argument, value)
    assert str(caught.value).startswith(f"{argument} must be ")
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize("argument", ["num_blocks", "block_size"])
def test_an_integer_by_index_will_do(construct: Any, argument: str) -> None:
    for value in (Index(5), np.int64(5), np.uint8(5)):
        built = construct(argument, value)
        assert built.block_size == (5 if argument == "block_size" else 16)
        assert type(built.block_size) is int


def test_what_index_raises_passes_through(construct: Any) -> None:
    class Failing:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        construct("num_blocks", Failing())


def test_arguments_by_name_by_place_and_by_default(twin: ModuleType) -> None:
    by_default = twin.CPUOffloadingManager(1, 0)
    assert isinstance(by_default.policy, twin.LRUCachePolicy)
    assert (bool(by_default), bool(by_default.policy)) == (True, True)  # although they are empty
    assert by_default.events is twin.LRUOffloadingManager(twin.CPUBackend(16, 4)).events is None
    assert twin.CPUBackend(1, 2**31 - 1).get_num_free_blocks() == 2**31 - 1
    by_place = twin.CPUOffloadingManager(16, 4, "arc", True)
    by_name = twin.CPUOffloadingManager(
        block_size=16, num_blocks=4, cache_policy="arc", enable_events=True
    )
    for manager in (by_place, by_name):
        assert isinstance(manager.policy, twin.ARCCachePolicy)
        assert manager.events == []
    for manager_class in (twin.LRUOffloadingManager, twin.ARCOffloadingManager):
        assert manager_class(twin.CPUBackend(16, 4), True).events == []
        named = manager_class(backend=twin.CPUBackend(16, 4), enable_events=True)
        assert named.events == []


NEAR = {"LRU": "lru", "Arc": "arc", "HitDensity": "hit-density", "S3-FIFO": "s3fifo"}


@pytest.mark.parametrize("name", ["", "no policy?", "no policy", "lru ", "a" * 10_000, *NEAR])
def test_an_unknown_policy_lists_the_known_ones_and_the_nearest(
    twin: ModuleType, name: str
) -> None:
    with pytest.raises(ValueError, match="cache_policy must be one of lru, arc,") as caught:
        twin.CPUOffloadingManager(16, 4, name)
    assert all(known in str(caught.value) for known in registry.names())
    assert len(str(caught.value)) < 500
    if name in NEAR:
        assert f"got '{name}'; did you mean '{NEAR[name]}'" in str(caught.value)


@pytest.mark.parametrize("text", ["lru?", "lru?x", "lru?x=1", "arc?cache_capacity=3", "lru?=1"])
def test_options_that_a_policy_does_not_have(twin: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="option"):
        twin.CPUOffloadingManager(16, 4, text)


def options_of_policies() -> list[tuple[str, registry.Option]]:
    return [(name, option) for name in registry.names() for option in registry.entry(name).options]


@pytest.mark.parametrize(("name", "option"), options_of_policies())
def test_an_option_of_a_policy(twin: ModuleType, name: str, option: registry.Option) -> None:
    """As the text that names a policy has it, and as an argument of its class."""
    policy_class = twin.policy_class(name)
    for value in (option.default, option.minimum, option.maximum):
        policy = twin.CPUOffloadingManager(16, 4, f"{name}?{option.name}={value}").policy
        assert isinstance(policy, policy_class)
        shown = getattr(policy, option.name)
        assert shown == value or not isinstance(shown, int | float)
    for value in (option.minimum - 1, option.maximum + 1, math.nan):
        with pytest.raises(ValueError, match=f"{option.name} must be"):
            twin.CPUOffloadingManager(16, 4, f"{name}?{option.name}={value}")
        with pytest.raises((TypeError, ValueError), match=f"^{option.name} must be"):
            policy_class(4, **{option.name: value})
    for text in ("", "x"):
        with pytest.raises(ValueError, match=option.name):
            twin.CPUOffloadingManager(16, 4, f"{name}?{option.name}={text}")
    for no_number in (None, True, b"0.5", [1]):
        with pytest.raises(TypeError, match=f"^{option.name} must be a"):
            policy_class(4, **{option.name: no_number})


def test_an_option_of_the_wrong_type() -> None:
    whole = registry.Option("whole", 2, 1, 4, "an integer")
    part = registry.Option("part", 0.5, 0.0, 1.0, "a number")
    assert [whole.check(three) for three in ("3", 3, np.int8(3))] == [3] * 3
    assert [part.check(one) for one in ("1", 1, 1.0, np.float32(1))] == [1.0] * 4
    wrong: dict[type[Exception], list[tuple[registry.Option, Any]]] = {
        TypeError: [(whole, 1.5), (whole, True), (part, None), (part, [1])],
        ValueError: [(whole, 5), (whole, "1.5"), (part, "nan"), (part, -0.1)]
        + [(each, 1 << 1024) for each in (whole, part)],
    }
    for error, cases in wrong.items():
        for option, value in cases:
            with pytest.raises(error, match=f"{option.name} must be"):
                option.check(value)


def test_a_policy_string_is_read_and_written() -> None:
    for name in registry.names():
        assert str(registry.parse(name)) == name
        for option in registry.entry(name).options:
            text = f"{name}?{option.name}={option.default}"
            assert str(registry.parse(text)) == text


@pytest.mark.parametrize("name", [None, 5, b"lru", ["lru"]])
@pytest.mark.parametrize("read", [registry.parse, registry.entry])
def test_what_is_no_name_of_a_policy(read: Callable[[Any, str], object], name: Any) -> None:
    with pytest.raises(TypeError, match="policy must be a string"):
        read(name, "policy")


@pytest.mark.parametrize("policy", [None, 5, object, int, b"lru", ["lru"], CachePolicy])
def test_what_is_no_policy(twin: ModuleType, policy: Any) -> None:
    said = "abstract" if policy is CachePolicy else "cache_policy must be"
    with pytest.raises(TypeError, match=said):
        twin.CPUOffloadingManager(16, 4, policy)


def test_missing_and_surplus_arguments(twin: ModuleType) -> None:
    for arguments in ((), (16,), (16, 4, "lru", False, None)):
        with pytest.raises(TypeError):
            twin.CPUOffloadingManager(*arguments)
    with pytest.raises(TypeError):
        twin.CPUOffloadingManager(16, 4, unknown=1)
    manager = twin.CPUOffloadingManager(16, 4)
    for call in (manager.lookup, manager.touch, manager.prepare_store, manager.complete_store):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError):
        manager.lookup([A], [A])


def test_batches_by_name(twin: ModuleType) -> None:
    manager = twin.CPUOffloadingManager(16, 4)
    manager.prepare_store(hashes=[A])
    manager.complete_store(hashes=[A], success=True)
    manager.touch(hashes=[A])
    assert manager.lookup(hashes=[A]) == 1
    assert slots(manager.prepare_load(hashes=[A])) == [0]
    manager.complete_load(hashes=[A])


def managers_with_events(twin: ModuleType, enable_events: Any) -> list[Callable[[], Any]]:
    return [
        lambda: twin.CPUOffloadingManager(16, 4, "lru", enable_events),
        lambda: twin.CPUOffloadingManager(16, 4, enable_events=enable_events),
        lambda: twin.CPUOffloadingManager(16, 4, ListPolicy, enable_events),
        lambda: twin.LRUOffloadingManager(twin.CPUBackend(16, 4), enable_events),
        lambda: twin.ARCOffloadingManager(ListBackend(16, 4), enable_events=enable_events),
    ]


@pytest.mark.parametrize("value", ["no", "yes", "", 0, 1, 1.0, None, [0], np.int8(1)])
def test_what_is_not_true_or_false(twin: ModuleType, value: Any) -> None:
    for build in managers_with_events(twin, value):
        with pytest.raises(TypeError) as caught:
            build()
        assert str(caught.value) == f"enable_events must be True or False, got {value!r}"
    for build in managers_with_events(twin, True):
        manager = build()
        manager.prepare_store([A])
        before = observe(manager)
        with pytest.raises(TypeError) as caught:
            manager.complete_store([A], value)
        assert str(caught.value) == f"success must be True or False, got {value!r}"
        assert observe(manager) == before


def test_true_and_false_may_be_numpys(twin: ModuleType) -> None:
    for build in managers_with_events(twin, np.bool_(True)):
        manager = build()
        assert manager.events == []
        manager.prepare_store([A, B])
        manager.complete_store([A], np.bool_(True))
        manager.complete_store([B], np.bool_(False))
        assert (manager.lookup([A]), len(manager)) == (1, 1)
    for build in managers_with_events(twin, np.bool_(False)):
        assert build().events is None


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("CPUOffloadingManager", (16, 4)),
        ("LRUOffloadingManager", (ListBackend(16, 4),)),
        ("ARCOffloadingManager", (ListBackend(16, 4),)),
    ],
)
def test_an_error_of_the_constructors_form_names_the_public_class(
    twin: ModuleType, name: str, given: tuple[Any, ...]
) -> None:
    for arguments, options in ((given, {"policy": "lru"}), ((), {}), ((*given, *"abcd"), {})):
        with pytest.raises(TypeError) as caught:
            getattr(twin, name)(*arguments, **options)
        assert str(caught.value).startswith(f"{name}.__init__() ")


def test_a_subclass_with_its_own_signature(twin: ModuleType) -> None:
    class Counting(twin.CPUOffloadingManager):  # type: ignore[misc, name-defined]
        def __init__(self, gigabytes: int, *, name: str) -> None:
            super().__init__(16, gigabytes * 4, "arc")
            self.name = name
            self.looked_up = 0

        def lookup(self, hashes: Any) -> int:
            self.looked_up += 1
            return int(super().lookup(hashes))

    manager = Counting(2, name="host")
    assert isinstance(manager, OffloadingManager)
    store(manager, [A])
    assert (manager.lookup([A]), manager.looked_up, manager.name) == (1, 1, "host")
    assert manager.stats()["free"] == 7


def test_a_manager_is_initialised_once(twin: ModuleType) -> None:
    for policy in ("lru", ListPolicy):
        manager = twin.CPUOffloadingManager(16, 4, policy)
        store(manager, [A])
        other = twin.policy_class("lru")(2)
        with pytest.raises(RuntimeError, match="initialised already: build another one"):
            manager.__init__(32, 2, other, True)
        assert (manager.block_size, manager.lookup([A]), manager.events) == (16, 1, None)
        check_invariants(manager)
        other.clear()  # it is free
