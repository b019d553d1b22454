"""A vLLM that is not supported yet, under the rules of a release that is: `.ci/vllm-new` asks so.

``KVOFFLOAD_VLLM_AS`` is the version that the installed vLLM is taken for.
"""

from __future__ import annotations

import os
from importlib import metadata

VARIABLE = "KVOFFLOAD_VLLM_AS"


def pretend() -> None:
    """Let the distribution of vLLM say another version, if one is given."""
    version = os.environ.get(VARIABLE)
    if not version:
        return
    installed = metadata.version

    def of(name: str) -> str:
        return version if name == "vllm" else installed(name)

    metadata.version = of
