"""The interface of shared media: the six methods that a medium implements.

A `RemoteStore` is a dictionary of bytes on a medium that other processes share and that may not
answer. `RemoteTier` makes a tier of one. The common parts are implemented once around the six
methods: threads, buffers and seals (``engine``), visits, deadlines and errors (here), and verdicts
(``tier``).

Invariants
    No call exceeds its deadline if the medium's client supports deadlines. No text of a client or a
    server is logged: errors may have credentials.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffload.tiers.base import Closing, Status
from kvoffload.tiers.engine.contract import DROP, MOVING, READ, TOUCH, WRITE, Block
from kvoffload.tiers.generation import NUMBER_BYTES
from kvoffload.tiers.metrics import write_seldom
from kvoffload.tiers.namespace import MAX_JSON_BYTES, Namespace, check_namespace
from kvoffload.tiers.seal import SEAL_BYTES

LEAST_S = 0.005
"""Minimum seconds for a call."""
CHORE_S = 1.0
"""Time limit of a chore, seconds."""
VISIT_S = 2.0
"""Time limit of a visit, seconds; a job may end meanwhile, and the next one benefits."""


class ForeignNamespaceError(Exception):
    """The place of this namespace has another namespace's JSON."""


class _Call(threading.local):
    """The call that the present thread is making."""

    deadline = 0.0


