"""Policies that outlive their managers, whatever was pinned, passed over or pending."""

from __future__ import annotations

import random

import pytest

from kvoffload import BlockStatus
from kvoffload.policies import registry
from tests.conftest import read_budget
from tests.differential.pairs import Pair, Twins
from tests.differential.traffic import Traffic
from tests.differential.workloads import mixed_keys

KEYS = mixed_keys(range(14))


def drive_policies(pair: Pair, generator: random.Random) -> None:
    """Make calls on both policies, and compare all that can be seen after each."""
    for step in range(40):
        batch = generator.sample(KEYS, generator.randrange(1, 5))
        choice = generator.randrange(12)
        if choice < 3:
            pair.do("evict", generator.randrange(4), batch[: generator.randrange(3)])
        elif choice < 5:
            pair.do("touch", batch)
        elif choice == 5:
            status = BlockStatus(100 + step)
            status.ref_cnt = generator.choice([0, 0, 1])
            pair.do("insert", batch[0], status)
        elif choice == 6:
            pair.do("remove", batch[0])
        elif choice == 7 and pair.python.get(batch[0]) is None:
            pair.do("make_room", batch[:1], 0, ())
        elif choice == 8 and generator.random() < 0.1:
            pair.do("clear")
        else:
            statuses = [policy.get(batch[0]) for policy in (pair.python, pair.compiled)]
            ref_cnt = generator.choice([0, 0, 0, 1, -1])
            for status in statuses:
                if status is not None:
                    status.ref_cnt = ref_cnt
        pair.agree()


@pytest.mark.thorough
@pytest.mark.parametrize("name", registry.names())
def test_policies_without_their_managers_are_twins(twins: Twins, name: str, seed: int) -> None:
    for number in range(max(1, round(25 * read_budget()))):
        traffic = Traffic.of(twins, name, seed + number, capacity=1 + number % 8)
        traffic.run(traffic.draw.randrange(60))
        pair, generator = traffic.pair, traffic.draw
        pair.python, pair.compiled = (manager.policy for manager in pair.both)
        del traffic
        assert pair.do("touch", KEYS)[0] == "returned"  # the managers are gone
        drive_policies(pair, generator)
