"""Sessions whose clients say when they return, or that they end, through both twins."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvoffload import Hints
from tests.differential.pairs import OpenPair, Pair, Twins
from tests.differential.workloads import key

SOURCES = 20
"""More than are told apart."""
EXTREMES = (1e-9, 1e12, 1e300)
"""Seconds that are cut to what is counted."""


@dataclass
class Turn:
    """One request of a session, and what its client says of it."""

    blocks: list[bytes]
    now: float
    begin: Hints | None = None
    finish: Hints | None = None
    answer: list[bytes] = field(default_factory=list)


def turns(seed: int, count: int, live: int) -> Iterator[Turn]:
    """Yield the requests of sessions that take turns, most when they were expected."""
    draw = random.Random(seed)
    fresh = iter(range(10**6, 10**9))
    systems = [[number * 100 + step for step in range(3)] for number in range(4)]
    sessions = [[*draw.choice(systems), next(fresh)] for _ in range(live)]
    due = [0.0] * live
    now = 0.0
    for _ in range(count):
        number = draw.randrange(live) if draw.random() < 0.4 else due.index(min(due))
        blocks = sessions[number]
        # A clock may jump, and go back.
        now += draw.expovariate(1.0) if draw.random() < 0.97 else draw.choice((-50.0, 5000.0))
        wait = draw.random() * draw.choice((2.0, 30.0, 600.0))
        due[number] = now + wait
        turn = Turn([key(block) for block in blocks], now)
        says = wait * draw.lognormvariate(0.0, 0.5)
        if draw.random() < 0.02:
            says = draw.choice(EXTREMES)
        hints = Hints(
            ends=draw.random() < 0.06,
            expect_s=max(1e-9, says) if draw.random() < 0.85 else None,
            source=str(int(draw.expovariate(0.3)) % SOURCES),
        )
        told = draw.random()
        turn.begin = hints if told < 0.6 else None
        turn.finish = hints if 0.5 < told < 0.8 else None
        more = [next(fresh) for _ in range(draw.randrange(4))]
        turn.answer = [key(block) for block in more[:1]] if draw.random() < 0.2 else []
        sessions[number] = blocks + more
        if hints.ends or len(blocks) > 14:
            sessions[number] = [*draw.choice(systems), next(fresh)]
        yield turn


def replay(pair: Pair, seed: int, count: int, live: int, every: int) -> set[str]:
    """Replay sessions whose stores and loads overlap; return the rules that were followed."""
    draw = random.Random(seed)
    storing: deque[OpenPair] = deque()
    loading: deque[tuple[OpenPair, int]] = deque()
    rules = set()
    for number, turn in enumerate(turns(seed, count, live)):
        request = OpenPair(pair, turn.blocks, turn.begin, turn.now)
        if draw.random() < 0.05:  # the same once more, before anybody else
            OpenPair(pair, turn.blocks, turn.begin, turn.now).finish(turn.finish, turn.now)
        found = request.do("lookup")
        if found:
            request.do("prepare_load", 0, found)
            loading.append((request, found))
        request.do("prepare_store")
        if turn.answer:
            request.do("extend", turn.answer)
            request.do("prepare_store")
        storing.append(request)
        request.finish(turn.finish, turn.now)
        while len(loading) > draw.randrange(3):
            loaded, end = loading.popleft()
            loaded.do("complete_load", 0, end)
        while len(storing) > draw.randrange(3):
            storing.popleft().do("complete_store", draw.random() < 0.95)
        if draw.random() < 0.05:
            pair.do("release", turn.blocks)
        if draw.random() < 0.05:
            pair.do("touch", turn.blocks)
        if number == count * 3 // 4 and not storing and not loading:
            pair.do("reset_cache")
        if number % every == 0:
            pair.agree()
        rules.add(pair.python.policy.rule)
    pair.agree()
    return rules


@pytest.mark.parametrize(
    ("capacity", "live", "options"),
    [
        (1, 3, ""),
        (8, 6, "?guard=0"),
        (24, 8, ""),
        (24, 8, "?ghosts=0"),
        (60, 20, ""),
        (60, 20, "?guard=0"),
    ],
)
def test_sessions_with_hints(
    twins: Twins, seed: int, capacity: int, live: int, options: str
) -> None:
    text = f"hit-density{options}"
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, capacity, text, True))
    rules = replay(pair, seed, 300, live, every=7)
    assert rules == {"hit-density"} or "guard=0" not in options


@pytest.mark.thorough
def test_many_sessions_with_hints(twins: Twins, seed: int) -> None:
    pair = Pair(twins, lambda twin: twin.CPUOffloadingManager(16, 2000, "hit-density"))
    replay(pair, seed, 2500, 400, every=400)
    assert pair.python.policy.hint_gain is not None
    assert pair.python.policy.hint_sources
    assert pair.python.stats()["evicted_blocks"] > 0
