"""Requests: each of their calls is a bare call of the manager, to the block."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from kvoffload import (
    BlockHash,
    Hints,
    OffloadError,
    Request,
    RequestFinishedError,
)
from kvoffload.managers import calls
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, block_hashes, names, store
from tests.conftest import read_budget
from tests.contract.conftest import DISTINCT_KINDS, Build
from tests.contract.test_machine import Modelled, agree, modelled
from tests.observation import observe
from tests.parts import ListPolicy
from tests.policies.models import MODELS
from tests.strategies import KEYS


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("lookup", ()),
        ("prepare_load", (0, 1)),
        ("prepare_store", ()),
        ("extend", ([C],)),
        ("__enter__", ()),
    ],
)
def test_a_finished_request_does_no_more(
    build: Build, call: str, arguments: tuple[Any, ...]
) -> None:
    manager = build(4)
    store(manager, [A, B])
    request = manager.begin([A, B])
    request.finish()
    before = observe(manager)
    request.finish(hints=Hints(ends=True))  # does nothing
    name = "with" if call == "__enter__" else call
    with pytest.raises(RequestFinishedError, match=f"^{name}: the request has finished$") as error:
        getattr(request, call)(*arguments)
    assert isinstance(error.value, OffloadError | RuntimeError)
    assert observe(manager) == before


def prompt(chance: random.Random) -> list[BlockHash]:
    """Return the blocks on a way from the root of a tree, so that prompts go on and branch off."""
    way = [0]
    for _ in range(chance.randrange(5)):
        way.append(2 * way[-1] + chance.choice((1, 1, 1, 2)))
    return [KEYS[number % len(KEYS)] for number in way]


def calling(manager: Modelled, chance: random.Random) -> Callable[[Any], Iterator[bytes]]:
    """Return a form of a batch: an iterator that makes a call before its last block.

    The call that reads it must see what the inner one has left, which is made on the model, too.
    """

    def form(batch: list[BlockHash]) -> Iterator[bytes]:
        yield from batch[:-1]
        call_the_manager(manager, chance.choice(list(ON_A_MANAGER)), prompt(chance), chance)
        yield from batch[-1:]

    return form


def call_the_manager(
    manager: Modelled, step: str, batch: list[BlockHash], chance: random.Random
) -> None:
    """Make a call that belongs to no request."""
    method = ON_A_MANAGER[step]
    if method == "end":
        own, num_last = batch[chance.randrange(6) :], chance.randrange(1, 3)
        calls.end(manager.both[0], batch, own, num_last)
        manager.model.end(batch, own, num_last)
    elif method == "reset_cache":
        manager.do(method)
    else:
        form = calling(manager, chance) if chance.random() < 0.2 else None
        manager.do(method, batch, form=form)


def take_a_step(manager: Modelled, requests: list[Modelled], chance: random.Random) -> None:
    """Make a call on a manager, or on one of its requests, and on the model of it."""
    batch = chance.choices(KEYS[:8], k=chance.randrange(6))
    batch = prompt(chance) + batch[:1] * (len(batch) > 4) if chance.random() < 0.7 else batch
    step = chance.choice(STEPS) if requests else "begin"
    if step == "begin":
        requests.append(manager.begin(batch, chance.choice(HINTS)))
        return
    if step in ON_A_MANAGER:
        call_the_manager(manager, step, batch, chance)
        return
    request = chance.choice(requests)
    start = chance.randrange(request.size + 1)
    stop = min(request.size, start + chance.randrange(4))
    if step == "end loads":
        request.do("complete_load", start, stop)
    elif step == "end stores":
        request.do("complete_store", chance.random() < 0.8)
    elif request.both[0].is_finished:
        requests.remove(request)
    elif step == "load":
        request.do("prepare_load", *chance.choice(((start, stop), (0, request.model.num_ready()))))
    elif step == "store":
        request.do("prepare_store", *chance.choice(((start, stop), (0, request.size))))
    elif step == "look up":
        request.do("lookup", start)
    elif step == "load from a tier":
        if manager.do("prepare_load", request.model.hashes[start:stop]):
            calls.note_loaded(request.both[0], start, stop)
            request.model.note_loaded(start, stop)
    elif step == "store from a tier":
        calls.note_own(request.both[0], start)
        request.model.note_own(start)
    elif step == "extend":
        request.do("extend", batch, form=chance.choice((None, calling(manager, chance))))
    else:
        request.finish(chance.choice(HINTS))


STEPS = [
    *("begin", "load", "load", "end loads", "end loads", "store", "store", "store"),
    *(
        "end stores",
        "end stores",
        "end stores",
        "look up",
        "extend",
        "finish",
        "finish",
        "store others",
        "end others",
    ),
    *("look up others", "load others", "end other loads", "release", "touch", "serve at once"),
    *("load from a tier", "store from a tier", "reset"),
]
HINTS = (None, None, Hints(), Hints(ends=True))
ON_A_MANAGER = {
    "look up others": "lookup",
    "load others": "prepare_load",
    "end other loads": "complete_load",
    "store others": "prepare_store",
    "end others": "complete_store",
    "release": "release",
    "touch": "touch",
    "serve at once": "end",
    "reset": "reset_cache",
}
"""Methods of a manager, or of `calls`, by step."""


@pytest.mark.parametrize(
    "kind", [*DISTINCT_KINDS[1:], "user-rebuilt-policy", *(f"cpu-{name}" for name in MODELS)]
)
def test_requests_in_any_order_do_what_their_models_do(
    twin: ModuleType, kind: str, seed: int
) -> None:
    for number in range(max(4, round(16 * read_budget()))):
        chance = random.Random(f"{seed} {number}")
        manager = modelled(twin, kind, chance.choice((1, 2, 4, 8, 12, 20)), True)
        requests: list[Modelled] = []
        for _ in range(84):
            for _ in range(3):
                take_a_step(manager, requests, chance)
            agree(manager.both[0], manager.model)  # what differs stays
            check_invariants(manager.both[0])


@pytest.mark.parametrize("kind", DISTINCT_KINDS)
def test_loads_of_parts_that_overlap_end_over_resets_as_in_the_model(
    twin: ModuleType, kind: str, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        manager = modelled(twin, kind, 8, False)
        requests = [manager.begin(KEYS[:7], None) for _ in range(2)]
        for number in range(60):
            if number == 0 or chance.random() < 0.1:
                manager.do("reset_cache")
                manager.do("prepare_store", KEYS[:7])
                manager.do("complete_store", KEYS[: chance.choice((6, 7, 7))])
            start, stop = sorted(chance.randrange(8) for _ in range(2))
            method = chance.choice(("prepare_load", "complete_load", "complete_load"))
            chance.choice(requests).do(method, start, stop)
            agree(manager.both[0], manager.model)


def test_a_block_that_raises_finishes_the_request(build: Build) -> None:
    manager = build(4)
    with pytest.raises(KeyError), manager.begin([A]) as request:
        raise KeyError("the engine's own")
    assert request.is_finished


PARTS: list[tuple[Any, Any, type[Exception], str]] = [
    (-1, 2, ValueError, "start must be >= 0, got -1"),
    (3, 3, ValueError, "start must be <= 2, got 3"),
    (1, 0, ValueError, "stop must be >= 1, got 0"),
    (0, 3, ValueError, "stop must be <= 2, got 3"),
    (0, 2**70, ValueError, "stop must be <= 2, got"),
    (True, 2, TypeError, "start must be an integer, got True"),
    (0.0, 2, TypeError, "start must be an integer, got 0.0"),
    (0, "2", TypeError, "stop must be an integer, got '2'"),
]
BEGINS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hashes": [A, b""]}, ValueError, r"hashes\[1\] must not be empty"),
    ({"hashes": [A, "text"]}, TypeError, r"hashes\[1\] must be bytes"),
    ({"hashes": A}, TypeError, "hashes must be an iterable of block hashes"),
    ({"hashes": 5}, TypeError, "hashes must be an iterable of block hashes"),
    ({"hints": {"ends": True}}, TypeError, "hints must be Hints or None"),
    ({"now": "noon"}, TypeError, "now must be a number or None, got 'noon'"),
    ({"now": float("nan")}, ValueError, "now must be finite, got nan"),
    ({"now": -1 << 1024}, ValueError, "now must be finite, got an integer"),
]
HINTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ends": 1}, TypeError, "ends must be True or False, got 1"),
    ({"expect_s": "2"}, TypeError, "expect_s must be a number or None, got '2'"),
    ({"expect_s": True}, TypeError, "expect_s must be a number or None, got True"),
    ({"expect_s": 0}, ValueError, "expect_s must be finite and > 0, got 0"),
    ({"expect_s": -1.0}, ValueError, "expect_s must be finite and > 0, got -1.0"),
    ({"expect_s": float("inf")}, ValueError, "expect_s must be finite and > 0, got inf"),
    ({"expect_s": 1 << 1024}, ValueError, "expect_s must be finite and > 0, got an integer"),
    ({"expect_s": float("nan")}, ValueError, "expect_s must be finite and > 0, got nan"),
    ({"source": b"x"}, TypeError, "source must be a string, got bytes"),
    ({"source": "x" * 65}, ValueError, "source must have at most 64 characters, got 65"),
]
MISTAKES: list[tuple[Callable[[Any, Any], object], type[Exception], str]] = [
    *(
        (lambda _, request, m=method, p=part: getattr(request, m)(*p), error, text)
        for *part, error, text in PARTS
        for method in ("prepare_load", "complete_load", "prepare_store")
    ),
    *(
        (lambda _, request, start=start: request.lookup(start), error, text)
        for start, stop, error, text in PARTS
        if stop == 2
    ),
    *(
        (lambda manager, _, given=given: manager.begin(**{"hashes": [A]} | given), error, text)
        for given, error, text in BEGINS
    ),
    *((lambda *_, given=given: Hints(**given), error, text) for given, error, text in HINTED),
    (lambda _, request: request.extend([B, b""]), ValueError, r"hashes\[1\] must not be empty"),
    (lambda _, request: request.finish(hints=5), TypeError, "hints must be Hints or None, got 5"),
    (lambda _, request: request.complete_store(1), TypeError, "success must be True or False"),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_a_mistake_is_named_and_changes_nothing(
    build: Build, call: Callable[[Any, Any], object], error: type[Exception], text: str
) -> None:
    manager = build(4)
    store(manager, [A, B])
    request = manager.begin([A, B])
    before = observe(manager)
    with pytest.raises(error, match=text):
        call(manager, request)
    assert observe(manager) == before
    assert request.hashes == (A, B)
    assert not request.is_finished
    assert Hints(expect_s=2, source="x" * 64).expect_s == 2


def test_the_caller_s_list_is_copied(build: Build) -> None:
    manager = build(4)
    batch = [A, B]
    request = manager.begin(batch)
    batch[:] = [C, D, E]
    assert request.hashes == (A, B)
    output = request.prepare_store()
    output.block_hashes_to_store.clear()
    request.complete_store()
    assert request.lookup() == 2


def test_a_request_keeps_its_manager(build: Build) -> None:
    manager = build(4)
    store(manager, [A])
    watched = weakref.ref(manager)
    request = manager.begin([A, B])
    del manager
    assert watched() is not None
    assert request.lookup() == 1
    assert names(request.prepare_store().block_hashes_to_store) == "B"
    del request
    gc.collect()
    assert watched() is None


def test_a_repr_tells_the_state(build: Build) -> None:
    request = build(4).begin([A])
    assert isinstance(request, Request)
    assert bool(build(4).begin([]))  # it is more than its blocks
    assert repr(request) == "<Request of 1 block, open>"
    request.extend([B])
    request.finish()
    assert repr(request) == "<Request of 2 blocks, finished>"


def test_an_iterator_may_call_the_manager_and_the_request(build: Build) -> None:
    manager = build(4)
    store(manager, [A, B])

    def ends_it(request: Any) -> Iterator[bytes]:
        yield C
        request.finish()
        yield D

    def stores(*batch: bytes) -> Iterator[bytes]:
        for block in batch:
            store(manager, [block])
            yield block

    request = manager.begin(stores(C, D, E))
    assert request.lookup() == 3
    with pytest.raises(RequestFinishedError, match=r"^extend: "):
        request.extend(ends_it(request))
    assert request.hashes == (C, D, E)
    check_invariants(manager)


def test_a_bound_may_call_the_request(build: Build) -> None:
    manager = build(6)
    store(manager, [A, B])
    request = manager.begin([A, B])

    class Extends:
        def __index__(self) -> int:
            request.extend(block_hashes(*range(100, 400)))
            return 1

    assert request.lookup(Extends()) == 1
    assert len(request) == 302
    check_invariants(manager)


def test_a_request_is_begun_by_a_manager_alone(twin: ModuleType) -> None:
    request = twin.CPUOffloadingManager(16, 4).begin([A])
    with pytest.raises(TypeError):
        type(request)()
    with pytest.raises(TypeError, match="cannot pickle"):
        request.__reduce__()


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_a_request_makes_the_calls_of_a_subclass(twin: ModuleType, name: str) -> None:
    made: list[str] = []

    def passed_on(method: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            made.append(method)
            return getattr(twin.CPUOffloadingManager, method)(self, *arguments)

        return call

    methods = ["touch", "lookup", "prepare_load", "complete_load", "prepare_store"]
    own = {method: passed_on(method) for method in [*methods, "complete_store"]}
    manager = type("Own", (twin.CPUOffloadingManager,), own)(16, 4, name)
    plain = twin.CPUOffloadingManager(16, 4, name)
    for each in (manager, plain):
        for _ in range(2):
            with each.begin([A, B]) as request:
                found = request.lookup()
                request.prepare_load(0, found)
                request.complete_load(0, found)
                request.prepare_store()
                request.extend([C])
            request.complete_store()
    assert made == [*methods, "touch", "complete_store"] * 2  # the finish is no further use
    assert observe(manager) == observe(plain)


class Hearing(ListPolicy):
    """A user's policy that notes what it hears of requests."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.heard: list[tuple[Any, ...]] = []

    def begun(self, hashes: Any, hints: Hints | None = None) -> None:
        self.heard.append(("begun", names(hashes), hints))
        super().begun(hashes, hints)

    def missed(self, hashes: Any) -> None:
        assert all(self.get(block) is None for block in hashes)
        self.heard.append(("missed", names(hashes)))

    def inserted(self, hashes: Any) -> None:
        assert all(self.get(block) is not None for block in hashes)
        self.heard.append(("inserted", names(hashes)))

    def finished(self, hashes: Any, hints: Hints | None = None) -> None:
        self.heard.append(("finished", names(hashes), hints))
        super().finished(hashes, hints)

    def release(self, hashes: Any) -> None:
        self.heard.append(("release", names(hashes)))


