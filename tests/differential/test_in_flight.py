"""Chats with many loads and stores in flight, which end in any order: the twins, side by side."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvoffload.policies import registry
from tests.blocks import block_hashes
from tests.differential.pairs import Pair, Twins

SEEDS = 25
CHATS = 10
# Of a hundred steps: requests, loads that end, stores that end; the rest touch without a request.
REQUESTS, LOADS_END, STORES_END = 50, 70, 95


def specification(name: str, generator: random.Random) -> str:
    """Return a policy string with options drawn at random, where there are any."""
    shares = [
        f"{option.name}={generator.choice([0.0, 0.1, 0.3, 0.5, 1.0])}"
        for option in registry.parse(name).entry.options
        if isinstance(option.default, float) and (option.minimum, option.maximum) == (0, 1)
    ]
    return f"{name}?{'&'.join(shares)}" if shares else name


class Traffic:
    """Requests of a few chats on a pair of managers."""

    def __init__(self, twins: Twins, name: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.capacity = self.draw.choice([8, 30, 60, 200])
        policy = specification(name, self.draw)
        self.pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, self.capacity, policy))
        self.fresh = count()
        self.chats = [self.numbers(self.draw.randrange(1, 8)) for _ in range(CHATS)]
        self.load_share = 0.6 * self.draw.random()
        self.loads: list[list[bytes]] = []
        self.stores: list[list[bytes]] = []

    def numbers(self, size: int) -> list[int]:
        return [next(self.fresh) for _ in range(size)]

    def step(self) -> None:
        kind = self.draw.randrange(100)
        if kind < REQUESTS:
            self.request()
        elif kind < LOADS_END and self.loads:
            self.pair.do("complete_load", self.take(self.loads))
        elif kind < STORES_END and self.stores:
            self.pair.do("complete_store", self.take(self.stores), self.draw.random() < 0.9)
        else:
            self.pair.do("touch", block_hashes(*self.draw.choice(self.chats)))

    def take(self, batches: list[list[bytes]]) -> list[bytes]:
        return batches.pop(self.draw.randrange(len(batches)))

    def request(self) -> None:
        number = self.draw.randrange(CHATS)
        if self.draw.random() < 0.2:  # a chat begins as another one did
            other = self.draw.choice(self.chats)
            self.chats[number] = other[: self.draw.randrange(1, 6)]
        self.chats[number] += self.numbers(self.draw.randrange(max(2, self.capacity // 8)))
        hashes = block_hashes(*self.chats[number])
        self.pair.do("touch", hashes)
        _, hits = self.pair.do("lookup", hashes)
        if hits and self.draw.random() < self.load_share:
            # An engine loads what its own cache does not hold: often not from the first block on.
            first = self.draw.randrange(hits) if self.draw.random() < 0.4 else 0
            self.pair.do("prepare_load", hashes[first:hits])
            self.loads.append(hashes[first:hits])
        _, output = self.pair.do("prepare_store", hashes)
        if self.draw.random() < 0.7:
            self.pair.do("touch", hashes)
        if output is not None:
            self.stores.append(output[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [kind.name for kind in registry.kinds()])
def test_the_twins_agree_whatever_is_in_flight(twins: Twins, name: str) -> None:
    for seed in range(SEEDS):
        traffic = Traffic(twins, name, seed)
        for step in range(120):
            traffic.step()
            if step % 10 == 9:
                traffic.pair.agree()
