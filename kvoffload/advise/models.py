"""Models by name: the table of published shapes, and the names that lead to each.

``models.json`` has the fields of each model's ``config.json`` that determine its cache, read as
the file itself would be. Parameters are counted from the same files and agree with the model cards;
those of GLM-4.5, and those active per token, are from the cards; those of Qwen 3.5 to 3.8 and of
Gemma 4 are in the names. Weights take one byte per parameter where they are published in FP8; in
MXFP4 17 bytes per 32 of the experts' parameters, 2 per other one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvoffload.errors import describe, did_you_mean

from .model_config import shape_of_config, shape_of_fields
from .model_shape import ModelShape

_FILE = Path(__file__).with_name("models.json")

# Suffixes that repositories add to the name of a model with the same shape of cache.
_VARIANTS = re.compile(
    r"-(instruct|chat|base|it|hf|bf16|fp8|fp8-dynamic|awq|awq-int4|gptq|gptq-int4|int4|int8|w8a8"
    r"|w4a16|thinking|unsloth|bnb-4bit|v0\.[23]|0324|0528|0905|2501|2507)$"
)
_WITHOUT_WINDOWS = {
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
}


@functools.cache
def _table() -> Mapping[str, ModelShape]:
    """Return the shapes by name, in the order of the file."""
    shapes = {}
    for name, model in json.loads(_FILE.read_text(encoding="utf-8")).items():
        shapes[name] = replace(shape_of_fields(name, model.pop("config")), **model)
    return shapes


def model_names() -> tuple[str, ...]:
    """Return the names of the models whose shape is known."""
    return tuple(_table())


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model by its name, as for ``vllm serve``, or by its configuration.

    Case does not matter, nor do the organisation before a slash and suffixes for variants with the
    same cache, such as ``-Instruct`` or ``-FP8``. A path to a ``config.json``, or to its folder, is
    read instead (see ``model_config``).

    Raises
    ------
    ValueError
        If it is not known, with the nearest name, or cannot be counted.
    OSError
        If it is a file that cannot be read.
    """
    wanted = _plain(name)
    found = _table().get(wanted)
    if found is not None:
        return found
    if name.endswith(".json") or (name and Path(name).is_dir()):
        return shape_of_config(name)
    raise ValueError(
        "model must be a path to its config.json or a name that kvoffload models lists, "
        f"got {describe(name)}{did_you_mean(wanted, _table())}"
    )


def _plain(name: str) -> str:
    """Return the name in the table of a repository's model."""
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    plain = _WITHOUT_WINDOWS.get(plain, plain)
    while plain not in _table():
        shorter = _VARIANTS.sub("", plain)
        if shorter == plain:
            break
        plain = shorter
    return plain
