"""Models: bytes of KV cache per token, groups and blocks, and what their files must say.

The groups were compared with vLLM 0.33 (``tests/vllm/test_model_groups.py`` does it again). The
configurations have the relevant fields of published ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.advise import model_shape
from kvoffload.advise.model_groups import Layers, State
from kvoffload.advise.model_shape import ModelShape
from kvoffload.advise.models import model_names
from tests.advise.model_configs import FAMILIES

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_layers_with_attention_and_a_source(name):
    shape = model_shape(name)
    assert shape.name == name
    for one in shape.kinds:
        assert (one.latent > 0) == (one.rotary > 0) == (one.kv_heads == 0 and one.state is None)
    assert any(one.state is None for one in shape.kinds)
    assert shape.source.startswith("https://huggingface.co/")


def test_a_head_is_divided_among_workers_until_each_has_one_and_is_then_copied():
    shape = model_shape("qwen3-30b-a3b")  # four KV heads
    one = shape.bytes_per_token()
    for workers, copies in {1: 1, 2: 1, 4: 1, 8: 2, 16: 4}.items():
        assert shape.bytes_per_token(tensor_parallel=workers) == copies * one
    latent = model_shape("deepseek-v3")  # which is kept once
    assert latent.bytes_per_token(tensor_parallel=8) == latent.bytes_per_token()


HEADS = "tensor_parallel must divide the 8 KV heads of llama-3.1-8b or be a multiple of them, got 3"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_shape("llama-3.1-7b"), "got 'llama-3.1-7b'; did you mean 'llama-3.1-"),
        (
            lambda: model_shape(""),
            "model must be a path to its config.json or a name that kvoffload models lists, got",
        ),
        (
            lambda: model_shape("llama-3.1-8b").bytes_per_token("int3"),
            "dtype must be one of bfloat16, float16, fp8, got 'int3'",
        ),
        (lambda: model_shape("llama-3.1-8b").bytes_per_token(tensor_parallel=3), HEADS),
        (
            lambda: model_shape("qwen3.5-27b").bytes_per_token(),
            "bytes per token, got qwen3.5-27b, some layers of which keep a state",
        ),
        (
            lambda: model_shape("deepseek-v3").bytes_per_token(tensor_parallel=0),
            "tensor_parallel must be >= 1, got 0",
        ),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


FULL, WINDOW, STATE = "full", "window", "state"
LAYOUTS = json.loads(Path(__file__).with_name("layouts.json").read_text(encoding="utf-8"))
"""Of models of the table and of configurations: how many groups of how many layers, kind, window,
tokens per block; bytes of a block of the widest group."""


def layout_of(shape):
    layout = shape.layout()
    groups = Counter(layout.groups).items()
    rows = [[n, one.layers, one.kind, one.window, one.block_tokens] for one, n in groups]
    return [rows, layout.block_bytes]


@pytest.mark.parametrize("name", LAYOUTS["models"])
def test_groups_of_models_of_the_table(name):
    assert layout_of(model_shape(name)) == LAYOUTS["models"][name]


@pytest.mark.parametrize("name", sorted(path.stem for path in FAMILIES.glob("*.json")))
def test_groups_of_a_configuration_of_each_family(name):
    assert layout_of(model_shape(str(FAMILIES / f"{name}.json"))) == LAYOUTS["families"][name]


@pytest.mark.parametrize(
    ("name", "dtype", "workers", "tokens", "block_bytes"),
    [
        ("qwen3.5-27b", "bfloat16", 8, 400, 52_428_800),  # states are divided, blocks are rounded
        ("qwen3.5-27b", "fp8", 1, 1568, 51_380_224),  # states keep their type
        ("qwen3-next-80b-a3b", "bfloat16", 4, 272, 13_369_344),  # each of two heads is kept twice
        ("kimi-k3", "bfloat16", 8, 768, 169_869_312),  # beside states each worker has the latent
        ("deepseek-v3.2", "bfloat16", 8, 64, 5_012_736),  # alone it is kept once
        ("deepseek-v3.2", "fp8", 1, 64, 64 * 61 * (656 + 132)),
        ("gemma-4-e2b", "bfloat16", 8, 16, 786_432),
        ("llama-3.1-8b", "bfloat16", 2, 16, 16 * 131_072),
        ("llama-3.1-8b", "bfloat16", 16, 16, 16 * 2 * 131_072),  # each of eight heads twice
    ],
)
def test_workers_and_types(name, dtype, workers, tokens, block_bytes):
    layout = model_shape(name).layout(dtype, workers)
    (group,) = {one for one in layout.groups if one.kind == FULL}
    assert (group.block_tokens, layout.block_bytes) == (tokens, block_bytes)


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 528), ("bfloat16", 272)])
def test_a_state_takes_the_bytes_of_its_type(tmp_path, dtype, tokens):
    config = json.loads((FAMILIES / "qwen3.5.json").read_text(encoding="utf-8"))
    config["text_config"]["mamba_ssm_dtype"] = dtype
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert {one.block_tokens for one in model_shape(str(path)).layout().groups} == {tokens}


def test_a_page_that_does_not_divide_the_largest_is_padded():
    kinds = (Layers(FULL, 2, 3, 64, 64), Layers(WINDOW, 2, 2, 64, 64, window=32))
    layout = ModelShape("m", "", kinds).layout()
    assert [group.block_tokens for group in layout.groups] == [16, 16]
    assert layout.block_bytes == 2 * 16 * 3 * 128 * 2


def test_groups_are_as_wide_as_the_commonest_kind_where_the_rarest_is_nearly_as_common():
    kinds = (Layers(FULL, 13, 8, 64, 64), Layers(WINDOW, 12, 8, 64, 64, window=32))
    assert [one.layers for one in ModelShape("m", "", kinds).layout().groups] == [13, 12]


def test_as_many_groups_as_there_may_be_are_counted():
    kinds = (Layers(FULL, 1, 8, 64, 64), Layers(WINDOW, 255, 8, 64, 64, window=32))
    assert len(ModelShape("m", "", kinds).layout().groups) == 256


def test_groups_of_the_same_kind_and_blocks_are_one():
    kinds = (Layers(FULL, 2, 8, 64, 64), Layers(FULL, 3, 4, 64, 64))
    layout = ModelShape("m", "", kinds).layout()
    assert [group.layers for group in layout.groups] == [5]
    assert layout.block_bytes == 16 * (2 * 8 + 3 * 4) * 128 * 2


LATENT = Layers(FULL, 2, latent=512, rotary=64)
MAMBA = Layers(STATE, 2, state=State(6, 64, channels=12, taps=3))


@pytest.mark.parametrize(
    ("kinds", "workers", "message"),
    [
        ((Layers(FULL, 2, 8, 64, 64),), 3, "must divide the 8 KV heads of m or be a multiple of"),
        ((LATENT, MAMBA), 4, "tensor_parallel must divide the 6 heads of a state of m, got 4"),
        (
            (LATENT, replace(MAMBA, state=State(channels=6, taps=3))),
            4,
            "tensor_parallel must divide the 6 channels of a state of m, got 4",
        ),
        (
            (LATENT, Layers(WINDOW, 2, 8, 64, 64, window=32)),
            1,
            "m is not counted: a page of 18432 bytes of latent attention does not divide one of",
        ),
        (
            (Layers(FULL, 1, 8, 64, 64), Layers(WINDOW, 256, 8, 64, 64, window=32)),
            1,
            "m is not counted: its layers must be at most 256 groups, got 257",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(kinds, workers, message):
    with pytest.raises(ValueError, match=message):
        ModelShape("m", "", kinds).layout(tensor_parallel=workers)


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096,
}  # fmt: skip
FALCON = {"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}
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
        (LLAMA | {"use_cla": False, "cla_share_factor": 2}, 131_072),  # as Hunyuan
        (LLAMA | {"attn_type_list": [1] * 32}, 131_072),  # as MiniMax M2
        (DEEPSEEK, 70_272),
        ({"model_type": "gemma3", "text_config": LLAMA}, 131_072),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 2),
        (FALCON, 2 * 32 * 64 * 2),
        (FALCON | {"num_kv_heads": 71}, 2 * 32 * 64 * 2),
        (FALCON | {"n_head_kv": 8}, 8 * 2 * 32 * 64 * 2),
        (FALCON | {"num_kv_heads": 8, "new_decoder_architecture": True}, 8 * 2 * 32 * 64 * 2),
        (LLAMA | {"attn_config": {"kv_n_heads": 4}}, 65_536),  # as DBRX
        (LLAMA | {"num_key_value_heads": None, "num_attention_groups": 1}, 16_384),  # as Step 3
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
        ({"attn_type_list": [1, 0] * 16}, r"its recurrent layers .* \(attn_type_list\)"),
        ({"block_configs": [{}]}, "its layers have attention of different sizes"),
        ({"global_head_dim": 512}, "its layers have attention of different sizes"),
        ({"use_cla": True, "cla_share_factor": 2}, "several layers share one cache"),
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
