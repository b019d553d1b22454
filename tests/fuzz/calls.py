"""Bytes as a sequence of calls on a manager of each twin: answers and invariants, call by call.

The first three bytes choose the policy, the number of slots, and whether events are on. Then each
call is a byte that picks the method and how the batch is given, and a batch: a byte with its
length, one byte per key. Where the bytes end, so does the sequence; any bytes are a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvoffload import Hints
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import METHODS, block_hash, once
from tests.differential.pairs import Pair, Twins, require_equal, same_values
from tests.observation import attempt

MAX_CALLS = 120
LOOK_EVERY = 16
"""All that can be seen is compared after so many calls and at the end; counters after each."""

MAX_SLOTS = 24
LENGTHS = (1, 4, 16, 32, 36, 37, 64, 300)
KEYS: list[Any] = [block_hash(number, max(4, LENGTHS[number % 8])) for number in range(64)]
KEYS += [b"", None, "text", bytearray(b"x")]
"""The blocks that the bytes of a batch name, modulo their number: few, so that they meet."""


def options_at_their_bounds() -> list[str]:
    """Return a policy string for each bound of each option."""
    return [
        f"{name}?{option.name}={bound}"
        for name in registry.names()
        for option in registry.entry(name).options
        for bound in (option.minimum, option.maximum)
    ]


POLICIES = [*registry.names(), *options_at_their_bounds()]
FORMS: tuple[Callable[[list[Any]], Any], ...] = (list, tuple, once, list)
FIRST_OF_REQUESTS = 221
"""Calls of requests begin with this byte or a higher one."""
MAX_OPEN = 8
"""Requests that are open at once; the oldest is dropped."""


HINTS: tuple[Hints | None, ...] = (
    *(None, None, None, Hints(ends=True)),
    Hints(expect_s=0.001, source="a"),
    Hints(expect_s=1e9, source="b"),
    Hints(ends=True, expect_s=60.0, source="c" * 64),
    Hints(expect_s=5e-324),
)
"""The hints of a request, at its begin or its end; most have none."""


class Sequence:
    """The bytes that are left."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def byte(self) -> int:
        """Return the next byte; at the end, 0."""
        return next(self._bytes, 0)

    def batch(self) -> list[Any]:
        """Return the next batch: a length below 16, or a run of successive keys."""
        length = self.byte()
        if length & 0x80:
            first = self.byte()
            return [KEYS[(first + step) % 64] for step in range(length & 0x1F)]
        return [KEYS[self.byte() % len(KEYS)] for _ in range(length & 0x0F)]

    def calls(self) -> Iterator[int]:
        """Yield the byte that begins each call."""
        for _ in range(MAX_CALLS):
            operation = next(self._bytes, None)
            if operation is None:
                return
            yield operation


