"""The advice: figures equal to those of replays, and objections to insufficient traces."""

import dataclasses
import itertools

import pytest

from kvoffload.advise import Setup, advise
from kvoffload.advise.advice import Advice, Facts
from kvoffload.advise.setup import Case
from kvoffload.policies import registry
from kvoffload.replay import Configuration, GroupChunks, replay
from kvoffload.traces import Request, Survey, Workload

from .said import verdict

MIB = 2**20
WORKLOAD = Workload(300, seed=3)
SETUP = Setup(  # a block a mebibyte
    memory=200 * MIB, block_tokens=512, token_bytes=2048, policies=registry.names()
)


@pytest.fixture(scope="module")
def advice():
    return advise(WORKLOAD, SETUP)


def test_it_compares_half_once_twice_and_four_times_the_memory(advice):
    assert [*advice.choices] == SETUP.memories() == [n * 100 * MIB for n in (1, 2, 4, 8)]


def test_a_memory_beyond_what_a_float_holds_is_found_among_those_compared():
    setup = Setup(memory=2**60 + 1, block_tokens=512, token_bytes=2**40)
    assert setup.memories()[1] == setup.memory
    assert advise([Request(0, 512, 1, (1,))], setup).of("lru").stored == 1


@pytest.mark.parametrize("policy", registry.names())
def test_its_figures_are_those_of_a_replay(advice, policy):
    groups = GroupChunks.of_blocks(512, block_bytes=MIB, step_tokens=8192)
    for memory in SETUP.memories():
        one = Configuration(policy=policy, host=memory // MIB, groups=groups)
        found, rates = advice.of(policy, memory), advice.rates(advice.of(policy, memory))
        assert dataclasses.replace(found, parts=()) == replay(WORKLOAD, one)
        assert advice.stored_per_hit(found) == found.stored / found.hits
        assert rates.store == pytest.approx(found.stored * MIB / advice.facts.seconds)
        assert rates.load == pytest.approx(found.hits * MIB / advice.facts.seconds)
        assert rates.busiest_store + rates.busiest_load >= rates.store + rates.load


def test_no_policy_exceeds_the_ceilings_which_save_the_tokens_of_their_hits(advice):
    for memory, ceiling in advice.ceilings.items():
        most = max(advice.of(policy, memory).hit_ratio for policy in registry.names())
        assert most <= ceiling <= advice.unbounded
    best, unbounded = advice.ceiling_tokens()
    assert best == round(advice.ceilings[SETUP.memory] * advice.facts.blocks) * 512
    assert unbounded == replay(WORKLOAD, Configuration(policy="infinite", host=1)).hits * 512
    saved = [advice.of(policy).offloaded_tokens for policy in registry.names()]
    assert max(saved) <= best <= unbounded


def test_progress_ends_at_the_number_of_replays_and_never_falls():
    seen = []
    large = Setup(memory=100_000 * MIB, block_tokens=512, token_bytes=2048)
    advise(WORKLOAD, large, progress=seen.append)  # all four memories hold everything
    assert seen == sorted(seen)
    assert seen[-1] == len({*large.configurations(Survey.of(WORKLOAD).unique_blocks).values()})


def test_too_few_requests_give_no_recommendation():
    found = advise(list(itertools.islice(WORKLOAD, 199)), SETUP)
    assert found.policy is None
    assert found.objections == ["the trace is too short: 199 requests, and at least 200 are needed"]
    assert advise(list(itertools.islice(WORKLOAD, 200)), SETUP).objections == []
    one = advise(list(itertools.islice(WORKLOAD, 1)), SETUP)
    assert "too short: 1 request, and" in one.objections[0]


def test_a_request_without_blocks_is_no_trouble():
    assert advise([], SETUP).objections == ["the trace has no requests"]
    empty = Request(0, 0, 1, ())
    found = advise([empty] * 300, SETUP)
    assert found.policy is None
    assert found.stored_per_hit(found.of("lru")) is None
    assert found.of("lru").hit_ratio == 0


def test_a_trace_that_the_assumed_cache_holds_is_said():
    setup = Setup(2**30, 16, 64, 2**20, device_is_assumed=True)
    facts = Facts(requests=300, seconds=0.0, input_tokens=0, blocks=5000, unique_blocks=1024)
    found = Advice(setup, facts, {}, Case(0), Case(0), unbounded=0.0, reuse=0.0, objections=["no"])
    fits = "All blocks of this trace, 1 MiB, fit into the cache assumed"
    assert fits in verdict(found)
    more = dataclasses.replace(facts, unique_blocks=1025)
    assert fits not in verdict(dataclasses.replace(found, facts=more))
    given = dataclasses.replace(setup, device_is_assumed=False)
    assert fits not in verdict(dataclasses.replace(found, setup=given))
