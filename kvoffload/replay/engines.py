"""One engine: its caches, and the effects of requests on them.

Between `Engine.begin` and `Engine.end` an engine computes one prompt and no other, so no request
meets a block being stored: neither in the engine's own caches, nor in a tier behind them, where a
store begins and ends at the end of a prompt. Only with `Configuration.pending`, where no time
passes, a store ends some requests later; the tier is offered its blocks then.

A request is one use of its blocks in host memory and in the tier, before it reads; when its stores
have begun, its blocks become the most recent of both again, last block first.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload import (
    IMPLEMENTATION,
    BlockHash,
    CPUOffloadingManager,
    OffloadingManager,
    PrepareStoreOutput,
)
from kvoffload.managers import calls
from kvoffload.policies import registry

from .configuration import Configuration
from .device import new_device
from .durations import DurationHistogram
from .hints import Told
from .index import DEVICE, HOST, TIER, Change
from .policies import is_own, new_manager, new_miniature
from .results import COUNTS
from .rows import Rows
from .serving import GroupServer, Learning, SteppedRequest
from .tiers import TieredServer

ROWS_AT_ONCE = 1024  # served before Ctrl-C is handled

Counts = npt.NDArray[np.int64]
"""(requests, columns) the columns `COUNTS` of a log."""

_COLUMN = {name: index for index, name in enumerate(COUNTS)}
_NUM_SERVED = _COLUMN["not_admitted"] + 1  # the columns of an engine without a tier


class Hits(NamedTuple):
    """The leading blocks of a request found in each place."""

    device: int
    host: int
    tier: int


class Engine(ABC):
    """The caches of one engine, and the prompt that it computes.

    Parameters
    ----------
    rows : Rows
        The requests.
    counts : Counts
        Receives the counts of each row that the engine serves.
    configuration : Configuration
        What is replayed.

    Attributes
    ----------
    times : DurationHistogram
        Time spent in the managers per request.
    """

    def __init__(self, rows: Rows, counts: Counts, configuration: Configuration) -> None:
        self.times = DurationHistogram()
        self._rows = rows
        self._counts = counts
        self._noted = dict.fromkeys(COUNTS, 0)  # of the row that is served
        self._not_admitted = 0  # blocks, so far
        self._device = new_device(rows, configuration.device)
        self._sees = configuration.spec.sees or DEVICE
        self._size = configuration.groups.block_tokens

    @abstractmethod
    def begin(self, row: int, told: Told | None) -> Hits:
        """Begin to compute a row's prompt; return the blocks found, which are read."""

    @abstractmethod
    def end(self) -> Sequence[Change]:
        """End the prompt and store its blocks; return the changes of the caches, in order.

        These are those of the places up to the furthest that the router sees.
        """

    def serve(self, start: int, stop: int, told: Iterator[Told | None]) -> None:
        """Serve rows in turn."""
        for row in range(start, stop):
            self.begin(row, next(told))
            self.end()

    def _write(self, row: int, host: OffloadingManager) -> None:
        """Write the counts of the row that was served, with what its host memory did not admit."""
        former, self._not_admitted = self._not_admitted, _not_admitted(host)
        self._noted["not_admitted"] = self._not_admitted - former
        self._counts[row] = [*self._noted.values()]
        self._noted = dict.fromkeys(COUNTS, 0)


