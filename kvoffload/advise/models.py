"""Models by name: the table of published shapes, and the names that lead to each."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from kvoffload.errors import describe

from .model_config import shape_of_config
from .model_groups import Layers
from .model_shape import WINDOWED, ModelShape

__all__ = ["model_names", "model_shape"]

_WINDOWS = WINDOWED.format("every second layer attends to 128 tokens")

# As in config.json of each repository: layers, KV heads and head size (or latent and rotary size).
# Parameters are counted from the same files and agree with the model cards; those of GLM-4.5, and
# those active per token, are from the cards. Weights take one byte per parameter where
# they are published in FP8; in MXFP4 17 bytes per 32 of the experts' parameters, 2 per other one.
_SHAPES = (
    ModelShape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 8, 128, parameters=8.03e9),
    ModelShape("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 8, 128, parameters=70.6e9),
    ModelShape("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 80, 8, 128, parameters=70.6e9),
    ModelShape("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 8, 128, parameters=406e9),
    ModelShape("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, 4, 128, parameters=7.62e9),
    ModelShape("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, 8, 128, parameters=72.7e9),
    ModelShape("qwen3-8b", "Qwen/Qwen3-8B", 36, 8, 128, parameters=8.19e9),
    ModelShape("qwen3-14b", "Qwen/Qwen3-14B", 40, 8, 128, parameters=14.8e9),
    ModelShape("qwen3-32b", "Qwen/Qwen3-32B", 64, 8, 128, parameters=32.8e9),
    ModelShape("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 4, 128, parameters=30.5e9, active=3.3e9),
    ModelShape(
        "qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 4, 128, parameters=235e9, active=22e9
    ),
    ModelShape("mistral-7b", "mistralai/Mistral-7B-v0.3", 32, 8, 128, parameters=7.25e9),
    ModelShape(
        "mistral-small-24b",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        40,
        8,
        128,
        parameters=23.6e9,
    ),
    ModelShape(
        "mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, 8, 128, parameters=46.7e9, active=12.9e9
    ),
    ModelShape("glm-4.5", "zai-org/GLM-4.5", 92, 8, 128, parameters=355e9, active=32e9),
    ModelShape(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        24,
        8,
        64,
        groups=(Layers("window", 12, 8, 64, 64, window=128), Layers("full", 12, 8, 64, 64)),
        remark=_WINDOWS,
        parameters=20.9e9,
        active=3.6e9,
        weights=13.7e9,
    ),
    ModelShape(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        36,
        8,
        64,
        groups=(Layers("window", 18, 8, 64, 64, window=128), Layers("full", 18, 8, 64, 64)),
        remark=_WINDOWS,
        parameters=116.8e9,
        active=5.1e9,
        weights=65.3e9,
    ),
    ModelShape(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3",
        61,
        latent=512,
        rotary=64,
        parameters=671e9,
        active=37e9,
        weights=671e9,
    ),
    ModelShape(
        "deepseek-r1",
        "deepseek-ai/DeepSeek-R1",
        61,
        latent=512,
        rotary=64,
        parameters=671e9,
        active=37e9,
        weights=671e9,
    ),
    ModelShape(
        "kimi-k2",
        "moonshotai/Kimi-K2-Instruct",
        61,
        latent=512,
        rotary=64,
        parameters=1.026e12,
        active=32e9,
        weights=1.026e12,
    ),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}

# Suffixes that repositories add to the name of a model with the same shape of cache.
_VARIANTS = re.compile(
    r"-(instruct|chat|base|it|hf|bf16|fp8|fp8-dynamic|awq|awq-int4|gptq|gptq-int4|int4|int8|w8a8"
    r"|w4a16|thinking|unsloth|bnb-4bit|v0\.[23]|0324|0528|0905|2501|2507)$"
)
_WITHOUT_WINDOWS = {
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
}


def model_names() -> tuple[str, ...]:
    """Return the names of the models whose shape is known."""
    return tuple(_BY_NAME)


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model by its name, as for ``vllm serve``, or by its configuration.

    Case does not matter, nor do the organisation before a slash and suffixes for variants with the
    same cache, such as ``-Instruct`` or ``-FP8``. A path to a ``config.json``, or to its folder, is
    read instead (see ``model_config``).

    Raises
    ------
    ValueError
        If it is not known or cannot be counted; the message lists the known ones and the nearest.
    OSError
        If it is a file that cannot be read.
    """
    wanted = _plain(name)
    found = _BY_NAME.get(wanted)
    if found is not None:
        return found
    if name.endswith(".json") or (name and Path(name).is_dir()):
        return shape_of_config(name)
    near = difflib.get_close_matches(wanted, _BY_NAME, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(_BY_NAME)
    raise ValueError(
        f"model must be a path to its config.json or one of {known}, got {describe(name)}{hint}"
    )


def _plain(name: str) -> str:
    """Return the name in the table of a repository's model."""
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    plain = _WITHOUT_WINDOWS.get(plain, plain)
    while plain not in _BY_NAME:
        shorter = _VARIANTS.sub("", plain)
        if shorter == plain:
            break
        plain = shorter
    return plain
