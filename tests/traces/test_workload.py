"""The generated workload: the same on every machine, and as documented."""

import hashlib
from itertools import islice, pairwise

import pytest

from kvoffload.traces import Survey, Workload
from kvoffload.traces.writer import trace_line

pytestmark = pytest.mark.fast

DIGESTS = {
    0: "2eed0ab69fbe4d0a1c9178b7fdb86e44281013aeb7e4e68f36293775756fb027",
    1: "2416da96970e2a8276e2f92131dc0205de39d1f86b5d6b834e4e69c6fdc03eb0",
}


def digest(workload: Workload) -> str:
    return hashlib.sha256(b"".join(map(trace_line, workload))).hexdigest()


@pytest.mark.parametrize("seed", DIGESTS)
def test_a_seed_gives_these_very_bytes_on_every_python_and_machine(seed):
    assert digest(Workload(2000, seed=seed)) == DIGESTS[seed]


def test_each_iteration_gives_the_same_requests():
    workload = Workload(300, seed=7)
    assert list(workload) == list(workload)


def test_fewer_requests_are_the_first_of_more():
    assert list(Workload(100)) == list(islice(Workload(10**9), 100))


@pytest.mark.parametrize("block_tokens", [1, 16, 512, 1000])
def test_every_request_is_of_the_form(block_tokens):
    requests = list(Workload(200, block_tokens=block_tokens))
    assert len(requests) == 200
    for before, after in pairwise(requests):
        assert before.timestamp <= after.timestamp
    parents: dict[int, int | None] = {}
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // block_tokens)
        assert request.output_length >= 1
        parent = None
        for hash_id in request.hash_ids:  # equal ids mean equal prefixes
            assert parents.setdefault(hash_id, parent) == parent
            parent = hash_id
    assert set(parents) == set(range(len(parents))), "ids count up without gaps"


def test_has_the_sessions_that_it_promises():
    sessions: dict[str, list[int]] = {}
    prompts: dict[str, set[int]] = {}
    for request in Workload(5000, block_tokens=16):
        kind = request.session.rsplit("-", 1)[0]
        sessions.setdefault(request.session, []).append(request.input_length)
        prompts.setdefault(kind, set()).add(request.hash_ids[0])
    by_kind: dict[str, list[list[int]]] = {}
    for name, lengths in sessions.items():
        assert lengths == sorted(set(lengths)), "a session's context grows"
        by_kind.setdefault(name.rsplit("-", 1)[0], []).append(lengths)
    turns = {kind: sum(map(len, some)) / len(some) for kind, some in by_kind.items()}
    assert turns["one-shot"] == 1
    assert 3 < turns["chat"] < 6
    assert 8 < turns["agent"] < 20
    assert len(prompts["chat"]) == 8, "all chats stand on one of the system prompts"
    assert len(prompts["agent"]) == 3
    assert len(prompts["one-shot"]) > 400, "half of the one-shot requests share nothing"


def test_arrivals_are_poisson():
    """Of a Poisson process, the counts in equal spans have a variance equal to their mean."""
    first_seen: dict[str, int] = {}
    for request in Workload(8000):
        first_seen.setdefault(request.session, request.timestamp // 10_000)
    counts = [0] * (max(first_seen.values()) - 1)
    for span in first_seen.values():
        if span < len(counts):
            counts[span] += 1
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert 0.7 < variance / mean < 1.4


def test_caches_of_different_sizes_differ_on_it():
    survey = Survey.of(Workload(5000))
    assert 0.6 < survey.ideal_hit_ratio < 0.9
    assert survey.block_tokens == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"block_tokens": 0}, "block_tokens must be >= 1, got 0"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Workload(**options)
