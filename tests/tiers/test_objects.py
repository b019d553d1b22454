"""The objects tier passes the suite of all tiers on moto's server, a stand-in for S3."""

import itertools
from collections.abc import Iterator

import pytest

from kvoffload.tiers import Namespace, Tier
from kvoffload.tiers.testing import TierConformance
from tests.tiers.servers import Server, patient, s3_server

pytest.importorskip("obstore", reason="the tier needs the objects extra")

from kvoffload.tiers.objects import ObjectTier

BLOCK = 4096
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        make_bucket(server)
        yield server


def make_bucket(server: Server) -> None:
    """Make the bucket ``blocks``, as any client does."""
    from urllib.request import Request, urlopen

    request = Request(f"http://127.0.0.1:{server.port}/blocks", method="PUT")
    urlopen(request, timeout=30).close()


def s3_options(server: Server, secret: str = "testing") -> dict:
    """Return what opens a bucket of this server."""
    return {
        "config": {
            "endpoint": f"http://127.0.0.1:{server.port}",
            "region": "us-east-1",
            "access_key_id": "testing",
            "secret_access_key": secret,
        },
        "client_options": {"allow_http": True},
    }


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
