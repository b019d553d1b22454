"""An exception from outside at any line of a call of a tier: no wrong byte.

A trace function raises at one line of the package after another, as a signal's handler would. The
caller does what callers do: the blocks of a call that raised are its own again, and it writes other
bytes into them at once. It closes a tier that was interrupted and opens it again. Then everything
is read back and compared.
"""

from __future__ import annotations

import dis
import gc
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kvoffload
from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, calls_of, run
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    Namespace,
    Region,
    Status,
    Tier,
    TierInterruptedError,
)
from tests.conftest import read_budget
from tests.tiers.inside import is_busy

from .attack import report
from .test_conformance import opener_of

pytestmark = pytest.mark.thorough

PACKAGE = str(Path(kvoffload.__file__).parent)
# Python between a caller and the compiled index promises nothing where an exception meets it.
INDEX = tuple(f"{PACKAGE}/{folder}/" for folder in ("backends", "managers", "policies"))
BLOCK = 4096
NUM_BLOCKS = 24
KEYS = [b"key-%02d" % number for number in range(40)]
GARBAGE = 0xEE


CONTENT = {key: block_bytes_of(key, BLOCK) for key in KEYS}


@lru_cache(maxsize=1000)
def unanswered(code: CodeType) -> set[int]:
    """Return the offsets at which no signal is answered, though a line begins there.

    One is where the line of a `with` is met again, to leave its block: what a trace function raises
    there leaves a lock held. Another is a jump back: what is raised where an inlined comprehension
    jumps back, CPython 3.13 hands to no handler of the function. A third is the return of a local
    variable: nothing is called there, so that nothing comes between it and the line before.
    """
    steps = list(dis.get_instructions(code))
    returned = {
        step.offset
        for step, following in itertools.pairwise(steps)
        if step.opname.startswith("LOAD_FAST") and following.opname == "RETURN_VALUE"
    }
    return returned | {
        step.offset
        for step in steps
        if step.opname == "POP_BLOCK"
        or "JUMP_BACKWARD" in step.opname
        or (step.opname == "LOAD_CONST" and step.argval is None)
    }


class LineInterrupts:
    """Raise at the line event of that number, in the package; never, if it is None."""

    def __init__(self, number: int | None, error: type[BaseException]) -> None:
        self.number = number
        self.error = error
        self.places: list[tuple[CodeType, int]] = []  # of the events so far

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_filename.startswith(INDEX):
            return None
        # CPython 3.14 traces the end of a generator that is collected, which is no line of it.
        is_line = event == "line" and frame.f_lineno is not None
        if is_line and frame.f_lasti not in unanswered(code):
            if len(self.places) == self.number:
                sys.settrace(None)
                raise self.error
            self.places.append((code, frame.f_lineno))
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


class Caller:
    """An engine that keeps to the contract: what a call that raised was given is its own again."""

    def __init__(self, tier: Tier, region: Region) -> None:
        self.tier, self.region = tier, region
        self.jobs: dict[int, tuple[str, list[bytes], list[int]]] = {}
        self.busy: set[int] = set()
        self.num_found = 0  # blocks that were there when the tier was opened

    def take(self, count: int) -> list[int]:
        free = [number for number in range(self.region.num_blocks) if number not in self.busy]
        return free[:count]

    def give_back(self, ids: list[int]) -> None:
        self.busy.difference_update(ids)
        for block_id in ids:
            self.region.write(block_id, bytes([GARBAGE]) * BLOCK)

    def submit(self, op: str, keys: list[bytes]) -> int:
        ids = self.take(len(keys))
        try:
            self.busy.update(ids)
            if op == "put":
                for key, block_id in zip(keys, ids, strict=True):
                    self.region.write(block_id, CONTENT[key])
            job: int = getattr(self.tier, op)(keys, ids, PATIENCE_S)
        except BaseException:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.give_back(ids)
            raise
        self.jobs[job] = (op, keys, ids)
        return job

    def poll(self) -> None:
        for done in self.tier.poll():
            if done.op == "query":
                continue
            op, keys, ids = self.jobs.pop(done.job)  # a job that nobody was told of has no end
            if op == "get":
                for key, block_id, status in zip(keys, ids, done.status.tolist(), strict=True):
                    assert status in (Status.OK, Status.MISS, Status.UNAVAILABLE), (key, status)
                    if status == Status.OK:
                        assert self.region.read(block_id) == CONTENT[key], key
            self.give_back(ids)

    def settle(self) -> None:
        """Wait for the ends of all jobs that it was told of, and for the tier's threads."""
        until = time.monotonic() + PATIENCE_S
        while self.jobs or is_busy(self.tier):
            assert time.monotonic() < until, (self.jobs, self.tier.stats())
            self.tier.wait(list(self.jobs), 0.05)
            self.poll()

    def compare(self) -> int:
        """Read everything back; return how many blocks were there."""
        found = 0
        for keys in (KEYS[:16], KEYS[16:32], KEYS[32:]):
            ids = list(range(len(keys)))
            done = run(self.tier, self.tier.get(keys, ids, PATIENCE_S))
            for key, block_id, status in zip(keys, ids, done.status.tolist(), strict=True):
                assert status in (Status.OK, Status.MISS), (key, Status(status).name)
                if status == Status.OK:
                    assert self.region.read(block_id) == CONTENT[key], key
                    found += 1
        return found


