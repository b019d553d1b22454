"""``kvoffload sweep``."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys

import pytest

from kvoffload._printable import printable
from kvoffload.cli._fields import FIELDS, IN_MANAGER
from kvoffload.traces import Workload
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough
WORKLOAD = Workload(150, seed=1)

FAST = ("--jobs", "1", "--quiet")


def swept(kvoffload, trace, *arguments):
    done = kvoffload("sweep", trace, *FAST, *arguments)
    assert done.code == 0, done.err
    return done.out


def test_csv_and_json_say_the_same(kvoffload, trace):
    arguments = ("--policy", "lru,slru?protected=0.5,belady", "--capacity", "5%,1kB")
    sizes = ("--block-bytes", "16")
    rows = list(
        csv.DictReader(swept(kvoffload, trace, *arguments, *sizes, "--csv", "-").splitlines())
    )
    value = json.loads(swept(kvoffload, trace, *arguments, *sizes, "--json"))
    assert len(rows) == len(value["results"]) == 6
    for row, result in zip(rows, value["results"], strict=True):
        del result["per_engine"]  # a list, which a line of CSV has no place for
        assert row == {k: "" if v is None else str(v) for k, v in result.items()}
    assert value["results"][1]["capacity"] == 1000 // 16
    assert value["results"][1]["capacity_bytes"] == 1000 // 16 * 16
    assert value["results"][-1]["evicted"] is None


AGREEING = [
    "--policy lru,arc,belady,infinite --capacity 3% --device-memory 60",
    "--policy lru,infinite --capacity 5%,20% --full-blocks --step-tokens 2048",
    "--policy lru,hit-density --capacity .5%,5% --hints both --hints-noise 2.7 --hints-share .5",
    "--policy belady,lru,hit-density --capacity 2% --hints expect --hints-liars .4 --hints-seed 7",
    "--policy lru,infinite --capacity 5%,20% --closed-loop 9,000 --decode-ms 5",
    "--policy lru,infinite --capacity 5%,20% --closed-loop recorded",
    "--model gpt-oss-20b --retention 512 --policy lru --capacity 64MiB,1GiB --device-memory 2GiB",
]


@pytest.mark.parametrize("options", AGREEING)
def test_it_agrees_with_replay_in_any_number_of_processes(kvoffload, trace, tmp_path, options):
    replayed = kvoffload("replay", trace, *options.split(), "--quiet", "--json").value
    results = [] if "--closed-loop" in options else ["--results", tmp_path / "results"]
    of_manager = {field.name for field in IN_MANAGER}  # a sweep does not measure these
    for jobs in (1, 2):  # the second time from the file
        arguments = (*options.split(), *results, "--jobs", jobs, "--quiet", "--json")
        found = kvoffload("sweep", trace, *arguments).value
        for name in found.keys() - {"results", "no_token_hit_ratio"}:
            assert found[name] == replayed[name], name
        rows = {(row["policy"], row["capacity"]): row for row in replayed["results"]}
        assert len(rows) == len(found["results"])
        for row in found["results"]:
            one = rows[row["policy"], row["capacity"]]
            for name in row:
                assert row[name] == (None if name in of_manager else one[name]), name
            assert (row["token_hit_ratio"] is None) == (row["policy"] == "belady")


def test_known_results_are_not_computed_again(kvoffload, trace, tmp_path):
    path = tmp_path / "results.jsonl"
    arguments = ("--capacity", "5%", "--results", path, "--json")
    swept(kvoffload, trace, "--policy", "lru", *arguments)
    # A known result is taken as it stands: this one shows that it was.
    row = json.loads(path.read_text())
    row["counts"]["host_tokens"] = 123 * 512
    del row["digest"]
    lines = []
    for one in (row | {"cell": [5]}, row):  # the first has no cell, and is ignored
        digest = hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest()[:16]
        lines.append(json.dumps(one | {"digest": digest}) + "\n")
    path.write_text("".join(lines))
    done = kvoffload("sweep", trace, "--jobs", "1", "--policy", "lru,arc", *arguments)
    assert "1 of 2 results were known" in done.err
    assert [found["hits"] == 123 for found in done.value["results"]] == [True, False]
    assert len(path.read_text().splitlines()) == 3


VARIANTS = (
    "hit-density",
    "slru?protected=0.5",
    "slru?protected=0.8",
    "belady",
    "infinite",
)


@pytest.mark.parametrize(
    ("name", "capacity", "more"),
    [
        ("picture", "1%, 40%", ("--block-bytes", "160MiB")),
        ("picture", "1GB,4GB,16GB", ("--block-bytes", "160MiB")),
        ("a name that is too long for a line " * 5, "250, 300, 390", ("--pending", "2")),
        ("picture", "64", ()),
    ],
    ids=["bytes", "sizes", "long", "one"],
)
def test_nothing_of_a_picture_is_cut(kvoffload, trace, tmp_path, name, capacity, more):
    """There is a white margin all around, and every text is complete."""
    pytest.importorskip("matplotlib", reason="the picture needs the plot extra")
    from matplotlib import image

    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(trace.read_bytes())
    for form in ("png", "svg"):
        plot = ("--plot", tmp_path / f"a.{form}", "--capacity", capacity, *more)
        table = swept(kvoffload, path, "--policy", ",".join(VARIANTS), *plot)
    pixels = image.imread(tmp_path / "a.png")[:, :, :3]
    for edge in (pixels[:10], pixels[-10:], pixels[:, :10], pixels[:, -10:]):
        assert edge.min() == 1
    written = (tmp_path / "a.svg").read_text(encoding="utf-8")
    words = re.findall("<!-- (.*?) -->", written)
    assert {*VARIANTS, "hit ratio", "capacity, blocks"} <= set(words)
    assert not [word for word in words if word.endswith((".0 %", ".0"))]
    assert sum(bool(re.fullmatch("[0-9,]+", word)) for word in words) >= 2  # capacities
    assert "<dc:date>" not in written  # the same sweep makes the same picture
    units = {word.rpartition(" ")[2] for word in words if re.fullmatch(r"[0-9.]+ [KMGT]i?B", word)}
    assert units <= {*re.findall("[MG]iB", table)}, "of powers of two, as in the table"
    assert bool(units) == bool(more and more[0] == "--block-bytes")


HOSTILE_NAMES = [
    "$\\frac{$",
    "un\udcffdecodable",
    "漢字😀",
    "esc\x1b[31m\x9b31m\nline",
    "\u202egnp",
]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *((name, ".svg") for name in HOSTILE_NAMES),
        (HOSTILE_NAMES[0], ".png"),
        (HOSTILE_NAMES[1], ".PDF"),
    ],
)
def test_a_name_that_is_no_text_or_no_formula_makes_a_picture(
    kvoffload, trace, tmp_path, name, suffix
):
    pytest.importorskip("matplotlib", reason="the picture needs the plot extra")
    path, picture = tmp_path / f"{name}.jsonl", tmp_path / f"picture{suffix}"
    path.write_bytes(trace.read_bytes())
    arguments = ("--policy", "lru", "--capacity", "5", "--jobs", "1", "--plot", picture)
    done = kvoffload("sweep", path, *arguments)
    assert (done.code, done.err) == (0, "")
    assert picture.stat().st_size > 1000
    if suffix == ".svg":
        shown = printable(name).replace("<", "&lt;")
        assert f"<!-- {shown}.jsonl" in picture.read_text(encoding="utf-8")


def test_a_results_file_of_any_size_is_read_in_bounded_memory(trace, tmp_path):
    """Half a gigabyte that is one line."""
    if sys.platform != "linux":
        pytest.skip("reads /proc/self/status")
    path = tmp_path / "results.jsonl"
    path.write_text('{"trace": "", "version": "", "cell": {}, "counts": {}}\n')
    with path.open("r+b") as file:
        file.truncate(2**29)
    arguments = ("--policy", "lru", "--capacity", "5", "--results", path, "--csv", "-")
    code = (
        "import re, sys; from kvoffload.cli import main\n"
        "code = main(sys.argv[1:])\n"
        # not ru_maxrss, which a process has from the one that started it
        "status = open('/proc/self/status').read()\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) // 1024, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = run_python("-c", code, "sweep", trace, *FAST, *arguments)
    (row,) = csv.DictReader(done.stdout.splitlines())
    assert (row["policy"], row["capacity"]) == ("lru", "5")
    assert int(done.stderr) < 250, "MiB"


def test_csv_is_written_to_a_file_beside_the_tables_or_printed(kvoffload, trace, tmp_path):
    out = tmp_path / "grid"
    options = ["--policy", "lru,belady", "--capacity", "5,20", "--jobs=1", "--quiet"]
    printed = kvoffload("sweep", trace, "--csv", "-", *options)
    head = printed.out.splitlines()[0].split(",")
    assert head == [name for name in FIELDS if name != "per_engine"]
    table = kvoffload("sweep", trace, *options).out
    for arguments in ([trace, "--csv", out], ["--csv", out, trace], [f"--csv={out}", trace]):
        done = kvoffload("sweep", *arguments, *options)
        assert (done.code, done.out, done.err) == (0, table, "")
        assert out.read_text() == printed.out
        out.unlink()
    done = kvoffload("sweep", trace, "--csv", out, "--json", *options)
    assert (done.value["trace"], out.read_text()) == (str(trace), printed.out)
