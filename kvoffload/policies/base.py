"""The contract of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from kvoffload._checks import check_cache_capacity
from kvoffload.types import BlockStatus, Hints

#: Result of ``make_room``: the number of hashes to store, and the victims evicted for them.
Room = tuple[int, Sequence[tuple[bytes, BlockStatus]]]


class CachePolicy(ABC):
    """A rule that chooses the blocks to evict when room is needed.

    A policy holds the resident blocks and their order. A manager reports insertions, uses and
    removals to it, changes ``ref_cnt`` of the statuses itself, and asks for victims. Without a
    manager, a policy reads ``ref_cnt`` of each block when `evict` is called.

    A policy may learn from whole requests: `begun`, `missed`, `inserted`, `finished` and `release`
    report them. By default a request's first and last use are a `touch` each. A policy that counts
    uses counts a `touch` outside a request as one use.

    A built-in policy is all or nothing: a call that raises or returns None has changed nothing.
    The compiled policies also guarantee this for an exception from outside the call:
    KeyboardInterrupt, any exception from a signal handler, MemoryError. In Python such an exception
    may leave the policy in an intermediate state.

    A policy belongs to the manager that is built over it, and building a second manager over it
    raises ValueError. If anyone else calls `insert`, `remove`, `touch`, `evict`, `make_room` or
    `clear` of a built-in policy, the call raises PolicyError and changes nothing. Reading remains
    allowed. When the manager is gone, the policy is free again and keeps its state. A user's own
    policy makes these checks itself, if at all.

    To write a policy, subclass this class: implement the five abstract methods, and `clear` if the
    policy can be emptied in place. After `insert`, the live status is what `get` returns; the
    object passed in is not used again. Over a user's own ``Backend``, however, the backend's status
    objects are kept and handed back. A status held after its block left keeps its last values and
    never shows another block's.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for, ``0 ... 2**31 - 1``. Inserting beyond it
        is legal.

    Raises
    ------
    TypeError, ValueError
        If `cache_capacity` is not an integer in this range.

    Notes
    -----
    Thread-safety: calls on a compiled policy are atomic with respect to each other; callers
    serialise the calls on any other policy.
    """

    __slots__ = ()

    cache_capacity: int

    def __init__(self, cache_capacity: int) -> None:
        # Empty slots here let a compiled policy inherit; a subclass adds the attribute.
        self.cache_capacity = check_cache_capacity(cache_capacity)  # type: ignore[misc]

    @abstractmethod
    def get(self, block_hash: bytes) -> BlockStatus | None:
        """Return the live status of a resident block, or None, without changing any order.

        Raises
        ------
        TypeError, ValueError
            If `block_hash` is not ``bytes`` or is empty.
        """

    @abstractmethod
    def insert(self, block_hash: bytes, status: BlockStatus) -> None:
        """Make a block resident, as the most recently used of the inserted blocks.

        Parameters
        ----------
        block_hash : BlockHash
            A hash that is not resident.
        status : BlockStatus
            Its slot and state.

        Raises
        ------
        ValueError
            If the block is already resident; nothing has changed.
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

        The first hash of a prefix therefore ends as the most recent, and a chain is evicted tail
        first. Unknown hashes are not an error: a policy may learn from ghosts. A repeated hash is
        touched at each occurrence.
        """

    @abstractmethod
    def evict(
        self, n: int, protected: Collection[bytes]
    ) -> Sequence[tuple[bytes, BlockStatus]] | None:
        """Evict exactly `n` idle blocks, or none.

        Parameters
        ----------
        n : int
            Number of blocks to evict, >= 0; 0 gives ``[]``.
        protected : collection of BlockHash
            Blocks that must stay; supports ``in``.

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

        Policies that decide on admission override this hook. The default asks `evict` for room for
        all.

        Parameters
        ----------
        hashes : sequence of BlockHash
            Blocks to store in batch order, none of them resident, without repeats.
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

    def set_declining(self, allowed: bool) -> None:  # noqa: B027 - few policies decline
        """Allow or forbid the policy to decline blocks that it could make room for.

        The owner of a tier below host memory calls this: such a tier is offered only blocks that
        host memory stores, and is read through host slots. Does nothing by default.

        Parameters
        ----------
        allowed : bool
            Whether it may decline blocks, as at first.
        """

    def begun(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the beginning of a request: the first use of its blocks. By default `touch`.

        Parameters
        ----------
        hashes : sequence of BlockHash
            All blocks of the request, first block first.
        hints : Hints or None
            The client's hints about the session.
        """
        del hints
        self.touch(hashes)

    def missed(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Handle the blocks that are about to be stored, if there is room. Does nothing by default.

        Called before `make_room`, even if the store is then refused.

        Parameters
        ----------
        hashes : sequence of BlockHash
            Blocks of a store that are not resident, in batch order, without repeats.
        """

    def inserted(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Handle a store that has inserted all its blocks. Does nothing by default.

        Parameters
        ----------
        hashes : sequence of BlockHash
            The blocks, in batch order; they are pending.
        """

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: the last use of its blocks. By default `touch`.

        A policy that counts uses does not count this one: it belongs to the same request as the
        first.

        Parameters
        ----------
        hashes : sequence of BlockHash
            All blocks of the request, first block first, those of its answer included.
        hints : Hints or None
            The client's hints about the session.
        """
        del hints
        self.touch(hashes)

    def release(self, hashes: Sequence[bytes]) -> None:  # noqa: B027 - a policy may do nothing
        """Handle blocks that are not expected to be used again. Does nothing by default.

        A manager calls this after `finished`, if the hints say that the session ends, with those
        blocks of the request that no other session shares, and for its own `release` likewise. A
        built-in policy evicts these blocks before all others: the last of a batch first, after
        those released earlier. A later use returns a block to its regular place in the policy.

        Parameters
        ----------
        hashes : sequence of BlockHash
            The blocks, whether or not the policy knows them.
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
