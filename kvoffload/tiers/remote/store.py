"""What every store past this machine has in common: an epoch, deadlines, errors, and its threads.

A medium that several processes share, and that may hang, needs three things that a local one does
not: questions that need I/O, calls that know when to give up, and one place that says which blocks
are forgotten.

Structure
    Threads have a third kind of job for it, the query, whose blocks need no memory. They call
    `RemoteStore.find`, `read` and `write`, which look after the epoch and errors and call what a
    medium implements: `_find`, `_fetch`, `_store` and others.
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
    The epoch that a process goes by never falls.
    No call outlasts its deadline where the medium's client can be told one. Nothing that a client
    or a server says is logged: texts of errors may hold credentials.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import DROP, MOVING, QUERY, READ, TOUCH, WRITE, Block, Store
from kvoffload.tiers.epoch import new_epoch
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import SEAL_BYTES, Seal

__all__ = ["ForeignNamespaceError", "OtherEpochError", "RemoteStore", "pack_keys"]

log = logging.getLogger("kvoffload.tiers")

CHORE_S = 1.0
"""Seconds that a chore has."""
EPOCH_S = 2.0
"""Seconds that reading or writing the epoch has: a job may end meanwhile, the next one has it."""
LEAST_S = 0.005
"""Seconds that a call has at least."""
ROUNDS = 8
"""Epochs that are given to a medium at most before the call fails: others give it theirs, too."""
LOG_S = 60.0
"""Seconds between two lines of log of the same kind."""
MAX_NAMESPACE_BYTES = 2**20
"""Bytes of the namespace's JSON that are read at most."""


class OtherEpochError(Exception):
    """Say that the medium has another epoch than a call went by, or none."""


class ForeignNamespaceError(Exception):
    """Say that the place of this namespace has the JSON of another one."""


class _Call(threading.local):
    """What the present thread is doing."""

    deadline = 0.0


