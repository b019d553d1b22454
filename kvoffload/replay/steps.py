"""A request's loads and stores in the order of vLLM's scheduler, step by step.

vLLM computes a prompt in steps of at most ``max_num_batched_tokens``. After each it offers the
chunks that are complete by then. An offer that is refused is made again with that of the next step,
and after the prompt in the steps of the answer. The worker begins a store in the step after the one
that ordered it, so it ends before the second step after it: from then on its chunks can be evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvoffload import BlockHash, CachePolicy, CPUOffloadingManager, OffloadingManager
from kvoffload._checks import check_int
from kvoffload.errors import describe
from kvoffload.policies import registry

__all__ = [
    "STEP_TOKENS",
    "Call",
    "Learning",
    "StepServed",
    "StepServer",
    "SteppedRequest",
]

STEP_TOKENS = 8192
"""Tokens of a prompt that a scheduler step computes at most, unless told."""

MAX_STEP_TOKENS = 2**31 - 1
"""Most tokens of a step."""


@dataclass(frozen=True, slots=True)
class Learning:
    """The uses from which a manager's policy learns: they decide what it is told of a request.

    Attributes
    ----------
    is_lru, is_arc : bool
        Whether it decides as vLLM's policy of that name.
    from_ghosts : bool
        Whether it learns from a use of a block that has left.
    by_chain : bool
        Whether it learns from all keys of a request together.
    """

    is_lru: bool
    is_arc: bool
    from_ghosts: bool
    by_chain: bool

    @classmethod
    def of(cls, manager: CPUOffloadingManager) -> Learning:
        """Return that of a manager's policy; a class of the user's is told of every use."""
        entry = _entry_of(manager.policy)
        name = "" if entry is None else entry.name
        return cls(
            name == "lru",
            name == "arc",
            name in ("arc", "arc-classic", "hit-density"),
            entry is not None and entry.learns_by_request,
        )


def _entry_of(policy: CachePolicy) -> registry.Entry | None:
    """Return the entry of a built-in policy or of the one that it derives from, else None."""
    for kind in type(policy).__mro__:
        if registry.is_builtin(kind, "c") or registry.is_builtin(kind, "py"):
            entries = map(registry.entry, registry.names())
            return next(one for one in entries if one.class_name == kind.__name__)
    return None


@dataclass(frozen=True, slots=True)
class Call:
    """One offer.

    Attributes
    ----------
    keys : list of BlockHash
        The keys.
    is_repeated : bool
        Whether it is made again if it is refused; a state's is not.
    """

    keys: list[BlockHash]
    is_repeated: bool = True


class SteppedRequest(ABC):
    """A request on its way through a manager, which is told of it as vLLM tells its own.

    What a request loads or offers is used once, when it ends: by the position of the last token,
    the head the most recent. Until then it counts as newest.

    Parameters
    ----------
    manager : CPUOffloadingManager
        The manager.
    learning : Learning
        What its policy learns from.
    in_flight : set of BlockHash
        Keys whose stores, of earlier requests, have not ended.

    Attributes
    ----------
    stored, evicted : list of BlockHash
        Keys that got a slot, and keys that left for them.
    offered : list of list of BlockHash
        The offers that were made.
    refused : int
        Offers that were refused.
    not_admitted : int
        Chunks that the policy did not admit.
    """

    def __init__(
        self, manager: CPUOffloadingManager, learning: Learning, in_flight: set[BlockHash]
    ) -> None:
        self.stored: list[BlockHash] = []
        self.evicted: list[BlockHash] = []
        self.offered: list[list[BlockHash]] = []
        self.refused = 0
        self.not_admitted = 0
        self._manager = manager
        self._learning = learning
        self._in_flight = in_flight
        self._has_begun = False
        self._used: set[BlockHash] = set()  # loaded, or offered while they were there
        self._missed: set[BlockHash] = set()  # offered, and not there
        self._own: set[BlockHash] = set()  # stored
        self._ended: set[BlockHash] = set()  # stored, and readable before the request ends

    @abstractmethod
    def every(self) -> list[BlockHash]:
        """Return all keys of the request, as `in_order` does."""

    @abstractmethod
    def in_order(self, keys: set[BlockHash], *, lower_first: bool = True) -> list[BlockHash]:
        """Return keys by the position of their last tokens, then by group."""

    def by_group(self, keys: list[BlockHash]) -> list[BlockHash]:
        """Return keys group by group, in the order in which vLLM offers them."""
        return keys

    def load(self, keys: list[BlockHash]) -> None:
        """Load what was hit."""
        if not keys:
            return
        self._begin()
        self._manager.prepare_load(keys)
        self._manager.complete_load(keys)
        self._used.update(keys)

    def store(self, steps: Iterable[tuple[int, list[Call]]], *, ends_stores: bool) -> None:
        """Make the offers of all steps, and those that were refused again.

        Parameters
        ----------
        steps : iterable of (int, list of Call)
            The steps that compute the prompt: the number of each, and its offers in order. Those
            that offer nothing may be left out.
        ends_stores : bool
            Whether stores end while the request goes on; else they all end after it.
        """
        waiting: list[BlockHash] = []  # refused
        stores: list[tuple[int, list[BlockHash]]] = []  # by step, those that have not ended

        def end_stores(before: int) -> bool:
            has_ended = False
            while ends_stores and stores and stores[0][0] < before:
                self._end(stores.pop(0)[1])
                has_ended = True
            return has_ended

        last = 0
        for last, calls in steps:
            end_stores(last - 1)
            for call in calls:
                keys = call.keys
                if call.is_repeated and waiting:
                    keys = self.by_group(waiting + keys)
                stored = self._offer(keys)
                if stored:
                    stores.append((last, stored))
                if call.is_repeated:
                    waiting = keys if stored is None else []
        for number in (last + 1, last + 2):  # of the answer: then all stores have ended
            if waiting and end_stores(number - 1):
                stored = self._offer(waiting)
                if stored is not None:
                    waiting = []
                    stores.append((number, stored))

    def end(self) -> None:
        """Use what was loaded or offered: the head is the most recent."""
        manager, learning = self._manager, self._learning
        used = self._used | self._own
        if self.evicted and learning.from_ghosts:
            # What the request itself has evicted does not come back.
            used = {key for key in used if key in manager}
        if learning.by_chain:
            used |= self._missed - self._own
        if learning.is_arc:
            # What was loaded, evicted and stored again counts as used again, stored or not.
            manager.complete_store(self._used & self._own)
        if not used:
            return
        batch = self.in_order(used)
        inserted = self._ended - self._used
        if inserted and not (learning.is_lru or learning.by_chain):
            manager._touch_inserted(batch, inserted)
        elif learning.by_chain:
            manager._finished(batch, None)
        else:
            manager.touch(batch)

    # -- parts -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Show the keys of the whole request to a policy that learns by request."""
        if self._learning.by_chain and not self._has_begun:
            self._manager.touch(self.every())
        self._has_begun = True

    def _offer(self, keys: list[BlockHash]) -> list[BlockHash] | None:
        """Offer keys; return those that are being stored, or None if the offer is refused."""
        manager, learning = self._manager, self._learning
        self._begin()
        missing: list[BlockHash] | None = None
        if learning.is_lru:
            if self._used or self._own:
                # Until the request ends, what it has used counts as newest.
                manager.touch(self.in_order(self._used | self._own, lower_first=False))
        else:
            missing = [key for key in keys if key not in manager]
            if not learning.by_chain:
                # A policy may learn from what has left.
                first = [key for key in missing if key not in self._missed]
                manager.touch(first)
        self.offered.append(keys)
        output = manager.prepare_store(keys)
        if missing is None:  # LRU stores all of them, or none
            missing = (
                [key for key in keys if key not in manager]
                if output is None
                else output.block_hashes_to_store
            )
        self._missed.update(missing)
        if len(missing) < len(keys):
            self._used.update(set(keys).difference(missing, self._in_flight, self._own))
        if output is None:
            self.refused += 1
            return None
        stored = output.block_hashes_to_store
        self.not_admitted += len(missing) - len(stored)
        self.stored.extend(stored)
        self.evicted.extend(output.block_hashes_evicted)
        self._own.update(stored)
        return stored

    def _end(self, keys: list[BlockHash]) -> None:
        """End stores."""
        self._manager.complete_store(keys)
        self._ended.update(keys)