Opener = Callable[[], Tier]


@pytest.fixture(params=["memory", "slab", "staged slab", "faulty", "directory"])
def opener(request: pytest.FixtureRequest, namespace: Namespace) -> Opener:
    """Return what opens the tier, and opens it again: slabs and directories keep their blocks."""
    size = (64 if request.param == "directory" else NUM_BLOCKS) * BLOCK
    opened = opener_of(request.param, request)
    return partial(opened, 0, size, threads=2, namespace=namespace)


def opened_again(former: Caller, opener: Opener) -> Caller:
    """Close a tier, which ends its jobs, open it again, and compare what it has kept."""
    tier, region = former.tier, former.region
    if tier.health().interrupted:
        check_refuses(tier, region)
    assert tier.close(PATIENCE_S)
    former.poll()
    assert not former.jobs
    again = opener()
    again.attach(region)
    caller = Caller(again, region)
    caller.num_found = caller.compare()
    return caller


def check_refuses(tier: Tier, region: Region) -> None:
    """Every call says that the tier was interrupted; what counts it still answers."""
    for call in (*calls_of(tier, region).values(), tier.poll, tier.take_events):
        with pytest.raises(TierInterruptedError, match="close it and open it again"):
            call()
    assert not tier.health().ok
    assert tier.stats() is not None


def prepared(opener: Opener, region: Region) -> Caller:
    """Return a caller with a full tier, dropped keys, and jobs whose numbers it does not know."""
    tier = opener()
    tier.attach(region)
    caller = Caller(tier, region)
    caller.submit("put", KEYS[:16])
    caller.settle()
    caller.submit("put", KEYS[16:22])
    caller.settle()
    tier.discard(KEYS[2:5])
    caller.submit("get", KEYS[6:9])
    return caller


CALLS: dict[str, Callable[[Caller], Any]] = {
    "put": lambda caller: caller.submit("put", [KEYS[3], *KEYS[20:28]]),
    "get": lambda caller: caller.submit("get", [*KEYS[6:12], KEYS[2], KEYS[30]]),
    "query": lambda caller: caller.tier.query(KEYS[4:12], PATIENCE_S),
    "poll": lambda caller: caller.poll(),
    "wait": lambda caller: caller.tier.wait(list(caller.jobs), PATIENCE_S),
    "discard": lambda caller: caller.tier.discard(KEYS[8:12]),
    "touch": lambda caller: caller.tier.touch(KEYS[8:12]),
}


def go_on(caller: Caller, opener: Opener) -> None:
    """Use the tier as ever, where it was not interrupted; compare before and after a restart."""
    if not caller.tier.health().interrupted:
        caller.settle()
        caller.submit("put", [*KEYS[26:34], *KEYS[:3]])
        caller.submit("get", KEYS[10:20])
        caller.settle()
        assert caller.compare() > 0
    again = opened_again(caller, opener)
    assert again.num_found > 0 or not isinstance(again.tier, FileTier | DirectoryTier)
    assert again.tier.close(PATIENCE_S)


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_any_line_leaves_no_wrong_byte(
    call: str, opener: Opener, seed: int
) -> None:
    region = Region.allocate(48, BLOCK)
    make_call = CALLS[call]
    for _ in range(2):
        caller = prepared(opener, region)
        watch = LineInterrupts(None, KeyboardInterrupt)
        with watch.armed():
            make_call(caller)
        go_on(caller, opener)
    events = watch.worth_trying()
    step = max(1, round(25 / read_budget()))
    for number in events[seed % min(step, len(events)) :: step]:
        caller = prepared(opener, region)
        with suppress(KeyboardInterrupt), LineInterrupts(number, KeyboardInterrupt).armed():
            make_call(caller)
        go_on(caller, opener)


class AlarmError(Exception):
    """The exception that the handler raises."""


@pytest.mark.attack
def test_signals_at_any_time_leave_no_wrong_byte(opener: Opener, seed: int) -> None:
    """A timer's handler raises inside puts, gets and polls. Stated: 10 s each."""
    chance = random.Random(seed)

    def ring(_: int, frame: FrameType | None) -> None:
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if any(file.startswith(INDEX) for file in files):
            return
        if any(file.startswith(PACKAGE) for file in files):
            raise AlarmError  # the caller itself is not interrupted

    gc.collect()
    gc.disable()  # what it finalises would keep interrupts to itself
    former = signal.signal(signal.SIGALRM, ring)
    region = Region.allocate(48, BLOCK)
    caller = Caller(opener(), region)
    caller.tier.attach(region)
    calls = interrupted = 0
    until = time.monotonic() + min(10.0, 0.5 * read_budget())
    try:
        while time.monotonic() < until:
            calls += 1
            keys = chance.sample(KEYS, chance.randrange(1, 8))
            if len(caller.busy) > 24:
                caller.settle()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 4e-4))
                    op = chance.choice(("put", "put", "get", "poll", "discard"))
                    if op in ("put", "get"):
                        caller.submit(op, keys)
                    elif op == "poll":
                        caller.tier.wait(list(caller.jobs), 0.001)
                    else:
                        caller.tier.discard(keys)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except AlarmError:
                interrupted += 1
                if caller.tier.health().interrupted:
                    caller = opened_again(caller, opener)
            caller.poll()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        gc.enable()
    report(f"{calls} calls, {interrupted} interrupted")
    go_on(caller, opener)
