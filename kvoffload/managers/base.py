"""The contract of managers, which decide when a block may be read, written and evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvoffload.types import OffloadingEvent, PrepareStoreOutput, Spec_co

__all__ = ["OffloadingManager"]


class OffloadingManager(ABC, Generic[Spec_co]):
    """The life of offloaded blocks: which of them are readable, writable and evictable.

    A resident block is *pending* (a store is writing it), *idle* (readable and evictable) or
    *pinned* by n loads (readable, not evictable). Idle and pinned blocks are *ready*.

    Every argument `hashes` is a **batch**: any iterable of block hashes, a one-shot generator
    included, but not a hash itself. It is consumed whole and every element is checked before
    anything else happens: an element must be exactly ``bytes`` (else TypeError) and not empty (else
    ValueError), and the message gives its position. After that, the first offending hash in batch
    order decides the error. `lookup` alone reads a list or tuple only as far as it needs.

    Every method is **all or nothing**: if it raises or returns None, no block, list or event has
    changed, and an exception changes no counter; faults of a user's own parts are the exception
    (`prepare_store`). Compiled, that also holds for an exception from
    outside the call: KeyboardInterrupt, what a signal handler raises, MemoryError. In Python such
    an exception may leave the manager in between; a ``CPUOffloadingManager`` loses no slot.

    `lookup`, `prepare_load` and `prepare_store` are abstract; by default `touch`, `complete_load`
    and `complete_store` do nothing, and `take_events` returns nothing.

    To a type checker ``OffloadingManager[CPULoadStoreSpec]`` is one whose specs are of that type.

    Notes
    -----
    Thread-safety: with built-in policy and backend, compiled, each call is atomic with respect to
    the others. In Python, and over a user's own policy or backend, callers serialise. A sequence
    of calls (`lookup`, then `prepare_load`) needs the caller's lock in all cases.

    Complexity: each call is O(n) in its batch; an evicting `prepare_store` adds the victims, and
    in Python the blocks that the search for them passes over.
    """

    __slots__ = ()

    @abstractmethod
    def lookup(self, hashes: Iterable[bytes]) -> int:
        """Count the leading blocks that are ready. Changes no recency.

        Of a list or tuple, what comes after the first block that is not ready is not looked at: it
        is not checked and costs nothing. Any other iterable is consumed first.

        Returns
        -------
        int
            Blocks before the first that is not ready: pending or not resident.
        """

    @abstractmethod
    def prepare_load(self, hashes: Iterable[bytes]) -> Spec_co:
        """Pin every block for reading and return where they lie. Changes no recency.

        Each occurrence of a hash pins once and appears once in the ids.

        Returns
        -------
        LoadStoreSpec
            The slots, in the order given.

        Raises
        ------
        BlockNotFoundError
            If a block is not resident.
        BlockNotReadyError
            If a block is pending.
        RefCountOverflowError
            If a block would be pinned more than 2**31 - 1 times.
        """

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, **last hash first**.

        The first hash of a prefix ends as the most recent, and a chain is evicted tail first.
        Unknown hashes are not an error. A repeated hash is touched at each occurrence.
        """

    def complete_load(self, hashes: Iterable[bytes]) -> None:
        """Release one pin for each occurrence of each block.

        Raises
        ------
        BlockNotFoundError
            If a block is not resident.
        BlockNotPinnedError
            If a block is pending, or occurs more often than it is pinned.
        """

    @abstractmethod
    def prepare_store(self, hashes: Iterable[bytes]) -> PrepareStoreOutput[Spec_co] | None:
        """Make room for the blocks that are not resident, and make them pending.

        Resident blocks, pending ones included, and repeats within the batch are dropped. As many
        idle blocks as the free slots fall short are evicted, never one of the batch. A policy that
        decides on admission may store only a leading part of the rest.

        Returns
        -------
        PrepareStoreOutput or None
            What to store and where, in batch order, and what was evicted, in eviction order. With
            nothing to store, empty lists and an empty spec. None if enough slots cannot be freed.

        Raises
        ------
        BackendError
            If a user's backend broke its contract: the slots handed out by the call are freed,
            blocks already evicted stay evicted and their event is emitted.
        PolicyError
            If a user's policy evicted a wrong number of blocks, or one that is protected or not
            idle: those that were idle and not protected stay evicted, likewise.
        """

    def complete_store(self, hashes: Iterable[bytes], success: bool = True) -> None:
        """Make pending blocks readable, or drop them.

        Every hash that is not pending - unknown, ready, pinned - is ignored, so that a second call
        is a no-op.

        Parameters
        ----------
        hashes : iterable of BlockHash
            Blocks whose store ended.
        success : bool
            True: they become idle. False: they are dropped and their slots freed.

        Raises
        ------
        TypeError
            If `success` is neither True nor False.
        """

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Return the events since the last call, oldest first; none where events are off.

        The events are detached at the call: an abandoned iterator neither replays them nor blocks
        later ones.
        """
        return iter(())


Skeleton = TypeVar("Skeleton", bound=type)


def take_contract(skeleton: Skeleton) -> Skeleton:
    """Give the methods of a class the docstrings of the contract; return the class."""
    for name, declared in vars(OffloadingManager).items():
        if callable(declared) and not name.startswith("_"):
            getattr(skeleton, name).__doc__ = declared.__doc__
    return skeleton