class RowEngine(Engine):
    """An engine without a tier, whose host memory serves a row at once, or many.

    Nothing reads its caches between the beginning and the end of a prompt, so all steps that
    `ManagerEngine` takes in both happen at the beginning.
    """

    def __init__(self, rows: Rows, counts: Counts, configuration: Configuration) -> None:
        super().__init__(rows, counts, configuration)
        groups = configuration.groups
        self._slots = configuration.device
        in_steps = groups.step_tokens is not None
        self._host = new_miniature(configuration.policy, configuration.host, in_steps=in_steps)
        self._changes: list[Change] = []
        # As `serve_rows` takes them, of one row.
        self._starts, self._first = np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._serve_rows = functools.partial(self._host.serve_rows, nodes=rows.nodes)
        if in_steps:
            learning = Learning.of(registry.parse(configuration.policy).entry)
            self._serve_rows = functools.partial(
                self._serve_rows,
                block_tokens=groups.block_tokens,
                step_tokens=groups.step_tokens,
                **asdict(learning),
            )
        self._pending = configuration.pending

    def begin(self, row: int, told: Told | None) -> Hits:
        """Compute a row's prompt; return the blocks found."""
        blocks = self._rows.blocks_of(row)
        on_device, _ = self._device.find(blocks)
        self._changes = [*self._device.changes]
        self._starts[1], self._first[0] = len(blocks), on_device
        given = self._rows.keys, self._starts, blocks, self._first
        said = None if told is None else [told]
        served = self._serve_rows(*given, told=said, position=0, lag=-1)
        hits, *others = served[0].tolist()
        device, host = on_device * self._size, hits * self._size
        self._counts[row, :_NUM_SERVED] = device, host, 0, hits, *others
        if self._sees >= HOST:
            left, entered = self._host.changes()
            if len(left) + len(entered):
                self._changes.append(Change(HOST, entered, left))
        return Hits(on_device, hits, 0)

    def end(self) -> Sequence[Change]:
        """End the prompt; return the changes of the caches, in order."""
        return self._changes

    def serve(self, start: int, stop: int, told: Iterator[Told | None]) -> None:
        """Serve rows in turn, all in one call."""
        rows = self._rows
        said = list(itertools.islice(told, stop - start)) if rows.has_hints else None
        first = rows.on_device(self._slots).hits[start:stop]
        given = rows.keys, rows.starts[start : stop + 1], rows.blocks, first
        served = self._serve_rows(*given, told=said, position=start, lag=self._pending)
        counts = self._counts[start:stop]
        counts[:, _COLUMN["device"]] = first * self._size
        counts[:, _COLUMN["host"]] = served[:, 0] * self._size
        counts[:, _COLUMN["loaded"] : _NUM_SERVED] = served


@dataclass(slots=True)
class _Prefill:
    """A prompt being computed."""

    row: int
    hashes: list[BlockHash]
    told: Told | None
    request: Any  # of host memory
    behind: Any  # the same at the tier; None without one
    loads: list[tuple[int, int]]  # pinned in host memory: half-open ranges of blocks
    promoted: list[BlockHash]  # being written to host memory
    stored: list[BlockHash]  # being written to host memory at the end


