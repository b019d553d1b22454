"""Calls drawn at random, of managers, policies and pools, for scripts of processes of their own."""

from __future__ import annotations

import random
from typing import Any

from kvoffload import BlockStatus

VIEWS = ("blocks", "t1", "t2", "b1", "b2", "small", "main", "rings")


def look(policy: Any, key: bytes) -> None:
    """Read everything that a policy shows."""
    for name in VIEWS:
        views = getattr(policy, name, ())
        for view in views if name == "rings" else (views,):
            list(view), len(view), repr(view), key in view
    policy.block_table, len(policy), policy.num_ghosts


class Drive:
    """Draws calls on keys; one may be used by several threads, with a generator each.

    Parameters
    ----------
    keys : list of bytes
        The keys that calls choose from, each with its place here as a block's number.
    batch : int
        Most keys of a call.
    """

    def __init__(self, keys: list[bytes], batch: int = 20) -> None:
        self.keys = keys
        self.numbers = {key: number for number, key in enumerate(keys)}
        self.batch = batch
        self.requests: list[Any] = []  # open ones

    def manager(self, manager: Any, generator: random.Random, size: int = 2**31) -> None:
        """Make a call of a manager of `size` blocks, or of one of its requests."""
        count = generator.randrange(1, self.batch)
        batch = [generator.choice(self.keys) for _ in range(count)]
        choice = generator.randrange(11)
        if choice == 0:
            manager.lookup(iter(batch))
        elif choice == 1:
            manager.touch(batch)
        elif choice == 2:
            self._check(manager.prepare_load(batch), size)
            manager.complete_load(batch)
        elif choice in (3, 4):
            output = manager.prepare_store(batch)
            if output is not None:
                self._check(output.store_spec, size)
                manager.complete_store(output.block_hashes_to_store, generator.random() < 0.8)
        elif choice == 5:
            list(manager.take_events())
        elif choice == 6:
            manager.stats(), manager.block_table, manager.events
            len(manager), batch[0] in manager, repr(manager)
            look(manager.policy, batch[0])
        elif choice > 7:
            self._request(manager, batch, generator)
        elif generator.random() < 0.02:
            manager.reset_cache()

    def _request(self, manager: Any, batch: list[bytes], generator: random.Random) -> None:
        self.requests.append(manager.begin(batch))
        try:  # a thread or a finaliser may shorten the list: a copy of it crashes Python 3.10
            request = self.requests[generator.randrange(len(self.requests))]
        except (IndexError, ValueError):
            return
        choice = generator.randrange(6)
        if choice == 0:
            found = request.lookup()
            request.prepare_load(0, found)
            request.complete_load(0, found)
        elif choice == 1:
            request.prepare_store()
        elif choice == 2:
            request.complete_store(generator.random() < 0.8)
        elif choice == 3:
            request.extend(iter(batch[:2]))
        elif choice == 4:
            request.finish()
        len(request), request.hashes, request.is_finished, repr(request)
        if len(self.requests) > 20:
            del self.requests[:10]

    @staticmethod
    def _check(spec: Any, size: int) -> None:
        assert all(0 <= slot < size for slot in spec.block_ids.tolist()), spec

    def policy(self, policy: Any, generator: random.Random) -> None:
        """Make a call of a policy; a status that it gives must be that of the key."""
        key = generator.choice(self.keys)
        choice = generator.randrange(7)
        if choice in (0, 1):
            status = BlockStatus(self.numbers[key])
            status.ref_cnt = generator.choice([0, 0, 0, 1])
            policy.insert(key, status)
        elif choice == 2:
            policy.remove(key)
        elif choice == 3:
            policy.touch([generator.choice(self.keys) for _ in range(5)])
        elif choice == 4:
            policy.evict(generator.randrange(4), [key])
        elif choice == 5:
            status = policy.get(key)
            assert status is None or status.block_id == self.numbers[key], (key, status)
            look(policy, key)
        elif generator.random() < 0.02:
            policy.clear()

    def pool(self, pool: Any, generator: random.Random) -> None:
        """Take blocks of a pool, if it has as many, and give them back."""
        try:
            taken = pool.allocate_blocks(self.keys[: generator.randrange(4)])
        except ValueError:
            return
        for status in taken:
            pool.free(status)
