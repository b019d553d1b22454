"""Rows that hold only what is new in their session, put together."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from kvoffload.traces import SessionOptions, Trace, TraceError
from kvoffload.traces.formats import mooncake_delta

BLOCK = 4


def row(session, tokens, answer, ids, **fields):
    lengths = {"timestamp": 0, "input_length": tokens, "output_length": answer}
    return {**lengths, "hash_ids": ids, "session_id": session, **fields}


def written(tmp_path, *rows):
    path = tmp_path / "deltas.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def read(tmp_path, *rows, skip_bad=False):
    path = written(tmp_path, *rows)
    options = SessionOptions(block_tokens=BLOCK)
    trace = Trace(path, format="mooncake-delta", sessions=options, skip_bad=skip_bad)
    requests = list(trace)
    assert list(trace) == requests  # ids do not change from pass to pass
    assert trace.block_tokens == BLOCK
    return requests


def token_prompts(rows):
    """The prompts of rows, token by token."""
    prompts, whole = [], {}
    for turn, one in enumerate(rows):
        tokens = [(hash_id, place) for hash_id in one["hash_ids"] for place in range(BLOCK)]
        before = whole.get(one["session_id"], [])
        prompt = before + tokens[: one["input_length"]]
        prompts.append(prompt)
        answer = [(one["session_id"], turn, place) for place in range(one["output_length"])]
        if one["session_id"] is not None:
            whole[one["session_id"]] = prompt + answer
    return prompts


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_equal_exactly_where_prompts_are(tmp_path, seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(40):
        tokens = draw.choice([0, 3, 4, 5, 8, 11])
        ids = [draw.randrange(2) for _ in range(-(-tokens // BLOCK))]
        rows.append(row(draw.choice(["a", "b", "c", None]), tokens, draw.choice([0, 0, 4, 5]), ids))
    by_id, by_prefix = {}, {}
    for request, prompt in zip(read(tmp_path, *rows), token_prompts(rows), strict=True):
        assert request.input_length == len(prompt)
        assert len(request.hash_ids) == len(prompt) // BLOCK
        for block, hash_id in enumerate(request.hash_ids, 1):
            prefix = tuple(prompt[: block * BLOCK])
            assert by_id.setdefault(hash_id, prefix) == prefix
            assert by_prefix.setdefault(prefix, hash_id) == hash_id


def test_a_prompt_is_bounded_and_whole_before_anything_is_kept(tmp_path):
    most = BLOCK * mooncake_delta.MOST_BLOCKS
    rows = [row("a", 4, most, [1]), row("a", 4, 0, [2]), row("b", 4, 0, [1])]
    with pytest.raises(
        TraceError, match=r":2: a prompt must have at most 131072 blocks, got 131074"
    ):
        read(tmp_path, *rows)
    first, other = read(tmp_path, *rows, skip_bad=True)
    assert other.hash_ids == first.hash_ids
    rule = r":2: hash_ids must be 2, one for each 4 tokens of 5, got 1"
    with pytest.raises(TraceError, match=rule):
        read(tmp_path, row("a", 4, 0, [1]), row("a", 5, 0, [1]))


def test_sessions_are_bounded_together_and_leave_when_they_end(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake_delta, "MOST_HELD", 2 * (mooncake_delta.SESSION_BLOCKS + 2))
    ending = [row(name, 4 * 2, 0, [1, 2], ends=True) for name in "cdef"]
    rows = [row("a", 8, 0, [1, 2]), *ending, row("b", 8, 0, [1, 2])]
    assert len(read(tmp_path, *rows)) == 6
    with pytest.raises(
        TraceError, match=r":7: sessions without a row that `ends` must hold at most"
    ):
        read(tmp_path, *rows, row("b", 4, 0, [3]))


SESSIONS = [
    *(row(name, 9, 2, [1, 2, 100 + place]) for place, name in enumerate("ab")),
    *(row(name, 8, 2, [10 * place + 3, 10 * place + 4]) for place, name in enumerate("ab")),
]


def test_a_row_that_contradicts_the_recognition_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("kvoffload.traces.reader.AHEAD_BYTES", 450)
    path = written(tmp_path, *SESSIONS, row("a", 8, 0, [1, 2]))
    with pytest.raises(TraceError, match=r":5: no row before repeats its session's first id"):
        list(Trace(path))


def test_prompts_are_bounded_together_by_the_bytes_of_the_file(tmp_path):
    most = mooncake_delta.FREE_BLOCKS
    rows = [row("a", 4, BLOCK * 10**5, [1]), *(row("a", 4, 0, [n]) for n in range(2, 100))]
    path = tmp_path / "deltas.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in rows).encode()))
    with pytest.raises(TraceError, match="the prompts of a file of this size must have at most"):
        list(Trace(path))
    made = sum(len(request.hash_ids) for request in Trace(path, skip_bad=True))
    assert 0 < made <= most + mooncake_delta.MADE_PER_BYTE * path.stat().st_size
