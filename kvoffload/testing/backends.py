"""A suite of tests for users' own backends.

`BackendConformance` is the contract of `Backend` as tests: subclass it in a test file, implement
`make_backend`, and pytest finds the rest. It needs no package.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from kvoffload import (
    ARCOffloadingManager,
    Backend,
    BlockStatus,
    LoadStoreSpec,
    LRUOffloadingManager,
)

from ._expect import equal, make_keys, require

__all__ = ["BackendConformance"]


class BackendConformance(ABC):
    """The contract of a backend, one test per rule."""

    @abstractmethod
    def make_backend(self, num_blocks: int) -> Backend[Any]:
        """Return a new backend that can allocate so many blocks, a multiple of 4."""

    def place_of(self, backend: Backend[Any], status: BlockStatus) -> object:
        """Return where a block is, which no other block may be; override for other media.

        By default its ``block_id``.
        """
        del backend
        return status.block_id

    def test_a_new_backend_can_allocate_all_its_blocks(self) -> None:
        for num_blocks in (0, 4, 12):
            backend = self.make_backend(num_blocks)
            equal(list(backend.allocate_blocks([])), [], "statuses of no blocks")
            equal(backend.get_num_free_blocks(), num_blocks, "number of free blocks")
            allocated = backend.allocate_blocks(make_keys(num_blocks))
            equal(len(allocated), num_blocks, "number of statuses")
            equal(backend.get_num_free_blocks(), 0, "number of free blocks then")

    def test_a_status_is_new_and_pending_and_has_a_place_of_its_own(self) -> None:
        backend = self.make_backend(8)
        statuses = [*backend.allocate_blocks(make_keys(5))]
        statuses += backend.allocate_blocks(make_keys(3, 5))
        for status in statuses:
            require(isinstance(status, BlockStatus), f"must be a BlockStatus: {status!r}")
            equal(status.ref_cnt, -1, "ref_cnt of a pending block")
        equal(len({id(status) for status in statuses}), 8, "number of objects")
        equal(len({self.place_of(backend, one) for one in statuses}), 8, "number of places")

    def test_a_place_that_was_freed_is_allocated_again(self) -> None:
        backend = self.make_backend(4)
        statuses = backend.allocate_blocks(make_keys(4))
        places = {self.place_of(backend, status) for status in statuses[1:3]}
        for status in statuses[1:3]:
            backend.free(status)
        equal(backend.get_num_free_blocks(), 2, "number of free blocks")
        again = backend.allocate_blocks(make_keys(2, 4))
        require({*map(id, again)}.isdisjoint(map(id, statuses)), "statuses must be new objects")
        equal({self.place_of(backend, one) for one in again}, places, "places")

    def test_a_spec_changes_nothing(self) -> None:
        backend = self.make_backend(4)
        statuses = backend.allocate_blocks(make_keys(4))
        for some in (statuses, statuses[:1], []):
            spec = backend.get_load_store_spec(make_keys(len(some)), some)
            require(isinstance(spec, LoadStoreSpec), f"must be a LoadStoreSpec: {spec!r}")
        equal(backend.get_num_free_blocks(), 0, "number of free blocks")

    def test_a_spec_has_the_blocks_in_their_order(self) -> None:
        backend, keys = self.make_backend(4), make_keys(4)
        statuses = list(backend.allocate_blocks(keys))

        def spec_of(*which: int) -> Any:
            some = [statuses[index] for index in which]
            return backend.get_load_store_spec([keys[index] for index in which], some)

        if not hasattr(spec_of(0), "block_ids"):
            require(spec_of(0, 1) != spec_of(1, 0), "specs in two orders must differ")
            return
        for first, second in ((0, 1), (1, 0)):
            each = [*spec_of(first).block_ids, *spec_of(second).block_ids]
            equal([*spec_of(first, second).block_ids], each, "block_ids of a spec")

    def test_managers_never_have_two_blocks_in_one_place(self) -> None:
        for create in (LRUOffloadingManager, ARCOffloadingManager):
            dice, backend = random.Random(3), self.make_backend(12)  # noqa: S311
            manager: Any = create(backend)
            for _ in range(300):
                prompt = make_keys(dice.randrange(1, 8), dice.randrange(30))
                hits = prompt[: manager.lookup(prompt)]
                manager.prepare_load(hits)
                manager.complete_load(hits)
                output = manager.prepare_store(prompt)
                if output is not None:
                    stored = output.block_hashes_to_store
                    manager.complete_store(stored, success=dice.random() < 0.9)
                equal(len(manager) + backend.get_num_free_blocks(), 12, "blocks used and free")
                statuses = [manager.policy.get(key) for key in make_keys(40)]
                places = [self.place_of(backend, one) for one in statuses if one is not None]
                equal(len(set(places)), len(places), "number of places")
