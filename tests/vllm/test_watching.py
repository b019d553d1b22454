"""A watch over vLLM's requests: it changes no decision, and what it says is what happened."""

from __future__ import annotations

import gc
import random
import weakref
from itertools import takewhile

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvoffload import CPUOffloadingManager, Hints, OffloadError
from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.integrations.vllm._upstream import installed_release
from kvoffload.integrations.vllm.groups import KVGroups
from kvoffload.integrations.vllm.tiering import KVOffloadPrimaryTier
from kvoffload.managers._watching import FINISHED, RELEASED, WatchRequest
from kvoffload.testing.policies import check_invariants
from tests.allocations import fail_after
from tests.vllm.conftest import SEED, SEQUENCES
from tests.vllm.engine import BLOCK_TOKENS, SPECS, Engine, Talk
from tests.vllm.requests import CHUNK_TOKENS
from tests.vllm.test_construction import Region
from tests.vllm.test_differential import run_sequence
from tests.vllm.watched import Request, Time, keys_of, watch_all, watched


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_the_same_decisions_with_a_watch(cache_policy):
    seen = dict.fromkeys(("asked", "missed", "stored", "evicted", "declined", "refused"), 0)

    class Watched(KVOffloadManager):
        def __init__(self, **arguments):
            super().__init__(**arguments, watch=watch_all(slots=16, policies=("arc",)))

    for number in range(max(1, SEQUENCES // 3)):
        _, manager = run_sequence(SEED + number, cache_policy, Watched).both
        counters = manager.watch.counters()
        manager.watch.report()
        check_invariants(manager)
        assert counters["missed"] <= counters["asked"]
        assert sum(counters["causes"]) <= counters["missed"]
        for name in seen:
            seen[name] += counters[name]
    if SEQUENCES >= 100:
        assert all(seen.values()), seen


@pytest.mark.parametrize("every", [10**6, 60])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_requests_one_by_one_are_judged_as_the_library_judges_lookups(rate, every):
    """The two differ only in how a request is reported."""
    rng = random.Random(SEED)
    chains = []
    for number in range(40):
        shared = rng.choice(chains)[: rng.randint(0, 20)] if chains else []
        fresh = range(len(shared), rng.randint(len(shared) + 1, 30))
        chains.append(shared + keys_of(f"{number:02}", fresh))
    options = {"memory": (0.5, 2, 16), "policies": ("arc",), "max_rate": rate}
    ours = watched(120, **options)
    library = CPUOffloadingManager(16, 120, "lru", watch=watch_all(**options))
    for number in range(1, 401):
        if number % every == 0:
            ours.reset_cache()
            library.reset_cache()
        chain = rng.choice(chains)
        Request(ours, chain).run()
        hits = library.lookup(chain)
        if hits:
            library.prepare_load(chain[:hits])
            library.complete_load(chain[:hits])
        library.touch(chain)
        output = library.prepare_store(chain)
        library.touch(chain)
        if output is not None and output.block_hashes_to_store:
            library.complete_store(output.block_hashes_to_store)
    counters, expected = ours.watch.counters(), library.watch.counters()
    assert counters == expected
    assert counters["resets"] == 400 // every
    assert counters["evicted"] > 100
    assert sum(counters["causes"]) > 100
    assert ours.watch.report().points == library.watch.report().points


@pytest.mark.parametrize("told", [{"ends": True}, {"expect_s": 3.0}])
@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_clients_are_heard_as_the_library_hears_them(policy, told):
    """What requests say goes to miniatures, with the keys that the manager releases."""
    rng = random.Random(SEED)
    options = {"memory": (0.5, 1, 2), "policies": ("arc",), "policy_slots": 2**20}
    ours = watched(120, cache_policy=policy, **options)
    library = CPUOffloadingManager(16, 120, policy, watch=watch_all(**options))
    lengths = [0] * 60  # of sessions
    for number in range(500):
        session = rng.randrange(max(0, number // 10 - 5), number // 10 + 1)
        lengths[session] += rng.randint(1, 6)
        chain = keys_of(f"{session:02}", range(lengths[session]))
        says = rng.random() < 0.3
        Request(ours, chain, params={"kvoffload": told} if says else None).run()
        request = library.begin(chain, hints=Hints(**told) if says else None)
        hits = request.lookup()
        if hits:
            request.prepare_load(0, hits)
            request.complete_load(0, hits)
        request.prepare_store()
        request.complete_store()
        request.finish()
        # A request of the library says once more at its end what it has said.
        heard = [
            [
                [each[:4] for each in requests if each[1] != FINISHED]
                for (requests,) in manager.watch._core.take_requests()
            ]
            for manager in (ours, library)
        ]
        assert heard[0] == heard[1]
        each_heard = [each for requests in heard[0] for each in requests]
        assert any(each[3] == Hints(**told) for each in each_heard) == says
        assert any(each[1] == RELEASED for each in each_heard) == (says and "ends" in told)


def test_what_the_device_had_is_used_and_not_asked_for():
    manager = watched(100)
    keys = keys_of("a", range(10))
    Request(manager, keys).run()
    request = Request(manager, keys + keys_of("b", range(5)), first=4)
    assert len(request.hits) == 6
    request.run()
    counters = manager.watch.counters()
    assert (counters["requests"], counters["asked"], counters["missed"]) == (2, 21, 15)
    assert causes(manager) == {"never_or_long_ago": 15}
    # The miniatures were asked for as much.
    assert [sum(each) for each in counters["policy_judged"]]
    report = manager.watch.report()
    assert report.hit_ratio == pytest.approx(6 / 21)


@pytest.mark.parametrize("groups", [(0,), (0, 1)])
@pytest.mark.parametrize("first", [0, 4])
def test_what_is_generated_is_used_and_not_asked_for(groups, first):
    manager = watched(200, policies=("arc",))
    each = [[key[:-1] + bytes([group]) for key in keys_of("a", range(10))] for group in groups]
    prompt = [key for keys in each for key in keys[:6]]
    request = Request(manager, [], 0)
    for generated in (False, True):
        for keys in each:
            for place in range(6, 10) if generated else range(6):
                request.context.set_offload_key_position(keys[place], (place + 1) * 16)
        if not generated:
            for keys in each:
                manager.lookup(keys[first], request.context)
            request.store(prompt)
        else:
            request.store([key for keys in each for key in keys[6:]])
    request.finish()
    num_asked = len(groups) * (6 - first)
    counters = manager.watch.counters()
    assert (counters["asked"], counters["missed"]) == (num_asked, num_asked)
    assert counters["stored"] == sum(map(len, manager.watch._core.order())) == 10 * len(groups)
    (mini,) = manager.watch._shadows.minis
    assert sum(quarter.asked for quarter in mini.quarters) == num_asked
    assert sum(quarter.stored for quarter in mini.quarters) == 10 * len(groups)
    # The next turn of the chat asks for them.
    again = Request(manager, [key for keys in each for key in keys])
    assert len(again.hits) == 10 * len(groups)
    again.run()
    counters = manager.watch.counters()
    assert (counters["asked"], counters["missed"]) == (num_asked + 10 * len(groups), num_asked)
    check_invariants(manager)


def test_a_preempted_request_asks_for_what_it_had_generated():
    manager = watched(100)
    keys = keys_of("a", range(8))
    request = Request(manager, keys[:5])
    request.store()
    for place in (5, 6):
        request.context.set_offload_key_position(keys[place], (place + 1) * 16)
    request.store(keys[5:7])
    manager.lookup(keys[0], request.context)
    request.context.set_offload_key_position(keys[7], 8 * 16)
    request.store(keys[7:])
    request.finish()
    assert manager.watch.counters()["asked"] == 7


@pytest.mark.parametrize("cache_policy", ["lru", "hit-density"])
def test_a_primary_tier_counts_what_a_manager_alone_does(cache_policy):
    """vLLM's tiering manager tells it of no new request."""
    manager = watched(8, cache_policy=cache_policy)
    primary = KVOffloadPrimaryTier(8, Region(), cache_policy)
    primary._look_on(WatchRequest(watch_all(), cache_policy), None)
    rng = random.Random(SEED)
    runs = [(rng.choice("abc"), rng.randrange(1, 8)) for _ in range(40)]
    for side in (manager, TieringOffloadingManager(primary, [])):
        for name, length in runs:
            Request(side, keys_of(name, range(length))).run()
    assert primary.watch.counters() == manager.watch.counters()
    assert manager.watch.counters()["requests"] == len(runs)
    primary.decline_nothing()
    promoted, made = keys_of("d", range(8)), ReqContext("waits")
    for success in (False, True):  # chunks that were prepared one by one end together
        assert all(primary.prepare_write([key], made) for key in promoted)
        assert primary.watch.counters()["open"] == 8
        primary.complete_write(set(promoted), made, success)
        assert primary.watch.counters()["open"] == 0


def test_a_request_asks_from_the_first_place_that_it_looks_up():
    """Forwards or, as of a window, backwards, and in turn with others; or it asks for nothing."""
    rng = random.Random(SEED)
    manager = watched(1000, policies=("arc",), policy_slots=2**20)
    num_requests = asked = 0
    for _ in range(40):
        some = [Request(manager, keys_of(name, range(12)), first=99) for name in "abc"]
        least = dict.fromkeys(some, 12)
        turns = rng.sample(some, 3)
        for one in (turns + turns)[: rng.randint(0, 6)]:
            first, step = rng.randrange(12), rng.choice((1, -1))
            for place in range(12)[first::step][: rng.randint(1, 9)]:
                manager.lookup(one.keys[place], one.context)
                least[one] = min(least[one], place)
        for one, first in least.items():
            one.store()
            one.finish()
            num_requests += first < 12
            asked += 12 - first
    counters = manager.watch.counters()
    assert (counters["requests"], counters["asked"]) == (num_requests, asked)
    assert counters["stored"] == sum(map(len, manager.watch._core.order())) == 36
    (mini,) = manager.watch._shadows.minis
    assert sum(quarter.asked for quarter in mini.quarters) == asked


def causes(manager):
    counts = manager.watch.report().sampled_missed
    return {cause: count for cause, count in counts.items() if count}


def test_causes():
    manager = watched(8)
    first, second = keys_of("a", range(8)), keys_of("b", range(8))
    Request(manager, first).run()
    assert causes(manager) == {"never_or_long_ago": 8}
    Request(manager, second).run()  # evicts the first
    Request(manager, first).run()
    assert causes(manager) == {"never_or_long_ago": 16, "evicted": 8}
    # A load that is under way leaves no room.
    held = Request(manager, first)
    manager.prepare_load(held.hits, held.context)
    Request(manager, second[:3]).run()
    Request(manager, second[:3]).run()
    assert causes(manager) == {"never_or_long_ago": 16, "evicted": 11, "refused": 3}
    manager.complete_load(set(held.hits), held.context)
    held.finish()
    failing = Request(manager, second[:2])
    failing.store(success=False)
    failing.finish()
    assert manager._chunk(second[0]) is None
    Request(manager, second[:2]).run()
    assert causes(manager) == {"never_or_long_ago": 16, "evicted": 11, "refused": 5, "failed": 2}
    manager.reset_cache()
    Request(manager, second[:2]).run()
    assert causes(manager)["reset"] == 2
    assert manager.watch.counters()["failed"] == 2


def test_chunks_that_are_being_stored_are_pending():
    manager = watched(20)
    keys = keys_of("a", range(5))
    one, two = Request(manager, keys), Request(manager, keys)
    output = manager.prepare_store(keys, one.context)
    assert manager.prepare_store(keys, two.context).keys_to_store == []
    two.finish()
    assert causes(manager) == {"pending": 5}
    manager.complete_store(set(output.keys_to_store), one.context)
    one.finish()
    assert causes(manager) == {"pending": 5, "never_or_long_ago": 5}
    assert manager.watch.counters()["asked"] == 10


def test_chunks_below_the_threshold_are_used_and_were_declined():
    manager = watched(20, store_threshold=2)
    keys = keys_of("a", range(5))
    for asked in (5, 10):
        Request(manager, keys).run()
        assert manager.watch.counters()["asked"] == asked
    assert causes(manager) == {"never_or_long_ago": 5, "declined": 5}
    Request(manager, keys).run()
    counters = manager.watch.counters()
    assert (counters["missed"], counters["declined"], counters["stored"]) == (10, 5, 5)


def test_chunks_behind_a_gap():
    manager = watched(20)
    keys = keys_of("a", range(5))
    request = Request(manager, keys[1:])
    request.run()
    Request(manager, keys).run()
    assert causes(manager) == {"never_or_long_ago": 5, "broken_prefix": 4}


def test_the_first_access_decides():
    """A request that is put off and started again is still one request."""
    manager = watched(20)
    keys = keys_of("a", range(6))
    request = Request(manager, keys)
    request.store()
    assert all(manager.lookup(key, request.context) is LookupResult.HIT for key in keys)
    request.hits = keys
    request.load()
    request.finish()
    request.finish()
    counters = manager.watch.counters()
    assert (counters["requests"], counters["asked"], counters["missed"]) == (1, 6, 6)


@pytest.mark.parametrize("begins", [False, True])
def test_a_request_that_only_looked_up_has_not_accessed_anything(begins):
    """What it may do once it has finished does not depend on a watch."""
    keys = keys_of("a", range(3))
    for manager in (KVOffloadManager(8), watched(8)):
        context = ReqContext("one")
        assert manager.lookup(keys[0], context) is LookupResult.MISS
        if begins:
            manager.on_new_request(context)
        manager.on_request_finished(context)
        if begins:
            with pytest.raises(OffloadError, match="is new to the request"):
                manager.prepare_store(keys, context)
        else:
            assert manager.prepare_store(keys, context).keys_to_store == keys
            manager.complete_store(set(keys), context)
            manager.on_request_finished(context)
    counters = manager.watch.counters()
    # A key without a position is asked for if any is.
    assert (counters["requests"], counters["asked"]) == ((0, 0) if begins else (1, 3))


def test_a_request_may_offer_keys_in_any_order():
    """Those without a position count as asked for; then later and earlier ones may come."""
    manager = watched(40, policies=("arc",))
    prompt, answer, others = (keys_of(name, range(10)) for name in "abc")
    request = Request(manager, prompt, first=9)
    for number, key in enumerate(answer):
        request.context.set_offload_key_position(key, (11 + number) * CHUNK_TOKENS)
    request.store([*others, *answer, *prompt[:9]])
    request.finish()
    assert manager.watch.counters()["asked"] == 10
    (mini,) = manager.watch._shadows.minis
    assert sum(each.asked for each in mini.quarters) == 10
    check_invariants(manager)


def test_a_reset_leaves_requests_uncounted_that_were_under_way():
    manager = watched(20, policies=("arc",))
    keys = keys_of("a", range(4))
    first = Request(manager, keys)
    first.store(keys[:2])
    manager.reset_cache()
    first.store(keys[2:])
    first.finish()
    counters = manager.watch.counters()
    assert (counters["requests"], counters["asked"], counters["resets"]) == (0, 0, 1)
    # What it stored since takes room.
    again = Request(manager, keys[2:])
    assert again.hits == keys[2:]
    again.run()
    judged = [sum(some) for some in zip(*manager.watch.counters()["judged"], strict=True)]
    assert sum(judged[:-1]) == 2
    (mini,) = manager.watch._shadows.minis
    assert sum(each.hits for each in mini.quarters) == 2
    check_invariants(manager)


def test_what_the_policy_is_told_to_evict_is_counted():
    manager = watched(8)
    keys = keys_of("a", range(8))
    Request(manager, keys).run()
    assert len(manager._policy.evict(3, keys[:2])) == 3
    check_invariants(manager)
    counters = manager.watch.counters()
    assert (counters["evicted"], counters["evicted_used"]) == (3, [3, 0])
    Request(manager, keys).run()
    assert causes(manager) == {"never_or_long_ago": 8, "evicted": 3}


def test_transfers_are_overdue_until_they_end():
    clock = Time()
    manager = watched(20, clock=clock, deadline=10)
    keys = keys_of("a", range(6))
    request = Request(manager, keys)
    output = manager.prepare_store(keys, request.context)
    clock.now = 11
    (overdue,) = manager.watch.overdue()
    ids = tuple(manager._chunk(key)[1] for key in keys)
    assert (overdue.kind, overdue.num_blocks, sorted(overdue.block_ids)) == (
        "store",
        6,
        sorted(ids),
    )
    manager.complete_store(set(output.keys_to_store), request.context)
    assert manager.watch.overdue() == []
    assert manager.watch.counters()["open"] == 0
    manager.prepare_load(list(reversed(keys)), request.context)
    manager.prepare_load(keys[:2], request.context)
    clock.now = 30
    manager.complete_load(set(keys), request.context)
    (overdue,) = manager.watch.overdue()
    assert (overdue.kind, overdue.num_blocks) == ("load", 2)
    manager.complete_load(set(keys[:2]), request.context)
    assert manager.watch.counters()["open"] == 0
    # What ends in parts is found by its chunks.
    output = manager.prepare_store(keys_of("b", range(4)), request.context)
    clock.now = 45
    for key in output.keys_to_store:
        manager.complete_store({key}, request.context)
    assert manager.watch.counters()["open"] == 1
    assert manager.watch.overdue() == []
    assert manager.watch.counters()["open"] == 0


@pytest.mark.parametrize("build", [KVOffloadManager, watched])
def test_a_finished_request_is_not_kept(build):
    manager, keys = build(20), keys_of("a", range(6))
    for _ in range(2):  # stored, then loaded
        request = Request(manager, keys)
        request.run()
        context = weakref.ref(request.context)
        del request
        gc.collect()
        assert context() is None


def test_of_stores_with_the_same_sum_of_ids_the_right_one_is_closed():
    manager, keys = watched(4), keys_of("a", range(4))
    for number in (0, 1, 2, 3, 0, 3, 1, 2):
        Request(manager, [keys[number]]).run()
    requests = [Request(manager, keys_of(name, range(2))) for name in "bc"]
    for request in requests:
        manager.prepare_store(request.keys, request.context)
    ids = [{manager._chunk(key)[1] for key in request.keys} for request in requests]
    assert ids == [{0, 3}, {1, 2}]
    manager.complete_store(set(requests[0].keys), requests[0].context)
    ((*_, left),) = manager.watch._core.open_transfers()
    assert set(left) == ids[1]


def test_every_transfer_of_a_sequence_is_closed():
    rng = random.Random(SEED)
    manager = watched(50)
    running = []
    for number in range(300):
        request = Request(manager, keys_of(rng.choice("abcdefgh"), range(rng.randint(1, 20))))
        manager.prepare_load(request.hits, request.context)
        running.append(request)
        if len(running) > 3:
            old = running.pop(rng.randrange(len(running)))
            manager.complete_load(set(old.hits), old.context)
            output = manager.prepare_store(old.keys, old.context)
            old.finish()
            if output is not None and output.keys_to_store:
                manager.complete_store(set(output.keys_to_store), old.context, number % 7 > 0)
    for old in running:
        manager.complete_load(set(old.hits), old.context)
    assert manager.watch.counters()["open"] == 0


def test_a_context_of_others_that_fails_changes_nothing():
    manager = watched(20)

    class Failing(ReqContext):
        def get_offload_key_position(self, key):
            del key
            raise RuntimeError("no position")

    context = Failing("r")
    manager.on_new_request(context)
    manager.lookup(b"key" * 12, context)
    manager.lookup(b"key" * 12, ReqContext("other"))
    assert manager.watch.counters()["asked"] == 0


def in_groups(num_chunks, full, others, **options):
    """Return a manager whose watch is told which groups are full, by their numbers."""
    manager = KVOffloadManager(num_chunks)
    watch = watch_all(**options)
    groups = KVGroups(dict.fromkeys(full, 16), dict.fromkeys(others, 16))
    manager._look_on(WatchRequest(watch, "lru"), groups)
    return manager


def of_group(keys, group):
    return [key[:-1] + bytes([group]) for key in keys]


class GroupedRequest:
    """One request of several groups, each looked up by the rule for its kind.

    Of those in `drafting`, whose layers draft tokens, a hit leaves the last chunk out.
    """

    def __init__(self, manager, keys, full, others, local=0, drafting=()):
        self.manager, self.context = manager, ReqContext("r")
        self.keys = {group: of_group(keys, group) for group in sorted([*full, *others])}
        for each in self.keys.values():
            for place, key in enumerate(each):
                self.context.set_offload_key_position(key, (place + 1) * 16)
        manager.on_new_request(self.context)
        end = len(keys)
        for group in full:
            end = self.forwards(group, local, end) - (group in drafting)
        self.found = end = max(end, local)
        before = 0
        while local < end != before:  # until all have their windows
            before = end
            for group in others:
                end = self.backwards(group, local, end)
        self.local, self.full, self.others, self.end = local, full, others, end

    def forwards(self, group, start, end):
        for place in range(start, end):
            if self.manager.lookup(self.keys[group][place], self.context) is LookupResult.MISS:
                return place
        return end

    def backwards(self, group, start, end):
        """A window of one chunk."""
        for place in reversed(range(start, end)):
            if self.manager.lookup(self.keys[group][place], self.context) is LookupResult.HIT:
                return place + 1
        return start

    def run(self, stored=None, others=None):
        """Load what was hit, store the rest; of `others` the chunk that ends at `stored`."""
        loads = [key for group in self.full for key in self.keys[group][self.local : self.end]]
        if self.end > self.local:
            loads += [self.keys[group][self.end - 1] for group in self.others]
            self.manager.prepare_load(loads, self.context)
            self.manager.complete_load(set(loads), self.context)
        stores = [key for group in self.full for key in self.keys[group][self.end :]]
        if stored is not None:
            others = self.others if others is None else others
            stores += [self.keys[group][stored - 1] for group in others]
        output = self.manager.prepare_store(stores, self.context)
        self.manager.complete_store(set(output.keys_to_store), self.context)
        self.manager.on_request_finished(self.context)
        return self


@pytest.mark.parametrize(
    ("full", "others", "drafting"),
    [
        ((0,), (1,), ()),
        ((1,), (0,), (1,)),
        ((2,), (0, 1), ()),
        ((1, 2), (0, 3), ()),
        ((0, 3), (1, 2), (3,)),
    ],
)
def test_what_windows_keep_from_being_loaded_is_counted(full, others, drafting):
    """Prompts that begin alike; of some the windows are stored, or some of them."""
    rng, chains = random.Random(SEED), [[]]
    manager = in_groups(20_000, full, others, policies=("arc",), policy_slots=2**20)
    tails = asked = loaded = 0
    for number in range(200):
        shared = rng.choice(chains)[: rng.choice((4, 12, 99))]
        chains.append(shared + keys_of(f"{number:03}", range(rng.randint(1, 8))))
        local = rng.randint(0, min(4, len(shared)))
        request = GroupedRequest(manager, chains[-1], full, others, local, drafting)
        request.run(
            rng.randint(request.end + 1, len(chains[-1])),
            rng.sample(others, rng.randint(0, len(others))),
        )
        tails += request.found - request.end
        asked += len(chains[-1]) - local
        loaded += request.end - local
    counters = manager.watch.counters()
    assert counters["tail_missed_tokens"] == 16 * tails > 0
    # One full group stands for all; all of them take room.
    assert (counters["requests"], counters["asked"]) == (200, asked)
    assert counters["missed"] == asked - loaded
    assert sum(sum(each) for each in counters["judged"]) == asked
    assert counters["stored"] == sum(map(len, manager.watch._core.order()))
    (mini,) = manager.watch._shadows.minis
    assert sum(each.asked for each in mini.quarters) == asked
    assert sum(each.stored for each in mini.quarters) == counters["stored"]
    check_invariants(manager)


def test_of_lookups_that_are_repeated_the_furthest_before_the_first_access_counts():
    manager = in_groups(400, (0, 2), (1,))
    keys = keys_of("a", range(20))
    GroupedRequest(manager, keys, (0, 2), (1,)).run(stored=20)
    first = GroupedRequest(manager, keys[:12], (0, 2), (1,))
    assert first.forwards(0, 0, 6) == first.forwards(2, 0, 6) == 6  # what is left is asked again
    assert first.backwards(1, 0, 6) == 0
    first.run()
    assert manager.watch.counters()["tail_missed_tokens"] == 12 * 16
    second = GroupedRequest(manager, keys[:12], (0, 2), (1,))
    manager.prepare_store(second.keys[0], second.context)
    second.forwards(0, 0, 12)  # preempted, and looked up again
    second.forwards(2, 0, 12)
    second.backwards(1, 0, 12)
    second.run()
    assert manager.watch.counters()["tail_missed_tokens"] == 24 * 16


def test_points_are_marked_where_tails_are_more_than_a_twentieth_of_the_hits():
    manager = in_groups(400, (0,), (1,), memory=(1,), policies=())
    keys = keys_of("a", range(100))
    GroupedRequest(manager, keys, (0,), (1,)).run(stored=100)
    GroupedRequest(manager, keys, (0,), (1,)).run(stored=100)
    hit = 100
    for tail, marked in ((5, False), (1, True)):
        GroupedRequest(manager, keys[:tail], (0,), (1,)).run()
        report = manager.watch.report()
        assert report.asked - report.missed == hit
        assert [("tails" in point.marks) for point in report.points] == [marked]
    assert report.tail_missed_tokens == 6 * 16


def test_without_a_full_group_nothing_is_judged():
    manager = in_groups(400, (), (0, 1))
    keys = keys_of("a", range(4))
    request = Request(manager, keys)
    request.run()
    report = manager.watch.report()
    assert (report.asked, report.stored) == (0, 4)
    assert {point.reason for point in report.points} == {"no_full_group"}


def test_one_full_group_is_judged_as_if_nothing_were_known():
    manager = in_groups(400, (3,), ())
    Request(manager, keys_of("a", range(4))).run()  # of group 0
    assert manager.watch.counters()["asked"] == 4


@pytest.mark.skipif(not installed_release().group_kinds, reason="vLLM tells no kinds of groups")
@pytest.mark.parametrize("num_full", [1, 2])
def test_what_the_scheduler_could_not_load_for_want_of_a_window(tmp_path, host_platform, num_full):
    """Conversations of vLLM's scheduler, whose own lookups tell what the full groups had.

    A second one drafts: of what it has, vLLM leaves out the last chunk.
    """
    extra = {**SPECS["kvoffload"], "kvoffload_watch": {"policies": []}}
    num_groups = num_full + 1
    engines = [Engine(tmp_path, SPECS["vllm"], num_groups), Engine(tmp_path, extra, num_groups)]
    connector = engines[1].connector
    found: dict[str, int] = {}  # chunks of the full group that were not loaded
    waited: set[str] = set()  # requests whose drafting group had a chunk being stored
    dropped: set[str] = set()  # of these, those that later lost a chunk that the watch may count
    looked_up: list[int] = []
    look_up, walk = connector._lookup, connector._maximal_prefix_lookup

    def note_walk(keys, *others):
        count = walk(keys, *others)
        had = sum(1 for _ in takewhile(connector.manager._policy.get, keys))
        drops = others[2].is_eagle_group and count is not None
        if drops and others[1].request_id in waited:
            dropped.add(others[1].request_id)
        elif others[2].is_eagle_group and count is None:  # vLLM drops none yet
            waited.add(others[1].request_id)
        looked_up.append(others[-1] + had - drops)
        return count

    def note(state, *limits):
        looked_up.clear()
        hit = look_up(state, *limits)
        if hit is not None and not accessed(state):
            local = state.num_locally_computed_tokens
            end = min(looked_up[:num_full]) if len(looked_up) >= num_full else 0
            loaded = -(-(local + hit) // BLOCK_TOKENS)
            found[state.req.request_id] = max(0, end - loaded) * BLOCK_TOKENS
        return hit

    def accessed(state):
        return state.req.num_preemptions > 0 or state.req.request_id in begun

    connector._maximal_prefix_lookup, connector._lookup = note_walk, note
    begun: set[str] = set()
    talk = Talk(engines, random.Random(SEED), resets=False)
    for _ in range(60):
        talk.turn()
        # Some begin as another did.
        talk.conversations.append(list(talk.rng.choice(talk.conversations)[:64]))
    talk.drain()
    for engine in engines:
        engine.add("last", [1, 2, 3], 1)
    talk.drain()
    watch = connector.manager.watch
    surplus = watch.counters()["tail_missed_tokens"] - sum(found.values())
    assert 0 <= surplus <= len(dropped) * BLOCK_TOKENS
    assert sum(found.values()) > 0
    check_invariants(connector.manager)


def test_a_watch_belongs_to_one_manager():
    watch = watch_all()
    manager = KVOffloadManager(20, watch=watch)
    assert manager.watch is watch
    assert KVOffloadManager(20).watch is None
    with pytest.raises(ValueError, match="watch must be a Watch of its own"):
        KVOffloadManager(20, watch=watch)
    with pytest.raises(TypeError, match="watch must be a Watch or None, got 3"):
        KVOffloadManager(20, watch=3)


@pytest.mark.refused_allocations
def test_a_finish_without_memory_is_judged_once():
    """The room for its keys has to grow: each was offered alone."""
    manager = watched(1000)
    request = Request(manager, keys_of("a", range(700)))
    for key in request.keys:
        request.store([key])
    failed = 0
    for number in range(100):
        fail_after(number)
        try:
            request.finish()
        except MemoryError:
            failed += 1
        else:
            break
        finally:
            fail_after(None)
    assert failed > 1
    counters = manager.watch.counters()
    assert (counters["requests"], counters["asked"], counters["missed"]) == (1, 700, 700)
