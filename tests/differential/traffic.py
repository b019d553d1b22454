"""Requests with loads and stores in flight, whose sessions end in any order, some calls wrong.

Loads often hold only the end of a prompt, or most of the cache, so that searches for victims park
blocks, and idle blocks wait for others behind them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvoffload import Hints
from kvoffload.managers import calls
from kvoffload.policies import registry
from tests.differential.pairs import OpenPair, Pair, Twins
from tests.differential.workloads import mixed_keys

CAPACITIES = (1, 4, 6, 9, 16, 30, 80)
FIRST_UNKNOWN = 10**6
PARTS = ("lookup", "prepare_load", "complete_load", "prepare_store")  # of a request

STEPS = {
    "begin": 20.0,
    "load": 13.0,
    "use_a_part": 3.0,
    "store": 14.0,
    "complete_a_store": 10.0,
    "finish": 10.0,
    "extend": 2.0,
    "load_every_other_block": 1.0,
    "call": 6.0,
    "touch_what_was_stored": 2.0,
    "store_new_blocks": 6.0,
    "reset": 0.3,
}
"""Methods of `Traffic`, and how often each is called."""

OF_REQUESTS = ("load", "use_a_part", "store", "finish", "extend")  # these take an open request
SOURCES = 20  # more than are told apart
EXTREMES = (1e-9, 1e12, 1e300)  # seconds that are cut to what is counted


def drawn_hints(draw: random.Random) -> Hints | None:
    """Return what a client says, if it says anything; some times are odd."""
    if draw.random() < 0.4:
        return None
    seconds = draw.choice((2.0, 30.0, 600.0)) * draw.lognormvariate(0.0, 0.5)
    return Hints(
        ends=draw.random() < 0.3,
        expect_s=draw.choice((None, *[seconds] * 20, *EXTREMES)),
        source=str(int(draw.expovariate(0.3)) % SOURCES),
    )


def specification(name: str, draw: random.Random) -> str:
    """Return a policy string with options drawn at random, where there are any."""
    drawn = []
    for option in registry.entry(name).options:
        shares = (0.1, 0.3) if isinstance(option.default, float) else ()
        value = draw.choice((option.default, option.minimum, option.maximum, *shares))
        drawn.append(f"{option.name}={value}")
    return f"{name}?{'&'.join(drawn)}" if drawn else name


class Traffic:
    """Requests on a pair of managers, drawn from a few prompts that overlap.

    Parameters
    ----------
    twins : (module, module)
        The Python twin and the compiled one.
    seed : str
        Decides all that is drawn.
    build : callable
        Builds a manager from a twin and its number of blocks.
    capacity : int or None
        Number of blocks; None: any.

    Attributes
    ----------
    stores_itself : bool
        Whether some touches are of what a request has stored itself, which only a built-in policy
        hears.
    has_hints : bool
        Whether clients say something.
    steps : dict
        How often each method is called.
    """

    stores_itself = False
    has_hints = True
    steps = STEPS

    def __init__(
        self,
        twins: Twins,
        seed: str,
        build: Callable[[ModuleType, int], Any],
        capacity: int | None = None,
    ) -> None:
        self.draw = random.Random(seed)
        self.capacity = capacity or self.draw.choice(CAPACITIES)
        self.known = self.capacity + self.draw.randrange(1, 2 * self.capacity + 1)
        self.longest = max(2, self.capacity // self.draw.choice([1, 2, 4]))
        self.loads_end = self.draw.choice([2.0, 12.0])  # how often
        self.pair = Pair(twins, lambda twin: build(twin, self.capacity))
        self.now = 0.0
        self.requests: list[OpenPair] = []
        self.loads: list[tuple[Any, tuple[Any, ...]]] = []
        self.stores: list[OpenPair] = []

    @classmethod
    def of(
        cls,
        twins: Twins,
        name: str,
        seed: object,
        capacity: int | None = None,
        policy: str | None = None,
    ) -> Traffic:
        """Return traffic on a built-in policy, some of it above a tier."""
        draw = random.Random(f"{name} {seed}")
        has_events, declines = draw.choices([0, 1], k=2)
        policy = policy or specification(name, draw)

        def build(twin: ModuleType, num_blocks: int) -> Any:
            manager = twin.CPUOffloadingManager(16, num_blocks, policy, bool(has_events))
            manager.policy.set_declining(bool(declines))
            return manager

        traffic = cls(twins, f"{seed} {name}", build, capacity)
        traffic.stores_itself = True
        return traffic

    def run(self, steps: int) -> None:
        """Make the steps, and compare all that can be seen now and then."""
        for number in range(1, steps + 1):
            self.step()
            if number % 20 == 0:
                self.pair.agree()

    def prompt(self) -> list[bytes]:
        """Return blocks of a prompt; prompts share beginnings, middles and ends."""
        first = self.draw.randrange(self.known) // 6 * 6
        size = self.draw.randrange(1, self.longest + 1)
        return mixed_keys(number % self.known for number in range(first, first + size))

    def take(self, things: list[Any]) -> Any:
        return things.pop(self.draw.randrange(len(things)))

    def step(self) -> None:
        """Do one call, or a few that belong together."""
        # A clock may jump, and go back.
        jumps = self.draw.random() < 0.02
        self.now += self.draw.choice((-50.0, 5000.0)) if jumps else self.draw.random()
        steps = self.steps | {"end_a_load": self.loads_end}
        (name,) = self.draw.choices(list(steps), list(steps.values()))
        if name not in OF_REQUESTS:
            getattr(self, name)()
        elif self.requests:
            getattr(self, name)(self.draw.choice(self.requests))

    def begin(self) -> None:
        said = drawn_hints(self.draw) if self.has_hints else None
        self.requests.append(OpenPair(self.pair, self.prompt(), said, self.now))

    def load(self, request: OpenPair) -> None:
        """Pin the blocks that are found, often only the last of them."""
        found = request.do("lookup")
        if found:
            start = self.draw.choice([0, found - 1, found - 1, self.draw.randrange(found)])
            request.do("prepare_load", start, found)
            self.loads.append((request, (start, found)))

    def use_a_part(self, request: OpenPair) -> None:
        """Make a call on any part, which may reach beyond the request, or be of no use to it."""
        method = self.draw.choice(PARTS)
        start = self.draw.randint(0, request.size)
        stop = self.draw.randint(start, request.size + 1)
        request.do(method, start, *([] if method == "lookup" else [stop]))

    def end_a_load(self) -> None:
        if self.loads:
            loading, arguments = self.take(self.loads)
            loading.do("complete_load", *arguments)

    def complete_a_store(self) -> None:
        if self.stores:
            self.take(self.stores).do("complete_store", self.draw.random() < 0.75)

    def finish(self, request: OpenPair) -> None:
        self.requests.remove(request)
        request.finish(drawn_hints(self.draw) if self.has_hints else None, self.now)
        if self.draw.random() < 0.3:
            self.use_a_part(request)  # mostly an error

    def extend(self, request: OpenPair) -> None:
        request.do("extend", self.prompt()[:3])

    def call(self) -> None:
        """Do a call that belongs to no request."""
        method = self.draw.choice(["release", "release", "touch", "touch", "take_events"])
        self.pair.do(method, *([] if method == "take_events" else [self.prompt()]))

    def reset(self) -> None:
        self.pair.do("reset_cache")

    def load_every_other_block(self) -> None:
        """Pin so much that searches park blocks, and that the others wait for those behind them."""
        get = self.pair.python.policy.get
        known = ((block, get(block)) for block in mixed_keys(range(self.known)))
        ready = [block for block, status in known if status is not None and status.is_ready]
        self.pair.do("prepare_load", ready[::2])
        self.loads.append((self.pair, (ready[::2],)))

    def store(self, request: OpenPair) -> None:
        start = self.draw.choice([0, 0, self.draw.randrange(request.size + 1)])
        output = request.do("prepare_store", start, request.size)
        if output is not None:
            assert len(set(output[2])) == len(output[2]), "a block was evicted twice"
            self.stores.append(request)

    def store_new_blocks(self) -> None:
        """Ask for up to one slot too many: searches end at every depth, and some are undone."""
        stats = self.pair.python.stats()
        idle = stats["resident"] - stats["pinned"] - stats["pending"]
        size = stats["free"] + self.draw.randrange(idle + 2)
        _, output = self.pair.do(
            "prepare_store", mixed_keys(range(FIRST_UNKNOWN, FIRST_UNKNOWN + size))
        )
        if output is not None:
            self.pair.do("complete_store", output[0], self.draw.random() < 0.2)

    def touch_what_was_stored(self) -> None:
        """Touch as a request that drives KV groups does, which has stored the blocks itself.

        That shows ready blocks as pending: what is passed over meanwhile can be evicted after it.
        """
        if not self.stores_itself:
            return
        keys = self.prompt()
        self.pair.do("prepare_store", keys)
        self.pair.do("complete_store", keys)
        inserted = {block for block in keys if self.draw.random() < 0.7}
        for manager in self.pair.both:
            calls.touch_stored(manager, keys, inserted)
