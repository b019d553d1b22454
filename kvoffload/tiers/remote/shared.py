"""The part that is the same for every shared medium: epochs, seals, deadlines and errors.

Structure
    `SharedStore` is what the engine's threads call: `find`, `read`, `write` and chores. It looks
    after the epoch, makes seals, turns errors into statuses, and calls the seven methods of a
    `RemoteStore`.
Epochs
    An epoch (see ``epoch``) lies on the medium, beside the namespace. It is part of every block's
    name and seeds its seal: a new one forgets everything at once, for every process. It only rises.
    A process that finds a higher epoch than its own goes by that one from then on. One that finds a
    lower one - an older snapshot was restored, a replica took over - gives the medium its own back.
    One that finds none, or nonsense, gives it a higher one than its own: who cannot tell what was
    forgotten meanwhile forgets everything.
    A put carries the epoch that its process went by when it was submitted, and is dropped when the
    medium has another one: what was computed before a `forget` never comes to lie behind it.
Invariants
    The epoch of a process never falls.
    No call outlasts its deadline where the medium's client can be told one. Nothing that a client
    or a server says is logged: texts of errors may hold credentials.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Sequence

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import DROP, MOVING, QUERY, READ, TOUCH, WRITE, Block, Store
from kvoffload.tiers.epoch import new_epoch
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import Seal

from .store import LEAST_S, OtherEpochError, RemoteStore

__all__ = ["EPOCH_S", "SharedStore", "pack_keys"]

CHORE_S = 1.0
"""Seconds that a chore has."""
EPOCH_S = 2.0
"""Seconds that reading or writing the epoch has: a job may end meanwhile, the next one has it."""
ROUNDS = 8
"""Epochs that are given to a medium at most before the call fails: others give it theirs, too."""


class SharedStore(Store):
    """A `RemoteStore` as threads of the engine call it.

    Parameters
    ----------
    medium : RemoteStore
        Where blocks are kept.

    Attributes
    ----------
    medium : RemoteStore
        Where blocks are kept.
    epoch : int
        The epoch of this process, 0 where it has not learned one yet. It never falls, and may be
        read in any thread.
    owed : bool
        Whether the medium has yet to take the epoch of this process: after a `forget`, or because
        the medium lost it. May be read in any thread.
    """

    direct = False

    def __init__(self, medium: RemoteStore) -> None:
        self.medium = medium
        self.block_bytes = self.slot_bytes = medium.block_bytes
        self.keys_per_query = medium.keys_per_query
        self.epoch = 0
        self.owed = False
        self._epoch_lock = threading.Lock()
        self._medium_lock = threading.Lock()  # held while an epoch is read or written
        self._forgetting = False  # the epoch is of a `forget` here, and was never confirmed
        self._offered = False  # the medium may have had the epoch
        self._is_met = False  # the medium had the epoch when it was last asked
        self._met_at = 0.0  # when that was

    def use(self, memory: Region) -> None:
        """Register the buffers with the medium."""
        self.medium.use(memory)

    def close(self) -> None:
        """Close the connections of the medium."""
        self.medium.close()

    # -- epochs ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Adopt a new epoch; `meet` gives it to the medium."""
        with self._epoch_lock:
            self._go_by(new_epoch(self.epoch))
            self._forgetting = self.owed = True

    def meet(self) -> int:
        """Return the epoch, once the medium has it too; I/O, where that is not known.

        Raises
        ------
        Exception
            Whatever the medium says.
        """
        deadline = self.medium.deadline
        if self._has_met():
            return self.epoch
        # One thread at a time: or an older epoch could be written after a newer one.
        if not self._medium_lock.acquire(timeout=max(LEAST_S, deadline - time.monotonic())):
            raise TimeoutError
        try:
            now = time.monotonic()
            if not self._has_met():
                self.begin(max(deadline, now + EPOCH_S))
                self._agree()
                self._met_at = now
        finally:
            self.begin(deadline)
            self._medium_lock.release()
        return self.epoch

    def _has_met(self) -> bool:
        return self._is_met and time.monotonic() - self._met_at <= self.medium.epoch_s

    def doubt(self) -> None:
        """Ask for the epoch before the next call."""
        self._is_met = False

    def _agree(self) -> None:
        """Adopt the medium's epoch where it is higher; otherwise give it that of this process."""
        found = self.medium.ask_epoch()
        for _ in range(ROUNDS):
            with self._epoch_lock:
                wanted, above = self._wanted(found)
                if wanted == found:
                    self._is_met = self._offered = True
                    self.owed = self._forgetting = False
                    return
                self._offered = True
            found = self.medium.raise_epoch(wanted, above)
        raise OSError(errno.EIO, "the medium does not keep its epoch")

    def _wanted(self, found: int | None) -> tuple[int, int]:
        """Adopt what an answer of the medium calls for; under the lock.

        Returns
        -------
        epoch, above : int
            Those of `RemoteStore.raise_epoch`.
        """
        if found is None and (self._offered or not self.epoch):
            if self.epoch:
                self.medium.say("has lost its epoch: whatever was stored is forgotten")
                self.owed = True
            if not self._forgetting:  # one that another has written meanwhile does as well
                return new_epoch(self.epoch), self.epoch
            self._go_by(new_epoch(self.epoch))
        elif found is None:
            pass  # the medium has never had what it owes
        elif found < self.epoch:
            if self._offered and not self._forgetting:
                self.medium.say("has an older epoch than it had: what it was given since is lost")
            self.owed = True
        elif found > self.epoch:
            # A forget is above whatever it met: that may have been there when it was called.
            self._go_by(new_epoch(found) if self._forgetting else found)
        return self.epoch, self.epoch - 1

    def _go_by(self, epoch: int) -> None:
        self._is_met = self._offered = False
        self.epoch = epoch

    # -- what threads call -------------------------------------------------------------------

    def begin(self, deadline: float) -> None:
        """Set the deadline of the calls of this thread, in seconds of the monotonic clock."""
        self.medium.deadline = deadline

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:  # noqa: ARG002
        """Return how many of the blocks from `start` on move in one call."""
        return min(stop - start, self.medium.blocks_per_call)

    def find(self, run: Sequence[Block]) -> None:
        """Set the statuses of blocks, to OK, MISS, or why it is not known."""
        self._do(QUERY, run, None)

    def read(self, run: Sequence[Block]) -> None:
        """Read blocks and set their statuses; no error is raised."""
        self._do(READ, run, None)

    def write(self, run: Sequence[Block], epoch: int) -> None:
        """Write blocks and set their statuses; no error is raised.

        `epoch` is what this process went by when they were put. Where it is no longer that, they
        are dropped and OK; and so are those that were put before any was known, with 0: what was
        forgotten before it was learned cannot be told from what was not.
        """
        if time.monotonic() > self.medium.deadline:
            _set_rest(run, Status.TIMEOUT)  # a server that hangs must not keep the buffers
            return
        self._do(WRITE, run, epoch)

    def _do(self, op: int, run: Sequence[Block], put_epoch: int | None) -> None:
        try:
            for _ in range(3):
                epoch = self.meet()
                if put_epoch is not None and put_epoch != epoch:
                    _set_rest(run, Status.OK)
                    return
                try:
                    self._act(op, run, epoch)
                except OtherEpochError:
                    self.doubt()
                else:
                    return
            _set_rest(run, Status.FAILED if op == WRITE else Status.MISS)
        except Exception as error:  # noqa: BLE001 # a thread that ends would keep its job for ever
            _set_rest(run, self.medium.meaning(error))

    def _act(self, op: int, run: Sequence[Block], epoch: int) -> None:
        medium = self.medium
        if op == QUERY:
            medium.find(run, epoch)
        elif op == READ:
            medium.fetch(run, epoch)
        else:
            content_bytes = medium.content_bytes
            for block in run:
                content = block.views[0][:content_bytes]
                seal = Seal.of(medium.fingerprint, block.key, content)
                block.views[0][content_bytes:] = seal.pack(epoch)
            medium.store(run, epoch)

    def chore(self, offset: int, data: bytes, sync: bool) -> None:  # noqa: ARG002
        """Do a chore: `offset` says which, `data` has the keys.

        Raises
        ------
        OSError
            If it could not be done.
        """
        self.begin(time.monotonic() + CHORE_S)
        try:
            epoch = self.meet()
            keys = _unpack_keys(data)
            if offset == DROP:
                self.medium.drop(keys, epoch)
            elif offset == TOUCH:
                self.medium.touch(keys, epoch)
        except Exception as error:
            self.medium.meaning(error)
            raise OSError(errno.EIO, "a chore could not be done") from error


def _set_rest(run: Sequence[Block], status: Status) -> None:
    for block in run:
        if block.status == MOVING:
            block.status = status


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Return stored keys, 41 bytes at most each, as one string of bytes."""
    return b"".join(bytes([len(key)]) + key for key in keys)


def _unpack_keys(data: bytes) -> list[bytes]:
    keys, place = [], 0
    while place < len(data):
        stop = place + 1 + data[place]
        keys.append(data[place + 1 : stop])
        place = stop
    return keys
