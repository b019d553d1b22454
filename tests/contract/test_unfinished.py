"""Objects whose construction failed, or was never run, say so, whatever is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest

from kvoffload import Backend, BlockStatus
from kvoffload.policies import registry
from tests.blocks import METHODS, A, B
from tests.parts import ListBackend

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*METHODS, "begin", "begun", "finished", "allocate_blocks"), ([A],)),
    **dict.fromkeys(("take_events", "reset_cache", "stats", "clear", "get_num_free_blocks"), ()),
    **dict.fromkeys(("_check", "__len__"), ()),
    **dict.fromkeys(("get", "remove", "__contains__"), (A,)),
    "insert": (A, BlockStatus(0)),
    "evict": (1, ()),
    "make_room": ([A, B], 0, ()),
    "free": (BlockStatus(0),),
    "get_load_store_spec": ([A], [BlockStatus(0)]),
    "set_declining": (True,),
}
"""Arguments of each method; every method of every class below is here."""

DO_NOTHING = ("missed", "inserted")
"""Hooks of policies that do nothing, whatever the object."""

BEFORE_ARGUMENTS = (
    *("lookup", "touch", "prepare_store", "complete_store", "release"),
    *("get", "evict", "free"),
)
"""Methods whose arguments would be refused, too."""

MANAGERS = ("CPUOffloadingManager", "LRUOffloadingManager", "ARCOffloadingManager")


def classes(twin: ModuleType) -> list[tuple[type, tuple[Any, ...]]]:
    """Return every public class of a twin, with arguments that its constructor refuses."""
    policies = [(twin.policy_class(name), (-1,)) for name in registry.names()]
    with_options = [
        (twin.policy_class(name), (4, {option.name: option.maximum + 1}))
        for name in registry.names()
        for option in registry.entry(name).options
    ]
    managers = [(getattr(twin, name), (None,)) for name in MANAGERS[1:]]
    return [
        *policies,
        *with_options,
        *managers,
        (twin.CPUOffloadingManager, (16, 4, "lru?nonesuch=1")),
        (twin.CPUBackend, (16, -1)),
        (twin.CPUBackend, (0, 4)),
    ]


def never_run(cls: type, arguments: tuple[Any, ...]) -> Any:
    return cls.__new__(cls)


def skipped(cls: type, arguments: tuple[Any, ...]) -> Any:
    class Forgetful(cls):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    return Forgetful()


def failed(cls: type, arguments: tuple[Any, ...]) -> Any:
    class Failing(cls):  # type: ignore[misc]
        def __init__(self) -> None:
            options = arguments[-1] if isinstance(arguments[-1], dict) else {}
            with suppress(TypeError, ValueError):
                super().__init__(*arguments[: len(arguments) - bool(options)], **options)

    return Failing()


def questions(cls: type) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return a call of each public method and attribute."""
    found: list[tuple[str, Callable[[Any], Any]]] = []
    for name in dir(cls):
        if name in DO_NOTHING or (name.startswith("_") and name not in ARGUMENTS):
            continue
        if callable(getattr(cls, name)):
            given = ARGUMENTS[name]
            found.append((name, lambda thing, n=name, g=given: getattr(thing, n)(*g)))
        else:
            found.append((name, lambda thing, n=name: getattr(thing, n)))
    return found


@pytest.mark.parametrize("make", [never_run, skipped, failed])
def test_an_unfinished_object_says_so_before_it_looks_at_arguments(
    twin: ModuleType, make: Any
) -> None:
    for cls, arguments in classes(twin):
        asked = questions(cls)
        assert len(asked) > 5
        for name, ask in asked:
            thing = make(cls, arguments)
            with pytest.raises(RuntimeError, match="is not initialised: call super") as caught:
                ask(thing)
            assert type(caught.value) is RuntimeError, (cls, name)
        for name in BEFORE_ARGUMENTS:
            if hasattr(cls, name):
                with pytest.raises(RuntimeError, match="is not initialised"):
                    getattr(thing, name)(*(object() for _ in ARGUMENTS[name]))
        assert not hasattr(thing, "nonesuch")
        with pytest.raises(AttributeError, match="object has no attribute 'nonesuch'"):
            _ = thing.nonesuch


def test_an_unfinished_object_can_be_finished(twin: ModuleType) -> None:
    for name in registry.names():
        policy = failed(twin.policy_class(name), (-1,))
        twin.policy_class(name).__init__(policy, 4)
        assert policy.get(A) is None
    backend = failed(twin.CPUBackend, (16, -1))
    twin.CPUBackend.__init__(backend, 16, 4)
    assert backend.get_num_free_blocks() == 4


def test_an_unfinished_part_is_no_part(twin: ModuleType) -> None:
    shown = repr(never_run(twin.CPUOffloadingManager, ()))
    assert shown == "<CPUOffloadingManager, not initialised>"
    for name in registry.names():
        with pytest.raises(RuntimeError, match="the policy is not initialised"):
            twin.CPUOffloadingManager(16, 4, never_run(twin.policy_class(name), ()))
    for manager in MANAGERS[1:]:
        with pytest.raises(RuntimeError, match="the backend is not initialised"):
            getattr(twin, manager)(never_run(twin.CPUBackend, ()))


@pytest.mark.parametrize("manager", MANAGERS[1:])
@pytest.mark.parametrize("events", [False, True])
def test_a_users_backend_that_skips_the_bases_constructor_is_refused_at_once(
    twin: ModuleType, manager: str, events: bool
) -> None:
    class Forgetful(ListBackend):
        def __init__(self) -> None:
            self.unused = [0, 1]
            self.allocated, self.freed, self.asked = [], [], []

    class WithItsOwn(Forgetful):
        block_size = 16
        medium = "SHELF"

    for name in ("block_size", "medium"):
        with pytest.raises(RuntimeError, match="the backend is not initialised"):
            getattr(Forgetful(), name)
    with pytest.raises(RuntimeError, match="the backend is not initialised"):
        getattr(twin, manager)(Forgetful(), events)
    own = getattr(twin, manager)(WithItsOwn(), events)
    assert (own.block_size, own.medium) == (16, "SHELF")


def test_a_backend_says_what_it_does_not_have(twin: ModuleType) -> None:
    backends: list[Backend] = [twin.CPUBackend(16, 4), ListBackend(16, 4)]
    for backend in backends:
        with pytest.raises(AttributeError) as caught:
            _ = backend.nonesuch  # type: ignore[attr-defined]
        assert str(caught.value) == (
            f"{type(backend).__name__!r} object has no attribute 'nonesuch'"
        )
