"""Seeded workloads that each favour another policy, and the ways to serve them.

A request is a list of block numbers; the same prefix always has the same numbers.
``python -m tests.policies.stress [REQUESTS]`` prints how hit density fares on each.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from kvoffload import CPUOffloadingManager
from tests.blocks import block_hashes

Request = list[int]


def fresh_numbers() -> Callable[[int], Request]:
    """Return a function that gives so many new block numbers."""
    numbers = count()
    return lambda size: [next(numbers) for _ in range(size)]


def popularity(seed: int, requests: int, items: int = 900, exponent: float = 0.9) -> list[Request]:
    """Ask for prompts drawn independently by Zipf's law: frequency is all there is to know."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(4, 16)) for _ in range(items)]
    weights = [rank**-exponent for rank in range(1, items + 1)]
    return draw.choices(prompts, weights, k=requests)


def sessions(seed: int, requests: int, live: int = 12) -> list[Request]:
    """Continue one of a few chats each time, which end after some turns: recency is all."""
    draw, fresh = random.Random(seed), fresh_numbers()
    system = fresh(4)
    chats = [system + fresh(8) for _ in range(live)]
    served = []
    for _ in range(requests):
        number = draw.randrange(live)
        served.append(list(chats[number]))
        chats[number] += fresh(draw.randrange(1, 8))
        if draw.random() < 0.12:
            chats[number] = system + fresh(8)
    return served


def documents(seed: int, requests: int, shared: int = 80) -> list[Request]:
    """Ask a question of its own about a shared document: the ends are never seen again."""
    draw, fresh = random.Random(seed), fresh_numbers()
    system = fresh(3)
    texts = [fresh(draw.randrange(5, 40)) for _ in range(shared)]
    weights = [rank**-0.7 for rank in range(1, shared + 1)]
    return [
        system + text + fresh(draw.randrange(1, 4))
        for text in draw.choices(texts, weights, k=requests)
    ]


def scans(seed: int, requests: int) -> list[Request]:
    """Ask for a few prompts again and again, between many that are seen once."""
    draw, fresh = random.Random(seed), fresh_numbers()
    hot = [fresh(draw.randrange(4, 16)) for _ in range(60)]
    return [
        list(draw.choice(hot)) if draw.random() < 0.5 else fresh(draw.randrange(10, 30))
        for _ in range(requests)
    ]


def loops(seed: int, requests: int) -> list[Request]:
    """Go through the same prompts over and over, as an evaluation does: LRU never hits."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(6, 14)) for _ in range(200)]
    return [
        list(draw.choice(prompts)) if draw.random() < 0.1 else list(prompts[number % 200])
        for number in range(requests)
    ]


def phases(seed: int, requests: int) -> list[Request]:
    """Change what is popular, and the kind of traffic, at once."""
    third = requests // 3
    parts = [popularity(seed, third), sessions(seed + 1, third), popularity(seed + 2, third)]
    offsets = (0, 10**6, 2 * 10**6)
    return [
        [number + offset for number in request]
        for part, offset in zip(parts, offsets, strict=True)
        for request in part
    ]


def uniform(seed: int, requests: int) -> list[Request]:
    """Ask for prompts that are all as popular: there is nothing to learn."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(4, 16)) for _ in range(600)]
    return [list(draw.choice(prompts)) for _ in range(requests)]


def drift(seed: int, requests: int) -> list[Request]:
    """Ask for popular prompts, of which a new one takes the lead every fourth request."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(4, 16)) for _ in range(400 + requests // 4)]
    weights = [rank**-0.9 for rank in range(1, 401)]
    return [
        list(prompts[number // 4 + 399 - draw.choices(range(400), weights)[0]])
        for number in range(requests)
    ]


def alternation(seed: int, requests: int) -> list[Request]:
    """Change between two kinds of traffic, back and forth, every 250 requests."""
    one = popularity(seed, requests)
    other = [[number + 10**6 for number in request] for request in sessions(seed + 1, requests)]
    return [(other if number // 250 % 2 else one)[number] for number in range(requests)]


def rounds(seed: int, requests: int) -> list[Request]:
    """Go through the same prompts over and over, in the same order, and ask for nothing else."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(6, 14)) for _ in range(200)]
    return [list(prompts[number % 200]) for number in range(requests)]


