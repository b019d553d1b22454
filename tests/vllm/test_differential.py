"""Random sequences through vLLM's manager and ours: not one observable difference."""

from __future__ import annotations

import dataclasses

import pytest
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.policies import registry
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.pair import DifferenceError, Pair
from tests.vllm.sequences import Drawn, Sequence

STEPS = 150


OWN = [name for name in registry.names() if name not in ("lru", "arc")]


def run_sequence(
    seed: int,
    cache_policy: str,
    tested: type = KVOffloadManager,
    reference: type = CPUOffloadingManager,
    *,
    tiny: bool = False,
) -> Pair:
    """Run a sequence; with a cache and a tracker that are always full if `tiny`."""
    drawn = Drawn(seed)
    rng = drawn.rng
    arguments = {
        "num_chunks": rng.randint(1, 4) if tiny else drawn.shape.num_chunks,
        "store_threshold": rng.randint(2, 3) if tiny else rng.choice((0, 1, 1, 1, 2, 3)),
        "max_tracker_size": rng.randint(3, 8) if tiny else rng.choice((0, 2, 10, 64_000)),
        "enable_events": rng.random() < 0.7,
    }
    # One context may serve two managers, of different kinds.
    shared = rng.random() < 0.2 and tested is not reference and issubclass(tested, KVOffloadManager)
    managers = [kind(cache_policy=cache_policy, **arguments) for kind in (reference, tested)]
    pair = Pair(*managers, drawn.keys, shared)
    try:
        Sequence(pair, drawn).run(STEPS)
        pair.call("touch", drawn.keys, contexts=pair.context("all"))  # every key that is known
    except BaseException as cause:
        raise DifferenceError(
            f"sequence {seed} ({tested.__name__}, {cache_policy}, {drawn.shape}, {arguments}), "
            f"call {len(pair.history)}: {cause}"
        ) from cause
    return pair


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_same_decisions(cache_policy):
    for number in range(SEQUENCES):
        run_sequence(SEED + number, cache_policy)


def test_ghosts_below_the_threshold_are_those_of_vllm():
    """A tracker that is smaller than the ghost lists forgets how often a ghost was offered.

    So a key which was evicted and is remembered comes back below the threshold.
    """
    for number in range(SEQUENCES):
        run_sequence(SEED + number, "arc", tiny=True)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("cache_policy", OWN)
def test_own_policies_keep_every_invariant_and_repeat(cache_policy, tiny):
    for number in range(max(20, SEQUENCES // 15)):
        run_sequence(SEED + number, cache_policy, reference=KVOffloadManager, tiny=tiny)


def test_the_sequences_reach_every_kind_of_call_and_answer():
    """A harness that compares nothing finds nothing: count what the sequences do."""
    seen: dict[str, int] = {}
    refused = evicted = 0
    for number in range(60):
        pair = run_sequence(SEED + number, "lru", CPUOffloadingManager)
        for line in pair.history:
            name = line.split(" ", 1)[0]
            seen[name] = seen.get(name, 0) + 1
        evicted += pair.evictions
        refused += pair.refusals
    calls = {"lookup", "prepare_load", "complete_load", "prepare_store", "complete_store", "touch"}
    calls |= {"on_new_request", "on_request_finished", "reset_cache", "take_events", "get_stats"}
    assert calls <= seen.keys()
    assert refused > 5
    assert evicted > 15


def test_the_rules_of_another_release_are_found():
    """The control: what differs between releases, the sequences see."""
    release = KVOffloadManager._release
    other = dataclasses.replace(release, provisional_ranks=not release.provisional_ranks)

    class OfAnotherRelease(KVOffloadManager):
        _release = other

    different = 0
    for number in range(100):
        try:
            run_sequence(SEED + number, "lru", OfAnotherRelease)
        except DifferenceError:
            different += 1
    assert different >= 5
