"""Groups and bytes of a block: of each model of the table, and of each family of configurations.

The figures were compared with vLLM 0.33 (``tests/vllm/test_model_groups.py`` does it again).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.advise import model_shape
from kvoffload.advise.model_groups import Layers, State
from kvoffload.advise.model_shape import ModelShape
from kvoffload.advise.models import model_names
from tests.advise.model_configs import FAMILIES

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
