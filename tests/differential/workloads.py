"""Keys, and generated workloads to replay."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from hashlib import sha256

Request = list[bytes]


def key(number: int, length: int = 32) -> bytes:
    """Return the key of a hash id, as long as asked for."""
    digest = sha256(str(number).encode()).digest()
    return (digest * (length // 32 + 1))[:length]


def mixed_keys(numbers: Iterable[int]) -> list[bytes]:
    """Return the keys of hash ids: most lie inline in the index, every seventh does not."""
    return [key(number, 70 if number % 7 == 0 else 36) for number in numbers]


def conversations(seed: int, requests: int, key_length: int = 32) -> Iterator[Request]:
    """Yield requests of chats that grow turn by turn over a few shared system prompts."""
    generator = random.Random(seed)
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(generator.randrange(1, 12))] for _ in range(4)]
    chats: list[list[int]] = []
    for _ in range(requests):
        if not chats or generator.random() < 0.15:
            chats.append(list(generator.choice(systems)))
        chat = generator.choice(chats[-12:])
        chat.extend(next(fresh) for _ in range(generator.randrange(6)))
        yield [key(number, key_length) for number in chat]


def scans(seed: int, requests: int, key_length: int = 32) -> Iterator[Request]:
    """Yield requests of a small hot set, interrupted by long runs that are never seen again."""
    generator = random.Random(seed)
    fresh = iter(range(1_000, 10**9))
    for number in range(requests):
        if number % 7 == 6:
            yield [key(next(fresh), key_length) for _ in range(generator.randrange(20, 60))]
        else:
            start = generator.randrange(8) * 5
            yield [key(start + step, key_length) for step in range(generator.randrange(1, 6))]


def loops(seed: int, requests: int, key_length: int = 32) -> Iterator[Request]:
    """Yield a loop a little longer than the cache, with repeats inside a request."""
    generator = random.Random(seed)
    for number in range(requests):
        request = [key((number * 3 + step) % 90, key_length) for step in range(6)]
        if generator.random() < 0.2:
            request.append(generator.choice(request))
        yield request


GENERATED = {"conversations": conversations, "scans": scans, "loops": loops}
