"""The memory layout of the compiled core."""

from __future__ import annotations

import ctypes
import subprocess
from types import ModuleType

import pytest

from kvoffload import BlockStatus
from tests.blocks import A, B, store
from tests.isolated.scripts import run_script

Twins = tuple[ModuleType, ModuleType]


def test_sizes(twins: Twins) -> None:
    from kvoffload._core.ghosts import LAYOUT as GHOSTS
    from kvoffload._core.table import LAYOUT as TABLE

    assert TABLE["block"] == ctypes.sizeof(BlockStatus) == 16
    assert TABLE["node"] == TABLE["bucket"] == 64, "a cache line"
    assert GHOSTS == {"ghost": 12, "walked": 12}


def test_a_status_lies_on_the_block_itself(twins: Twins) -> None:
    _, compiled = twins
    manager = compiled.CPUOffloadingManager(16, 4)
    store(manager, [A, B])
    held = manager.policy.get(B)
    address = ctypes.addressof(held)
    shown = BlockStatus.from_address(address)
    manager.prepare_load([B, B])
    assert (shown.ref_cnt, shown.block_id) == (2, 1)
    del held
    assert ctypes.addressof(manager.policy.get(B)) == address


def test_tables_beyond_the_last_number_are_searched_like_the_first(twins: Twins) -> None:
    """A table's first version holds its number in 24 bits; version 0 would mean searched before."""
    from kvoffload._core import table

    symbols = subprocess.run(["nm", table.__file__], capture_output=True, text=True, check=False)
    found = [line for line in symbols.stdout.splitlines() if line.endswith("num_opened")]
    if not found:
        pytest.skip("needs nm and the symbols of the extensions")
    script = """
        import ctypes, sys
        from kvoffload import CPUOffloadingManager
        from kvoffload._core import table
        maps = [line.split() for line in open("/proc/self/maps")]
        start = min(int(line[0].split("-")[0], 16) for line in maps if line[-1] == table.__file__)
        last = ctypes.c_uint64.from_address(start + int(sys.argv[1], 16))
        assert last.value < 100
        last.value = 2**24 - 1
        for expected in (1, 2):
            manager = CPUOffloadingManager(16, 500)
            first = [b"first %d" % number for number in range(300)]
            with manager.begin(first) as request:
                request.prepare_store()
                request.complete_store()
            assert manager.begin([b"other %d" % number for number in range(300)]).lookup() == 0
            assert manager.begin(first).lookup() == 300
            manager._check()
            assert last.value == expected
    """
    run_script(script, found[0].split()[0])
