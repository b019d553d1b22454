"""A vLLM that is not supported yet, under the rules of a release that is: `.ci/vllm-new` asks so.

``KVOFFLOAD_VLLM_AS`` is the version that the installed vLLM is taken for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

VARIABLE = "KVOFFLOAD_VLLM_AS"
NAME = "kvoffload.integrations.vllm._upstream"


def load_upstream() -> ModuleType:
    """Load the module that knows vLLM without its package, which refuses some releases."""
    path = Path(__file__).parents[3] / f"{NAME.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend() -> None:
    """Let vLLM's distribution give another version, if there is one; no difference counts then."""
    version = os.environ.get(VARIABLE)
    if not version:
        return
    installed = metadata.version

    def of(name: str) -> str:
        return version if name == "vllm" else installed(name)

    metadata.version = of
    load_upstream().differences = lambda interface: []
