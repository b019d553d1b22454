"""Sessions: one that ends releases its own blocks, and released blocks leave before all others.

What several requests make of it, in any order, `test_requests` compares with a model; here are the
cases by hand, and what hit density does, which has no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import BlockHash, Hints
from kvoffload.policies import registry
from tests.blocks import A, B, C, D, E, F, G, H, block_hash, names
from tests.observation import observe
from tests.policies.steps import evict, policy_of
from tests.policies.steps import request as serve
from tests.strategies import BATCHES

ENDS = Hints(ends=True)
HIT_DENSITY = pytest.mark.parametrize("policy", ["hit-density", "hit-density?guard=0"])


def filled(twin: ModuleType, policy: str, *batches: Sequence[BlockHash]) -> Any:
    """Return a manager that has room for the batches and has stored them as a request each."""
    manager = twin.CPUOffloadingManager(16, sum(map(len, batches)), policy)
    for batch in batches:
        serve(manager, list(batch))
    return manager


def leaving(manager: Any, n: int) -> list[BlockHash]:
    """Return the `n` blocks that leave next, by a store whose blocks every policy takes in."""
    manager.policy.set_declining(False)
    wanted = [block_hash(number) for number in range(1000, 1000 + n)]
    output = manager.prepare_store(wanted)
    assert len(output.block_hashes_to_store) == n
    return list(output.block_hashes_evicted)


def blocks_of(letters: str) -> list[BlockHash]:
    """Return the blocks that letters name."""
    return [dict(zip("ABCDE", (A, B, C, D, E), strict=True))[letter] for letter in letters]


def new_manager(twin: ModuleType, policy: str = "lru") -> Any:
    """Return a manager that stores everything."""
    manager = twin.CPUOffloadingManager(16, 8, policy)
    manager.policy.set_declining(False)
    return manager


def end(manager: Any, blocks: list[BlockHash]) -> None:
    """Serve a request, all of whose blocks are resident, that ends its session."""
    manager.begin(blocks).finish(hints=ENDS)


def serve_as(manager: Any, text: str) -> None:
    """Serve a prompt whose blocks are letters, and behind a plus those of its answer."""
    prompt, answer = (blocks_of(part) for part in text.partition("+")[::2])
    with manager.begin(prompt) as request:
        request.prepare_store()
        request.extend(answer)
        request.prepare_store(len(prompt))
    request.complete_store()


@pytest.mark.parametrize("policy", ["lru", "hit-density"])
@pytest.mark.parametrize(
    ("served", "released"),
    [
        pytest.param(["ABC", "ABDE"], "ED", id="two sessions share a prompt"),
        pytest.param(["ABC", "ABD"], "D", id="the last answer is rewritten: a branch"),
        pytest.param(["AB", "AB", "ABC+D"], "DCBA", id="a session goes on"),
        pytest.param(["AB+CD", "ABE"], "EBA", id="without the answer"),
        pytest.param(["AB+CD", "ABCE"], "ECBA", id="with a part of it"),
        pytest.param(["AB+CD", "ABCDE"], "EDCBA", id="with all of it"),
        pytest.param(["+AB", "AC"], "CA", id="with a part of what was an answer alone"),
        pytest.param(["AB+C", "ABCD", "ABE"], "E", id="leaves an answer that was sent again"),
        pytest.param(["AB", "(ABC)", "ABCD"], "DCBA", id="goes on, its last blocks not stored"),
        pytest.param(["ABC", "(ABD)", "ABDE"], "ED", id="shares a prompt and stores nothing"),
    ],
)
def test_a_session_that_ends_releases_the_blocks_that_are_its_own(
    twin: ModuleType, policy: str, served: list[str], released: str
) -> None:
    """A request in parentheses stores nothing; the last one is of the session that ends."""
    manager = new_manager(twin, policy)
    for text in served:
        if text[0] == "(":
            manager.begin(blocks_of(text[1:-1])).finish()
        else:
            serve_as(manager, text)
    end(manager, blocks_of(served[-1].replace("+", "")))
    assert manager.policy.num_released == len(released)
    assert names(leaving(manager, 8 - len(manager) + len(released))) == released


@HIT_DENSITY
def test_released_blocks_leave_first_as_told_the_last_of_each_first(
    twin: ModuleType, policy: str
) -> None:
    manager = filled(twin, policy, [A, B], [C, D], [E, F], [G, H])
    manager.prepare_load([C])
    manager.release([G, H])
    manager.release([C, D, block_hash(77)])
    manager.release([G])  # it keeps its turn
    assert manager.policy.num_released == 4
    assert names(leaving(manager, 3)) == "HGD"
    manager.complete_load([C])
    assert names(manager.prepare_store([b"another"]).block_hashes_evicted) == "C"
    manager.release([A])
    manager.reset_cache()
    assert manager.policy.num_released == 0
    for batch in ([A, B], [A, C]):  # both sessions share A, until a reset
        serve(manager, batch)
    manager.release(one for one in [A] if (manager.reset_cache(), serve(manager, [one])))
    assert manager.policy.num_released == 1


@HIT_DENSITY
@given(setup=st.lists(BATCHES, max_size=6), released=BATCHES, used=BATCHES)
def test_a_use_takes_a_block_back_to_where_it_would_be(
    twin: ModuleType, policy: str, setup: list[Any], released: Any, used: Any
) -> None:
    def run(*, with_release: bool) -> Any:
        manager = twin.CPUOffloadingManager(16, 6, policy)
        for batch in setup:
            serve(manager, batch)
        if with_release:
            manager.release(released)
        manager.touch([*used, *released])
        return manager

    one, other = run(with_release=True), run(with_release=False)
    assert observe(one) == observe(other)


@HIT_DENSITY
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


def test_a_policy_used_alone_releases_as_well(twin: ModuleType) -> None:
    alone = policy_of(twin, "hit-density", 4, (A, B, C, D))
    alone.release([B, C])
    assert alone.num_released == 2
    assert evict(alone, 2) == "CB"


def test_a_subclass_s_own_touch_changes_no_mark(twin: ModuleType) -> None:
    class Touching(twin.CPUOffloadingManager):  # type: ignore[misc,name-defined]
        def touch(self, hashes: Any) -> None:
            super().touch(hashes)

    manager = Touching(16, 8)
    serve(manager, [A, B, C])
    request = manager.begin([A, B])
    request.extend([D])
    request.prepare_store()
    request.complete_store()
    request.finish(hints=ENDS)
    assert manager.policy.num_released == 1


def tenants(rng: random.Random, num: int) -> Iterator[list[BlockHash]]:
    """Yield requests of eight tenants, each with a prompt of its own and two new blocks."""
    prompts = [[BlockHash(b"%d-%d" % (tenant, n)) for n in range(12)] for tenant in range(8)]
    for number in range(num):
        yield [*rng.choice(prompts), BlockHash(b"a%d" % number), BlockHash(b"b%d" % number)]


@pytest.mark.parametrize("policy", [entry for entry in registry.names() if entry != "hit-density"])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_truthful_ends_cost_others_at_most_a_hundredth_of_their_hits(
    twin: ModuleType, policy: str, share: float
) -> None:
    def hits(share: float) -> int:
        manager = twin.CPUOffloadingManager(16, 130, policy)
        rng, found = random.Random(1), 0
        for blocks in tenants(rng, 600):
            request = manager.begin(blocks)
            found += request.lookup()
            request.prepare_store()
            request.finish(hints=ENDS if rng.random() < share else None)
            request.complete_store()
        return found

    assert hits(share) >= 0.99 * hits(0.0)
