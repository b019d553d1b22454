"""Media that several tiers share, for tests of what one of them does to the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import (
    DirectoryTier,
    Namespace,
    ObjectTier,
    RedisTier,
    Region,
    Status,
)
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.inside import ask_anew, settle
from tests.tiers.servers import Server, s3_options

BLOCK = 4096
NAMESPACE = Namespace("forgotten", BLOCK)
KEYS = [b"key-%02d" % number for number in range(32)]
NUMBERS = itertools.count()


class Place:
    """A medium that any number of tiers share."""

    def __init__(self, opener: Callable[..., RemoteTier]) -> None:
        self.opener = opener
        self.opened: list[RemoteTier] = []

    def tier(self, *, attach: bool = True, **options) -> RemoteTier:
        tier = self.opener(**{"namespace": NAMESPACE, "threads": 2, **options})
        self.opened.append(tier)
        if attach:
            attach_to(tier)
        return tier

    def close(self) -> None:
        for tier in self.opened:
            tier.close(PATIENCE_S)


def attach_to(tier: RemoteTier) -> None:
    """Give a tier a region whose first blocks have the bytes of the keys."""
    region = Region.allocate(2 * len(KEYS), BLOCK)
    for block_id, key in enumerate(KEYS):
        region.write(block_id, block_bytes_of(key, BLOCK))
    tier.attach(region)


def redis_place(server: Server) -> Place:
    url, prefix = f"redis://127.0.0.1:{server.port}", f"forget{next(NUMBERS)}"
    return Place(lambda **options: RedisTier(url, prefix=prefix, **options))


def directory_place(path: Path) -> Place:
    return Place(lambda **options: DirectoryTier(path, 2**24, **options))


def objects_place(server: Server) -> Place:
    """Return a place in the bucket ``blocks``."""
    url = f"s3://blocks/forget{next(NUMBERS)}"
    return Place(lambda **options: ObjectTier(url, **options, **s3_options(server)))


def store(tier: RemoteTier, count: int = len(KEYS)) -> None:
    before = tier.stats()["store_ok"]
    done = run(tier, tier.put(KEYS[:count], range(count), PATIENCE_S))
    assert not done.status.any(), done.status
    settle(tier)
    assert tier.stats()["store_ok"] == before + count, tier.stats()


def found(tier: RemoteTier, count: int = len(KEYS)) -> int:
    """Return how many blocks a tier gives, whatever it believes; the others are MISS."""
    ask_anew(tier)
    tier.health(reset=True)
    ids = range(len(KEYS), len(KEYS) + count)
    done = run(tier, tier.get(KEYS[:count], ids, PATIENCE_S))
    assert set(done.status.tolist()) <= {Status.OK, Status.MISS}, done.status
    settle(tier)
    return done.status.tolist().count(Status.OK)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)
