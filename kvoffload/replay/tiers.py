"""A disk behind host memory: its additional hits, and the blocks written to it.

Every block stored in host memory is also offered to the disk, whose own policy decides, as vLLM
cascades stores to its secondary tiers. A request is served up to the first block that neither has.
A block from the disk needs a slot of host memory, and is resident there afterwards; without a slot
it is a miss. So host memory declines nothing, regardless of its policy: otherwise the disk would
receive no blocks and could not be read.

A request is one use of its blocks in both, before it reads; when its stores have begun, its blocks
become the most recent of both again, last block first. Host memory receives the clients' hints at
once, the disk when a request ends.

With several groups or steps, requests are served as by `GroupServer`, and a lookup finds the chunks
of both tiers. As in vLLM, it fetches each chunk that only the disk has, even if the hit does not
need it in the end; the request waits for them and looks up again. What it has fetched stays in host
memory until it loads or stores. The disk counts one use of all its chunks when its stores have
ended.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, CPUOffloadingManager, OffloadingManager
from kvoffload._hold import Hold

from .device import DeviceCache
from .groups import ChunkIndex, GroupChunks
from .hints import Told
from .policies import new_manager
from .requests import DecodedTrace
from .serving import GroupServed, GroupServer, SteppedRequest

__all__ = ["TierCounts", "simulate_tiers"]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of host memory with a disk behind it.

    With several groups, `asked` and hits are tokens, and stores are slots.

    Attributes
    ----------
    asked : int
        Blocks that the two tiers were asked for.
    host_hits, disk_hits : int
        Blocks of those that came from host memory, and from the disk. Tokens as vLLM's
        ``prompt_tokens_cached_by_source`` counts them: a token is the disk's if the request fetched
        any of the chunks that hold the token and are loaded, in any group; a state holds all tokens
        before it. Tokens before all loaded windows, which vLLM counts for neither, are host
        memory's.
    host_stored, disk_stored : int
        Blocks written to each; those from the disk count for host memory, too.
    """

    asked: int
    host_hits: int
    disk_hits: int
    host_stored: int
    disk_stored: int

    @property
    def hit_ratio(self) -> float:
        """Share of what was asked for that came from either; 0 if nothing was asked for."""
        return (self.host_hits + self.disk_hits) / self.asked if self.asked else 0.0