class _FullRequest(SteppedRequest):
    """A request of a model whose layers are one full group: its keys are its blocks."""

    def __init__(
        self,
        manager: CPUOffloadingManager,
        learning: Learning,
        in_flight: set[BlockHash],
        hashes: list[BlockHash],
        first: int,
    ) -> None:
        super().__init__(manager, learning, in_flight)
        self._hashes = hashes
        self._first = first  # the block from which on it loads or offers

    def every(self) -> list[BlockHash]:
        return self._hashes

    def in_order(self, keys: set[BlockHash], *, lower_first: bool = True) -> list[BlockHash]:
        del lower_first
        # Mostly these are all from the first on.
        run = self._hashes[self._first : self._first + len(keys)]
        if keys.issuperset(run) and len(run) == len(keys):
            return run
        return [key for key in self._hashes if key in keys]


@dataclass(slots=True)
class StepServed:
    """The work that a request of a model whose layers are one full group made for a manager.

    Attributes
    ----------
    hits : int
        Blocks that were loaded.
    to_store, evicted : list of BlockHash
        Blocks that got a slot, of which some may wait for `StepServer.complete`; and blocks that
        left for them.
    refused : int
        Offers that were refused.
    """

    hits: int
    to_store: list[BlockHash]
    evicted: list[BlockHash]
    refused: int
    _server: StepServer = field(repr=False, compare=False)

    def complete(self) -> None:
        """End the stores."""
        self._server.complete(self.to_store)


