"""The objects tier passes the suite of all tiers on moto's server, a stand-in for S3."""

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.testing.tiers import TierConformance
from kvoffload.tiers import Namespace, Tier
from tests.tiers.servers import Server, make_bucket, patient, s3_options, s3_server

pytest.importorskip("obstore", reason="the tier needs the objects extra")

from kvoffload.tiers.remote.objects import ObjectTier

BLOCK = 4096
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        make_bucket(server)
        yield server


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
