"""The commands' options: the same name for the same thing, and those of 0.1 still work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION
from kvoffload.traces import Workload

from .conftest import BARE

pytestmark = pytest.mark.thorough

WORKLOAD = Workload(250, seed=1)
QUIET = ("--jobs", "1", "--quiet")


OWN = '''
from kvoffload import BlockNotFoundError, CachePolicy


class Fifo(CachePolicy):
    """A policy that evicts in the order of storing."""

    def __init__(self, cache_capacity, stride=1):
        super().__init__(cache_capacity)
        self.blocks = {}
        self.stride = stride

    def get(self, block_hash):
        return self.blocks.get(block_hash)

    def insert(self, block_hash, status):
        self.blocks[block_hash] = status

    def remove(self, block_hash):
        if self.blocks.pop(block_hash, None) is None:
            raise BlockNotFoundError("not resident")

    def touch(self, hashes):
        pass

    def evict(self, n, protected):
        idle = [h for h, s in self.blocks.items() if s.ref_cnt == 0 and h not in protected]
        if len(idle) < n:
            return None
        return [(h, self.blocks.pop(h)) for h in idle[:n]]


class NoPolicy:
    pass


class Bare(Fifo):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)


class Needy(Fifo):
    def __init__(self, *, depth, cache_capacity):
        super().__init__(cache_capacity)


class Greedy(Fifo):
    def evict(self, n, protected):
        return super().evict(n + 1, protected)


class Broken(Fifo):
    def insert(self, block_hash, status):
        raise BrokenPipeError("of the policy")


class Unmade(Fifo):
    def __init__(self, cache_capacity):
        raise OSError("of the policy")


class Sizeless(Fifo):
    def __init__(self):
        super().__init__(9)
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_class_of_ones_own_is_a_policy_in_every_command(kvoffload, trace, own, tmp_path):
    policy = ("--policy", "lru,mine:Fifo,mine:Fifo?stride=2")
    size = ("--capacity", "99", "--json", "--quiet")
    rows = kvoffload("replay", trace, *policy, *size, **own).value["results"]
    assert [row["policy"] for row in rows] == ["lru", "mine:Fifo", "mine:Fifo?stride=2"]
    assert rows[0]["hits"] != rows[1]["hits"] == rows[2]["hits"]
    results = ("--results", tmp_path / "results.jsonl", "--jobs", "2")
    swept = kvoffload("sweep", trace, *policy, *size, *results, **own).value["results"]
    assert [row["hits"] for row in swept] == [row["hits"] for row in rows]
    for answers in (rows, swept):
        ran_by = [row["implementation"] for row in answers]
        assert ran_by == [IMPLEMENTATION, "python", "python"]
    table = kvoffload("replay", trace, *policy, "--capacity", "99", **own).out
    if IMPLEMENTATION != "python":  # one for all is in the line above the table
        assert [line.split()[-1] for line in table.splitlines()[-3:]] == ran_by
    kept = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["cell"]["policy"] for line in kept] == ["lru"]
    tokens = ("--kv-bytes-per-token", "2KiB", "--disk", "1GiB", "--disk-policy", "mine:Fifo")
    advice = kvoffload("advise", trace, *policy, *size, *tokens, **own).value
    assert "mine:Fifo" in advice["memories"][0]["policies"]
    alone = ("--policy", "mine:Fifo?stride=2", "--capacity", "99", "--json", "--quiet")
    configured = kvoffload("advise", trace, *alone, *tokens, **own).value["configuration"]
    assert configured["vllm"] is None
    assert "from mine import Fifo\n" in configured["python"]
    assert "cache_policy=Fifo(cache_capacity=99, stride=2)" in configured["python"]
    assert {cell["policy"] for cell in advice["details"]["disk_cells"]} == {"mine:Fifo"}


def test_a_policy_of_ones_own_needs_no_path_where_one_works(trace, own, tmp_path):
    command = [Path(sys.executable).with_name("kvoffload"), "sweep", trace, "--policy", "mine:Fifo"]
    if not command[0].exists():
        pytest.skip("kvoffload is not installed in this environment")
    command += ["--capacity", "9,10", "--jobs", "2", "--quiet"]
    done = subprocess.run(
        command, cwd=tmp_path, env=BARE, capture_output=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")


REPLAYS = (["replay"], ["sweep", "--jobs=2"], ["advise", "--jobs=2", "--kv-bytes-per-token=9"])


@pytest.mark.parametrize("command", REPLAYS)
@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ("Broken", 1, r"(?s).*mine\.py.*Error: of the policy\n"),
        ("Unmade", 1, r"(?s).*mine\.py.*Error: of the policy\n"),
        ("Greedy", 2, r"kvoffload: Greedy must evict exactly \d+ blocks, got \d+\n"),
    ],
)
def test_an_error_of_a_class_of_ones_own_is_not_the_command_s(
    kvoffload, trace, own, command, policy, code, said
):
    options = ("--policy", f"lru,mine:{policy}", "--capacity", "9,10", "--quiet")
    done = kvoffload(command[0], trace, *command[1:], *options, **own)
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(said, done.err)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_list_of_policies_fits_the_width(kvoffload, columns):
    lines = kvoffload("policies", COLUMNS=str(columns)).out.splitlines()
    assert max(map(len, lines)) <= columns


def test_models_lists_what_there_is(kvoffload):
    from kvoffload.advise import model_shape
    from kvoffload.advise.models import model_names

    text = kvoffload("models").out
    listed = kvoffload("models", "--json").value["models"]
    assert [one["name"] for one in listed] == list(model_names())
    for one in listed:
        layout = model_shape(one["name"]).layout()
        assert sum(group["count"] for group in one["groups"]) == len(layout.groups)
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [one["name"]]]
        assert line.split()[1] == f"{layout.block_bytes:,}"
    names = [name for name in model_names() if name in kvoffload("advise", "--help").out]
    assert names == ["glm-4.5"]  # of an example


def test_several_files_and_one_model_of_a_log(kvoffload, tmp_path):
    shape = {"shapes": [[2, 8, 4, 16]], "dtypes": ["bfloat16"]}
    for index in range(3):
        rows = [
            {"timestamp": 60 * index + n, "chunk_size": 4, "seq_len": 4 * 3,
             "model_name": "ab"[n % 2], "chunk_hashes": [f"0x{n % 7}{b}" for b in range(3)]} | shape
            for n in range(60)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"log{index}.jsonl").write_text(text)
    whole = kvoffload("info", tmp_path, "--json").value
    assert (whole["requests"], whole["seconds"]) == (180, 179)
    again = kvoffload("info", *sorted(tmp_path.glob("*.jsonl")), "--json").value
    assert again | {"trace": None} == whole | {"trace": None}
    one = kvoffload("info", tmp_path / "*.jsonl", "--model-name", "a", "--json").value
    assert one["requests"] == 90
    swept = kvoffload("sweep", tmp_path, "--policy=lru", "--capacity=20KiB", *QUIET, "--json").value
    assert swept["results"][0]["capacity"] == 10  # chunks of 2 KiB, as the log says
    advice = kvoffload("advise", tmp_path, "--capacity", "20KiB", *QUIET, "--json").value
    assert advice["token_bytes"] == 512
    converted = kvoffload("convert", tmp_path, "--model-name", "b", "--quiet")
    assert len(converted.out.splitlines()) == 90


def test_a_workload_of_prompts(kvoffload, trace, tmp_path):
    path = tmp_path / "prompts.jsonl"
    done = kvoffload("workload", trace, "--limit", "20", "--output", path, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    requests = list(WORKLOAD)[:20]
    assert [len(row["prompt"].split()) for row in rows] == [r.input_length for r in requests]
    full = kvoffload("workload", trace, "--limit", "20", "--full-blocks", "--quiet").out
    lengths = [len(json.loads(line)["prompt"].split()) for line in full.splitlines()]
    assert lengths == [r.input_length // 512 * 512 for r in requests]


def test_both_answers_and_times_where_a_model_is_named(kvoffload, trace):
    arguments = ("--model", "qwen/QWEN3-8B-fp8", "--capacity", "10%", *QUIET)
    value = kvoffload("advise", trace, *arguments, "--json").value
    assert value["model"] == "qwen3-8b"
    assert value["engine"]["accelerator"] == "h100"
    assert value["device_memory"] == int(80e9 * 0.92 - 2 * 8.19e9)
    assert value["without_device_memory"]["memories"][0]["capacity"]
    cell = value["memories"][1]["policies"]["lru"]
    assert cell["prefill_seconds"] - cell["load_seconds"] - cell["store_seconds"] == (
        pytest.approx(cell["net_seconds"])
    )
    given = ("--device-memory", "0", "--prefill-tokens-per-second", "1e3", "--link-bandwidth=1GB")
    value = kvoffload("advise", trace, *arguments, *given, "--json").value
    assert (value["device_memory"], value["without_device_memory"]) == (0, None)
    assert value["engine"]["prefill_tokens_per_second"] == 1000
