"""Released blocks leave before all others, until somebody uses them again."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import BlockHash, Hints
from kvoffload.policies import registry
from tests.blocks import A, B, C, D, E, F, G, H, block_hash, names, store
from tests.observation import observe
from tests.policies.steps import evict, policy_of, request
from tests.strategies import BATCHES

ENDS = Hints(ends=True)
EVERY_POLICY = pytest.mark.parametrize("policy", registry.names())


def filled(twin: ModuleType, policy: str, *batches: Sequence[BlockHash]) -> Any:
    """Return a manager that has room for the batches and has stored them as a request each."""
    manager = twin.CPUOffloadingManager(16, sum(map(len, batches)), policy)
    for batch in batches:
        request(manager, batch)
    return manager


def leaving(manager: Any, n: int) -> list[BlockHash]:
    """Return the `n` blocks that leave next, by a store whose blocks every policy takes in."""
    manager.policy.set_declining(False)
    wanted = [block_hash(number) for number in range(1000, 1000 + n)]
    output = manager.prepare_store(wanted)
    assert len(output.block_hashes_to_store) == n
    return list(output.block_hashes_evicted)


@EVERY_POLICY
def test_they_leave_first_as_told_the_last_of_each_first(twin: ModuleType, policy: str) -> None:
    manager = filled(twin, policy, [A, B], [C, D], [E, F], [G, H])
    manager.release([G, H])
    manager.release([C, D, block_hash(77)])
    manager.release([G])  # it keeps its turn
    assert manager.policy.num_released == 4
    assert names(leaving(manager, 4)) == "HGDC"
    assert manager.policy.num_released == 0


@EVERY_POLICY
def test_a_session_that_ends_releases_its_blocks_when_it_finishes(
    twin: ModuleType, policy: str
) -> None:
    manager = filled(twin, policy, [A, B], [C, D], [E, F])
    with manager.begin([C, D], hints=ENDS) as ending:
        assert manager.policy.num_released == 0
        ending.lookup()
    assert names(leaving(manager, 2)) == "DC"


def test_the_later_word_counts(twin: ModuleType) -> None:
    manager = filled(twin, "lru", [A, B], [C, D])
    manager.begin([A, B], hints=ENDS).finish(hints=Hints())
    assert manager.policy.num_released == 0
    manager.begin([A, B], hints=Hints(expect_s=2.0)).finish(hints=ENDS)
    assert manager.policy.num_released == 2


@EVERY_POLICY
def test_blocks_in_use_stay_until_they_may_leave(twin: ModuleType, policy: str) -> None:
    manager = filled(twin, policy, [A, B], [C, D])
    manager.prepare_load([B])
    manager.release([A, B])
    assert names(leaving(manager, 1)) == "A"
    manager.complete_load([B])
    assert names(manager.prepare_store([H]).block_hashes_evicted) == "B"


@EVERY_POLICY
@given(setup=st.lists(BATCHES, max_size=6), released=BATCHES, used=BATCHES)
def test_a_use_takes_a_block_back_to_where_it_would_be(
    twin: ModuleType, policy: str, setup: list[Any], released: Any, used: Any
) -> None:
    def run(*, with_release: bool) -> Any:
        manager = twin.CPUOffloadingManager(16, 6, policy)
        for batch in setup:
            request(manager, batch)
        if with_release:
            manager.release(released)
        manager.touch([*used, *released])
        return manager

    one, other = run(with_release=True), run(with_release=False)
    assert observe(one) == observe(other)


@EVERY_POLICY
def test_an_end_told_at_the_begin_pushes_nothing_out(twin: ModuleType, policy: str) -> None:
    manager = filled(twin, policy, [A, B], [C, D])
    manager.release([D])
    ending = manager.begin([E, F, G], hints=ENDS)
    output = ending.prepare_store()
    assert names(output.block_hashes_to_store) == "E"
    assert names(output.block_hashes_evicted) == "D"
    assert manager.stats()["not_admitted"] == 2
    ending.complete_store()
    ending.finish()
    assert names(leaving(manager, 1)) == "E"


@EVERY_POLICY
def test_a_reset_forgets_them(twin: ModuleType, policy: str) -> None:
    manager = filled(twin, policy, [A, B])
    manager.release([A, B])
    manager.reset_cache()
    assert manager.policy.num_released == 0
    store(manager, [A, B])
    assert manager.policy.num_released == 0


@EVERY_POLICY
def test_a_policy_used_alone_releases_as_well(twin: ModuleType, policy: str) -> None:
    alone = policy_of(twin, policy, 4, (A, B, C, D))
    alone.release([B, C])
    assert alone.num_released == 2
    assert evict(alone, 2) == "CB"


def test_a_policy_that_a_manager_owns_refuses(twin: ModuleType) -> None:
    manager = filled(twin, "lru", [A])
    with pytest.raises(Exception, match="release"):
        manager.policy.release([A])
    assert manager.policy.num_released == 0
