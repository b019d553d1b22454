"""Compare with the managers that vLLM 0.19 released, in one process, both sides taking turns.

Usage, with the sdist of vLLM from PyPI, of which only the managers' own files are imported::

    python asv_benchmarks/released.py vllm-0.19.0.tar.gz

Both sides hold the same blocks and get the same requests. Prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratios import REQUEST, fill, interleave, load, make_keys, store
from rich.console import Console
from rich.table import Table

import kvoffload

MANAGERS = "/vllm/v1/kv_offload/"
LONG_PROMPT = 8_000  # hashes: 128,000 tokens in blocks of 16
Call = Callable[[Any, list[bytes]], Any]


def released_manager(sdist: Path, folder: Path) -> Any:
    """Return the class of the managers in an sdist, imported without the rest of vLLM."""
    with tarfile.open(sdist) as archive:
        files = [member for member in archive if MANAGERS in member.name]
        archive.extractall(folder, files, filter="data")
    (root,) = folder.iterdir()
    names = root / "vllm/v1/core/kv_cache_utils.py"  # of which they take one name, a type
    names.parent.mkdir(parents=True)
    names.write_text("BlockHash = bytes\n")
    sys.path.insert(0, str(root))
    return importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager


def compare(
    released: Any, capacity: int, policy: str, rounds: int
) -> list[tuple[str, float, float]]:
    """Return what was called, and the median times of both sides in ns per call."""
    sides = {
        "released": released(16, capacity, policy),
        "compiled": kvoffload.CPUOffloadingManager(16, capacity, policy),
    }
    held = make_keys(0, capacity)
    for manager in sides.values():
        fill(manager, held)
    fresh = iter(range(1, 10**9))
    request: list[bytes] = []

    def hits(number: int) -> None:
        start = number * 7919 % (capacity // 2 // REQUEST) * REQUEST
        request[:] = make_keys(start, REQUEST)

    def misses(_: int) -> None:
        request[:] = make_keys(10**9 + next(fresh) * REQUEST, REQUEST)

    def long_prompt(_: int) -> None:
        request[:] = make_keys(10**9 + next(fresh) * LONG_PROMPT, LONG_PROMPT)

    found = []
    cases: list[tuple[str, Call, Callable[[int], None], int]] = [
        ("lookup that hits", lambda m, keys: m.lookup(keys), hits, rounds),
        ("touch", lambda m, keys: m.touch(keys), hits, rounds),
        ("load", load, hits, rounds),
        ("lookup that misses at once", lambda m, keys: m.lookup(keys), long_prompt, rounds // 4),
        ("store with eviction", store, misses, rounds),
    ]
    for name, call, prepare, times in cases:
        medians = interleave(
            {side: lambda _, m=m, call=call: call(m, request) for side, m in sides.items()},
            times,
            prepare,
        )
        found.append((name, medians["released"], medians["compiled"]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path, help="vllm-0.19.0.tar.gz, from PyPI")
    parser.add_argument("--blocks", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    if kvoffload.IMPLEMENTATION != "compiled":
        parser.error("needs the compiled implementation")
    table = Table("policy", "blocks", "call", "released", "compiled", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        released = released_manager(arguments.sdist, Path(folder))
        for capacity in arguments.blocks:
            for policy in ("lru", "arc"):
                for name, before, now in compare(released, capacity, policy, arguments.rounds):
                    times = [f"{ns / 1000:.1f} us" for ns in (before, now)]
                    table.add_row(policy, f"{capacity:,}", name, *times, f"{before / now:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