class StepServer:
    """A manager that is asked and offered blocks as vLLM's scheduler does, step by step.

    For a model whose layers are one full group; `GroupServer` is for several. A block that the
    prompt fills only partly counts as one of its last step.

    Parameters
    ----------
    manager : CPUOffloadingManager
        The manager.
    block_tokens : int
        Tokens per block, >= 1.
    step_tokens : int
        Tokens of a prompt that a step computes at most, >= 1.
    ends_stores : bool
        Whether stores end while their request goes on; else they end when `complete` is called.

    Raises
    ------
    TypeError, ValueError
        If one of them is not so.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        block_tokens: int | None,
        step_tokens: int,
        *,
        ends_stores: bool = True,
    ) -> None:
        if not isinstance(manager, CPUOffloadingManager):
            raise TypeError(
                "manager must be a CPUOffloadingManager where step_tokens is given, got "
                f"{describe(manager)}"
            )
        if block_tokens is None:
            raise ValueError(f"block_tokens must go with step_tokens, got {step_tokens} without")
        check_int("block_tokens", block_tokens, 1)
        check_step_tokens(step_tokens)
        self._manager = manager
        self._learning = Learning.of(manager)
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._ends_stores = ends_stores
        self._in_flight: set[BlockHash] = set()

    def serve(self, hashes: list[BlockHash], on_device: int = 0) -> StepServed:
        """Pass a request through the manager; its last stores wait for `complete`.

        Parameters
        ----------
        hashes : list of BlockHash
            The request's blocks, first block first.
        on_device : int
            How many leading blocks the accelerator's own cache has: the manager is not asked for
            them.
        """
        hits = self._manager.lookup(hashes[on_device:] if on_device else hashes)
        kept = on_device + hits
        first = on_device if hits else 0
        request = _FullRequest(self._manager, self._learning, self._in_flight, hashes, first)
        request.load(hashes[on_device:kept])
        request.store(self._steps(hashes, kept, kept if hits else 0), ends_stores=self._ends_stores)
        request.end()
        self._in_flight.update(request.stored)
        return StepServed(hits, request.stored, request.evicted, request.refused, self)

    def complete(self, stored: list[BlockHash]) -> None:
        """End the stores of a request."""
        self._manager.complete_store(stored)
        self._in_flight.difference_update(stored)

    def _steps(
        self, hashes: list[BlockHash], kept: int, start: int
    ) -> Iterator[tuple[int, list[Call]]]:
        """Yield the steps that compute a prompt whose first `kept` blocks are there."""
        size = self._block_tokens
        # Of a prompt whose blocks are all there, a token is left to compute.
        length = max(len(hashes) * size, kept * size + 1)
        for number, end in step_ends(length, kept * size, self._step_tokens, size):
            stop = end // size
            if stop > start:
                yield number, [Call(hashes[start:stop])]
                start = stop


def check_step_tokens(step_tokens: int) -> None:
    """Raise TypeError or ValueError unless these can be the tokens of a step."""
    check_int("step_tokens", step_tokens, 1, MAX_STEP_TOKENS)


def step_ends(length: int, start: int, step: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield the steps that end behind another multiple of `unit`, and the last one.

    Parameters
    ----------
    length, start : int
        Tokens of the prompt, and those that need no step.
    step : int
        Tokens that a step computes at most.
    unit : int
        Tokens of a block.

    Yields
    ------
    (int, int)
        Number of the step, and the tokens that are there after it.
    """
    number, end = 0, start
    while end < length:
        behind = min((end // unit + 1) * unit, length)
        number = -(-(behind - start) // step)
        end = min(start + number * step, length)
        yield number, end
