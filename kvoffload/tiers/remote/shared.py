"""The part that all shared media have in common: visits, seals, deadlines and errors.

Structure
    The engine's threads call `SharedStore`: `find`, `read`, `write` and chores. It visits the
    medium, makes seals, converts errors to statuses, and calls the other methods of a
    `RemoteStore`.
Invariants
    No call exceeds its deadline if the medium's client supports deadlines. No text of a client or a
    server is logged: errors may have credentials.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import DROP, MOVING, TOUCH, Block, Store
from kvoffload.tiers.generation import NUMBER_BYTES
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import Seal

from .store import LEAST_S, RemoteStore

__all__ = ["VISIT_S", "SharedStore", "pack_keys"]

CHORE_S = 1.0
"""Time limit of a chore, seconds."""
VISIT_S = 2.0
"""Time limit of a visit, seconds; a job may end meanwhile, and the next one benefits."""


class SharedStore(Store):
    """The adapter between the engine's threads and a `RemoteStore`, the `medium`."""

    direct = False

    def __init__(self, medium: RemoteStore) -> None:
        self.medium = medium
        self.block_bytes = self.slot_bytes = medium.block_bytes
        self.keys_per_query = medium.keys_per_query
        self._lock = threading.Lock()  # held during a visit
        self._visited_at = -math.inf

    def use(self, memory: Region) -> None:
        self.medium.use(memory)

    def close(self) -> None:
        """Close the connections of the medium."""
        self.medium.close()

    def visit(self) -> None:
        """Visit the medium if the last visit is too long ago; one thread at a time."""
        if self._is_fresh():
            return
        deadline = self.medium.deadline
        if not self._lock.acquire(timeout=max(LEAST_S, deadline - time.monotonic())):
            raise TimeoutError
        try:
            if not self._is_fresh():
                now = time.monotonic()
                self.begin(max(deadline, now + VISIT_S))
                self.medium.visit()
                self._visited_at = now
        finally:
            self.begin(deadline)
            self._lock.release()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._visited_at <= self.medium.visit_s

    # -- calls of threads --------------------------------------------------------------------

    def begin(self, deadline: float) -> None:
        self.medium.deadline = deadline

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:  # noqa: ARG002
        return min(stop - start, self.medium.blocks_per_call)

    def find(self, run: Sequence[Block], generation: int) -> None:
        self._do(partial(self.medium.find, run, generation), run)

    def read(self, run: Sequence[Block], generation: int) -> None:
        """Read blocks and set their statuses; no error is raised."""
        self._do(partial(self.medium.fetch, run, generation), run)

    def write(self, run: Sequence[Block], generation: int) -> None:
        """Write blocks and set their statuses; no error is raised."""
        if time.monotonic() > self.medium.deadline:
            _set_rest(run, Status.TIMEOUT)  # a hanging server must not hold the buffers
            return
        self._do(partial(self._store, run, generation), run)

    def _do(self, act: Callable[[], None], run: Sequence[Block]) -> None:
        try:
            self.visit()
            act()
        except Exception as error:  # noqa: BLE001 # a thread that ends would keep its job for ever
            _set_rest(run, self.medium.meaning(error))

    def _store(self, run: Sequence[Block], generation: int) -> None:
        medium = self.medium
        content_bytes = medium.content_bytes
        for block in run:
            content = block.views[0][:content_bytes]
            seal = Seal.of(medium.fingerprint, block.key, content)
            block.views[0][content_bytes:] = seal.pack(generation)
        medium.store(run, generation)

    def chore(self, offset: int, data: bytes) -> None:
        """Do the chore of kind `offset` for the keys in `data`; OSError if it fails."""
        self.begin(time.monotonic() + CHORE_S)
        try:
            self.visit()
            generation, keys = _unpack_keys(data)
            if offset == DROP:
                self.medium.drop(keys, generation)
            elif offset == TOUCH:
                self.medium.touch(keys, generation)
        except Exception as error:
            self.medium.meaning(error)
            raise OSError(errno.EIO, "a chore could not be done") from error


def _set_rest(run: Sequence[Block], status: Status) -> None:
    for block in run:
        if block.status == MOVING:
            block.status = status


def pack_keys(generation: int, keys: Iterable[bytes]) -> bytes:
    """Return a generation and stored keys, at most 41 bytes each, as one bytes object."""
    first = generation.to_bytes(NUMBER_BYTES, "little")
    return first + b"".join(bytes([len(key)]) + key for key in keys)


def _unpack_keys(data: bytes) -> tuple[int, list[bytes]]:
    generation = int.from_bytes(data[:NUMBER_BYTES], "little")
    keys, start = [], NUMBER_BYTES
    while start < len(data):
        stop = start + 1 + data[start]
        keys.append(data[start + 1 : stop])
        start = stop
    return generation, keys
