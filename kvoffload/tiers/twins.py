"""Which implementation a tier stands on: compiled or Python, decided once for the whole package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import kvoffload

from . import _io_py
from .pool import Pool

__all__ = ["Twin", "chosen"]


@dataclass(frozen=True, slots=True)
class Twin:
    """The parts of a tier that exist twice.

    Attributes
    ----------
    manager : callable
        ``CPUOffloadingManager``, which is the index.
    pool, file_store, memory_store : callable
        The threads and what they move blocks to; see ``kvoffload.tiers.pool``.
    valid_records : callable
        The reader of seal tables.
    """

    manager: Callable[..., Any]
    pool: Callable[..., Pool]
    file_store: Callable[..., Any]
    memory_store: Callable[..., Any]
    valid_records: Callable[..., Any]

    @classmethod
    def of(cls, manager: Callable[..., Any], io: Any) -> Twin:
        """Join a manager's class and a module with threads."""
        return cls(manager, io.Pool, io.FileStore, io.MemoryStore, io.valid_records)


@cache
def chosen() -> Twin:
    """Return the implementation of this process."""
    io: Any = _io_py
    if kvoffload.IMPLEMENTATION == "compiled":
        io = importlib.import_module("kvoffload._core.io")
    return Twin.of(kvoffload.CPUOffloadingManager, io)
