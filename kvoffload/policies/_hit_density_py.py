"""Hit density: evict, or do not store, the blocks that bring the fewest hits for their slots.

After LHD (Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density",
NSDI'18), with admission by density, hints of clients, and a guard; ``_learned`` has the arithmetic.

Structure
    A *record* has the label and the last use of a block that is resident or a *ghost*. Resident
    blocks are on one ring per label, least recent first, so the least dense block is one of the
    oldest. Two clocks hold the ghosts: of blocks that were never used again, and of the others. A
    new ghost takes a free position, and passes the clock's hand once, or the position of the next
    ghost at the hand, which passes over those used since.
    Another hand walks through the records of a sample of the blocks and measures how much time
    blocks spend at each age. The *duel* of two small caches, of this class and of LRU, which serve
    a part of this sample, decides whether density or recency is the rule.
Requests
    A request first lets the hand meet four records per sampled block. Then its blocks are used,
    last block first. A block's class follows from the last use of the deepest known block behind
    it, since a use of a block is one of its prefix. A request whose blocks were all used by the
    present request only makes them recent; so does the end of a request.
Hints
    A request with a hint labels its blocks with it, except those that were used after the deepest
    known one: other sessions share them. A hint at the end labels them likewise; their age goes on.
    Released blocks leave first, and are not counted until their next use.
Differs from the paper
    The oldest blocks of the rings are compared, not a random sample. A block enters only if it is
    denser than the one that it would replace. If the sparsest block has no client's hint, the
    oldest of all without one leaves if it is nearly as sparse. Above a tier nothing is declined
    while a block may leave: the tier is offered only blocks stored here, and is read through slots
    of this cache.
Invariants
    ``_records`` holds a record of every resident block and every ghost; ``_walk`` has those of the
    sample, as far as it has room.
Cost
    insert, remove, get O(1); touch O(n); make_room and evict O(n x rings + blocks skipped), with at
    most 15 rings per stated time and source, and 30 without hints. Nothing is random.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import floor, log2

from kvoffload._checks import as_batch, check_hints, check_int
from kvoffload._sampling import new_secret, words_of
from kvoffload.types import MOST_SOURCES, BlockHash, BlockStatus, HintGain, Hints

from ._duel_py import DENSITY, LRU, Duel, Sample
from ._hit_density import FIRST_SOURCE, HitDensity, walk_shift
from ._learned import NUM_STEPS, SHARED, Learned, age_bin, class_after
from ._twin_py import PythonPolicy, Victims, evictable, require

# Records that the hand meets per sampled block of a request, at least one per request.
_VISITS = 4
# Two in seven ghosts are of blocks that were used again.
_REUSED_SHARE = (2, 7)
_MOST_GHOSTS = 2**32 - 2
# The oldest block leaves if its density is at most this many times the least.
_NEARLY = 1.25

# Bin of the age of a block that is stored now.
_STORED = age_bin(1)

#: What was said and the class. Of equals, the lowest leaves first.
_Label = tuple[int, int]
_Ring = OrderedDict[BlockHash, BlockStatus]


@dataclass(slots=True, eq=False)
class _Record:
    """The label of a block and its last use."""

    label: _Label
    last: int  # number of the request
    place: int = -1  # in the walk
    position: int = -1  # in the clock of its ghosts
    is_passed_over: bool = False  # once more, when the clock's hand comes
    is_released: bool = False  # it is not counted, until its next use


@dataclass(slots=True, eq=False)
class _Clock:
    """The hashes of a fixed number of ghosts, and a hand at the next one to forget."""

    num_positions: int
    ghosts: list[BlockHash | None] = field(default_factory=list)  # by position, filled in order
    free: list[int] = field(default_factory=list)  # of the positions, as a stack
    hand: int = 0


class HitDensityCachePolicy(HitDensity, PythonPolicy):
    __doc__ = HitDensity.__doc__
    __slots__ = (
        "_clocks",
        "_counts",
        "_declines",
        "_duel",
        "_ghosts_per_block",
        "_hand",
        "_learned",
        "_most_walked",
        "_num_computed",
        "_records",
        "_rings",
        "_rows",
        "_rule",
        "_sources",
        "_walk",
        "_walked",
    )

    def _open(self, capacity: int, ghosts: float, guard: int) -> None:
        """Construct the policy."""
        self._require_free("__init__")
        self._ghosts_per_block = ghosts
        self._learned = Learned(capacity)
        self._counts = True  # a small cache of the duel reads what another cache learns
        self._declines = True  # blocks sparser than those that they would replace
        self._rule = DENSITY
        most_ghosts = min(int(ghosts * capacity), _MOST_GHOSTS)
        reused = most_ghosts * _REUSED_SHARE[0] // _REUSED_SHARE[1]
        self._clocks: tuple[_Clock, ...] = (_Clock(most_ghosts - reused), _Clock(reused))
        secret = words_of(new_secret())
        self._walked = Sample(walk_shift(capacity), secret)
        # Fewer are sampled, unless the policy holds more than its capacity.
        self._most_walked = 2 * (capacity + most_ghosts >> self._walked.shift) + 64
        self._sources: dict[str, list[int]] = {}  # the hints and the returns of each
        self._rows: dict[_Label, list[float]] = {}  # densities by bin of age
        self._num_computed = 0  # of what is learned, for which they hold
        self._duel: Duel | None = Duel(self, capacity, secret) if guard and capacity else None
        PythonPolicy.__init__(self, capacity)

    def _reset(self) -> None:
        self._records: dict[BlockHash, _Record] = {}
        self._rings: dict[_Label, _Ring] = {}
        self._clocks = tuple(_Clock(clock.num_positions) for clock in self._clocks)
        self._walk: list[BlockHash] = []
        self._hand = 0

    def _small(self, capacity: int) -> HitDensityCachePolicy:
        """Return a small cache without a guard that reads what this one learns."""
        other = HitDensityCachePolicy(capacity, ghosts=self._ghosts_per_block, guard=0)
        other._learned = self._learned
        other._counts = False
        other._declines = self._declines
        other._sources = self._sources
        other._most_walked = 0
        return other

    def _trial_hits(self) -> Mapping[str, float]:
        return {} if self._duel is None else dict(self._duel.hits)

    def _hint_gain(self) -> HintGain | None:
        if self._duel is None or not self._learned.is_hinted:
            return None
        return self._duel.gain(self)

    def _row_without_hints(self, reuse_class: int) -> list[float]:
        return self._row((0, reuse_class))

    @property
    def num_ghosts(self) -> int:
        """Number of hashes remembered after eviction."""
        return sum(len(clock.ghosts) - len(clock.free) for clock in self._clocks)

    def _ring(self, ring_index: int) -> Collection[BlockHash]:
        labels = sorted(self._rings, reverse=True)  # a ChainMap goes through the last first
        return ChainMap(*(self._rings[label] for label in labels if label[1] == ring_index))

    def begun(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the beginning of a request, with the client's hints of the session's return."""
        if type(self).touch is not PythonPolicy.touch:  # a subclass's own
            super().begun(hashes, hints)
            return
        check_hints(hints)
        batch = self._open_batch(hashes, "hashes", "begun")
        self._take_back(batch)
        self._begun(batch, hints)

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, check_hints(hints))

    # -- requests --------------------------------------------------------------------------

    def _touch(self, batch: list[BlockHash]) -> None:
        self._begun(batch, None)

    def _begun(self, batch: list[BlockHash], hints: Hints | None) -> None:
        if not batch:
            return
        said = self._said(hints)
        if said and self._counts:
            self._hints_of(said)[0] += 1
        if self._is_used(batch):
            self._renew(batch)
            self._relabel(batch, said)
        else:
            if self._counts:
                self._learned.request += 1
                self._sample_time(len(batch))
            self._use(batch, said)
            if self._counts:
                self._learned.end_request(len(batch))
        if self._duel is not None:
            self._rule = self._duel.serve(batch, hints, self._resident)

    def _extended(self, batch: list[BlockHash]) -> None:
        self._use(batch, 0)

    def _finished(self, batch: list[BlockHash], hints: Hints | None) -> None:
        said = self._said(hints)
        self._renew(batch)
        if self._relabel(batch, said) and self._counts:
            self._hints_of(said)[0] += 1
        if said and self._duel is not None:
            self._duel.finish(batch, hints)

    def _is_used(self, batch: list[BlockHash]) -> bool:
        """Return whether the present request has used all blocks of a batch."""
        records, request = self._records, self._learned.request
        return all(key in records and records[key].last == request for key in batch)

    def _sample_time(self, length: int) -> None:
        """Let the hand meet records, each of which stands for as many as it passes over."""
        walk, learned, shift = self._walk, self._learned, self._walked.shift
        num_met = min(len(walk), max(1, _VISITS * length >> shift))
        for _ in range(num_met):
            if self._hand >= len(walk):
                self._hand = 0
            record = self._records[walk[self._hand]]
            self._hand += 1
            if not record.is_released:
                said, reuse_class = record.label
                age = learned.request - record.last
                learned.count_time(reuse_class, said, age_bin(age), (len(walk) << shift) / num_met)

    def _use(self, batch: list[BlockHash], said: int) -> None:
        """Count a use of each block that the present request has not used."""
        learned, request = self._learned, self._learned.request
        deepest, last_use, use_class = None, 0, None
        for block_hash in reversed(batch):
            record = self._records.get(block_hash)
            if record is None:
                reuse_class = 0
                if use_class is not None:
                    reuse_class = class_after(request - last_use, use_class)
                record = self._records[block_hash] = _Record((said, reuse_class), request)
                if self._remember(block_hash, record):
                    self._join_walk(block_hash, record)
                continue
            if record.last == request:
                self._to_most_recent(block_hash, record)
                continue
            former, reuse_class = record.label
            if deepest is None:
                deepest = record.last
                if former > SHARED and self._counts and not record.is_released:
                    self._hints_of(former)[1] += 1
            # The use covers all blocks before it, too: this record replaces lost ones.
            if use_class is None or record.last >= last_use:
                last_use, use_class = record.last, reuse_class
            if self._counts and not record.is_released:
                learned.count_use(reuse_class, former, age_bin(request - record.last))
            is_shared = record.last > deepest and learned.is_hinted
            label = (SHARED if is_shared else said, class_after(request - last_use, use_class))
            record.last = request
            record.is_released = False
            self._move(block_hash, record, label)

    def _renew(self, batch: list[BlockHash]) -> None:
        for block_hash in reversed(batch):
            if block_hash in self._records:
                self._to_most_recent(block_hash, self._records[block_hash])

    # -- hints -----------------------------------------------------------------------------

    def _said(self, hints: Hints | None) -> int:
        """Return the number of a hint of a return, 0 for none or if the session ends."""
        if hints is None or hints.expect_s is None:
            return 0
        self._learned.hint()
        if hints.source not in self._sources and len(self._sources) <= MOST_SOURCES:
            self._sources[hints.source] = [0, 0]
        number = [*self._sources, hints.source].index(hints.source)
        step = min(max(floor(2.0 * log2(hints.expect_s) + 0.5), 0), NUM_STEPS - 1)
        source = FIRST_SOURCE + min(number, MOST_SOURCES)
        return 0 if hints.ends else source * NUM_STEPS + step

    def _hints_of(self, said: int) -> list[int]:
        """Return the counts of hints and returns of the source that said so."""
        return [*self._sources.values()][said // NUM_STEPS - FIRST_SOURCE]

    def _relabel(self, batch: list[BlockHash], said: int) -> bool:
        """Label a request's blocks with a hint; return whether the deepest was not yet."""
        deepest = None
        for block_hash in reversed(batch if said else ()):
            record = self._records.get(block_hash)
            if record is None:
                continue
            if deepest is None:
                deepest = record.last
                is_new = record.label[0] != said
            if record.last <= deepest and record.label[0] != SHARED:
                self._move(block_hash, record, (said, record.label[1]))
        return deepest is not None and is_new

    # -- records ---------------------------------------------------------------------------

    def _join_walk(self, block_hash: BlockHash, record: _Record) -> None:
        """Let the hand meet a new record, if it is of the sample and there is room."""
        if len(self._walk) < self._most_walked and self._walked.has(block_hash):
            record.place = len(self._walk)
            self._walk.append(block_hash)

    def _forget(self, block_hash: BlockHash) -> None:
        """Drop a record; the last of the walk takes its place."""
        record = self._records.pop(block_hash)
        if record.place >= 0:
            last = self._walk.pop()
            if last != block_hash:
                self._walk[record.place] = last
                self._records[last].place = record.place

    def _remember(self, block_hash: BlockHash, record: _Record) -> bool:
        """Make a ghost of a block, in place of the next one to forget; False without ghosts."""
        clock = self._clocks[record.label[1] > 0]
        if not clock.num_positions:
            self._forget(block_hash)
            return False
        if not clock.free and len(clock.ghosts) < clock.num_positions:
            clock.free.append(len(clock.ghosts))
            clock.ghosts.append(None)
        is_free = bool(clock.free)
        position = clock.free.pop() if is_free else self._next_to_forget(clock)
        clock.ghosts[position] = block_hash
        record.position = position
        record.is_passed_over = is_free  # the hand may come at once
        return True

    def _next_to_forget(self, clock: _Clock) -> int:
        """Forget the next ghost that is not passed over; return its position."""
        while True:
            position = clock.hand
            clock.hand = (clock.hand + 1) % clock.num_positions
            oldest = clock.ghosts[position]
            if oldest is not None and not self._records[oldest].is_passed_over:
                self._forget(oldest)
                return position
            if oldest is not None:
                self._records[oldest].is_passed_over = False

    def _leave_clock(self, record: _Record, reuse_class: int) -> None:
        """Take a ghost out of the clock of its class."""
        clock = self._clocks[reuse_class > 0]
        clock.ghosts[record.position] = None
        clock.free.append(record.position)

    def _to_most_recent(self, block_hash: BlockHash, record: _Record) -> None:
        record.is_released = False
        if block_hash in self._resident:
            self._rings[record.label].move_to_end(block_hash)
        else:
            record.is_passed_over = True

    def _move(self, block_hash: BlockHash, record: _Record, label: _Label) -> None:
        """Make a block the most recent of another label."""
        former, record.label = record.label, label
        if block_hash in self._resident:
            del self._rings[former][block_hash]
            self._put_on_ring(block_hash, label)
        elif (former[1] > 0) == (label[1] > 0):
            record.is_passed_over = True
        else:
            self._leave_clock(record, former[1])
            self._remember(block_hash, record)

    def _put_on_ring(self, block_hash: BlockHash, label: _Label) -> None:
        self._rings.setdefault(label, OrderedDict())[block_hash] = self._resident[block_hash]

    # -- residence -------------------------------------------------------------------------

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            record = self._records.get(block_hash)
            if record is None:
                record = self._records[block_hash] = _Record((0, 0), self._learned.request)
                self._join_walk(block_hash, record)
            else:
                self._leave_clock(record, record.label[1])
            self._resident[block_hash] = status
            self._put_on_ring(block_hash, record.label)
        if self._duel is not None and blocks:
            self._duel.note_insert(next(iter(blocks)))

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            del self._rings[self._records[block_hash].label][block_hash]
            self._drop(block_hash)
            self._forget(block_hash)

    def _release(self, batch: list[BlockHash]) -> None:
        super()._release(batch)
        for block_hash in batch:
            if block_hash in self._records:
                self._records[block_hash].is_released = True
        if self._duel is not None:
            self._duel.release(batch)

    def make_room(
        self, hashes: Iterable[bytes], num_free: int, protected: Iterable[bytes]
    ) -> tuple[int, Victims]:
        """Decide how many of `hashes` to store, and evict for them; never refuse the store."""
        self._require_ready()
        # A copy: `protected` may be an iterator that changes the caller's list.
        batch = list(as_batch(hashes))
        num_free = check_int("num_free", num_free, 0)
        guarded = self._open_batch(protected, "protected", "make_room")
        return self._make_room(batch, num_free, set(guarded))

    def _make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims]:
        """Admit the leading blocks that are denser than the blocks that they replace.

        By recency admit all, or none if there is no room for all. Above a tier admit the leading
        blocks for which others may leave.
        """
        leaving = self._in_order_of_leaving(protected)
        victims: list[BlockHash] = []
        num_admitted = min(num_free, len(hashes))
        for block_hash in hashes[num_admitted:]:
            victim, density = next(leaving, (None, 0.0))
            if victim is None:
                break
            # A continuation is no denser than its prefix: the first block to fail decides. Released
            # blocks have no density.
            if density and self._declines and self._rule == DENSITY:
                record = self._records.get(block_hash)
                if density >= self._row((0, 0) if record is None else record.label)[_STORED]:
                    break
            victims.append(victim)
            num_admitted += 1
        if self._declines and self._rule == LRU and num_admitted < len(hashes):
            num_admitted, victims = 0, []
        return num_admitted, self._let_go(victims)

    def set_declining(self, allowed: bool) -> None:
        """Allow or forbid the policy to decline blocks that it could make room for."""
        super().set_declining(allowed)
        self._declines = allowed
        if self._duel is not None:
            self._duel.set_declining(allowed)

    def _evict(self, n: int, protected: Collection[BlockHash]) -> Victims | None:
        victims = [victim for victim, _ in islice(self._in_order_of_leaving(protected), n)]
        return self._let_go(victims) if len(victims) == n else None

    def _let_go(self, victims: list[BlockHash]) -> Victims:
        """Make ghosts of the victims; a store begins."""
        if self._duel is not None:
            self._duel.begin_store()
        evicted = [(block_hash, self._drop(block_hash)) for block_hash in victims]
        for block_hash in victims:
            record = self._records[block_hash]
            del self._rings[record.label][block_hash]
            self._remember(block_hash, record)
        return evicted

    def _in_order_of_leaving(
        self, protected: Collection[BlockHash]
    ) -> Iterator[tuple[BlockHash, float]]:
        """Yield the blocks that may leave with their densities, in the order of the rule."""
        released = self._choose_released(len(self._resident), protected)
        for block_hash in released:
            yield block_hash, 0.0
        tails = {label: evictable(ring, protected, released) for label, ring in self._rings.items()}
        oldest: dict[_Label, tuple[float, int, BlockHash]] = {}  # that may leave, by label
        changed = list(tails)
        while True:
            for label in changed:
                eldest, _ = next(tails[label], (None, None))
                if eldest is None:
                    oldest.pop(label, None)
                    continue
                last = self._records[eldest].last
                # Its next chance is the next request.
                density = self._row(label)[age_bin(self._learned.request - last + 1)]
                oldest[label] = density, last, eldest
            if not oldest:
                return
            by_age = [(oldest[label][1], label) for label in oldest]
            if self._rule == LRU:
                leaves = min(by_age)[1]
            else:
                leaves = min((oldest[label][:2], label) for label in oldest)[1]
                if leaves[0] <= SHARED:
                    other = min(age for age in by_age if age[1][0] <= SHARED)[1]
                    if oldest[other][0] <= _NEARLY * oldest[leaves][0]:
                        leaves = other
            changed = [leaves]
            yield oldest[leaves][2], oldest[leaves][0]

    def _row(self, label: _Label) -> list[float]:
        """Return the densities of a label by bin of age, as computed last."""
        learned = self._learned
        if self._num_computed != learned.num_computed:
            self._num_computed = learned.num_computed
            self._rows.clear()
        if label not in self._rows:
            learned.compute_row(label[1], label[0])
            self._rows[label] = list(learned.row)
        return self._rows[label]

    def _clear(self) -> None:
        super()._clear()
        if self._counts:
            self._learned.clear()
            self._sources.clear()
            self._rule = DENSITY
        if self._duel is not None:
            self._duel.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        for label in sorted(self._rings):
            yield from self._rings[label].values()

    def _check(self) -> None:
        super()._check()
        for block_hash, record in self._records.items():
            require(record.last <= self._learned.request, "no block was used in the future")
            if block_hash in self._resident:
                require(block_hash in self._rings[record.label], "a label has its block")
                continue
            ghosts = self._clocks[record.label[1] > 0].ghosts
            require(ghosts[record.position] == block_hash, "a ghost is at its position")
        require(sum(map(len, self._rings.values())) == len(self._resident), "rings are residents")
        filled = sum(ghost is not None for clock in self._clocks for ghost in clock.ghosts)
        require(filled == self.num_ghosts, "the clocks hold the ghosts and nothing else")
        require(len(self._records) == len(self._resident) + filled, "records are in use")
        for place, block_hash in enumerate(self._walk):
            require(self._records[block_hash].place == place, "a record stands in its place")
        for block_hash in self._released:
            require(self._records[block_hash].is_released, "what leaves first is not counted")
        if self._duel is not None:
            self._duel._check()
