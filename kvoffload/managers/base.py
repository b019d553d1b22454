"""The contract of managers, which decide when blocks may be read, written and evicted."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kvoffload._checks import as_batch, check_hints, check_part
from kvoffload._printable import plural
from kvoffload.errors import cannot_pickle, describe, request_finished
from kvoffload.types import BlockHash, Hints, OffloadingEvent, PrepareStoreOutput, Spec_co

if TYPE_CHECKING:
    from typing_extensions import Self

#: Half-open range of positions in a request.
Part = tuple[int, int]

#: A request in its session: what `OffloadingManager._met` returned at its beginning; the first
#: position that it has stored, or its end if its stores have found nothing to store, or the former
#: if it has made none; the number of blocks, from the last of the prompt on, after each of which
#: the session may go on; and the first position of its first `prepare_store` that stored blocks,
#: and the last of its last one, -1 for none.
InSession = tuple[int, int, int, int, int]


class Request(ABC, Generic[Spec_co]):
    """One prompt and its blocks in a manager, from their first use to the last.

    ``manager.begin(hashes)`` returns one. A request looks up the readable blocks of the prompt,
    loads and stores parts of it, and finishes. A part is a half-open range of positions, from
    `start` to before `stop`, ``0 <= start <= stop <= len(request)``, else ValueError.

    Any number of requests may be open, in any order, and the same blocks may be in several. A
    request that is dropped without `finish` is forgotten without its last use; the caller must
    still release its pins. After the manager's `reset_cache` an open request stays usable and finds
    no blocks. Its pins and stores from before are no longer its own: `complete_load` and
    `complete_store` skip them.

    As a context manager, a request finishes when the ``with`` block ends, also by an exception.

    After `finish`, every method except `complete_load` and `complete_store` raises
    RequestFinishedError; ``len`` and the properties remain available. Every method is all or
    nothing, like the manager's.

    Notes
    -----
    Thread-safety: as for the manager.

    Complexity: each call is O(n) in the blocks of its part. In the compiled twin, a call checks the
    known places of the blocks instead of looking them up again, and an open request takes at most
    48 bytes per block.
    """

    __slots__ = ()

    @abstractmethod
    def lookup(self, start: int = 0) -> int:
        """Count the ready blocks from `start` on, up to the first that is not ready.

        Parameters
        ----------
        start : int
            Number of leading blocks that the accelerator has; they are not looked up.

        Returns
        -------
        int
            As for `OffloadingManager.lookup` of these blocks.
        """

    @abstractmethod
    def prepare_load(self, start: int, stop: int) -> Spec_co:
        """Pin the blocks of a part for reading and return their slots.

        Raises
        ------
        BlockNotFoundError, BlockNotReadyError, RefCountOverflowError
            As from `OffloadingManager.prepare_load`.
        """

    @abstractmethod
    def complete_load(self, start: int, stop: int) -> None:
        """Release one pin of each block of a part, also after `finish`.

        A pin that the request took before the manager's `reset_cache` is gone: for such a block
        this call does nothing. If the request has pinned a block before and after the reset, the
        earlier load is taken to end first.

        Raises
        ------
        BlockNotFoundError, BlockNotPinnedError
            As from `OffloadingManager.complete_load`.
        """

    @abstractmethod
    def prepare_store(
        self, start: int = 0, stop: int | None = None
    ) -> PrepareStoreOutput[Spec_co] | None:
        """Make room for the absent blocks of a part, and make them pending.

        May be called several times, since a prompt may be computed in steps.

        Parameters
        ----------
        start, stop : int
            The part; None is the end of the request.

        Returns
        -------
        PrepareStoreOutput or None
            As for `OffloadingManager.prepare_store` of these blocks.

        Raises
        ------
        BackendError, PolicyError
            As from `OffloadingManager.prepare_store`.
        """

    @abstractmethod
    def complete_store(self, success: bool = True) -> None:
        """End this request's stores: make their blocks readable, or drop them.

        May be called after `finish`. Blocks whose store the manager's `complete_store` or
        `reset_cache` has already ended are skipped. However, if `complete_store` ended the store of
        a block and another request is storing it again, this call ends that store; so end each
        store in only one of these ways.

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
        """Append more blocks, such as those of an answer, to the request, and use them.

        Begin a request with its whole prompt: a client may leave out a part of an answer, so the
        session's next prompt may go on after the last block of `begin`, or after any of these.

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash; nothing has changed.
        """

    @abstractmethod
    def finish(self, *, hints: Hints | None = None, now: float | None = None) -> None:
        """Use all blocks once more, last hash first, and end the request.

        A policy that counts uses does not count this one. A second call does nothing.

        Parameters
        ----------
        hints : Hints, optional
            The client's hints about its session, which replace those of `begin`. If the session
            ends, the blocks that no other session shares are released: they leave before all
            others, see `OffloadingManager.release`.
        now : float, optional
            As for `begin`.

        Raises
        ------
        TypeError, ValueError
            If `hints` is not a ``Hints`` or `now` not a finite number; nothing has changed.
        """

    @property
    @abstractmethod
    def hashes(self) -> tuple[BlockHash, ...]:
        """The blocks of the request, first block first."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether `finish` was called."""

    def _note_own(self, first: int) -> None:
        """Note that blocks are being stored for the request, the first at this position."""
        del first

    def _note_loaded(self, start: int, stop: int) -> None:
        """Note that a part was pinned for the request since the last reset."""
        del start, stop

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

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

    def _require_open(self, call: str) -> None:
        """Raise RequestFinishedError if the request has finished."""
        if self.is_finished:
            raise request_finished(call)


