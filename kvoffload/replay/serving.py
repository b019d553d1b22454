"""The calls of a manager for one request, in the order in which vLLM's scheduler makes them.

Its keys are those of chunks of several groups. vLLM computes a prompt in steps of at most
``max_num_batched_tokens``. After each step it offers the chunks complete by then. A refused offer
is repeated with that of the next step, and after the prompt in the steps of the answer. The worker
begins a store in the step after the one that ordered it, so the store ends before the second step
after the order: from then on its chunks can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload import (
    BlockHash,
    CPUOffloadingManager,
    Hints,
    OffloadingManager,
)
from kvoffload.errors import describe
from kvoffload.managers import calls
from kvoffload.policies import registry

from .groups import Chunks, GroupChunks
from .hints import Told

_GROUP_BYTES = 4
"""Bytes of a group's number at the end of a key."""


def group_key(block_hash: bytes, group: int) -> BlockHash:
    """Return the key of a group's chunk that ends with a block: vLLM's ``OffloadKey``."""
    return BlockHash(block_hash + group.to_bytes(_GROUP_BYTES, "big"))


class GroupServer:
    """A manager that holds the chunks of all groups, driven as vLLM drives its own.

    With `step_tokens` of `groups`, offers are made step by step. Then `ends_stores` says whether
    stores end during their request; otherwise they end with `SteppedRequest.complete`.
    """

    def __init__(
        self,
        groups: GroupChunks,
        manager: OffloadingManager,
        disk: CPUOffloadingManager | None = None,
        *,
        ends_stores: bool = True,
    ) -> None:
        if not isinstance(manager, CPUOffloadingManager):
            needed = "a CPUOffloadingManager where there are several groups or steps"
            raise TypeError(f"manager must be {needed}, got {describe(manager)}")
        self.groups = groups
        self.manager = manager
        self.disk = disk  # behind the manager, of a `TieredServer`
        self.in_flight: set[BlockHash] = set()  # keys whose stores have not ended
        # Of a built-in policy, or of the built-in base of a policy.
        entries = filter(None, map(registry.entry_of, type(manager.policy).__mro__))
        self.learning = Learning.of(next(entries, None))
        self._ends_stores = ends_stores and groups.step_tokens is not None
        self._suffixes = [group_key(b"", group) for group in range(len(groups.chunk_tokens))]
        self._strides = [tokens // groups.block_tokens for tokens in groups.chunk_tokens]
        self.is_state = [group.kind == "state" for group in groups.layout.groups]

    def serve(
        self,
        hashes: Sequence[BlockHash],
        length: int,
        local: int = 0,
        junction: int = 0,
        told: Told | None = None,
    ) -> SteppedRequest:
        """Serve a request with the manager, except for the completion of its last stores.

        `length` is as from `GroupChunks.length_of`, `local` and `junction` as in its `offers`. The
        manager receives the hints in `told`.
        """
        groups, request = self.groups, self._begin(self._keys(hashes, length), told)
        hit = request.hit_tokens = request.hit(length, local)
        request.load(request.keys(groups.loaded_chunks(local, hit)))
        request.store(groups.offers_by_step(length, local, hit, junction), self._ends_stores)
        request.end()
        self.in_flight.update(request.to_store)
        return request

    def _begin(self, keys: list[Sequence[BlockHash]], told: Told | None) -> SteppedRequest:
        """Return a request for the keys of chunks, by group."""
        return SteppedRequest(self, keys, told)

    def _keys(self, hashes: Sequence[BlockHash], length: int) -> list[Sequence[BlockHash]]:
        """Return the keys of a prompt's whole chunks by group."""
        if self.groups.is_plain:
            return [hashes]
        whole = length // self.groups.block_tokens
        return [
            [BlockHash(block + suffix) for block in hashes[stride - 1 : whole : stride]]
            for suffix, stride in zip(self._suffixes, self._strides, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Learning:
    """The uses from which a policy learns, which decide the calls for a request."""

    is_lru: bool  # decides like vLLM's policy of that name
    is_arc: bool  # likewise
    from_ghosts: bool  # learns from a use of a block that has left
    by_chain: bool  # learns from all keys of a request together

    @classmethod
    def of(cls, entry: registry.Entry | None) -> Learning:
        """Return that of a policy; a user's class, None, receives every use."""
        if entry is None:
            return cls(is_lru=False, is_arc=False, from_ghosts=False, by_chain=False)
        return cls(
            is_lru=entry.vllm == "lru",
            is_arc=entry.vllm == "arc",
            from_ghosts=entry.learns_from_ghosts,
            by_chain=entry.learns_by_request,
        )


class SteppedRequest:
    """A request served step by step, with the calls that vLLM makes of its own manager.

    The chunks that a request loads or offers are used once, when it ends: by the position of the
    last token, with the head as the most recent. Until then they count as newest.

    Parameters
    ----------
    server : GroupServer
        Its server.
    keys : list of sequence of BlockHash
        The keys of its chunks by group.
    told : Told or None
        Its hints.

    Attributes
    ----------
    hit_tokens : int
        Tokens loaded, after those that the accelerator had.
    disk_tokens : int
        Of these, those for which a chunk came from a disk behind the manager.
    loaded : list of BlockHash
        The loaded chunks.
    offered : list of list of BlockHash
        The offered chunks, one list per call.
    to_store : list of BlockHash
        The stored chunks; some may wait for `complete`.
    evicted : list of BlockHash
        The chunks evicted to make room.
    refused : int
        Refused calls.
    """

    def __init__(
        self, server: GroupServer, keys: list[Sequence[BlockHash]], told: Told | None
    ) -> None:
        self.hit_tokens = self.disk_tokens = self.refused = 0
        self.loaded: list[BlockHash] = []
        self.offered: list[list[BlockHash]] = []
        self.to_store: list[BlockHash] = []
        self.evicted: list[BlockHash] = []
        self._told = told
        self._groups = server.groups
        self._manager = server.manager
        self._learning = server.learning
        self._in_flight = server.in_flight
        self._chunk_tokens = server.groups.chunk_tokens
        self._is_state = server.is_state
        self._keys = keys
        self._orders: dict[int, list[BlockHash]] = {}  # by the sign of the group
        self._has_begun = False
        self._has_let_go = False  # of chunks that the last step's offers could not evict
        self._used: set[BlockHash] = set()  # loaded, or offered while present
        self._missed: set[BlockHash] = set()  # offered while absent
        self._own: set[BlockHash] = set()  # stored
        self._stores: list[tuple[int, list[BlockHash]]] = []  # by step, those that have not ended
        self._ended: set[BlockHash] = set()  # stored, and readable before the request ends

    # -- presence --------------------------------------------------------------------------

    def hit(self, length: int, local: int) -> int:
        """Return the tokens that can be loaded, as from `GroupChunks.hit`."""
        return self._groups.hit(length, local, self) or 0

    def leading(self, group: int, start: int, end: int) -> int | None:
        """Return the number of chunks present from `start` on, up to a missing one or `end`."""
        return self._manager.lookup(self._keys[group][start:end])

    def trailing(self, group: int, start: int, end: int) -> int | None:
        """Return the number of chunks present before `end`, back to a missing one or `start`."""
        return self._manager.lookup(self._keys[group][start:end][::-1])

    # -- chunks and their keys ---------------------------------------------------------------

    def keys(self, chunks: Chunks) -> list[BlockHash]:
        """Return the keys of chunks."""
        found: list[BlockHash] = []
        for group, indexes in chunks:
            keys = self._keys[group]
            if isinstance(indexes, range):
                found += keys[indexes.start : indexes.stop]
            else:
                found += [keys[index] for index in indexes]
        return found

    def _every(self, sign: int = 1) -> Sequence[BlockHash]:
        """Return all keys by the position of their last tokens, then by group, reversed for -1."""
        if len(self._keys) == 1:
            return self._keys[0]
        if sign not in self._orders:
            groups = enumerate(zip(self._keys, self._chunk_tokens, strict=True))
            positioned = [
                ((chunk + 1) * tokens, sign * group, key)
                for group, (keys, tokens) in groups
                for chunk, key in enumerate(keys)
            ]
            self._orders[sign] = [key for _, _, key in sorted(positioned)]
        return self._orders[sign]

    def _num_at_end(self) -> int:
        """Return the number of chunks whose last token is the last of all."""
        groups = zip(self._keys, self._chunk_tokens, strict=True)
        ends = [len(keys) * tokens for keys, tokens in groups if keys]
        return ends.count(max(ends, default=0))

    def _in_order(self, keys: set[BlockHash], sign: int = 1) -> Sequence[BlockHash]:
        """Return some keys in the order of `_every`."""
        return [key for key in self._every(sign) if key in keys]

    def _by_group(self, keys: list[BlockHash]) -> list[BlockHash]:
        """Return keys group by group, in the order in which vLLM offers them."""
        if len(self._keys) == 1:
            return keys
        return sorted(keys, key=lambda key: key[-_GROUP_BYTES:])

    # -- loads and stores --------------------------------------------------------------------

    def load(self, keys: list[BlockHash]) -> None:
        """Load the hits."""
        if not keys:
            return
        self.loaded = keys
        self._begin()
        self._manager.prepare_load(keys)
        self._manager.complete_load(keys)
        self._used.update(keys)

    def store(self, steps: Iterable[tuple[int, list[Chunks]]], ends_stores: bool) -> None:
        """Make the offers of all steps in order, and repeat refused ones.

        Steps without offers may be omitted. A refused state is not offered again. Stores that do
        not end during the request all end after it.
        """
        waiting: list[BlockHash] = []  # refused
        stores = self._stores

        def end_stores(before: int) -> bool:
            has_ended = False
            while ends_stores and stores and stores[0][0] < before:
                self._end(stores.pop(0)[1])
                has_ended = True
            return has_ended

        last = 0
        for last, offers in steps:
            end_stores(last - 1)
            for chunks in offers:
                keys, is_state = self.keys(chunks), self._is_state[chunks[0][0]]
                if waiting and not is_state:
                    keys = self._by_group(waiting + keys)
                stored = self._offer(keys)
                if stored:
                    stores.append((last, stored))
                if not is_state:
                    waiting = keys if stored is None else []
            self._end_step()
        for step in (last + 1, last + 2):  # of the answer: then all stores have ended
            if waiting and (end_stores(step - 1) or self._has_let_go):
                stored = self._offer(waiting)
                if stored is not None:
                    waiting = []
                    stores.append((step, stored))
                self._end_step()

    def end(self) -> None:
        """Use the loaded and offered chunks, and release all if the session ends."""
        self._use_all()
        calls.end(self._manager, list(self._every()), self._own, self._num_at_end())
        if self._hints is not None and self._hints.ends:
            self._manager.release(self._every())

    def complete(self) -> None:
        """End the stores that have not ended."""
        stores, self._stores = self._stores, []
        for _, keys in stores:
            self._end(keys)
        self._in_flight.difference_update(self.to_store)

    @property
    def _hints(self) -> Hints | None:
        """The client's hints by the end of the request."""
        return None if self._told is None else self._told.at_finish

    def _use_all(self) -> None:
        """Use the loaded and offered chunks; the head is the most recent."""
        manager, learning = self._manager, self._learning
        used = self._used | self._own
        if self.evicted and learning.from_ghosts:
            # Chunks evicted by the request itself do not come back.
            used = {key for key in used if key in manager}
        if learning.by_chain:
            used |= self._missed - self._own
        if learning.is_arc:
            # A chunk loaded, evicted and offered again counts as used again, stored or not.
            manager.complete_store(self._used & self._own)
        if not used:
            return
        batch = self._in_order(used)
        inserted = self._ended - self._used
        if inserted and not (learning.is_lru or learning.by_chain):
            calls.touch_stored(manager, batch, inserted)
        elif learning.by_chain:
            calls.finish(manager, list(batch), self._hints)
        else:
            manager.touch(batch)

    # -- parts -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Show the keys of the whole request to a policy that learns by request."""
        if self._learning.by_chain and not self._has_begun:
            every, told = self._every(), self._told
            if told is None:
                self._manager.touch(every)
            else:
                calls.begin(self._manager, list(every), told.at_begin)
        self._has_begun = True

    def _offer(self, keys: list[BlockHash]) -> list[BlockHash] | None:
        """Offer keys; return those being stored, or None if the offer is refused."""
        if self._learning.is_lru and (self._used or self._own):
            # Until the request ends, the chunks that it has used count as newest.
            self._manager.touch(self._in_order(self._used | self._own, -1))
        self.offered.append(keys)
        stored = self._store(keys)
        if stored is None:
            self.refused += 1
        return stored

    def _end_step(self) -> None:
        """End what ends with a step, after its offers."""

    def _store(self, keys: list[BlockHash]) -> list[BlockHash] | None:
        """Store the keys that are absent; return them, or None if that is refused."""
        manager, learning = self._manager, self._learning
        self._begin()
        missing: list[BlockHash] | None = None
        if not learning.is_lru:
            missing = [key for key in keys if key not in manager]
            if not learning.by_chain:
                # A policy may learn from chunks that have left.
                first = [key for key in missing if key not in self._missed]
                manager.touch(first)
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
            return None
        stored = output.block_hashes_to_store
        self.to_store += stored
        self.evicted += output.block_hashes_evicted
        self._own.update(stored)
        return stored

    def _end(self, keys: list[BlockHash]) -> None:
        """End stores."""
        self._manager.complete_store(keys)
        self._ended.update(keys)
