"""Requests with loads and stores in flight, whose sessions end in any order: the twins compared.

Loads often hold only the end of a prompt, or most of the cache, so that searches for victims park
blocks, and idle blocks wait for others behind them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvoffload import Hints
from kvoffload.policies import registry
from tests.blocks import block_hashes
from tests.conftest import read_budget
from tests.differential.pairs import OpenPair, Pair, Twins

SEQUENCES = 60
"""Random sequences of calls per policy, before the budget is applied."""
STEPS = 80
FIRST_UNKNOWN = 10**6
HINTS = (
    *3 * (None,),
    *3 * (Hints(ends=True),),
    Hints(expect_s=2.0),
    Hints(ends=True, expect_s=9.0, source="b"),
)


def specification(name: str, generator: random.Random) -> str:
    """Return a policy string with options drawn at random, where there are any."""
    shares = [
        f"{option.name}={generator.choice([0.0, 0.1, 0.3, 0.5, 1.0])}"
        for option in registry.parse(name).entry.options
        if isinstance(option.default, float) and (option.minimum, option.maximum) == (0, 1)
    ]
    return f"{name}?{'&'.join(shares)}" if shares else name


class Traffic:
    """Requests on a pair of managers, drawn from a few prompts that overlap."""

    def __init__(self, twins: Twins, name: str, seed: int) -> None:
        self.draw = random.Random(f"{name} {seed}")
        self.capacity = self.draw.choice([4, 6, 9, 16, 30, 80])
        self.known = self.capacity + self.draw.randrange(1, 2 * self.capacity)
        self.longest = max(2, self.capacity // self.draw.choice([1, 2, 4]))
        self.loads_end = self.draw.choice([2, 12])  # of a hundred steps
        policy = specification(name, self.draw)
        self.pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, self.capacity, policy))
        self.now = 0.0
        self.requests: list[OpenPair] = []
        self.loads: list[tuple[Any, tuple[Any, ...]]] = []
        self.stores: list[OpenPair] = []

    def prompt(self) -> list[bytes]:
        """Return blocks of a prompt; prompts share beginnings, middles and ends."""
        first = self.draw.randrange(self.known) // 6 * 6
        size = self.draw.randrange(1, self.longest + 1)
        return block_hashes(*(number % self.known for number in range(first, first + size)))

    def any_of(self, things: list[Any]) -> Any:
        return things[self.draw.randrange(len(things))]

    def take(self, things: list[Any]) -> Any:
        return things.pop(self.draw.randrange(len(things)))

    def step(self) -> None:
        """Do one call, or a few that belong together."""
        self.now += self.draw.random()
        kind = self.draw.randrange(100)
        if kind < 20 or not self.requests:
            hints = self.draw.choice(HINTS)
            self.requests.append(OpenPair(self.pair, self.prompt(), hints, self.now))
        elif kind < 36:
            self.load(self.any_of(self.requests))
        elif kind < 36 + self.loads_end and self.loads:
            loading, arguments = self.take(self.loads)
            loading.do("complete_load", *arguments)
        elif kind < 62:
            self.store(self.any_of(self.requests))
        elif kind < 72 and self.stores:
            self.take(self.stores).do("complete_store", self.draw.random() < 0.75)
        elif kind < 82:
            self.take(self.requests).finish(self.draw.choice(HINTS), self.now)
        elif kind < 84:
            self.any_of(self.requests).do("extend", self.prompt()[:3])
        elif kind < 85:
            self.load_every_other_block()
        elif kind < 88:
            self.pair.do("release", self.prompt())
        elif kind < 91:
            self.pair.do("touch", self.prompt())
        elif kind < 99:
            self.store_new_blocks()
        elif self.draw.random() < 0.3:
            self.pair.do("reset_cache")

    def load(self, request: OpenPair) -> None:
        """Pin the blocks that are found, often only the last of them."""
        found = request.do("lookup")
        if found:
            start = self.draw.choice([0, found - 1, found - 1, self.draw.randrange(found)])
            request.do("prepare_load", start, found)
            self.loads.append((request, (start, found)))

    def load_every_other_block(self) -> None:
        """Pin so much that searches park blocks, and that the others wait for those behind them."""
        get = self.pair.python.policy.get
        known = ((block, get(block)) for block in block_hashes(*range(self.known)))
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
        numbers = range(FIRST_UNKNOWN, FIRST_UNKNOWN + size)
        _, output = self.pair.do("prepare_store", block_hashes(*numbers))
        if output is not None:
            self.pair.do("complete_store", output[0], self.draw.random() < 0.2)


@pytest.mark.parametrize("name", registry.names())
def test_sessions_end_while_others_load_and_store(twins: Twins, seed: int, name: str) -> None:
    for number in range(max(1, round(SEQUENCES * read_budget()))):
        traffic = Traffic(twins, name, seed + number)
        for step in range(STEPS):
            traffic.step()
            if step % 20 == 19:
                traffic.pair.agree()
