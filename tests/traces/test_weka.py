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


def test_it_is_recognised_and_says_what_its_sessions_say(tmp_path):
    path = written(
        tmp_path,
        session(
            "s",
            [
                request(0.0, [1, 2], api_time=1.5, stop="tool_use", think_time=99.0),
                request(4.0, [1, 2, 3], api_time=2.0, stop="end_turn"),
                request(5.0, [1, 2, 3, 4]),
                request(9.0, [1]),
            ],
        ),
    )
    trace = Trace(path)
    first, second, third, last = trace
    assert (trace.format, trace.block_tokens, trace.has_hashes) == ("weka", 4, True)
    assert [one.timestamp for one in (first, second, third, last)] == [0, 4000, 5000, 9000]
    assert (first.input_length, first.output_length, first.session) == (8, 5, "s")
    assert (first.think, first.service, first.stop) == (None, 1500, "tool_use")
    assert (second.think, second.service, second.stop) == (2500, 2000, "end_turn")
    assert third.think == 0, "it came while the one before it was answered"
    assert last.think == 4000, "without api_time it is the whole gap"
    assert [one.expect for one in (first, second, third, last)] == [4000, 1000, 4000, None]
    assert [one.ends for one in (first, second, third, last)] == [False, False, False, True]
    assert first.hash_ids == second.hash_ids[:2]
    assert last.hash_ids == first.hash_ids[:1]


def test_a_subagent_is_a_session_of_its_own_with_a_parent_to_a_depth(tmp_path):
    nested = [request(0.0, [1]), subagent(1.0, "a", [request(2, [2])])]
    outer, inner = read(written(tmp_path, session("s", nested)))
    assert (outer.session, outer.parent, outer.ends) == ("s", None, True)
    assert (inner.session, inner.parent, inner.ends, inner.think) == ("s/a", "s", True, None)
    for depth in (32, 33):
        nested = [request(0, [1])]
        for _ in range(depth):
            nested = [subagent(0, "a", nested)]
        path = written(tmp_path, session("s", nested))
        if depth == 32:
            assert len(read(path)) == 1
    with pytest.raises(TraceError, match="subagents must be at most 32 deep"):
        read(path)


def test_a_time_before_its_marker_has_all_nested_times_count_from_markers(tmp_path):
    inner = subagent(3.0, "inner", [request(1.0, [7])])
    early = session("early", [request(0.0, [1]), subagent(10.0, "a", [request(2.0, [5]), inner])])
    late = session("late", [request(0.0, [1]), subagent(10.0, "a", [request(20.0, [5])])])
    from_start = times(read(written(tmp_path, late)))
    assert from_start == [("late", 0), ("late/a", 20_000)]
    assert times(read(written(tmp_path, late, early))) == [
        ("late", 0),
        ("early", 0),
        ("early/a", 12_000),
        ("early/a/inner", 14_000),
        ("late/a", 30_000),
    ]


def test_ids_count_with_their_session_their_scope_and_the_model(tmp_path):
    local = [session(name, [request(0, [1]), request(0, [1], model="n")]) for name in "ab"]
    ids = {one.hash_ids for one in read(written(tmp_path, *local))}
    assert len(ids) == 4
    everywhere = [one | {"hash_id_scope": "global"} for one in local]
    assert len({one.hash_ids for one in read(written(tmp_path, *everywhere))}) == 2


def test_starts_are_drawn_once_per_session_in_their_order_over_all_files(tmp_path):
    for name in "abc":
        rows = [request(0.0, [1]), subagent(2.0, "x", [request(3.0, [2])])]
        written(tmp_path, session(name, rows), name=f"{name}.json")
    drawn = random.Random(7)
    starts = {name: drawn.uniform(0, 60) for name in "abc"}
    paths = sorted(str(path) for path in tmp_path.iterdir())
    options = SessionOptions(starts_s=60, seed=7)
    found = dict(times(MergedTrace(paths, sessions=options)))
    assert found == {
        **{name: round(1000 * start) for name, start in starts.items()},
        **{f"{name}/x": round(1000 * (start + 3)) for name, start in starts.items()},
    }
    assert set(dict(times(MergedTrace(paths))).values()) == {0, 3000}


