"""A generated workload that resembles a real one, the same for a seed on every machine.

Three kinds of session arrive as one Poisson process:

- *chats*: one of a few system prompts, most of them the popular ones, then turns that each resend
  the conversation so far;
- *agents*: a long prompt of tools and rules, then many quick steps, each resending a context that
  grows by the answer and by a tool's result;
- *one-shot requests*: a document or a question, half of them behind a shared instruction.

Every draw uses `random.Random.random`, whose sequence Python guarantees, with only comparisons and
the four IEEE operations: no logarithm, whose last bit may differ by C library.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from kvoffload._checks import check_int

from .request import Request

CONTEXT_TOKENS = 128_000
"""Longest prompt of a session, tokens; a session that would pass it ends."""

SESSIONS_PER_SECOND = 1.0
ANSWER_TOKENS_PER_SECOND = 50.0

# The shared beginnings of prompts, tokens each; within a kind the first is the most popular.
CHAT_PROMPTS = (1_900, 600, 3_200, 1_100, 250, 4_800, 800, 2_400)
AGENT_PROMPTS = (9_000, 6_000, 14_000)
ONE_SHOT_PROMPTS = (700, 1_500, 2_600, 400)

Turn = tuple[float, int, int]
"""Seconds since the previous answer, tokens added to the prompt, tokens of the answer."""


class _Dice:
    """Random draws that are the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random  # noqa: S311

    def exponential(self, mean: float) -> float:
        """Draw from the exponential distribution with only comparisons (von Neumann, 1951)."""
        whole = 0
        while True:
            first = last = self.uniform()
            falling = 1
            while (draw := self.uniform()) < last:
                last = draw
                falling += 1
            if falling % 2:
                return mean * (whole + first)
            whole += 1

    def tokens(self, mean: float) -> int:
        """Draw a length of at least one token: the sum of two exponentials."""
        return 1 + int(self.exponential(mean / 2) + self.exponential(mean / 2))

    def popular(self, count: int) -> int:
        """Draw from `range(count)`, the k-th in proportion to 1/(k+1)."""
        weights = list(itertools.accumulate(1.0 / (k + 1) for k in range(count)))
        return min(bisect.bisect(weights, self.uniform() * weights[-1]), count - 1)


def _chat(dice: _Dice) -> Iterator[Turn]:
    while True:
        question = dice.tokens(6_000) if dice.uniform() < 0.2 else dice.tokens(250)
        yield dice.exponential(60.0), question, dice.tokens(380)
        if dice.uniform() < 0.2:
            return


def _agent(dice: _Dice) -> Iterator[Turn]:
    yield 0.0, dice.tokens(900), dice.tokens(180)
    while dice.uniform() > 1 / 16:
        result = dice.tokens(6_000) if dice.uniform() < 0.1 else dice.tokens(800)
        yield 0.5 + dice.exponential(6.0), result, dice.tokens(180)


def _one_shot(dice: _Dice) -> Iterator[Turn]:
    yield 0.0, dice.tokens(16_000 if dice.uniform() < 0.3 else 1_500), dice.tokens(250)


@dataclass(slots=True)
class _Session:
    """A session in progress: the blocks that it has sent and the turns to come."""

    name: str
    turns: Iterator[Turn]
    tokens: int  # of the context so far
    full_blocks: list[int] = field(default_factory=list)  # ids of the context's full blocks

    def request(
        self, now: float, turn: Turn, block_tokens: int, fresh: Iterator[int]
    ) -> Request | None:
        """Return the request of a turn, None if it passes the longest context."""
        _, added, answer = turn
        length = self.tokens + added
        if length > CONTEXT_TOKENS:
            return None
        missing = length // block_tokens - len(self.full_blocks)
        self.full_blocks.extend(itertools.islice(fresh, missing))
        partial = (next(fresh),) if length % block_tokens else ()
        self.tokens = length + answer
        hash_ids = (*self.full_blocks, *partial)
        return Request(int(now * 1000), length, answer, hash_ids, self.name)


class Workload:
    """An iterable of generated requests in the order of their arrival, made lazily.

    Each iteration gives the same requests. Memory grows with the number of concurrent sessions,
    not with that of requests.

    Parameters
    ----------
    requests : int
        Number of requests, >= 1.
    seed : int
        Seed of the workload, >= 0.
    block_tokens : int
        Tokens per block, >= 1.

    Attributes
    ----------
    name : str
        Name in messages.

    Raises
    ------
    TypeError, ValueError
        If an argument is no integer, or below its bound.
    """

    def __init__(self, requests: int = 5_000, *, seed: int = 0, block_tokens: int = 512) -> None:
        self.requests = check_int("requests", requests, 1, None)
        self.seed = check_int("seed", seed, 0, None)
        self.block_tokens = check_int("block_tokens", block_tokens, 1, None)
        self.name = f"generated, seed {seed}"

    def __iter__(self) -> Iterator[Request]:
        return itertools.islice(self._endless(), min(self.requests, sys.maxsize))

    def _endless(self) -> Generator[Request, None, None]:
        dice = _Dice(self.seed)
        fresh = itertools.count()
        shared: dict[tuple[str, int], list[int]] = {}
        session_ids = itertools.count()
        # (second of the next turn, id of the session, the session, the turn)
        under_way: list[tuple[float, int, _Session, Turn]] = []
        arrival = dice.exponential(1 / SESSIONS_PER_SECOND)
        while True:
            while not under_way or arrival <= under_way[0][0]:
                session_id = next(session_ids)
                session = self._new_session(dice, session_id, shared, fresh)
                heapq.heappush(under_way, (arrival, session_id, session, next(session.turns)))
                arrival += dice.exponential(1 / SESSIONS_PER_SECOND)
            now, session_id, session, turn = heapq.heappop(under_way)
            request = session.request(now, turn, self.block_tokens, fresh)
            if request is None:
                continue
            yield request
            following = next(session.turns, None)
            if following is not None:
                later = now + request.output_length / ANSWER_TOKENS_PER_SECOND + following[0]
                heapq.heappush(under_way, (later, session_id, session, following))

    def _new_session(
        self,
        dice: _Dice,
        session_id: int,
        shared: dict[tuple[str, int], list[int]],
        fresh: Iterator[int],
    ) -> _Session:
        prompts: tuple[int, ...]
        draw = dice.uniform()
        if draw < 0.45:
            kind, turns, prompts = "chat", _chat(dice), CHAT_PROMPTS
        elif draw < 0.48:
            kind, turns, prompts = "agent", _agent(dice), AGENT_PROMPTS
        else:
            kind, turns = "one-shot", _one_shot(dice)
            prompts = ONE_SHOT_PROMPTS if dice.uniform() < 0.5 else ()
        session = _Session(f"{kind}-{session_id}", turns, 0)
        if prompts:
            chosen = dice.popular(len(prompts))
            session.tokens = prompts[chosen]
            if (kind, chosen) not in shared:
                full = prompts[chosen] // self.block_tokens
                shared[kind, chosen] = list(itertools.islice(fresh, full))
            session.full_blocks = shared[kind, chosen].copy()
        return session
