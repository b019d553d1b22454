"""The choice between compiled and Python twins, made once for all twins.

``KVOFFLOAD_PURE_PYTHON`` decides: unset or empty, compiled if it imports; ``0``, compiled required;
any other value, Python. A free-threaded interpreter enables its global lock when it imports the
extensions; if it was told to keep the lock off, compiled twins are refused.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Literal

from kvoffload.errors import MissingExtraError

VARIABLE = "KVOFFLOAD_PURE_PYTHON"


def import_compiled() -> None:
    """Import the compiled twin of each Python one: ``_x_c`` of each ``_x_py``."""
    for folder in ("policies", "backends", "managers"):
        for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)]):
            stem, _, twin = module.name.rpartition("_")
            if twin == "py":
                importlib.import_module(f"{__package__}.{folder}.{stem}_c")


def _choose() -> Literal["compiled", "python"]:
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0"):
        return "python"
    try:
        import_compiled()
    except ImportError as cause:
        if wish == "0":
            raise ImportError(
                f"{VARIABLE}=0 requires the compiled implementation, "
                f"which cannot be imported: {cause}"
            ) from cause
        return "python"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "the compiled implementation needs the global interpreter lock: run without "
            f"PYTHON_GIL=0 and -X gil=0, or choose the Python implementation by {VARIABLE}=1"
        )
    return "compiled"


IMPLEMENTATION: Literal["compiled", "python"] = _choose()


def require_compiled(feature: str) -> None:
    """Raise MissingExtraError, which says why, if the Python implementation is in use."""
    if IMPLEMENTATION == "compiled":
        return
    needs = f"{feature} needs the compiled implementation"
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0"):
        raise MissingExtraError(f"{needs}, and {VARIABLE}={wish} asks for the Python one; unset it")
    try:
        import_compiled()
    except ImportError as cause:
        raise MissingExtraError(f"{needs}, which cannot be imported: {cause}") from cause
    raise MissingExtraError(f"{needs}, which could not be imported when kvoffload was")
