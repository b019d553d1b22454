"""Hit density above a tier: nothing is declined as long as a block may leave."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from kvoffload.testing.policies import check_invariants
from tests.blocks import block_hashes
from tests.differential.pairs import Pair, Twins
from tests.policies.steps import request
from tests.policies.test_duel import following_lru
from tests.policies.test_hit_density import train

CAPACITY = 12
FRESH = block_hashes(*range(10**8, 10**8 + 2 * CAPACITY))


def trained(twin: ModuleType, options: str = "") -> Any:
    """Return a full manager that would decline what it has not seen before."""
    manager = twin.CPUOffloadingManager(16, CAPACITY, f"hit-density{options}")
    train(manager)
    output = manager.prepare_store(FRESH[:4])
    assert len(output.block_hashes_to_store) < 4
    manager.complete_store(output.block_hashes_to_store)
    return manager


@pytest.mark.parametrize("options", ["", "?guard=0"])
def test_leading_blocks_get_their_slots_while_others_may_leave(
    twin: ModuleType, options: str
) -> None:
    manager = trained(twin, options)
    manager.policy.set_declining(False)
    output = manager.prepare_store(FRESH[:4])
    stored = FRESH[:4]
    assert set(stored) <= set(manager.policy.rings[0])
    manager.complete_store(output.block_hashes_to_store)
    declined = manager.stats()["not_admitted"]
    manager.prepare_load(stored)  # and the others may leave
    output = manager.prepare_store(FRESH[4:])
    assert output.block_hashes_to_store == FRESH[4:CAPACITY]
    assert len(output.block_hashes_evicted) == CAPACITY - 4
    assert manager.stats()["not_admitted"] - declined == len(FRESH) - CAPACITY
    check_invariants(manager)


def test_by_lru_s_rule_the_leading_blocks_are_stored(twin: ModuleType) -> None:
    manager, _ = following_lru(twin)
    manager.policy.set_declining(False)
    capacity = manager.policy.cache_capacity
    blocks = block_hashes(*range(10**7, 10**7 + capacity + 1))
    assert manager.prepare_store(blocks).block_hashes_to_store == blocks[:-1]
    check_invariants(manager)


def test_a_reset_does_not_change_it_and_without_a_tier_blocks_are_declined(
    twin: ModuleType,
) -> None:
    manager = trained(twin)
    manager.policy.set_declining(False)
    manager.reset_cache()
    train(manager)
    assert len(manager.prepare_store(FRESH).block_hashes_to_store) == CAPACITY
    manager.complete_store(FRESH)
    manager.policy.set_declining(True)
    train(manager)
    assert len(manager.prepare_store(FRESH[CAPACITY:]).block_hashes_to_store) < CAPACITY


def test_a_policy_of_one_s_own_declines_as_ever(twin: ModuleType) -> None:
    class First(twin.LRUCachePolicy):  # type: ignore[misc, name-defined]
        def make_room(self, hashes: Any, num_free: int, protected: Any) -> Any:
            return super().make_room(list(hashes)[:1], num_free, protected)

    manager = twin.CPUOffloadingManager(16, 4, First)
    manager.policy.set_declining(False)
    assert manager.prepare_store(FRESH[:3]).block_hashes_to_store == FRESH[:1]


@pytest.mark.thorough
def test_the_miniature_by_density_declines_as_little(twins: Twins) -> None:
    """The duel compares rules as they are followed, and in both twins alike."""
    hits = []
    for declines in (True, False):
        pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 200, "hit-density"))
        for manager in (pair.python, pair.compiled):
            manager.policy.set_declining(declines)
        chance = random.Random(1)
        for number in range(150):
            popular = [10**6 * chance.randrange(6) + place for place in range(30)]
            once = [10**7 + 60 * number + place for place in range(60)]
            for blocks in (block_hashes(*popular), block_hashes(*once)):
                for manager in (pair.python, pair.compiled):
                    request(manager, blocks)
        pair.agree()
        hits.append(pair.compiled.policy.trial_hits)
    assert hits[0]["lru"] == hits[1]["lru"]
    assert hits[0]["hit-density"] > hits[1]["hit-density"]
