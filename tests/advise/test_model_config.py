"""Shapes from ``config.json``: counted correctly, or refused with the reason.

The configurations have the relevant fields of published ones.
"""

import json

import pytest

from kvoffload.advise import model_shape

pytestmark = pytest.mark.fast

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
DELTA = {
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def shape(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return model_shape(str(path))


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA, 131_072),
        (LLAMA | {"head_dim": 64}, 65_536),
        (LLAMA | {"num_key_value_heads": None}, 4 * 131_072),
        (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, 131_072),
        (LLAMA | {"sliding_window": 4096}, 131_072),  # windows as if they kept all
        (DEEPSEEK, 70_272),
        ({"model_type": "gemma3", "text_config": LLAMA}, 131_072),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 2),
        ({"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}, 2 * 32 * 64 * 2),
    ],
)
def test_it_counts_bytes_per_token(tmp_path, config, token_bytes):
    found = shape(tmp_path, config)
    assert found.bytes_per_token() == token_bytes
    assert model_shape(str(tmp_path)).bytes_per_token() == token_bytes


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mamba_d_state": 128}, "it does not say which of its layers are recurrent"),
        ({"layer_types": ["mamba", "rwkv"] * 16}, "it has layers of type rwkv"),
        ({"layer_types": ["mamba", "attention"] * 16}, "its recurrent layers are of a kind that"),
        (DELTA | {"full_attention_interval": 33}, "none of its layers"),
        ({"block_types": ["recurrent"]}, r"its recurrent layers .* \(block_types\)"),
        ({"block_configs": [{}]}, "its layers have attention of different sizes"),
        ({"global_head_dim": 512}, "its layers have attention of different sizes"),
        ({"cla_share_factor": 2}, "several layers share one cache"),
        ({"index_topk": 2048}, "its sparse attention keeps an index beside keys and values"),
        ({"compress_ratios": [4]}, "its attention is compressed"),
        ({"model_type": "deepseek_v4"}, "its attention is compressed"),
        ({"model_type": "qwen4_exp_text"}, "its states have several shapes"),
        ({"cross_attention_layers": [3]}, "its cross attention"),
        ({"is_encoder_decoder": True}, "it has is_encoder_decoder"),
        (DEEPSEEK | {"index_topk": 2048, "index_topk_freq": 4}, "several layers share one index"),
        (DEEPSEEK | {"index_topk_pattern": "FSSS"}, "several layers share one index"),
        (
            DEEPSEEK | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "its latent attention attends to a window",
        ),
    ],
)
def test_what_is_not_counted_is_refused_by_name(tmp_path, more, reason):
    options = "; .* give them with --kv-bytes-per-token or --block-bytes$"
    with pytest.raises(ValueError, match=f"model '.*' is not counted: {reason}.*{options}"):
        shape(tmp_path, LLAMA | more)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ("{", "config.json: must be JSON, got"),
        ("[" * 100_000, "config.json: must be JSON, got"),
        ("[]", "config.json: must be a JSON object"),
        ("x" * (2**20 + 1), "config.json: must be at most 1048576 bytes"),
        ({}, "must have the field num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers must be 1 ... 4096, got -1"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers must be 1 ... 4096, got '32'"),
        (LLAMA | {"hidden_size": 5}, "hidden_size must be >= the heads"),
        (LLAMA | {"layer_types": 5}, "layer_types must be a list of strings"),
        (LLAMA | {"layer_types": ["mlp"] * 31}, "layer_types must have 32 layers, got 31"),
        (LLAMA | {"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern must be text"),
        (LLAMA | {"hybrid_layer_pattern": [1]}, "hybrid_layer_pattern must be at least 32 numbers"),
        (LLAMA | {"full_attn_idxs": [-1]}, "full_attn_idxs must be a list of numbers 0 ... 4096"),
        (LLAMA | {"num_kv_shared_layers": 32}, "num_kv_shared_layers must be < 32 layers, got 32"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "must have the field sliding_window"),
        (LLAMA | {"conv_L_cache": 1, "full_attn_idxs": [1]}, "conv_L_cache must be > 1, got 1"),
        (
            LLAMA | DELTA | {"model_type": "qwen3_5", "mamba_ssm_dtype": "fp4"},
            "mamba_ssm_dtype must be one of float32, bfloat16, float16, got 'fp4'",
        ),
        (LLAMA | {"sliding_window": "x" * 9000}, "sliding_window must be 1 ... .* got 'xxx"),
    ],
)
def test_what_is_no_configuration_is_said(tmp_path, config, rule):
    with pytest.raises(ValueError, match=rule):
        shape(tmp_path, config)


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": "\n\x1b[31m"},
        {"sliding_window": [["\n" * 9000]]},
        {"layer_types": ["\n\x1b[31m" * 9000]},
        {"layer_types": ["\ud800"]},
        {"index_topk": 1, "model_type": ["\n"] * 9000},
        {"index_topk": 1, "model_type": "\n\x1b[31m" * 9000},
    ],
)
def test_what_a_file_says_is_reported_in_one_line(tmp_path, more):
    with pytest.raises(ValueError, match=r"must be|is not counted") as raised:
        shape(tmp_path, LLAMA | more)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 600 + len(str(tmp_path))


def test_the_name_of_a_file_is_shown_on_one_line(tmp_path):
    folder = tmp_path / "a\n\x1b[31mb"
    folder.mkdir()
    assert shape(folder, LLAMA).name == f"{tmp_path}/a\\n\\x1b[31mb/config.json"
    with pytest.raises(ValueError, match="must have the field") as raised:
        shape(folder, {})
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/META-LLAMA-3.1-70B-INSTRUCT", "llama-3.1-70b"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
    ],
)
def test_names_are_taken_as_typed_at_the_engine(name, known):
    assert model_shape(name).name == known


def test_a_variant_with_another_cache_is_not_taken_for_the_model():
    with pytest.raises(ValueError, match=r"got 'mistralai/Mistral-7B-v0\.1'"):
        model_shape("mistralai/Mistral-7B-v0.1")
