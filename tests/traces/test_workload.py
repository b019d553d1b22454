"""The generated workload: the same on every machine, and as documented."""

import hashlib
from itertools import islice, pairwise

import pytest

from kvoffload.traces import Workload
from kvoffload.traces.writer import trace_line

pytestmark = pytest.mark.fast

DIGESTS = {
    0: "2eed0ab69fbe4d0a1c9178b7fdb86e44281013aeb7e4e68f36293775756fb027",
    1: "2416da96970e2a8276e2f92131dc0205de39d1f86b5d6b834e4e69c6fdc03eb0",
}


@pytest.mark.parametrize("seed", DIGESTS)
def test_a_seed_gives_these_very_bytes_on_every_python_and_machine(seed):
    lines = b"".join(map(trace_line, Workload(2000, seed=seed)))
    assert hashlib.sha256(lines).hexdigest() == DIGESTS[seed]


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