def test_a_user_s_policy_hears_of_requests(twin: ModuleType) -> None:
    policy = Hearing(3)
    manager = twin.CPUOffloadingManager(16, 3, policy)
    early, late = Hints(expect_s=2.5, source="agent"), Hints(ends=True)
    request = manager.begin([A, B], hints=early)
    request.prepare_store()
    request.complete_store()
    request.extend([C])
    request.prepare_store(2)
    request.finish()
    assert policy.heard == [
        ("begun", "AB", early),
        ("missed", "AB"),
        ("inserted", "AB"),
        ("missed", "C"),
        ("inserted", "C"),
        ("finished", "ABC", early),
    ]
    policy.heard.clear()
    with manager.begin([A, B, C], hints=early) as request:
        request.prepare_store()  # nothing is missed
        request.finish(hints=late)
    assert policy.heard == [("begun", "ABC", early), ("finished", "ABC", late), ("release", "ABC")]
    policy.heard.clear()
    manager.begin([A, B]).finish(hints=late)  # of another session: nothing is its own
    assert policy.heard == [("begun", "AB", None), ("finished", "AB", late)]
    manager.release([A, B, C])
    assert policy.heard.pop() == ("release", "C")
    policy.heard.clear()
    request = manager.begin([D, E, F, G])
    assert request.prepare_store() is None
    assert policy.heard == [("begun", "DEFG", None), ("missed", "DEFG")]


def test_s3fifo_orders_blocks_by_the_end_of_their_request(twin: ModuleType) -> None:
    """Whether the stores end before or after it; a block used again keeps its place."""
    manager = twin.CPUOffloadingManager(16, 20, "s3fifo")
    store(manager, [F])
    first, second = manager.begin([A, B, F]), manager.begin([C, D])
    for request, start, stop in [(first, 0, 1), (second, 0, 2), (first, 1, 2)]:
        assert request.prepare_store(start, stop) is not None
        if request is first:
            request.complete_store()
    second.finish()
    first.finish()
    second.complete_store()
    assert names(manager.policy.small) == "FDCBA"
