"""Keys, and generated workloads to replay, as numbers of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from hashlib import sha256

from tests.policies.stress import Request, chats


def key(number: int, length: int = 32) -> bytes:
    """Return the key of a hash id, as long as asked for."""
    digest = sha256(str(number).encode()).digest()
    return (digest * (length // 32 + 1))[:length]


def mixed_keys(numbers: Iterable[int]) -> list[bytes]:
    """Return the keys of hash ids: most lie inline in the index, every seventh does not."""
    return [key(number, 70 if number % 7 == 0 else 36) for number in numbers]


def scans(seed: int, requests: int) -> Iterator[Request]:
    """Yield requests of a small hot set, interrupted by long runs that are never seen again."""
    generator = random.Random(seed)
    fresh = iter(range(1_000, 10**9))
    for number in range(requests):
        if number % 7 == 6:
            yield [next(fresh) for _ in range(generator.randrange(20, 60))]
        else:
            start = generator.randrange(8) * 5
            yield list(range(start, start + generator.randrange(1, 6)))


def loops(seed: int, requests: int) -> Iterator[Request]:
    """Yield a loop a little longer than the cache, with repeats inside a request."""
    generator = random.Random(seed)
    for number in range(requests):
        request = [(number * 3 + step) % 90 for step in range(6)]
        if generator.random() < 0.2:
            request.append(generator.choice(request))
        yield request


GENERATED = {"chats": chats, "scans": scans, "loops": loops}