class Driver:
    """A pair of managers and what the caller holds of them."""

    def __init__(self, twins: Twins, sequence: Sequence) -> None:
        self.sequence = sequence
        policy = POLICIES[sequence.byte() % len(POLICIES)]
        slots = sequence.byte() % (MAX_SLOTS + 1)
        events = bool(sequence.byte() & 1)
        self.pair = Pair(
            twins, lambda twin: twin.CPUOffloadingManager(16, slots, policy, enable_events=events)
        )
        self.held: list[tuple[Any, Any]] = []
        self.requests: list[tuple[Any, Any]] = []

    def call(self, operation: int) -> None:
        """Do one call on both."""
        if operation >= FIRST_OF_REQUESTS:
            self.call_request(operation - FIRST_OF_REQUESTS)
            return
        number, form = operation % 15, FORMS[operation // 15 % len(FORMS)]
        if number < 6:
            self.pair.do(METHODS[number], self.sequence.batch(), form=form)
        elif number == 6:
            self.pair.do("complete_store", self.sequence.batch(), False, form=form)
        elif number == 7:
            batch = self.sequence.batch()
            self.pair.do("prepare_store", batch, form=form)
            self.pair.do("complete_store", batch)
        elif number == 8:
            batch = self.sequence.batch()
            kind, hits = self.pair.do("lookup", batch, form=form)
            if kind == "returned":
                self.pair.do("prepare_load", batch[:hits])
        elif number == 9:
            self.pair.do("take_events")
        elif number == 10:
            self.pair.do("reset_cache")
        elif number == 11:
            self.pair.do("release", self.sequence.batch(), form=form)
        elif number == 12:
            self.pair.do("__contains__", KEYS[self.sequence.byte() % len(KEYS)])
        elif number == 13:
            self.hold(KEYS[self.sequence.byte() % 64])
        else:  # searches park these, and the blocks between them wait
            get = self.pair.python.policy.get
            known = ((key, get(key)) for key in KEYS[:64])
            ready = [key for key, status in known if status is not None and status.is_ready]
            self.pair.do("prepare_load", ready[self.sequence.byte() % 2 :: 2])

    def call_request(self, operation: int) -> None:
        """Begin a request on both, or do one call of an open one."""
        sequence = self.sequence
        if operation % 7 == 0 or not self.requests:
            batch, hints = sequence.batch(), HINTS[sequence.byte() % len(HINTS)]
            managers = self.pair.python, self.pair.compiled
            outcomes = [begin(each, batch, hints) for each in managers]
            require_equal(*(shown for _, shown in outcomes), what="begin", context=batch)
            if outcomes[0][0] is not None:
                begun = (outcomes[0][0], outcomes[1][0])
                self.requests = [*self.requests[1 - MAX_OPEN :], begun]
            return
        pair = self.requests[sequence.byte() % len(self.requests)]
        bounds = sequence.byte() % 20, sequence.byte() % 20
        method, arguments = (
            ("lookup", bounds[:1]),
            ("prepare_load", bounds),
            ("complete_load", bounds),
            ("prepare_store", bounds if bounds[0] % 2 else ()),
            ("complete_store", (bounds[0] % 4 > 0,)),
            (
                "finish" if bounds[0] % 2 else "extend",
                () if bounds[0] % 2 else ([KEYS[bounds[1]]],),
            ),
        )[operation % 7 - 1]
        if method == "finish" and bounds[0] % 4 == 3:
            for request in pair:
                request.finish(hints=HINTS[3 + bounds[1] % (len(HINTS) - 3)])
        outcomes = [attempt(request, method, *arguments) for request in pair]
        require_equal(*outcomes, what=method, context=arguments)
        require_equal(*((each.hashes, each.is_finished) for each in pair), what="a request")

    def hold(self, key: bytes) -> None:
        """Keep the status of a block, as a caller may; of eight, the oldest goes."""
        python, compiled = (each.policy.get(key) for each in (self.pair.python, self.pair.compiled))
        require_equal(python is None, compiled is None, what="residency", context=key)
        if python is not None:
            self.held = [*self.held[-7:], (python, compiled)]

    def check(self) -> None:
        """Check the invariants of both, and compare their counters and the statuses held."""
        for manager in (self.pair.python, self.pair.compiled):
            check_invariants(manager)
        require_equal(self.pair.python.stats(), self.pair.compiled.stats(), what="stats")
        same_values(self.held)


def begin(manager: Any, batch: list[Any], hints: Hints | None) -> tuple[Any, Any]:
    """Begin a request; return it, or None, and what can be compared of the outcome."""
    try:
        request = manager.begin(once(batch), hints=hints)
    except (TypeError, ValueError) as error:
        return None, (type(error).__name__, str(error))
    return request, request.hashes


def run_calls(twins: Twins, data: bytes) -> int:
    """Make the calls that the bytes stand for; return how many."""
    sequence = Sequence(data)
    driver = Driver(twins, sequence)
    number = 0
    for number, operation in enumerate(sequence.calls(), start=1):
        driver.call(operation)
        driver.check()
        if number % LOOK_EVERY == 0:
            driver.pair.agree()
    driver.pair.agree()
    return number
