"""Groups and bytes of a block: of each model of the table, and of each family of configurations.

The figures were compared with vLLM 0.33 (``tests/vllm/test_model_groups.py`` does it again).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from kvoffload.advise import model_shape
from kvoffload.advise.model_groups import Layers, State
from kvoffload.advise.model_shape import ModelShape
from kvoffload.advise.models import model_names
from tests.advise.model_configs import FAMILIES

FULL, WINDOW, STATE = "full", "window", "state"
# Groups × layers, kind, window, tokens per block; bytes of a block of the widest group.
SHIPPED = [
    ("gpt-oss-20b", [(1, 12, WINDOW, 128, 16), (1, 12, FULL, 0, 16)], 393_216),
    ("qwen3-next-80b-a3b", [(3, 12, STATE, 0, 544), (1, 12, FULL, 0, 544)], 13_369_344),
    ("qwen3.5-397b-a17b", [(3, 15, STATE, 0, 2096), (1, 15, FULL, 0, 2096)], 64_389_120),
    ("qwen3.5-122b-a10b", [(3, 12, STATE, 0, 2096), (1, 12, FULL, 0, 2096)], 51_511_296),
    ("qwen3.5-35b-a3b", [(3, 10, STATE, 0, 1056), (1, 10, FULL, 0, 1056)], 21_626_880),
    ("qwen3.5-27b", [(3, 16, STATE, 0, 784), (1, 16, FULL, 0, 784)], 51_380_224),
    ("qwen3.5-9b", [(3, 8, STATE, 0, 528), (1, 8, FULL, 0, 528)], 17_301_504),
    ("qwen3.8-2.4t-a95b", [(3, 23, STATE, 0, 2080), (1, 23, FULL, 0, 2080)], 195_952_640),
    ("gemma-4-e2b", [(4, 3, WINDOW, 512, 32), (1, 3, FULL, 0, 16)], 98_304),
    ("gemma-4-e4b", [(5, 4, WINDOW, 512, 32), (1, 4, FULL, 0, 16)], 262_144),
    ("gemma-4-26b-a4b", [(5, 5, WINDOW, 1024, 16), (1, 5, FULL, 0, 32)], 655_360),
    ("gemma-4-31b", [(5, 10, WINDOW, 1024, 16), (1, 10, FULL, 0, 32)], 2_621_440),
    ("cohere-command-a-03-2025", [(3, 16, WINDOW, 4097, 16), (1, 16, FULL, 0, 16)], 1_048_576),
    ("cohere-command-r7b-12-2024", [(3, 8, WINDOW, 4097, 16), (1, 8, FULL, 0, 16)], 524_288),
    (
        "mimo-v2.5",
        [(1, 9, FULL, 0, 32), (4, 8, WINDOW, 128, 16), (1, 7, WINDOW, 128, 16)],
        737_280,
    ),
    ("mimo-v2.5-pro", [(1, 10, FULL, 0, 16), (6, 10, WINDOW, 128, 16)], 819_200),
    ("deepseek-v3.2", [(1, 61, FULL, 0, 64)], 4 * 1_253_184),
    ("glm-5", [(1, 78, FULL, 0, 64)], 4 * 1_602_432),
    ("kimi-k2.5", [(1, 61, FULL, 0, 16)], 1_124_352),
    ("kimi-k3", [(3, 23, STATE, 0, 5760), (1, 24, FULL, 0, 5760)], 159_252_480),
    ("minimax-m2.5", [(1, 62, FULL, 0, 16)], 4_063_232),
    ("qwen3-4b", [(1, 36, FULL, 0, 16)], 2_359_296),
    ("qwen2.5-32b", [(1, 64, FULL, 0, 16)], 4_194_304),
]
FAMILY = [
    ("bamba", [(9, 3, STATE, 0, 528), (1, 2, STATE, 0, 528), (1, 3, FULL, 0, 528)], 6_488_064),
    ("cohere2", [(3, 8, WINDOW, 4097, 16), (1, 8, FULL, 0, 16)], 524_288),
    ("deepseek-v3.2", [(1, 61, FULL, 0, 64)], 5_012_736),
    ("deepseek-v3", [(1, 61, FULL, 0, 16)], 1_124_352),
    ("falcon-h1", [(1, 36, FULL, 0, 400), (1, 36, STATE, 0, 400)], 58_982_400),
    ("gemma2", [(1, 13, WINDOW, 4096, 16), (1, 13, FULL, 0, 16)], 851_968),
    ("gemma3", [(4, 4, WINDOW, 1024, 16), (2, 3, WINDOW, 1024, 16), (1, 4, FULL, 0, 16)], 262_144),
    ("gemma4-shared", [(4, 3, WINDOW, 512, 32), (1, 3, FULL, 0, 16)], 98_304),
    ("gemma4", [(5, 2, WINDOW, 512, 64), (1, 2, FULL, 0, 16)], 524_288),
    ("glm-5", [(1, 78, FULL, 0, 64)], 6_409_728),
    ("gpt-oss", [(1, 12, WINDOW, 128, 16), (1, 12, FULL, 0, 16)], 393_216),
    ("granite", [(9, 4, STATE, 0, 528), (1, 4, FULL, 0, 528)], 8_650_752),
    ("jamba", [(7, 4, STATE, 0, 80), (1, 4, FULL, 0, 80)], 1_310_720),
    ("kimi-k2.5", [(1, 61, FULL, 0, 16)], 1_124_352),
    (
        "kimi-linear",
        [(2, 7, STATE, 0, 1920), (1, 6, STATE, 0, 1920), (1, 7, FULL, 0, 1920)],
        15_482_880,
    ),
    ("lfm2", [(2, 5, STATE, 0, 16), (1, 6, FULL, 0, 16)], 196_608),
    ("llama", [(1, 32, FULL, 0, 16)], 2_097_152),
    ("llama4", [(3, 3, "chunked", 8192, 16), (1, 3, FULL, 0, 16)], 196_608),
    ("mimo", [(1, 4, FULL, 0, 32), (2, 4, WINDOW, 128, 16)], 327_680),
    ("mistral-windows", [(1, 32, WINDOW, 4096, 16)], 2_097_152),
    ("nemotron-h-listed", [(1, 3, STATE, 0, 528), (1, 3, FULL, 0, 528)], 6_488_064),
    (
        "nemotron-h",
        [(2, 2, STATE, 0, 1040), (1, 1, STATE, 0, 1040), (1, 2, FULL, 0, 1040)],
        8_519_680,
    ),
    ("olmo3", [(3, 8, WINDOW, 4096, 16), (1, 8, FULL, 0, 16)], 524_288),
    ("qwen2-windows-off", [(1, 28, FULL, 0, 16)], 1_835_008),
    ("qwen3-next", [(3, 12, STATE, 0, 544), (1, 12, FULL, 0, 544)], 13_369_344),
    ("qwen3.5", [(31, 1, STATE, 0, 528), (1, 1, FULL, 0, 528)], 2_162_688),
    ("smollm3", [(1, 12, FULL, 0, 16)], 786_432),
    ("zamba2", [(1, 2, FULL, 0, 48), (6, 2, STATE, 0, 48)], 1_966_080),
]


def groups_of(shape):
    layout = shape.layout()
    groups = Counter(layout.groups).items()
    rows = [(n, one.layers, one.kind, one.window, one.block_tokens) for one, n in groups]
    return rows, layout.block_bytes


SAME = {
    "qwen3.5-9b": "qwen3.5-4b",
    "qwen3.5-27b": "qwen3.6-27b qwen3.8-27b",
    "qwen3.5-35b-a3b": "qwen3.6-35b-a3b",
    "glm-5": "glm-5.1",
    "kimi-k2.5": "kimi-k2.6",
    "cohere-command-r7b-12-2024": "cohere-command-a-plus-05-2026",
}
"""Models with the same figures as others."""


@pytest.mark.parametrize(("name", "groups", "block_bytes"), SHIPPED)
def test_groups_of_models_of_the_table(name, groups, block_bytes):
    for each in (name, *SAME.get(name, "").split()):
        assert groups_of(model_shape(each)) == (groups, block_bytes)


@pytest.mark.parametrize(("name", "groups", "block_bytes"), FAMILY)
def test_groups_of_a_configuration_of_each_family(name, groups, block_bytes):
    assert groups_of(model_shape(str(FAMILIES / f"{name}.json"))) == (groups, block_bytes)


def test_each_configuration_beside_the_tests_has_its_figures():
    assert {name for name, _, _ in FAMILY} == {path.stem for path in FAMILIES.glob("*.json")}


OF_FULL_ATTENTION = [
    name for name in model_names() if {one.kind for one in model_shape(name).kinds} == {FULL}
]


@pytest.mark.parametrize("name", OF_FULL_ATTENTION)
def test_a_block_of_one_full_group_takes_the_bytes_of_its_tokens(name):
    shape = model_shape(name)
    for workers in (1, 2, 4, 8):
        layout = shape.layout(tensor_parallel=workers)
        (group,) = layout.groups
        token = shape.bytes_per_token(tensor_parallel=workers)
        assert layout.block_bytes == group.block_tokens * token


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
