"""The choice of the implementation below a tier: compiled or Python, once per process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import kvoffload
from kvoffload.errors import describe

from . import stores, threads
from .contract import Pool

__all__ = ["Twin", "chosen", "chosen_or"]


@dataclass(frozen=True, slots=True)
class Twin:
    """The parts of a tier with two implementations: the index, and the pool of ``contract``."""

    manager: Callable[..., Any]  # `CPUOffloadingManager`
    pool: Callable[..., Pool]
    file_store: Callable[..., Any]
    memory_store: Callable[..., Any]
    valid_records: Callable[..., Any]  # the reader of seal tables

    @classmethod
    def python(cls, manager: Callable[..., Any]) -> Twin:
        """Join a manager's class and the threads in Python."""
        return cls(
            manager, threads.Pool, stores.FileStore, stores.MemoryStore, stores.valid_records
        )

    @classmethod
    def compiled(cls, manager: Callable[..., Any]) -> Twin:
        """Join a manager's class and the compiled threads."""
        io: Any = importlib.import_module("kvoffload._core.io")
        return cls(manager, io.Pool, io.FileStore, io.MemoryStore, io.valid_records)


@cache
def chosen() -> Twin:
    """Return the implementation of this process."""
    is_compiled = kvoffload.IMPLEMENTATION == "compiled"
    make = Twin.compiled if is_compiled else Twin.python
    return make(kvoffload.CPUOffloadingManager)


def chosen_or(twin: Twin | None) -> Twin:
    """Return the requested implementation, or this process's; TypeError if it is not a Twin."""
    if not isinstance(twin, Twin | None):
        raise TypeError(f"twin must be a Twin, got {describe(twin)}")
    return chosen() if twin is None else twin
