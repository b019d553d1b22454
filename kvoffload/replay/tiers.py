"""A tier behind host memory, for requests that are served as vLLM's scheduler serves them.

A lookup finds the chunks of both. As in vLLM, it fetches each chunk that only the tier has, even if
the hit does not need it in the end; the request waits for them and looks up again. What it has
fetched stays in host memory until it loads or stores. The tier counts one use of all its chunks
when its stores have ended.

A token is the tier's, as vLLM's ``prompt_tokens_cached_by_source`` counts it, if the request
fetched any of the chunks that hold the token and are loaded, in any group; a state holds all tokens
before it. Tokens before all loaded windows, which vLLM counts for neither, are host memory's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload import BlockHash
from kvoffload._hold import Hold
from kvoffload.managers import calls

from .groups import ChunkIndex
from .hints import Told
from .serving import GroupServer, SteppedRequest


class TieredServer(GroupServer):
    """A `GroupServer` with a disk behind its manager."""

    def _begin(self, keys: list[Sequence[BlockHash]], told: Told | None) -> SteppedRequest:
        return _TieredRequest(self, keys, told)


class _TieredRequest(SteppedRequest):
    """A request that also finds the chunks of a disk, and whose stores go there when they end."""

    def __init__(
        self, server: GroupServer, keys: list[Sequence[BlockHash]], told: Told | None
    ) -> None:
        super().__init__(server, keys, told)
        self._disk: Any = server.disk
        self._fetching: dict[BlockHash, None] = {}  # from the disk
        manager = self._manager
        self._hold = Hold[BlockHash](manager.prepare_load, manager.complete_load, self._room)
        self._found: dict[BlockHash, None] = {}  # by the walk under way
        self._start: BlockHash | None = None  # with which it has begun
        self._waits = False  # for what it has fetched
        self._expects = False  # the walk holds what is ready further on
        self._writing: list[BlockHash] = []  # to the disk
        self._written: set[BlockHash] = set()  # all that it offered to the disk

    def _room(self) -> int:
        """Return the slots of host memory that are free or may become so."""
        sizes = self._manager.stats()
        return sizes["free"] + sizes["resident"] - sizes["pending"] - sizes["pinned"]

    def hit(self, length: int, local: int) -> int:
        """Return the tokens that can be loaded, when all chunks that they need have come."""
        while (hit := self._walk(length, local)) is None:
            self._hold.add(self._end_fetches())
        chunks = self._groups.loaded_chunks(local, hit)
        self.disk_tokens = _length(
            self._groups.loaded_tokens(ChunkIndex(group, chunk), local, hit)
            for group, indexes in chunks
            for chunk in indexes
            if self._keys[group][chunk] in self._own
        )
        return hit

    def _walk(self, length: int, local: int) -> int | None:
        self._found, self._start, self._expects = {}, None, False
        hit = self._groups.hit(length, local, self)
        self._hold.end_walk()
        return hit

    def leading(self, group: int, start: int, end: int) -> int | None:
        """Return what `Runs.leading` does."""
        found, is_fetching = self._find(self._keys[group][start:end])
        return None if is_fetching else found

    def trailing(self, group: int, start: int, end: int) -> int | None:
        """Return what `Runs.trailing` does."""
        found, is_fetching = self._find(self._keys[group][start:end][::-1])
        return None if is_fetching and found == end - start else found

    def _find(self, keys: Sequence[BlockHash]) -> tuple[int, bool]:
        """Return the leading keys that either tier has, and whether some are being fetched."""
        if self._start is None and keys:
            self._start = keys[0]
        found, is_fetching = 0, False
        while True:
            ready = self._manager.lookup(keys[found:])
            if self._waits:
                self._hold.add(keys[found : found + ready])
            else:
                self._found.update(dict.fromkeys(keys[found : found + ready]))
            found += ready
            if found == len(keys) or not self._fetch(keys[found]):
                return found, is_fetching
            found, is_fetching = found + 1, True

    def _fetch(self, key: BlockHash) -> bool:
        """Return whether a key is being fetched; that begins if the disk has it."""
        if key not in self._fetching:
            if not self._disk.lookup([key]):
                return False
            if not self._expects:
                self._hold.add(self._found)
                self._hold.expect(self._ahead())
                self._expects = True
            self._hold.make_room(1)
            if not self._store([key]):
                if not self._waits:
                    self._hold.let_go()
                    self._expects = False
                return False
            self._fetching[key] = None
            self._waits = True
        return True

    def _ahead(self) -> list[BlockHash]:
        """Return the ready keys in the order in which a walk from the first key on needs them."""
        every, first = list(self._every()), self._start
        start = 0 if first is None else every.index(first)
        manager = self._manager
        return [key for key in every[start:] + every[:start][::-1] if manager.lookup([key])]

    def _end_fetches(self) -> list[BlockHash]:
        """End the fetches; return their keys."""
        fetched, self._fetching = list(self._fetching), {}
        super()._end(fetched)
        return fetched

    def load(self, keys: list[BlockHash]) -> None:
        """Load the hits."""
        super().load(keys)
        if keys:
            self._used -= self._own  # what it fetched counts as stored by itself
            self._let_go()

    def _offer(self, keys: list[BlockHash]) -> list[BlockHash] | None:
        stored = super()._offer(keys)
        self._hold.let_go()
        return stored

    def _end_step(self) -> None:
        self._has_let_go = self._waits
        self._let_go()

    def end(self) -> None:
        """Use the loaded and offered chunks, and release all if the session ends."""
        self._let_go()
        super().end()

    def _let_go(self) -> None:
        """End the fetches, and release what was fetched."""
        self._end_fetches()
        self._hold.let_go()
        self._waits = False

    def _end(self, keys: list[BlockHash]) -> None:
        """End a store, and offer its chunks to the disk."""
        super()._end(keys)
        # A tier decides on the chunks that it lacks only: it may evict the others for them.
        output = self._disk.prepare_store([key for key in keys if key not in self._disk])
        self._writing += [] if output is None else output.block_hashes_to_store
        self._written.update(keys)
        if self._groups.step_tokens is not None:  # else they end with the request
            self._end_writes()

    def _end_writes(self) -> None:
        self._disk.complete_store(self._writing)
        self._writing = []

    def complete(self) -> None:
        """End the stores that have not ended; the disk uses all chunks of the request."""
        super().complete()
        self._disk.touch(self._every())
        calls.end(self._disk, list(self._every()), self._written, self._num_at_end())
        if self._hints is not None and self._hints.ends:
            self._disk.release(self._every())
        self._end_writes()


def _length(ranges: Iterable[range]) -> int:
    """Return the number of elements that are in any of some ranges."""
    total = end = 0
    for each in sorted(ranges, key=lambda each: each.start):
        total += max(0, each.stop - max(each.start, end))
        end = max(end, each.stop)
    return total
