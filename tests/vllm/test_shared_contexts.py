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
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.pair import DifferenceError, Pair
from tests.vllm.requests import context, key
from tests.vllm.sequences import Drawn, Sequence


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
        tested = KVOffloadManager(cache_policy=cache_policy, **arguments)
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


def test_a_call_that_fails_leaves_the_other_managers_place_on_the_context():
    first, second = KVOffloadManager(3), KVOffloadManager(3)
    shared = context([key(1), key(2)], "shared")
    first.prepare_store([key(1)], shared)
    first.complete_store([key(1)], shared)
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
