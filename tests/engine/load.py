"""Requests for the engine: conversations of many turns, and prompts that do not come again.

The plan is drawn from a seed. What a request says in full is known when the answers before it are:
each turn repeats its conversation, the model's answers included, as a chat client does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.engine.model import MAX_TOKENS, NUM_WORDS, word
from tests.engine.server import Answer, Server

CONVERSATIONS = 40
LEAST_ROOM = 160  # tokens that a turn and its answer may take


@dataclass(frozen=True)
class Turn:
    """One request to make."""

    conversation: int
    says: str  # by the user
    answer_tokens: int
    again: bool  # whether the conversation goes on; False begins it anew


def plan(num_turns: int, seed: int = 0, num_conversations: int = CONVERSATIONS) -> list[Turn]:
    """Return turns of conversations, some livelier than others; one in five is asked only once."""
    rng = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(word(rng.randrange(NUM_WORDS)) for _ in range(rng.randint(least, most)))

    preambles = [words(90, 130) for _ in range(4)]
    weights = [1 / (number + 1) ** 0.7 for number in range(num_conversations)]
    length = [MAX_TOKENS] * num_conversations
    turns = []
    for number in range(num_turns):
        answer = rng.randint(4, 10)
        if rng.random() < 0.2:
            turns.append(Turn(num_conversations + number, words(200, 500), answer, again=False))
            continue
        conversation = rng.choices(range(num_conversations), weights)[0]
        says = words(20, 120)
        again = length[conversation] + LEAST_ROOM < MAX_TOKENS
        if not again:
            length[conversation] = 0
            says = f"{preambles[conversation % len(preambles)]} {says}"
        length[conversation] += says.count(" ") + 1 + answer + 4  # and what the template adds
        turns.append(Turn(conversation, says, answer, again))
    return turns


def crowd(size: int, answer_tokens: int) -> list[Turn]:
    """Return short prompts with long answers: requests that are let in together and then grow."""
    rng = random.Random(size)
    says = [" ".join(word(rng.randrange(NUM_WORDS)) for _ in range(80)) for _ in range(size)]
    return [Turn(number, text, answer_tokens, again=False) for number, text in enumerate(says)]


@dataclass
class Client:
    """Makes the requests of a plan."""

    server: Server
    talks: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def ask(self, turn: Turn) -> Answer:
        before = self.talks.get(turn.conversation, ()) if turn.again else ()
        answer = self.server.ask((*before, ("user", turn.says)), turn.answer_tokens)
        self.talks[turn.conversation] = (*answer.messages, ("assistant", answer.text))
        return answer

    def one_by_one(self, turns: Iterable[Turn]) -> list[Answer]:
        """Make each request when the engine is at rest: its steps are the same every time."""
        answers = []
        for turn in turns:
            answers.append(self.ask(turn))
            self.server.settle()
        return answers

    def at_once(self, turns: list[Turn], concurrency: int) -> list[Answer]:
        """Make some requests at a time; the turns of a conversation stay in order."""
        answers: list[Answer | None] = [None] * len(turns)
        lanes = [
            [place for place, turn in enumerate(turns) if turn.conversation % concurrency == lane]
            for lane in range(concurrency)
        ]

        def run(lane: list[int]) -> None:
            for place in lane:
                answers[place] = self.ask(turns[place])

        with ThreadPoolExecutor(concurrency) as threads:
            for _ in threads.map(run, lanes):
                pass
        assert all(answers)
        return answers  # type: ignore[return-value]