class ManagerEngine(Engine):
    """An engine whose host memory is a manager, perhaps with a tier behind it.

    With a tier, the policy of host memory must not decline blocks. The tier may be shared with
    other engines.
    """

    def __init__(
        self,
        rows: Rows,
        counts: Counts,
        configuration: Configuration,
        host: OffloadingManager,
        tier: CPUOffloadingManager | None,
    ) -> None:
        super().__init__(rows, counts, configuration)
        self._host = host
        self._tier = tier
        self._num_pending = configuration.pending
        self._storing: deque[_Prefill] = deque()
        self._changes: list[Change] = []
        self._prefill: _Prefill | None = None
        self._spent = 0  # nanoseconds of the managers for the prompt
        self._not_admitted = _not_admitted(host)

    def begin(self, row: int, told: Told | None) -> Hits:
        """Begin to compute a row's prompt; return the blocks found, which are read.

        Blocks from the tier get slots of host memory.
        """
        hashes = self._rows.hashes_of(row)
        on_device, _ = self._device.find(self._rows.blocks_of(row))
        self._changes = [*self._device.changes]
        said: dict[str, Any] = {} if told is None else {"hints": told.at_begin, "now": told.now_s}
        start = perf_counter_ns()
        request = self._host.begin(hashes, **said)
        behind = None if self._tier is None else self._tier.begin(hashes)
        prefill = self._prefill = _Prefill(row, hashes, told, request, behind, [], [], [])
        in_host, from_tier = self._read(prefill, on_device)
        self._spent = perf_counter_ns() - start
        size = self._size
        self._noted |= {"device": on_device * size, "host": in_host * size}
        self._noted |= {"tier": from_tier * size, "loaded": in_host + from_tier}
        return Hits(on_device, in_host, from_tier)

    def _load(self, prefill: _Prefill, start: int, stop: int) -> None:
        """Pin blocks of host memory."""
        prefill.request.prepare_load(start, stop)
        prefill.loads.append((start, stop))

    def _read(self, prefill: _Prefill, end: int) -> tuple[int, int]:
        """Read blocks from `end` on from host memory and the tier in turn, while either has one.

        Returns the number from each. A block from the tier needs a slot of host memory; without one
        the read ends.
        """
        hashes, request, behind = prefill.hashes, prefill.request, prefill.behind
        in_host = from_tier = 0
        while True:
            found = request.lookup(end)
            if found:
                self._load(prefill, end, end + found)
                in_host, end = in_host + found, end + found
            on_tier = 0 if behind is None else behind.lookup(end)
            stored = self._store(hashes[end : end + on_tier]) if on_tier else None
            if stored is None:
                return in_host, from_tier
            if stored:
                calls.note_own(request, hashes.index(stored[0], end))
            first, wanted, got = end, end + on_tier, set(stored)
            if len(got) == on_tier:  # mostly
                from_tier, end = from_tier + on_tier, wanted
            while end < wanted:
                if hashes[end] in got:
                    got.discard(hashes[end])
                    from_tier, end = from_tier + 1, end + 1
                    continue
                found = min(request.lookup(end), wanted - end)
                if not found:
                    break
                self._load(prefill, end, end + found)
                in_host, end = in_host + found, end + found
            prefill.promoted += stored
            behind.prepare_load(first, end)
            behind.complete_load(first, end)
            if end < wanted:
                return in_host, from_tier

    def _store(self, blocks: list[BlockHash]) -> list[BlockHash] | None:
        """Offer blocks to host memory; return those that got a slot, None if it refuses."""
        output = self._host.prepare_store(blocks)
        if output is None:
            return None
        self._count_stored(output.block_hashes_to_store, output.block_hashes_evicted)
        return output.block_hashes_to_store

    def _count_stored(self, stored: list[BlockHash], evicted: list[BlockHash]) -> None:
        self._noted["stored"] += len(stored)
        self._noted["evicted"] += len(evicted)
        self._changed(HOST, stored, evicted)

    def end(self) -> Sequence[Change]:
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
        hints = {} if prefill.told is None else {"hints": prefill.told.at_finish}
        request.finish(**hints)
        prefill.stored = [] if output is None else output.block_hashes_to_store
        self._storing.append(prefill)
        ended = [self._storing.popleft() for _ in range(len(self._storing) - self._num_pending)]
        for one in ended:
            one.request.complete_store()
        behind: list[PrepareStoreOutput] = []
        if tier is not None:
            outputs = (tier.prepare_store(one.stored) for one in ended if one.stored)
            behind = [offered for offered in outputs if offered is not None]
            prefill.behind.finish(**hints)
            for offered in behind:
                tier.complete_store(offered.block_hashes_to_store)
        self.times.add(self._spent + perf_counter_ns() - start)
        self._noted["refused"] = int(output is None)
        if output is not None:
            self._count_stored(prefill.stored, output.block_hashes_evicted)
        for offered in behind:
            stored = offered.block_hashes_to_store
            self._noted["tier_stored"] += len(stored)
            self._changed(TIER, stored, offered.block_hashes_evicted)
        self._write(prefill.row, host)
        return self._changes

    def _changed(self, place: int, entered: list[BlockHash], left: list[BlockHash]) -> None:
        """Note blocks that enter and leave; no block does both."""
        if place <= self._sees and (entered or left):
            numbers = self._rows.numbers
            both = (
                np.fromiter(map(numbers.__getitem__, hashes), np.uint32, len(hashes))
                for hashes in (entered, left)
            )
            self._changes.append(Change(place, *both))


