"""A second opinion: the managers once more, as naively as the rules can be read.

Nothing is shared with the package but the exceptions. Blocks are rows in one list, recency is the
position in a list of hashes, every question is answered by going through all rows, and ARC's
victims are found one at a time from copies of its lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from kvoffload import (
    BlockHash,
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
)

MayLeave = Callable[[BlockHash], bool]
PENDING = -1
COUNTERS = (
    "lookups",
    "lookup_blocks",
    "hit_blocks",
    "stored_blocks",
    "failed_blocks",
    "evicted_blocks",
    "refused_stores",
    "not_admitted",
    "loaded_blocks",
)
PRESENT = ("resident", "pending", "pinned", "free", "ghosts")
"""Names of the statistics: what is counted, and what is there now."""


@dataclass
class Row:
    """One resident block."""

    block: BlockHash
    slot: int
    pins: int = PENDING


class RecencyModel:
    """Which block leaves by LRU: one list, least recent first."""

    def __init__(self, capacity: int) -> None:
        self.order: list[BlockHash] = []

    def enter(self, block: BlockHash) -> None:
        self.order.append(block)

    def leave(self, block: BlockHash) -> None:
        self.order.remove(block)

    def use(self, block: BlockHash, pending: bool) -> None:
        if block in self.order:
            self.order.remove(block)
            self.order.append(block)

    def choose(
        self, n: int, may_leave: MayLeave, released: list[BlockHash]
    ) -> list[BlockHash] | None:
        candidates = released + [
            block for block in self.order if may_leave(block) and block not in released
        ]
        return candidates[:n] if len(candidates) >= n else None

    def evicted(self, victims: list[BlockHash]) -> None:
        self.order = [block for block in self.order if block not in victims]

    def resident_in_order(self) -> list[BlockHash]:
        return list(self.order)

    def num_ghosts(self) -> int:
        return 0

    def views(self) -> dict[str, object]:
        return {"blocks": self.order}


class AdaptiveModel:
    """Which block leaves by ARC: four lists, least recent first, and a target."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.t1: list[BlockHash] = []
        self.t2: list[BlockHash] = []
        self.b1: list[BlockHash] = []
        self.b2: list[BlockHash] = []
        self.target = 0.0

    def enter(self, block: BlockHash) -> None:
        for ghosts in (self.b1, self.b2):
            if block in ghosts:
                ghosts.remove(block)
        self.t1.append(block)

    def leave(self, block: BlockHash) -> None:
        (self.t1 if block in self.t1 else self.t2).remove(block)

    def use(self, block: BlockHash, pending: bool) -> None:
        b1, b2 = len(self.b1), len(self.b2)
        if block in self.b1:
            self.target = min(self.target + max(1.0, b2 / b1), float(self.capacity))
        if block in self.b2:
            self.target = max(self.target - max(1.0, b1 / b2), 0.0)
        for source in (self.t1, self.t2, self.b1, self.b2):
            if block in source:
                source.remove(block)
                promoted = source is self.t1 and not pending
                (self.t2 if promoted else source).append(block)
                return

    def choose(
        self, n: int, may_leave: MayLeave, released: list[BlockHash]
    ) -> list[BlockHash] | None:
        victims = released[:n]
        t1, t2 = ([block for block in ring if block not in victims] for ring in (self.t1, self.t2))
        while len(victims) < n:
            in_t1 = [block for block in t1 if may_leave(block)]
            in_t2 = [block for block in t2 if may_leave(block)]
            first, second = (in_t1, in_t2) if len(t1) >= int(self.target) else (in_t2, in_t1)
            if not first + second:
                return None
            victim = (first + second)[0]
            (t1 if victim in t1 else t2).remove(victim)
            victims.append(victim)
        return victims

    def evicted(self, victims: list[BlockHash]) -> None:
        for block in victims:
            ghosts = self.b1 if block in self.t1 else self.b2
            self.leave(block)
            ghosts.append(block)
        if victims:
            self.b1 = self.b1[max(0, len(self.b1) - self.capacity) :]
            self.b2 = self.b2[max(0, len(self.b2) - self.capacity) :]

    def resident_in_order(self) -> list[BlockHash]:
        return self.t1 + self.t2

    def num_ghosts(self) -> int:
        return len(self.b1) + len(self.b2)

    def views(self) -> dict[str, object]:
        return {
            "t1": self.t1,
            "t2": self.t2,
            "b1": self.b1,
            "b2": self.b2,
            "target_t1_size": self.target,
        }