def test_what_comes_later_is_left_out_and_ends_nothing(tmp_path):
    path = written(tmp_path, session("s", [request(0, [1]), request(5, [1]), request(6, [1])]))
    first, second = read(path, until_s=5.0)
    assert (second.timestamp, second.ends, second.expect) == (5000, False, 1000)
    assert first.expect == 5000


def test_blocks_of_more_tokens_are_made_of_whole_ones(tmp_path):
    path = written(tmp_path, session("s", [request(0, [1, 2, 3, 4, 5]), request(1, [1])]))
    (one,) = read(path, block_tokens=8)
    assert len(one.hash_ids) == 2
    assert one.input_length == 20
    with pytest.raises(TraceError, match="block_size must divide 10 tokens, got 4"):
        read(path, block_tokens=10)


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


def test_shared_prompts_are_one_for_sessions_with_the_same_counts(tmp_path):
    def of(name, system, *ids):
        rows = [request(index, list(one)) for index, one in enumerate(ids)]
        return session(name, rows, tool_tokens=5, system_tokens=system)

    path = written(
        tmp_path,
        of("a", 4, (1, 2, 3), (1, 2, 4)),
        of("b", 4, (1, 2, 3), (9, 10)),
        of("c", 8, (1, 2, 3)),
    )
    found = {(one.session, one.timestamp): one.hash_ids for one in read(path, shared_prompts=True)}
    assert found["a", 0][:2] == found["b", 0][:2] == found["a", 1000][:2], "nine tokens: two blocks"
    assert found["a", 0][2] != found["b", 0][2]
    assert not {*found["b", 1000]} & {*found["b", 0]}, "another prompt than its session's first"
    assert not {*found["c", 0]} & {*found["a", 0]}
    alone = [one.hash_ids for one in read(path)]
    assert len({ids[0] for ids in alone}) == 4


def listing(*rows):
    """Return what changes a session to one with these ids, row by row."""
    return {"requests": [request(seconds, ids) for seconds, ids in enumerate(rows)]}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"hash_id_scope": "other"}, "hash_id_scope must be local or global, got 'other'"),
        ({"id": 3}, "id must be a string, got 3"),
        ({"requests": {}}, "requests must be a list of objects, got {}"),
        ({"requests": [3]}, "requests must be a list of objects, got 3"),
        ({"requests": [request(0, [1]) | {"in": 8}]}, "hash_ids must be 2 ids, got 1"),
        ({"requests": [request(0, [1]) | {"in": 2**70}]}, "in must be an integer <= "),
        ({"requests": [request(-1, [1])]}, "t must be a number >= 0, got -1"),
        ({"requests": [request(2, [1]), request(1, [1])]}, "t must be >= 2.0, got 1.0"),
        (listing([-1]), "hash_ids[0] must be an integer >= 0, got -1"),
        (listing([1, 2, 1]), "hash_ids[2] must follow one id, got 1 twice"),
        (listing([0, 1], [0, True]), "hash_ids[1] must be an integer"),
        (listing([0, 1], [0.0, 1]), "hash_ids[0] must be an integer"),
        (listing([1, 2], [1, 3, 2]), "hash_ids[2] must follow one id"),
        (listing([1, 2], [2]), "hash_ids[0] must follow one id"),
        ({"requests": [request(0, [1], stop=3)]}, "stop must be a string, got 3"),
        ({"requests": [request(0, [1], api_time=-1)]}, "api_time must be a number >= 0, got -1"),
        ({"requests": [{"type": "subagent", "t": 0, "requests": []}]}, "must have the field agent"),
        ({"requests": []}, "a trace must hold at least one request, got sessions without any"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, change, rule):
    good, bad = (session(name, [request(0, [1])]) for name in "st")
    with pytest.raises(TraceError) as raised:
        read(written(tmp_path, bad | change))
    assert rule in str(raised.value)
    if change != {"requests": []}:
        trace = Trace(written(tmp_path, good, bad | change), skip_bad=True)
        assert (times(trace), trace.bad_lines) == ([("s", 0)], 1)


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
