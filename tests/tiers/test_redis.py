"""The Redis tier passes the suite of all tiers on a real server; others are refused."""

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.testing.tiers import PATIENCE_S, TierConformance, tier_machine
from kvoffload.tiers import Namespace, Region, Status, Tier
from tests.tiers.servers import Server, patient, redis_server

pytest.importorskip("redis", reason="the tier needs the redis extra")

from hypothesis import settings

from kvoffload.tiers.remote.redis import RedisTier

pytestmark = pytest.mark.servers

BLOCK = 4096
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def redis() -> Iterator[Server]:
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


def new_prefix() -> str:
    return f"test{next(NUMBERS)}"


class TestRedisTier(TierConformance):
    @pytest.fixture(
        autouse=True, params=[{}, {"ack": "stored", "threads": 1}, {"staging_bytes": 0}], ids=str
    )
    def _setup(self, request: pytest.FixtureRequest, redis: Server, namespace: Namespace) -> None:
        self.options, self.namespace = request.param, namespace
        self.url = f"redis://127.0.0.1:{redis.port}/0"

    def open_tier(self, num_blocks: int) -> Tier:
        self.prefix = new_prefix()
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return patient(RedisTier)(
            self.url, prefix=self.prefix, namespace=self.namespace, **self.options
        )


def test_it_behaves_like_a_dict(redis: Server, namespace: Namespace) -> None:
    url = f"redis://127.0.0.1:{redis.port}"
    machine = tier_machine(
        lambda: RedisTier(url, prefix=new_prefix(), threads=2, namespace=namespace, ack="stored"),
        BLOCK,
    )
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
    machine.TestCase().runTest()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--cluster-enabled", "yes"), "its server is part of a cluster"),
        (("--rename-command", "EVAL", ""), "its server has no scripts (EVAL)"),
    ],
)
def test_a_server_that_does_not_suffice_is_refused_by_name(
    namespace: Namespace, caplog: pytest.LogCaptureFixture, options: tuple[str, ...], why: str
) -> None:
    with (
        redis_server("--maxmemory", "64mb", *options) as server,
        RedisTier(f"redis://127.0.0.1:{server.port}", namespace=namespace) as tier,
    ):
        tier.attach(Region.allocate(4, namespace.block_bytes))
        query, put = tier.query([b"k"], 60.0), tier.put([b"k"], [0], 60.0)
        assert tier.wait([query, put, tier.get([b"k"], [1], 60.0)], PATIENCE_S)
        assert all(one.op == "put" or one.status[0] == Status.FAILED for one in tier.poll())
        assert tier.stats()["store_ok"] == 0
    assert f"is refused: {why}" in caplog.text
