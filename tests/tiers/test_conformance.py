"""Every tier passes the suite of all tiers, and behaves like a dict in any order of calls."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.testing.tiers import FaultyTier, TierConformance, tier_machine
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    MemoryTier,
    Namespace,
    ObjectTier,
    RedisTier,
    Tier,
)
from tests.tiers.servers import Server, make_bucket, patient, redis_server, s3_options, s3_server

BLOCK = 4096
ROOMY, TIGHT = 64 * BLOCK, 10 * BLOCK
NUMBERS = itertools.count()

Opener = Callable[..., Tier]
"""Opens the tier of a number, with room for so many bytes."""


@pytest.fixture(scope="session")
def redis() -> Iterator[Server]:
    pytest.importorskip("redis", reason="the tier needs the redis extra")
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """Give moto's server, a stand-in for S3."""
    pytest.importorskip("obstore", reason="the tier needs the objects extra")
    with s3_server() as server:
        make_bucket(server)
        yield server


def opener_of(kind: str, request: pytest.FixtureRequest) -> Opener:
    """Return what opens tiers of a kind, each with a place of its own."""
    if kind in ("memory", "faulty"):
        made = MemoryTier if kind == "memory" else FaultyTier
        return lambda _, size, **options: made(size, **options)
    if kind in ("slab", "staged slab", "directory"):
        made = DirectoryTier if kind == "directory" else FileTier
        made = partial(made, staged=True) if kind == "staged slab" else made
        path = request.getfixturevalue("tmp_path")
        return lambda number, size, **options: made(path / str(number), size, **options)
    server = request.getfixturevalue(kind)
    if kind == "redis":
        url, made = f"redis://127.0.0.1:{server.port}/0", patient(RedisTier)
        return lambda number, _, **options: made(url, prefix=f"test{number}", **options)
    made = partial(patient(ObjectTier), **s3_options(server))
    return lambda number, _, **options: made(f"s3://blocks/test{number}", **options)


def case(kind: str, *arguments: object, **options: object) -> object:
    """Return a tier with options as a parameter."""
    marks = {"memory": [pytest.mark.fast], "redis": [pytest.mark.servers]}
    marks["faulty"], marks["s3"] = marks["memory"], marks["redis"]
    said = "-".join(map(str, (kind, *arguments, *options.values())))
    return pytest.param(kind, options, *arguments, marks=marks.get(kind, ()), id=said)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        case("memory"),
        *(case("faulty", ack=ack) for ack in ("copied", "stored")),
        case("slab"),
        case("slab", staged=True),
        case("slab", staged=True, staging_bytes=0),
        case("slab", staged=True, threads=1, ack="stored"),
        *(case(kind) for kind in ("directory", "redis", "s3")),
        *(case(kind, ack="stored", threads=1) for kind in ("directory", "redis", "s3")),
        *(case(kind, staging_bytes=0) for kind in ("faulty", "directory", "redis")),
    ],
)
class TestTier(TierConformance):
    """Two buffers, for ``staging_bytes=0``, are enough for everything."""

    @pytest.fixture(autouse=True)
    def _setup(
        self, kind: str, options: dict, request: pytest.FixtureRequest, namespace: Namespace
    ) -> None:
        self.opener = partial(opener_of(kind, request), namespace=namespace, **options)
        self.keeps = kind not in ("memory", "faulty")

    def open_tier(self, num_blocks: int) -> Tier:
        self.place = next(NUMBERS), num_blocks * BLOCK
        return self.opener(*self.place)

    def reopen_tier(self) -> Tier | None:
        return self.opener(*self.place) if self.keeps else None

    def settle(self, tier: Tier) -> None:
        super().settle(tier)
        if isinstance(tier, DirectoryTier):
            while tier.sweep() is None:  # the tier's own thread sweeps
                pass
            tier.poll()


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        case("memory", ROOMY),
        *(case("memory", TIGHT, policy=policy) for policy in ("lru", "hit-density")),
        *(case("slab", size, threads=3) for size in (ROOMY, TIGHT)),
        *(
            case("slab", size, threads=3, staged=True, ack=ack, staging_bytes=8 * BLOCK)
            for size in (ROOMY, TIGHT)
            for ack in ("copied", "stored")
        ),
        *(case("faulty", ROOMY, ack=ack) for ack in ("copied", "stored")),
        # what is copied may be late
        *(case(kind, ROOMY, threads=2, ack="stored") for kind in ("directory", "redis")),
    ],
)
def test_it_behaves_like_a_dict(
    kind: str, options: dict, size: int, request: pytest.FixtureRequest, namespace: Namespace
) -> None:
    opener = partial(opener_of(kind, request), namespace=namespace, **options)
    machine = tier_machine(lambda: opener(next(NUMBERS), size), BLOCK)
    fewer = settings(max_examples=15, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(machine, settings=fewer if kind == "redis" else None)
