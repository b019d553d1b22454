"""Random sequences through vLLM's manager and ours: not one observable difference."""

from __future__ import annotations

import dataclasses
import random

import pytest
from vllm.v1.kv_offload.base import make_offload_key
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


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(10))
def test_positions_are_found_however_they_were_noted(cache_policy, seed):
    """Noted in any order, under other objects than are shown, anew while the request runs."""
    rng = random.Random(SEED + seed)
    keys = [bytes(make_offload_key(b"%032d" % n, n % 3)) for n in range(40)]
    managers = [made(20, cache_policy) for made in (CPUOffloadingManager, KVOffloadManager)]
    pair = Pair(*managers, keys)
    for number in range(20):
        contexts = pair.context(f"r{number}")
        chain = rng.sample(keys, rng.randint(1, 12))
        noted = rng.sample(list(enumerate(chain)), rng.randint(0, len(chain)))
        for position, key in noted:
            pair.set_position(contexts, bytes(bytearray(key)), position * 16)
        for start in range(0, len(chain), 5):
            offer = [bytes(bytearray(key)) for key in chain[start : start + 5]]
            output = pair.call("prepare_store", offer, contexts=contexts)
            if output is not None:
                pair.call("complete_store", output.keys_to_store, contexts=contexts)
            for position, key in noted[::2]:
                pair.set_position(contexts, key, (100 - position) * 16)
        pair.call("on_request_finished", contexts=contexts)


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


class FlawedStore(CPUOffloadingManager):
    """vLLM's manager with a flaw of one kind at a time."""

    flaw = ""

    def prepare_store(self, keys, req_context):
        output = super().prepare_store(keys, req_context)
        if self.flaw == "order of victims" and output is not None:
            output.evicted_keys.reverse()
        return output

    def on_request_finished(self, req_context):
        if self.flaw != "finish":
            super().on_request_finished(req_context)

    def touch(self, keys, req_context):
        if self.flaw == "touch":
            keys = list(keys)[::-1]
        super().touch(keys, req_context)

    def complete_store(self, keys, req_context, success=True):
        super().complete_store(keys, req_context, success)
        if self.flaw == "pending" and self._num_write_pending_chunks:
            self._num_write_pending_chunks -= 1


@pytest.mark.parametrize("flaw", ["order of victims", "finish", "touch", "pending"])
def test_a_flaw_is_found(flaw):
    flawed = type("Flawed", (FlawedStore,), {"flaw": flaw})

    def run_many():
        for number in range(100):
            run_sequence(SEED + number, "lru", flawed)

    with pytest.raises(DifferenceError):
        run_many()
