"""Requests of a model with several KV groups through a manager, in the order of vLLM's calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, CachePolicy, CPUOffloadingManager
from kvoffload.policies import registry

from .decoded import DecodedTrace
from .groups import GroupChunks, Place

__all__ = ["GroupDevice", "GroupServed", "GroupServer", "group_device_tokens", "group_key"]


def group_key(block_hash: bytes, group: int) -> BlockHash:
    """Return the key of a group's chunk that ends with a block: vLLM's ``OffloadKey``."""
    return BlockHash(block_hash + group.to_bytes(4, "big"))


@dataclass(slots=True)
class GroupServed:
    """The work that a request made for a manager.

    Attributes
    ----------
    local, asked, hits : int
        Tokens that the accelerator had; tokens of the prompt after them; how many of those were
        loaded.
    loaded : list of Place
        The chunks that were loaded.
    offered : list of list of Place
        The chunks that were offered to store, one list per call.
    stored, evicted : list of BlockHash
        Keys that got a slot, and wait for their store to end; and keys that left for them.
    refused : int
        Calls that were refused.
    not_admitted : int
        Chunks that the policy did not admit.
    """

    local: int
    asked: int
    hits: int
    loaded: list[Place]
    offered: list[list[Place]] = field(default_factory=list)
    stored: list[BlockHash] = field(default_factory=list)
    evicted: list[BlockHash] = field(default_factory=list)
    refused: int = 0
    not_admitted: int = 0


class GroupServer:
    """A manager that holds the chunks of several groups, driven as vLLM drives its own.

    What a request loads or offers is used once, when it ends: by the position of the last token,
    the head the most recent.

    Parameters
    ----------
    chunks : GroupChunks
        The rules.
    manager : CPUOffloadingManager
        The manager, whose slots hold chunks of any group.
    """

    def __init__(self, chunks: GroupChunks, manager: CPUOffloadingManager) -> None:
        self.chunks = chunks
        self.manager = manager
        self._suffixes = [group_key(b"", number) for number in range(len(chunks.chunk_tokens))]
        self._strides = [tokens // chunks.block_tokens for tokens in chunks.chunk_tokens]
        self._pending: set[BlockHash] = set()
        entry = _entry_of(manager.policy)
        name = "" if entry is None else entry.name
        self._is_lru = name == "lru"
        self._is_arc = name == "arc"
        self._learns_from_ghosts = name in ("arc", "arc-classic", "hit-density")
        self._by_chain = entry is not None and entry.learns_by_request

    def serve(
        self, hashes: Sequence[bytes], length: int, local: int = 0, junction: int = 0
    ) -> GroupServed:
        """Pass a request through the manager, except for the completion of its stores.

        Parameters
        ----------
        hashes : sequence of BlockHash
            The prompt's blocks in the trace, first block first.
        length : int
            Tokens of the prompt, as `GroupChunks.length_of` has it.
        local, junction : int
            Tokens, as in `GroupChunks.offers`.
        """
        chunks = self.chunks
        request = _Request(self, hashes, length)
        hit = chunks.hit(length, local, request)
        served = GroupServed(local, length - local, hit, chunks.loaded(local, hit))
        request.load(served)
        request.offer(served, chunks.offers(length, local, hit, junction))
        request.end(served)
        self._pending.update(served.stored)
        return served

    def complete(self, served: GroupServed) -> None:
        """End the stores of a request."""
        self.manager.complete_store(served.stored)
        self._pending.difference_update(served.stored)


class _Request:
    """A request at work: its keys, and what it has shown of them."""

    def __init__(self, server: GroupServer, hashes: Sequence[bytes], length: int) -> None:
        self._server = server
        self._manager = server.manager
        whole = length // server.chunks.block_tokens
        self._keys = [
            [BlockHash(block_hash + suffix) for block_hash in hashes[stride - 1 : whole : stride]]
            for suffix, stride in zip(server._suffixes, server._strides, strict=True)
        ]
        self._has_begun = False
        self._used: dict[Place, BlockHash] = {}  # loaded, or offered while they were there
        self._missed: dict[Place, BlockHash] = {}  # offered, and not there

    # -- what is there -----------------------------------------------------------------------

    def leading(self, group: int, start: int, end: int) -> int:
        """Return how many chunks from `start` on are there, before one that is not or `end`."""
        return self._manager.lookup(self._keys[group][start:end])

    def trailing(self, group: int, start: int, end: int) -> int:
        """Return how many chunks before `end` are there, after one that is not or `start`."""
        return self._manager.lookup(self._keys[group][start:end][::-1])

    # -- in the order of vLLM's calls --------------------------------------------------------

    def load(self, served: GroupServed) -> None:
        """Load what was hit."""
        if not served.loaded:
            return
        self._begin()
        loaded = {place: self._keys[place.group][place.chunk] for place in served.loaded}
        keys = list(loaded.values())
        self._manager.prepare_load(keys)
        self._manager.complete_load(keys)
        self._used.update(loaded)

    def offer(self, served: GroupServed, calls: list[list[Place]]) -> None:
        """Offer what may be stored, call by call, each with what was refused before."""
        manager, server = self._manager, self._server
        refused: list[Place] = []
        for call in calls:
            self._begin()
            is_state = self._is_state(call[0])
            places = call if is_state else sorted(refused + call, key=lambda place: place.group)
            offered = [(place, self._keys[place.group][place.chunk]) for place in places]
            missing = {place: key for place, key in offered if key not in manager}
            ready = {
                place: key
                for place, key in offered
                if place not in missing and key not in server._pending and key not in served.stored
            }
            if server._is_lru and self._used:
                # Until the request ends, what it has used counts as newest.
                manager.touch(self._in_order(self._used, lower_first=False))
            elif not (server._is_lru or server._by_chain):
                # A policy may learn from what has left.
                first = [key for place, key in missing.items() if place not in self._missed]
                manager._touch_told(first, again=False)
            self._missed.update(missing)
            self._used.update(ready)
            served.offered.append(places)
            output = manager.prepare_store([key for _, key in offered])
            if output is None:
                served.refused += 1
                refused = refused if is_state else places
                continue
            refused = refused if is_state else []
            served.not_admitted += len(missing) - len(output.block_hashes_to_store)
            served.stored.extend(output.block_hashes_to_store)
            served.evicted.extend(output.block_hashes_evicted)

    def end(self, served: GroupServed) -> None:
        """Use what was loaded or offered: the head is the most recent."""
        stored = set(served.stored)
        used = self._used | {place: key for place, key in self._missed.items() if key in stored}
        if served.evicted and self._server._learns_from_ghosts:
            # What the request itself has evicted does not come back.
            used = {place: key for place, key in used.items() if key in self._manager}
        if self._server._by_chain:
            used |= {place: key for place, key in self._missed.items() if key not in stored}
        if self._server._is_arc:
            # What was loaded, evicted and stored again counts as used again, stored or not.
            self._manager.complete_store([key for key in self._used.values() if key in stored])
        batch = self._in_order(used)
        if not batch:
            return
        self._manager._touch_told(batch, again=self._server._by_chain)

    # -- parts -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Show the keys of the whole request to a policy that learns by request."""
        if self._server._by_chain and not self._has_begun:
            every = {
                Place(group, chunk): key
                for group, keys in enumerate(self._keys)
                for chunk, key in enumerate(keys)
            }
            self._manager._touch_told(self._in_order(every), again=False)
        self._has_begun = True

    def _is_state(self, place: Place) -> bool:
        return self._server.chunks.layout.groups[place.group].kind == "state"

    def _in_order(
        self, keys: dict[Place, BlockHash], *, lower_first: bool = True
    ) -> list[BlockHash]:
        """Return keys by the position of their last tokens, then by group."""
        tokens = self._server.chunks.chunk_tokens
        sign = 1 if lower_first else -1
        order = sorted(
            keys, key=lambda place: ((place.chunk + 1) * tokens[place.group], sign * place.group)
        )
        return [keys[place] for place in order]


