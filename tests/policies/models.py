"""A second opinion: the policies once more, as naively as their rules can be read.

Nothing is shared with the package. Blocks are in plain lists, least recent or oldest first, every
question is answered by going through all of them, and victims are found one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise

from kvoffload import BlockHash

Blocks = list[BlockHash]


class PolicyModel:
    """What is common: which blocks are there, and that released ones leave before all others.

    Parameters
    ----------
    capacity : int
        Number of blocks that the policy is meant to hold.
    ref_cnt : callable
        Returns the ``ref_cnt`` of a resident block.
    share : float or None
        Of the capacity, for policies that have such an option; None: what they take themselves.
    """

    share = 0.0
    lists: tuple[str, ...] = ("blocks",)  # their names; a reset frees slots in this order
    ghost_lists: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()  # what else can be seen of the policy

    def __init__(
        self, capacity: int, ref_cnt: Callable[[BlockHash], int], share: float | None = None
    ) -> None:
        self.capacity, self.ref_cnt = capacity, ref_cnt
        self.size = int(capacity * (self.share if share is None else share))
        self.clear()

    def clear(self) -> None:
        self.released: Blocks = []
        for name in self.lists + self.ghost_lists:
            setattr(self, name, [])

    def resident(self) -> Blocks:
        return [block for name in self.lists for block in getattr(self, name)]

    def num_ghosts(self) -> int:
        return sum(len(getattr(self, name)) for name in self.ghost_lists)

    def views(self) -> dict[str, object]:
        """Return what attributes of the policy show."""
        names = self.lists + self.ghost_lists + self.figures
        return {name: getattr(self, name) for name in names}

    def enter(self, block: BlockHash) -> None:
        raise NotImplementedError

    def remove(self, block: BlockHash) -> None:
        """Forget a block."""
        name = next(name for name in self.lists if block in getattr(self, name))
        getattr(self, name).remove(block)

    def leave(self, block: BlockHash) -> None:
        self.remove(block)
        self.released = [other for other in self.released if other != block]

    def touch(self, batch: Blocks, counts: bool = True) -> None:
        """Use blocks; at the end of a request it does not count, for policies that count uses."""
        self.released = [block for block in self.released if block not in batch]
        self.use(batch, counts)

    def use(self, batch: Blocks, counts: bool) -> None:
        raise NotImplementedError

    def release(self, batch: Blocks) -> None:
        for block in reversed(batch):
            if block in self.resident() and block not in self.released:
                self.released.append(block)

    def evict(self, n: int, asked: Collection[BlockHash]) -> Blocks | None:
        """Let blocks leave that are idle and not asked for."""

        def able(blocks: Blocks) -> Blocks:
            return [
                block
                for block in blocks
                if self.ref_cnt(block) == 0 and block not in asked and block not in victims
            ]

        victims: Blocks = []
        if len(able(self.resident())) < n:
            return None
        victims = able(self.released)[:n]
        num_released = len(victims)
        while len(victims) < n:
            victims.append(self.next_victim(able, victims))
        if victims:
            self.let_go(victims, num_released, asked)
        return victims

    def next_victim(self, able: Callable[[Blocks], Blocks], victims: Blocks) -> BlockHash:
        return able(self.resident())[0]

    def let_go(self, victims: Blocks, num_released: int, asked: Collection[BlockHash]) -> None:
        for block in victims:
            self.leave(block)


class RecencyModel(PolicyModel):
    """LRU: one list."""

    def enter(self, block: BlockHash) -> None:
        self.blocks.append(block)

    def use(self, batch: Blocks, counts: bool) -> None:
        for block in reversed(batch):
            if block in self.blocks:
                self.blocks.remove(block)
                self.blocks.append(block)


class SegmentedModel(PolicyModel):
    """SLRU: blocks seen once, and blocks seen again, which have a share of the capacity."""

    share = 0.5
    lists = ("probation", "protected")
    figures = ("protected_size",)

    @property
    def protected_size(self) -> int:
        return self.size

    def enter(self, block: BlockHash) -> None:
        self.probation.append(block)

    def use(self, batch: Blocks, counts: bool) -> None:
        goes_on = False  # a later block of the chain is protected
        for block in reversed(batch):
            if block in self.resident():
                goes_on = goes_on or block in self.protected or self.ref_cnt(block) >= 0
                self.remove(block)
                (self.protected if goes_on else self.probation).append(block)
        excess = max(0, len(self.protected) - self.size)
        for block in [block for block in self.protected if self.ref_cnt(block) == 0][:excess]:
            self.protected.remove(block)
            self.probation.append(block)


class FrequencyModel(RecencyModel):
    """LFU with dynamic aging: counts up to 15, and priorities of age plus count."""

    def clear(self) -> None:
        super().clear()
        self.counts: dict[BlockHash, int] = {}
        self.priorities: dict[BlockHash, int] = {}
        self.age = 0

    def resident(self) -> Blocks:
        return sorted(self.blocks, key=self.priorities.__getitem__)

    def views(self) -> dict[str, object]:
        return {"age": self.age}

    def enter(self, block: BlockHash) -> None:
        super().enter(block)
        self.counts[block] = 1
        self.priorities[block] = self.age + 1

    def use(self, batch: Blocks, counts: bool) -> None:
        super().use(batch, counts)
        for block in batch:
            if block in self.blocks:
                if counts and self.ref_cnt(block) >= 0:
                    self.counts[block] = min(15, self.counts[block] + 1)
                self.priorities[block] = self.age + self.counts[block]

    def let_go(self, victims: Blocks, num_released: int, asked: Collection[BlockHash]) -> None:
        super().let_go(victims, num_released, asked)
        if len(victims) > num_released:  # some have left in their turn
            others = [self.priorities[block] for block in self.blocks]
            self.age = min([self.priorities[victims[-1]], *others])


class AdaptiveModel(PolicyModel):
    """ARC as vLLM has it: four lists and a target."""

    classic = False
    lists = ("t1", "t2")
    ghost_lists = ("b1", "b2")
    figures = ("target_t1_size",)

    def clear(self) -> None:
        super().clear()
        self.target_t1_size = 0.0
        self.counted: Blocks = []  # ghosts of the published policy whose return was counted

    def enter(self, block: BlockHash) -> None:
        is_back = self.classic and block in self.b1 + self.b2
        if is_back:
            self.return_of(block)
        for ghosts in (self.b1, self.b2):
            if block in ghosts:
                ghosts.remove(block)
        (self.t2 if is_back else self.t1).append(block)
        self.forget()

    def return_of(self, ghost: BlockHash) -> None:
        """Adapt the target to the return of a ghost; once, as published."""
        b1, b2 = len(self.b1), len(self.b2)
        if ghost in self.counted:
            return
        if ghost in self.b1:
            self.target_t1_size = min(self.target_t1_size + max(1.0, b2 / b1), float(self.capacity))
        else:
            self.target_t1_size = max(self.target_t1_size - max(1.0, b1 / b2), 0.0)
        if self.classic:
            self.counted.append(ghost)

    def use(self, batch: Blocks, counts: bool) -> None:
        goes_on = False  # as published, a block whose later ones were seen again was, too
        for block in reversed(batch):
            if block in self.b1 + self.b2:
                self.return_of(block)
            for source in (self.t1, self.t2, self.b1, self.b2):
                if block in source:
                    source.remove(block)
                    is_seen = source is self.t1 and (goes_on or self.ref_cnt(block) >= 0)
                    (self.t2 if is_seen else source).append(block)
                    goes_on = goes_on or (self.classic and block in self.t2)
                    break

    def next_victim(self, able: Callable[[Blocks], Blocks], victims: Blocks) -> BlockHash:
        size = len([block for block in self.t1 if block not in victims])
        size += len(victims) if self.classic else 1  # what takes their places is in T1
        gives = size > int(self.target_t1_size)
        first, second = (self.t1, self.t2) if gives else (self.t2, self.t1)
        return (able(first) + able(second))[0]

    def let_go(self, victims: Blocks, num_released: int, asked: Collection[BlockHash]) -> None:
        for block in victims:
            ghosts = self.b1 if block in self.t1 else self.b2
            self.leave(block)
            ghosts.append(block)
        self.counted = [block for block in self.counted if block not in victims]
        self.forget()

    def forget(self) -> None:
        """Keep the ghosts within their bounds, by the oldest of them."""
        room = self.capacity - len(self.t1) if self.classic else self.capacity
        self.b1 = self.b1[max(0, len(self.b1) - max(0, room)) :]
        if self.classic:
            room = 2 * self.capacity - len(self.t1 + self.t2 + self.b1)
        self.b2 = self.b2[max(0, len(self.b2) - max(0, room)) :]
        self.counted = [block for block in self.counted if block in self.b1 + self.b2]


class PublishedAdaptiveModel(AdaptiveModel):
    """ARC as published: what was a ghost is stored in T2."""

    classic = True


class SieveModel(PolicyModel):
    """SIEVE: one queue, marks, and a hand that goes from old to new."""

    figures = ("hand",)

    def clear(self) -> None:
        super().clear()
        self.visited: set[BlockHash] = set()
        self.place = 0  # of the hand
        self.newest: BlockHash | None = None

    @property
    def hand(self) -> BlockHash | None:
        return self.blocks[self.place] if self.place < len(self.blocks) else None

    def enter(self, block: BlockHash) -> None:
        self.blocks.append(block)
        self.newest = block

    def remove(self, block: BlockHash) -> None:
        self.place -= self.blocks.index(block) < self.place
        super().remove(block)
        self.visited.discard(block)

    def use(self, batch: Blocks, counts: bool) -> None:
        for block in reversed(batch):
            if block in self.blocks and self.ref_cnt(block) >= 0:
                self.visited.add(block)
            elif block in self.blocks:
                is_visited = block in self.visited
                self.remove(block)
                self.enter(block)
                self.visited |= {block} if is_visited else set()

    def next_victim(self, able: Callable[[Blocks], Blocks], victims: Blocks) -> BlockHash:
        while True:
            self.place %= len(self.blocks)
            block = self.blocks[self.place]
            self.place += 1
            if able([block]):
                if block not in self.visited:
                    return block
                self.visited.remove(block)

    def let_go(self, victims: Blocks, num_released: int, asked: Collection[BlockHash]) -> None:
        is_last = self.place > 0 and self.blocks[self.place - 1] == self.newest
        if len(victims) > num_released and is_last:
            self.place = 0
        super().let_go(victims, num_released, asked)


class S3FIFOModel(PolicyModel):
    """S3-FIFO on chains: two queues, ghosts, and which block is behind which."""

    share = 0.1  # of small
    lists = ("small", "main")
    ghost_lists = ("ghosts",)
    figures = ("small_size",)

    def clear(self) -> None:
        super().clear()
        self.counts: dict[BlockHash, int] = {}
        self.before: dict[BlockHash, BlockHash | None] = {}
        self.depth: dict[BlockHash, int] = {}

    @property
    def small_size(self) -> int:
        return self.size

    def enter(self, block: BlockHash) -> None:
        (self.main if block in self.ghosts else self.small).append(block)
        self.ghosts = [ghost for ghost in self.ghosts if ghost != block]
        self.counts[block] = self.depth[block] = 0
        self.before[block] = None

    def remove(self, block: BlockHash) -> None:
        super().remove(block)
        self.before = {
            other: None if before == block else before
            for other, before in self.before.items()
            if other != block
        }

    def use(self, batch: Blocks, counts: bool) -> None:
        for first, block in pairwise(batch):
            is_alone = block in self.before and block not in self.before.values()
            if is_alone and self.before[block] is None and first in self.before and first != block:
                self.before[block], self.depth[block] = first, self.depth[first] + 1
        for block in reversed(batch):
            is_unused = self.counts.get(block) == 0 and not counts
            if block in self.resident() and (is_unused or self.ref_cnt(block) < 0):
                queue = self.small if block in self.small else self.main
                queue.remove(block)
                queue.append(block)
            elif block in self.resident() and counts:
                self.counts[block] = min(3, self.counts[block] + 1)

    def evict(self, n: int, asked: Collection[BlockHash]) -> Blocks | None:
        """Let each search begin at the oldest; it looks again at a queue that has changed."""
        self.queues = [list(self.small), list(self.main)]
        self.scans: list[Blocks] = [[], []]
        self.has_changed = [True, True]
        return super().evict(n, asked)

    def next_victim(self, able: Callable[[Blocks], Blocks], victims: Blocks) -> BlockHash:
        for block in victims:  # released ones are the first
            self.before[block] = None
        while True:
            length = len([block for block in self.queues[0] if block not in victims])
            first = int(length + len(victims) < self.size)
            for at in (first, 1 - first):
                found = self.scan(at, able)
                if found:
                    self.has_changed = [True, True]
                    return found
            if length == len([block for block in self.queues[0] if block not in victims]):
                idle = able(self.queues[0] + self.queues[1])
                return max(idle, key=lambda block: (self.depth[block], -idle.index(block)))

    def scan(self, at: int, able: Callable[[Blocks], Blocks]) -> BlockHash | None:
        """Go on through a queue, 0 or 1, to a victim."""
        while self.scans[at] or self.has_changed[at]:
            if not self.scans[at]:
                self.scans[at], self.has_changed[at] = list(self.queues[at]), False
                continue
            block = self.scans[at].pop(0)
            if not able([block]):
                continue
            if self.counts[block] > 1 - at:
                self.counts[block] = self.counts[block] - 1 if at else 0
                self.queues[at].remove(block)
                self.queues[1].append(block)
                self.has_changed[at] = self.has_changed[1] = True
            elif block not in self.before.values():
                return block
        return None

    def let_go(self, victims: Blocks, num_released: int, asked: Collection[BlockHash]) -> None:
        self.small, self.main = self.queues
        returning = [block for block in self.ghosts if block in asked]
        self.ghosts += [block for block in victims if block in self.small]
        super().let_go(victims, num_released, asked)
        others = [block for block in self.ghosts if block not in returning]
        gone = others[: max(0, len(others) - self.capacity + self.size)]
        self.ghosts = [block for block in self.ghosts if block not in gone]


MODELS: dict[str, type[PolicyModel]] = {  # what hit density learns is in `test_hit_density`
    "lru": RecencyModel,
    "arc": AdaptiveModel,
    "arc-classic": PublishedAdaptiveModel,
    "slru": SegmentedModel,
    "lfu": FrequencyModel,
    "sieve": SieveModel,
    "s3fifo": S3FIFOModel,
}
