"""`kvoffload advise`: its output, and its errors of one line."""

import html
import json
import re
import shlex

import pytest

from kvoffload._printable import printable
from kvoffload.policies import registry
from kvoffload.traces import Request, Workload, write_trace
from kvoffload.traces.writer import trace_line

from .conftest import run_shell

pytestmark = pytest.mark.thorough

WORKLOAD = Workload(300, seed=3)
SIZE = ["--kv-bytes-per-token", "2048", "--capacity", "200MiB", "--jobs", "1"]


def test_the_python_that_is_printed_makes_the_manager(kvoffload, trace):
    python = kvoffload("advise", trace, *SIZE).out.partition("\nPython:\n\n")[2]
    made = {}
    exec(compile("\n".join(line[4:] for line in python.splitlines()), "pasted", "exec"), made)
    assert made["manager"].block_size == 512


def test_json_says_whether_it_pays(kvoffload, trace):
    def found(*options):
        return json.loads(kvoffload("advise", trace, *SIZE, *options, "--json").out)

    unknown = found()
    assert unknown["pays"] == "unknown"
    assert unknown["recommendation"] in registry.names()
    rates = ("--link-bandwidth", "1MiB", "--prefill-tokens-per-second")
    pays = found(*rates, "100")
    assert pays["pays"] is True
    assert pays["recommendation"] in registry.names()
    assert pays["configuration"] is not None
    loses = found(*rates, "1e6")
    assert loses["pays"] is False
    assert (loses["recommendation"], loses["configuration"]) == (None, None)
    assert loses["objections"] == ["no policy saves more prefill than moving the blocks takes"]


def test_blocks_filled_in_part_are_left_out_where_the_lengths_say_which(kvoffload, trace, tmp_path):
    whole = json.loads(kvoffload("advise", trace, *SIZE, "--json").out)
    full = sum(min(len(r.hash_ids), r.input_length // 512) for r in WORKLOAD)
    assert (whole["full_blocks"], whole["blocks"]) == (True, full)
    # one request that fits no size: which blocks are full is not known any more
    odd = [*WORKLOAD, Request(10**6, 1, 1, (1, 2, 3))]
    path = tmp_path / "odd.jsonl"
    write_trace(odd, path)
    whole = kvoffload("advise", path, *SIZE, "--block-tokens", "512", "--json").value
    blocks = sum(len(request.hash_ids) for request in odd)
    assert (whole["full_blocks"], whole["blocks"]) == (False, blocks)


def test_a_share_is_one_of_the_blocks_that_are_counted(kvoffload, trace):
    tokens = ("--kv-bytes-per-token", "2048", "--jobs", "1", "--policy", "lru", "--json")
    sizes = ("--capacity", "10%", "--device-memory", "5%")
    advice = json.loads(kvoffload("advise", trace, *tokens, *sizes).out)
    whole = json.loads(kvoffload("info", trace, "--json").out)
    assert advice["unique_blocks"] < whole["unique_blocks"] * 9 // 10  # the others are not full
    assert advice["memory"] == advice["unique_blocks"] * 10 // 100 * advice["block_bytes"]
    assert advice["device_memory"] == advice["unique_blocks"] * 5 // 100 * advice["block_bytes"]


@pytest.mark.parametrize("name", ["it's a trace.jsonl", "-a\n\x1b[31m\udcff.jsonl"])
def test_the_command_on_the_page_is_what_was_typed(tmp_path, name):
    pytest.importorskip("jinja2", reason="the report needs the report extra")
    lines = [trace_line(request) for request in Workload(400, seed=5)]
    (tmp_path / name).write_bytes(b"".join([*lines[:100], b"bad\n", *lines[100:]]))
    options = ["--capacity=200MiB", "--kv-bytes-per-token=2kB", "--skip-bad", "--limit=250"]
    options += ["--device-memory=1000000", "--format=mooncake", "--jobs=1", "--quiet"]
    arguments = [*options, "--report=page.html", "--", name]
    first = run_shell(f'cd "$folder"; kvoffload advise {shlex.join(arguments)}', folder=tmp_path)
    assert (first.code, first.err) == (0, "")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    command = html.unescape(re.search(r"Made by .*?<code>(.*?)</code>", page)[1])
    assert command == printable(f"kvoffload advise {shlex.join(arguments)}")
    if name.isprintable():
        (tmp_path / "page.html").unlink()
        again = run_shell(f'cd "$folder"; {command}', folder=tmp_path)
        assert (again.code, again.out) == (0, first.out)
        assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_a_number_that_json_does_not_know_is_null(capsys):
    from kvoffload.cli._terminal import print_json

    infinite = float("inf")
    print_json({"a": [infinite, (-infinite, 1.5)], "b": {"c": float("nan")}, "d": 10**400})
    whole = {"a": [None, [None, 1.5]], "b": {"c": None}, "d": 10**400}
    assert json.loads(capsys.readouterr().out) == whole


@pytest.mark.parametrize(("columns", "most"), [("200", 100), ("100", 100), ("80", 80), ("60", 60)])
def test_the_prose_fits_the_width(kvoffload, trace, columns, most):
    done = kvoffload("advise", trace, *SIZE, COLUMNS=columns)
    prose = done.out.partition("\nReason: ")[2].partition("\nPython:")[0].splitlines()
    assert most - 15 < max(map(len, prose)) <= most


def test_a_model_that_no_number_of_accelerators_holds_is_named(kvoffload, trace):
    done = kvoffload("advise", trace, "--model=kimi-k2", *SIZE[2:], COLUMNS="200")
    assert "16 × h100 do not hold kimi-k2, so one is assumed: give --tensor-parallel" in done.out


def test_the_size_of_an_assumed_cache_is_shown_where_it_decides(kvoffload, tmp_path):
    """37.5 GiB of prompts in turn: all of the accelerator's cache serves them, half of it none."""
    path = tmp_path / "turns"
    prompts = [tuple(range(20 * index, 20 * index + 20)) for index in range(30)]
    write_trace((Request(n, 20 * 512, 1, prompts[n % 30]) for n in range(400)), path)
    options = ["--capacity=24GiB", "--model=llama-3.1-8b", "--policy=lru,hit-density", "--quiet"]
    whole = kvoffload("advise", path, *options, "--json").value
    assert (whole["recommendation"], whole["pays"]) == (None, False)
    names = ("device_memory_assumed", "device_hit_ratio", "unbounded_hit_ratio")
    assert [whole[name] for name in names] == [True, 0.925, 0]
    rows = whole["by_device_memory"]
    assert [row["recommendation"] for row in rows] == [*["hit-density"] * 3, None]
    assert rows[1]["device_memory"] * 4 == pytest.approx(rows[3]["device_memory"], rel=1e-6)
    assert rows[3]["device_hit_ratio"] > 0.9 > rows[2]["device_hit_ratio"]
    given = kvoffload("advise", path, *options, "--device-memory=20GiB", "--json").value
    assert [given[name] for name in names] == [False, 0, 0.925]
    assert given["by_device_memory"] == []
