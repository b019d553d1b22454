"""`--hints` of `replay`, `sweep`, `fleet` and `advise`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.traces import Workload, write_trace

from .conftest import read

pytestmark = pytest.mark.thorough

SWEEP = ("--policy", "lru", "--capacity", "5%", "--jobs", "1", "--quiet")
ADVISE = ("--capacity", "5%", "--kv-bytes-per-token", "100", "--policy", "lru", "--quiet")
NOISY = ("--hints", "both", "--hints-noise", "2.7", "--hints-share", "0.5", "--hints-seed", "7")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A workload whose sessions say that they end."""
    rows = list(Workload(400, seed=1))
    last = {row.session: index for index, row in enumerate(rows)}
    path = tmp_path_factory.mktemp("hints") / "trace.jsonl"
    write_trace(
        [replace(row, ends=last[row.session] == index < 350) for index, row in enumerate(rows)],
        path,
    )
    return path


def test_replay_and_sweep_say_the_same_and_what_was_told(kvoffload, trace):
    arguments = (trace, "--policy", "lru,hit-density", "--capacity", ".5%,5%", "--quiet", *NOISY)
    one, other = read(kvoffload, "replay", *arguments), read(kvoffload, "sweep", *arguments)
    assert one["hints"] == other["hints"]
    said = one["hints"]
    counts = said.pop("expecting_requests"), said.pop("ending_requests")
    assert said == {"told": "both", "noise": 2.7, "share": 0.5, "liars": 0, "seed": 7}
    assert min(counts) > 10
    hits = [
        {(row["policy"], row["capacity"]): row["hits"] for row in found["results"]}
        for found in (one, other)
    ]
    assert hits[0] == hits[1]
    assert len(hits[0]) == 4


def test_liars_are_reported_apart(kvoffload, trace, tmp_path):
    asked = (trace, "--policy", "belady,lru,hit-density", "--capacity", "2%", "--quiet")
    liars = ("--hints", "both", "--hints-liars", ".4")
    one = read(kvoffload, "replay", *asked, *liars)["results"]
    kept = ("--results", tmp_path / "results")
    for _ in range(2):  # the second time, from the file
        other = read(kvoffload, "sweep", *asked, *liars, *kept)["results"]
        for name in ("honest_hit_ratio", "liar_hit_ratio"):
            assert [row[name] for row in one] == [row[name] for row in other]
    assert [one[0][name] for name in ("honest_hit_ratio", "liar_hit_ratio")] == [None, None]
    for row in other[1:]:
        asked_by = row["asked"] - row["liar_asked"], row["liar_asked"]
        ratios = row["honest_hit_ratio"], row["liar_hit_ratio"]
        whole = sum(ratio * count for ratio, count in zip(ratios, asked_by, strict=True))
        assert min(asked_by) > 0
        assert whole / row["asked"] == pytest.approx(row["hit_ratio"])
    assert "honest" in kvoffload("replay", *asked, *liars).out
    without = read(kvoffload, "sweep", *asked, *liars[:2])["results"]
    for name in ("honest_hit_ratio", "liar_hit_ratio", "liar_asked", "liar_hits"):
        assert {row[name] for row in without} == {None}


LIARS = ("--hints", "both", "--hints-liars", ".4")


def test_advice_reports_liars_apart_as_a_sweep_does(kvoffload, trace):
    bytes_of = ("--kv-bytes-per-token", "100", "--capacity", "2%", "--policy", "lru,hit-density")
    advised = ("advise", trace, *bytes_of, "--jobs", "1", "--quiet", "--step-tokens", "1024")
    advice = read(kvoffload, *advised, *LIARS)
    names = ("honest_hit_ratio", "liar_hit_ratio")
    for memory in advice["memories"]:
        sizes = ("--capacity", str(memory["capacity"]), "--step-tokens", "1024", "--jobs", "1")
        block = ("--block-tokens", str(advice["block_tokens"]), "--full-blocks", "--quiet")
        swept = read(kvoffload, "sweep", trace, *bytes_of[4:], *sizes, *block, *LIARS)["results"]
        assert [row["policy"] for row in swept] == list(memory["policies"])
        for row in swept:
            found = memory["policies"][row["policy"]]
            assert [found[name] for name in names] == [row[name] for name in names]
            assert found["honest_hit_ratio"] != found["liar_hit_ratio"] > 0
    without = kvoffload(*advised, *LIARS[:2], "--json").out
    assert "liar_hit_ratio" not in without


def test_none_is_what_it_was_without(kvoffload, trace):
    without = read(kvoffload, "sweep", trace, *SWEEP)
    assert without["hints"] is None
    assert read(kvoffload, "sweep", trace, *SWEEP, "--hints", "none") == without
    with_ends = read(kvoffload, "sweep", trace, *SWEEP, "--hints", "ends")
    assert with_ends["results"][0]["hits"] > without["results"][0]["hits"]


def test_full_blocks_and_standard_input_tell_the_same(kvoffload, trace):
    told = read(kvoffload, "replay", trace, *SWEEP[:4], "--quiet", *NOISY)["hints"]
    for command, more in (("replay", SWEEP[:4]), ("sweep", SWEEP[:4])):
        full = read(kvoffload, command, trace, *more, "--full-blocks", "--quiet", *NOISY)
        assert full["hints"] == told
    data = trace.read_bytes()
    done = kvoffload("replay", "-", *SWEEP[:4], "--quiet", "--json", *NOISY, stdin=data)
    assert done.value["hints"] == told


def test_advice_says_what_was_told_and_how_to_ask_again(kvoffload, trace, tmp_path):
    pytest.importorskip("jinja2", reason="the report needs the report extra")
    arguments = ("advise", trace, *ADVISE, "--jobs", "1")
    page = tmp_path / "page.html"
    told = read(kvoffload, *arguments, *NOISY, "--report", page)
    without = read(kvoffload, *arguments)
    assert told["hints"]["told"] == "both"
    assert without["hints"] is None
    assert told["unbounded_hit_ratio"] == without["unbounded_hit_ratio"]
    assert told["memories"] != without["memories"]
    text = page.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert " ".join(NOISY) in text
    assert "Replayed with hints of 50.0 % of the sessions: " in text
    done = kvoffload(*arguments, *NOISY)
    assert "Replayed with hints of 50.0 % of the sessions: " in " ".join(done.out.split())
