"""The parts of a tier besides its jobs: what is where, and where the bytes are.

`ComposedTier` joins three: `Jobs`, a `Catalog` and a `Medium`. A catalog says what is where. The
index of a local tier decides it; on a shared medium it is what was found out, and believed for some
time. A medium starts the threads that move blocks, and knows how to forget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Status
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.region import Region

from .contract import Pool

if TYPE_CHECKING:
    from .jobs import Record

__all__ = ["Catalog", "Medium", "Wait"]

Wait: TypeAlias = Callable[[Callable[[], bool], float], None]
"""Collects jobs until a condition holds, or so many seconds have passed."""


class Catalog(ABC):
    """A catalog: the knowledge of a tier about keys, which are stored keys here.

    Attributes
    ----------
    asks : bool
        Whether there are keys of which only the medium knows.
    generation : int
        How often everything has been forgotten.

    Notes
    -----
    Thread-safety: callers serialise.
    """

    asks = False
    generation = 0

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Epoch of the seals that are written now."""

    @abstractmethod
    def known(self, key: bytes) -> int:
        """Return what is known about a key, a `State`."""

    @abstractmethod
    def states(self, keys: list[bytes]) -> npt.NDArray[np.int8]:
        """Return what is known about keys, ``(n,)`` int8, a `State` each."""

    @abstractmethod
    def wanted(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys of a put that are neither there nor on their way, each once."""

    @abstractmethod
    def take(
        self, keys: list[bytes], room: int, refused: dict[bytes, Status]
    ) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Begin to store keys.

        Parameters
        ----------
        keys : list of bytes
            From `wanted`.
        room : int
            How many at most.
        refused : dict of bytes to Status
            Those that are not stored are added, with the reason.

        Returns
        -------
        tuple
            The keys that are stored, and ``(n,)`` int64, where.
        """

    @abstractmethod
    def readable(self, keys: list[bytes]) -> list[bool]:
        """Return for each key whether it is worth a read."""

    @abstractmethod
    def pin(self, keys: list[bytes]) -> npt.NDArray[np.int64]:
        """Keep readable keys until their get settles; return ``(n,)`` int64, where they are."""

    @abstractmethod
    def is_stale(self, record: Record) -> bool:
        """Return whether everything was forgotten since a job was submitted."""

    @abstractmethod
    def settle(self, record: Record, statuses: npt.NDArray[np.int8], counts: list[int]) -> None:
        """Record what the store did with a job's blocks.

        `statuses` are those of `record.keys`, and `counts` how many there are of each.
        """

    @abstractmethod
    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as recently used, last key first."""

    @abstractmethod
    def discard(self, keys: list[bytes]) -> None:
        """Drop blocks."""

    @abstractmethod
    def forget(self, records: Iterable[Record]) -> None:
        """Drop everything; `records` are the jobs that have not settled."""

    def tend(self) -> None:  # noqa: B027
        """Do what is due; called whenever jobs were collected."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return present sizes, ``used_bytes`` and others."""


class Medium(ABC):
    """A medium: the place of a tier's blocks, and the threads that move them.

    Attributes
    ----------
    namespace : Namespace
        What the bytes mean.
    direct : bool
        Whether blocks move without a copy; known once there are threads.
    place : str
        What it is called in logs and `repr`; empty for none.
    """

    namespace: Namespace
    direct = False
    place = ""

    @abstractmethod
    def open_pool(self, region: Region) -> Pool:
        """Start the threads."""

    def attached(self, wait: Wait) -> None:  # noqa: B027
        """Do what could not be done without threads."""

    def forget(self) -> None:  # noqa: B027
        """Have everything forgotten that is stored; no waiting."""

    def confirm(self, wait: Wait) -> bool:  # noqa: ARG002
        """Wait a moment until the medium has confirmed the last `forget`; return whether it has."""
        return True

    @property
    def has_forgotten(self) -> bool:
        """Whether the medium has confirmed the last `forget`; no I/O, no waiting."""
        return True

    def tend(self) -> None:  # noqa: B027
        """Do what is due; called whenever jobs were collected."""

    def before_close(self) -> None:  # noqa: B027
        """Make the last use of the threads."""

    def close(self, until: float, has_ended: bool) -> bool:  # noqa: ARG002
        """Give files and the like back, when the threads have ended; may be called again.

        Parameters
        ----------
        until : float
            When it should have returned, monotonic seconds.
        has_ended : bool
            Whether all threads have ended; if not, what they use is kept.

        Returns
        -------
        bool
            Whether nothing is left under way.
        """
        return has_ended

    def leave(self) -> None:  # noqa: B027
        """Release everything in a forked child; tell no thread and no other process."""

    def sizes(self) -> dict[str, int]:
        """Return present sizes."""
        return {}
