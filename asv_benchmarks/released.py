"""Compare with vLLM's released managers and with other builds, in turns in one process.

Usage, with vLLM's sdist from PyPI (only the managers' own files are imported)::

    python asv_benchmarks/released.py vllm-0.19.0.tar.gz [--build FOLDER]...

FOLDER has another version of kvoffload, built in place. With the Python that ``.ci/vllm-env``
prints, the manager of that vLLM and KVOffloadManager are compared as well, as "vllm" and "in vllm":
there a lookup is one call per key, and a request's context is made outside the clock.

All sides hold the same blocks and get the same requests. Prints the median of the sdist's manager,
and its ratio to that of each other. ``--replay TRACE`` serves a trace instead, with a cache of 5 %
of its distinct blocks: by the calls of the sdist's manager, by the same calls of kvoffload's, and
by `kvoffload.replay` without a manager.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tarfile
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import process_time_ns
from types import ModuleType
from typing import Any

from ratios import REQUEST, interleave, make_keys
from rich.console import Console
from rich.table import Table

import kvoffload
from kvoffload.replay import Configuration, DecodedTrace
from kvoffload.replay.loop import Replays
from kvoffload.traces import Trace

MANAGERS = "/vllm/v1/kv_offload/"
LONG_PROMPT = 8_000  # hashes: 128,000 tokens in blocks of 16
BLOCK_TOKENS = 16
Build = Callable[[int, str], Any]


class BlockCalls:
    """The calls of vLLM 0.19, which take all hashes of a request."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def expect(self, keys: list[bytes]) -> None:
        """Take the keys of the next request, outside the clock."""
        self.keys = keys

    def lookup(self) -> None:
        """Look all keys up."""
        self.manager.lookup(self.keys)

    def touch(self) -> None:
        """Touch all keys."""
        self.manager.touch(self.keys)

    def load(self) -> None:
        """Do one load."""
        self.manager.prepare_load(self.keys)
        self.manager.complete_load(self.keys)

    def store(self) -> None:
        """Do one store."""
        self.manager.prepare_store(self.keys)
        self.manager.complete_store(self.keys)


class RequestCalls:
    """The calls of vLLM 0.31 and later, which take the context of a request, too."""

    def __init__(self, manager: Any) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self.manager = manager
        self.new_context, self.hit = ReqContext, LookupResult.HIT
        self.number = 0
        self.context: Any = None

    def expect(self, keys: list[bytes]) -> None:
        """Take the keys of the next request, outside the clock."""
        if self.context is not None:
            self.manager.on_request_finished(self.context)
        self.number += 1
        self.keys, self.context = keys, self.new_context(str(self.number))
        for place, key in enumerate(keys):
            self.context.set_offload_key_position(key, (place + 1) * BLOCK_TOKENS)
        self.manager.on_new_request(self.context)

    def lookup(self) -> None:
        """Look keys up to the first that misses."""
        for key in self.keys:
            if self.manager.lookup(key, self.context) != self.hit:
                break

    def touch(self) -> None:
        """Touch all keys."""
        self.manager.touch(self.keys, self.context)

    def load(self) -> None:
        """Do one load."""
        self.manager.prepare_load(self.keys, self.context)
        self.manager.complete_load(self.keys, self.context)

    def store(self) -> None:
        """Do one store."""
        self.manager.prepare_store(self.keys, self.context)
        self.manager.complete_store(self.keys, self.context)


def put_aside(package: str) -> dict[str, ModuleType]:
    """Forget the modules of a package, so that another of its name can be imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def released_manager(sdist: Path, folder: Path) -> Build:
    """Return the maker of the manager in an sdist, imported without the rest of vLLM."""
    with tarfile.open(sdist) as archive:
        files = [member for member in archive if MANAGERS in member.name]
        archive.extractall(folder, files, filter="data")
    (root,) = folder.iterdir()
    names = root / "vllm/v1/core/kv_cache_utils.py"  # they import one name of it, a type
    names.parent.mkdir(parents=True)
    names.write_text("BlockHash = bytes\n")
    (root / "vllm/__init__.py").touch()  # a package before that of a vLLM that is installed
    kept = put_aside("vllm")
    sys.path.insert(0, str(root))
    released = importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
    sys.path.remove(str(root))
    put_aside("vllm")
    sys.modules.update(kept)
    return lambda capacity, policy: BlockCalls(released(BLOCK_TOKENS, capacity, policy))


def built_manager(folder: Path) -> Build:
    """Return the maker of the manager of a kvoffload that is built in a folder."""
    modules: dict[str, ModuleType] = {}

    def build(capacity: int, policy: str) -> BlockCalls:
        kept = put_aside("kvoffload")
        sys.modules.update(modules)
        sys.path.insert(0, str(folder))
        package = importlib.import_module("kvoffload")
        manager = package.CPUOffloadingManager(BLOCK_TOKENS, capacity, policy)
        sys.path.remove(str(folder))
        modules.update(put_aside("kvoffload"))
        sys.modules.update(kept)
        if package.IMPLEMENTATION != "compiled" or folder not in Path(package.__file__).parents:
            raise SystemExit(f"--build must be a folder with kvoffload built in it, got {folder}")
        return BlockCalls(manager)

    return build


def own_manager(capacity: int, policy: str) -> BlockCalls:
    """Make the manager that is to be measured."""
    return BlockCalls(kvoffload.CPUOffloadingManager(BLOCK_TOKENS, capacity, policy))


def installed_managers() -> dict[str, Build]:
    """Return the makers of the installed vLLM's manager, and of ours in it; none without vLLM."""
    if find_spec("vllm") is None:
        return {}
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from kvoffload.integrations.vllm import KVOffloadManager

    return {
        "vllm": lambda capacity, policy: RequestCalls(CPUOffloadingManager(capacity, policy)),
        "in vllm": lambda capacity, policy: RequestCalls(KVOffloadManager(capacity, policy)),
    }