class RemoteStore(Store):
    """Blocks on a medium that other processes share.

    A block is kept as its bytes and behind them its seal. A buffer has room for both.

    Parameters
    ----------
    name : str
        The tier's label, for logs.
    namespace : Namespace
        What the bytes mean.

    Attributes
    ----------
    blocks_per_call : int
        Blocks that a read or a write moves at most.
    keys_per_query : int
        Keys that a query asks for at most in one call.
    epoch_s : float
        Seconds that an epoch is believed before it is read again.
    epoch : int
        What this process goes by, 0 where it has not learned one yet. It never falls, and may be
        read in any thread.
    owed : bool
        Whether the medium has yet to take an epoch that this process goes by: after a `forget`, or
        because it lost it. May be read in any thread.
    """

    direct = False
    blocks_per_call = 8
    keys_per_query = 1024
    epoch_s = 1.0

    def __init__(self, name: str, namespace: Namespace) -> None:
        self.name = name
        self.namespace = namespace
        self.fingerprint = namespace.fingerprint
        self.content_bytes = namespace.block_bytes
        self.block_bytes = self.slot_bytes = namespace.block_bytes + SEAL_BYTES
        self.epoch = 0
        self.owed = False
        self._call = _Call()
        self._epoch_lock = threading.Lock()
        self._medium_lock = threading.Lock()  # held while an epoch is read or written
        self._forgetting = False  # the epoch is of a `forget` here, and was never confirmed
        self._offered = False  # the medium may have had the epoch
        self._is_met = False  # the medium had the epoch when it was last asked
        self._met_at = 0.0  # when that was
        self._logged: dict[str, float] = {}

    # -- what a medium implements ------------------------------------------------------------

    @abstractmethod
    def _ask_epoch(self) -> int | None:
        """Return the medium's epoch; None where there is none, or nonsense (`parse_epoch`).

        The namespace's JSON is compared first, see `_compare`, or written where there is none, or
        a half.
        """

    @abstractmethod
    def _raise_epoch(self, epoch: int, above: int) -> int | None:
        """Give the medium an epoch, unless it has one above another; return what it has then.

        `above` is less than `epoch`: one less, where nothing but a higher epoch is to stay.
        Whatever else lies in its place, of any kind, is replaced. No other call may come between
        the look and the change, as far as the medium can prevent it. None: it has nothing that can
        be read.
        """

    @abstractmethod
    def _find(self, run: Sequence[Block], epoch: int) -> None:
        """Set the statuses of blocks to OK or MISS."""

    @abstractmethod
    def _fetch(self, run: Sequence[Block], epoch: int) -> None:
        """Read blocks, check them with `_check`, which sets `Block.views`, and set statuses."""

    @abstractmethod
    def _store(self, run: Sequence[Block], epoch: int) -> None:
        """Write buffers, which have bytes and seal, where there is no block; set statuses."""

    @abstractmethod
    def _drop(self, keys: Sequence[bytes], epoch: int) -> None:
        """Remove blocks."""

    def _touch(self, keys: Sequence[bytes], epoch: int) -> None:
        """Mark blocks as used, where the medium does not do so itself."""

    @abstractmethod
    def _status_of(self, error: Exception) -> Status:
        """Return what an error means for blocks of which nothing else is known."""

    def use(self, memory: Region) -> None:
        """Take note of the buffers that blocks lie in, where a client has to know them."""

    def close(self) -> None:
        """Give connections back."""

    # -- for these ---------------------------------------------------------------------------

    def seconds_left(self) -> float:
        """Return how long the present call may take."""
        return max(LEAST_S, self._call.deadline - time.monotonic())

    def is_overdue(self) -> bool:
        """Tell whether the present call should have ended."""
        return time.monotonic() > self._call.deadline + LEAST_S

    @property
    def _json_bytes(self) -> int:
        """Bytes of a namespace's JSON that are read at most."""
        return max(MAX_NAMESPACE_BYTES, len(self.namespace.json) + 1)

    def _compare(self, found: bytes | None) -> bool:
        """Return whether bytes are this namespace's JSON; False: they are none, or half of one.

        Raises
        ------
        ForeignNamespaceError
            If they are the JSON of another one.
        """
        if found == self.namespace.json.encode("ascii"):
            return True
        try:
            is_json = isinstance(json.loads(found or b""), dict)
        except (ValueError, RecursionError):
            is_json = False
        if is_json or len(found or b"") >= self._json_bytes:
            raise ForeignNamespaceError
        return False

    def _check(self, block: Block, found: memoryview, epoch: int) -> None:
        """Let a block have the bytes that were found, if they are its own."""
        block.status = Status.CORRUPT
        if len(found) != self.block_bytes:
            return
        content = found[: self.content_bytes]
        seal = Seal.unpack(bytes(found[self.content_bytes :]), epoch)
        if seal is not None and seal == Seal.of(self.fingerprint, block.key, content):
            block.views = [content]
            block.status = Status.OK

    def say(self, what: str, level: int = logging.WARNING) -> None:
        """Log a line about the tier; the same line once a minute."""
        now = time.monotonic()
        if now - self._logged.get(what, -LOG_S) >= LOG_S:
            self._logged[what] = now
            log.log(level, "tier %r %s", self.name, what)

    # -- epochs ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Go by a new epoch from now on; `meet` gives it to the medium."""
        with self._epoch_lock:
            self._go_by(new_epoch(self.epoch))
            self._forgetting = self.owed = True

    def meet(self) -> int:
        """Return the epoch to go by, when the medium has it too; I/O, where that is not known.

        Raises
        ------
        Exception
            Whatever the medium says.
        """
        deadline = self._call.deadline
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
        return self._is_met and time.monotonic() - self._met_at <= self.epoch_s

    def _doubt(self) -> None:
        """Ask for the epoch before the next call."""
        self._is_met = False

    def _agree(self) -> None:
        """Go by the medium's epoch where it is higher; otherwise give it the one gone by."""
        found = self._ask_epoch()
        for _ in range(ROUNDS):
            with self._epoch_lock:
                wanted, above = self._wanted(found)
                if wanted == found:
                    self._is_met = self._offered = True
                    self.owed = self._forgetting = False
                    return
                self._offered = True
            found = self._raise_epoch(wanted, above)
        raise OSError(errno.EIO, "the medium does not keep its epoch")

    def _wanted(self, found: int | None) -> tuple[int, int]:
        """Go by what an answer of the medium calls for; under the lock.

        Returns
        -------
        epoch, above : int
            Those of `_raise_epoch`.
        """
        if found is None and (self._offered or not self.epoch):
            if self.epoch:
                self.say("has lost its epoch: whatever was stored is forgotten")
                self.owed = True
            if not self._forgetting:  # one that another has written meanwhile does as well
                return new_epoch(self.epoch), self.epoch
            self._go_by(new_epoch(self.epoch))
        elif found is None:
            pass  # the medium has never had what it owes
        elif found < self.epoch:
            if self._offered and not self._forgetting:
                self.say("has an older epoch than it had: what it was given since is lost")
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
        """Say until when the calls of this thread may take, seconds of the monotonic clock."""
        self._call.deadline = deadline

    def run_length(self, blocks: Sequence[Block], start: int, stop: int) -> int:  # noqa: ARG002
        """Return how many of the blocks from `start` on move in one call."""
        return min(stop - start, self.blocks_per_call)

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
        if time.monotonic() > self._call.deadline:
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
                    self._doubt()
                else:
                    return
            _set_rest(run, Status.FAILED if op == WRITE else Status.MISS)
        except Exception as error:  # noqa: BLE001 # a thread that ends would keep its job for ever
            _set_rest(run, self._meaning(error))

    def _act(self, op: int, run: Sequence[Block], epoch: int) -> None:
        if op == QUERY:
            self._find(run, epoch)
        elif op == READ:
            self._fetch(run, epoch)
        else:
            for block in run:
                content = block.views[0][: self.content_bytes]
                seal = Seal.of(self.fingerprint, block.key, content)
                block.views[0][self.content_bytes :] = seal.pack(epoch)
            self._store(run, epoch)

    def _meaning(self, error: Exception) -> Status:
        if isinstance(error, ForeignNamespaceError):
            self.say("is refused: its place belongs to another namespace", logging.ERROR)
            return Status.FAILED
        status = self._status_of(error)
        # The text of an error may hold an address with a password, or what a server made up.
        self.say(f"met {self._name_of(error)}: {status.name}")
        return status

    def _name_of(self, error: Exception) -> str:
        """Return what the log calls an error."""
        return type(error).__name__

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
                self._drop(keys, epoch)
            elif offset == TOUCH:
                self._touch(keys, epoch)
        except Exception as error:
            self._meaning(error)
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
