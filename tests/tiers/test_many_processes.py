"""Eight processes on one directory, one Redis server and one bucket: no wrong byte, nothing twice.

They write and read the same keys at once, drop some, and some of them are killed. Half of them
serve another model, whose bytes under the same keys are others.
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import DirectoryTier, Namespace, ObjectTier, RedisTier, Region, Status
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.attack import kill, report, rounds, start
from tests.tiers.inside import ask_anew, attached
from tests.tiers.servers import make_bucket, redis_server, s3_options, s3_server

pytestmark = pytest.mark.servers

BLOCK = 8192
NAMESPACES = (Namespace("one model", BLOCK), Namespace("another model", BLOCK))
KEYS = [b"key-%032d" % number for number in range(48)]
PROCESSES = 8


def data(key: bytes, model: int) -> bytes:
    return block_bytes_of(key + b"%d" % model, BLOCK)


def check(tier: RemoteTier, region: Region, places: list[int], model: int) -> int:
    """Get keys and compare every byte; return how many were there."""
    region.array[:] = 0xA5
    keys = [KEYS[place] for place in places]
    statuses = run(tier, tier.get(keys, places, PATIENCE_S)).status.tolist()
    for place, status in zip(places, statuses, strict=True):
        assert status in (Status.OK, Status.MISS), Status(status)
        if status == Status.OK:
            assert region.read(place) == data(KEYS[place], model), "WRONG BYTES"
    return statuses.count(Status.OK)


def churn(opener: Callable[[Namespace], RemoteTier], number: int, times: int) -> None:
    """Put and get, over and over; end with an error at the first wrong byte."""
    model, chance = number % 2, random.Random(number)
    tier = opener(NAMESPACES[model])
    region = attached(tier, len(KEYS))
    for _ in range(times):
        places = chance.sample(range(len(KEYS)), 12)
        for place in places:
            region.write(place, data(KEYS[place], model))
        done = run(tier, tier.put([KEYS[place] for place in places], places, PATIENCE_S))
        assert not done.status.any(), done.status
        ask_anew(tier)  # ask the medium, whatever was found out before
        check(tier, region, chance.sample(range(len(KEYS)), 12), model)
        if chance.random() < 0.1:
            tier.discard([KEYS[chance.randrange(len(KEYS))]])
    assert tier.stats()["get_corrupt"] == 0
    assert tier.close(PATIENCE_S)


def attack(opener: Callable[[Namespace], RemoteTier], times: int) -> None:
    lives = [times] * (PROCESSES - 2) + [10**9] * 2  # those that are killed: one of each model
    children = [
        start(lambda number=number, life=life: churn(opener, number, life))
        for number, life in enumerate(lives)
    ]
    time.sleep(0.5)
    for child in children[-2:]:
        kill(child)
    for child in children[:-2]:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "a process met a wrong byte or an error"
    found = []
    for model, namespace in enumerate(NAMESPACES):
        tier = opener(namespace)
        region = attached(tier, len(KEYS))
        found.append(check(tier, region, list(range(len(KEYS))), model))
        assert tier.close(PATIENCE_S)
    report(f"{PROCESSES} processes, two killed, {times} rounds each: {found} blocks, all right")
    assert min(found) > 0


@pytest.mark.attack
@pytest.mark.parametrize(
    ("room", "stated", "options"),
    [
        pytest.param(2**30, 2000, {}, id="roomy"),
        pytest.param(24 * BLOCK, 1000, {"sweep_s": 0.01}, id="swept meanwhile"),  # half fits
    ],
)
def test_one_directory(tmp_path: Path, room: int, stated: int, options: dict) -> None:
    options |= {"threads": 4, "ack": "stored"}
    attack(
        lambda namespace: DirectoryTier(tmp_path, room, namespace=namespace, **options),
        rounds(stated),
    )
    for namespace in NAMESPACES:
        folder = tmp_path / namespace.fingerprint.hex()
        names = [path.name for path in folder.rglob("*.kv")]
        assert len(names) == len(set(names)) <= len(KEYS)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "stated"), [("256mb", 2000), ("3mb", 500), ("s3", 60)], ids=["redis", "small", "s3"]
)
def test_one_server(kind: str, stated: int) -> None:
    """Redis with room for all blocks; and for few of them, so that it evicts; and a bucket."""
    options = {"threads": 2, "ack": "stored"}
    if kind == "s3":
        pytest.importorskip("obstore", reason="the tier needs the objects extra")
        with s3_server() as server:
            make_bucket(server)
            opener = partial(ObjectTier, "s3://blocks/kv", **options, **s3_options(server))
            attack(lambda namespace: opener(namespace=namespace), rounds(stated))
        return
    redis = pytest.importorskip("redis", reason="the tier needs the redis extra")
    with redis_server("--maxmemory", kind, "--maxmemory-policy", "allkeys-lru") as server:
        opener = partial(RedisTier, f"redis://127.0.0.1:{server.port}", **options)
        attack(lambda namespace: opener(namespace=namespace), rounds(stated))
        with redis.Redis(port=server.port) as client:
            assert client.dbsize() <= 2 * (len(KEYS) + 2), "each block once, and two names more"
