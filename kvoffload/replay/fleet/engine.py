"""One engine of a fleet: its caches, and what a request does to them.

A prompt is computed between `Engine.begin` and `Engine.end`, and no other meanwhile, so nobody
meets a block whose store is under way: neither in the engine's own caches, nor in a tier behind
them, where a store begins and ends at the end of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from kvoffload import BlockHash, CPUOffloadingManager, OffloadingManager
from kvoffload.replay.device import DeviceCache
from kvoffload.replay.hints import Told
from kvoffload.replay.results import DurationHistogram

from .rows import Blocks, FleetRows

__all__ = ["DEVICE", "HOST", "TIER", "Change", "Engine", "Hits", "RowEngine"]

DEVICE, HOST, TIER = range(3)
"""Places of an engine's blocks, the nearest first."""


class Change(NamedTuple):
    """Blocks that entered a place, and then others that left it."""

    place: int  # DEVICE, HOST or TIER
    entered: Blocks
    left: Blocks


class Hits(NamedTuple):
    """Leading blocks of a request that were found, by where they were."""

    device: int
    host: int
    tier: int


@dataclass(slots=True)
class _Prefill:
    """A prompt that is being computed."""

    hashes: list[BlockHash]
    told: Told | None
    request: Any  # of host memory
    behind: Any  # the same at the tier; None without one
    loads: list[tuple[int, int]]  # pinned in host memory: from a block to one
    promoted: list[BlockHash]  # being written to host memory


class Engine:
    """The caches of one engine, and a prompt that it computes.

    Parameters
    ----------
    rows : FleetRows
        The requests.
    device : DeviceCache
        The accelerator's own cache.
    host : OffloadingManager
        Host memory, empty. Where there is a tier, its policy must decline nothing.
    tier : CPUOffloadingManager, optional
        What is behind host memory, of this engine alone or shared by several.
    publishes : bool
        Whether to note which blocks enter and leave, for `end` to return.

    Attributes
    ----------
    times : DurationHistogram
        Time that the managers took for each request.
    host_stored, tier_stored : int
        Blocks that got slots so far for this engine's requests, those that came from the tier
        included in the former.
    """

    def __init__(
        self,
        rows: FleetRows,
        device: DeviceCache,
        host: OffloadingManager,
        tier: CPUOffloadingManager | None = None,
        *,
        publishes: bool = False,
    ) -> None:
        self.times = DurationHistogram()
        self.host_stored = self.tier_stored = 0
        self._rows = rows
        self._device = device
        self._host = host
        self._tier = tier
        self._changes: list[Change] | None = [] if publishes else None
        self._prefill: _Prefill | None = None
        self._spent = 0  # nanoseconds of the managers for the prompt

    def begin(self, row: int, told: Told | None = None) -> Hits:
        """Begin to compute a row's prompt; return what of it is there, which is read.

        What comes from the tier gets slots of host memory.
        """
        hashes = self._rows.hashes_of(row)
        if self._changes is None:
            on_device, _ = self._device.ask(hashes, self._rows.lengths[row])
        else:
            on_device, entered, left = self._device.ask_and_tell(hashes)
            self._note(DEVICE, entered, left)
        start = perf_counter_ns()
        if told is None:
            request = self._host.begin(hashes)
        else:
            request = self._host.begin(hashes, hints=told.at_begin, now=told.now_s)
        behind = None if self._tier is None else self._tier.begin(hashes)
        prefill = self._prefill = _Prefill(hashes, told, request, behind, [], [])
        in_host = request.lookup(on_device)
        if in_host:
            self._load(prefill, on_device, on_device + in_host)
        from_tier = 0
        if behind is not None:
            in_host, from_tier = self._read(prefill, on_device, in_host)
        self._spent = perf_counter_ns() - start
        return Hits(on_device, in_host, from_tier)

    def _load(self, prefill: _Prefill, start: int, stop: int) -> None:
        """Pin blocks of host memory."""
        prefill.request.prepare_load(start, stop)
        prefill.loads.append((start, stop))

    def _read(self, prefill: _Prefill, on_device: int, in_host: int) -> tuple[int, int]:
        """Read leading blocks from host memory and the tier in turn, as long as either has one.

        Returns how many came from each. A block that comes from the tier needs a slot of host
        memory; without one the read ends.
        """
        hashes, request, behind = prefill.hashes, prefill.request, prefill.behind
        from_tier, end = 0, on_device + in_host
        while on_tier := behind.lookup(end):
            offered = hashes[end : end + on_tier]
            stored = self._store(offered)
            if stored is None:
                break
            got, wanted, promoted = set(stored), end + on_tier, []
            for block in offered:
                if block in got:
                    got.discard(block)
                    promoted.append(block)
                elif request.lookup(end):
                    self._load(prefill, end, end + 1)
                    in_host += 1
                else:
                    break
                end += 1
            prefill.promoted += stored
            behind.prepare_load(wanted - on_tier, end)
            behind.complete_load(wanted - on_tier, end)
            from_tier += len(promoted)
            if end < wanted:
                break
            found = request.lookup(end)
            if found:
                self._load(prefill, end, end + found)
                in_host += found
                end += found
        return in_host, from_tier

    def _store(self, blocks: list[BlockHash]) -> list[BlockHash] | None:
        """Offer blocks to host memory; return those that got a slot, None if it refuses."""
        output = self._host.prepare_store(blocks)
        if output is None:
            return None
        stored = output.block_hashes_to_store
        self.host_stored += len(stored)
        self._note(HOST, stored, output.block_hashes_evicted)
        return stored

    def end(self) -> list[Change]:
        """End the prompt, store its blocks; return what it made enter and leave, in order.

        Nothing of that is noted without `publishes`.
        """
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            raise RuntimeError("a prompt must have begun before it ends")
        start = perf_counter_ns()
        host, tier, request = self._host, self._tier, prefill.request
        if prefill.promoted:
            host.complete_store(prefill.promoted)
        for first, stop in prefill.loads:
            request.complete_load(first, stop)
        output = request.prepare_store()
        to_tier: list[BlockHash] = []
        if output is not None:
            stored = output.block_hashes_to_store
            self.host_stored += len(stored)
            self._note(HOST, stored, output.block_hashes_evicted)
            if tier is not None and stored:
                to_tier = self._store_behind(tier, stored)
        if prefill.told is None:
            request.finish()
        else:
            request.finish(hints=prefill.told.at_finish)
        request.complete_store()
        if tier is not None:
            prefill.behind.finish()
            if to_tier:
                tier.complete_store(to_tier)
        self.times.add(self._spent + perf_counter_ns() - start)
        changes, self._changes = self._changes, None if self._changes is None else []
        return changes or []

    def _store_behind(self, tier: CPUOffloadingManager, blocks: list[BlockHash]) -> list[BlockHash]:
        """Offer blocks to the tier; return those that got a slot."""
        output = tier.prepare_store(blocks)
        if output is None:
            return []
        self.tier_stored += len(output.block_hashes_to_store)
        self._note(TIER, output.block_hashes_to_store, output.block_hashes_evicted)
        return output.block_hashes_to_store

    def _note(self, place: int, entered: list[BlockHash], left: list[BlockHash]) -> None:
        """Note blocks that enter and leave; what leaves to make room is not what enters."""
        if self._changes is not None and (entered or left):
            numbers = self._rows.numbers
            both = (
                np.fromiter(map(numbers.__getitem__, hashes), np.uint32, len(hashes))
                for hashes in (entered, left)
            )
            self._changes.append(Change(place, *both))


