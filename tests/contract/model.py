"""A second opinion: the managers once more, as naively as the rules can be read.

Nothing is shared with the package but the exceptions. Blocks are rows in one list, and every
question is answered by going through all of them; which block leaves, `tests.policies.models` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile

from kvoffload import BlockHash, BlockNotFoundError, BlockNotPinnedError, BlockNotReadyError
from tests.policies.models import PolicyModel

PENDING = -1


def said(call: str, block: BlockHash) -> str:
    """Return how the text of an error on a block begins."""
    cut = f"... ({len(block)} bytes)" if len(block) > 32 else ""
    return f"{call}: block {block[:32].hex()}{cut} is not"


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
    ends: bool = False  # a session may go on after it
    shared: bool = False


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
    """A pool over the user's backend of these tests: the lowest free id; it remembers its calls."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.stack = list(range(size))
        self.next_fresh = size
        self.freed: list[int] = []

    def take(self) -> int:
        lowest = min(self.stack)
        self.stack.remove(lowest)
        return lowest

    def give_back(self, slot: int) -> None:
        super().give_back(slot)
        self.freed.append(slot)

    def give_all_back(self, slots: list[int]) -> None:
        for slot in slots:
            self.give_back(slot)


@dataclass
class ManagerModel:
    """When a block may be read, written and evicted, and which blocks sessions share."""

    policy_class: type[PolicyModel]
    pool: CountingPool
    events_on: bool
    releases: bool = True  # whether its policy lets released blocks leave first
    rows: list[Row] = field(default_factory=list)
    events: list[tuple[list[BlockHash], bool]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    allocated: list[list[BlockHash]] = field(default_factory=list)  # by each store
    resets: int = 0

    def __post_init__(self) -> None:
        self.policy = self.policy_class(self.pool.num_free(), self.ref_cnt)

    def ref_cnt(self, block: BlockHash) -> int:
        (found,) = [row.pins for row in self.rows if row.block == block]
        return found

    def row(self, block: BlockHash) -> Row | None:
        return next((row for row in self.rows if row.block == block), None)

    def emit(self, blocks: list[BlockHash], removed: bool) -> None:
        if self.events_on and blocks:
            self.events.append((list(blocks), removed))

    def __contains__(self, block: BlockHash) -> bool:
        return self.row(block) is not None

    def begin(self, batch: list[BlockHash], ends: bool = False) -> RequestModel:
        self.touch(batch)
        return RequestModel(self, list(batch), ends)

    # -- sessions ----------------------------------------------------------------------------

    def num_known(self, hashes: list[BlockHash], own: Collection[BlockHash] = ()) -> int:
        """Return the number of blocks up to the deepest resident one that is not among `own`."""
        known = [place for place, block in enumerate(hashes) if block in self and block not in own]
        return known[-1] + 1 if known else 0

    def go_on(self, known: list[BlockHash]) -> None:
        """Let the session that ended here go on; if none did, the blocks have several sessions."""
        is_new = bool(known)
        for row in map(self.row, reversed(known)):
            if row is None or not row.ends:  # maybe of a block that the prompt repeats
                break
            row.ends = is_new = False
        if is_new:
            self.share(known)

    def share(self, known: list[BlockHash]) -> None:
        for row in self.rows:
            row.shared = row.shared or row.block in known

    def unshared(self, hashes: list[BlockHash]) -> list[BlockHash]:
        """Return the resident blocks of one session alone."""
        own = {row.block for row in self.rows if not row.shared}
        return [block for block in hashes if block in own]

    def mark_ends(self, hashes: list[BlockHash], known: int, num_last: int) -> None:
        """Let a session go on after its last blocks, or else after the deepest that is its own."""
        last = [block for block in hashes[max(0, len(hashes) - num_last) :] if block in self]
        for row in self.rows:
            if row.block in (last or self.unshared(hashes[max(0, known - 1) : known])):
                row.ends = True

    def end(self, hashes: list[BlockHash], own: list[BlockHash], num_last: int) -> None:
        """End a request that has been served without a `begin`."""
        known = self.num_known(hashes, own)
        if known:
            self.go_on(hashes[:known])
        self.mark_ends(hashes, known, num_last)

    def release(self, batch: list[BlockHash]) -> None:
        if self.releases:
            self.policy.release(self.unshared(batch))

    # -- the calls ---------------------------------------------------------------------------

    def lookup(self, batch: list[BlockHash]) -> int:
        ready = [row.block for row in self.rows if row.pins != PENDING]
        hits = 0
        while hits < len(batch) and batch[hits] in ready:
            hits += 1
        self.counts["lookups"] += 1
        self.counts["lookup_blocks"] += len(batch)
        self.counts["hit_blocks"] += hits
        return hits

    def touch(self, batch: list[BlockHash], counts: bool = True) -> None:
        self.policy.touch(batch, counts)

    def prepare_load(self, batch: list[BlockHash]) -> list[int]:
        for block in batch:
            row = self.row(block)
            if row is None:
                raise BlockNotFoundError(said("prepare_load", block))
            if row.pins == PENDING:
                raise BlockNotReadyError(said("prepare_load", block))
        slots = []
        for row in [row for block in batch for row in self.rows if row.block == block]:
            row.pins += 1
            slots.append(row.slot)
        self.counts["loaded_blocks"] += len(batch)
        return slots

    def complete_load(self, batch: list[BlockHash]) -> None:
        for index, block in enumerate(batch):
            row = self.row(block)
            if row is None:
                raise BlockNotFoundError(said("complete_load", block))
            if row.pins < batch[: index + 1].count(block):
                raise BlockNotPinnedError(said("complete_load", block))
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
        if is_last:  # only released blocks leave for it
            idle = [row.block for row in self.rows if row.pins == 0 and row.block not in batch]
            able = len([block for block in self.policy.released if block in idle])
            self.counts["not_admitted"] += max(0, short - able)
            missing = missing[: len(missing) - max(0, short - able)]
            short = min(short, able)
        victims = self.policy.evict(short, batch)
        if victims is None:
            self.counts["refused_stores"] += 1
            return None
        for block in victims:
            row = self.row(block)
            assert row is not None
            self.rows.remove(row)
            self.pool.give_back(row.slot)
        slots = [self.pool.take() for _ in missing]
        self.allocated += [missing] if missing else []
        for block, slot in zip(missing, slots, strict=True):
            self.rows.append(Row(block, slot))
            self.policy.enter(block)
        self.emit(victims, True)
        self.counts["evicted_blocks"] += len(victims)
        self.counts["stored_blocks"] += len(missing)
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
                self.rows.remove(row)
                self.policy.leave(block)
                self.pool.give_back(row.slot)
                self.counts["failed_blocks"] += 1
        self.emit(became_idle, False)

    def take_events(self) -> list[tuple[list[BlockHash], bool]]:
        taken, self.events = self.events, []
        return taken

    def reset_cache(self) -> None:
        self.resets += 1
        slots = {row.block: row.slot for row in self.rows}
        self.pool.give_all_back([slots[block] for block in self.policy.resident()])
        self.rows = []
        self.policy.clear()

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
    own: int | None = None  # first position that it has stored

    def __post_init__(self) -> None:
        self.resets = self.manager.resets
        self.prompt = len(self.hashes)
        self.met = self.manager.num_known(self.hashes)
        if self.met:
            self.manager.go_on(self.hashes[: self.met])

    def note_resets(self) -> None:
        if self.resets != self.manager.resets:
            self.resets = self.manager.resets
            self.outdated += self.loading
            self.loading, self.storing = [], []
            self.met, self.own = 0, None

    def num_ready(self) -> int:
        """Return how many leading blocks can be loaded."""
        rows = map(self.manager.row, self.hashes)
        return len(list(takewhile(lambda row: row is not None and row.pins != PENDING, rows)))

    def lookup(self, start: int) -> int:
        return self.manager.lookup(self.hashes[start:])

    def prepare_load(self, start: int, stop: int) -> list[int]:
        slots = self.manager.prepare_load(self.hashes[start:stop])
        self.note_loaded(start, stop)
        return slots

    def note_loaded(self, start: int, stop: int) -> None:
        self.note_resets()
        self.loading += range(start, stop)

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
        stored = output[0] if output else []
        self.storing += stored
        self.note_own(self.hashes.index(stored[0], start) if stored else len(self.hashes))
        return output

    def note_own(self, first: int) -> None:
        self.note_resets()
        self.own = first if self.own is None else min(self.own, first)

    def complete_store(self, success: bool) -> None:
        self.note_resets()
        storing, self.storing = self.storing, []
        self.manager.complete_store(storing, success)

    def extend(self, more: list[BlockHash]) -> None:
        self.manager.touch(more)
        before = len(self.hashes)
        self.hashes += more
        known = self.manager.num_known(self.hashes)
        if known > before:
            self.manager.go_on(self.hashes[:known])

    def finish(self, ends: bool | None = None) -> None:
        self.note_resets()
        self.manager.touch(self.hashes, counts=False)
        own = self.met if self.own is None else self.own
        known = self.manager.num_known(self.hashes[:own])
        if known > self.met:  # stored meanwhile by others
            self.manager.share(self.hashes[:known])
        answer = len(self.hashes) - max(0, self.prompt - 1)
        self.manager.mark_ends(self.hashes, self.met, answer)
        if self.ends if ends is None else ends:
            self.manager.release(self.hashes)
