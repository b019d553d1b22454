"""Tokens per block: those of the trace, or of `--block-tokens` where it does not state them."""

import json

import pytest

from kvoffload.traces import Request, Workload, write_trace

from .conftest import read

pytestmark = pytest.mark.fast

ADVISE = ["--capacity", "1MiB", "--kv-bytes-per-token", "100", "--jobs", "1"]
COMMANDS = {
    "replay": ["--capacity", "9", "--policy", "lru"],
    "replay --full-blocks": ["--capacity", "9", "--policy", "lru"],
    "sweep": ["--capacity", "9", "--policy", "lru", "--jobs", "1"],
    "sweep --full-blocks": ["--capacity", "9", "--policy", "lru", "--jobs", "1"],
    "advise": ADVISE,
    "info": [],
    "workload": [],
}
LMCACHE = '{"timestamp":0,"chunk_size":256,"seq_len":600,"chunk_hashes":["0xa1","0xb2"]}'
BAILIAN = '{"timestamp":0,"chat_id":1,"input_length":20,"output_length":1,"hash_ids":[1,2]}'


@pytest.fixture
def run(kvoffload, tmp_path):
    """Run a command on requests, or on the lines of a file."""

    def run(command, trace, *arguments):
        path = tmp_path / "trace"
        if isinstance(trace, str):
            path.write_text(trace)
        else:
            write_trace(trace, path)
        name, *options = command.split()
        return kvoffload(name, path, *options, *COMMANDS[command], *arguments)

    return run


def test_its_origin_is_reported(run):
    for trace, origin in ((Workload(30), "lengths"), (LMCACHE, "trace"), (BAILIAN, "trace")):
        for command in ("replay", "advise", "sweep"):
            whole = run(command, trace, "--json").value
            assert whole["block_tokens_from"] == origin
    unsized = [Request(0, 1000, 1, (1, 2)), Request(1, 1000, 1, (1,))]
    for command in ("replay", "sweep"):
        whole = run(command, unsized, "--json").value
        assert (whole["block_tokens"], whole["block_tokens_from"]) == (None, None)


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=["hex", "mooncake"])
def test_where_the_trace_has_no_lengths_it_is_believed(run, lengths):
    """What is printed of it is in ``golden.txt``."""
    converted = [Request(0, length, 0, (1, 2)[: 2 - n]) for n, length in enumerate(lengths)]
    trace = converted or "00c0ffee 0badcafe\n00c0ffee\n"
    for command in ("replay", "advise", "sweep"):
        whole = run(command, trace, "--block-tokens", 16, "--json").value
        assert (whole["block_tokens"], whole["block_tokens_from"]) == (16, "option")
    (row,) = whole["results"]  # prompts are as long as their blocks
    assert (row["tokens"], row["token_hit_ratio"]) == (48, row["hit_ratio"])


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
