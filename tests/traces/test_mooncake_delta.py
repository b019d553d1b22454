"""Rows that hold only what is new in their session, put together."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.traces import SessionOptions, Trace, TraceError
from kvoffload.traces.formats import mooncake_delta

BLOCK = 4


def row(session, tokens, answer, ids, **fields):
    lengths = {"timestamp": 0, "input_length": tokens, "output_length": answer}
    return {**lengths, "hash_ids": ids, "session_id": session, **fields}


def read(tmp_path, *rows, skip_bad=False):
    path = tmp_path / "deltas.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    options = SessionOptions(block_tokens=BLOCK)
    trace = Trace(path, format="mooncake-delta", sessions=options, skip_bad=skip_bad)
    requests = list(trace)
    assert list(trace) == requests  # ids do not change from pass to pass
    assert trace.block_tokens == BLOCK
    return requests


def test_a_prompt_is_the_one_before_its_answer_and_what_is_new(tmp_path):
    first, other, second, third = read(
        tmp_path,
        row("a", 6, 3, [1, 2]),
        row("b", 6, 9, [1, 2]),
        row("a", 5, 0, [3, 4]),
        row("a", 0, 1, []),
    )
    assert [one.input_length for one in (first, second, third)] == [6, 6 + 3 + 5, 14]
    assert [len(one.hash_ids) for one in (first, second, third)] == [1, 3, 3]
    assert second.hash_ids[:1] == first.hash_ids == other.hash_ids
    assert third.hash_ids == second.hash_ids


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


def test_what_holds_no_whole_ids_is_refused(tmp_path):
    with pytest.raises(
        TraceError, match=r":2: hash_ids must be 2, one for each 4 tokens of 5, got 1"
    ):
        read(tmp_path, row("a", 4, 0, [1]), row("a", 5, 0, [1]))


def test_a_prompt_is_bounded_before_anything_is_kept(tmp_path):
    most = BLOCK * mooncake_delta.MOST_BLOCKS
    rows = [row("a", 4, most, [1]), row("a", 4, 0, [2]), row("b", 4, 0, [1])]
    with pytest.raises(
        TraceError, match=r":2: a prompt must have at most 524288 blocks, got 524290"
    ):
        read(tmp_path, *rows)
    first, other = read(tmp_path, *rows, skip_bad=True)
    assert other.hash_ids == first.hash_ids


def test_sessions_are_bounded_together_and_leave_when_they_end(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake_delta, "MOST_HELD", 2 * (mooncake_delta.SESSION_BLOCKS + 2))
    ending = [row(name, 4 * 2, 0, [1, 2], ends=True) for name in "cdef"]
    rows = [row("a", 8, 0, [1, 2]), *ending, row("b", 8, 0, [1, 2])]
    assert len(read(tmp_path, *rows)) == 6
    with pytest.raises(
        TraceError, match=r":7: sessions without a row that `ends` must hold at most"
    ):
        read(tmp_path, *rows, row("b", 4, 0, [3]))


def test_tokens_of_an_id_must_be_given(tmp_path):
    with pytest.raises(ValueError, match="sessions must give the block_tokens of mooncake-delta"):
        Trace(tmp_path / "deltas.jsonl", format="mooncake-delta")