def _entry_of(policy: CachePolicy) -> registry.Entry | None:
    """Return the entry of a built-in policy or of the one that it derives from, else None."""
    for kind in type(policy).__mro__:
        if registry.is_builtin(kind, "c") or registry.is_builtin(kind, "py"):
            entries = map(registry.entry, registry.names())
            return next(one for one in entries if one.class_name == kind.__name__)
    return None


class GroupDevice:
    """The accelerator's own cache of several groups, by the same rule, least recent first.

    A request leaves in it what the engine keeps: of full and chunked groups every whole chunk, of
    the others the chunks before its resume points. Blocks of the engine are not told apart: what
    is there is told by chunks.

    Parameters
    ----------
    chunks : GroupChunks
        The rules.
    num_slots : int
        Its capacity, chunks of any group; 0 for no cache.
    """

    def __init__(self, chunks: GroupChunks, num_slots: int) -> None:
        self.chunks = chunks
        self.num_slots = num_slots
        self._cached: OrderedDict[tuple[int, Hashable], None] = OrderedDict()

    def ask(self, blocks: Sequence[Hashable], length: int) -> tuple[int, int]:
        """Return the leading tokens that are there, and the junction; insert the request.

        Parameters
        ----------
        blocks : sequence
            The prompt's blocks in the trace, first block first.
        length : int
            Tokens of the prompt, as `GroupChunks.length_of` has it.
        """
        if not self.num_slots:
            return 0, 0
        cached, chunks = self._cached, self.chunks
        strides = [tokens // chunks.block_tokens for tokens in chunks.chunk_tokens]

        def key(place: Place) -> tuple[int, Hashable]:
            return place.group, blocks[(place.chunk + 1) * strides[place.group] - 1]

        local, junction = chunks.local(length, lambda place: key(place) in cached)
        for place in reversed(chunks.left_on_device(length, junction)):
            inserted = key(place)
            cached[inserted] = None
            cached.move_to_end(inserted)
        while len(cached) > self.num_slots:
            cached.popitem(last=False)
        return local, junction


def group_device_tokens(
    trace: DecodedTrace, chunks: GroupChunks, num_slots: int
) -> npt.NDArray[np.int64]:
    """Return, for each request, the tokens that a `GroupDevice` has, and the junction.

    Parameters
    ----------
    trace : DecodedTrace
        The requests.
    chunks : GroupChunks
        The rules.
    num_slots : int
        Slots of the accelerator's cache; 0 for none.

    Returns
    -------
    (requests, 2) int64
    """
    found = np.zeros((trace.num_requests, 2), dtype=np.int64)
    if num_slots:
        device = GroupDevice(chunks, num_slots)
        rows = zip(trace.rows(), trace.lengths.tolist(), strict=True)
        for number, (row, input_length) in enumerate(rows):
            found[number] = device.ask(row, chunks.length_of(input_length, len(row)))
    return found
