"""Count the instructions of the hot paths, which do not depend on the machine's other work.

usage: instructions.py TREE [BASE]

Prints the instructions per block of the compiled package in the folder TREE, under callgrind; with
BASE, a folder with another build, also the ratio of the two. The exit status is 1 if one is above
1.03, or 1 + KVO_TOLERANCE. Two counts of one build differ by less than 1 %: the key of the index's
hash is random.

Then prints how the instructions of a call grow if a size that it must not depend on is ten times as
large. The exit status is 1 if they grow by more than a quarter: a heap may be a little deeper.
"""

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ALLOWED = 1 + float(os.environ.get("KVO_TOLERANCE", "0.03"))
ALLOWED_GROWTH = 1.25
REQUEST, ROUNDS = 128, 16
CAPACITY = 2 * ROUNDS * REQUEST
SIZES = (500, 5_000)
Request = list[bytes]
HotPath = tuple[str, Callable[[Any, Any], object], Any, list[Request]]


def requests(first: int, count: int) -> list[Request]:
    """Make requests of unique keys: a digest of 32 bytes and a group suffix."""
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


def hot_paths() -> Iterator[HotPath]:
    """Yield the name, the call, the manager and the requests of each hot path."""
    from kvoffload import CPUOffloadingManager
    from kvoffload._sampling import REPEATABLE, secrets_from

    resident = requests(0, CAPACITY // REQUEST)
    known = resident[::-2]  # backwards, with gaps: the order of the requests predicts nothing
    for policy in ("lru", "arc", "hit-density"):
        with secrets_from(REPEATABLE):  # the sample of hit density costs what is drawn
            full, empty = (CPUOffloadingManager(16, CAPACITY, policy) for _ in range(2))
        for request in resident:
            store(full, request)
        yield f"lookup, {policy}", CPUOffloadingManager.lookup, full, known
        yield f"touch, {policy}", CPUOffloadingManager.touch, full, known
        yield f"load, {policy}", load, full, known
        yield f"store, {policy}", store, empty, requests(10_000, ROUNDS)
        yield f"store with eviction, {policy}", store, full, requests(20_000, ROUNDS)


def growing_paths() -> Iterator[HotPath]:
    """Yield the paths that must cost the same at each size; the name ends with the size."""
    from kvoffload import CPUOffloadingManager
    from kvoffload.policies import registry

    misses = requests(30_000, 1 + ROUNDS)
    for size in SIZES:
        manager = CPUOffloadingManager(16, 8)
        rest = list(islice(cycle(misses[0]), size - 1))
        batches = [[*request[:1], *rest] for request in misses[1:]]
        manager.lookup(batches[0])  # makes room for as many
        yield f"lookup that misses at once, {size}", CPUOffloadingManager.lookup, manager, batches
    prepare_store = CPUOffloadingManager.prepare_store
    # A policy that decides on admission stores none of these blocks.
    entries = map(registry.entry, registry.names())
    for policy in (entry.name for entry in entries if not entry.learns_by_request):
        for size in SIZES:
            for what, call in (("store", store), ("prepare_store", prepare_store)):
                manager = pinned_by_loads(policy, 2 * size, length=2)
                blocks = [request[:1] for request in misses]
                manager.prepare_store(blocks.pop())  # meets all of them, once
                yield f"{what} past chains in use, {policy}, {size}", call, manager, blocks
    blocks = [request[:1] for request in misses[1:]]
    for policy in registry.names():
        for size in SIZES:
            name = f"{policy}, {size}"
            manager = pinned_by_loads(policy, size, length=50, idle=2 * ROUNDS)
            yield f"first stores after loads, {name}", prepare_store, manager, blocks
            if policy != "sieve":  # its hand clears the marks of all idle blocks first
                manager = pinned_by_loads(policy, size, length=10)
                yield f"first stores after loads of tails, {name}", prepare_store, manager, blocks


def pinned_by_loads(policy: str, num_blocks: int, length: int, idle: int = 0) -> Any:
    """Fill a manager with chains, held by loads: whole ones and some idle blocks, or used tails."""
    from kvoffload import CPUOffloadingManager

    manager = CPUOffloadingManager(16, num_blocks + idle, policy)
    count = (num_blocks + idle) // REQUEST + 1
    blocks = [block for request in requests(50_000, count) for block in request]
    chains = [blocks[start : start + length] for start in range(0, num_blocks, length)]
    for chain in [*chains, blocks[num_blocks : num_blocks + idle]]:
        if not idle:
            manager.touch(chain)
        store(manager, chain)
        if not idle:
            manager.touch(chain)
    for chain in chains:
        manager.prepare_load(chain[0 if idle else 1 :])
    return manager


def work(paths: Callable[[], Iterator[HotPath]]) -> None:
    """Take each path between two marks, and print its name.

    A mark is a call of getppid in the C library, which callgrind reacts to and no other code makes.
    """
    for name, call, manager, batches in list(paths()):
        gc.collect()
        gc.disable()
        os.getppid()
        for batch in batches:
            call(manager, batch)
        os.getppid()
        print(name)


def count(tree: str, paths: str) -> dict[str, int]:
    """Return the instructions of each of some paths, of the package in a folder."""
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
        command += [sys.executable, __file__, paths]
        names = subprocess.check_output(command, env=environment, text=True).splitlines()
        # At its n-th mark callgrind writes at.n: the instructions since the mark before.
        counts = {}
        for number, name in enumerate(names, 1):
            text = Path(folder, f"at.{2 * number}").read_text(encoding="utf-8")
            counts[name] = int(re.findall(r"^totals: (\d+)", text, re.MULTILINE)[0])
    return counts


def growth(counts: dict[str, int]) -> float:
    """Print how the paths grow; return the greatest growth."""
    least, most = SIZES
    grown = [1.0]
    for name, instructions in counts.items():
        what, _, size = name.rpartition(", ")
        if size == str(most):
            before = counts[f"{what}, {least}"]
            grown.append(instructions / before)
            line = f"{what:44} {instructions / ROUNDS:8.1f} instructions per call"
            print(f"{line} {before / ROUNDS:8.1f} at {least} {grown[-1]:8.4f}")
    return max(grown)


def main(tree: str, base: str | None = None) -> int:
    """Print the tables; return 1 if a path of `tree` takes or grows more than is allowed."""
    before = count(base, "hot_paths") if base else {}
    ratios = [1.0]
    for name, instructions in count(tree, "hot_paths").items():
        line = f"{name:32} {instructions / (ROUNDS * REQUEST):8.1f} instructions per block"
        if name in before:
            ratios.append(instructions / before[name])
            line += f" {before[name] / (ROUNDS * REQUEST):8.1f} before {ratios[-1]:8.4f}"
        print(line)
    worst, most_grown = max(ratios), growth(count(tree, "growing_paths"))
    if base:
        print(f"result: at worst {worst:.4f} of the instructions at the base, {ALLOWED:g} allowed")
    print(f"result: {SIZES[1] // SIZES[0]} times the size takes at worst {most_grown:.4f} of them")
    return int(worst > ALLOWED or most_grown > ALLOWED_GROWTH)


if __name__ == "__main__":
    if sys.argv[1:2] in (["hot_paths"], ["growing_paths"]):
        work(globals()[sys.argv[1]])
    elif len(sys.argv) in (2, 3):
        sys.exit(main(*sys.argv[1:]))
    else:
        sys.exit(__doc__)
