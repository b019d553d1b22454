"""Compiled or Python: decided once, here, for all twins or none.

``KVOFFLOAD_PURE_PYTHON`` decides: unset or empty, compiled if it imports; ``0``, compiled required;
any other value, Python.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Literal

__all__ = [
    "IMPLEMENTATION",
    "ARCCachePolicy",
    "ARCOffloadingManager",
    "CPUBackend",
    "CPUOffloadingManager",
    "LRUCachePolicy",
    "LRUOffloadingManager",
]

VARIABLE = "KVOFFLOAD_PURE_PYTHON"


def _choose() -> Literal["compiled", "python"]:
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0"):
        return "python"
    try:
        importlib.import_module("kvoffload._compiled")
    except ImportError as cause:
        if wish == "0":
            raise ImportError(
                f"{VARIABLE}=0 requires the compiled implementation, "
                f"which cannot be imported: {cause}"
            ) from cause
        return "python"
    return "compiled"


IMPLEMENTATION: Literal["compiled", "python"] = _choose()

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._python import (
        ARCCachePolicy,
        ARCOffloadingManager,
        CPUBackend,
        CPUOffloadingManager,
        LRUCachePolicy,
        LRUOffloadingManager,
    )
else:
    from ._compiled import (
        ARCCachePolicy,
        ARCOffloadingManager,
        CPUBackend,
        CPUOffloadingManager,
        LRUCachePolicy,
        LRUOffloadingManager,
    )
