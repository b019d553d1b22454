"""Print how much faster the compiled twin is than the Python twin, and the cost per block.

Every figure is a ratio of medians from one process in which the sides take turns, so that a noisy
machine disturbs both alike. Usage::

    python asv_benchmarks/ratios.py [--quick] [--rows PATTERN] [--json]
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import random
import re
import statistics
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from os import devnull, environ
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from kvoffload.policies import registry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import _compiled, _python  # noqa: E402 - they are beside this folder

COMPILED = {**environ, "KVOFFLOAD_PURE_PYTHON": "0"}
TRACES = Path(environ.get("KVOFFLOAD_TRACES") or devnull)
REQUEST = 128
Sides = dict[str, Callable[[int], Any]]


@dataclass(frozen=True)
class Row:
    """One line of the table: `must` and `aim` bound `value`, from below unless `at_most`."""

    name: str
    value: float
    unit: str
    must: float
    aim: float
    at_most: bool = False

    def verdict(self) -> str:
        """Return which bound holds."""
        sign = -1 if self.at_most else 1
        if sign * self.value >= sign * self.aim:
            return "aim"
        return "must" if sign * self.value >= sign * self.must else "MISSED"

    def line(self) -> str:
        """Return the line of the table; the aim is for those who change the code."""
        missed = "not kept in this run; on a busy machine ratios vary"
        kept = missed if self.verdict() == "MISSED" else "kept"
        bound = "at most" if self.at_most else "at least"
        return f"{self.name:55} {self.value:8.2f} {self.unit:2} {bound} {self.must:g}: {kept}"


def make_keys(first: int, count: int) -> list[bytes]:
    """Make keys of 36 bytes: a digest and a group suffix, new objects at each call."""
    return [sha256(b"%d" % i).digest() + b"\0\0\0\0" for i in range(first, first + count)]


def interleave(
    sides: Sides,
    rounds: int,
    prepare: Callable[[int], None] | None = None,
    clock: Callable[[], int] = perf_counter_ns,
) -> dict[str, float]:
    """Return the median time of each side in ns; the sides take turns, in changing order."""
    times: dict[str, list[int]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if prepare is not None:
                prepare(number)
            for name in names if number % 2 else reversed(names):
                start = clock()
                sides[name](number)
                times[name].append(clock() - start)
    finally:
        gc.enable()
    return {name: statistics.median(spent) for name, spent in times.items()}


def fill(manager: Any, keys: list[bytes]) -> None:
    """Store keys as requests of REQUEST blocks."""
    for start in range(0, len(keys), REQUEST):
        output = manager.prepare_store(keys[start : start + REQUEST])
        manager.complete_store(output.block_hashes_to_store)


class Pair:
    """Both twins in the same state, and requests that hit them."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self.python = _python.CPUOffloadingManager(16, capacity, policy)
        self.compiled = _compiled.CPUOffloadingManager(16, capacity, policy)
        keys = make_keys(0, capacity)
        for manager in (self.python, self.compiled):
            fill(manager, keys)

    def hits(self, *, chains: bool) -> Callable[[int], list[bytes]]:
        """Return a maker of requests that hit: stored in a row, or scattered over the cache."""

        def make(number: int) -> list[bytes]:
            rng = random.Random(number)
            if chains:
                return make_keys(rng.randrange(self.capacity // REQUEST) * REQUEST, REQUEST)
            numbers = rng.sample(range(self.capacity), REQUEST)
            return [make_keys(number, 1)[0] for number in numbers]

        return make

    def misses(self, number: int) -> list[bytes]:
        """Make a request of blocks that were never seen."""
        return make_keys(10**9 + self.capacity + number * REQUEST, REQUEST)

    def compare(
        self,
        call: Callable[[Any, list[bytes]], Any],
        make: Callable[[int], list[bytes]],
        rounds: int,
    ) -> float:
        """Return the ratio of the median times, Python over compiled, of a call on each request.

        A request is made just before both sides get it, as an engine hashes a prompt just before
        it asks: its keys are in the caches for both.
        """
        request: list[bytes] = []

        def prepare(number: int) -> None:
            request[:] = make(number)

        medians = interleave(
            {
                "python": lambda _: call(self.python, request),
                "compiled": lambda _: call(self.compiled, request),
            },
            rounds,
            prepare,
        )
        return medians["python"] / medians["compiled"]


def load(manager: Any, request: list[bytes]) -> None:
    """Do one load."""
    manager.prepare_load(request)
    manager.complete_load(request)


def store(manager: Any, request: list[bytes]) -> None:
    """Do one store."""
    manager.prepare_store(request)
    manager.complete_store(request)


def serve(manager: Any, request: list[bytes]) -> None:
    """Store a request, as an engine does."""
    with manager.begin(request) as served:
        served.prepare_store()
    served.complete_store()


def call_rows(capacities: list[int], rounds: int) -> Iterator[Row]:
    """Compare single calls."""
    for capacity in capacities:
        for policy in ("lru", "arc"):
            pair = Pair(policy, capacity)
            where = f"{policy} {capacity:,}"
            chains, scattered = pair.hits(chains=True), pair.hits(chains=False)
            aim = 20 if capacity >= 1_000_000 else 15
            ratio = pair.compare(lambda m, r: m.lookup(r), chains, rounds)
            yield Row(f"lookup, chains, {where}", ratio, "x", 8, aim)
            ratio = pair.compare(lambda m, r: m.lookup(r), scattered, rounds)
            yield Row(f"lookup, scattered, {where}", ratio, "x", 8, 15)
            ratio = pair.compare(lambda m, r: m.touch(r), chains, rounds)
            yield Row(f"touch, {where}", ratio, "x", 4, 8)
            ratio = pair.compare(load, chains, rounds)
            yield Row(f"prepare + complete load, {where}", ratio, "x", 10, 18)
            ratio = pair.compare(store, pair.misses, rounds)
            aim = 40 if policy == "arc" else 15
            yield Row(f"store with eviction, {where}", ratio, "x", 10, aim)
    for policy in ("lru", "arc"):
        pair = Pair(policy, 0)
        pair.python = _python.CPUOffloadingManager(16, rounds * REQUEST, policy)
        pair.compiled = _compiled.CPUOffloadingManager(16, rounds * REQUEST, policy)
        ratio = pair.compare(store, pair.misses, rounds)
        yield Row(f"store without eviction, {policy}", ratio, "x", 10, 16)


def trace_path(name: str) -> Path:
    """Return the path of a trace: a file, or one of the folder ``KVOFFLOAD_TRACES``."""
    for path in (TRACES / f"{name}.jsonl.gz", Path(name)):
        if path.exists():
            return path
    folder = environ.get("KVOFFLOAD_TRACES")
    sys.exit(f"KVOFFLOAD_TRACES must name a folder with {name}.jsonl.gz, got {folder!r}")


def conversation() -> list[list[bytes]]:
    """Read the requests of a production trace; without the trace, none and a note."""
    path = TRACES / "mooncake_conversation.jsonl.gz"
    if not path.exists():
        print(f"no {path.name} in KVOFFLOAD_TRACES: replays are left out", file=sys.stderr)
        return []
    with gzip.open(path) as lines:
        ids = [json.loads(line)["hash_ids"] for line in lines]
    keys = {i: sha256(b"%d" % i).digest() for request in ids for i in request}
    return [[keys[i] for i in request] for request in ids]


def replay(manager: Any, requests: list[list[bytes]]) -> None:
    """Make an engine's calls per request."""
    for hashes in requests:
        request = manager.begin(hashes)
        hits = request.lookup()
        if hits:
            request.prepare_load(0, hits)
            request.complete_load(0, hits)
        request.prepare_store()
        request.finish()
        request.complete_store()


def request_rows(rounds: int) -> Iterator[Row]:
    """Compare the cycle of a request of 512 resident blocks with the same six bare calls."""
    size = 512

    def bare(manager: Any, keys: list[bytes]) -> None:
        manager.touch(keys)
        found = manager.lookup(keys)
        manager.prepare_load(keys[:found])
        manager.complete_load(keys[:found])
        manager.prepare_store(keys)
        manager.touch(keys)

    def by_request(manager: Any, keys: list[bytes]) -> None:
        request = manager.begin(keys)
        found = request.lookup()
        request.prepare_load(0, found)
        request.complete_load(0, found)
        request.prepare_store()
        request.finish()

    for policy in ("lru", "arc"):
        ratio = _request_ratio(policy, size, bare, by_request, rounds)
        name = f"request of {size} blocks against bare calls, {policy}"
        yield Row(name, ratio, "x", 0.6, 0.55, at_most=True)


def _request_ratio(
    policy: str,
    size: int,
    bare: Callable[[Any, list[bytes]], None],
    by_request: Callable[[Any, list[bytes]], None],
    rounds: int,
) -> float:
    manager = _compiled.CPUOffloadingManager(16, 100_000, policy)
    fill(manager, make_keys(0, 100_000))
    prompts: list[list[bytes]] = []

    def prepare(number: int) -> None:
        # Both sides get key objects of their own, as an engine hashes a prompt just before.
        first = random.Random(number).randrange(100_000 - size)
        prompts[:] = [make_keys(first, size), make_keys(first, size)]
        manager.touch(prompts[0])
        manager.touch(prompts[1])

    sides: Sides = {
        "bare": lambda _: bare(manager, prompts[0]),
        "request": lambda _: by_request(manager, prompts[1]),
    }
    medians = interleave(sides, rounds, prepare)
    return medians["request"] / medians["bare"]


def replay_rows(rounds: int) -> Iterator[Row]:
    """Compare whole replays of the trace, manager calls only."""
    requests = conversation()
    cells = [("lru", 10, 15), ("arc", 12, 25)] if requests else []
    for policy, must, aim in cells:
        for capacity in (10_000, 50_000):

            def one(twin: Any, policy: str = policy, capacity: int = capacity) -> None:
                replay(twin.CPUOffloadingManager(512, capacity, policy), requests)

            medians = interleave(
                {
                    "python": lambda _, one=one: one(_python),
                    "compiled": lambda _, one=one: one(_compiled),
                },
                rounds,
            )
            ratio = medians["python"] / medians["compiled"]
            yield Row(
                f"replay of mooncake_conversation, {policy} {capacity:,}", ratio, "x", must, aim
            )


def density_rows(rounds: int) -> Iterator[Row]:
    """Compare hit density with LRU, compiled: replays of the trace, and memory, ghosts full."""
    requests = conversation()
    unique = len({key for request in requests for key in request})
    for percent in (0.5, 1, 2, 5, 10, 20, 40) if requests else ():
        capacity = int(unique * percent / 100)
        medians = interleave(
            {
                policy: lambda _, policy=policy, capacity=capacity: replay(
                    _compiled.CPUOffloadingManager(512, capacity, policy), requests
                )
                for policy in ("lru", "hit-density?guard=0", "hit-density")
            },
            rounds,
        )
        ratio = medians["hit-density"] / medians["lru"]
        yield Row(f"replay, hit-density against lru, {capacity:,}", ratio, "x", 2.2, 2, True)
        ratio = medians["hit-density"] / medians["hit-density?guard=0"]
        yield Row(f"replay, guard=1 against guard=0, {capacity:,}", ratio, "x", 1.5, 1.3, True)
    figures = {policy: resident_bytes(policy, ghosts=True) for policy in ("lru", "hit-density")}
    guarded = figures["hit-density"]
    yield Row("resident bytes per block, hit-density, ghosts full", guarded, "B", 150, 144, True)
    ratio = guarded / figures["lru"]
    yield Row("resident bytes, hit-density, ghosts full, against lru", ratio, "x", 2.1, 2, True)


def pinned_rows(rounds: int) -> Iterator[Row]:
    """Compare a store with eviction with 50,000 pinned blocks at the old end and with none."""
    capacity, num_pinned = 100_000, 50_000
    keys = make_keys(0, capacity)
    for policy in registry.names():
        managers = {}
        for name in ("none", "pinned"):
            managers[name] = _compiled.CPUOffloadingManager(16, capacity, policy)
            for start in range(0, capacity, REQUEST):
                serve(managers[name], keys[start : start + REQUEST])
        managers["pinned"].prepare_load(keys[:num_pinned])
        requests = [make_keys(capacity + i * REQUEST, REQUEST) for i in range(rounds)]

        def see(i: int, managers: Any = managers, requests: Any = requests) -> None:
            # A policy that decides on admission admits blocks that were asked for before.
            for manager in managers.values():
                manager.touch(requests[i])
                manager.touch(keys[-1:])
                manager.touch(requests[i])

        medians = interleave(
            {
                name: lambda i, manager=manager, requests=requests: store(manager, requests[i])
                for name, manager in managers.items()
            },
            rounds,
            see,
        )
        evicted = {manager.stats()["evicted_blocks"] for manager in managers.values()}
        if evicted != {rounds * REQUEST}:
            raise RuntimeError(f"{policy} evicted {evicted} for these stores")
        ratio = medians["pinned"] / medians["none"]
        yield Row(f"store, 50,000 pinned against none, {policy}", ratio, "x", 1.2, 1.1, True)


def waiting_rows(rounds: int) -> Iterator[Row]:
    """Compare a store of one block past 50,000 chains whose tails are pinned with one past 500."""
    for policy in registry.names():
        managers = {}
        for num_chains in (500, 50_000):
            manager = _compiled.CPUOffloadingManager(16, 2 * num_chains, policy)
            keys = make_keys(0, 2 * num_chains)
            for start in range(0, len(keys), 2):
                serve(manager, keys[start : start + 2])
                manager.prepare_load(keys[start + 1 : start + 2])
            managers[str(num_chains)] = manager
        requests = [[key] for key in make_keys(10**6, rounds)]

        def see(
            i: int, managers: Any = managers, requests: Any = requests, key: Any = keys[:1]
        ) -> None:
            # A policy that decides on admission admits blocks that were asked for before.
            for manager in managers.values():
                manager.touch(requests[i])
                manager.touch(key)
                manager.touch(requests[i])

        medians = interleave(
            {
                name: lambda i, manager=manager, requests=requests: manager.prepare_store(
                    requests[i]
                )
                for name, manager in managers.items()
            },
            rounds,
            see,
        )
        evicted = {manager.stats()["evicted_blocks"] for manager in managers.values()}
        if evicted != {rounds}:
            raise RuntimeError(f"{policy} evicted {evicted} for these stores")
        ratio = medians["50000"] / medians["500"]
        # Heaps are a little deeper.
        yield Row(f"store past 50,000 chains in use, {policy}", ratio, "x", 2, 1.6, True)


def cold_rows(rounds: int) -> Iterator[Row]:
    """Compare a lookup of 1M blocks with a dict's, on keys out of the CPU caches."""
    capacity = 1_000_000
    keys = make_keys(0, capacity)
    manager = _compiled.CPUOffloadingManager(16, capacity, "lru")
    fill(manager, keys)
    plain = dict.fromkeys(keys, 0)
    starts = random.Random(3).sample(range(capacity // REQUEST), min(rounds, capacity // REQUEST))
    request: list[bytes] = []

    def prepare(number: int) -> None:
        request[:] = make_keys(starts[number] * REQUEST, REQUEST)

    medians = interleave(
        {
            "dict": lambda _: [plain.get(key) for key in request],
            "compiled": lambda _: manager.lookup(request),
        },
        len(starts),
        prepare,
    )
    yield Row(
        "lookup, cold, 1,000,000, against dict.get",
        medians["dict"] / medians["compiled"],
        "x",
        8,
        25,
    )


def eviction_rows(rounds: int) -> Iterator[Row]:
    """Time one eviction of 4,096 blocks by ARC."""
    capacity, count = 100_000, 4_096
    spent = []
    for _ in range(rounds):
        policy = _compiled.CPUOffloadingManager(16, capacity, "arc")
        fill(policy, make_keys(0, capacity))
        batch = make_keys(capacity, count)
        start = perf_counter_ns()
        policy.prepare_store(batch)
        spent.append(perf_counter_ns() - start)
    yield Row(
        "ARC, store that evicts 4,096, a victim",
        statistics.median(spent) / count,
        "ns",
        150,
        150,
        True,
    )


def event_rows(rounds: int) -> Iterator[Row]:
    """Compare stores with events on and off."""
    capacity = 100_000
    keys = make_keys(0, capacity)
    for policy in ("lru", "arc"):
        managers = {}
        for name in ("off", "on"):
            managers[name] = _compiled.CPUOffloadingManager(16, capacity, policy, name == "on")
            fill(managers[name], keys)
            managers[name].take_events()
        requests = [make_keys(capacity + i * REQUEST, REQUEST) for i in range(rounds)]

        def step(i: int, manager: Any, requests: list[list[bytes]] = requests) -> None:
            store(manager, requests[i])
            manager.take_events()

        medians = interleave(
            {name: lambda i, m=m: step(i, m) for name, m in managers.items()}, rounds
        )
        yield Row(
            f"store, events on against off, {policy}",
            medians["on"] / medians["off"],
            "x",
            1.15,
            1.15,
            True,
        )


def plain_rows(rounds: int) -> Iterator[Row]:
    """Compare the Python twin with a plain OrderedDict loop without checks."""
    capacity = 100_000
    pair = Pair("lru", capacity)
    blocks: OrderedDict[bytes, Any] = OrderedDict(pair.python.policy.blocks.items())
    make = pair.hits(chains=True)
    requests = [make(number) for number in range(rounds)]

    def plain_lookup(i: int) -> int:
        hits = 0
        for key in requests[i]:
            status = blocks.get(key)
            if status is None or status.ref_cnt < 0:
                break
            hits += 1
        return hits

    def plain_touch(i: int) -> None:
        for key in reversed(requests[i]):
            if key in blocks:
                blocks.move_to_end(key)

    for name, plain in (("lookup", plain_lookup), ("touch", plain_touch)):
        medians = interleave(
            {
                "plain": plain,
                "python": lambda i, name=name: getattr(pair.python, name)(requests[i]),
            },
            rounds,
        )
        ratio = medians["python"] / medians["plain"]
        yield Row(f"Python twin against a plain loop, {name}", ratio, "x", 1.3, 1.3, True)


MEMORY_SCRIPT = """
import os, sys
from hashlib import sha256
from kvoffload import CPUOffloadingManager
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def keys(first, count):
    return [sha256(b"%d" % i).digest() + bytes(4) for i in range(first, first + count)]
def fill(manager, keys):
    for start in range(0, len(keys), 128):
        manager.complete_store(manager.prepare_store(keys[start:start + 128]).block_hashes_to_store)
def ask_for_others(manager, count):
    for start in range(count, 4 * count, 128):
        manager.touch(keys(start, 128))
        manager.touch(keys(0, 1))
        manager.touch(keys(start, 128))
    for start in range(4 * count, 10 * count, 128):
        manager.touch(keys(start, 128))
policy, with_ghosts = sys.argv[1], sys.argv[2] == "True"
count = 200_000
stored = keys(0, count)
warm = CPUOffloadingManager(16, 1024, policy)
fill(warm, stored[:1024])
if with_ghosts:
    ask_for_others(warm, 1024)
before = resident()
manager = CPUOffloadingManager(16, count, policy)
fill(manager, stored)
if with_ghosts:
    ask_for_others(manager, count)
print((resident() - before) / count)
"""


def resident_bytes(policy: str, *, ghosts: bool = False) -> float:
    """Measure bytes per block: growth while 200,000 blocks are stored, keys excluded."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, policy, str(ghosts)]
    return statistics.median(
        float(subprocess.check_output(command, env=COMPILED)) for _ in range(3)
    )


def memory_rows() -> Iterator[Row]:
    """Measure resident bytes per block; up to 10 of them are a huge page that is not full."""
    for policy, must, aim in (("lru", 80, 72), ("arc", 107, 90)):
        figure = resident_bytes(policy)
        yield Row(f"resident bytes per block, {policy}", figure, "B", must, aim, True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds and no large cache")
    parser.add_argument("--rows", default="", help="only groups whose name matches this pattern")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    chosen = parser.parse_args()
    rounds = 20 if chosen.quick else 400
    capacities = [10_000] if chosen.quick else [10_000, 100_000, 1_000_000]
    groups: dict[str, Callable[[], Iterator[Row]]] = {
        "calls": lambda: call_rows(capacities, rounds),
        "request": lambda: request_rows(rounds),
        "replay": lambda: replay_rows(1 if chosen.quick else 5),
        "density": lambda: density_rows(1 if chosen.quick else 7),
        "pinned": lambda: pinned_rows(rounds),
        "waiting": lambda: waiting_rows(rounds),
        "cold": lambda: cold_rows(rounds),
        "eviction": lambda: eviction_rows(1 if chosen.quick else 5),
        "events": lambda: event_rows(rounds),
        "plain": lambda: plain_rows(rounds),
        "memory": memory_rows,
    }
    for name, group in groups.items():
        if not re.search(chosen.rows, name):
            continue
        for row in group():
            if chosen.json:
                print(json.dumps({**asdict(row), "verdict": row.verdict()}), flush=True)
            else:
                print(row.line(), flush=True)


if __name__ == "__main__":
    main()
