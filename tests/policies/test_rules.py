"""Which block leaves: policies beside naive models of their rules, by calls in any order."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockStatus
from kvoffload.testing.policies import check_invariants
from tests import _python
from tests.blocks import NAMES, block_hashes, names
from tests.conftest import read_budget
from tests.policies.models import MODELS, PolicyModel
from tests.policies.steps import idle, policy_of

pytestmark = pytest.mark.fast

BLOCKS = list(NAMES)
REF_CNTS = (0, 0, 0, -1, 1)
SHARES = {"slru": "protected", "s3fifo": "small"}  # options that are a share of the capacity


def shown(value: Any) -> Any:
    """Return what an attribute shows, blocks as letters."""
    if isinstance(value, bytes):
        return names([value])
    return value if value is None or isinstance(value, int | float) else names(value)


class Ruled:
    """A policy and its model, driven by the same calls."""

    def __init__(self, twin: ModuleType, name: str, chance: random.Random) -> None:
        capacity = chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 40))
        self.chance = chance
        self.steps = STEPS | {"evict": chance.choice((3, 12, 20))}
        share = chance.choice((None, 0.0, 0.3, 0.5, 1.0)) if name in SHARES else None
        options = {} if share is None else {SHARES[name]: share}
        self.policy = twin.policy_class(name)(capacity, **options)
        self.ref_cnts: dict[bytes, int] = {}
        self.model: PolicyModel = MODELS[name](capacity, self.ref_cnts.__getitem__, share)

    def batch(self) -> list[bytes]:
        """Return a part of a chain, most often its beginning, or any blocks."""
        size = self.chance.choice((1, 1, 2, 3, 5))
        if self.chance.random() < 0.7:
            start = int(len(BLOCKS) * self.chance.random() ** 2)
            return BLOCKS[start : start + size]
        return self.chance.choices(BLOCKS, k=size)

    def step(self) -> None:
        """Make a call on both."""
        (step,) = self.chance.choices(list(self.steps), list(self.steps.values()))
        getattr(self, step)(self.batch())

    def touch(self, batch: list[bytes]) -> None:
        for _ in range(self.chance.choice((1, 1, 1, 1, 1, 1, 1, 9))):
            self.policy.touch(batch)
            self.model.touch(batch)

    def finish(self, batch: list[bytes]) -> None:
        self.policy.finished(batch)
        self.model.touch(batch, counts=False)

    def release(self, batch: list[bytes]) -> None:
        self.policy.release(batch)
        self.model.release(batch)

    def insert(self, batch: list[bytes]) -> None:
        for block in batch:
            if block not in self.ref_cnts:
                self.ref_cnts[block] = self.chance.choice(REF_CNTS)
                status = idle()
                status.ref_cnt = self.ref_cnts[block]
                self.policy.insert(block, status)
                self.model.enter(block)

    def remove(self, batch: list[bytes]) -> None:
        if batch[0] in self.ref_cnts:
            self.policy.remove(batch[0])
            self.model.leave(batch[0])
            del self.ref_cnts[batch[0]]

    def clear(self, _: list[bytes]) -> None:
        self.policy.clear()
        self.model.clear()
        self.ref_cnts.clear()

    def write(self, batch: list[bytes]) -> None:
        for block in batch:
            if block in self.ref_cnts:
                status: BlockStatus = self.policy.get(block)
                self.ref_cnts[block] = status.ref_cnt = self.chance.choice(REF_CNTS)

    def evict(self, batch: list[bytes]) -> None:
        n = self.chance.choice((0, 1, 1, 2, 3, 5, 7))
        asked = batch[1:]
        found, victims = self.policy.evict(n, asked), self.model.evict(n, asked)
        assert (None if found is None else names(block for block, _ in found)) == (
            None if victims is None else names(victims)
        )
        for block in victims or ():
            del self.ref_cnts[block]

    def agree(self) -> None:
        """Compare all that can be seen."""
        views = self.model.views()
        assert {name: shown(getattr(self.policy, name)) for name in views} == {
            name: shown(value) for name, value in views.items()
        }
        assert self.policy.num_released == len(self.model.released)
        assert self.policy.num_ghosts == self.model.num_ghosts()


STEPS = {
    "touch": 30,
    "finish": 6,
    "release": 5,
    "insert": 20,
    "remove": 2,
    "write": 10,
    "clear": 0.3,
}
"""Methods of `Ruled`, and how often each is called; beside them ``evict``."""


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_does_what_its_model_does(twin: ModuleType, name: str, seed: int) -> None:
    for number in range(max(10, round(60 * read_budget()))):
        ruled = Ruled(twin, name, random.Random(f"{seed} {name} {number}"))
        for _ in range(50):
            for _ in range(3):
                ruled.step()
            ruled.agree()  # what differs stays
        check_invariants(ruled.policy)


def test_many_blocks_leave_in_one_scan() -> None:
    looked_at = 0

    class Counting(frozenset[bytes]):
        def __contains__(self, block: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().__contains__(block)

    size = 400
    blocks = block_hashes(*range(size))
    policy = policy_of(_python, "arc", size, blocks)
    policy.touch(blocks[: size // 2])
    for pinned in blocks[:50]:
        policy.get(pinned).ref_cnt = 1
    assert len(policy._evict(size - 50, Counting())) == size - 50
    assert looked_at == size - 50
