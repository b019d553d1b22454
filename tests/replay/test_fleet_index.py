"""Sets of engines by block: both twins do the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.replay import _index_py as python

compiled = pytest.importorskip("kvoffload.replay._index_c")
TWINS = (python, compiled)

BLOCKS = 300


def some(chance: random.Random, most: int = 40) -> np.ndarray:
    """Return blocks that mostly follow each other, some of them more than once."""
    first, size = chance.randrange(BLOCKS), chance.randint(0, most)
    row = [number % BLOCKS for number in range(first, first + size)]
    row += chance.choices(range(BLOCKS), k=chance.randint(0, 5))
    return np.array(row, dtype=np.uint32)


@pytest.mark.parametrize("engines", [1, 3, 64, 65, 256])
def test_sets_of_engines(seed: int, engines: int) -> None:
    chance = random.Random(seed)
    pairs = [[twin.Holders(BLOCKS, engines) for twin in TWINS] for _ in range(3)]
    for _ in range(400):
        pair = chance.choice(pairs)
        blocks, engine = some(chance), chance.randrange(engines)
        action, held = chance.choice(["add", "add", "remove", "fill"]), chance.random() < 0.7
        given = (blocks, held) if action == "fill" else (blocks, engine)
        assert len({getattr(holders, action)(*given) for holders in pair}) == 1
        for name, *asked in (
            ("lead", blocks),
            ("has", chance.randrange(BLOCKS), engine),
            ("first", chance.randrange(BLOCKS)),
        ):
            assert len({getattr(holders, name)(*asked) for holders in pair}) == 1, name
        sets = chance.sample(pairs, chance.randint(1, 3))
        expected, found = (
            twin.leads([pair[index] for pair in sets], blocks, engines)
            for index, twin in enumerate(TWINS)
        )
        assert found == expected


@pytest.mark.parametrize("most", [1, 7, 60, 1000])
def test_blocks_used_last(seed: int, most: int) -> None:
    chance = random.Random(seed)
    pair = [twin.Recent(most) for twin in TWINS]
    for _ in range(400):
        blocks = some(chance)
        expected, found = (recent.use(blocks) for recent in pair)
        assert found[0] == expected[0]
        assert found[1].tolist() == expected[1].tolist()
        assert found[2].tolist() == expected[2].tolist()
        assert len(pair[0]) == len(pair[1]) <= most


def test_rows_on_their_way(seed: int) -> None:
    chance = random.Random(seed)
    pair = [twin.Ahead(BLOCKS, 3) for twin in TWINS]
    on_their_way = [0] * 3
    for _ in range(1000):
        engine = chance.randrange(3)
        if on_their_way[engine] and chance.random() < 0.5:
            on_their_way[engine] -= 1
            for ahead in pair:
                ahead.arrive(engine)
        else:
            on_their_way[engine] += 1
            blocks = some(chance)
            for ahead in pair:
                ahead.send(engine, blocks)
        block = np.arange(BLOCKS, dtype=np.uint32)[chance.randrange(BLOCKS) :]
        expected, found = (
            [[ahead.has(int(one), engine) for one in block] for engine in range(3)]
            for ahead in pair
        )
        assert found == expected


def test_blocks_and_engines_that_are_none_are_refused() -> None:
    holders = compiled.Holders(4, 2)
    for blocks in ([0], np.array([0]), np.zeros(4, np.uint32)[::2], np.zeros((1, 1), np.uint32)):
        with pytest.raises(TypeError, match="blocks must be an array of uint32"):
            holders.add(blocks, 0)
    with pytest.raises(IndexError, match="blocks must be below 4, got 4"):
        holders.add(np.array([4], np.uint32), 0)
    with pytest.raises(IndexError, match="engine must be below 2, got 2"):
        holders.add(np.array([0], np.uint32), 2)
    with pytest.raises(IndexError, match="block must be below 4, got -1"):
        holders.first(-1)
    with pytest.raises(ValueError, match=r"num_engines must be 1 \.\.\. 256, got 257"):
        compiled.Holders(4, 257)
    with pytest.raises(ValueError, match="sets must be of 3 engines"):
        compiled.leads([holders], np.array([0], np.uint32), 3)
