"""Requests of a model with several KV groups through a manager, in the order of vLLM's calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, CPUOffloadingManager

from .decoded import DecodedTrace
from .groups import GroupChunks, Place
from .steps import Call, Learning, SteppedRequest

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

    Parameters
    ----------
    chunks : GroupChunks
        The rules. With `step_tokens`, offers are made step by step.
    manager : CPUOffloadingManager
        The manager, whose slots hold chunks of any group.
    ends_stores : bool
        Whether, step by step, stores end while their request goes on; else they end when `complete`
        is called.
    """

    def __init__(
        self, chunks: GroupChunks, manager: CPUOffloadingManager, *, ends_stores: bool = True
    ) -> None:
        self.chunks = chunks
        self.manager = manager
        self._ends_stores = ends_stores and chunks.step_tokens is not None
        self._suffixes = [group_key(b"", number) for number in range(len(chunks.chunk_tokens))]
        self._strides = [tokens // chunks.block_tokens for tokens in chunks.chunk_tokens]
        self._in_flight: set[BlockHash] = set()
        self._learning = Learning.of(manager)

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
        whole = length // chunks.block_tokens
        keys = [
            [BlockHash(block + suffix) for block in hashes[stride - 1 : whole : stride]]
            for suffix, stride in zip(self._suffixes, self._strides, strict=True)
        ]
        request = _GroupRequest(self, self._learning, self._in_flight, keys)
        hit = chunks.hit(length, local, request)
        served = GroupServed(local, length - local, hit, chunks.loaded(local, hit))
        request.load(request.keys(served.loaded))
        request.store(
            (
                (number, list(map(request.call, calls)))
                for number, calls in chunks.offers_by_step(length, local, hit, junction)
            ),
            ends_stores=self._ends_stores,
        )
        request.end()
        served.offered = list(map(request.places, request.offered))
        served.stored, served.evicted = request.stored, request.evicted
        served.refused, served.not_admitted = request.refused, request.not_admitted
        self._in_flight.update(served.stored)
        return served

    def complete(self, served: GroupServed) -> None:
        """End the stores of a request."""
        self.manager.complete_store(served.stored)
        self._in_flight.difference_update(served.stored)


class _GroupRequest(SteppedRequest):
    """A request at work: its keys by group and chunk."""

    def __init__(
        self,
        server: GroupServer,
        learning: Learning,
        in_flight: set[BlockHash],
        keys: list[list[BlockHash]],
    ) -> None:
        super().__init__(server.manager, learning, in_flight)
        self._chunks = server.chunks
        self._keys = keys
        self._places: dict[BlockHash, Place] = {}  # of those that were loaded or offered

    # -- what is there -----------------------------------------------------------------------

    def leading(self, group: int, start: int, end: int) -> int:
        """Return how many chunks from `start` on are there, before one that is not or `end`."""
        return self._manager.lookup(self._keys[group][start:end])

    def trailing(self, group: int, start: int, end: int) -> int:
        """Return how many chunks before `end` are there, after one that is not or `start`."""
        return self._manager.lookup(self._keys[group][start:end][::-1])

    # -- chunks and their keys ---------------------------------------------------------------

    def keys(self, places: list[Place]) -> list[BlockHash]:
        """Return the keys of chunks."""
        keys = [self._keys[group][chunk] for group, chunk in places]
        self._places.update(zip(keys, places, strict=True))
        return keys

    def call(self, places: list[Place]) -> Call:
        """Return an offer of chunks, of which states are not made again."""
        kind = self._chunks.layout.groups[places[0].group].kind
        return Call(self.keys(places), is_repeated=kind != "state")

    def places(self, keys: list[BlockHash]) -> list[Place]:
        """Return the chunks of keys."""
        return [self._places[key] for key in keys]

    def every(self) -> list[BlockHash]:
        every = [
            Place(group, chunk)
            for group, keys in enumerate(self._keys)
            for chunk in range(len(keys))
        ]
        return self.in_order(set(self.keys(every)))

    def in_order(self, keys: set[BlockHash], *, lower_first: bool = True) -> list[BlockHash]:
        places, tokens = self._places, self._chunks.chunk_tokens
        sign = 1 if lower_first else -1

        def order(key: BlockHash) -> tuple[int, int]:
            group, chunk = places[key]
            return (chunk + 1) * tokens[group], sign * group

        return sorted(keys, key=order)

    def by_group(self, keys: list[BlockHash]) -> list[BlockHash]:
        places = self._places
        return sorted(keys, key=lambda key: places[key].group)


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