def pairs(seed: int, requests: int) -> list[Request]:
    """Ask for each prompt twice, some time apart, and never again."""
    draw, fresh = random.Random(seed), fresh_numbers()
    served: list[Request] = []
    waiting: list[Request] = []
    for _ in range(requests):
        if waiting and draw.random() < 0.5:
            served.append(waiting.pop(draw.randrange(len(waiting))))
        else:
            served.append(fresh(draw.randrange(4, 16)))
            waiting = [*waiting, served[-1]][-60:]
    return served


WORKLOADS = {
    "popularity": popularity,
    "sessions": sessions,
    "documents": documents,
    "scans": scans,
    "loops": loops,
    "phases": phases,
    "uniform": uniform,
    "drift": drift,
    "alternation": alternation,
    "rounds": rounds,
    "pairs": pairs,
}


def serve(manager: Any, requests: Iterable[Request]) -> int:
    """Serve requests one after the other, by the protocol of a connector; return the hits."""
    hits = 0
    for request in requests:
        hashes = block_hashes(*request)
        manager.touch(hashes)
        found = manager.lookup(hashes)
        hits += found
        if found:
            manager.prepare_load(hashes[:found])
            manager.complete_load(hashes[:found])
        output = manager.prepare_store(hashes)
        manager.touch(hashes)
        if output is not None:
            manager.complete_store(output.block_hashes_to_store)
    return hits


def serve_interleaved(manager: Any, requests: Iterable[Request], in_flight: int) -> int:
    """Serve requests that overlap: loads pin, stores are pending, for `in_flight` requests."""
    hits = 0
    started: deque[tuple[list[bytes], int]] = deque()
    storing: deque[list[bytes]] = deque()
    for request in _with_end(requests, 2 * in_flight):
        if request:
            hashes = block_hashes(*request)
            manager.touch(hashes)
            found = manager.lookup(hashes)
            hits += found
            manager.prepare_load(hashes[:found])
            started.append((hashes, found))
        if len(started) > in_flight or not request:
            if started:
                hashes, found = started.popleft()
                manager.complete_load(hashes[:found])
                output = manager.prepare_store(hashes)
                manager.touch(hashes)
                storing.append(output.block_hashes_to_store if output is not None else [])
            if len(storing) > in_flight or (storing and not started):
                manager.complete_store(storing.popleft())
    return hits


def _with_end(requests: Iterable[Request], length: int) -> Iterator[Request]:
    yield from requests
    for _ in range(length + 2):
        yield []


def hit_ratios(
    requests: list[Request], capacity: int, *, in_flight: int | None = None
) -> dict[str, float]:
    """Return the block hit ratio of LRU, published ARC and hit density, caches empty at first."""
    ratios = {}
    for policy in ("lru", "arc-classic", "hit-density"):
        manager = CPUOffloadingManager(16, capacity, policy)
        if in_flight is None:
            hits = serve(manager, requests)
        else:
            hits = serve_interleaved(manager, requests, in_flight)
        manager._check()
        ratios[policy] = hits / sum(map(len, requests))
    return ratios


def main(num_requests: int) -> None:
    """Print what lies between hit density and the others, over five seeds and six capacities."""
    print(f"{num_requests:,} requests; over the better: worst, mean; over LRU: worst")
    for name, workload in WORKLOADS.items():
        over_better, over_lru = [], []
        for seed in range(1, 6):
            requests = workload(seed, num_requests)
            unique = len({number for request in requests for number in request})
            for percent in (1, 2, 5, 10, 20, 40):
                if unique * percent < 1600:  # a cache of a request or two
                    continue
                ratios = hit_ratios(requests, unique * percent // 100)
                ours, lru = ratios["hit-density"], ratios["lru"]
                over_better.append(ours - max(lru, ratios["arc-classic"]))
                over_lru.append(ours - lru)
        mean = sum(over_better) / len(over_better)
        print(f"{name:22}{min(over_better):16.4f}{mean:9.4f}{min(over_lru):19.4f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
