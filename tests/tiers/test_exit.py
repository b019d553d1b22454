"""A process that ends without closing its tiers ends quietly, soon, and with its blocks stored."""

from pathlib import Path

import pytest

from kvoffload.tiers import FileTier, Namespace
from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

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
