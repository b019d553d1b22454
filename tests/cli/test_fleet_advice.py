"""`kvoffload advise` on engines behind a router, in the memory that suffices, since last time."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kvoffload.traces import write_trace

from .conftest import growing, read

pytestmark = pytest.mark.thorough
WORKLOAD = growing(12, 20)

SIZE = ("--kv-bytes-per-token", "65536", "--jobs", "1")
RATES = ("--prefill-tokens-per-second", "1000", "--link-bandwidth", "1GB")


@pytest.fixture
def advise(kvoffload, trace):
    return partial(read, kvoffload, "advise", trace, *SIZE)


def test_a_fleet_is_recommended_with_its_configuration(kvoffload, trace, advise, tmp_path):
    report = tmp_path / "fleet.html"
    asked = ("--engines", "4", "--capacity", "40MiB", "--router", "session,prefix", *RATES)
    value = advise(*asked, "--shared", "128MiB", "--disk", "100MiB", "--report", report)
    assert (value["engines"], value["memory"], value["loop"]) == (4, 40 * 2**20, "open")
    assert len(value["results"]) == 3 + 4 * 3 * 2 * 3
    found = value["recommendation"]
    (same,) = [
        one
        for one in value["results"]
        if all(one[name] == found[name] for name in ("router", "policy", "memory", "tier_memory"))
    ]
    assert (same["saved"], same["ttft_p95"]) == (found["saved"], found["ttft_p95"])
    extra = value["configuration"]["vllm"]["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == found["memory"]
    assert "Advice for 4 engines behind a router" in report.read_text(encoding="utf-8")


def test_sessions_that_say_how_long_they_wait_are_a_closed_loop(kvoffload, tmp_path):
    path = tmp_path / "think.jsonl"
    write_trace(growing(12, 20, think=500), path)
    asked = ("--engines", "2", "--capacity", "20MiB", "--router", "session", "--policy", "lru")
    value = kvoffload("advise", path, *SIZE, *asked, *RATES, "--json").value
    assert value["loop"] == "closed"
    fleet = kvoffload(
        *("fleet", path, "--full-blocks", "--engines", "2", "--router", "session"),
        *("--policy", "lru", "--capacity", "20MiB", "--block-bytes", "1MiB", *RATES),
        *("--closed-loop", "closed", "--json", "--quiet"),
    ).value["results"][0]
    (same,) = [
        one for one in value["results"] if (one["router"], one["memory"]) == ("session", 20 * 2**20)
    ]
    for name in fleet.keys() - {"capacity_given"}:
        assert same[name] == fleet[name], name


def test_the_knee_is_the_memory_that_is_advised_on(advise, kvoffload, trace):
    value = advise("--capacity", "auto")
    knee = value["knee"]
    assert value["memory"] == knee["memory"]
    assert value["recommendation"] is not None
    assert knee["least"] <= knee["most"]
    assert [one["memory"] for one in value["memories"]] == [
        knee["memory"] * size // 2 for size in (1, 2, 4, 8)
    ]
    given = advise("--capacity", f"{knee['memory']}B")
    assert given["knee"] is None
    assert given["memories"] == value["memories"]


def test_the_knee_for_several_engines_is_behind_the_accelerators_cache_of_one(advise):
    """Caches of all engines together would serve what no router keeps in them."""
    asked = ("--capacity", "auto", "--device-memory", "16MiB", "--router", "round-robin", *RATES)
    value, one = (advise(*asked, "--engines", number)["knee"] for number in ("8", "1"))
    assert value == one
    assert any(rung["hit_ratio"] > 0.1 for rung in value["curve"])


def test_what_host_memory_cannot_gain_is_not_offloaded(kvoffload, trace, advise, tmp_path):
    """All blocks fit on the accelerators."""
    report = tmp_path / "fleet.html"
    asked = ("--engines", "2", "--capacity", "8MiB", "--router", "session", *RATES)
    asked += ("--device-memory", "1TiB", "--shared", "64MiB")
    value = advise(*asked, "--report", report)
    assert (value["pays"], value["configuration"]) == (False, None)
    chosen = value["recommendation"]
    assert (chosen["memory"], chosen["policy"], chosen["tier"]) == (0, None, None)
    without = [one for one in value["results"] if one["memory"] == 0]
    assert {one["router"] for one in without} == {"round-robin", "session"}
    assert all(one["capacity"] == one["host_hits"] == 0 for one in without)
    page = report.read_text(encoding="utf-8")
    assert "Offloading does not pay" in page
    assert ">Verdict</h2>" in page
    assert "cpu_bytes_to_use" not in page
    paid = advise(*asked[:4], "--router", "session", *RATES)
    assert (paid["pays"], paid["recommendation"]["memory"] > 0) == (True, True)
    assert "more than without offloading" in paid["headline"]
    (tmp_path / "paid.json").write_text(json.dumps(paid))
    again = advise(*asked, "--compare", tmp_path / "paid.json")
    assert {"name": "policy", "before": paid["recommendation"]["policy"], "now": None} in again[
        "changes"
    ]["changes"]


def test_a_disk_is_given_in_blocks_in_a_share_or_in_bytes(advise):
    blocks = advise("--capacity", "8", "--policy", "lru")["unique_blocks"]
    found = [
        advise("--capacity", "8", "--policy", "lru", "--disk", size)["details"]
        for size in ("60", "60MiB", f"{6000 / blocks:.9f}%")
    ]
    assert found[0]["disk"]["size"] == 60 * 2**20
    assert found[0] == found[1]
    assert found[2]["disk"]["size"] in {59 * 2**20, 60 * 2**20}
    fleet = advise("--capacity", "8", "--policy", "lru", "--disk", "60", "--engines", "2")
    assert {one["tier_blocks"] for one in fleet["results"]} == {None, 60}


def test_what_changed_since_an_earlier_advice_is_said(kvoffload, trace, advise, tmp_path):
    path = tmp_path / "old.json"
    for more in ((), ("--engines", "2", "--router", "session", "--policy", "lru")):
        old = advise("--capacity", "20MiB", *more)
        path.write_text(json.dumps(old))
        new = advise("--capacity", "80MiB", *more, "--compare", path)
        first, *others = new["changes"]["changes"]
        assert first == {"name": "host memory asked for", "before": 20 * 2**20, "now": 80 * 2**20}
        assert "hit ratio" in {one["name"] for one in others}
        assert new["findings"][0]["title"] == "Changes"
        same = advise("--capacity", "20MiB", *more, "--compare", path)
        assert same["changes"]["changes"] == []
    asked = ("advise", trace, *SIZE, "--quiet", "--capacity", "20MiB", "--compare")
    message = "--compare file must have advice on one engine, got advice on several engines"
    assert kvoffload(*asked, path).error == message
    path.write_text("{")
    assert "must be the output of kvoffload advise --json" in kvoffload(*asked, path).error
    assert "absent" in kvoffload(*asked, tmp_path / "absent").error


def test_a_disk_that_adds_hits_is_in_the_configuration(advise, kvoffload, trace):
    asked = ("--capacity", "8", "--policy", "lru", *RATES)
    configured = [
        advise(*asked, *disk)["configuration"]["vllm"]["kv_connector_extra_config"]
        for disk in (("--disk", "60"), ())
    ]
    assert [one["spec_name"] for one in configured] == ["KVOffloadTieringSpec", "KVOffloadSpec"]
    (tier,) = configured[0]["secondary_tiers"]
    assert (tier["type"], tier["path"]) == ("KVOffloadFileTier", "/nvme/kv")
    assert (tier["capacity_bytes"], tier["policy"]) == (60 * 2**20, "hit-density")
