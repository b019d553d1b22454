"""One request context that serves two managers, as it does in vLLM.

What a manager and its policy know of a request hangs on its context, by class, so there is one
place for each: the last comer has it, and the other begins anew when the request comes back to it.
Two managers of vLLM share contexts, two of ours share others; each is compared with its like.
"""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.integrations.vllm._upstream import installed_release
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.pair import DifferenceError, Pair
from tests.vllm.requests import context, key
from tests.vllm.sequences import Drawn, Sequence
from tests.vllm.test_differential import build


class SharingPair(Pair):
    """Take the contexts of requests from a dict that another pair takes them from, too."""

    def __init__(self, reference, tested, keys, contexts):
        super().__init__(reference, tested, keys)
        self.contexts = contexts

    def context(self, name):
        if name not in self.contexts:
            self.contexts[name] = super().context(name)
        return self.contexts[name]


def run_sequence(seed: int, policies: tuple[str, str]) -> None:
    drawn = Drawn(seed)
    rng, num_chunks = drawn.rng, drawn.shape.num_chunks
    contexts: dict[str, tuple[ReqContext, ReqContext]] = {}
    sequences = []
    for cache_policy in policies:
        arguments = {
            "num_chunks": rng.choice((num_chunks, 1 + num_chunks // 2)),
            "store_threshold": rng.choice((1, 1, 2)),
        }
        reference = CPUOffloadingManager(cache_policy=cache_policy, **arguments)
        tested = build("manager", cache_policy, **arguments)
        sequences.append(Sequence(SharingPair(reference, tested, drawn.keys, contexts), drawn))
    for _ in range(200):
        rng.choice(sequences).step()


@pytest.mark.parametrize("policies", [("lru", "lru"), ("lru", "arc"), ("arc", "arc")])
def test_same_decisions_over_shared_contexts(policies):
    for number in range(SEQUENCES // 5):
        try:
            run_sequence(SEED + number, policies)
        except DifferenceError as difference:
            raise AssertionError(f"sequence {SEED + number}: {difference}") from difference


def store(manager, made: ReqContext, number: int, complete: bool = True) -> list[bytes]:
    """Store one chunk; return the keys that were evicted."""
    output = manager.prepare_store([key(number)], made)
    if complete:
        manager.complete_store(output.keys_to_store, made)
    return output.evicted_keys


@pytest.mark.skipif(
    not installed_release().provisional_ranks, reason="requests have no ranks in this vLLM"
)
@pytest.mark.parametrize("kind", ["reference", "manager"])
def test_a_request_keeps_its_rank_while_it_shows_another_manager_nothing_new(kind):
    first, second = (build(kind, "lru", num_chunks=3) for _ in range(2))
    shared = context([key(1), key(2)], "shared")
    store(first, shared, 1)
    store(first, context([key(3)], "other"), 3)
    store(second, context([key(4)], "writer"), 4, complete=False)
    store(second, shared, 4)  # being written by another: no access
    store(first, shared, 2)  # so this is older than what the other request has stored
    assert store(first, context([key(5)], "last"), 5) == [key(2)]


@pytest.mark.parametrize("kind", ["reference", "manager"])
def test_a_request_takes_a_new_rank_once_it_has_shown_another_manager_a_key(kind):
    first, second = (build(kind, "lru", num_chunks=3) for _ in range(2))
    shared = context([key(1), key(2)], "shared")
    store(first, shared, 1)
    store(first, context([key(3)], "other"), 3)
    store(second, shared, 1)
    store(first, shared, 2)
    assert store(first, context([key(5)], "last"), 5) == [key(1)]


def test_a_call_that_fails_leaves_the_other_managers_place_on_the_context():
    first, second = KVOffloadManager(3), KVOffloadManager(3)
    shared = context([key(1), key(2)], "shared")
    store(first, shared, 1)
    (state,) = shared._state.values()
    before = state.access
    assert before is not None
    with pytest.raises(KeyError, match="is not resident"):
        second.prepare_load([key(1)], shared)
    assert state.access is before
    assert list(shared._state.values()) == [state]
    second.lookup(key(1), shared)
    second.on_request_finished(shared)
    assert state.access is before
