"""The Redis tier passes the suite of all tiers on a real server, and on a cluster of one."""

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.testing.tiers import TierConformance, tier_machine
from kvoffload.tiers import Namespace, Tier
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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Server]:
    """Give a cluster of one server, which has all slots."""
    from redis import Redis

    with redis_server("--cluster-enabled", "yes", "--maxmemory", "256mb") as server:
        with Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                pass
        yield server


class TestRedisClusterTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _setup(self, cluster: Server, namespace: Namespace) -> None:
        self.namespace = namespace
        self.url = f"redis://127.0.0.1:{cluster.port}"

    def open_tier(self, num_blocks: int) -> Tier:
        self.prefix = new_prefix()
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return patient(RedisTier)(
            self.url, prefix=self.prefix, namespace=self.namespace, cluster=True
        )
