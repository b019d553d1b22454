"""Seeded workloads that each favour another policy, and the ways to serve them.

A request is a list of block numbers; the same prefix always has the same numbers.
``python asv_benchmarks/stress.py`` prints how hit density fares on each.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from kvoffload import CPUOffloadingManager
from kvoffload.testing.policies import check_invariants
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


def loops(seed: int, requests: int, noise: float = 0.1) -> list[Request]:
    """Go through the same prompts over and over, as an evaluation does: LRU never hits."""
    draw, fresh = random.Random(seed), fresh_numbers()
    prompts = [fresh(draw.randrange(6, 14)) for _ in range(200)]
    return [
        list(draw.choice(prompts)) if draw.random() < noise else list(prompts[number % 200])
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


def twice(seed: int, requests: int) -> list[Request]:
    """Ask two questions about each document, some time apart, and none after that."""
    draw, fresh = random.Random(seed), fresh_numbers()
    system = fresh(3)
    served: list[Request] = []
    waiting: list[Request] = []
    for _ in range(requests):
        if waiting and draw.random() < 0.5:
            text = waiting.pop(draw.randrange(len(waiting)))
        else:
            text = fresh(draw.randrange(5, 40))
            waiting = [*waiting, text][-40:]
        served.append(system + text + fresh(draw.randrange(1, 4)))
    return served


def chats(seed: int, requests: int, live: int = 60) -> list[Request]:
    """Continue one of many chats behind a few system prompts, a recent one more likely."""
    draw, fresh = random.Random(seed), fresh_numbers()
    systems = [fresh(draw.randrange(2, 12)) for _ in range(6)]
    weights = [1 / rank for rank in range(1, 7)]
    served: list[Request] = []
    under_way: list[Request] = []  # the most recent last
    for _ in range(requests):
        if under_way and draw.random() < 0.8:
            chat = under_way.pop(-1 - int(len(under_way) * draw.random() ** 2))
        else:
            chat = list(draw.choices(systems, weights)[0])
        chat = chat + fresh(draw.randrange(1, 6) if draw.random() < 0.8 else 12)
        served.append(chat)
        under_way = [*under_way, chat][-live:]
    return served


def agents(seed: int, requests: int, live: int = 8) -> list[Request]:
    """Take quick steps in a few agents' contexts, which grow, branch and are given up."""
    draw, fresh = random.Random(seed), fresh_numbers()
    tools = [fresh(18), fresh(12), fresh(28)]
    contexts = [tools[0] + fresh(2) for _ in range(live)]
    served: list[Request] = []
    number = 0
    for _ in range(requests):
        if draw.random() < 0.3:
            number = draw.randrange(live)
        context = contexts[number]
        served.append(list(context))
        ends = draw.random()
        if ends < 0.05:  # a new task
            contexts[number] = draw.choices(tools, (6, 3, 1))[0] + fresh(2)
        elif ends < 0.08:  # back to an earlier step
            contexts[number] = context[: draw.randrange(12, len(context))] + fresh(1)
        else:
            contexts[number] = context + fresh(draw.randrange(1, 5))
    return served


def mixture(seed: int, requests: int) -> list[Request]:
    """Mix chats, agents, questions over documents and prompts that are seen once."""
    draw = random.Random(seed)
    parts = [
        iter(kind(seed + number, requests))
        for number, kind in enumerate((chats, agents, documents, twice))
    ]
    fresh = fresh_numbers()
    served = []
    for _ in range(requests):
        number = draw.choices(range(5), (4, 3, 2, 1, 3))[0]
        request = fresh(draw.randrange(2, 30)) if number == 4 else next(parts[number])
        served.append([block + (number + 1) * 10**6 for block in request])
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
    "twice": twice,
    "chats": chats,
    "agents": agents,
    "mixture": mixture,
}


def repeated(requests: list[Request], share: float) -> list[Request]:
    """Let a share of the requests come twice in a row, as retries and second answers do."""
    draw = random.Random(len(requests))
    served: list[Request] = []
    for request in requests:
        served.append(request)
        if draw.random() < share:
            served.append(list(request))
    return served[: len(requests)]


CLASSICS = ("lru", "arc-classic")
GUARDED = "hit-density"


def serve(manager: Any, requests: Iterable[Request], *, loads: int = 0, stores: int = 0) -> int:
    """Serve requests by the protocol of a connector; return the hits.

    The load of each ends so many requests later, and its store, which begins then, so many after.
    """
    hits = 0
    loading: deque[tuple[Any, int]] = deque()
    storing: deque[Any] = deque()

    def end(loads: int, stores: int) -> None:
        while len(loading) > loads:
            request, found = loading.popleft()
            request.complete_load(0, found)
            request.prepare_store()
            request.finish()
            storing.append(request)
        while len(storing) > stores:
            storing.popleft().complete_store()

    for numbers in requests:
        request = manager.begin(block_hashes(*numbers))
        found = request.lookup()
        hits += found
        request.prepare_load(0, found)
        loading.append((request, found))
        end(loads, stores)
    end(0, 0)
    return hits


def hit_ratios(
    requests: list[Request],
    capacity: int,
    *,
    loads: int = 0,
    stores: int = 0,
    policies: Iterable[str] = (*CLASSICS, GUARDED),
) -> dict[str, float]:
    """Return the block hit ratio of each policy, caches empty at first."""
    ratios = {}
    for policy in policies:
        manager = CPUOffloadingManager(16, capacity, policy)
        hits = serve(manager, requests, loads=loads, stores=stores)
        check_invariants(manager)
        ratios[policy] = hits / sum(map(len, requests))
    return ratios
