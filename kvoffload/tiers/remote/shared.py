"""The part that all shared media have in common: visits, deadlines and errors.

Structure
    The engine's threads call `SharedStore`. It visits the medium, calls the other methods of a
    `RemoteStore`, and converts errors to statuses.
Invariants
    No call exceeds its deadline if the medium's client supports deadlines. No text of a client or a
    server is logged: errors may have credentials.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import DROP, MOVING, READ, TOUCH, WRITE, Block, Store
from kvoffload.tiers.generation import NUMBER_BYTES

from .store import LEAST_S, RemoteStore

__all__ = ["VISIT_S", "SharedStore", "pack_keys"]

CHORE_S = 1.0
"""Time limit of a chore, seconds."""
VISIT_S = 2.0
"""Time limit of a visit, seconds; a job may end meanwhile, and the next one benefits."""


class SharedStore(Store):
    """The adapter between the engine's threads and a `RemoteStore`, the `medium`."""

    def __init__(self, medium: RemoteStore) -> None:
        self.medium = medium
        self._lock = threading.Lock()  # held during a visit
        self._visited_at = -math.inf

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
                self.medium.deadline = max(deadline, now + VISIT_S)
                self.medium.visit()
                self._visited_at = now
        finally:
            self.medium.deadline = deadline
            self._lock.release()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._visited_at <= self.medium.visit_s

    # -- calls of threads --------------------------------------------------------------------

    def move(self, op: int, run: Sequence[Block], deadline: float, generation: int) -> None:
        """Set the statuses of all blocks; no error is raised."""
        medium = self.medium
        medium.deadline = deadline
        if op == WRITE and time.monotonic() > deadline:
            _set_rest(run, Status.TIMEOUT)  # a hanging server must not hold the buffers
            return
        act = {READ: medium.fetch, WRITE: medium.store}.get(op, medium.find)
        try:
            self.visit()
            act(run, generation)
        except Exception as error:  # noqa: BLE001 # every error is a status
            _set_rest(run, medium.meaning(error))

    def chore(self, kind: int, data: bytes) -> Status:
        """Remove or touch the keys in `data`."""
        self.medium.deadline = time.monotonic() + CHORE_S
        try:
            self.visit()
            generation, keys = _unpack_keys(data)
            if kind == DROP:
                self.medium.drop(keys, generation)
            elif kind == TOUCH:
                self.medium.touch(keys, generation)
        except Exception as error:  # noqa: BLE001 # it is logged
            self.medium.meaning(error)
            return Status.FAILED
        return Status.OK


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
