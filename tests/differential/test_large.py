"""Sizes at which storage and index grow, and searches pass over thousands of blocks."""

from __future__ import annotations

import random

import pytest

from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins, require_equal, same_values
from tests.differential.workloads import mixed_keys
from tests.policies.steps import idle

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_that_grows_far_beyond_its_capacity(twins: Twins, seed: int, name: str) -> None:
    generator = random.Random(seed)
    pair = Pair(twins, lambda twin: twin.policy_class(name)(3))
    keys = mixed_keys(range(4000))
    for block_id, block in enumerate(keys):
        pair.do("insert", block, idle(block_id))
    pair.agree()
    held = [(pair.python.get(block), pair.compiled.get(block)) for block in keys[::5]]
    for _ in range(6):
        pair.do("touch", generator.sample(keys, 300))
        for block in generator.sample(keys, 50):
            pair.do("remove", block)
        protected = generator.sample(keys, 200)
        victims = [
            [block for block, _ in thing.evict(350, protected)]
            for thing in (pair.python, pair.compiled)
        ]
        require_equal(victims[0], victims[1], "the victims")
        same_values(held)
    pair.agree()
    for block_id, block in enumerate(keys):
        if pair.python.get(block) is None:
            pair.do("insert", block, idle(10_000 + block_id))
    pair.agree()
    same_values(held)
    pair.do("clear")
    pair.agree()
