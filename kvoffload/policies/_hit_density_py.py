"""Hit density: evict, or do not store, what brings the fewest hits for the slot that it takes.

After LHD (Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density",
NSDI'18), with an admission rule of its own; ``_densities_py`` learns the densities.

Structure
    One ring for each class of blocks, least recent first; so the least dense block is one of the
    oldest. Class 0 has a second ring: a request that is repeated at once is no use that densities
    count, but by ARC's rule, while the guard follows that, its blocks are in T2.
    Two clocks of ghosts, records of blocks that are not resident: of those never used again and
    of the others. A ghost that was touched in its place is passed over once.
Differs from the paper
    The oldest of each ring are compared, no random sample; a block enters only if it is denser
    than the one that it would push out; where the oldest block of all is nearly as sparse as the
    sparsest, it is the one to leave. Above a tier nothing is declined while a block may leave: the
    tier is offered only what is stored here, and is read through slots of this cache.
Invariants
    ``_records`` holds a record of every resident block and every ghost. A resident block is on a
    ring of its record's class; a ghost stands in the clock of its class at its record's position.
    A prefix was used at least as recently and as often as what continues it, so it is at least as
    dense: a chain leaves last block first.
Cost
    insert, remove, get O(1); touch O(n); make_room and evict O(n + blocks passed over), with the
    16 rings for a constant. Nothing is drawn at random.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvoffload._checks import as_batch, check_cache_capacity, check_int
from kvoffload.types import BlockHash, BlockStatus, Hints

from . import registry
from ._densities_py import NUM_CLASSES, Densities, SharedDensities, age_bin, class_after
from ._guard_py import ARC, HIT_DENSITY, LRU, Guard, sample_shift
from ._twin_py import PythonPolicy, Victims, evictable, require
from ._views import BlocksView

# Ring of the blocks of class 0 that ARC's rule has in T2: the request was repeated at once.
_AGAIN = NUM_CLASSES
# Rings from the sparsest on, where densities tie: longer gaps first, then fewer uses.
_SPARSEST_FIRST = (0, _AGAIN, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8)
# Leave LRU order only for a block that is sparser by a quarter: estimates are no better.
_NEARLY = 1.25
# Two in seven ghosts are of blocks that were used again.
_REUSED_SHARE = (2, 7)
_MOST_GHOSTS = 2**32 - 2
_NOT_A_GHOST = -1
_STORED = age_bin(1)

_Ring = OrderedDict[BlockHash, BlockStatus]
#: The oldest block of a ring that may leave, its last use, and its density.
_Candidate = tuple[BlockHash, int, float]


@dataclass(slots=True, eq=False)
class _Record:
    """The last use of a block, and its class by the uses before that."""

    reuse_class: int
    last: int  # number of the request
    position: int = _NOT_A_GHOST  # in the clock
    passed_over: bool = False  # a ghost that is to be passed over once
    declined: bool = False  # a ghost that was not stored since its last touch
    is_again: bool = False  # on the ring _AGAIN; its class is 0

    @property
    def ring(self) -> int:
        """Ring of a resident block."""
        return _AGAIN if self.is_again else self.reuse_class


@dataclass(slots=True, eq=False)
class _Clock:
    """The hashes of a fixed number of ghosts, and a hand at the next to be forgotten."""

    num_positions: int
    ghosts: list[BlockHash | None] = field(default_factory=list)  # by position, filled in order
    hand: int = 0


class HitDensityCachePolicy(PythonPolicy):
    """A policy that evicts the block with the fewest hits to expect, and stores none with fewer.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    ghosts : float
        Number of evicted or never stored blocks to remember per block of capacity.
    guard : int
        1 to evict by LRU or ARC while a sample of the blocks does better under it, 0 never to.

    References
    ----------
    Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
    """

    __slots__ = (
        "_clocks",
        "_declines",
        "_densities",
        "_ghosts",
        "_guard",
        "_num_ghosts",
        "_records",
        "_request",
        "_rings",
    )

    def __init__(self, cache_capacity: int, *, ghosts: float = 3.5, guard: int = 1) -> None:
        capacity = check_cache_capacity(cache_capacity)
        ghosts = registry.entry("hit-density").option("ghosts").check(ghosts)
        guard = int(registry.entry("hit-density").option("guard").check(guard))
        self._require_free("__init__")
        total = min(int(ghosts * capacity), _MOST_GHOSTS)
        reused = total * _REUSED_SHARE[0] // _REUSED_SHARE[1]
        self._ghosts = ghosts
        self._clocks = (_Clock(total - reused), _Clock(reused))
        self._densities: Densities = Densities(capacity)
        self._records: dict[BlockHash, _Record] = {}
        self._rings: tuple[_Ring, ...] = tuple(OrderedDict() for _ in _SPARSEST_FIRST)
        self._request = 0
        self._num_ghosts = 0
        self._declines = True  # blocks that are sparser than those that they would push out
        self._guard: Guard | None = None
        if guard and capacity:
            trial = _Trial(capacity >> sample_shift(capacity), ghosts, self._densities)
            self._guard = Guard(capacity, trial)
        super().__init__(capacity)

    @property
    def ghosts(self) -> float:
        """Number of ghosts per block of capacity, as given."""
        return self._ghosts

    @property
    def guard(self) -> int:
        """Whether LRU or ARC may be followed, as given; 0 where the capacity is 0."""
        return int(self._guard is not None)

    @property
    def rule(self) -> str:
        """The policy that is followed: ``hit-density``, ``lru`` or ``arc-classic``."""
        return self._guard.rule if self._guard is not None else HIT_DENSITY

    @property
    def trial_hits(self) -> Mapping[str, float]:
        """Recent hits of each policy on the sample, fading; empty without a guard."""
        return self._guard.hits if self._guard is not None else {}

    @property
    def num_requests(self) -> int:
        """Number of requests that were seen: ages are counted in these."""
        return self._request

    @property
    def rings(self) -> tuple[Mapping[BlockHash, BlockStatus], ...]:
        """Resident blocks by class, with their live statuses, least recent first; read-only.

        The last ring has those of class 0 that ARC's rule takes for used again.
        """
        self._require_ready()
        return tuple(BlocksView(self, ring_index) for ring_index in range(len(self._rings)))

    @property
    def densities(self) -> tuple[tuple[float, ...], ...]:
        """Expected hits per block and request, by class and by bin of age."""
        return tuple(tuple(row) for row in self._densities.table)

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return self._num_ghosts

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        return self._rings[ring_index]

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Hear that a request finishes; its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    # -- uses ------------------------------------------------------------------------------

    def _touch(self, batch: list[BlockHash]) -> None:
        if not batch:
            return
        if self._repeats_request(batch):
            self._renew(batch)
            if self.rule == ARC:
                self._use_at_once(batch)
            num_stored = self._num_stored(batch)
        else:
            self._request += 1
            num_stored = self._use(batch)
            self._densities.end_request(len(batch), self._request)
        if self._guard is not None:
            mean_length = self._densities.mean_length
            self._guard.serve(batch, num_stored, self._resident, mean_length)

    def _extended(self, batch: list[BlockHash]) -> None:
        self._use(batch)

    def _finished(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        del hints, now
        if self._repeats_request(batch):
            self._renew(batch)
        else:
            self._use(batch, finishes=True)

    def _use(self, batch: list[BlockHash], *, finishes: bool = False) -> int:
        """Count a use of each block, or, where a request only `finishes`, none.

        Returns how many leading blocks are not being stored.
        """
        request, records, densities = self._request, self._records, self._densities
        last_use, use_class = 0, None
        num_stored = len(batch)
        for index in range(len(batch) - 1, -1, -1):
            block_hash = batch[index]
            record = records.get(block_hash)
            if record is None:
                record = _Record(0, request)
                if use_class is not None:
                    record.reuse_class = class_after(request - last_use, use_class)
                densities.start(record.reuse_class, request)
                records[block_hash] = record
                self._remember(block_hash, record)
                continue
            if record.last == request:  # a repeat within the batch
                self._to_most_recent(block_hash, record)
                continue
            # It was a use of all before it, too: this record stands in for those that are lost.
            if use_class is None or record.last >= last_use:
                last_use, use_class = record.last, record.reuse_class
            densities.end(record.reuse_class, record.last)
            being_stored = self._is_being_stored(block_hash, record)
            if being_stored:
                num_stored = index
            if finishes or being_stored:
                record.last = request
                densities.start(record.reuse_class, request)
                self._to_most_recent(block_hash, record)
            else:
                densities.count_reuse(record.reuse_class, request - record.last)
                self._reuse(block_hash, record, class_after(request - last_use, use_class))
        return num_stored

    def _repeats_request(self, batch: list[BlockHash]) -> bool:
        """Return whether the request that began last has used all blocks of a batch."""
        records, request = self._records, self._request
        for block_hash in batch:
            record = records.get(block_hash)
            if record is None or record.last != request:
                return False
        return True

    def _num_stored(self, batch: list[BlockHash]) -> int:
        """Return how many leading blocks are not being stored."""
        resident = self._resident
        for index, block_hash in enumerate(batch):
            if block_hash in resident and resident[block_hash].ref_cnt < 0:
                return index
        return len(batch)

    def _renew(self, batch: list[BlockHash]) -> None:
        for block_hash in reversed(batch):
            self._to_most_recent(block_hash, self._records[block_hash])

    def _to_most_recent(self, block_hash: BlockHash, record: _Record) -> None:
        record.declined = False
        if record.position == _NOT_A_GHOST:
            self._rings[record.ring].move_to_end(block_hash)

    def _use_at_once(self, batch: list[BlockHash]) -> None:
        """Take the blocks of a request that is repeated at once into ARC's T2."""
        once, again = self._rings[0], self._rings[_AGAIN]
        for block_hash in reversed(batch):
            status = once.get(block_hash)
            if status is not None and status.ref_cnt >= 0:
                again[block_hash] = once.pop(block_hash)
                self._records[block_hash].is_again = True

    def _is_being_stored(self, block_hash: BlockHash, record: _Record) -> bool:
        """Return whether a block is being stored, or was declined since its last touch."""
        if record.position == _NOT_A_GHOST:
            return self._resident[block_hash].ref_cnt < 0
        return record.declined

    def _reuse(self, block_hash: BlockHash, record: _Record, reuse_class: int) -> None:
        """Give a block that is used again its new class and the time of its last use."""
        record.last = self._request
        self._densities.start(reuse_class, record.last)
        if record.position == _NOT_A_GHOST:
            status = self._rings[record.ring].pop(block_hash)
            record.is_again = False
            record.reuse_class = reuse_class
            self._rings[reuse_class][block_hash] = status
        elif record.reuse_class:
            record.reuse_class = reuse_class
            record.passed_over = True
        else:
            self._leave_clock(record)
            record.reuse_class = reuse_class
            self._remember(block_hash, record)

    # -- ghosts ----------------------------------------------------------------------------

    def _ghost(self, block_hash: BlockHash) -> _Record | None:
        record = self._records.get(block_hash)
        return None if record is None or record.position == _NOT_A_GHOST else record

    def _remember(self, block_hash: BlockHash, record: _Record) -> None:
        """Turn a record into a ghost, in the place of the next one to be forgotten."""
        clock = self._clocks[record.reuse_class > 0]
        ghosts = clock.ghosts
        if not clock.num_positions:
            self._forget(block_hash, record)
            return
        while clock.hand < len(ghosts):
            oldest = ghosts[clock.hand]
            if oldest is None:
                break
            other = self._records[oldest]
            if not other.passed_over:
                self._forget(oldest, other)
                self._num_ghosts -= 1
                break
            other.passed_over = False
            clock.hand = (clock.hand + 1) % clock.num_positions
        else:
            ghosts.append(None)
        ghosts[clock.hand] = block_hash
        record.position = clock.hand
        record.passed_over = record.declined = False
        clock.hand = (clock.hand + 1) % clock.num_positions
        self._num_ghosts += 1

    def _forget(self, block_hash: BlockHash, record: _Record) -> None:
        """Drop a record: how its age would have ended stays unknown."""
        self._densities.count_drop(record.reuse_class, self._request - record.last)
        self._densities.end(record.reuse_class, record.last)
        del self._records[block_hash]

    def _leave_clock(self, record: _Record) -> None:
        """Take a ghost out of its clock."""
        self._clocks[record.reuse_class > 0].ghosts[record.position] = None
        record.position = _NOT_A_GHOST
        record.passed_over = False
        self._num_ghosts -= 1

    # -- residence -------------------------------------------------------------------------

    def make_room(
        self, hashes: Iterable[bytes], num_free: int, protected: Iterable[bytes]
    ) -> tuple[int, Victims]:
        """Decide how many of `hashes` to store, and evict for them; never refuse the store."""
        self._require_ready()
        # A copy: `protected` may be an iterator that changes the caller's list.
        batch = list(as_batch(hashes))
        num_free = check_int("num_free", num_free, 0)
        guarded = set(as_batch(protected, "protected"))
        self._require_free("make_room")
        return self._make_room(batch, num_free, guarded)

    def _make_room_of_released(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims]:
        released = list(self._choose_released(max(0, len(hashes) - num_free), protected))
        return self._take_in(hashes, min(len(hashes), num_free + len(released)), released)

    def _set_declining(self, allowed: bool) -> None:
        self._declines = allowed
        if self._guard is not None:
            self._guard.density_policy._set_declining(allowed)

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            record = self._records.get(block_hash)
            if record is None:
                self._densities.start(0, self._request)
                record = self._records[block_hash] = _Record(0, self._request)
            else:
                self._leave_clock(record)
            record.declined = False
            self._resident[block_hash] = status
            self._rings[record.reuse_class][block_hash] = status
        if self._guard is not None and blocks:
            self._guard.note_insert(next(iter(blocks)))

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            record = self._records[block_hash]
            self._densities.end(record.reuse_class, record.last)
            del self._rings[record.ring][block_hash]
            self._drop(block_hash)
            del self._records[block_hash]

    def _make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims]:
        if self.rule == HIT_DENSITY or not self._declines:
            num_admitted, victims = self._admit(hashes, num_free, protected)
        else:
            num_admitted, victims = self._admit_all(hashes, num_free, protected)
        return self._take_in(hashes, num_admitted, victims)

    def _take_in(
        self, hashes: list[BlockHash], num_admitted: int, victims: list[BlockHash]
    ) -> tuple[int, Victims]:
        """Let the victims go for the leading blocks, and note that the others are declined."""
        for block_hash in hashes[num_admitted:]:
            ghost = self._ghost(block_hash)
            if ghost is not None:
                ghost.declined = True
        if self._guard is not None:
            self._guard.begin_store()
        return num_admitted, self._let_go(victims)

    def _admit(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, list[BlockHash]]:
        """Admit the leading blocks that are denser than those that they push out.

        Where nothing is declined, admit the leading blocks for which others may leave.
        """
        table = self._densities.table
        candidates = self._in_order_of_leaving(protected)
        victims: list[BlockHash] = []
        num_admitted = min(num_free, len(hashes))
        for block_hash in hashes[num_admitted:]:
            victim, density = next(candidates, (None, 0.0))
            if victim is None:
                break
            ghost = self._ghost(block_hash)
            # What continues a prefix is no denser: the first block to fail decides for the rest.
            if self._declines and density >= table[ghost.reuse_class if ghost else 0][_STORED]:
                break
            victims.append(victim)
            num_admitted += 1
        return num_admitted, victims

    def _admit_all(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, list[BlockHash]]:
        """Admit all blocks, as LRU and ARC do, or none where there is no room for all."""
        need = max(0, len(hashes) - num_free)
        victims = [victim for victim, _ in islice(self._in_order_of_leaving(protected), need)]
        return (len(hashes), victims) if len(victims) == need else (0, [])

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        victims = [victim for victim, _ in islice(self._in_order_of_leaving(protected), n)]
        return self._let_go(victims) if len(victims) == n else None

    def _in_order_of_leaving(
        self, protected: Collection[BlockHash]
    ) -> Iterator[tuple[BlockHash, float]]:
        """Yield the blocks that may leave with their densities, in the order of the rule."""
        table, records, request = self._densities.table, self._records, self._request
        released = self._choose_released(len(self._resident), protected)
        rings = [evictable(ring, protected, released) for ring in self._rings]
        oldest: dict[int, _Candidate] = {}
        t1_size = len(self._rings[0])

        def advance(ring_index: int) -> None:
            found = next(rings[ring_index], None)
            if found is None:
                oldest.pop(ring_index, None)
                return
            block_hash = found[0]
            record = records[block_hash]
            # Its next chance is a request on.
            density = table[record.reuse_class][age_bin(request - record.last + 1)]
            oldest[ring_index] = block_hash, record.last, density

        for block_hash in released:
            t1_size += block_hash not in self._rings[0]
            yield block_hash, 0.0
        for ring_index in _SPARSEST_FIRST:
            advance(ring_index)
        while oldest:
            if self._guard is None or self._guard.rule == HIT_DENSITY:
                ring_index = _sparsest(oldest)
            elif self._guard.rule == LRU:
                ring_index = _least_recent(oldest)
            else:
                ring_index = _by_arc(oldest, t1_size, self._guard.target_t1_size)
                # The block that takes its place enters T1.
                t1_size += ring_index != 0
            block_hash, _, density = oldest[ring_index]
            yield block_hash, density
            advance(ring_index)

    def _let_go(self, victims: list[BlockHash]) -> Victims:
        """Make ghosts of the victims."""
        evicted = [(block_hash, self._drop(block_hash)) for block_hash in victims]
        for block_hash in victims:
            record = self._records[block_hash]
            del self._rings[record.ring][block_hash]
            record.is_again = False
            self._remember(block_hash, record)
        return evicted

    def _clear(self) -> None:
        self._densities.clear()
        for ring in self._rings:
            ring.clear()
        for clock in self._clocks:
            clock.ghosts.clear()
            clock.hand = 0
        super()._clear()
        self._records.clear()
        self._request = self._num_ghosts = 0
        if self._guard is not None:
            self._guard.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        return chain.from_iterable(self._rings[index].values() for index in _SPARSEST_FIRST)

    def _check(self) -> None:
        super()._check()
        ages: dict[int, list[int]] = {}
        num_ghosts = 0
        for block_hash, record in self._records.items():
            ages.setdefault(record.reuse_class, []).append(record.last)
            require(record.last <= self._request, "no block was used in the future")
            if record.position == _NOT_A_GHOST:
                status = self._rings[record.ring].get(block_hash)
                require(status is self._resident[block_hash], "a block is on its class's ring")
                require(not (record.is_again and record.reuse_class), "class 0 alone has two rings")
                require(not record.passed_over, "only ghosts are passed over")
                require(not record.declined, "only ghosts were declined")
            else:
                require(not record.is_again, "only blocks are on rings")
                ghosts = self._clocks[record.reuse_class > 0].ghosts
                require(ghosts[record.position] == block_hash, "a ghost stands in its place")
                require(block_hash not in self._resident, "a ghost is not resident")
                num_ghosts += 1
        require(num_ghosts == self._num_ghosts, "ghosts are counted")
        filled = sum(position is not None for clock in self._clocks for position in clock.ghosts)
        require(filled == num_ghosts, "the clocks hold the ghosts and nothing else")
        require(sum(map(len, self._rings)) == len(self._resident), "resident is all rings")
        require(len(self._records) == len(self._resident) + num_ghosts, "every record is in use")
        self._densities._check(ages)
        if self._guard is not None:
            self._guard._check()


