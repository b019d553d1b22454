"""The details: figures equal to those of replays, and reuse distances to those of a stack."""

import dataclasses

import numpy as np
import pytest

from kvoffload.advise import Disk, RecordedTrace, Setup, advise, details
from kvoffload.advise.details import POINTS
from kvoffload.replay import Configuration, DecodedTrace, replay
from kvoffload.replay.offline import stack_distances
from kvoffload.traces import Request, Workload

from .said import said

pytestmark = pytest.mark.fast

MIB = 2**20
WORKLOAD = Workload(300, seed=3)
SETUP = Setup(memory=200 * MIB, block_tokens=512, token_bytes=2048)


@pytest.fixture(scope="module")
def found():
    recorded = RecordedTrace.of(WORKLOAD)
    advice = advise(recorded, SETUP)
    return advice, details(recorded, advice, Disk(1000 * MIB, ("lru", "hit-density")))


def test_hits_over_time_and_per_request_are_those_of_the_replay(found):
    advice, closer = found
    trace = DecodedTrace.of(WORKLOAD)
    assert [one.policy for one in closer.policies] == [advice.policy, "lru"]
    assert closer.first_tokens == []  # without rates
    for one in closer.policies:
        result = replay(trace, Configuration(policy=one.policy, host=200, groups=SETUP.chunks))
        hits = result.log["host"]
        assert int(hits.sum()) == advice.of(one.policy).offloaded_tokens
        lengths = 512 * np.diff(trace.starts)
        assert len(one.over_time) == POINTS
        assert one.over_time[0] == pytest.approx(hits[:6].sum() / lengths[:6].sum())
        assert one.over_time[-1] == pytest.approx(hits[-6:].sum() / lengths[-6:].sum())
        assert one.first_tenth == pytest.approx(hits[:30].sum() / lengths[:30].sum())
        assert one.second_half == pytest.approx(hits[150:].sum() / lengths[150:].sum())
        assert one.requests_by_share[0] == int((hits == 0).sum())
        assert one.requests_by_share[-1] == int((hits == lengths).sum())
        halves = sum(one.requests_by_share[6:])
        assert halves == int((hits / lengths > 0.5).sum())
        assert sum(one.requests_by_share) == 300


def test_requests_that_ask_for_nothing_are_left_out(found):
    advice, closer = found
    first = dataclasses.replace(closer.policies[0], requests_by_share=[1, *[0] * 10, 3])
    text = said(advice, details=dataclasses.replace(closer, policies=[first]))["Requests"]
    assert "25.0 % of the 4 requests that ask host memory hit nothing" in text


def stack(blocks):
    """Return the distinct blocks between each use and the one before, by moving to the front."""
    order, distances = [], []
    for block in blocks:
        if block in order:
            position = order.index(block)
            distances.append(position)
            order.pop(position)
        order.insert(0, block)
    return sorted(distances)


@pytest.mark.parametrize("seed", range(4))
def test_reuse_distances_are_those_of_a_stack(seed):
    trace = DecodedTrace.of(Workload(70, seed=seed))
    distances, share = stack_distances(trace)
    assert share == 1
    assert distances.tolist() == stack(trace.blocks.tolist())


def test_of_a_long_trace_a_sample_is_looked_at():
    trace = DecodedTrace.of(Workload(2000))
    exact, _ = stack_distances(trace)
    sampled, share = stack_distances(trace, trace.num_blocks // 4)
    assert share == pytest.approx(0.25, rel=0.01)
    assert np.median(sampled) == pytest.approx(np.median(exact), rel=0.15)
    empty, _ = stack_distances(DecodedTrace.of([]))
    assert len(empty) == 0


def test_half_of_two_reuses_is_one():
    recorded = RecordedTrace.of(Request(n, 0, 1, (one,)) for n, one in enumerate((1, 1, 2, 3, 1)))
    reuse = details(recorded, advise(recorded, SETUP)).reuse
    assert (reuse.bytes_at[50], reuse.bytes_at[90]) == (0, 2 * MIB)


def test_a_trace_of_nothing_is_no_trouble():
    for requests in ([], [Request(0, 0, 1, ())] * 3):
        recorded = RecordedTrace.of(requests)
        advice = advise(recorded, SETUP)
        closer = details(recorded, advice, Disk(MIB, ("lru",)))
        assert closer.reuse.bytes_at == {}


def test_a_disk_that_adds_no_hits_is_not_praised_for_what_it_writes(found):
    """Beside one that is of use, it is not named for writing fewest."""
    advice, closer = found
    idle = []
    for cell in closer.disk_cells:
        if cell.policy == "hit-density":
            hits = int(advice.of(cell.host_policy).hit_ratio * cell.counts.asked_tokens)
            counts = dataclasses.replace(
                cell.counts, host_tokens=hits, tier_tokens=0, tier_stored=1
            )
            cell = dataclasses.replace(cell, counts=counts)
        idle.append(cell)
    text = said(advice, details=dataclasses.replace(closer, disk_cells=idle))["Disk"]
    assert "both hit" in text
    assert "hit-density behind" not in text