class GroupEngine(Engine):
    """An engine driven as vLLM drives its own: with chunks of all groups, or step by step.

    As in vLLM, it fetches each chunk that only the tier has, even if the hit does not need it in
    the end; see `TieredServer`. No time passes.
    """

    def __init__(
        self,
        rows: Rows,
        counts: Counts,
        configuration: Configuration,
        host: OffloadingManager,
        tier: CPUOffloadingManager | None,
    ) -> None:
        super().__init__(rows, counts, configuration)
        groups, ends_stores = configuration.groups, not configuration.pending
        self._tier = tier
        kind = GroupServer if tier is None else TieredServer
        self._server = kind(groups, host, tier, ends_stores=ends_stores)
        self._num_pending = configuration.pending
        self._in_flight: deque[SteppedRequest] = deque()
        self._tier_stored = 0

    def begin(self, row: int, told: Told | None) -> Hits:
        """Compute a row's prompt; return the whole blocks found."""
        rows, size = self._rows, self._size
        blocks = rows.blocks_of(row)
        length, whole = int(rows.lengths[row]), int(rows.whole[row])
        on_device, junction = self._device.find(blocks, length)
        hashes = rows.hashes_of(row)
        start = perf_counter_ns()
        served = self._server.serve(hashes, whole, on_device * size, junction * size, told)
        self._in_flight.append(served)
        while len(self._in_flight) > self._num_pending:
            self._in_flight.popleft().complete()
        self.times.add(perf_counter_ns() - start)
        self._device.leave(blocks, length, on_device, junction, served.hit_tokens)
        self._noted |= {
            "device": on_device * size,
            "host": served.hit_tokens - served.disk_tokens,
            "tier": served.disk_tokens,
            "loaded": len(served.loaded),
            "stored": len(served.to_store),
            "evicted": len(served.evicted),
            "refused": served.refused,
            "junction": junction * size,
        }
        if self._tier is not None:
            former, self._tier_stored = self._tier_stored, self._tier.stats()["stored_blocks"]
            self._noted["tier_stored"] = self._tier_stored - former
        self._write(row, self._server.manager)
        from_tier = served.disk_tokens // size
        return Hits(on_device, served.hit_tokens // size - from_tier, from_tier)

    def end(self) -> Sequence[Change]:
        """End the prompt; no router is told of changes."""
        return ()


def _not_admitted(manager: OffloadingManager) -> int:
    stats = getattr(manager, "stats", None)
    return 0 if stats is None else int(stats().get("not_admitted", 0))


def new_engines(
    rows: Rows,
    counts: Counts,
    configuration: Configuration,
    manager: OffloadingManager | None,
) -> Iterator[Engine]:
    """Yield the engines of a configuration, empty; `manager` may be the host memory of the one."""
    groups, tier = configuration.groups, configuration.tier
    by_rows = manager is None and tier is None and not is_own(configuration.policy)
    in_steps = groups.step_tokens is not None
    behind: CPUOffloadingManager | None = None
    for _ in range(configuration.engines):
        if by_rows and groups.is_plain and not (in_steps and IMPLEMENTATION == "python"):
            yield RowEngine(rows, counts, configuration)
            continue
        host = manager or new_manager(configuration.policy, configuration.host)
        if tier is not None:
            if isinstance(host, CPUOffloadingManager):
                host.policy.set_declining(False)
            if behind is None or tier.kind == "private":
                behind = new_manager(tier.policy, tier.slots)
        kind = ManagerEngine if groups.is_plain and not in_steps else GroupEngine
        yield kind(rows, counts, configuration, host, behind)
