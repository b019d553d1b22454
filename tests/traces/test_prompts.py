"""Prompts from a trace: equal exactly as far as the requests share blocks."""

import io
import itertools
import json

import pytest

from kvoffload.traces import Request, Workload, write_prompts
from kvoffload.traces.prompts import prompt_of


def shared(one, other):
    """Return how many leading items two lists share."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_share_words_as_requests_share_blocks():
    requests = list(Workload(60, seed=2, block_tokens=64))
    prompts = [prompt_of(request, 64).split() for request in requests]
    for request, words in zip(requests, prompts, strict=True):
        assert len(words) == request.input_length
    for (a, x), (b, y) in itertools.combinations(zip(requests, prompts, strict=True), 2):
        blocks = shared(a.hash_ids, b.hash_ids)
        assert shared(x, y) // 64 == min(blocks, min(len(x), len(y)) // 64)


def test_a_prompt_of_unknown_length_has_full_blocks():
    assert len(prompt_of(Request(0, 0, 0, (1, 2)), 5).split()) == 10
    assert prompt_of(Request(0, 3, 0, ()), 5) != prompt_of(Request(1, 3, 0, ()), 5)


def test_a_request_without_a_token_is_left_out():
    stream = io.BytesIO()
    assert write_prompts([Request(0, 0, 3, ()), Request(1, 4, 3, (1,))], stream, 4) == 1
    (row,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert row["prompt"]


def test_each_line_is_a_prompt_and_the_length_of_its_answer():
    stream = io.BytesIO()
    requests = [Request(0, 8, 7, (1, 2)), Request(1, 4, 0, (1,))]
    assert write_prompts(requests, stream, 4) == 2
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [row["output_tokens"] for row in rows] == [7, 1]
    assert rows[0]["prompt"].startswith(rows[1]["prompt"])
    assert set(rows[0]) == {"prompt", "output_tokens"}


def test_a_length_without_bounds_makes_no_prompt():
    with pytest.raises(OverflowError, match="input_length must be at most 16777216 for a prompt"):
        prompt_of(Request(0, 10**12, 1, (1,)), 16)