def _sparsest(oldest: dict[int, _Candidate]) -> int:
    """Return the ring whose oldest block is the sparsest or, if nearly so, the oldest of all."""
    order = [ring_index for ring_index in _SPARSEST_FIRST if ring_index in oldest]
    sparsest = min(order, key=lambda ring_index: oldest[ring_index][2])
    ring_index = min(order, key=lambda ring_index: oldest[ring_index][1])
    return sparsest if oldest[ring_index][2] > _NEARLY * oldest[sparsest][2] else ring_index


def _least_recent(oldest: dict[int, _Candidate]) -> int:
    """Return the ring with the oldest block of all."""
    order = [ring_index for ring_index in _SPARSEST_FIRST if ring_index in oldest]
    return min(order, key=lambda ring_index: oldest[ring_index][1])


def _by_arc(oldest: dict[int, _Candidate], t1_size: int, target: float) -> int:
    """Return the ring that gives by ARC's REPLACE: ring 0 is its T1, the others are its T2."""
    again = {ring_index: oldest[ring_index] for ring_index in oldest if ring_index != 0}
    if not again or (0 in oldest and t1_size > target):
        return 0
    ring_index = _least_recent(again)
    # Of a request's blocks those that were never used again are the tail.
    return 0 if 0 in oldest and oldest[0][1] == oldest[ring_index][1] else ring_index


class _Trial(HitDensityCachePolicy):
    """A small cache of hit density for the guard of another policy, whose densities it reads."""

    __slots__ = ()

    def __init__(self, cache_capacity: int, ghosts: float, learned: Densities) -> None:
        super().__init__(cache_capacity, ghosts=ghosts, guard=0)
        self._densities = SharedDensities(learned)

    def _touch(self, batch: list[BlockHash]) -> None:
        # The request that the guarded policy is at.
        self._request = self._densities.request
        self._use(batch)
