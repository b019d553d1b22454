"""Compare requests with a loop in C over the same nodes and hash, in turns in one process.

Usage, with the ``build`` extra and a C compiler::

    python asv_benchmarks/limit.py [--blocks N] [--rounds N]

The loop (``limit_loop.pyx``, built in a temporary folder) does what no manager can avoid. A request
is begun, looked up, loaded, stored and finished; both sides have as many blocks and get the same
requests of 128. Prints the ratios of the medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import serve
from ratios import REQUEST, ROOT, fill, interleave, make_keys
from rich.console import Console
from rich.table import Table

from kvoffload import IMPLEMENTATION, CPUOffloadingManager

POLICIES = ("lru", "arc", "s3fifo", "hit-density")
BUILD = """
from Cython.Build import cythonize
from setuptools import Extension, setup

core, source = {core!r}, {source!r}
extension = Extension("limit_loop", [source], include_dirs=[core], extra_compile_args=["-O3"])
setup(ext_modules=cythonize([extension], include_path=[{root!r}], build_dir="c", quiet=True))
"""


def new_loop(blocks: int, folder: str) -> Any:
    """Build the loop; return one that has room for `blocks` keys."""
    source = Path(__file__).with_name("limit_loop.pyx")
    core = ROOT / "kvoffload" / "_core"
    script = Path(folder, "setup.py")
    script.write_text(BUILD.format(core=str(core), source=str(source), root=str(ROOT)))
    command = [sys.executable, script.name, "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = Path(folder).glob("limit_loop*.so")
    spec = importlib.util.spec_from_file_location("limit_loop", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Loop(blocks)


def ratios(loop: Any, blocks: int, rounds: int, make: Callable[[int], list[bytes]]) -> list[str]:
    """Return how many times as long as the loop a request takes under each policy."""
    managers = {policy: CPUOffloadingManager(16, blocks, policy) for policy in POLICIES}
    keys = make_keys(0, blocks)
    for manager in managers.values():
        fill(manager, keys)
    for start in range(0, blocks, REQUEST):
        loop.serve(keys[start : start + REQUEST])
    request: list[bytes] = []

    def prepare(number: int) -> None:
        request[:] = make(number)

    sides: dict[str, Callable[[int], object]] = {"loop": lambda _: loop.serve(request)}
    for policy, manager in managers.items():
        sides[policy] = lambda _, manager=manager: serve(manager, request)
    least, *others = interleave(sides, rounds, prepare).values()
    return [f"{least / 1000:.1f} us", *(f"{median / least:.2f}" for median in others)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2000)
    given = parser.parse_args()
    if IMPLEMENTATION != "compiled":
        parser.error("needs the compiled implementation")
    blocks = given.blocks // REQUEST * REQUEST

    def hits(number: int) -> list[bytes]:
        return make_keys(number * 7919 % (blocks // REQUEST) * REQUEST, REQUEST)

    def misses(number: int) -> list[bytes]:
        return make_keys(10**9 + number * REQUEST, REQUEST)

    table = Table("request of", "loop", *POLICIES)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("hits", hits), ("misses", misses)):
            table.add_row(name, *ratios(new_loop(blocks, folder), blocks, given.rounds, make))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
