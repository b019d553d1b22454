"""Policies that outlive their managers, whatever was pinned, passed over or pending."""

from __future__ import annotations

import random

import pytest

from kvoffload import BlockStatus
from kvoffload.policies import registry
from tests.blocks import block_hashes
from tests.conftest import read_budget
from tests.differential.pairs import Pair, Twins

KEYS = block_hashes(*range(14))


def drive_managers(pair: Pair, generator: random.Random) -> None:
    """Make calls on both managers that leave blocks of every kind behind."""
    pinned: list[bytes] = []
    for _ in range(generator.randrange(30)):
        batch = generator.sample(KEYS, generator.randrange(1, 5))
        choice = generator.randrange(6)
        if choice < 3:
            pair.do("touch", batch)
            pair.do("prepare_store", batch)
            if choice:
                pair.do("complete_store", batch, generator.random() < 0.9)
        elif choice == 3:
            if pair.do("prepare_load", batch[:2])[0] == "returned":
                pinned += batch[:2]
        elif choice == 4 and pinned:
            pair.do("complete_load", [pinned.pop(generator.randrange(len(pinned)))])
        else:
            pair.do("touch", batch)


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
        generator = random.Random(f"{seed} {number}")
        capacity = generator.randrange(1, 9)
        pair = Pair(twins, lambda twin, n=capacity: twin.CPUOffloadingManager(16, n, name))
        drive_managers(pair, generator)
        pair.python, pair.compiled = pair.python.policy, pair.compiled.policy
        pair.agree()
        drive_policies(pair, generator)
