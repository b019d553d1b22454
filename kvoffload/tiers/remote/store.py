"""The seam of tiers on shared media: the seven methods that a medium implements.

A `RemoteStore` is a dictionary of bytes, with an epoch, on a medium that other processes share and
that may not answer. `RemoteTier` makes a tier of one. What is the same for every medium is done
around it, once: threads and buffers (``engine``), epochs, seals and errors (``shared``), and
what is believed of it (``verdicts``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import Block
from kvoffload.tiers.epoch import epoch_text, parse_epoch
from kvoffload.tiers.metrics import write_line
from kvoffload.tiers.namespace import Namespace, check_namespace
from kvoffload.tiers.region import Region
from kvoffload.tiers.seal import SEAL_BYTES, Seal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ForeignNamespaceError", "OtherEpochError", "RemoteStore"]

LEAST_S = 0.005
"""Seconds that a call has at least."""
LOG_S = 60.0
"""Seconds between two lines of log of the same kind."""
MAX_NAMESPACE_BYTES = 2**20
"""Bytes of the namespace's JSON that are read at most."""


class OtherEpochError(Exception):
    """The medium has another epoch than a call went by, or none."""


class ForeignNamespaceError(Exception):
    """The place of this namespace has the JSON of another one."""


class _Call(threading.local):
    """The call that the present thread is making."""

    deadline = 0.0


