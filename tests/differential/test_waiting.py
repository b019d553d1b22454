"""Chains whose ends are in use: idle blocks wait for those behind them, the twins side by side."""

from __future__ import annotations

import random

import pytest

from kvoffload.policies import registry
from tests.blocks import block_hashes
from tests.differential.pairs import Pair, Twins

SEEDS = 12
STEPS = 150


class Ends:
    """Prompts of which loads and stores hold the last blocks alone, on a pair of managers."""

    def __init__(self, twins: Twins, name: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.capacity = self.draw.choice([12, 40, 120])
        self.pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, self.capacity, name))
        self.fresh = 0
        self.prompts: list[list[int]] = [[]]
        self.loads: list[list[bytes]] = []
        self.stores: list[list[bytes]] = []

    def step(self) -> None:
        kind = self.draw.randrange(10)
        if kind < 4:
            self.store()
        elif kind < 6:
            self.load_an_end()
        elif kind < 7 and self.loads:
            self.pair.do("complete_load", self.take(self.loads))
        elif kind < 8 and self.stores:
            self.pair.do("complete_store", self.take(self.stores), self.draw.random() < 0.8)
        elif kind < 9:
            # Part of a prompt is touched, which takes blocks that wait back for a while.
            prompt = self.draw.choice(self.prompts)
            self.pair.do("touch", block_hashes(*prompt[: self.draw.randrange(len(prompt) + 1)]))
        else:
            # More than there is room for: the search goes as far as it can, and is undone.
            numbers = range(10**6, 10**6 + self.draw.randrange(self.capacity) + 1)
            _, output = self.pair.do("prepare_store", block_hashes(*numbers))
            if output is not None:
                self.pair.do("complete_store", output[0], False)

    def take(self, batches: list[list[bytes]]) -> list[bytes]:
        return batches.pop(self.draw.randrange(len(batches)))

    def store(self) -> None:
        """Store a prompt that goes on where another one stopped, in one batch or block by block."""
        start = self.draw.choice(self.prompts[-20:])
        size = self.draw.choice([1, 1, 2, 5, self.capacity // 4])
        prompt = [*start[: self.capacity // 2], *range(self.fresh, self.fresh + size)]
        self.fresh += size
        self.prompts.append(prompt)
        hashes = block_hashes(*prompt)
        touched_first = self.draw.random() < 0.5
        if touched_first:
            self.pair.do("touch", hashes)
        for batch in [[block] for block in hashes] if self.draw.random() < 0.3 else [hashes]:
            _, output = self.pair.do("prepare_store", batch)
            if output is None:
                continue
            if self.draw.random() < 0.7:
                self.pair.do("complete_store", output[0])
            else:
                self.stores.append(output[0])
        self.pair.do("touch", hashes)

    def load_an_end(self) -> None:
        hashes = block_hashes(*self.draw.choice(self.prompts[-20:]))
        _, hits = self.pair.do("lookup", hashes)
        if hits:
            end = hashes[max(0, hits - self.draw.randrange(1, 3)) : hits]
            self.pair.do("prepare_load", end)
            self.loads.append(end)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [kind.name for kind in registry.kinds()])
def test_the_twins_agree_while_ends_of_chains_are_in_use(twins: Twins, name: str) -> None:
    for seed in range(SEEDS):
        ends = Ends(twins, name, seed)
        for step in range(STEPS):
            ends.step()
            if step % 5 == 4:
                ends.pair.agree()
