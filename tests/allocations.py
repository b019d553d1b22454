"""Allocations of the compiled twins that are refused, in a build that is for tests."""

from __future__ import annotations

import ctypes
import importlib


def _counter() -> ctypes.c_int64 | None:
    """Return how many allocations still succeed, -1 for all; None where none is ever refused."""
    try:
        memory = importlib.import_module("kvoffload._core.memory")
        return ctypes.c_int64.in_dll(ctypes.CDLL(memory.__file__), "kvo_allocations_left")
    except (ImportError, ValueError):  # no extension, or one without the counter
        return None


_left = _counter()
REFUSABLE = _left is not None
"""Whether this build can refuse allocations."""


def fail_after(allocations: int | None) -> None:
    """Make every allocation in C after that many fail, until called with None."""
    if _left is None:
        raise RuntimeError("allocations are refused in a build with KVOFFLOAD_DEBUG=1 only")
    _left.value = -1 if allocations is None else allocations
