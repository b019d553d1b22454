"""A process that ends without closing its tiers ends quietly, soon, and with its blocks stored."""

from pathlib import Path

import pytest

from kvoffload.tiers import FileTier, Namespace
from tests.conftest import AVAILABLE
from tests.isolated.scripts import run_script

BLOCK_BYTES, BLOCKS = 2**20, 32

SCRIPT = f"""
    import os, sys
    os.dup2(1, 2)
    from kvoffload.tiers import FileTier, Namespace, Region
    from kvoffload.tiers.testing import FaultyTier

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


@pytest.mark.parametrize("implementation", AVAILABLE)
@pytest.mark.parametrize("kind", ["slab", "hung"])
def test_an_exit_without_close(kind: str, implementation: str, tmp_path: Path) -> None:
    choice = "1" if implementation == "python" else "0"
    environment = {"KVOFFLOAD_PURE_PYTHON": choice}
    # Errors at the interpreter's end are printed and change no exit status; hangs end at a limit.
    assert run_script(SCRIPT, kind, str(tmp_path), environment=environment) == ""
    if kind == "slab":
        capacity = BLOCKS * BLOCK_BYTES
        with FileTier(tmp_path, capacity, namespace=Namespace("exit", BLOCK_BYTES)) as tier:
            assert tier.num_restored == BLOCKS
