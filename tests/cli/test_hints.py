"""`--hints` of `replay`, `sweep`, `fleet` and `advise`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.traces import Workload

from .conftest import read

pytestmark = pytest.mark.thorough

NOISY = ("--hints", "both", "--hints-noise", "2.7", "--hints-share", "0.5", "--hints-seed", "7")


LAST = {row.session: index for index, row in enumerate(Workload(400, seed=1))}
WORKLOAD = [
    replace(row, ends=LAST[row.session] == index < 350)
    for index, row in enumerate(Workload(400, seed=1))
]
"""Its sessions say that they end."""


def test_json_says_what_was_told(kvoffload, trace):
    asked = ("sweep", trace, "--policy", "lru", "--capacity", "5%", "--jobs", "1", "--quiet")
    said = read(kvoffload, *asked, *NOISY)["hints"]
    assert 10 < said.pop("expecting_requests") < said.pop("ending_requests")
    assert said == {"told": "both", "noise": 2.7, "share": 0.5, "liars": 0, "seed": 7}
    assert read(kvoffload, *asked, "--hints", "none")["hints"] is None


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
