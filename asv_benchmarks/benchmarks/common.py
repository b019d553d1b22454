"""Helpers of the benchmarks. Nothing of the package is imported: every commit can import it."""

import contextlib
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPLEMENTATIONS = ["python", "compiled"]
#: Set to a number of blocks to make everything smaller: a smoke run need not fill a million.
LARGEST = int(os.environ.get("KVOFFLOAD_BENCH_LARGEST") or 1_000_000)
CAPACITIES = [size for size in (10_000, 100_000, 1_000_000) if size <= LARGEST] or [LARGEST]
REQUEST_LENGTHS = [length for length in (16, 128, 1_024) if length * 8 <= LARGEST]
MIDDLE = min(100_000, LARGEST)


def policy_names() -> list[str]:
    """Return the policies of the commit at hand."""
    try:
        registry: Any = importlib.import_module("kvoffload.policies.registry")
    except ImportError:
        return ["lru", "arc"]
    return list(registry.names())


def implementation(name: str) -> Any:
    """Return the module with one implementation's classes; asv skips what a commit lacks."""
    # The first is of 0.1. The other stands beside this folder, after the package that is measured.
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    for module in (f"kvoffload._{name}", f"tests._{name}"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module)
    raise NotImplementedError(f"not built: {name}")


def block_hashes(first: int, count: int) -> list[bytes]:
    """Make `count` keys of 36 bytes: a digest and a group suffix, as an engine makes them."""
    return [
        hashlib.sha256(number.to_bytes(8, "big")).digest() + b"\0\0\0\0"
        for number in range(first, first + count)
    ]


def new_manager(name: str, policy: str, capacity: int, *, events: bool = False) -> Any:
    """Make an empty manager."""
    return implementation(name).CPUOffloadingManager(16, capacity, policy, events)


def fill(manager: Any, hashes: list[bytes], request_length: int = 1_000) -> None:
    """Store blocks as requests, each touched after its store, as an engine does."""
    for start in range(0, len(hashes), request_length):
        request = hashes[start : start + request_length]
        output = manager.prepare_store(request)
        manager.touch(request)
        manager.complete_store(output.block_hashes_to_store)
