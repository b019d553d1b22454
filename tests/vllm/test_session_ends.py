"""What a client says of its session, as vLLM's manager acts on it; `test_hints` reads it."""

from __future__ import annotations

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.integrations.vllm.hints import IGNORED_METRIC
from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from kvoffload.watch import Watch
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.engine import BLOCK_TOKENS, SPECS, Engine
from tests.vllm.pair import Pair
from tests.vllm.requests import WithoutHints, context
from tests.vllm.sequences import Drawn, Sequence

ENDS = {"kvoffload": {"ends": True}}
MALFORMED = {"kvoffload": {"ends": "yes", "expect_s": float("nan"), "pin": 1, "source": 7}}
POLICIES = registry.names()


def keys(session: int, first: int, stop: int) -> list[bytes]:
    return [
        bytes(make_offload_key(b"%016d%016d" % (session, place), 0)) for place in range(first, stop)
    ]


class Requests:
    """Run requests of a manager, one after the other."""

    def __init__(self, cache_policy: str, num_chunks: int):
        self.manager = KVOffloadManager(num_chunks, cache_policy)
        self.count = 0

    def run(self, all_keys, params=None, hints=None, *, asked_from=0, announced=True, inside=False):
        """Load what is there of the keys from a place on, store the rest; return the output."""
        self.count += 1
        manager = self.manager
        made = context(all_keys, f"r{self.count}", params, hints)
        if inside:  # vLLM looks inside the first chunk, as with its prefix_match_unit
            made.set_offload_key_position(keys(999, 0, 1)[0], BLOCK_TOKENS // 2)
        if announced:
            manager.on_new_request(made)
        asked = all_keys[asked_from:]
        there = [key for key in asked if manager._chunk(key) is not None]
        if there:
            manager.prepare_load(there, made)
            manager.complete_load(there, made)
        output = manager.prepare_store(asked, made)
        manager.on_request_finished(made)
        manager.complete_store(output.keys_to_store, made)
        check_invariants(manager)
        return output

    def evicted(self, num_keys: int = 2) -> list[bytes]:
        """Return which keys leave for those of a new session, after which all leave again."""
        return self.run(keys(900 + self.count, 0, num_keys)).evicted_keys

    @property
    def num_released(self) -> int:
        return self.manager._rules.policy.num_released

    def ignored(self) -> float:
        data = self.manager.get_stats().data["data"]
        return data.get(IGNORED_METRIC, {}).get((), 0)


def filled(cache_policy: str, params=None, hints=None, **options) -> Requests:
    """Three sessions fill a cache; what is given is said by the last."""
    requests = Requests(cache_policy, 9)
    for session in range(2):
        requests.run(keys(session, 0, 3))
    requests.run(keys(2, 0, 3), params, hints, **options)
    return requests


ACTION = KvHintsEnvelope("1", "m", [KvHintAction("a", "kvoffload.hint", "1", {"ends": True})])


@pytest.mark.parametrize("announced", [True, False])  # above secondary tiers it is not
@pytest.mark.parametrize(("params", "hints"), [(ENDS, None), (None, ACTION)])
@pytest.mark.parametrize("cache_policy", POLICIES)
def test_the_chunks_of_a_session_that_ends_leave_first_the_last_first(
    cache_policy, params, hints, announced
):
    requests = filled(cache_policy, params, hints, announced=announced)
    assert requests.num_released == 3
    assert requests.evicted() == keys(2, 0, 3)[:0:-1]
    assert requests.ignored() == 0


@pytest.mark.parametrize("cache_policy", ["lru", "arc", "sieve"])
def test_without_the_hint_they_stay(cache_policy):
    """The control."""
    assert not set(filled(cache_policy).evicted()) & set(keys(2, 0, 3))


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("cache_policy", POLICIES)
def test_what_the_accelerator_had_of_it_leaves_too(cache_policy, announced):
    requests = filled(cache_policy)
    requests.run(keys(1, 0, 3), ENDS, asked_from=2, announced=announced)
    ended = context(keys(0, 0, 3), "all on the accelerator", ENDS)
    if announced:
        requests.manager.on_new_request(ended)
    requests.manager.on_request_finished(ended)
    assert requests.evicted(5) == [*keys(1, 0, 3)[::-1], *keys(0, 1, 3)[::-1]]


@pytest.mark.parametrize("resent", [False, True])
@pytest.mark.parametrize("cache_policy", POLICIES)
def test_a_session_goes_on_whether_its_answer_is_sent_again_or_not(cache_policy, resent):
    requests = Requests(cache_policy, 9)
    manager, prompt, answer = requests.manager, keys(0, 0, 2), keys(0, 2, 3)
    first = context(prompt, "first")
    manager.on_new_request(first)
    stored = manager.prepare_store(prompt, first).keys_to_store
    first.set_offload_key_position(answer[0], 1 + first.get_offload_key_position(prompt[1]))
    stored += manager.prepare_store(answer, first).keys_to_store
    manager.on_request_finished(first)
    manager.complete_store(stored, first)
    following = [*prompt, *(answer if resent else []), *keys(1, 0, 1)]
    requests.run(following, ENDS)
    assert requests.num_released == len(following)


@pytest.mark.parametrize("cache_policy", POLICIES)
def test_a_use_by_another_request_takes_them_back_at_once(cache_policy):
    requests = filled(cache_policy, ENDS)
    used = keys(2, 0, 2)
    other = context(used, "other")
    requests.manager.on_new_request(other)
    requests.manager.prepare_load(used, other)
    requests.manager.complete_load(used, other)
    assert requests.num_released == 1
    requests.manager.on_request_finished(other)
    assert requests.num_released == 1
    assert requests.evicted(1) == keys(2, 2, 3)
    assert not set(requests.evicted(1)) & {used[0]}


@pytest.mark.parametrize("cache_policy", POLICIES)
def test_a_session_that_ends_takes_only_free_and_released_room(cache_policy):
    requests = filled(cache_policy)
    output = requests.run(keys(3, 0, 3), ENDS)
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    requests.run(keys(1, 0, 3), ENDS)
    output = requests.run(keys(3, 0, 4), ENDS)
    assert output.keys_to_store == keys(3, 0, 3)
    assert output.evicted_keys == keys(1, 0, 3)[::-1]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("on_accelerator", [0, 2])
@pytest.mark.parametrize("cache_policy", POLICIES)
def test_an_end_leaves_what_other_sessions_share(cache_policy, on_accelerator, inside):
    prompt = keys(0, 0, 2)
    for honest in (True, False):
        requests = Requests(cache_policy, 9)
        requests.run(prompt + keys(1, 0, 2), inside=inside)
        if honest:  # another session, which has the prompt on the accelerator or not
            requests.run(prompt + keys(2, 0, 2), ENDS, asked_from=on_accelerator)
        else:  # a client that knows the prompt
            requests.run(prompt, ENDS)
        assert requests.num_released == (2 if honest else 0)
        requests.run(prompt + keys(1, 0, 3), ENDS, asked_from=on_accelerator)
        assert requests.num_released == (5 if honest else 3)
        assert not set(requests.evicted(3)) & set(prompt)


def test_requests_that_store_a_prompt_at_the_same_time_share_it():
    manager = KVOffloadManager(20, "lru")
    prompt, made = keys(0, 0, 3), []
    for session in (1, 2):
        every = prompt + keys(session, 0, 2)
        made.append((context(every, f"r{session}", ENDS if session == 1 else None), every))
        manager.on_new_request(made[-1][0])
    for request, every in made:
        output = manager.prepare_store(every, request)
        manager.complete_store(output.keys_to_store, request)
    for request, _ in reversed(made):
        manager.on_request_finished(request)
    assert manager._rules.policy.num_released == 2


@pytest.mark.parametrize("cache_policy", POLICIES)
def test_above_a_tier_it_stores_as_any_other(cache_policy):
    """What host memory does not store, a tier below is not offered."""
    stored = []
    for params in (None, ENDS):
        requests = filled(cache_policy)
        requests.manager._stores_all = True
        stored.append(requests.run(keys(3, 0, 3), params).keys_to_store)
    assert stored[0] == stored[1]


def test_malformed_hints_are_counted_once_a_request_and_change_nothing():
    outcomes = []
    for params in (None, MALFORMED):
        for announced in (True, False):
            requests = filled("arc", params, announced=announced)
            assert requests.ignored() == (4 if params else 0)
            assert requests.ignored() == 0
            outcomes.append(requests.evicted(5))
    assert outcomes[1:] == outcomes[:-1]


def test_hints_that_cannot_even_be_read_do_not_fail_the_request():
    requests = Requests("lru", 3)
    made = WithoutHints("odd")
    requests.manager.on_new_request(made)
    requests.manager.prepare_store(keys(0, 0, 2), made)
    requests.manager.on_request_finished(made)
    assert requests.ignored() == 1


def test_a_call_that_fails_counts_nothing():
    requests = Requests("lru", 3)
    made = ReqContext("r", MALFORMED)
    with pytest.raises(LookupError):
        requests.manager.prepare_load(keys(0, 0, 1), made)
    assert requests.ignored() == 0
    requests.manager.prepare_store(keys(0, 0, 1), made)
    assert requests.ignored() == 4


class HintedPair(Pair):
    """Give the requests of the manager under test hints, and none to the reference's."""

    def __init__(self, *arguments, rng):
        super().__init__(*arguments)
        self.rng = rng

    def context(self, name):
        said = self.rng.choice((None, {"expect_s": self.rng.expovariate(1 / 60), "source": "a"}))
        return ReqContext(name), ReqContext(name, said and {"kvoffload": said})


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_an_expectation_changes_no_decision_of_vllm_s_policies(cache_policy):
    for number in range(SEQUENCES // 10):
        drawn = Drawn(SEED + number)
        managers = [
            kind(num_chunks=drawn.shape.num_chunks, cache_policy=cache_policy)
            for kind in (CPUOffloadingManager, KVOffloadManager)
        ]
        Sequence(HintedPair(*managers, drawn.keys, rng=drawn.rng), drawn).run(150)


@pytest.mark.usefixtures("host_platform")
@pytest.mark.parametrize("tiering", [False, True])
def test_the_connector_brings_what_a_request_says_to_the_manager(tmp_path, tiering):
    extra = {**SPECS["kvoffload"], "eviction_policy": "hit-density"}
    if tiering:
        extra["spec_name"] = "KVOffloadTieringSpec"
    engine = Engine(tmp_path, extra, 1)
    manager = engine.connector.manager
    own = getattr(manager, "primary_tier", manager)
    get_stats, ignored = manager.get_stats, []

    def kept_stats():
        stats = get_stats()
        ignored.extend(() if stats is None else stats.data["data"].get(IGNORED_METRIC, {}).values())
        return stats

    manager.get_stats = kept_stats
    try:
        said = [((None, None), 0, 0), ((MALFORMED, None), 4, 0), ((ENDS, None), 4, 1)]
        said.append(((None, ACTION), 4, 2))
        for number, (hints, num_ignored, num_ended) in enumerate(said, 3):
            engine.add(f"r{number}", [number] * 100, 3, *hints)
            while not engine.is_idle():
                engine.step(0)
            assert sum(ignored) == num_ignored
            assert own._rules.policy.num_released == num_ended * (100 // BLOCK_TOKENS)
    finally:
        manager.shutdown()


def test_hit_density_hears_when_each_session_asks_again():
    """When hints have proved true, who returns soon is stored, and who returns late is not."""
    soon, late = ({"kvoffload": {"expect_s": time, "source": "agent"}} for time in (60, 1e6))
    for says in [(late, soon), (soon, late)]:
        requests = Requests("hit-density?guard=0", 4)
        for number in range(100, 1300, 6):
            requests.run(keys(number, 0, 2), soon)
            for other in range(1, 5):  # these never return
                requests.run(keys(number + other, 0, 2), late)
            requests.run(keys(number, 0, 2), soon)
        for session in range(2):
            requests.run(keys(session, 0, 2), says[session])
            stored = [requests.manager._chunk(key) is not None for key in keys(session, 0, 2)]
            assert stored == [says[session] is soon] * 2
        (source,) = requests.manager._rules.policy.hint_sources
        assert source.name == "agent"


def test_a_watch_counts_what_clients_say_once_per_request():
    requests = Requests("lru", 8)
    requests.manager = KVOffloadManager(8, "lru", watch=Watch())
    requests.run(keys(1, 0, 2), ENDS)
    requests.run(keys(2, 0, 2), {"kvoffload": {"expect_s": 2.5, "source": "agent"}})
    requests.run(keys(3, 0, 2))
    told = {
        heard.source: (heard.ends, heard.expects) for heard in requests.manager.watch.report().hints
    }
    assert told == {"": (1, 0), "agent": (0, 1)}