class RemoteStore(ABC):
    """A medium that other processes share.

    Seven methods say how to reach it: `ask_epoch`, `raise_epoch`, `find`, `fetch`, `store`, `drop`
    and `status_of`. Threads of the tier call them, several at once. What a method raises, other
    than `OtherEpochError`, is given to `status_of`; blocks whose `Block.status` was set keep it.

    A block is kept under a name made of its key and an **epoch**: a new epoch forgets all blocks at
    once. Its value is its bytes and, behind them, its seal, which the library makes and checks:
    `block_bytes` in all.

    Parameters
    ----------
    namespace : Namespace
        What the bytes mean.

    Attributes
    ----------
    namespace : Namespace
        What the bytes mean. Names on the medium should contain its ``fingerprint``.
    block_bytes : int
        Bytes of a value: of a block and its seal.
    name : str
        The tier's label, for logs; given by the tier.
    place : str
        Where the medium is, for `repr`; without credentials.
    blocks_per_call : int
        Blocks that `fetch` and `store` are given at most.
    keys_per_query : int
        Blocks that `find` is given at most.
    epoch_s : float
        Seconds that an epoch is believed before `ask_epoch` is called again.
    touch_s : float or None
        Seconds for which a block that was touched is not touched again; None: `touch` is not
        called.
    """

    name = ""
    place = ""
    blocks_per_call = 8
    keys_per_query = 1024
    epoch_s = 1.0
    touch_s: float | None = None

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = check_namespace(namespace)
        self.fingerprint = namespace.fingerprint
        self.content_bytes = namespace.block_bytes
        self.block_bytes = namespace.block_bytes + SEAL_BYTES
        self._call = _Call()
        self._logged: dict[str, float] = {}

    # -- the seven methods -------------------------------------------------------------------

    @abstractmethod
    def ask_epoch(self) -> int | None:
        """Return the medium's epoch; None where there is none, or nonsense (see `parse_epoch`).

        Before that, compare the namespace's JSON on the medium by `is_ours`; write it where that
        is False.
        """

    @abstractmethod
    def raise_epoch(self, epoch: int, above: int) -> int | None:
        """Give the medium an epoch, unless it has one above another; return what it has then.

        `above` is less than `epoch`: one less, where nothing but a higher epoch is to stay.
        Whatever else lies in its place, of any kind, is replaced. No other call may come between
        the look and the change, as far as the medium can prevent it. None: it has nothing that can
        be read. The epoch is written once at most: it must not return after another process has
        replaced it.
        """

    @abstractmethod
    def find(self, run: Sequence[Block], epoch: int) -> None:
        """Set the statuses of blocks to OK or MISS."""

    @abstractmethod
    def fetch(self, run: Sequence[Block], epoch: int) -> None:
        """Read values; give each that is there to `check`, and set the other statuses to MISS.

        ``block.views[0]`` is a buffer of `block_bytes` that the value may be read into.
        """

    @abstractmethod
    def store(self, run: Sequence[Block], epoch: int) -> None:
        """Write ``block.views[0]``, the value, where there is none, and set statuses to OK.

        The buffer belongs to another block as soon as the method returns.
        """

    @abstractmethod
    def drop(self, keys: Sequence[bytes], epoch: int) -> None:
        """Remove blocks; those that are not there are no error."""

    @abstractmethod
    def status_of(self, error: Exception) -> Status:
        """Return what an error means for blocks of which nothing else is known."""

    # -- where a medium has more -------------------------------------------------------------

    def touch(self, keys: Sequence[bytes], epoch: int) -> None:  # noqa: B027
        """Mark blocks as used, where the medium does not do so itself; see `touch_s`."""

    def delete_epoch(self) -> bool:
        """Delete the medium's epoch, and return whether it is gone; False where that is unknown.

        It is called where `raise_epoch` failed and `status_of` its error is FULL. Without an epoch
        on the medium every process forgets.
        """
        return False

    def start(self) -> None:  # noqa: B027
        """Begin what goes on beside the calls, when there are threads."""

    def stop(self) -> None:  # noqa: B027
        """End it, before the tier is closed."""

    def take_evicted(self) -> list[bytes]:
        """Return the keys of blocks that this process has evicted since the last call."""
        return []

    def abandon(self) -> None:  # noqa: B027
        """Release, in a forked child, what belongs to the parent."""

    def use(self, memory: Region) -> None:  # noqa: B027
        """Register the buffers that values lie in, where a client has to know them."""

    def close(self) -> None:  # noqa: B027
        """Close connections."""

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close connections."""
        self.close()

    def name_of(self, error: Exception) -> str:
        """Return what the log calls an error; its text is never logged, it may hold credentials."""
        return type(error).__name__

    # -- what the methods use ----------------------------------------------------------------

    epoch_text = staticmethod(epoch_text)
    parse_epoch = staticmethod(parse_epoch)

    @property
    def deadline(self) -> float:
        """When the present call of this thread has to have ended, in monotonic seconds."""
        return self._call.deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._call.deadline = deadline

    def seconds_left(self) -> float:
        """Return how long the present call may take."""
        return max(LEAST_S, self.deadline - time.monotonic())

    def is_overdue(self) -> bool:
        """Return whether the present call should have ended."""
        return time.monotonic() > self.deadline + LEAST_S

    @property
    def json_bytes(self) -> int:
        """Bytes of a namespace's JSON that are to be read at most."""
        return max(MAX_NAMESPACE_BYTES, len(self.namespace.json) + 1)

    def is_ours(self, found: bytes | None) -> bool:
        """Return whether bytes are this namespace's JSON; False: they are none, or half of one.

        Raises
        ------
        ForeignNamespaceError
            If they are the JSON of another one. It is not for the medium to catch.
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

    def check(self, block: Block, found: memoryview, epoch: int) -> None:
        """Set a block's status, to OK or CORRUPT, by the value that was found under its name."""
        block.status = Status.CORRUPT
        if len(found) != self.block_bytes:
            return
        content = found[: self.content_bytes]
        seal = Seal.unpack(bytes(found[self.content_bytes :]), epoch)
        if seal is not None and seal == Seal.of(self.fingerprint, block.key, content):
            block.views = [content]
            block.status = Status.OK

    def meaning(self, error: Exception) -> Status:
        """Return what an error means, the status of some blocks, and log it."""
        if isinstance(error, ForeignNamespaceError):
            self.say("is refused: its place belongs to another namespace", logging.ERROR)
            return Status.FAILED
        try:
            status = self.status_of(error)
        except Exception:  # noqa: BLE001 # a thread that ends would keep its job for ever
            status = Status.FAILED
        # The text of an error may hold an address with a password, or what a server made up.
        self.say(f"met {self.name_of(error)}: {status.name}")
        return status

    def say(self, what: str, level: int = logging.WARNING) -> None:
        """Log a line about the tier; the same line once a minute."""
        now = time.monotonic()
        if now - self._logged.get(what, -LOG_S) >= LOG_S:
            self._logged[what] = now
            write_line(level, "tier %r %s", self.name, what)
