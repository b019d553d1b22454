"""The objects tier passes the suite of all tiers on moto's server, a stand-in for S3."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvoffload.testing.tiers import PATIENCE_S, TierConformance
from kvoffload.tiers import Namespace, Tier
from tests.tiers.servers import Server, make_bucket, patient, s3_options, s3_server

pytest.importorskip("obstore", reason="the tier needs the objects extra")

from kvoffload.tiers.remote.objects import ObjectTier

pytestmark = pytest.mark.servers

BLOCK = 4096
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        make_bucket(server)
        yield server


def test_a_daemon_without_standard_streams_has_a_client(s3: Server, namespace: Namespace) -> None:
    """Its sockets would have their numbers, and be covered by those of the client's process."""
    program = """
import json, os, sys
for stream in range(3):
    os.close(stream)
from kvoffload.testing.tiers import run
from kvoffload.tiers import Namespace, ObjectTier, Region

tier = ObjectTier("s3://blocks/daemon", namespace=Namespace("m", 4096), **json.loads(sys.argv[1]))
region = Region.allocate(8, 4096)
region.array[:4096] = 7
tier.attach(region)
run(tier, tier.query([b"any"], 60))
assert not run(tier, tier.put([b"key"], [0], 60)).status.any()
for stream in range(3):
    try:
        os.write(stream, b"warning: " * 1000)  # as a library does
    except OSError:
        pass
while tier.stats()["store_ok"] < 1:
    tier.wait([], 0.01)
assert not run(tier, tier.get([b"key"], [1], 60)).status.any()
assert region.read(1) == region.read(0)
assert tier.close(60)
"""
    arguments = [sys.executable, "-c", program, json.dumps(s3_options(s3))]
    subprocess.run(arguments, check=True, timeout=PATIENCE_S)


class TestObjectTier(TierConformance):
    @pytest.fixture(autouse=True, params=[{}, {"ack": "stored", "threads": 1}], ids=str)
    def _setup(self, request: pytest.FixtureRequest, s3: Server, namespace: Namespace) -> None:
        self.options = {**request.param, **s3_options(s3)}
        self.namespace = namespace

    def open_tier(self, num_blocks: int) -> Tier:
        self.url = f"s3://blocks/test{next(NUMBERS)}"
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return patient(ObjectTier)(self.url, namespace=self.namespace, **self.options)
