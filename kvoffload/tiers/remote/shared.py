"""The part that all shared media have in common: epochs, seals, deadlines and errors.

Structure
    The engine's threads call `SharedStore`: `find`, `read`, `write` and chores. It manages the
    epoch, makes seals, converts errors to statuses, and calls the seven methods of a `RemoteStore`.
Epochs
    The medium stores an epoch (see ``epoch``) beside the namespace. It is part of every block's
    name and seeds its seal: a new one forgets everything at once, for every process. `Agreement`
    decides whether a process adopts the medium's epoch or writes a new one. A put carries the epoch
    that its process used when it was submitted, and is dropped if the medium has another one:
    blocks computed before a `forget` are never stored after it. A full medium may refuse a new
    epoch. Then its epoch is deleted, which also makes every process forget.
Invariants
    No call exceeds its deadline if the medium's client supports deadlines. No text of a client or a
    server is logged: errors may have credentials.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import DROP, MOVING, QUERY, READ, TOUCH, WRITE, Block, Store
from kvoffload.tiers.epoch import Agreement, Decision
from kvoffload.tiers.metrics import LOWER, MISSING
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import Seal

from .store import LEAST_S, OtherEpochError, RemoteStore

__all__ = ["EPOCH_S", "SharedStore", "pack_keys"]

CHORE_S = 1.0
"""Time limit of a chore, seconds."""
EPOCH_S = 2.0
"""Time limit of the epoch's I/O, seconds; a job may end meanwhile, and the next one benefits."""
ROUNDS = 8
"""Most epochs written before the call fails, since other processes may write theirs, too."""
LOSS_LINES = {
    MISSING: "found no epoch on its medium: whatever was stored there is forgotten",
    LOWER: "found an older epoch on its medium than before: whatever was stored there is forgotten",
}


class SharedStore(Store):
    """The adapter between the engine's threads and a `RemoteStore`.

    Attributes
    ----------
    medium : RemoteStore
        The place of the blocks.
    lost : Counter of str
        Times that the medium's epoch was missing or lower, by cause, so that everything was
        forgotten. Any thread may read it.
    """

    direct = False

    def __init__(self, medium: RemoteStore) -> None:
        self.medium = medium
        self.block_bytes = self.slot_bytes = medium.block_bytes
        self.keys_per_query = medium.keys_per_query
        self.lost: Counter[str] = Counter()
        self._agreement = Agreement()
        self._epoch_lock = threading.Lock()  # guards the agreement
        self._medium_lock = threading.Lock()  # held while an epoch is read or written
        self._is_met = False  # the medium had the epoch at the last read
        self._met_at = 0.0  # time of that read

    def use(self, memory: Region) -> None:
        self.medium.use(memory)

    def close(self) -> None:
        """Close the connections of the medium."""
        self.medium.close()

    # -- epochs ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that this process uses, 0 for none; any thread may read it."""
        return self._agreement.epoch

    @property
    def owed(self) -> bool:
        """Whether the medium still needs an epoch, after a `forget` or a loss; any thread."""
        return self._agreement.owed

    @property
    def adopted(self) -> int:
        """Number of epochs that this process has used; any thread may read it."""
        return self._agreement.adopted

    def forget(self) -> None:
        """Use no epoch until `meet` has written a new one to the medium."""
        with self._epoch_lock:
            self._agreement.forget()
            self._is_met = False

    def meet(self) -> int:
        """Return the epoch once the medium has it, too; with I/O if that is unknown."""
        deadline = self.medium.deadline
        epoch = self._met_epoch()
        if epoch:
            return epoch
        # One thread at a time, so that each epoch is written once.
        if not self._medium_lock.acquire(timeout=max(LEAST_S, deadline - time.monotonic())):
            raise TimeoutError
        try:
            now = time.monotonic()
            epoch = self._met_epoch()
            if not epoch:
                self.begin(max(deadline, now + EPOCH_S))
                epoch = self._agree()
                self._met_at = now
        finally:
            self.begin(deadline)
            self._medium_lock.release()
        return epoch

    def _met_epoch(self) -> int:
        """Return the epoch if the medium is known to have it, otherwise 0."""
        epoch = self.epoch  # first, since a `forget` meanwhile clears the flag
        is_fresh = time.monotonic() - self._met_at <= self.medium.epoch_s
        return epoch if self._is_met and is_fresh else 0

    def recheck(self) -> None:
        """Read the epoch again before the next call."""
        self._is_met = False

    def _agree(self) -> int:
        """Return the medium's epoch once this process may use it."""
        found = self.medium.ask_epoch()
        for _ in range(ROUNDS):
            with self._epoch_lock:
                decision = self._agreement.answer(found)
                if not decision.write:
                    self._is_met = True
                    return self._agreement.epoch
                forgets = self._agreement.forgets
            if decision.loss:
                self.lost[decision.loss] += 1
                self.medium.say(LOSS_LINES[decision.loss])
            found = self._write(decision, forgets)
        raise OSError(errno.EIO, "the medium does not keep its epoch")

    def _write(self, decision: Decision, forgets: int) -> int | None:
        """Write an epoch; if the medium is full after a `forget`, delete its epoch instead."""
        try:
            return self.medium.raise_epoch(decision.write, decision.above)
        except Exception as error:
            is_full = self.medium.status_of(error) == Status.FULL
            if is_full and self.owed and self.medium.delete_epoch():
                with self._epoch_lock:
                    self._agreement.deleted(forgets)
                self.medium.say("is full and refused an epoch: it was made to forget without one")
            raise

    # -- calls of threads --------------------------------------------------------------------

    def begin(self, deadline: float) -> None:
        self.medium.deadline = deadline

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:  # noqa: ARG002
        return min(stop - start, self.medium.blocks_per_call)

    def find(self, run: Sequence[Block]) -> None:
        self._do(QUERY, run, None)

    def read(self, run: Sequence[Block]) -> None:
        """Read blocks and set their statuses; no error is raised."""
        self._do(READ, run, None)

    def write(self, run: Sequence[Block], epoch: int) -> None:
        """Write blocks and set their statuses; no error is raised.

        `epoch` is the one that this process used when they were put. If it uses another one now,
        they are dropped and OK. So are blocks that were put without an epoch, 0, since they may be
        older than the last `forget`.
        """
        if time.monotonic() > self.medium.deadline:
            _set_rest(run, Status.TIMEOUT)  # a hanging server must not hold the buffers
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
                    self.recheck()
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

    def chore(self, offset: int, data: bytes, *, sync: bool) -> None:  # noqa: ARG002
        """Do the chore of kind `offset` for the keys in `data`; OSError if it fails."""
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
    """Return stored keys, at most 41 bytes each, as one bytes object."""
    return b"".join(bytes([len(key)]) + key for key in keys)


def _unpack_keys(data: bytes) -> list[bytes]:
    keys, start = [], 0
    while start < len(data):
        stop = start + 1 + data[start]
        keys.append(data[start + 1 : stop])
        start = stop
    return keys