class OffloadingManager(ABC, Generic[Spec_co]):
    """The life cycle of offloaded blocks: which of them may be read, written and evicted.

    A resident block is *pending* (a store is writing it), *idle* (readable and evictable) or
    *pinned* by n loads (readable, not evictable). Idle and pinned blocks are *ready*.

    Every argument `hashes` is a **batch**: any iterable of block hashes, a one-shot generator
    included, but not a single hash. It is consumed whole and every element is checked before
    anything else happens: an element must be exactly ``bytes`` (else TypeError) and not empty (else
    ValueError), and the message gives its position. After that, the first offending hash in batch
    order decides the error. Only `lookup` reads a list or tuple no further than it needs.

    Every method is **all or nothing**: if it raises or returns None, no block, list or event has
    changed, and an exception changes no counter; except after faults of a user's own parts (see
    `prepare_store`). Compiled, with built-in parts, this also holds for an exception from outside
    the call: KeyboardInterrupt, a signal handler's, MemoryError. Otherwise that may leave an
    intermediate state; with a built-in policy, a ``CPUOffloadingManager`` loses no slot.

    Engines start with `begin`: it returns a `Request`, whose methods make all further calls for one
    prompt. The calls that take a batch define the behaviour of a request's methods.

    From the requests a manager tells which blocks several sessions **share**, whatever its policy:
    the last block of a request, if it is resident when that finishes, ends it until a request goes
    on from there. When a request begins, or is extended, its deepest resident block decides. If
    that block ends a request, the session goes on. Otherwise the new request branches off from an
    earlier one, and all resident blocks up to there are shared, as long as they stay resident. So
    are blocks that others have stored, since a request began, before the first that it stores
    itself, or anywhere if its stores find nothing to store. A shared block is never released.

    `lookup`, `prepare_load` and `prepare_store` are abstract; by default `touch`, `complete_load`
    and `complete_store` do nothing, `take_events` returns nothing, and `begin` returns a request
    that makes the calls of this manager.

    For type checkers, ``OffloadingManager[CPULoadStoreSpec]`` is a manager whose specs have that
    type.

    Notes
    -----
    Thread-safety: with built-in policy and backend, compiled, each call is atomic with respect to
    the others. In Python, and over a user's own policy or backend, callers serialise. A sequence
    of calls (`lookup`, then `prepare_load`) needs the caller's lock in all cases.

    Complexity: each call is O(n) in its batch; an evicting `prepare_store` adds the victims, and
    in Python the blocks that the search for them skips.
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
            The client's hints about its session. If the session ends, the request's stores take
            only free slots and those of released blocks; leading blocks that fit are admitted, the
            others are not. Hints given to `Request.finish` replace these.
        now : float, optional
            Seconds on the caller's clock, finite. It changes nothing: no policy ranks by time since
            0.5.

        Returns
        -------
        Request

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash, `hints` not a ``Hints`` or `now` not a finite number.
        """
        check_now(now)
        check_hints(hints)
        return CallingRequest(self, as_batch(hashes), hints)

    # -- what a request tells ----------------------------------------------------------------

    def _begun(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the first time."""
        del hints
        self.touch(hashes)

    def _extended(self, added: list[BlockHash]) -> None:
        """Use the blocks that extend a request."""
        self.touch(added)

    def _hinted(self, hints: Hints) -> None:
        """Count the hints on a session; hints repeated at the end count once."""
        del hints

    def _lookup_told(self, hashes: list[BlockHash], *told: Any) -> int:
        """Count the leading ready blocks of a request with hints, or blocks before."""
        del told
        return self.lookup(hashes)

    def _store_last(self, hashes: list[BlockHash]) -> PrepareStoreOutput[Spec_co] | None:
        """Store blocks of a session that ends, in free slots and slots of released blocks."""
        return self.prepare_store(hashes)

    @property
    def _skeleton(self) -> Any:
        """The object that has the state, and the methods below: by default the manager itself."""
        return self

    #: Number of resets; after one, a request forgets the blocks that it was storing.
    _resets: int = 0

    def _met(self, hashes: list[BlockHash], start: int) -> int:
        """Note the session of a request, or of the blocks from `start` on that extend it.

        Return the number of blocks up to the deepest resident one, if the manager knows.
        """
        del hashes
        return start

    def _finished(self, hashes: list[BlockHash], hints: Hints | None, session: InSession) -> None:
        """Use the blocks of a request for the last time; release them if its session ends."""
        del session
        self.touch(hashes)
        if hints is not None and hints.ends:
            self.release(hashes)

    def _unshared(self, hashes: Iterable[bytes]) -> list[BlockHash]:
        """Return the resident blocks that only one session uses, as far as the manager knows."""
        return list(as_batch(hashes))

    @abstractmethod
    def lookup(self, hashes: Iterable[bytes]) -> int:
        """Count the leading blocks that are ready, without changing recency.

        In a list or tuple, elements after the first block that is not ready are not checked and
        cost nothing. Any other iterable is consumed first.

        Returns
        -------
        int
            Number of blocks before the first that is not ready: pending or not resident.
        """

    @abstractmethod
    def prepare_load(self, hashes: Iterable[bytes]) -> Spec_co:
        """Pin every block for reading and return the slots, without changing recency.

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
        """Release blocks that are not expected to be used again: they leave before all others.

        They leave last hash first, after blocks released earlier. Any later use returns a block to
        its regular place in the policy. Unknown hashes are ignored, and so are blocks that several
        sessions share; pinned and pending blocks stay until they may leave. No slot is freed and no
        event emitted before a store needs the room.

        Raises
        ------
        TypeError, ValueError
            If an element is not a block hash; nothing has changed.
        """

    def complete_load(self, hashes: Iterable[bytes]) -> None:
        """Release one pin for each occurrence of each block.

        Which load took a pin is not known here: after `reset_cache`, a load that began before it
        must not be completed by this call, which would release the pin of a later load.
        `Request.complete_load` knows.

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

        Resident blocks, pending ones included, and repeats within the batch are dropped. If free
        slots are missing, exactly that number of idle blocks is evicted, never one of the batch. A
        policy that decides on admission may store only a leading part of the rest.

        Returns
        -------
        PrepareStoreOutput or None
            The hashes to store and their slots, in batch order, and the evicted hashes, in eviction
            order. With nothing to store, empty lists and an empty spec. None if enough slots cannot
            be freed.

        Raises
        ------
        BackendError
            If a user's backend broke its contract: the slots handed out by the call are freed,
            blocks already evicted stay evicted and their event is emitted.
        PolicyError
            If a user's policy evicted a wrong number of blocks, or one that is protected or not
            idle, or dropped a block that it did not return: victims that were idle and not
            protected stay evicted, and their event is emitted.
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
        """Return the events since the last call, oldest first; empty if events are off.

        The events are detached at the call: an abandoned iterator neither replays them nor blocks
        later ones.
        """
        return iter(())


class CallingRequest(Request[Spec_co]):
    """A request that calls its manager's methods: the Python twin, for any manager."""

    __slots__ = (
        "_first",
        "_hashes",
        "_hints",
        "_is_finished",
        "_last",
        "_loading",
        "_manager",
        "_met",
        "_outdated",
        "_own",
        "_prompt",
        "_resets",
        "_storing",
    )

    def __init__(
        self,
        manager: OffloadingManager[Spec_co],
        batch: list[BlockHash],
        hints: Hints | None,
    ) -> None:
        self._manager = manager
        self._hashes = list(batch)
        self._hints = hints
        self._is_finished = False
        self._storing: list[BlockHash] = []  # returned by its stores and not ended
        self._loading: list[Part] = []  # parts that it has pinned
        self._outdated: list[Part] = []  # parts that it had pinned when the manager was reset
        self._own: int | None = None  # first position that it has stored; see `InSession`
        self._first = self._last = -1  # likewise
        self._resets = manager._skeleton._resets  # at its last call
        manager._begun(list(batch), hints)
        self._met = manager._skeleton._met(list(batch), 0)  # see `OffloadingManager._met`
        self._prompt = len(batch)  # blocks
        if hints is not None:
            manager._hinted(hints)

    def lookup(self, start: int = 0) -> int:
        """Count the ready blocks from `start` on, up to the first that is not ready."""
        self._require_open("lookup")
        start, _ = check_part(start, None, len(self._hashes))
        part = self._hashes[start:]
        if self._hints is None and not start:
            return self._manager.lookup(part)
        return self._manager._lookup_told(part, self._hints, self._hashes[:start])

    def prepare_load(self, start: int, stop: int) -> Spec_co:
        """Pin the blocks of a part for reading and return their slots."""
        self._require_open("prepare_load")
        start, stop = check_part(start, stop, len(self._hashes))
        spec = self._manager.prepare_load(self._hashes[start:stop])
        self._note_loaded(start, stop)
        return spec

    def _note_loaded(self, start: int, stop: int) -> None:
        """Note that a part was pinned for the request since the last reset."""
        self._note_resets()
        if start < stop:
            self._loading.append((start, stop))

    def complete_load(self, start: int, stop: int) -> None:
        """Release one pin of each block of a part, also after `finish`."""
        start, stop = check_part(start, stop, len(self._hashes))
        self._note_resets()
        outdated, parts = take_part(self._outdated, start, stop)
        loading = self._loading
        for part in parts:
            loading, _ = take_part(loading, *part)
        self._manager.complete_load([h for part in parts for h in self._hashes[slice(*part)]])
        self._outdated, self._loading = outdated, loading

    def prepare_store(
        self, start: int = 0, stop: int | None = None
    ) -> PrepareStoreOutput[Spec_co] | None:
        """Make room for the absent blocks of a part, and make them pending."""
        self._require_open("prepare_store")
        start, stop = check_part(start, stop, len(self._hashes))
        part = self._hashes[start:stop]
        if self._hints is not None and self._hints.ends:
            output = self._manager._store_last(part)
        else:
            output = self._manager.prepare_store(part)
        stored = [] if output is None else output.block_hashes_to_store
        self._note_resets()
        self._storing = self._storing + stored
        first = start + part.index(stored[0]) if stored else len(self._hashes)
        self._note_own(first)
        if stored:
            self._first = first if self._last < 0 else self._first
            self._last = start + part.index(stored[-1])
        return output

    def _note_own(self, first: int) -> None:
        """Note that blocks are being stored for the request, the first at this position."""
        self._note_resets()
        self._own = first if self._own is None else min(self._own, first)

    def complete_store(self, success: bool = True) -> None:
        """End this request's stores: make their blocks readable, or drop them."""
        self._note_resets()
        self._manager.complete_store(self._storing, success)
        self._storing = []

    def _note_resets(self) -> None:
        """Forget the blocks that it was using if the manager was reset since its last call."""
        if self._resets != self._manager._skeleton._resets:
            self._resets = self._manager._skeleton._resets
            self._storing = []
            self._outdated += self._loading
            self._loading = []
            self._met, self._own, self._last = 0, None, -1

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Append more blocks, such as those of an answer, to the request, and use them."""
        self._require_open("extend")
        batch = list(as_batch(hashes))
        self._require_open("extend")  # an iterator may have finished it
        self._manager._extended(batch)
        self._manager._skeleton._met(self._hashes + batch, len(self._hashes))
        self._hashes += batch

    def finish(self, *, hints: Hints | None = None, now: float | None = None) -> None:
        """Use all blocks once more, last hash first, and end the request."""
        check_now(now)
        told = None if check_hints(hints) == self._hints else hints
        hints = self._hints if hints is None else hints
        if self._is_finished:
            return
        self._note_resets()
        own = self._met if self._own is None else self._own
        num_last = len(self._hashes) - max(0, self._prompt - 1)
        session = self._met, own, num_last, self._first, self._last
        self._manager._skeleton._finished(list(self._hashes), hints, session)
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

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle(self)

    def __repr__(self) -> str:
        """Return the number of blocks, and whether the request has finished."""
        return request_summary(self)


def take_part(parts: list[Part], start: int, stop: int) -> tuple[list[Part], list[Part]]:
    """Take each position of a part once out of `parts`, which may overlap.

    Return what remains of `parts`, and the parts of the positions that are in none of them.
    """
    remaining: list[Part] = []
    missing = [(start, stop)] if start < stop else []  # in order, without overlaps
    for index, (first, end) in enumerate(parts):
        if not missing:
            return remaining + parts[index:], []
        absent: list[Part] = []
        for low, high in missing:
            taken, until = max(first, low), min(end, high)
            if taken >= until:
                absent.append((low, high))
                continue
            if first < taken:
                remaining.append((first, taken))
            absent += [part for part in ((low, taken), (until, high)) if part[0] < part[1]]
            first = until  # noqa: PLW2901
        if first < end:
            remaining.append((first, end))
        missing = absent
    return remaining, missing


def request_summary(request: Request[Any]) -> str:
    """Return the ``repr`` of a request of either twin."""
    state = "finished" if request.is_finished else "open"
    return f"<Request of {plural(len(request), 'block')}, {state}>"


def check_now(now: Any) -> None:
    """Raise TypeError or ValueError unless `now` is None or a finite number."""
    if now is None:
        return
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise TypeError(f"now must be a number or None, got {describe(now)}")
    if not abs(now) <= sys.float_info.max:
        raise ValueError(f"now must be finite, got {describe(now)}")


Contracted = TypeVar("Contracted", bound=type)


def take_contract(implementation: Contracted, contract: type = OffloadingManager) -> Contracted:
    """Give the methods of a class the docstrings of a contract; return the class."""
    for name, declared in vars(contract).items():
        if callable(declared) and not name.startswith("_"):
            getattr(implementation, name).__doc__ = declared.__doc__
    return implementation


take_contract(CallingRequest, Request)
