"""The memory layout of the compiled core."""

from __future__ import annotations

import ctypes
from types import ModuleType

from kvoffload import BlockStatus
from tests.blocks import A, B, store

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
