"""Bytes of KV cache per token, by the two formulas."""

import re

import pytest

from kvoffload.advise import model_shape
from kvoffload.advise.models import model_names


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
