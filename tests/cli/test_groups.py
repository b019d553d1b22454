"""`replay`, `sweep` and `advise` of a model with several KV groups."""

import json

import pytest

from kvoffload.traces import Request, write_trace

from .conftest import read

pytestmark = pytest.mark.thorough

SLOT = 393_216  # of gpt-oss-20b and blocks of 16 tokens
MODEL = ("--model", "gpt-oss-20b")
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
