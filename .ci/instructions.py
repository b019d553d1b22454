"""Count the instructions of the hot paths, which do not depend on what else the machine does.

usage: instructions.py TREE [BASE]

Prints the instructions a block of the compiled package in the folder TREE, under callgrind; with
BASE, a folder with another build, also the ratio of the two. The exit status is 1 if one is above
1.03, or 1 + KVO_TOLERANCE. Two counts of one build differ by less than 1 %: the index keys its
hash by chance.
"""

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ALLOWED = 1 + float(os.environ.get("KVO_TOLERANCE", "0.03"))
REQUEST, ROUNDS = 128, 16
CAPACITY = 2 * ROUNDS * REQUEST
Request = list[bytes]


def requests(first: int, count: int) -> list[Request]:
    """Make requests of keys that no other request has: a digest of 32 bytes and a group suffix."""
    keys = [
        sha256(b"%d" % block).digest() + b"\0\0\0\0"
        for block in range(first * REQUEST, (first + count) * REQUEST)
    ]
    return [keys[start : start + REQUEST] for start in range(0, len(keys), REQUEST)]


def store(manager: Any, request: Request) -> None:
    """Do one store."""
    manager.prepare_store(request)
    manager.complete_store(request)


def load(manager: Any, request: Request) -> None:
    """Do one load."""
    manager.prepare_load(request)
    manager.complete_load(request)


def hot_paths() -> Iterator[tuple[str, Callable[[Any, Any], object], Any, list[Request]]]:
    """Give the name, the call, the manager and the requests of each hot path."""
    from kvoffload import CPUOffloadingManager

    resident = requests(0, CAPACITY // REQUEST)
    known = resident[::-2]  # backwards, with gaps: no guess is right by the order of the requests
    for policy in ("lru", "arc"):
        full, empty = (CPUOffloadingManager(16, CAPACITY, policy) for _ in range(2))
        for request in resident:
            store(full, request)
        yield f"lookup, {policy}", CPUOffloadingManager.lookup, full, known
        yield f"touch, {policy}", CPUOffloadingManager.touch, full, known
        yield f"load, {policy}", load, full, known
        yield f"store, {policy}", store, empty, requests(10_000, ROUNDS)
        yield f"store with eviction, {policy}", store, full, requests(20_000, ROUNDS)


def work() -> None:
    """Take each path between two marks, and print its name.

    A mark is a call of getppid in the C library, which callgrind heeds and nothing else makes.
    """
    paths = list(hot_paths())
    gc.collect()
    gc.disable()
    for name, call, manager, batches in paths:
        os.getppid()
        for batch in batches:
            call(manager, batch)
        os.getppid()
        print(name)


def count(tree: str) -> dict[str, float]:
    """Give the instructions a block of each hot path of the package in a folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tree).resolve()),
        "PYTHONHASHSEED": "0",
        "KVOFFLOAD_PURE_PYTHON": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--dump-before=getppid"]
        command += [f"--callgrind-out-file={folder}/at", f"--log-file={folder}/log"]
        command += [sys.executable, __file__, "work"]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        names = done.stdout.splitlines()
        # At its n-th mark callgrind writes at.n: what was spent since the mark before.
        totals = [
            re.search(r"^totals: (\d+)", Path(folder, f"at.{2 * number}").read_text(), re.MULTILINE)
            for number in range(1, len(names) + 1)
        ]
    return {
        name: int(total[1]) / (ROUNDS * REQUEST)
        for name, total in zip(names, totals, strict=True)
        if total is not None
    }


def main(tree: str, base: str | None = None) -> int:
    """Print the table; give 1 if a path of `tree` takes more than is allowed."""
    before = count(base) if base else {}
    ratios = []
    for name, instructions in count(tree).items():
        line = f"{name:26} {instructions:8.1f} instructions a block"
        if name in before:
            ratios.append(instructions / before[name])
            line += f" {before[name]:8.1f} before {ratios[-1]:8.4f}"
        print(line)
    if not base:
        return 0
    worst = max(ratios)
    print(f"result: at worst {worst:.4f} of the instructions at the base, {ALLOWED:g} allowed")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    elif len(sys.argv) in (2, 3):
        sys.exit(main(*sys.argv[1:]))
    else:
        sys.exit(__doc__)
