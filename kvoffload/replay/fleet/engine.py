"""One engine of a fleet: its caches, and the effects of requests on them.

Between `Engine.begin` and `Engine.end` an engine computes one prompt and no other, so no request
meets a block being stored: neither in the engine's own caches, nor in a tier behind them, where a
store begins and ends at the end of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from kvoffload import BlockHash, CPUOffloadingManager, OffloadingManager
from kvoffload.replay.hints import Told
from kvoffload.replay.results import DurationHistogram

from .index import DEVICE, HOST, TIER, Change, Recent
from .rows import Blocks, FleetRows

__all__ = ["Engine", "Hits", "RowEngine"]


class Hits(NamedTuple):
    """The leading blocks of a request found in each place."""

    device: int
    host: int
    tier: int


@dataclass(slots=True)
class _Prefill:
    """A prompt being computed."""

    hashes: list[BlockHash]
    told: Told | None
    request: Any  # of host memory
    behind: Any  # the same at the tier; None without one
    loads: list[tuple[int, int]]  # pinned in host memory: half-open ranges of blocks
    promoted: list[BlockHash]  # being written to host memory


class _Device:
    """The accelerator's own LRU cache; the first block of a request is the most recent.

    Every request leaves its blocks in it, computed or loaded.
    """

    def __init__(self, num_blocks: int) -> None:
        self._cached = Recent(num_blocks) if num_blocks else None

    def ask(self, blocks: Blocks) -> tuple[int, list[Change]]:
        """Return the number of leading blocks present, and the changes by the request."""
        if self._cached is None:
            return 0, []
        hits, entered = self._cached.lead_and_missing(blocks)
        return hits, [Change(DEVICE, entered, self._cached.use(blocks))]


class Engine:
    """The caches of one engine, and the prompt that it computes.

    Parameters
    ----------
    rows : FleetRows
        The requests.
    device_blocks : int
        Capacity of the accelerator's own cache; 0 for none.
    host : OffloadingManager
        Host memory, empty. With a tier, its policy must not decline blocks.
    tier : CPUOffloadingManager, optional
        The tier behind host memory, private to this engine or shared by several.
    sees : int
        The furthest place whose changes `end` reports: `DEVICE`, `HOST` or `TIER`.

    Attributes
    ----------
    times : DurationHistogram
        Time spent in the managers per request.
    host_stored, tier_stored : int
        Blocks of this engine's requests that got slots so far; `host_stored` includes those from
        the tier.
    """

    def __init__(
        self,
        rows: FleetRows,
        device_blocks: int,
        host: OffloadingManager,
        tier: CPUOffloadingManager | None = None,
        *,
        sees: int = DEVICE,
    ) -> None:
        self.times = DurationHistogram()
        self.host_stored = self.tier_stored = 0
        self._rows = rows
        self._device = _Device(device_blocks)
        self._host = host
        self._tier = tier
        self._sees = sees
        self._changes: list[Change] = []
        self._prefill: _Prefill | None = None
        self._spent = 0  # nanoseconds of the managers for the prompt

    def begin(self, row: int, told: Told | None = None) -> Hits:
        """Begin to compute a row's prompt; return the blocks found, which are read.

        Blocks from the tier get slots of host memory.
        """
        hashes = self._rows.hashes_of(row)
        on_device, self._changes = self._device.ask(self._rows.blocks_of(row))
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
        """Read leading blocks from host memory and the tier in turn, while either has the next.

        Returns the number from each. A block from the tier needs a slot of host memory; without one
        the read ends.
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
        """End the prompt and store its blocks; return the changes of the caches, in order."""
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
        return self._changes

    def _store_behind(self, tier: CPUOffloadingManager, blocks: list[BlockHash]) -> list[BlockHash]:
        """Offer blocks to the tier; return those that got a slot."""
        output = tier.prepare_store(blocks)
        if output is None:
            return []
        self.tier_stored += len(output.block_hashes_to_store)
        self._note(TIER, output.block_hashes_to_store, output.block_hashes_evicted)
        return output.block_hashes_to_store

    def _note(self, place: int, entered: list[BlockHash], left: list[BlockHash]) -> None:
        """Note blocks that enter and leave; no block does both."""
        if place <= self._sees and (entered or left):
            numbers = self._rows.numbers
            both = (
                np.fromiter(map(numbers.__getitem__, hashes), np.uint32, len(hashes))
                for hashes in (entered, left)
            )
            self._changes.append(Change(place, *both))


class RowEngine:
    """An engine without a tier or hints, whose host memory serves a row at once.

    Nothing reads its caches between the beginning and the end of a prompt, so all steps that
    `Engine` takes in both happen at the beginning.

    Parameters
    ----------
    rows : FleetRows
        The requests.
    device_blocks : int
        Capacity of the accelerator's own cache; 0 for none.
    host : Miniature
        Host memory, empty.
    sees : int
        As for `Engine`.

    Attributes
    ----------
    host_stored, tier_stored : int
        As for `Engine`.
    """

    tier_stored = 0

    def __init__(
        self, rows: FleetRows, device_blocks: int, host: Any, *, sees: int = DEVICE
    ) -> None:
        self._rows = rows
        self._device = _Device(device_blocks)
        self._host = host
        self._sees = sees
        self._changes: list[Change] = []
        # As `serve_rows` takes them, of one row.
        self._starts, self._first = np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64)

    @property
    def host_stored(self) -> int:
        """Blocks that got slots so far."""
        stored: int = self._host.stored
        return stored

    def begin(self, row: int, said: Told | None = None) -> Hits:  # noqa: ARG002 - as Engine
        """Compute a row's prompt; return the blocks found."""
        blocks = self._rows.blocks_of(row)
        on_device, self._changes = self._device.ask(blocks)
        self._starts[1], self._first[0] = len(blocks), on_device
        given = self._rows.keys, self._starts, blocks, self._first, self._rows.nodes
        hits = self._host.serve_rows(*given, position=0, lag=-1)
        if self._sees >= HOST:
            left, entered = self._host.changes()
            if len(left) + len(entered):
                self._changes.append(Change(HOST, entered, left))
        return Hits(on_device, hits.item(), 0)

    def end(self) -> list[Change]:
        """End the prompt; return the changes of the caches, in order."""
        return self._changes