class RowEngine:
    """An engine without a tier, whose clients say nothing: compiled code serves a row at once.

    Nothing looks at its caches between the begin of a prompt and its end, so all that `Engine` does
    in these is done at the begin.

    Parameters
    ----------
    rows : FleetRows
        The requests.
    device : DeviceCache
        The accelerator's own cache.
    host : CPUOffloadingManager
        Host memory, empty, of which `serves` is true.
    host_blocks : int
        Its capacity.
    publishes : bool
        As that of `Engine`.

    Attributes
    ----------
    host_stored, tier_stored : int
        As those of `Engine`.
    """

    tier_stored = 0

    def __init__(
        self,
        rows: FleetRows,
        device: DeviceCache,
        host: CPUOffloadingManager,
        host_blocks: int,
        *,
        publishes: bool = False,
    ) -> None:
        self._rows = rows
        self._device = device
        self._host = host
        self._slots = np.zeros(host_blocks, dtype=np.uint32) if publishes else None
        self._changes: list[Change] = []

    @staticmethod
    def serves(host: CPUOffloadingManager) -> bool:
        """Return whether a manager serves rows at once."""
        serve_row = getattr(host, "_serve_row", None)
        none = np.zeros(0, dtype=np.uint32)
        return serve_row is not None and serve_row([], none, 0) is not None

    @property
    def host_stored(self) -> int:
        """Blocks that got slots so far."""
        return self._host.stats()["stored_blocks"]

    def begin(self, row: int, told: Told | None = None) -> Hits:  # noqa: ARG002 - as Engine
        """Compute a row's prompt; return what of it is there."""
        rows, blocks, changes, on_device = self._rows, self._rows.blocks_of(row), [], 0
        if self._device.num_slots:
            if self._slots is None:
                on_device, _ = self._device.ask(blocks.tolist())
            else:
                on_device, *changed = self._device.ask_and_tell(blocks.tolist())
                changes.append(Change(DEVICE, *(np.array(each, np.uint32) for each in changed)))
        hits, in_host = self._host._serve_row(rows.keys, blocks, on_device, self._slots)
        if in_host:
            left, entered = in_host
            changes.append(Change(HOST, entered, left))
        self._changes = changes
        return Hits(on_device, hits, 0)

    def end(self) -> list[Change]:
        """End the prompt; return what it made enter and leave, in order."""
        return self._changes
