"""An interrupt at any line of the Python twin leaves the state before the call, or the one after.

A trace function raises at one line event after the other, as the interpreter would raise
KeyboardInterrupt for Ctrl-C. `lookup` and `touch` may end in between.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kvoffload
from kvoffload import BlockStatus, OffloadError
from kvoffload.policies import registry
from kvoffload.watch import Watch
from tests import _python
from tests.blocks import A, B, C, D, E, F, G, H, block_hashes
from tests.conftest import read_budget
from tests.observation import observe
from tests.parts import ListPolicy
from tests.policies.steps import idle, pinned, request

PACKAGE = str(Path(kvoffload.__file__).parent)
NEW = block_hashes(*range(100, 108))


@lru_cache(maxsize=1000)
def backward_jumps(code: CodeType) -> set[int]:
    """Return the offsets of jumps back."""
    return {step.offset for step in dis.get_instructions(code) if "JUMP_BACKWARD" in step.opname}


def jumps_back(frame: FrameType) -> bool:
    """Tell whether the next instruction jumps back.

    What a trace function raises where an inlined comprehension jumps back, CPython 3.13 hands to no
    handler of the function; what a signal raises there does find them.
    """
    return frame.f_lasti in backward_jumps(frame.f_code)


def closes(frame: FrameType) -> bool:
    """Tell whether a generator ends by what no line of it says.

    CPython 3.14 traces these instructions when a generator is collected, where what is raised goes
    to no caller. No signal is answered there.
    """
    return frame.f_lineno is None


class Interrupts:
    """Raise at the event of that number, in the lines of the package; never, if it is None."""

    def __init__(self, number: int | None, error: type[BaseException], event: str) -> None:
        self.number = number
        self.error = error
        self.event = event
        self.places: list[tuple[CodeType, int]] = []  # of the events so far

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        left_out = closes(frame) or (event == "line" and jumps_back(frame))
        if event == self.event and not left_out:
            if len(self.places) == self.number:
                sys.settrace(None)
                raise self.error
            where = frame.f_lasti if self.event == "opcode" else frame.f_lineno
            self.places.append((frame.f_code, where))
        return self

    @contextmanager
    def armed(self) -> Iterator[None]:
        former = sys.gettrace()
        gc.disable()  # what the collector calls would count, and keeps interrupts to itself
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(former)
            gc.enable()

    def worth_trying(self) -> list[int]:
        """Return the events by number: where a line is run often, the first, second and last."""
        visits: dict[tuple[CodeType, int], list[int]] = {}
        for number, place in enumerate(self.places):
            visits.setdefault(place, []).append(number)
        return sorted({n for numbers in visits.values() for n in (*numbers[:2], numbers[-1])})


def state_of(thing: Any) -> Any:
    """Return all that a manager, a policy or a pool consists of, as values that compare."""
    if isinstance(thing, BlockStatus):
        return thing.ref_cnt, thing.block_id
    if isinstance(thing, OrderedDict | list | tuple | deque):
        items = thing.items() if isinstance(thing, OrderedDict) else thing
        return [state_of(item) for item in items]
    if isinstance(thing, dict):
        return sorted((repr(key), state_of(value)) for key, value in thing.items())
    if isinstance(thing, set):
        return sorted(thing)
    if type(thing).__module__.startswith("kvoffload"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        # A trial's densities are another policy's: its own were never set.
        fields = {name: getattr(thing, name, None) for name in slots if name not in UNSEEN}
        fields.update(getattr(thing, "__dict__", {}))
        return sorted(
            (name, state_of(value)) for name, value in fields.items() if name not in UNSEEN
        )
    return thing if isinstance(thing, int | float | str | bytes | None) else type(thing).__name__


# How many numbers were drawn is nobody's business, nor is what a scan remembers of its last look.
UNSEEN = {"__weakref__", "_numbers", "waiting", "number", "before_number", "_find", "_owner"}
UNSEEN.add("_watch")  # what a watch has sampled is approximate after an interrupt
# So is what hit density has heard of the requests under way, and how long a store takes.
UNSEEN |= {"_open_requests", "_offered", "_is_loading", "_store_begins", "_noted", "_lag"}


def managed(name: str, events: bool = True) -> Any:
    """Return a manager with blocks of every kind, ghosts, and chains that wait for their ends."""
    manager = _python.CPUOffloadingManager(16, 12, name, events)
    for batch in ([A, B, C], [D, E], [A, B, C, F], NEW[:4], [A, D], [G, H], NEW[4:6], [A, B, C, F]):
        request(manager, batch)
    list(manager.take_events())
    resident = [block for block in (A, B, C, D, E, F, G, H, *NEW) if block in manager]
    manager.prepare_load([resident[0], resident[-1], resident[-1]])
    manager.touch([block for block in (A, B, D, G, *NEW) if block not in manager])
    return manager


def storing(name: str) -> Any:
    """Return such a manager in which stores are under way."""
    manager = managed(name)
    for batch in (NEW[6:], [b"one more"]):
        manager.touch(batch)
        manager.prepare_store(batch)
    return manager


def alone(name: str) -> Any:
    """Return a policy with blocks of every kind and ghosts."""
    policy = _python.policy_class(name)(8)
    for block_id, block in enumerate((A, B, C, D, E)):
        policy.insert(block, idle(block_id))
    for batch in ([A, B, C], [D, E], [A, B], [C], [A, B, C]):
        policy.touch(batch)
    policy.evict(2, ())
    policy.insert(F, pinned(5))
    policy.insert(G, idle(6))
    policy.insert(H, idle(7))
    policy.touch([G, H])
    policy.touch([A, B, C, D, E])
    return policy


def pool(name: str) -> Any:
    """Return a pool of which slots were given out and taken back."""
    backend = _python.CPUBackend(16, 6)
    for status in backend.allocate_blocks([A, B, C, D])[2:]:
        backend.free(status)
    return backend


def sharing(name: str) -> Any:
    """Return a manager over a pool of which somebody else holds a slot."""
    backend = _python.CPUBackend(16, 12)
    manager = _python.ARCOffloadingManager(backend, True)
    for batch in ([A, B, C], [D, E]):
        request(manager, batch)
        backend.allocate_blocks([b"of somebody else"])
    manager.prepare_store([F])
    return manager


def absent(thing: Any, n: int) -> list[bytes]:
    """Return blocks that may be inserted: former ones first, of which some are ghosts."""
    policy = thing.policy if hasattr(thing, "policy") else thing
    return [block for block in (A, B, C, D, E, G, *NEW) if policy.get(block) is None][:n]


def ready(manager: Any) -> list[bytes]:
    """Return the blocks that may be loaded."""
    statuses = {block: manager.policy.get(block) for block in (A, B, C, D, E, F, G, H, *NEW)}
    return [block for block, status in statuses.items() if status and status.ref_cnt >= 0]


Arguments = tuple[Any, ...]
CALLS: dict[str, tuple[Callable[[str], Any], str, Callable[[Any], Arguments]]] = {
    "a store": (managed, "prepare_store", lambda m: ([ready(m)[0], *absent(m, 3)],)),
    "a store of many": (managed, "prepare_store", lambda m: ([*absent(m, 7), NEW[7]],)),
    "a refused store": (managed, "prepare_store", lambda m: (block_hashes(*range(200, 220)),)),
    "a store of nothing": (managed, "prepare_store", lambda m: (ready(m)[:2],)),
    "completion": (storing, "complete_store", lambda m: ([*NEW[6:], NEW[6], A, b"one more"],)),
    "failure": (storing, "complete_store", lambda m: ([*NEW[6:], A], False)),
    "a load": (managed, "prepare_load", lambda m: ([*ready(m)[:3], ready(m)[0]],)),
    "the end of a load": (
        managed,
        "complete_load",
        lambda m: ([ready(m)[-1], ready(m)[0], ready(m)[-1]],),
    ),
    "a load of a block that is not there": (
        managed,
        "prepare_load",
        lambda m: ([*ready(m)[:2], NEW[7]],),
    ),
    "the end of a load that was not": (
        managed,
        "complete_load",
        lambda m: ([ready(m)[-1], ready(m)[0], ready(m)[1]],),
    ),
    "events": (storing, "take_events", lambda m: ()),
    "a reset": (storing, "reset_cache", lambda m: ()),
    "a reset over a shared pool": (sharing, "reset_cache", lambda m: ()),
    "insert": (alone, "insert", lambda p: (absent(p, 1)[0], idle(9))),
    "remove": (alone, "remove", lambda p: (G,)),
    "evict": (alone, "evict", lambda p: (3, [G])),
    "evict too many": (alone, "evict", lambda p: (7, ())),
    "make_room": (alone, "make_room", lambda p: (absent(p, 3), 1, [G])),
    "clear": (alone, "clear", lambda p: ()),
    "allocation": (pool, "allocate_blocks", lambda b: ([A, B, C],)),
    "free": (pool, "free", lambda b: (BlockStatus(1),)),
}


def prepared(call: str, name: str) -> tuple[Any, Callable[[], Any]]:
    """Return a new thing, and the call to make on it."""
    build, method, arguments = CALLS[call]
    thing = build(name)
    return thing, partial(getattr(thing, method), *arguments(thing))


def interrupted_at_each(
    call: str, name: str, error: type[BaseException], event: str, step: int, seed: int
) -> Iterator[tuple[int, Any]]:
    """Yield the number of an event, and a thing whose call was interrupted there."""
    for _ in range(2):  # what is imported or remembered at the first call is no part of a call
        _, make_call = prepared(call, name)
        watch = Interrupts(None, error, event)
        with suppress(OffloadError), watch.armed():
            make_call()
    events = watch.worth_trying()
    for number in events[seed % min(step, len(events)) :: step]:
        thing, make_call = prepared(call, name)
        with pytest.raises(error), Interrupts(number, error, event).armed():
            make_call()
        yield number, thing


def go_on(thing: Any) -> list[Any]:
    """Make further calls, verify the invariants, and return what came of them."""
    outcomes: list[Any] = []
    thing._check()
    if isinstance(thing, _python.CPUBackend):
        slots = [status.block_id for status in thing.allocate_blocks([A])]
        return [slots, observe(thing)]
    if not hasattr(thing, "prepare_store"):
        for batch in ([B], [H, G], [F]):
            thing.touch(batch)
            outcomes.append([block for block, _ in thing.evict(1, batch) or ()])
        thing._check()
        return [*outcomes, observe(thing)]
    for batch in ([A, B, C], NEW[2:5], [b"1", b"2"], [D, E, b"3"], [b"4"] * 2, [b"5", b"6", b"7"]):
        thing.touch(batch)
        output = thing.prepare_store(batch)
        thing._check()
        if output is not None:
            outcomes.append((output.block_hashes_evicted, output.store_spec.block_ids.tolist()))
            thing.complete_store(batch, len(outcomes) % 3 > 0)
    thing._check()
    return [*outcomes, observe(thing)]


def states_around(call: str, name: str) -> tuple[Any, Any]:
    """Return the state before and after a call, and what both lead to."""
    states = []
    for is_made in (False, True):
        thing, make_call = prepared(call, name)
        if is_made:
            with suppress(OffloadError):
                make_call()
        states.append((state_of(thing), go_on(thing)))
    return states[0], states[1]


def check_all_or_nothing(
    call: str, name: str, error: type[BaseException], event: str, step: int, seed: int
) -> None:
    """Interrupt a call everywhere, and compare with the state before and after, now and later."""
    states = states_around(call, name)
    often = max(1, round(10 / read_budget()))
    num_tried = 0
    for number, thing in interrupted_at_each(call, name, error, event, step, seed):
        num_tried += 1
        state = state_of(thing)
        assert state in (states[0][0], states[1][0]), f"interrupted at {event} {number}"
        if num_tried % often == 0:
            # Nothing is left behind that shows later.
            later = states[state != states[0][0]][1]
            assert go_on(thing) == later, f"interrupted at {event} {number}"
    assert num_tried >= max(1, 4 // step)


def stride(budget_for_all: float) -> int:
    """Return the step from one tried event to the next: 1 from a budget on, more below it.

    The seed of a run says at which of the first events it begins: runs together try them all.
    """
    return max(1, round(budget_for_all / read_budget()))


CASES = [
    (call, name)
    for call, (build, _, _) in CALLS.items()
    for name in (registry.names() if build not in (pool, sharing) else ["no policy"])
]


@pytest.mark.parametrize(("call", "name"), CASES)
def test_an_interrupt_at_any_line_leaves_the_state_before_or_after(
    call: str, name: str, seed: int
) -> None:
    check_all_or_nothing(call, name, KeyboardInterrupt, "line", stride(8), seed)


@pytest.mark.parametrize("call", ["a store", "failure", "evict", "a reset"])
@pytest.mark.parametrize("name", registry.names())
def test_an_interrupt_between_any_two_instructions(name: str, call: str, seed: int) -> None:
    """Signals are answered between instructions, in the middle of lines, too."""
    check_all_or_nothing(call, name, KeyboardInterrupt, "opcode", stride(40), seed)


@pytest.mark.parametrize("call", ["a store", "a store of many", "completion", "a reset", "evict"])
@pytest.mark.parametrize("rule", ["lru", "arc-classic"])
def test_an_interrupt_where_hit_density_follows_another(
    monkeypatch: pytest.MonkeyPatch, rule: str, call: str, seed: int
) -> None:
    build, method, arguments = CALLS[call]

    def following(name: str) -> Any:
        thing = build(name)
        policy = thing.policy if hasattr(thing, "policy") else thing
        policy._guard._rule = rule  # the requests that lead to it take a second
        return thing

    monkeypatch.setitem(CALLS, call, (following, method, arguments))
    check_all_or_nothing(call, "hit-density", KeyboardInterrupt, "line", stride(16), seed)


@pytest.mark.parametrize("name", ["lru", "hit-density"])
@pytest.mark.parametrize(
    "call",
    [
        "a store",
        "a refused store",
        "completion",
        "failure",
        "a load",
        "the end of a load",
        "a reset",
    ],
)
def test_an_interrupt_where_a_watch_looks_on(
    monkeypatch: pytest.MonkeyPatch, call: str, name: str, seed: int
) -> None:
    """The manager is as before or after, and the watch keeps its invariants."""
    build = _python.CPUOffloadingManager

    def watched(*arguments: Any) -> Any:
        secret = bytes(range(64))
        watch = Watch(max_rate=1.0, slots=16, policy_slots=4, secret=secret, clock=lambda: 0.0)
        return build(*arguments, watch=watch)

    monkeypatch.setattr(_python, "CPUOffloadingManager", watched)
    thing, _ = prepared(call, name)
    assert thing.watch is not None
    check_all_or_nothing(call, name, KeyboardInterrupt, "line", stride(16), seed)


def test_an_interrupt_of_a_touch_makes_the_guard_of_hit_density_forget() -> None:
    """Its trials are not left with a store that never ends."""
    batch = [A, G, *NEW[:3]]
    before, after, forgotten = (managed("hit-density").policy._guard for _ in range(3))
    watch = Interrupts(None, KeyboardInterrupt, "line")
    with watch.armed():
        after.serve(batch, len(batch), {}, 3.0)
    forgotten.clear()
    states = [state_of(guard) for guard in (before, after, forgotten)]
    assert states[0] != states[1] != states[2] != states[0]
    for number in watch.worth_trying()[:: stride(8)]:
        guard = managed("hit-density").policy._guard
        interrupts = Interrupts(number, KeyboardInterrupt, "line")
        with pytest.raises(KeyboardInterrupt), interrupts.armed():
            guard.serve(batch, len(batch), {}, 3.0)
        assert state_of(guard) in states, f"interrupted at {number}"
        guard._check()
        guard.serve(batch, len(batch), {}, 3.0)
        guard._check()


@pytest.mark.parametrize("call", ["a store", "completion", "failure", "a load", "a reset"])
def test_an_interrupt_loses_no_slot_over_the_policy_of_a_user(call: str) -> None:
    _, method, arguments = CALLS[call]

    def prepare() -> tuple[Any, Callable[[], Any]]:
        manager = _python.CPUOffloadingManager(16, 12, ListPolicy, True)
        for batch in ([A, B, C], [D, E], NEW[:4]):
            request(manager, batch)
        if call in ("completion", "failure"):
            manager.prepare_store([*NEW[6:], b"one more"])
        else:
            request(manager, [F, G, H])
        return manager, partial(getattr(manager, method), *arguments(manager))

    _, make_call = prepare()
    watch = Interrupts(None, KeyboardInterrupt, "line")
    with watch.armed():
        make_call()
    for number in watch.worth_trying():
        manager, make_call = prepare()
        interrupts = Interrupts(number, KeyboardInterrupt, "line")
        with pytest.raises(KeyboardInterrupt), interrupts.armed():
            make_call()
        manager._check()
        stats = manager.stats()
        assert stats["resident"] + stats["free"] == 12, f"interrupted at {number}"
        assert len(manager.policy) == stats["resident"], f"interrupted at {number}"
        go_on(manager)
