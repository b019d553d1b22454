"""A touch of what a request has stored itself, as one that drives KV groups makes it."""

from __future__ import annotations

import random

import pytest

from kvoffload.managers import calls
from kvoffload.policies import registry
from tests.differential.pairs import Pair, Twins
from tests.differential.workloads import GENERATED


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("capacity", [16, 60])
def test_touches_of_what_a_request_has_stored_itself(
    twins: Twins, seed: int, name: str, capacity: int
) -> None:
    """They show ready blocks as pending: what is passed over meanwhile can be evicted after it."""
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, name))
    chance = random.Random(seed)
    for number, keys in enumerate(GENERATED["conversations"](seed, 100, 36)):
        pair.do("prepare_store", keys)
        pair.do("complete_store", keys)
        inserted = {key for key in keys if chance.random() < 0.7}
        for manager in pair.both:
            calls.touch_stored(manager, keys, inserted)
        if number % 10 == 0:
            pair.agree()
    pair.agree()
