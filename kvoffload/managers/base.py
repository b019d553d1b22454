"""The contract of managers, which decide when a block may be read, written and evicted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kvoffload._checks import as_batch, check_hints, check_part
from kvoffload.errors import cannot_pickle, describe, request_finished
from kvoffload.types import BlockHash, Hints, OffloadingEvent, PrepareStoreOutput, Spec_co

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OffloadingManager", "Request"]


class Request(ABC, Generic[Spec_co]):
    """One prompt on its way through a manager: its blocks, from the first use to the last.

    ``manager.begin(hashes)`` returns one. It is asked what of the prompt can be read, loads and
    stores parts of it, and finishes. A part is given by positions: `start` is the first block of
    it, `stop` the first one behind it, ``0 <= start <= stop <= len(request)``, else ValueError.

    Any number of requests may be open, in any order, and the same blocks may be in several. A
    request that is dropped without `finish` is forgotten without its last use; its pins are the
    caller's. After the manager's `reset_cache` it goes on and finds nothing.

    As a context manager, a request finishes at the end of the block, whatever ends it.

    After `finish`, all but `complete_load`, `complete_store`, ``len`` and what reads raises
    RequestFinishedError. Every method is all or nothing, as the manager's are.

    Notes
    -----
    Thread-safety: that of the manager.

    Complexity: each call is O(n) in the blocks of its part. Compiled, a call checks where the
    blocks were instead of looking them up again, and an open request takes at most 48 bytes per
    block.
    """

    __slots__ = ()

    @abstractmethod
    def lookup(self, start: int = 0) -> int:
        """Count the blocks from `start` on that are ready, up to the first that is not.

        Parameters
        ----------
        start : int
            Number of leading blocks that the accelerator has: the manager is not asked for them.

        Returns
        -------
        int
            As `OffloadingManager.lookup` of these blocks.
        """

    @abstractmethod
    def prepare_load(self, start: int, stop: int) -> Spec_co:
        """Pin the blocks of a part for reading and return where they lie.

        Raises
        ------
        BlockNotFoundError, BlockNotReadyError, RefCountOverflowError
            As from `OffloadingManager.prepare_load`.
        """

    @abstractmethod
    def complete_load(self, start: int, stop: int) -> None:
        """Release one pin of each block of a part, also after `finish`.

        Raises
        ------
        BlockNotFoundError, BlockNotPinnedError
            As from `OffloadingManager.complete_load`.
        """

    @abstractmethod
    def prepare_store(
        self, start: int = 0, stop: int | None = None
    ) -> PrepareStoreOutput[Spec_co] | None:
        """Make room for the blocks of a part that are not resident, and make them pending.

        It may come several times, as a prompt is computed in steps.

        Parameters
        ----------
        start, stop : int
            The part; None is the end of the request.

        Returns
        -------
        PrepareStoreOutput or None
            As `OffloadingManager.prepare_store` of these blocks.

        Raises
        ------
        BackendError, PolicyError
            Likewise.
        """

    @abstractmethod
    def complete_store(self, success: bool = True) -> None:
        """Make readable, or drop, what this request stores; also after `finish`.

        It ends every store of this request that has not ended. What ended otherwise, by the
        manager's `complete_store` or `reset_cache`, is passed over; but a block that the former
        ended and that another request is storing anew is ended for that one: end a store one way.

        Parameters
        ----------
        success : bool
            True: the blocks become idle. False: they are dropped and their slots freed.

        Raises
        ------
        TypeError
            If `success` is neither True nor False.
        """

    @abstractmethod
    def extend(self, hashes: Iterable[bytes]) -> None:
        """Use more blocks, those of an answer, and append them to the request.

        Raises
        ------
        TypeError, ValueError
            If an element is no block hash; nothing has changed.
        """

    @abstractmethod
    def finish(self, *, hints: Hints | None = None, now: float | None = None) -> None:
        """Use all blocks once more, last hash first, and end the request.

        To a policy that counts uses, this is no further one. A second call does nothing.

        Parameters
        ----------
        hints : Hints, optional
            What the client says of its session; they replace those of `begin`. Where the session
            ends, the blocks are released: they leave before all others, see
            `OffloadingManager.release`.
        now : float, optional
            Seconds on the clock of `begin`, finite; None is the moment that was given there, else
            the system's monotonic clock.

        Raises
        ------
        TypeError, ValueError
            If `hints` are no ``Hints`` or `now` is no finite number; nothing has changed.
        """

    @property
    @abstractmethod
    def hashes(self) -> tuple[BlockHash, ...]:
        """The blocks of the request, first block first."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether `finish` was called."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Return the request."""

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the request."""


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

    `begin` is the way in for an engine: it returns a `Request`, which does all that follows for
    one prompt. The calls that take a batch define what those of a request do.

    `lookup`, `prepare_load` and `prepare_store` are abstract; by default `touch`, `complete_load`
    and `complete_store` do nothing, `take_events` returns nothing, and `begin` returns a request
    that makes the calls of this manager.

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

    def begin(
        self, hashes: Iterable[bytes], *, hints: Hints | None = None, now: float | None = None
    ) -> Request[Spec_co]:
        """Begin a request: the first use of its blocks, as by `touch`.

        Parameters
        ----------
        hashes : iterable of BlockHash
            The blocks of a prompt, first block first; checked and copied.
        hints : Hints, optional
            What the client says of its session. Where it ends, the request's stores take only
            free slots and those of released blocks, as many leading blocks as there are; the
            others are not admitted. The last word is that of `Request.finish`.
        now : float, optional
            Seconds on the caller's clock, finite, for policies that rank by time; None is the
            system's monotonic clock.

        Returns
        -------
        Request

        Raises
        ------
        TypeError, ValueError
            If an element is no block hash, `hints` are no ``Hints`` or `now` is no finite number.
        """
        check_now(now)
        return CallingRequest(self, as_batch(hashes), check_hints(hints), now)

    @property
    def _resets(self) -> int:
        """How often everything was dropped: a request forgets what it was storing then."""
        return 0

    def _begun(self, hashes: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        """Use the blocks of a request for the first time."""
        del hints, now
        self.touch(hashes)

    def _extended(self, hashes: list[BlockHash]) -> None:
        """Use blocks that a request is extended by."""
        self.touch(hashes)

    def _finished(self, hashes: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        """Use the blocks of a request for the last time; release them where its session ends."""
        del now
        self.touch(hashes)
        if hints is not None and hints.ends:
            self.release(hashes)

    def _hinted(self, hints: Hints) -> None:
        """Count what a client has said of a session, once where it is said again at the end."""
        del hints

    def _lookup_hinted(self, hashes: list[BlockHash], hints: Hints) -> int:
        """Count the leading ready blocks of a request that began with hints."""
        del hints
        return self.lookup(hashes)

    def _store_last(self, hashes: list[BlockHash]) -> PrepareStoreOutput[Spec_co] | None:
        """Store blocks of a session that ends, where slots are free or blocks were released."""
        return self.prepare_store(hashes)

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

    def release(self, hashes: Iterable[bytes]) -> None:
        """Let blocks leave before all others: nobody is expected to ask for them again.

        They leave last hash first, after those that were released before. A later use by anyone
        takes a block back to where the policy would have it. Unknown hashes are passed over;
        pinned and pending blocks stay until they may leave. Nothing is freed and no event comes
        before a store needs the room.

        Raises
        ------
        TypeError, ValueError
            If an element is no block hash; nothing has changed.
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


class CallingRequest(Request[Spec_co]):
    """A request that makes the calls of its manager: the Python twin, and over any manager."""

    __slots__ = ("_hashes", "_hints", "_is_finished", "_manager", "_now", "_resets", "_storing")

    def __init__(
        self,
        manager: OffloadingManager[Spec_co],
        batch: list[BlockHash],
        hints: Hints | None,
        now: float | None,
    ) -> None:
        self._manager = manager
        self._hashes = list(batch)
        self._hints = hints
        self._now = now
        self._is_finished = False
        self._storing: list[BlockHash] = []  # what its stores returned and it has not ended
        self._resets = manager._resets  # by then
        manager._begun(list(batch), hints, now)
        if hints is not None:
            manager._hinted(hints)

    def lookup(self, start: int = 0) -> int:
        """Count the blocks from `start` on that are ready, up to the first that is not."""
        self._require_open("lookup")
        part = self._part(start, None)
        if self._hints is None:
            return self._manager.lookup(part)
        return self._manager._lookup_hinted(part, self._hints)

    def prepare_load(self, start: int, stop: int) -> Spec_co:
        """Pin the blocks of a part for reading and return where they lie."""
        self._require_open("prepare_load")
        return self._manager.prepare_load(self._part(start, stop))

    def complete_load(self, start: int, stop: int) -> None:
        """Release one pin of each block of a part, also after `finish`."""
        self._manager.complete_load(self._part(start, stop))

    def prepare_store(
        self, start: int = 0, stop: int | None = None
    ) -> PrepareStoreOutput[Spec_co] | None:
        """Make room for the blocks of a part that are not resident, and make them pending."""
        self._require_open("prepare_store")
        part = self._part(start, stop)
        if self._hints is not None and self._hints.ends:
            output = self._manager._store_last(part)
        else:
            output = self._manager.prepare_store(part)
        if output is not None:
            self._storing = self._not_dropped() + output.block_hashes_to_store
        return output

    def complete_store(self, success: bool = True) -> None:
        """Make readable, or drop, what this request stores; also after `finish`."""
        self._manager.complete_store(self._not_dropped(), success)
        self._storing = []

    def _not_dropped(self) -> list[BlockHash]:
        """Return what it stores and no reset of the manager has dropped since."""
        if self._resets != self._manager._resets:
            self._resets = self._manager._resets
            self._storing = []
        return self._storing

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Use more blocks, those of an answer, and append them to the request."""
        self._require_open("extend")
        batch = list(as_batch(hashes))
        self._require_open("extend")  # an iterator may have finished it
        self._manager._extended(list(batch))
        self._hashes += batch

    def finish(self, *, hints: Hints | None = None, now: float | None = None) -> None:
        """Use all blocks once more, last hash first, and end the request."""
        check_now(now)
        told = None if check_hints(hints) == self._hints else hints
        hints = self._hints if hints is None else hints
        now = self._now if now is None else now
        if self._is_finished:
            return
        self._manager._finished(list(self._hashes), hints, now)
        self._is_finished = True
        if told is not None:
            self._manager._hinted(told)

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """The blocks of the request, first block first."""
        return tuple(self._hashes)

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called."""
        return self._is_finished

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._hashes)

    def __bool__(self) -> bool:
        """Return True, even for a request without blocks."""
        return True

    def __enter__(self) -> Self:
        """Return the request."""
        self._require_open("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the request."""
        self.finish()

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle(self)

    def __repr__(self) -> str:
        """Return the number of blocks, and whether the request has finished."""
        return request_summary(self)

    def _require_open(self, call: str) -> None:
        """Raise RequestFinishedError if the request has finished."""
        if self._is_finished:
            raise request_finished(call)

    def _part(self, start: int, stop: int | None) -> list[BlockHash]:
        """Return the hashes of a part."""
        start, stop = check_part(start, stop, len(self._hashes))
        return self._hashes[start:stop]


def request_summary(request: Request[Any]) -> str:
    """Return the ``repr`` of a request of either twin."""
    state = "finished" if request.is_finished else "open"
    return f"<Request of {len(request)} blocks, {state}>"


def check_now(now: Any) -> None:
    """Raise TypeError or ValueError unless `now` is None or a finite number."""
    if now is None:
        return
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise TypeError(f"now must be a number or None, got {describe(now)}")
    if not math.isfinite(now):
        raise ValueError(f"now must be finite, got {describe(now)}")


Contracted = TypeVar("Contracted", bound=type)


def take_contract(implementation: Contracted, contract: type = OffloadingManager) -> Contracted:
    """Give the methods of a class the docstrings of a contract; return the class."""
    for name, declared in vars(contract).items():
        if callable(declared) and not name.startswith("_"):
            getattr(implementation, name).__doc__ = declared.__doc__
    return implementation


take_contract(CallingRequest, Request)
