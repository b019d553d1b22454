"""Sessions of coding agents: what is made of their times, their ids, and what they share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvoffload.replay import Configuration, replay
from kvoffload.traces import MergedTrace, SessionOptions, Trace, TraceError
from tests.replay.test_golden import trace


def request(t, ids, *, model="m", out=5, size=4, **more):
    return {"t": t, "type": "n", "model": model, "in": size * len(ids), "out": out} | {
        "hash_ids": ids,
        **more,
    }


def session(name, requests, **more):
    return {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": requests, **more}


def subagent(t, name, requests):
    return {"type": "subagent", "t": t, "agent_id": name, "requests": requests}


def written(folder: Path, *sessions, name="sessions.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return path


def read(path: Path, **options):
    return list(Trace(path, sessions=SessionOptions(**options)))


def times(requests):
    return [(one.session, one.timestamp) for one in requests]


def test_starts_are_drawn_once_per_session_in_their_order_over_all_files(tmp_path):
    for name in "abc":
        rows = [request(0.0, [1]), subagent(2.0, "x", [request(3.0, [2])])]
        text = json.dumps(session(name, rows), indent=None if name == "b" else 1)
        (tmp_path / f"{name}.json").write_text(text)
    starts = dict(zip("abc", map(random.Random(7).uniform, [0] * 3, [60] * 3), strict=True))
    paths = sorted(str(path) for path in tmp_path.iterdir())
    options = SessionOptions(starts_s=60, seed=7)
    found = dict(times(MergedTrace(paths, sessions=options)))
    assert found == {
        **{name: round(1000 * start) for name, start in starts.items()},
        **{f"{name}/x": round(1000 * (start + 3)) for name, start in starts.items()},
    }
    assert set(dict(times(MergedTrace(paths))).values()) == {0, 3000}


@pytest.mark.parametrize("block_tokens", [4, 8, 12])
def test_what_a_row_repeats_of_those_before_changes_no_id(tmp_path, block_tokens):
    rows = [(1, 2, 3, 4, 5, 6), (1, 2, 3), (1, 2, 3, 4, 7, 8), (9, 11, 12), (1, 2, 3, 4, 5, 6, 10)]
    models = ["m", "m", "n", "m", "m"]
    together = [request(t, list(rows[t]), model=models[t]) for t in range(5)]
    found = read(written(tmp_path, session("s", together)), block_tokens=block_tokens)
    alone = [
        one.hash_ids
        for row in together
        for one in read(written(tmp_path, session("s", [row])), block_tokens=block_tokens)
    ]
    assert [one.hash_ids for one in found] == alone


def test_sessions_that_state_no_prompt_share_nothing(tmp_path):
    one, other = read(written(tmp_path, *(session(name, [request(0, [1, 2])]) for name in "ab")))
    assert not {*one.hash_ids} & {*other.hash_ids}


@pytest.mark.parametrize(
    "options", [{"starts_s": -1}, {"until_s": float("nan")}, {"seed": -1}, {"block_tokens": 0}]
)
def test_wrong_options_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be "):
        SessionOptions(**options)


def test_more_files_of_sessions_than_are_merged_side_by_side(tmp_path):
    for index in range(501):
        written(tmp_path, session(f"s{index}", [request(index, [1])]), name=f"{index:03}.json")
    paths = sorted(str(path) for path in tmp_path.iterdir())
    assert len(list(MergedTrace(paths))) == 501
    other = written(tmp_path, {"timestamp": 0}, name="000.json")
    assert str(other) == paths[0]
    with pytest.raises(TraceError, match="must be at most 500 files, got 501"):
        MergedTrace(paths)


@pytest.mark.thorough
@pytest.mark.nightly
def test_the_published_sessions_make_the_rows_that_tables_are_measured_on():
    path = trace("weka_sessions_a").path
    options = SessionOptions(
        starts_s=28_800, seed=11, until_s=36_000, block_tokens=512, shared_prompts=True
    )
    rows = list(Trace(path, sessions=options))
    assert len(rows) == 19_753
    assert sum(len(row.hash_ids) for row in rows) == 4_580_466
    unique = len({hash_id for row in rows for hash_id in row.hash_ids})
    assert unique == 167_240
    assert replay(rows, Configuration(host=unique // 100)).hits == 1_302_494
