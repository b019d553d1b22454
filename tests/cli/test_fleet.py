"""``kvoffload fleet``."""

from __future__ import annotations

import csv

import pytest

from kvoffload.cli._fleet_result import pooled_of
from kvoffload.replay import Configuration

from .conftest import growing

pytestmark = pytest.mark.thorough
WORKLOAD = growing(8, 10, think=500, service=100)

SIZE = ("--block-bytes", "1MiB")
TIMED = (*SIZE, "--prefill-tokens-per-second", "1000")


@pytest.fixture
def fleet(kvoffload, trace):
    def run(*arguments):
        return kvoffload("fleet", trace, "--quiet", "--jobs", "1", *arguments)

    return run


def test_json_and_csv_say_the_same_whatever_the_jobs(fleet, tmp_path, kvoffload, trace):
    arguments = (
        *("--engines", "2,3", "--router", "sticky,events?lag_ms=5", "--policy", "lru"),
        *("--shared", "none,100", "--disk", "64MiB", "--capacity", "8", *TIMED, "--json"),
    )
    path = tmp_path / "fleets.csv"
    done = fleet(*arguments, "--csv", path)
    value = done.value
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(value["results"]) == 12
    for row, one in zip(rows, value["results"], strict=True):
        assert row["placement"] == one["placement"]
        assert float(row["ttft_p95"]) == one["ttft_p95"]
        assert int(row["bytes_host_in"]) == one["stored"] * 2**20
        assert sum(part["missed_tokens"] for part in one["per_engine"]) == one["missed_tokens"]
    assert [one["tier"] for one in value["results"][:6:2]] == [None, "shared", "private"]
    several = kvoffload("fleet", trace, "--quiet", "--jobs", "2", *arguments)
    assert several.out == done.out
    for total in value["totals"]:
        assert total["pooled"]["lru"] <= total["belady"] <= total["infinite"]
    assert pooled_of(Configuration(engines=2, host=2**31 - 1))[0].host == 2**31 - 1


def test_the_address_of_a_tier_gives_its_size_and_policy(fleet):
    address = "redis://a:PIN@host?capacity=10MiB"
    addresses = ("--shared", f"{address}&policy=arc&name=a,{address}")
    done = fleet("--engines", "2", *addresses, "--capacity", "8", *SIZE, "--json")
    names = ("tier_blocks", "tier_policy", "tier_given")
    found = {tuple(one[name] for name in names) for one in done.value["results"]}
    shown = "shared redis://host?capacity=10MiB"
    assert found == {(10, "arc", f"{shown}&policy=arc"), (10, "lru", shown)}


def test_the_picture_is_drawn(fleet, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the plot extra")
    path = tmp_path / "fleets.svg"
    assert fleet("--engines", "2,4", "--capacity", "5%,20%", "--plot", path).code == 0
    text = path.read_text()
    assert "<svg" in text
    for line in ("round-robin lru", "events hit-density"):
        assert f"<!-- {line} -->" in text
