"""A child that is forked beside busy threads: no call waits for a lock, none writes anywhere."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.testing.tiers import PATIENCE_S, refused_as_foreign, run
from kvoffload.tiers import FileTier, MemoryTier, Namespace, Region, Status, TieredStore
from kvoffload.tiers.engine.tier import ComposedTier
from tests.tiers.inside import is_busy

from .attack import start
from .test_tiered_store import calls_of_store

pytestmark = pytest.mark.thorough

BLOCK = 4096
KEYS = [b"key-%d" % number for number in range(32)]
FORKS = 6


def ends_well(work: Callable[[], None]) -> None:
    """Run a function in a forked child, which has some time for it."""

    def limited() -> None:
        signal.alarm(int(PATIENCE_S))
        work()

    _, ended = os.waitpid(start(limited), 0)
    assert os.waitstatus_to_exitcode(ended) == 0


@pytest.fixture(params=["memory", "slab", "staged slab"])
def tier(request: pytest.FixtureRequest, namespace: Namespace, tmp_path: Path) -> ComposedTier:
    if request.param == "memory":
        return MemoryTier(64 * BLOCK, namespace=namespace)
    staged = request.param == "staged slab"
    return FileTier(tmp_path, 64 * BLOCK, namespace=namespace, staged=staged)


def test_a_child_of_a_busy_process_neither_waits_nor_writes(
    tier: ComposedTier, tmp_path: Path
) -> None:
    """Threads hold the pool's lock at any time; numbers of closed descriptors are used again."""
    region = Region.allocate(64, BLOCK)
    tier.attach(region)
    stop = threading.Event()

    def work() -> None:
        ids = list(range(32))
        while not stop.is_set():
            for key in KEYS:
                tier.put([key, key + b"2"], ids[:2])
            tier.stats()
            tier.discard(KEYS[:8])
            tier.wait([tier.get(KEYS, ids)], PATIENCE_S)
            tier.poll()

    def in_child() -> None:
        unrelated = [tmp_path / f"unrelated-{number}" for number in range(16)]
        fds = [os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC) for path in unrelated]
        refused_as_foreign(tier, region)
        assert not any(os.fstat(fd).st_size for fd in fds)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(FORKS):
            ends_well(in_child)
    finally:
        stop.set()
        thread.join()
    with tier:
        region.array[:] = 7
        assert run(tier, tier.put([b"after"], [0])).status.tolist() == [Status.OK]
        tier.wait([], 0)
        region.array[:] = 0
        while is_busy(tier):
            tier.wait([], 0.01)
        assert run(tier, tier.get([b"after"], [1])).status.tolist() == [Status.OK]
        assert region.read(1) == b"\7" * BLOCK


def test_a_child_is_refused_by_a_store(namespace: Namespace) -> None:
    """Its region is shared with the parent."""
    region = Region.allocate(6, BLOCK)
    memory = MemoryTier(8 * BLOCK, namespace=namespace)
    store = TieredStore(region, CPUOffloadingManager(1, 4), [memory], write="demote")
    store.prepare_store(KEYS[:4])
    store.complete_store(KEYS[:4])
    for block_id in range(6):
        region.write(block_id, bytes([block_id]) * BLOCK)

    def in_child() -> None:
        for call in calls_of_store(store):
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                call()
        assert store.stats()["free_buffers"] == 2
        assert store.close()

    ends_well(in_child)
    for block_id in range(6):
        assert region.read(block_id) == bytes([block_id]) * BLOCK
    assert store.lookup(KEYS[:4]) == (4, 4)
    assert store.close()
