"""Groups, blocks and chunks of models against vLLM's own, built from the same configurations.

vLLM's model classes are built without weights, in a process of its own (see ``modelled``): they say
what each layer keeps, vLLM divides the layers, and its connector's configuration and
``CPUOffloadingSpec`` say how large a chunk is and how many fit. None of this library's arithmetic
is in between.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvoffload.advise import model_shape
from kvoffload.advise.model_config import shape_of_fields
from kvoffload.integrations.vllm._upstream import installed_release
from tests.advise.model_configs import families, shipped
from tests.isolated.scripts import run_python
from tests.vllm.modelled import ARCHITECTURES, MEMORY, VARIABLES, WORKERS

if installed_release().name != "0.33":
    pytest.skip("groups are compared with vLLM 0.33 alone", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MODELS = dict(shipped())
FAMILIES = {name: config.get("text_config", config) for name, config in families()}
NOT_IN_VLLM = {"bamba"}  # it had the model before 0.33
PROGRAM = "from tests.vllm.modelled import main; main()"
BATCH = 27  # configurations for a process, which ends well before a test counts as hanging
KINDS = {
    "model": (MODELS, WORKERS),
    "family": ({name: FAMILIES[name] for name in FAMILIES.keys() - NOT_IN_VLLM}, WORKERS[:2]),
}


@functools.cache
def texts(kind: str) -> list[str]:
    """Return the configurations of a kind, as texts: several models share one."""
    return sorted({json.dumps(config) for config in KINDS[kind][0].values()})


@functools.cache
def batch(kind: str, start: int) -> subprocess.CompletedProcess[str]:
    """Ask vLLM for the configurations of a batch."""
    workers = KINDS[kind][1]
    asked = {text: (json.loads(text), workers) for text in texts(kind)[start : start + BATCH]}
    options = {"input": json.dumps(asked), "cwd": ROOT, "env": os.environ | VARIABLES}
    return run_python("-c", PROGRAM, timeout=3600, **options)


def vllm_results(kind: str, name: str) -> dict[str, Any]:
    """Return what vLLM says of a configuration."""
    text = json.dumps(KINDS[kind][0][name])
    done = batch(kind, texts(kind).index(text) // BATCH * BATCH)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)[text]


def compare(shape, results):
    """Compare the groups and chunks of a shape with vLLM's, for each type and number of workers."""
    assert results
    for key, (groups, chunks) in results.items():
        assert groups
        assert chunks
        dtype, workers = key.split()
        layout = shape.layout(dtype, int(workers))
        ours = [[one.kind, one.layers, one.window, one.block_tokens] for one in layout.groups]
        assert ours == groups, key
        for blocks, (slot_bytes, number) in chunks.items():
            assert layout.slot_bytes(int(blocks)) == slot_bytes, key
            assert MEMORY // layout.slot_bytes(int(blocks)) == number, key


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_table_have_the_groups_and_chunks_of_vllm(name):
    results = vllm_results("model", name)
    assert {key.split()[0] for key in results} >= {"bfloat16", "fp8"}
    compare(model_shape(name), results)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_IN_VLLM))
def test_families_have_the_groups_and_chunks_of_vllm(name):
    compare(shape_of_fields(name, FAMILIES[name]), vllm_results("family", name))


def test_each_model_class_is_asked_for():
    kinds = {config["model_type"] for config in [*MODELS.values(), *FAMILIES.values()]}
    assert kinds - NOT_IN_VLLM == ARCHITECTURES.keys()
