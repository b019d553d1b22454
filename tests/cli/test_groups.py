"""Capacities of a model with several KV groups."""

import json

import pytest

from kvoffload.traces import Request, write_trace

from .conftest import read

pytestmark = pytest.mark.thorough


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
