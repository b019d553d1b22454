"""Seeded workloads that each favour another policy, and the ways to serve them.

A request is a list of block numbers; the same prefix always has the same numbers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

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


WORKLOADS = {
    "popularity": popularity,
    "sessions": sessions,
    "documents": documents,
    "scans": scans,
    "loops": loops,
    "phases": phases,
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
