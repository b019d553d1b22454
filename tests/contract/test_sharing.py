"""A session that ends releases its own blocks and none that other sessions share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvoffload import BlockHash
from kvoffload.managers import calls
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import A, B, C, D, E, F, G, H, block_hash, block_hashes, names, once, store
from tests.contract.test_releases import ENDS, EVERY_POLICY, leaving
from tests.parts import ListPolicy
from tests.policies.steps import request as serve


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


@EVERY_POLICY
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


@EVERY_POLICY
@pytest.mark.parametrize("known", [1, 2])
def test_who_knows_a_prompt_cannot_release_it(twin: ModuleType, policy: str, known: int) -> None:
    manager = new_manager(twin, policy)
    serve(manager, [A, B, C])
    for _ in range(3):
        end(manager, [A, B][:known])
        assert manager.policy.num_released == 0
    manager.release([A, B, C])
    assert manager.policy.num_released == 3 - known


def test_shared_lasts_as_long_as_the_block_is_resident(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B])
    serve(manager, [A, C])
    store(manager, [block_hash(number) for number in range(100, 108)])  # evicts all
    serve(manager, [A, B])
    end(manager, [A, B])
    assert manager.policy.num_released == 2


def test_a_reset_forgets_who_shares(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B])
    old = manager.begin([A, C])
    manager.reset_cache()
    serve(manager, [A, B])
    end(manager, [A, B])
    assert manager.policy.num_released == 2
    old.prepare_store(1)  # from before the reset: by now it shares A
    old.finish()
    assert manager.policy.num_released == 1
    check_invariants(manager)


def test_a_failed_store_leaves_no_mark(twin: ModuleType) -> None:
    manager = new_manager(twin)
    request = manager.begin([A, B])
    request.prepare_store()
    request.finish()
    request.complete_store(False)
    serve(manager, [A, B, C])
    end(manager, [A, B, C])
    assert manager.policy.num_released == 3
    check_invariants(manager)


def test_a_refused_store_leaves_the_mark_where_it_was(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B])
    manager.prepare_load([A, B])
    request = manager.begin([A, B, *block_hashes(*range(20, 30))])
    assert request.prepare_store() is None
    request.finish()
    manager.complete_load([A, B])
    end(manager, [A, B])
    assert manager.policy.num_released == 2


def test_an_empty_request_changes_nothing(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B])
    end(manager, [])
    manager.begin(once([])).extend([])
    end(manager, [A, B])
    assert manager.policy.num_released == 2


def test_a_repeat_counts_where_it_stands(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B, A])
    end(manager, [A, B, A, A])
    assert manager.policy.num_released == 2
    serve(manager, [A, B])  # B was not the last
    end(manager, [A, B, A])
    assert manager.policy.num_released == 0


def test_two_requests_of_one_session_at_a_time_share_its_blocks(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B])
    first, second = manager.begin([A, B, C]), manager.begin([A, B, D])
    for request in (first, second):
        request.prepare_store()
        request.complete_store()
        request.finish(hints=ENDS)
    assert manager.policy.num_released == 2
    assert names(leaving(manager, 6)[-2:]) == "CD"


@pytest.mark.parametrize("ends_first", [True, False])
def test_requests_that_store_a_prompt_at_the_same_time_share_it(
    twin: ModuleType, ends_first: bool
) -> None:
    manager = new_manager(twin)
    ending, other = manager.begin([A, B, C]), manager.begin([A, B, D])
    ending.prepare_store()
    other.prepare_store()
    if ends_first:
        ending.finish(hints=ENDS)
        assert manager.policy.num_released == 3
        other.finish()  # takes A and B back
    else:
        other.finish()
        ending.finish(hints=ENDS)
    assert manager.policy.num_released == 1
    end(manager, [A, B, D])
    assert manager.policy.num_released == 2


@pytest.mark.parametrize("ends_first", [True, False])
@pytest.mark.parametrize("which_ends", [0, 1])
@pytest.mark.parametrize("policy", ["lru", ListPolicy])
def test_a_request_that_finds_nothing_to_store_shares_what_others_have_stored_meanwhile(
    twin: ModuleType, policy: Any, which_ends: int, ends_first: bool
) -> None:
    manager = twin.CPUOffloadingManager(16, 8, policy)
    requests = manager.begin([A, B]), manager.begin([A, B])
    for request in requests:
        request.prepare_store()
        request.complete_store()
    ending, other = requests[which_ends], requests[1 - which_ends]
    if ends_first:
        ending.finish(hints=ENDS)
        other.finish()
    else:
        other.finish()
        ending.finish(hints=ENDS)
    end(manager, [A, B])
    assert not calls.unshared(manager, [A, B])


def test_a_refused_store_shares_what_others_have_stored_meanwhile(twin: ModuleType) -> None:
    manager = new_manager(twin)
    refused, other = manager.begin([A, B, *block_hashes(*range(20, 30))]), manager.begin([A, B])
    other.prepare_store()
    other.complete_store()
    assert refused.prepare_store() is None
    refused.finish(hints=ENDS)
    assert manager.policy.num_released == 0


def test_what_the_manager_stored_for_a_request_is_its_own(twin: ModuleType) -> None:
    manager = new_manager(twin)
    with manager.begin([A, B], hints=ENDS):
        store(manager, [A, B])
    assert manager.policy.num_released == 2


def test_an_answer_that_is_known_is_shared(twin: ModuleType) -> None:
    manager = new_manager(twin)
    serve(manager, [A, B, C, D])
    request = manager.begin([A, B])
    request.extend([C])
    request.finish(hints=ENDS)
    assert manager.policy.num_released == 0
    end(manager, [A, B, C, D])
    assert manager.policy.num_released == 1


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


def test_the_marks_of_eight_blocks_are_kept_apart(twin: ModuleType) -> None:
    manager = new_manager(twin)
    for blocks in ([A, B], [A, B, C], [D], [D, E], [F, G], [F, H]):
        serve(manager, blocks)
    manager.release([A, B, C, D, E, F, G, H])
    assert manager.policy.num_released == 7


def test_a_request_served_at_once_may_be_shorter_than_its_end(twin: ModuleType) -> None:
    """The mark of its end goes to its last resident block, and to no block outside of it."""
    manager = new_manager(twin)
    serve(manager, [A])
    calls.end(manager, [], set())
    calls.end(manager, [A, C], set(), 3)  # C is not resident, so it ends at A
    serve(manager, [A, B])  # goes on there: the same session
    end(manager, [A, B])
    assert manager.policy.num_released == 2
    check_invariants(manager)
