"""`replay`, `sweep` and `advise` of a model with several KV groups."""

import csv
import json

import pytest

from kvoffload.traces import Request, Workload, write_trace

from .conftest import read

pytestmark = pytest.mark.thorough

SLOT = 393_216  # of gpt-oss-20b and blocks of 16 tokens
MODEL = ("--model", "gpt-oss-20b")
ONE = ("--jobs", "1", "--quiet")
ADVISE = ("--capacity", "512MiB", "--device-memory", "0", "--policy", "lru", "--jobs", "1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Prompts of 2,000 tokens that share the first 1,536, and ask for it again at once."""
    path = tmp_path_factory.mktemp("groups") / "trace.jsonl"
    system = tuple(range(96))
    requests = []
    for n in range(240):
        own = tuple(range(1000 + 29 * (n // 2), 1029 + 29 * (n // 2)))
        requests.append(Request(1000 * n, 2001, 1, (*system, *own, 50_000 + n)))
    write_trace(requests, path)
    return path


def test_replay_counts_tokens_and_slots(kvoffload, trace):
    asked = ("replay", trace, *MODEL, "--capacity", "1GiB", "--policy", "lru")
    whole = read(kvoffload, *asked)
    assert whole["slot_bytes"] == SLOT
    assert whole["retention"] == 0
    kinds = [(group["kind"], group["window"], group["chunk_tokens"]) for group in whole["groups"]]
    assert sorted(kinds) == [("full", 0, 16), ("window", 128, 16)]
    (result,) = whole["results"]
    assert result["capacity"] == 2**30 // SLOT
    # of two prompts that are equal up to 2,000 tokens the second resumes there
    assert result["hits"] == 120 * 2000
    assert result["asked"] == 240 * 2001
    assert result["stored"] == 96 + 120 * (29 + 8)
    assert result["bytes_host_in"] == SLOT * result["stored"]
    assert result["bytes_host_out"] == SLOT * result["loaded"]
    for retention in (768, "none"):
        found = read(kvoffload, *asked, "--retention", retention)
        assert found["retention"] == retention
        assert found["results"][0]["hits"] == 120 * 2000 + 119 * 1536


def test_a_share_of_the_blocks_is_one_of_the_chunks(kvoffload, tmp_path):
    """Blocks of 16 tokens, of which a chunk of two has half as many."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "trace.jsonl"
    write_trace([Request(n, 80, 1, tuple(range(10 * n, 10 * n + 10))) for n in range(10)], path)
    arguments = ("--model", tmp_path / "config.json", "--capacity", "50%", "--policy", "lru")
    whole = read(kvoffload, "replay", path, *arguments)
    assert whole["block_tokens"] == 8
    assert whole["groups"][0]["chunk_tokens"] == 16
    assert whole["results"][0]["capacity"] == 100 // 2 // 2


def test_a_model_of_one_full_group_is_as_its_bytes(kvoffload, trace):
    sizes = ("--capacity", "64MiB,20%", "--policy", "lru,belady")
    named = kvoffload("sweep", trace, *ONE, *sizes, "--model", "llama-3.1-8b", "--json")
    given = kvoffload("sweep", trace, *ONE, *sizes, "--block-bytes", str(16 * 131_072), "--json")
    assert named.out == given.out
    whole = named.value
    assert "groups" not in whole
    assert all(row["loaded"] == row["hits"] for row in whole["results"])
    named = kvoffload("replay", trace, "--quiet", *sizes, "--model", "llama-3.1-8b")
    assert "llama-3.1-8b, bfloat16: 2 MiB per block" in named.out


def test_sweep_agrees_with_replay_in_any_number_of_processes(kvoffload, trace):
    arguments = (*MODEL, "--capacity", "64MiB,1GiB", "--policy", "lru,arc,infinite")
    arguments += ("--device-memory", "100MiB", "--retention", "768")
    one = read(kvoffload, "sweep", trace, *arguments, "--jobs", "1")
    assert read(kvoffload, "sweep", trace, *arguments, "--jobs", "2") == one
    replayed = read(kvoffload, "replay", trace, *arguments)
    assert one["groups"] == replayed["groups"]
    names = ("policy", "capacity", "asked", "hits", "stored", "hit_ratio", "token_hit_ratio")
    swept = sorted(tuple(row[name] for name in names) for row in one["results"])
    assert swept == sorted(tuple(row[name] for name in names) for row in replayed["results"])
    done = kvoffload("sweep", trace, *ONE, *arguments, "--csv", "-")
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [int(row["loaded"]) for row in rows] == [row["loaded"] for row in one["results"]]


def test_a_sweep_does_not_repeat_ratios_or_make_up_loads(kvoffload, trace):
    """Where no accelerator is in front the two ratios are one; `belady` knows one group's loads."""
    arguments = (*MODEL, "--capacity", "1GiB")
    both = (*arguments, "--policy", "lru,belady")
    lru, belady = read(kvoffload, "sweep", trace, *both, "--jobs", "1")["results"]
    assert lru["hit_ratio"] == lru["token_hit_ratio"]
    assert lru["loaded"] > 0
    assert belady["hits"] > 0
    assert belady["loaded"] is None


def test_a_picture_has_slots(kvoffload, trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.svg"
    sizes = ("--capacity", "64MiB,1GiB", "--policy", "lru")
    done = kvoffload("sweep", trace, *ONE, *sizes, *MODEL, "--plot", picture)
    assert done.code == 0, done.err
    assert "<!-- capacity, slots -->" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "workers"), [("qwen3.5-122b-a10b", 4), ("qwen3-235b-a22b", 8), ("gpt-oss-20b", 1)]
)
def test_advise_counts_for_the_workers_that_it_names(kvoffload, trace, model, workers):
    arguments = ("advise", trace, "--model", model, *ADVISE, "--limit", "20")
    assumed = read(kvoffload, *arguments)
    given = read(kvoffload, *arguments, "--tensor-parallel", workers)
    assert assumed["engine"]["workers"] == workers
    assert assumed == given
    one = read(kvoffload, *arguments, "--tensor-parallel", "1")
    assert (assumed["block_bytes"] == one["block_bytes"]) == (workers == 1)


def test_advise_tells_which_interval_gains(kvoffload, trace):
    whole = kvoffload("advise", trace, *MODEL, *ADVISE, "--json").value
    assert whole["slot_bytes"] == whole["block_bytes"] == SLOT
    assert (whole["retention"], whole["token_bytes"]) == (0, None)
    assert [cell["interval"] for cell in whole["retentions"]] == [0, 512, "none"]
    argument = "--prefix-cache-retention-interval 512"
    assert whole["configuration"]["vllm_argument"] == argument


def test_the_interval_given_is_advised_on(kvoffload, trace, tmp_path):
    report = tmp_path / "advice.html"
    arguments = (*MODEL, *ADVISE, "--retention", "512", "--report", report)
    whole = kvoffload("advise", trace, *arguments, "--json").value
    assert whole["retention"] == 512
    assert whole["configuration"]["vllm_argument"] == "--prefix-cache-retention-interval 512"
    page = report.read_text(encoding="utf-8")
    assert "--retention 512" in page
    assert '<pre id="vllm-argument">--prefix-cache-retention-interval 512</pre>' in page
    assert "is a token of a prompt" in page


def test_with_one_full_group_advise_says_nothing_of_groups(kvoffload, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(Workload(220, seed=3), path)
    arguments = ("advise", path, "--model", "deepseek-v3", "--capacity", "8GiB", "--jobs", "1")
    whole = kvoffload(*arguments, "--json").value
    assert not {"groups", "slot_bytes", "retention", "retentions"} & set(whole)
    assert "vllm_argument" not in (whole["configuration"] or {})
    assert not any("loaded" in row["policies"]["lru"] for row in whole["memories"])
    assert "slot" not in kvoffload(*arguments).out