def simulate_tiers(
    trace: DecodedTrace,
    keys: list[BlockHash],
    *,
    policy: str,
    capacity: int,
    disk_policy: str,
    disk_capacity: int,
    device_hits: npt.NDArray[np.int64] | None = None,
    pending: int = 0,
    step_blocks: int | None = None,
    groups: GroupChunks | None = None,
    device_slots: int = 0,
) -> TierCounts:
    """Replay a decoded trace through host memory and a disk; reads complete at once.

    Parameters
    ----------
    trace, keys
        As in `simulate`.
    policy, disk_policy : str
        Policy strings, not ceilings.
    capacity, disk_capacity : int
        Blocks of host memory and of the disk, slots with several groups. Without a disk, 0, host
        memory declines what its policy declines.
    device_hits : (requests,) int64, optional
        As in `simulate`, with one group whose prompts are offered whole; 0 by default.
    pending : int
        Number of the latest stores that are in flight while a request is served; an offer that
        stores nothing does not count. The disk is offered a store's blocks when it completes.
    step_blocks : int, optional
        Blocks that are offered to host memory at a time, as an engine offers those of a scheduler
        step; a read without enough slots then takes as many blocks as fit. By default all blocks of
        a request, as in a fleet. Has no effect with several groups or the steps of `groups`.
    groups : GroupChunks, optional
        The KV groups of the model, and how prompts are offered, as in `simulate`; by default one
        full group, whose prompts are offered whole.
    device_slots : int
        Capacity of the accelerator's own cache with several groups or steps. It is replayed with
        the tiers, since it keeps only what a request loads of a window.

    Returns
    -------
    TierCounts

    Raises
    ------
    ValueError
        If `device_hits` are given with several groups or steps, or `device_slots` without.
    """
    host, disk = new_manager(policy, capacity), new_manager(disk_policy, disk_capacity)
    if disk_capacity:
        host.policy._set_declining(False)
    rows = trace.hashes(np.array(keys, dtype=object), slice(0, trace.num_requests))
    told: Iterator[Told | None] = itertools.repeat(None, trace.num_requests)
    if trace.hints is not None:
        told = trace.hints.of_each()
    if groups is not None and not (groups.is_plain and groups.step_tokens is None):
        if device_hits is not None:
            raise ValueError(
                "device_hits must go with one group, got several or steps: give device_slots"
            )
        server = TieredServer(groups, host, disk, ends_stores=not pending)
        device = DeviceCache(device_slots, groups)
        requests = zip(rows, trace.lengths.tolist(), told, strict=True)
        tokens = _serve_all(server, device, requests, pending)
        asked, host_hits, disk_hits = (count // groups.hit_unit for count in tokens)
        return _counts(asked, host_hits, disk_hits, host, disk)
    if device_slots:
        raise ValueError(
            f"device_slots must be 0 with one group without steps, got {device_slots}: give "
            "device_hits"
        )
    if device_hits is None:
        device_hits = np.zeros(trace.num_requests, dtype=np.int64)
    in_flight: deque[list[BlockHash]] = deque()
    asked = host_hits = disk_hits = 0
    for request, on_device, said in zip(rows, device_hits.tolist(), told, strict=True):
        missing = request[on_device:]
        asked += len(missing)
        if said is None:
            served = host.begin(request)
        else:
            served = host.begin(request, hints=said.at_begin, now=said.now_s)
        behind = disk.begin(request)
        from_host, from_disk = _read(host, disk, missing, in_parts=step_blocks is not None)
        host_hits += from_host
        disk_hits += from_disk
        step = step_blocks or max(1, len(request))
        for start in range(0, len(request), step):
            stored = _offer(host, request[start : start + step])
            if stored:
                in_flight.append(stored)
        served.finish(hints=None if said is None else said.at_finish)
        ended = [in_flight.popleft() for _ in range(len(in_flight) - pending)]
        to_disk = []
        for stored in ended:
            host.complete_store(stored)
            to_disk += _offer(disk, stored)
        behind.finish(hints=None if said is None else said.at_finish)
        disk.complete_store(to_disk)
    return _counts(asked, host_hits, disk_hits, host, disk)


def _counts(
    asked: int,
    host_hits: int,
    disk_hits: int,
    host: CPUOffloadingManager,
    disk: CPUOffloadingManager,
) -> TierCounts:
    return TierCounts(
        asked, host_hits, disk_hits, host.stats()["stored_blocks"], disk.stats()["stored_blocks"]
    )


def _read(
    host: CPUOffloadingManager, disk: OffloadingManager, blocks: list[BlockHash], *, in_parts: bool
) -> tuple[int, int]:
    """Read the leading blocks that either has; return the number from each.

    The disk's blocks are offered to host memory: a block already in host memory comes from there,
    and one without a slot ends the read. With `in_parts` as many are offered as there is room for.
    """
    hold = hold_of(host)
    num_read = from_host = from_disk = 0
    while True:
        rest = blocks[num_read:]
        here = rest[: host.lookup(rest)]
        hold.add(here)
        num_read += len(here)
        from_host += len(here)
        rest = rest[len(here) :]
        on_disk = offered = rest[: disk.lookup(rest)]
        if in_parts and on_disk:
            hold.expect(block for block in rest if block in host and host.lookup([block]))
            on_disk = list(itertools.takewhile(lambda block: block not in host, on_disk))
            offered = on_disk[: hold.make_room(len(on_disk))]
        promoted = _offer(host, offered)
        host.complete_store(promoted)
        came = on_disk[: host.lookup(on_disk)]
        hold.add(came)
        num_read += len(came)
        new = len(set(came).intersection(promoted))
        from_disk += new
        from_host += len(came) - new
        if not on_disk or len(came) < len(on_disk):
            break
    hold.let_go()
    return from_host, from_disk


def _offer(manager: OffloadingManager, blocks: list[BlockHash]) -> list[BlockHash]:
    """Offer blocks to a tier; return those being stored."""
    output = manager.prepare_store(blocks)
    return [] if output is None else output.block_hashes_to_store


def hold_of(manager: CPUOffloadingManager) -> Hold[BlockHash]:
    """Return what a request holds of a manager: nothing yet."""

    def room() -> int:
        sizes = manager.stats()
        return sizes["free"] + sizes["resident"] - sizes["pending"] - sizes["pinned"]

    return Hold(manager.prepare_load, manager.complete_load, room)


class TieredServer(GroupServer):
    """A `GroupServer` with a disk behind its manager."""

    def __init__(
        self,
        groups: GroupChunks,
        manager: CPUOffloadingManager,
        disk: CPUOffloadingManager,
        *,
        ends_stores: bool = True,
    ) -> None:
        super().__init__(groups, manager, ends_stores=ends_stores)
        self.disk = disk

    def _begin(self, keys: list[Sequence[BlockHash]], told: Told | None) -> SteppedRequest:
        return _TieredRequest(self, keys, told)


class _TieredRequest(SteppedRequest):
    """A request that also finds the chunks of a disk, and whose stores go there when they end."""

    def __init__(
        self, server: TieredServer, keys: list[Sequence[BlockHash]], told: Told | None
    ) -> None:
        super().__init__(server, keys, told)
        self._disk = server.disk
        self._fetching: dict[BlockHash, None] = {}  # from the disk
        self._hold = hold_of(server.manager)
        self._found: dict[BlockHash, None] = {}  # by the walk under way
        self._start: BlockHash | None = None  # with which it has begun
        self._waits = False  # for what it has fetched
        self._expects = False  # the walk holds what is ready further on
        self._writing: list[BlockHash] = []  # to the disk
        self._written: set[BlockHash] = set()  # all that it offered to the disk

    def hit(self, length: int, local: int) -> int:
        """Return the tokens that can be loaded, when all chunks that they need have come."""
        while (hit := self._walk(length, local)) is None:
            self._hold.add(self._end_fetches())
        chunks = self._groups.loaded_chunks(local, hit)
        self.served.disk_tokens = _length(
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

    def load(self, keys: list[BlockHash], first: int) -> None:
        """Load the hits from chunk `first` on."""
        super().load(keys, first)
        if keys:
            self._used -= self._own  # what it fetched counts as stored by itself
            self._let_go()

    def _offer(self, keys: list[BlockHash]) -> list[BlockHash] | None:
        self._end_writes()
        stored = super()._offer(keys)
        self._has_let_go = self._waits
        self._let_go()
        return stored

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
        self._writing += _offer(self._disk, [key for key in keys if key not in self._disk])
        self._written.update(keys)

    def _end_writes(self) -> None:
        self._disk.complete_store(self._writing)
        self._writing = []

    def complete(self) -> None:
        """End the stores that have not ended; the disk uses all chunks of the request."""
        super().complete()
        self._disk.touch(self._every())
        self._disk._served_at_once(list(self._every()), self._written, 1)
        if self._hints is not None and self._hints.ends:
            self._disk.release(self._every())
        self._end_writes()


def _serve_all(
    server: TieredServer,
    device: DeviceCache,
    requests: Iterable[tuple[list[BlockHash], int, Told | None]],
    pending: int,
) -> tuple[int, int, int]:
    """Serve requests; return the tokens asked for, and those from host memory and the disk."""
    size = server.groups.block_tokens
    in_flight: deque[GroupServed] = deque()
    asked = host_hits = disk_hits = 0
    for hashes, input_length, said in requests:
        on_device, junction = device.find(hashes, input_length)
        length = server.groups.length_of(input_length, len(hashes))
        served = server.serve(hashes, length, on_device * size, junction * size, said)
        device.leave(hashes, input_length, on_device, junction, served.hit_tokens)
        asked += length - on_device * size
        disk_hits += served.disk_tokens
        host_hits += served.hit_tokens - served.disk_tokens
        in_flight.append(served)
        if len(in_flight) > pending:
            in_flight.popleft().complete()
    return asked, host_hits, disk_hits


def _length(ranges: Iterable[range]) -> int:
    """Return the number of elements that are in any of some ranges."""
    total = end = 0
    for each in sorted(ranges, key=lambda each: each.start):
        total += max(0, each.stop - max(each.start, end))
        end = max(end, each.stop)
    return total
