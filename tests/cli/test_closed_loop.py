"""`--closed-loop` of `replay` and `sweep`."""

from __future__ import annotations

import pytest

from kvoffload.cli.replay import IN_LOOP
from kvoffload.traces import Workload

from .conftest import read

pytestmark = pytest.mark.thorough
WORKLOAD = Workload(400, seed=1)

SIZES = ("--policy", "lru,infinite", "--capacity", "5%,20%", "--quiet")


def test_replay_and_sweep_find_the_same(kvoffload, trace):
    loop = ("--closed-loop", "9,000", "--decode-ms", "5")
    replayed = read(kvoffload, "replay", str(trace), *SIZES, *loop)
    swept = read(kvoffload, "sweep", str(trace), *SIZES, *loop, "--jobs", "2")
    for found in (replayed, swept):
        engine = found["loop"], found["prefill_tokens_per_second"], found["decode_ms"]
        assert engine == ("closed", 9000, 5.0)
    found = {(row["policy"], row["capacity"]): row for row in swept["results"]}
    assert len(found) == len(replayed["results"]) == 4
    for row in replayed["results"]:
        other = found[row["policy"], row["capacity"]]
        assert row["hits"] == other["hits"]
        assert row["ttft_p50"] <= row["ttft_p95"]
        for name in IN_LOOP:
            assert row[name] == other[name] > 0
    assert "first token" in kvoffload("replay", str(trace), *SIZES, *loop).out


def test_recorded_finds_the_hits_of_the_open_replay_and_no_times(kvoffload, trace):
    opened = read(kvoffload, "replay", str(trace), *SIZES)
    looped = read(kvoffload, "replay", str(trace), *SIZES, "--closed-loop", "recorded")
    assert [found["loop"] for found in (opened, looped)] == ["open", "recorded"]
    assert looped["prefill_tokens_per_second"] is None
    for one, other in zip(opened["results"], looped["results"], strict=True):
        assert one["hit_ratio"] == pytest.approx(other["hit_ratio"], abs=0.01)
        assert {other[name] for name in IN_LOOP} == {None}
