"""The contract of eviction policies, which decide which block leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockStatus, Hints

__all__ = ["CachePolicy", "Room"]

#: What ``make_room`` answers: how many of the hashes to store, and who leaves for them.
Room = tuple[int, Sequence[tuple[bytes, BlockStatus]]]


class CachePolicy(ABC):
    """A rule for which block leaves when room is needed.

    A policy holds the resident blocks and their order. A manager tells it what is inserted, used
    and removed, changes ``ref_cnt`` of the statuses itself, and asks for victims. Used alone,
    without a manager, a policy reads ``ref_cnt`` of each block at the call of `evict`.

    A policy may learn from whole requests: `begun`, `missed`, `inserted`, `finished` and `release`
    tell of them. By default the first and the last use of a request are a `touch` each. To a
    policy that counts uses, a `touch` outside a request is one.

    A built-in policy is all or nothing: a call that raises or returns None has changed nothing.
    Compiled, that also holds for an exception from outside the call: KeyboardInterrupt, what a
    signal handler raises, MemoryError. In Python such an exception may leave the policy in between.

    A policy belongs to the manager that is built over it: a second manager over it is a ValueError,
    and `insert`, `remove`, `touch`, `evict`, `make_room` and `clear` of a built-in one, called by
    anyone else, raise PolicyError and change nothing. What reads stays open. When the manager is
    gone, the policy is free again, as it is. A policy of your own answers for itself.

    Write your own by subclassing: implement the five abstract methods, and `clear` if the policy
    can be emptied in place. After `insert`, the live status is what `get` returns; the object
    passed in is not used again, except over a user's own ``Backend``, whose objects are kept and
    handed back, the same ones. A status held after its block left keeps its last values and never
    shows another block's.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for, ``0 ... 2**31 - 1``. Inserting beyond it
        is legal.

    Raises
    ------
    TypeError, ValueError
        If `cache_capacity` is not such an integer.

    Notes
    -----
    Thread-safety: a compiled policy's calls are atomic with respect to each other; for every
    other policy callers serialise.
    """

    __slots__ = ()

    cache_capacity: int

    def __init__(self, cache_capacity: int) -> None:
        # Empty slots here let a compiled policy inherit; a subclass brings the attribute.
        self.cache_capacity = check_cache_capacity(cache_capacity)  # type: ignore[misc]

    @abstractmethod
    def get(self, block_hash: bytes) -> BlockStatus | None:
        """Return the live status of a resident block, or None. Changes no order.

        Raises
        ------
        TypeError, ValueError
            If `block_hash` is not ``bytes`` or is empty.
        """

    @abstractmethod
    def insert(self, block_hash: bytes, status: BlockStatus) -> None:
        """Make a block resident, as the most recently used of those that were inserted.

        Parameters
        ----------
        block_hash : BlockHash
            A hash that is not resident.
        status : BlockStatus
            Its slot and state.

        Raises
        ------
        ValueError
            If the block is resident; nothing has changed.
        """

    @abstractmethod
    def remove(self, block_hash: bytes) -> None:
        """Drop a resident block without remembering it.

        Raises
        ------
        BlockNotFoundError
            If the block is not resident; nothing has changed.
        """

    @abstractmethod
    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, **last hash first**.

        So the first hash of a prefix ends as the most recent, and a chain is evicted tail first.
        Unknown hashes are not an error: a policy may learn from ghosts. A repeated hash is touched
        at each occurrence.
        """

    @abstractmethod
    def evict(
        self, n: int, protected: Collection[bytes]
    ) -> Sequence[tuple[bytes, BlockStatus]] | None:
        """Evict exactly `n` idle blocks, or none.

        Parameters
        ----------
        n : int
            How many, >= 0; 0 gives ``[]``.
        protected : collection of BlockHash
            Blocks that must stay, with ``in``.

        Returns
        -------
        list of (BlockHash, BlockStatus) or None
            The victims in eviction order; None, with nothing changed, if fewer than `n` blocks are
            idle and not protected.

        Raises
        ------
        ValueError
            If `n` is negative.
        """

    def make_room(
        self, hashes: Sequence[bytes], num_free: int, protected: Collection[bytes]
    ) -> Room | None:
        """Decide how many of `hashes` to store, and evict for them.

        The hook of policies that decide on admission. The default asks `evict` for room for all.

        Parameters
        ----------
        hashes : sequence of BlockHash
            Blocks to store, none of them resident, no repeats, in batch order.
        num_free : int
            Number of free slots.
        protected : collection of BlockHash
            Blocks that must stay.

        Returns
        -------
        (int, list of (BlockHash, BlockStatus)) or None
            The number ``k`` of leading hashes to store, and exactly ``max(0, k - num_free)``
            victims in eviction order. None, with nothing changed, to refuse the store.
        """
        count = len(hashes)
        if count <= num_free:
            return count, []
        victims = self.evict(count - num_free, protected)
        return None if victims is None else (count, victims)

    def _set_declining(self, allowed: bool) -> None:
        """Allow the policy to decline blocks although others could leave for them, or forbid it.

        Called by the owner of a tier below host memory, which is offered only what host memory
        stores and is read through slots of it. By default nothing: few policies decline.
        """
        del allowed

    def begun(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Hear that a request begins: the first use of its blocks. By default `touch`.

        Parameters
        ----------
        hashes : sequence of BlockHash
            All blocks of the request, first block first.
        hints : Hints or None
            What its client says of the session.
        """
        del hints
        self.touch(hashes)

    def missed(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Hear which blocks are about to be stored, if there is room. By default nothing.

        It comes before `make_room`, also where the store is refused then.

        Parameters
        ----------
        hashes : sequence of BlockHash
            Blocks of a store that are not resident, no repeats, in batch order.
        """

    def inserted(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Hear that a store has inserted its blocks, all of them. By default nothing.

        Parameters
        ----------
        hashes : sequence of BlockHash
            The blocks, in batch order; they are pending.
        """

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Hear that a request finishes: the last use of its blocks. By default `touch`.

        A policy that counts uses does not count this one: it is of the same request as the first.

        Parameters
        ----------
        hashes : sequence of BlockHash
            All blocks of the request, first block first, those of its answer included.
        hints : Hints or None
            What its client says of the session.
        """
        del hints
        self.touch(hashes)

    def release(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Hear that nobody is expected to ask for blocks again. By default nothing.

        A manager says so of the blocks of a request whose hints say that its session ends, after
        `finished`, and where its own `release` is called. A built-in policy lets them leave before
        all others: the last of a batch first, after those released before. A later use takes a
        block back to where the policy would have it.

        Parameters
        ----------
        hashes : sequence of BlockHash
            The blocks, known or not.
        """

    def clear(self) -> None:
        """Drop every block, ghost and adaptive state. Not implemented by default."""
        raise NotImplementedError(f"{type(self).__name__} has no clear()")

    def __len__(self) -> int:
        """Return the number of resident blocks. Not implemented by default."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")

    def __bool__(self) -> bool:
        """Return True, even for an empty policy: it is more than a container."""
        return True
