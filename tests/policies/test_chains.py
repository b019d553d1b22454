"""Victims are the tail of a chain before its head."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import block_hashes
from tests.policies.steps import request

pytestmark = pytest.mark.fast

# ARC decides between its lists by their sizes, so it can take a block of T2 before those behind it
# in T1; so it was published. Hit density decides by what it has learned of classes.
STRICT = [name for name in registry.names() if registry.entry(name).tail_first == "always"]

# A request is a path in a tree: node n has the children 3n+1 ... 3n+3.
Path = list[int]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def nodes(turns: Path) -> list[int]:
    """Return the numbers of the nodes on the way from the root."""
    way = [0]
    for turn in turns:
        way.append(3 * way[-1] + 1 + turn)
    return way


class Watched:
    """A manager whose victims are compared with what is resident behind them."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.number_of: dict[bytes, int] = {}
        self.resident: set[int] = set()
        self.too_early: list[int] = []

    def request(self, numbers: list[int]) -> None:
        hashes = block_hashes(*numbers)
        self.number_of.update(zip(hashes, numbers, strict=True))
        output = request(self.manager, hashes)
        if output is None:
            return
        for victim in (self.number_of[block] for block in output.block_hashes_evicted):
            self.resident.remove(victim)
            if not self.resident.isdisjoint(range(3 * victim + 1, 3 * victim + 4)):
                self.too_early.append(victim)
        self.resident.update(self.number_of[block] for block in output.block_hashes_to_store)


@pytest.mark.parametrize("name", STRICT)
@given(st.lists(paths, min_size=5, max_size=60), st.integers(10, 24))
def test_no_block_leaves_before_those_behind_it(
    twin: ModuleType, name: str, requests: list[Path], capacity: int
) -> None:
    watched = Watched(twin.CPUOffloadingManager(16, capacity, name))
    for turns in requests:
        watched.request(nodes(turns))
        check_invariants(watched.manager)
    assert watched.too_early == []