class RemoteStore(Closing, ABC):
    """A medium that other processes share.

    Six methods implement it: `visit`, `find`, `fetch`, `store`, `drop` and `status_of`. Threads of
    the tier call them, several at once. An exception of a method is passed to `status_of`; blocks
    whose `Block.status` was set keep it.

    A block is kept under a name made of its key and of a **generation**, a number of 64 bits: see
    `Tier.forget`. Its value is its bytes followed by its seal, `block_bytes` in all. The library
    makes the seal, and compares it with whatever a call has read.

    Parameters
    ----------
    namespace : Namespace
        The namespace of the bytes.

    Attributes
    ----------
    namespace : Namespace
        The namespace of the bytes. Names on the medium should contain its ``fingerprint``.
    block_bytes : int
        Bytes of a value: a block and its seal.
    name : str
        The tier's label in logs; the tier sets it.
    place : str
        Address of the medium for `repr`, without credentials.
    blocks_per_call : int
        Most blocks in a call of `fetch` or `store`.
    keys_per_query : int
        Most blocks in a call of `find`.
    visit_s : float
        Seconds after which `visit` is called again.
    touch_s : float or None
        Minimum seconds between touches of a block; None: `touch` is not called.
    """

    name = ""
    place = ""
    blocks_per_call = 8
    keys_per_query = 1024
    visit_s = 60.0
    touch_s: float | None = None

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = check_namespace(namespace)
        self.fingerprint = namespace.fingerprint
        self.content_bytes = namespace.block_bytes
        self.block_bytes = namespace.block_bytes + SEAL_BYTES
        self._call = _Call()
        self._logged: dict[str, float] = {}
        self._visit_lock = threading.Lock()  # held during a visit
        self._visited_at = -math.inf

    # -- the six methods ---------------------------------------------------------------------

    @abstractmethod
    def visit(self) -> None:
        """Compare the namespace's JSON on the medium with `is_ours`; write it if that is False.

        It is called before the first call of another method, and then from time to time.
        """

    @abstractmethod
    def find(self, run: Sequence[Block], generation: int) -> None:
        """Set the statuses of blocks to OK or MISS."""

    @abstractmethod
    def fetch(self, run: Sequence[Block], generation: int) -> None:
        """Read values; pass each that exists to `check`, and set the other statuses to MISS.

        ``block.views[0]`` is a buffer of `block_bytes` that the value may be read into.
        """

    @abstractmethod
    def store(self, run: Sequence[Block], generation: int) -> None:
        """Write ``block.views[0]``, the value, if there is none yet, and set statuses to OK.

        The buffer belongs to another block as soon as the method returns.
        """

    @abstractmethod
    def drop(self, keys: Sequence[bytes], generation: int) -> None:
        """Remove blocks; missing ones are ignored."""

    @abstractmethod
    def status_of(self, error: Exception) -> Status:
        """Return the status of blocks whose only result is an error."""

    # -- optional methods --------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes], generation: int) -> None:
        """Mark blocks as used, if the medium does not do so itself; see `touch_s`."""

    def start(self) -> None:
        """Begin background work, when there are threads."""

    def stop(self) -> None:
        """End background work, before the tier is closed."""

    def take_evicted(self) -> list[tuple[int, bytes]]:
        """Return generation and key of blocks that this process evicted since the last call."""
        return []

    def abandon(self) -> None:
        """Release the parent's resources in a forked child."""

    def close(self) -> None:
        """Close connections."""

    def name_of(self, error: Exception) -> str:
        """Return an error's name for the log; its text may have credentials and is never logged."""
        return type(error).__name__

    # -- calls of threads --------------------------------------------------------------------

    def call(
        self,
        op: int,
        keys: list[bytes],
        slots: list[int],
        buffers: list[memoryview],
        *,
        deadline: float,
        generation: int,
    ) -> list[int]:
        """Move a run of blocks and return their statuses; no error is raised."""
        views = [[buffer] for buffer in buffers] or [[]] * len(keys)
        run = [Block(*each) for each in zip(keys, slots, views, strict=True)]
        self.deadline = deadline
        if op == WRITE and time.monotonic() > deadline:
            return [Status.TIMEOUT] * len(run)  # a hanging server must not hold the buffers
        act = {READ: self.fetch, WRITE: self.store}.get(op, self.find)
        try:
            self._visit_if_due()
            act(run, generation)
        except Exception as error:  # noqa: BLE001 # every error is a status
            rest = self.meaning(error)
            return [rest if block.status == MOVING else block.status for block in run]
        return [block.status for block in run]

    def chore(self, kind: int, data: bytes) -> Status:
        """Remove or touch the keys in `data`."""
        self.deadline = time.monotonic() + CHORE_S
        try:
            self._visit_if_due()
            generation, keys = _unpack_keys(data)
            if kind == DROP:
                self.drop(keys, generation)
            elif kind == TOUCH:
                self.touch(keys, generation)
        except Exception as error:  # noqa: BLE001 # it is logged
            self.meaning(error)
            return Status.FAILED
        return Status.OK

    def _visit_if_due(self) -> None:
        """Visit the medium if the last visit is too long ago; one thread at a time."""
        if self._is_fresh():
            return
        deadline = self.deadline
        if not self._visit_lock.acquire(timeout=max(LEAST_S, deadline - time.monotonic())):
            raise TimeoutError
        try:
            if not self._is_fresh():
                now = time.monotonic()
                self.deadline = max(deadline, now + VISIT_S)
                self.visit()
                self._visited_at = now
        finally:
            self.deadline = deadline
            self._visit_lock.release()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._visited_at <= self.visit_s

    # -- helpers -----------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Deadline of the present call of this thread, in monotonic seconds."""
        return self._call.deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._call.deadline = deadline

    def seconds_left(self) -> float:
        """Return the seconds left for the present call."""
        return max(LEAST_S, self.deadline - time.monotonic())

    def is_overdue(self) -> bool:
        """Return whether the present call should have ended."""
        return time.monotonic() > self.deadline + LEAST_S

    @property
    def json_bytes(self) -> int:
        """Most bytes of a namespace's JSON to read."""
        return max(MAX_JSON_BYTES, len(self.namespace.json) + 1)

    def is_ours(self, found: bytes | None) -> bool:
        """Return whether bytes are this namespace's JSON; False if they are missing or incomplete.

        Raises
        ------
        ForeignNamespaceError
            If they are another namespace's JSON. The medium must not catch it.
        """
        if found == self.namespace.json.encode("ascii"):
            return True
        try:
            is_json = isinstance(json.loads(found or b""), dict)
        except (ValueError, RecursionError):
            is_json = False
        if is_json or len(found or b"") >= self.json_bytes:
            raise ForeignNamespaceError
        return False

    def check(self, block: Block, found: memoryview, generation: int) -> None:  # noqa: ARG002
        """Have the value that was found under a block's name compared with its seal.

        It may be the block's own buffer; any other is copied there.
        """
        found, buffer = memoryview(found), block.views[0]
        if len(found) != self.block_bytes:
            block.status = Status.CORRUPT
            return
        if found.obj is not buffer.obj:
            buffer[:] = found
        block.status = Status.OK  # the pool, which has the block's seed, finds corrupt ones

    def meaning(self, error: Exception) -> Status:
        """Log an error and return the status of its blocks."""
        if isinstance(error, ForeignNamespaceError):
            self.say("is refused: its place belongs to another namespace", logging.ERROR)
            return Status.FAILED
        try:
            status = self.status_of(error)
        except Exception:  # noqa: BLE001 # a thread that ends would keep its job for ever
            status = Status.FAILED
        # The text of an error may have an address with a password, or a server's own words.
        where = ""
        if status == Status.FAILED:
            for frame, line in traceback.walk_tb(error.__traceback__):
                where = f" at {Path(frame.f_code.co_filename).name}:{line}"
        self.say(f"met {self.name_of(error)}{where}: {status.name}")
        return status

    def say(self, what: str, level: int = logging.WARNING) -> None:
        """Log a line about the tier; repeat the same line at most once a minute."""
        write_seldom(self._logged, what, level, "tier %r %s", self.name, what)


def as_settings(name: str, settings: Any) -> Mapping[str, Any]:
    """Return settings, empty for None; TypeError, which shows no value, for anything else."""
    if not isinstance(settings, Mapping | None):
        raise TypeError(f"{name} must be a mapping, got {type(settings).__name__}")
    return settings or {}


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