def compare(
    builds: dict[str, Build], capacity: int, policy: str, rounds: int
) -> list[tuple[str, dict[str, float]]]:
    """Return the name of the call, and the median time of each side in ns per call."""
    sides = {name: build(capacity, policy) for name, build in builds.items()}
    held = make_keys(0, capacity)
    for side in sides.values():
        for start in range(0, capacity, REQUEST):
            side.expect(held[start : start + REQUEST])
            side.store()
    fresh = iter(range(1, 10**9))

    def expect(first: int, count: int) -> None:
        keys = make_keys(first, count)
        for side in sides.values():
            side.expect(keys)

    def hits(number: int) -> None:
        expect(number * 7919 % (capacity // 2 // REQUEST) * REQUEST, REQUEST)

    def misses(_: int) -> None:
        expect(10**9 + next(fresh) * REQUEST, REQUEST)

    def long_prompt(_: int) -> None:
        expect(10**9 + next(fresh) * LONG_PROMPT, LONG_PROMPT)

    cases: list[tuple[str, str, Callable[[int], None], int]] = [
        ("lookup that hits", "lookup", hits, rounds),
        ("touch", "touch", hits, rounds),
        ("load", "load", hits, rounds),
        ("lookup that misses at once", "lookup", long_prompt, rounds // 4),
        ("store with eviction", "store", misses, rounds),
    ]
    found = []
    for name, call, prepare, times in cases:
        calls = {side: getattr(calls, call) for side, calls in sides.items()}
        medians = interleave(
            {side: lambda _, call=call: call() for side, call in calls.items()}, times, prepare
        )
        found.append((name, medians))
    return found


def serve(manager: Any, prompts: list[list[bytes]]) -> None:
    """Serve every prompt: load the blocks that hit and store the others."""
    for keys in prompts:
        num_hits = manager.lookup(keys)
        manager.touch(keys)
        if num_hits:
            manager.prepare_load(keys[:num_hits])
            manager.complete_load(keys[:num_hits])
        if manager.prepare_store(keys) is not None:
            manager.complete_store(keys)


def compare_replays(released: Build, path: Path, rounds: int) -> Table:
    """Return the CPU time of a trace with the released manager, and its ratio to ours."""
    trace = DecodedTrace.of(Trace(path))
    replays = Replays(trace)
    keys = replays.keys()
    prompts = [[keys[block] for block in row] for row in trace.rows()]
    capacity = trace.unique_blocks // 20
    builds = {"released": released, "the same calls": own_manager}
    managers: dict[str, Any] = {}

    def medians(policy: str) -> dict[str, float]:
        def prepare(_: int) -> None:
            managers.update(
                (name, build(capacity, policy).manager) for name, build in builds.items()
            )

        return interleave(
            {
                "released": lambda _: serve(managers["released"], prompts),
                "the same calls": lambda _: serve(managers["the same calls"], prompts),
                "replay": lambda _: replays.of(Configuration(policy=policy, host=capacity)),
            },
            rounds,
            prepare,
            clock=process_time_ns,
        )

    table = Table("policy", "blocks", *builds, "replay")
    for policy in ("lru", "arc"):
        whole, *others = medians(policy).values()
        ratios = [f"{whole / median:.1f}" for median in others]
        table.add_row(policy, f"{capacity:,}", f"{whole / 1e9:.2f} s", *ratios)
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path, help="vllm-0.19.0.tar.gz, from PyPI")
    parser.add_argument("--build", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--blocks", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, help="default 400, of a trace 5")
    parser.add_argument("--replay", type=Path, metavar="TRACE")
    arguments = parser.parse_args()
    if kvoffload.IMPLEMENTATION != "compiled":
        parser.error("needs the compiled implementation")
    with tempfile.TemporaryDirectory() as folder:
        builds = {"released": released_manager(arguments.sdist, Path(folder))}
        if arguments.replay:
            rounds = arguments.rounds or 5
            Console().print(compare_replays(builds["released"], arguments.replay, rounds))
            return
        builds |= {str(path): built_manager(path.resolve()) for path in arguments.build}
        builds |= installed_managers() | {"kvoffload": own_manager}
        table = Table("policy", "blocks", "call", *builds)
        for capacity in arguments.blocks:
            for policy in ("lru", "arc"):
                for name, medians in compare(builds, capacity, policy, arguments.rounds or 400):
                    released = medians.pop("released")
                    ratios = [f"{released / median:.1f}" for median in medians.values()]
                    table.add_row(
                        policy, f"{capacity:,}", name, f"{released / 1000:.1f} us", *ratios
                    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
