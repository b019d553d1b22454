"""A child that is forked beside busy threads, and a process that ends without closing its tiers.

No call of the child waits for a lock or writes anywhere; the end is quiet, soon, and with blocks
stored.
"""

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
from tests.isolated.scripts import run_script
from tests.tiers.inside import attached, is_busy

from .attack import start
from .test_conformance import opener_of
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
def tier(request: pytest.FixtureRequest, namespace: Namespace) -> ComposedTier:
    return opener_of(request.param, request)(0, 64 * BLOCK, namespace=namespace)


def test_a_child_of_a_busy_process_neither_waits_nor_writes(
    tier: ComposedTier, tmp_path: Path
) -> None:
    """Threads hold the pool's lock at any time; numbers of closed descriptors are used again."""
    region = attached(tier, 64)
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


# -- exits -----------------------------------------------------------------------------------------


BLOCK_BYTES, BLOCKS = 2**20, 32

SCRIPT = f"""
    import os, sys
    os.dup2(1, 2)
    from kvoffload.tiers import FileTier, Namespace, Region
    from kvoffload.testing.tiers import FaultyTier

    kind, folder = sys.argv[1:]
    namespace = Namespace("exit", {BLOCK_BYTES})
    region = Region.allocate({BLOCKS}, {BLOCK_BYTES})
    if kind == "slab":
        tier = FileTier(folder, {BLOCKS} * {BLOCK_BYTES}, namespace=namespace)
    else:
        tier = FaultyTier({BLOCKS} * {BLOCK_BYTES}, namespace=namespace)
    tier.attach(region)
    if kind == "hung":
        tier.hang()
    for block_id in range({BLOCKS}):
        region.write(block_id, bytes([block_id]) * {BLOCK_BYTES})
    tier.put([b"%d" % block_id for block_id in range({BLOCKS})], range({BLOCKS}))
"""


@pytest.mark.parametrize("kind", ["slab", "hung"])
def test_an_exit_without_close(kind: str, tmp_path: Path) -> None:
    # Errors at the interpreter's end are printed and change no exit status; hangs end at a limit.
    assert run_script(SCRIPT, kind, str(tmp_path)) == ""
    if kind == "slab":
        capacity = BLOCKS * BLOCK_BYTES
        with FileTier(tmp_path, capacity, namespace=Namespace("exit", BLOCK_BYTES)) as tier:
            assert tier.num_restored == BLOCKS


DAEMONS = """
    import os, threading, time
    os.dup2(1, 2)
    from kvoffload.tiers import MemoryTier, Namespace, Region

    ids = list(range(64))
    keys = [b"%d" % number for number in ids]
    region = Region.allocate(len(ids), 4096)

    def call(tier):
        while True:
            tier.get(keys, ids)
            tier.poll()

    threading.excepthook = lambda arguments: None  # of tiers that the exit has closed
    for _ in range(4):
        tier = MemoryTier(2**20, namespace=Namespace("exit", 4096))
        tier.attach(region)
        threading.Thread(target=call, args=(tier,), daemon=True).start()
    time.sleep(0.05)
"""


def test_an_exit_while_daemon_threads_call() -> None:
    """Up to CPython 3.13 their stacks are unwound, which no C++ frame of a library may forbid."""
    for _ in range(2):
        assert run_script(DAEMONS) == ""
