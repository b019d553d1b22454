"""Sets of engines by block, and the blocks used last, against sets and dicts of Python."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from types import ModuleType

import numpy as np
import pytest

from kvoffload.replay import _index
from tests.sources import plain

BLOCKS = 300


@pytest.fixture(params=["here", "plain"])
def index(request: pytest.FixtureRequest) -> ModuleType:
    return _index if request.param == "here" else plain(_index)


def some(chance: random.Random, most: int = 40) -> np.ndarray:
    """Return blocks that mostly follow each other, some of them more than once."""
    first, size = chance.randrange(BLOCKS), chance.randint(0, most)
    row = [number % BLOCKS for number in range(first, first + size)]
    row += chance.choices(range(BLOCKS), k=chance.randint(0, 5))
    return np.array(row, dtype=np.uint32)


def lead(blocks: np.ndarray, has) -> int:
    """Return the number of leading blocks for which `has` is true."""
    return next((at for at, block in enumerate(blocks.tolist()) if not has(block)), len(blocks))


@pytest.mark.parametrize("engines", [1, 3, 64, 65, 256])
def test_sets_of_engines(index: ModuleType, seed: int, engines: int) -> None:
    chance = random.Random(seed)
    every = [index.Holders(BLOCKS, engines) for _ in range(3)]
    expected: list[list[set[int]]] = [[set() for _ in range(BLOCKS)] for _ in every]
    for _ in range(200):
        which, blocks, engine = chance.randrange(3), some(chance), chance.randrange(engines)
        holders, sets = every[which], expected[which]
        action = chance.choice(["add", "add", "remove", "fill", "empty"])
        if action == "add":
            new = {block for block in blocks.tolist() if engine not in sets[block]}
            assert holders.put(blocks.data, engine, True) == len(new)
        else:
            holders.put(blocks.data, engine if action == "remove" else -1, action == "fill")
        for block in blocks.tolist():
            if action in ("add", "remove"):
                (sets[block].add if action == "add" else sets[block].discard)(engine)
            else:
                sets[block] = set(range(engines)) if action == "fill" else set()
        asked, block = some(chance), chance.randrange(BLOCKS)
        assert holders.of(block) == sorted(sets[block])
        assert holders.lead(asked.data) == lead(asked, sets.__getitem__)
        chosen = chance.sample(range(3), chance.randint(1, 3))
        assert index.leads([every[one] for one in chosen], asked.data) == [
            lead(asked, lambda block, e=e, sets=chosen: any(e in expected[s][block] for s in sets))
            for e in range(engines)
        ]


@pytest.mark.parametrize("most", [1, 7, 60, 1000])
def test_blocks_used_last(index: ModuleType, seed: int, most: int) -> None:
    chance = random.Random(seed)
    recent, used = index.Recent(BLOCKS, most), OrderedDict[int, None]()
    for _ in range(400):
        blocks = some(chance)
        missing = [block for block in blocks.tolist() if block not in used]
        hits, entered, forgotten = recent.use(blocks.data)
        assert hits == lead(blocks, used.__contains__)
        assert entered.tolist() == missing
        for block in reversed(blocks.tolist()):
            used[block] = None
            used.move_to_end(block)
        oldest = [used.popitem(last=False)[0] for _ in range(len(used) - most)]
        assert forgotten.tolist() == oldest


def test_rows_on_their_way(index: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    ahead, rows = index.Ahead(BLOCKS, 3), [deque[np.ndarray]() for _ in range(3)]
    for _ in range(1000):
        engine = chance.randrange(3)
        if rows[engine] and chance.random() < 0.5:
            ahead.arrive(rows[engine].popleft().data, engine)
        else:
            rows[engine].append(some(chance))
            ahead.send(rows[engine][-1].data, engine)
        block = chance.randrange(BLOCKS)
        assert ahead.of(block) == [e for e in range(3) if any(block in row for row in rows[e])]


def test_blocks_that_are_none_are_refused(index: ModuleType) -> None:
    blocks = np.array([4], np.uint32)
    with pytest.raises(IndexError):
        index.Holders(4, 2).put(blocks.data, 0, True)
    with pytest.raises(IndexError):
        index.Recent(4, 2).use(blocks.data)
