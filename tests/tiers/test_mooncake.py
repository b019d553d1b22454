"""The Mooncake tier passes the suite of all tiers on a real master and store, over TCP."""

import gc
import itertools
import os
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from kvoffload.testing.tiers import PATIENCE_S, TierConformance, block_bytes_of, run
from kvoffload.tiers import Namespace, Region, Status, Tier, open_tier
from kvoffload.tiers.remote.mooncake import MooncakeTier
from tests.tiers.attack import start
from tests.tiers.inside import ask_anew, is_busy, medium_of, set_clock
from tests.tiers.servers import MooncakeServers, free_port, patient

pytestmark = pytest.mark.servers

pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)

NUMBERS = itertools.count()
KEYS = [b"key-%d" % number for number in range(8)]


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServers]:
    with MooncakeServers() as servers:
        yield servers


class TestMooncakeTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _setup(self, mooncake: MooncakeServers, namespace: Namespace) -> None:
        self.servers, self.namespace = mooncake, namespace

    def open_tier(self, num_blocks: int) -> Tier:
        self.prefix = f"test{next(NUMBERS)}"
        return self.reopen_tier()

    def reopen_tier(self) -> Tier:
        return patient(MooncakeTier)(
            f"127.0.0.1:{self.servers.master.port}",
            self.servers.metadata,
            hostname="127.0.0.1",
            prefix=self.prefix,
            namespace=self.namespace,
        )


@pytest.fixture
def opened(namespace: Namespace) -> Iterator[tuple[MooncakeServers, MooncakeTier, Region]]:
    """Give servers of the test's own, and a tier with eight blocks stored."""
    with MooncakeServers() as servers:
        metadata = quote(servers.metadata, safe="")
        address = f"mooncake://127.0.0.1:{servers.master.port}"
        tier = open_tier(f"{address}?metadata={metadata}&hostname=127.0.0.1&threads=2", namespace)
        region = Region.allocate(16, 4096)
        tier.attach(region)
        for block_id in range(8):
            region.write(block_id, block_bytes_of(KEYS[block_id], 4096))
        assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
        while is_busy(tier):
            tier.wait([], 0.01)
        yield servers, tier, region
        tier.close(1.0)


def load(tier: Tier, region: Region, deadline_s: float) -> set[int]:
    region.array[8 * 4096 :] = 0
    done = run(tier, tier.get(KEYS, range(8, 16), deadline_s))
    for place, status in enumerate(done.status.tolist()):
        if status == Status.OK:
            assert region.read(8 + place) == block_bytes_of(KEYS[place], 4096), "WRONG BYTES"
    return set(done.status.tolist())


def test_a_master_that_is_killed_makes_misses(opened) -> None:
    servers, tier, region = opened
    assert load(tier, region, PATIENCE_S) == {Status.OK}
    servers.master.kill()
    for _ in range(6):
        assert not load(tier, region, 0.5) & {Status.MISS, Status.CORRUPT}
    ask_anew(tier)
    for _ in range(6):
        run(tier, tier.query(KEYS, 0.5))
    assert tier.health().reads == "open"
    assert load(tier, region, PATIENCE_S) == {Status.UNAVAILABLE}


def test_a_master_that_hangs_costs_one_deadline(opened) -> None:
    servers, tier, region = opened
    servers.master.hang()
    assert load(tier, region, 0.3) == {Status.TIMEOUT}
    assert tier.health().reads == "open"
    assert load(tier, region, PATIENCE_S) == {Status.UNAVAILABLE}
    region.array[8 * 4096 :] = 7
    servers.master.resume()
    while is_busy(tier):
        tier.wait([], 0.01)
    assert (region.array[8 * 4096 :] == 7).all(), "a late answer wrote to the region"
    set_clock(tier, lambda: time.monotonic() + 60)
    assert load(tier, region, PATIENCE_S) <= {Status.OK, Status.MISS}
    assert tier.health().reads == "closed"


def test_no_master_is_no_error_and_holds_nothing_up(namespace: Namespace) -> None:
    port = free_port()
    with MooncakeTier(
        f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/metadata", namespace=namespace
    ) as tier:
        tier.attach(Region.allocate(4, 4096))
        for _ in range(6):
            done = run(tier, tier.query([b"k"], 1.0))
            assert done.status.tolist() == [Status.UNAVAILABLE]
        assert tier.health().reads == "open"


def test_a_client_that_is_dropped_in_a_forked_child_does_not_end_it(opened) -> None:
    _, tier, region = opened

    def drop() -> None:
        medium_of(tier)._client = None
        gc.collect()
        time.sleep(0.05)

    for _ in range(8):
        _, status = os.waitpid(start(drop), 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert load(tier, region, PATIENCE_S) == {Status.OK}
