"""The memory tier passes the suite of all tiers; and what it has besides."""

import pytest

from kvoffload.testing.tiers import FaultyTier, TierConformance, run
from kvoffload.tiers import MemoryTier, Namespace, Region, State, Tier

pytestmark = pytest.mark.fast


class TestMemoryTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _namespace(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def open_tier(self, num_blocks: int) -> Tier:
        return MemoryTier(num_blocks * 4096, namespace=self.namespace)


class TestFaultyTierThatBehaves(TierConformance):
    """A staged tier passes it too; two buffers are enough for everything."""

    @pytest.fixture(
        autouse=True, params=[{"ack": "copied"}, {"ack": "stored"}, {"staging_bytes": 0}], ids=str
    )
    def _options(self, request: pytest.FixtureRequest, namespace: Namespace) -> None:
        self.options = {"namespace": namespace, **request.param}

    def open_tier(self, num_blocks: int) -> Tier:
        return FaultyTier(num_blocks * 4096, **self.options)


def test_dropped_blocks_keep_their_slots_while_others_take_the_rest(namespace: Namespace) -> None:
    """A put of a dropped key and of new ones for which the index has to evict."""
    with MemoryTier(8 * 4096, namespace=namespace) as tier:
        region = Region.allocate(16, 4096)
        tier.attach(region)
        keys = [b"key-%d" % number for number in range(15)]
        for block_id, key in enumerate(keys):
            region.write(block_id, key.ljust(4096))
        run(tier, tier.put(keys[:8], range(8)))
        tier.discard(keys[:3])  # the least recent: the first that eviction would take
        done = run(tier, tier.put([*keys[8:13], *keys[:3]], [*range(8, 13), *range(3)]))
        assert not done.status.any()
        assert done.nbytes == 8 * 4096
        assert (tier.lookup([*keys[8:13], *keys[:3]]) == State.HIT).all()
        assert tier.stats()["blocks"] == 8