class CountingPool:
    """A pool: fresh ids counting up, then the last freed first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next_fresh = 0
        self.stack: list[int] = []
        self.lent: list[int] = []

    def num_free(self) -> int:
        return self.size - self.next_fresh + len(self.stack)

    def take(self) -> int:
        if self.next_fresh < self.size:
            self.next_fresh += 1
            return self.next_fresh - 1
        return self.stack.pop()

    def give_back(self, slot: int) -> None:
        self.stack.append(slot)

    def give_all_back(self, slots: list[int]) -> None:
        if self.lent:
            self.stack.extend(slots)
        else:
            self.next_fresh, self.stack = 0, []


class LowestFirstPool(CountingPool):
    """A pool over the user's backend of these tests: the lowest free id."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.stack = list(range(size))
        self.next_fresh = size

    def take(self) -> int:
        lowest = min(self.stack)
        self.stack.remove(lowest)
        return lowest

    def give_all_back(self, slots: list[int]) -> None:
        self.stack.extend(slots)


@dataclass
class ManagerModel:
    """When a block may be read, written and evicted."""

    policy_class: type[RecencyModel | AdaptiveModel]
    pool: CountingPool
    events_on: bool
    releases: bool = True  # whether its policy lets released blocks leave first
    rows: list[Row] = field(default_factory=list)
    events: list[tuple[list[BlockHash], bool]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    released: list[BlockHash] = field(default_factory=list)
    resets: int = 0

    def __post_init__(self) -> None:
        self.capacity = self.pool.num_free()
        self.policy: RecencyModel | AdaptiveModel = self.policy_class(self.capacity)

    def count(self, name: str, number: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def row(self, block: BlockHash) -> Row | None:
        found = [row for row in self.rows if row.block == block]
        return found[0] if found else None

    def emit(self, blocks: list[BlockHash], removed: bool) -> None:
        if self.events_on and blocks:
            self.events.append((list(blocks), removed))

    def __contains__(self, block: BlockHash) -> bool:
        return self.row(block) is not None

    def begin(self, batch: list[BlockHash], ends: bool = False) -> RequestModel:
        self.touch(batch)
        return RequestModel(self, list(batch), ends)

    def release(self, batch: list[BlockHash]) -> None:
        for block in reversed(batch) if self.releases else ():
            if block in self and block not in self.released:
                self.released.append(block)

    def lookup(self, batch: list[BlockHash]) -> int:
        ready = [row.block for row in self.rows if row.pins != PENDING]
        hits = 0
        while hits < len(batch) and batch[hits] in ready:
            hits += 1
        self.count("lookups", 1)
        self.count("lookup_blocks", len(batch))
        self.count("hit_blocks", hits)
        return hits

    def touch(self, batch: list[BlockHash]) -> None:
        for block in reversed(batch):
            row = self.row(block)
            self.released = [other for other in self.released if other != block]
            self.policy.use(block, row is not None and row.pins == PENDING)

    def prepare_load(self, batch: list[BlockHash]) -> list[int]:
        for block in batch:
            row = self.row(block)
            if row is None:
                raise BlockNotFoundError(block.hex())
            if row.pins == PENDING:
                raise BlockNotReadyError(block.hex())
        slots = []
        for row in [row for block in batch for row in self.rows if row.block == block]:
            row.pins += 1
            slots.append(row.slot)
        self.count("loaded_blocks", len(batch))
        return slots

    def complete_load(self, batch: list[BlockHash]) -> None:
        for index, block in enumerate(batch):
            row = self.row(block)
            if row is None:
                raise BlockNotFoundError(block.hex())
            if row.pins < batch[: index + 1].count(block):
                raise BlockNotPinnedError(block.hex())
        for row in self.rows:
            row.pins -= batch.count(row.block)

    def prepare_store(
        self, batch: list[BlockHash], is_last: bool = False
    ) -> tuple[list[BlockHash], list[int], list[BlockHash]] | None:
        missing: list[BlockHash] = []
        for block in batch:
            if self.row(block) is None and block not in missing:
                missing.append(block)
        short = max(0, len(missing) - self.pool.num_free())

        def may_leave(block: BlockHash) -> bool:
            row = self.row(block)
            return row is not None and row.pins == 0 and block not in batch

        released = [block for block in self.released if may_leave(block)]
        if is_last and short > len(released):
            self.count("not_admitted", short - len(released))
            missing = missing[: len(missing) - short + len(released)]
            short = len(released)
        victims = self.policy.choose(short, may_leave, released)
        if victims is None:
            self.count("refused_stores", 1)
            return None
        self.policy.evicted(victims)
        for block in victims:
            row = self.row(block)
            assert row is not None
            self.drop(row)
            self.pool.give_back(row.slot)
        slots = [self.pool.take() for _ in missing]
        for block, slot in zip(missing, slots, strict=True):
            self.rows.append(Row(block, slot))
            self.policy.enter(block)
        self.emit(victims, True)
        self.count("evicted_blocks", len(victims))
        self.count("stored_blocks", len(missing))
        return missing, slots, victims

    def complete_store(self, batch: list[BlockHash], success: bool = True) -> None:
        became_idle: list[BlockHash] = []
        for block in batch:
            row = self.row(block)
            if row is None or row.pins != PENDING:
                continue
            if success:
                row.pins = 0
                became_idle.append(block)
            else:
                self.drop(row)
                self.policy.leave(block)
                self.pool.give_back(row.slot)
                self.count("failed_blocks", 1)
        self.emit(became_idle, False)

    def drop(self, row: Row) -> None:
        self.rows.remove(row)
        self.released = [block for block in self.released if block != row.block]

    def take_events(self) -> list[tuple[list[BlockHash], bool]]:
        taken, self.events = self.events, []
        return taken

    def reset_cache(self) -> None:
        self.resets += 1
        slots = {row.block: row.slot for row in self.rows}
        self.pool.give_all_back([slots[block] for block in self.policy.resident_in_order()])
        self.rows = []
        self.released = []
        self.policy = self.policy_class(self.capacity)

    def present(self) -> dict[str, int]:
        return {
            "resident": len(self.rows),
            "pending": sum(row.pins < 0 for row in self.rows),
            "pinned": sum(row.pins > 0 for row in self.rows),
            "free": self.pool.num_free(),
            "ghosts": self.policy.num_ghosts(),
        }


@dataclass
class RequestModel:
    """A request: its blocks, those that it stores, and the positions of those that it loads."""

    manager: ManagerModel
    hashes: list[BlockHash]
    ends: bool = False
    storing: list[BlockHash] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)
    outdated: list[int] = field(default_factory=list)  # loads from before a reset
    resets: int = 0  # of the manager, at the last call

    def __post_init__(self) -> None:
        self.resets = self.manager.resets

    def note_resets(self) -> None:
        if self.resets != self.manager.resets:
            self.resets = self.manager.resets
            self.outdated += self.loading
            self.loading, self.storing = [], []

    def num_ready(self) -> int:
        """Return how many leading blocks can be loaded."""
        rows = map(self.manager.row, self.hashes)
        return len(list(takewhile(lambda row: row is not None and row.pins != PENDING, rows)))

    def lookup(self, start: int) -> int:
        return self.manager.lookup(self.hashes[start:])

    def prepare_load(self, start: int, stop: int) -> list[int]:
        slots = self.manager.prepare_load(self.hashes[start:stop])
        self.note_resets()
        self.loading += range(start, stop)
        return slots

    def complete_load(self, start: int, stop: int) -> None:
        self.note_resets()
        current = [place for place in range(start, stop) if place not in self.outdated]
        self.manager.complete_load([self.hashes[place] for place in current])
        for place in range(start, stop):
            loads = self.outdated if place in self.outdated else self.loading
            if place in loads:
                loads.remove(place)

    def prepare_store(
        self, start: int, stop: int
    ) -> tuple[list[BlockHash], list[int], list[BlockHash]] | None:
        output = self.manager.prepare_store(self.hashes[start:stop], self.ends)
        self.note_resets()
        self.storing += output[0] if output else []
        return output

    def complete_store(self, success: bool) -> None:
        self.note_resets()
        storing, self.storing = self.storing, []
        self.manager.complete_store(storing, success)

    def extend(self, more: list[BlockHash]) -> None:
        self.manager.touch(more)
        self.hashes += more

    def finish(self, ends: bool | None = None) -> None:
        self.manager.touch(self.hashes)
        if self.ends if ends is None else ends:
            self.manager.release(self.hashes)
