"""Hit density: evict, or do not store, the blocks that bring the fewest hits for their slots.

After LHD (Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density",
NSDI'18), with its own admission rule; ``_densities_py`` learns the densities.

Structure
    One ring per class of blocks, least recent first, so the least dense block is one of the oldest.
    Class 0 has a second ring: densities do not count an immediate repeat of a request as a use, but
    ARC's rule, while the guard follows it, has its blocks in T2.
    If a client says when its session returns, the blocks of the request belong to a *turn* and are
    on rings of ``_turns_py``, ranked by the statistics of ``_returns_py``, until another request
    uses them. A block that was used after the deepest known block of a request is shared by
    sessions and never belongs to a turn again. The first such hint creates these structures, a
    second set of densities, which count every block by class and last use, and the guard's trial
    that reads them. Two clocks of ghosts, which are records of blocks that are not resident: one of
    blocks never used again and one of the others. A ghost that was touched in its place is skipped
    once.
Differs from the paper
    The oldest blocks of the rings are compared, not a random sample. A block enters only if it is
    denser than the one that it would replace. If the oldest block of all is nearly as sparse as the
    sparsest, the oldest leaves. Above a tier nothing is declined while a block may leave: the tier
    is offered only blocks stored here, and is read through slots of this cache.
Hints
    The density of a block of a turn is per request, by the recent mean time between requests. Its
    candidates are compared with the oldest of the other rings; of equal ones the older leaves. A
    hint at the finish that equals the one at the beginning only adds the blocks of the answer to
    the turn; a different hint begins a turn then, unless other requests have used the blocks since.
    An immediate repeat of a request is not a return, and its hint counts as one at the finish. If
    the session ends, a hint of its return is ignored. Blocks whose ghost was lost before they are
    stored belong to no turn. Released blocks are not counted: their ages end at the release, and
    neither their eviction nor their next use counts. They stay on their rings.
    Under the rule of another trial, the oldest block of each ring of turns is a candidate like
    those of the other rings, by class and last use; ARC's T1 holds the blocks of class 0 of both
    kinds.
Invariants
    ``_records`` holds a record of every resident block and every ghost. A resident block is on a
    ring of its record's class; a ghost is in the clock of its class at its record's position. A
    prefix was used at least as recently and as often as its continuation, so it is at least as
    dense: a chain leaves last block first.
Cost
    insert, remove, get O(1); touch O(n); make_room and evict O(n + blocks skipped), with the 16
    rings as a constant. Nothing but the sample of the guard is random.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from time import monotonic

from kvoffload._checks import as_batch, check_cache_capacity, check_int
from kvoffload.types import BlockHash, BlockStatus, HintGain, Hints, HintSource

from . import registry
from ._densities_py import Densities, SharedDensities, age_bin, class_after
from ._guard_py import ARC, HIT_DENSITY, LRU, PLAIN, DensityTrial, Guard, sample_shift
from ._returns_py import Returns, said_seconds
from ._tails import Measure, Tail, by_arc, by_density, least_recent
from ._turns_py import AGAIN, NUM_HALF_OCTAVES, Part, Turn, TurnRings
from ._twin_py import PythonPolicy, Victims, evictable, may_leave, require
from ._views import BlocksView

# Rings from the sparsest on, if densities tie: longer gaps first, then fewer uses.
_SPARSEST_FIRST = (0, AGAIN, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8)
# Two in seven ghosts are of blocks that were used again.
_REUSED_SHARE = (2, 7)
_MOST_GHOSTS = 2**32 - 2
_NOT_A_GHOST = -1
_STORED = age_bin(1)
# Number of places per class for ties: one per ring of turns, and one more.
_PLACES = 2048

_Ring = OrderedDict[BlockHash, BlockStatus]
#: A hint of a return: T in seconds, and the number of the source.
_Said = tuple[float, int]


@dataclass(slots=True, eq=False)
class _Record:
    """The last use of a block, and its class by the uses before that."""

    reuse_class: int
    last: int  # number of the request
    position: int = _NOT_A_GHOST  # in the clock
    passed_over: bool = False  # a ghost to skip once
    declined: bool = False  # a ghost that was not stored since its last touch
    is_again: bool = False  # on the ring AGAIN; its class is 0
    part: Part | None = None  # of its turn
    is_shared: bool = False  # used by several sessions: it belongs to no turn any more
    is_released: bool = False  # its age is not counted, until its next use

    @property
    def ring(self) -> int:
        """Ring of a resident block."""
        return AGAIN if self.is_again else self.reuse_class


@dataclass(slots=True, eq=False)
class _Clock:
    """The hashes of a fixed number of ghosts, and a hand at the next one to forget."""

    num_positions: int
    ghosts: list[BlockHash | None] = field(default_factory=list)  # by position, filled in order
    hand: int = 0


class HitDensityCachePolicy(PythonPolicy):
    """A policy that evicts the block with the fewest expected hits, and stores none with fewer.

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
        "_plain",
        "_records",
        "_request",
        "_returns",
        "_rings",
        "_turns",
    )

    _returns: Returns | None
    _plain: Densities | None

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
        self._declines = True  # blocks sparser than those that they would replace
        # From the first hint of a return on: the statistics of returns and, for the guard, the
        # densities of all blocks by class and last use only.
        self._returns = None
        self._plain = None
        self._turns = TurnRings()
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
        """Whether LRU or ARC may be followed, as given; 0 if the capacity is 0."""
        return int(self._guard is not None)

    @property
    def rule(self) -> str:
        """The followed policy: ``hit-density``, ``plain``, ``lru`` or ``arc-classic``.

        ``plain`` is hit density without hints.
        """
        return self._guard.rule if self._guard is not None else HIT_DENSITY

    @property
    def trial_hits(self) -> Mapping[str, float]:
        """Recent hits of each policy on the sample, fading; empty without a guard."""
        return self._guard.hits if self._guard is not None else {}

    @property
    def hint_sources(self) -> tuple[HintSource, ...]:
        """Facts on each source that says when sessions return, in the order of first hints.

        16 are distinguished; an entry without a name after them stands for all others.
        """
        returns = self._returns  # which another thread may reset
        return () if returns is None else returns.seen()

    @property
    def hint_gain(self) -> HintGain | None:
        """Gain by hints of returns; None without a guard, a hint, or enough requests since."""
        return self._guard.gain if self._guard is not None else None

    @property
    def num_requests(self) -> int:
        """Number of requests so far, the unit of ages."""
        return self._request

    @property
    def rings(self) -> tuple[Mapping[BlockHash, BlockStatus], ...]:
        """Resident blocks by class, with their live statuses, least recent first; read-only.

        The last ring has the blocks of class 0 that ARC's rule treats as used again.
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
        if not self._turns:
            return self._rings[ring_index]
        of_turns = (block_hash for block_hash, _ in self._turns.of_class(ring_index))
        return dict.fromkeys(chain(self._rings[ring_index], of_turns))

    def _ring_holds(self, ring_index: int, block_hash: object) -> bool:
        if type(block_hash) is not bytes or block_hash not in self._resident:
            return False
        return self._records[BlockHash(block_hash)].ring == ring_index

    def begun(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the beginning of a request, with the client's hints of the session's return."""
        if type(self).touch is not PythonPolicy.touch:  # a subclass's own
            super().begun(hashes, hints)
            return
        self._require_ready()
        batch = as_batch(hashes)
        self._require_free("begun")
        self._take_back(batch)
        self._begun(batch, hints, None)

    def finished(self, hashes: Sequence[bytes], hints: Hints | None = None) -> None:
        """Handle the end of a request: its blocks become recent, and no use is counted."""
        self._finish_alone(hashes, hints)

    # -- uses ------------------------------------------------------------------------------

    def _touch(self, batch: list[BlockHash]) -> None:
        self._serve(batch, None, None)

    def _begun(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        said = self._said(hints)
        if self._returns is not None and batch:
            now = monotonic() if now is None else now
            self._returns.begin(now)
        self._serve(batch, said, now, ends=hints is not None and hints.ends)

    def _extended(self, batch: list[BlockHash]) -> None:
        self._use(batch)

    def _finished(self, batch: list[BlockHash], hints: Hints | None, now: float | None) -> None:
        said = self._said(hints)
        own = [] if said is None else self._own(batch)  # before all become recent
        if self._repeats_request(batch):
            self._renew(batch)
        else:
            self._use(batch, finishes=True)
        if said is None or self._returns is None:
            return
        turn = self._turn_with(own, said)
        if turn is None:
            turn = self._returns.turn(*said, monotonic() if now is None else now)
            if self._guard is not None:
                self._guard.say(batch, turn)
        self._join(own, turn)

    def _serve(
        self, batch: list[BlockHash], said: _Said | None, now: float | None, *, ends: bool = False
    ) -> None:
        """Count a request; `now` is None if the caller gave no time."""
        if not batch:
            return
        turn = None
        if self._repeats_request(batch):
            self._renew(batch)
            if self.rule == ARC:
                self._use_at_once(batch)
            if self._returns is not None and said is not None and now is not None:
                own = self._own(batch)
                turn = self._turn_with(own, said) or self._returns.turn(*said, now)
                self._join(own, turn)
            num_stored = self._num_stored(batch)
        else:
            self._request += 1
            latest = None
            if self._returns is not None:
                latest = self._return(batch, is_timed=now is not None)
                if said is not None and now is not None:
                    turn = self._returns.turn(*said, now)
            num_stored = self._use(batch, turn=turn, latest=latest)
            self._end_request(len(batch))
        if self._guard is not None:
            mean_length = self._densities.mean_length
            self._guard.serve(batch, num_stored, self._resident, mean_length, turn, ends=ends)

    def _end_request(self, length: int) -> None:
        factor = self._densities.end_request(length, self._request)
        if self._plain is not None:
            self._plain.end_request(length, self._request)
        if self._returns is not None and factor is not None:
            self._returns.compute(self._densities.prior)
            self._returns.decay(factor)

    def _use(
        self,
        batch: list[BlockHash],
        *,
        finishes: bool = False,
        turn: Turn | None = None,
        latest: int | None = None,
    ) -> int:
        """Count a use of each block, or no use if the request only `finishes`.

        The blocks belong to `turn` from now on, or to none; blocks that were used after request
        `latest` never belong to a turn again. Returns the number of leading blocks not being
        stored.
        """
        request, records = self._request, self._records
        last_use, use_class = 0, None
        num_stored = len(batch)
        for index in range(len(batch) - 1, -1, -1):
            block_hash = batch[index]
            record = records.get(block_hash)
            if record is None:
                record = _Record(0, request)
                if use_class is not None:
                    record.reuse_class = class_after(request - last_use, use_class)
                if turn is not None:
                    record.part = turn.part(record.reuse_class)
                self._count_start(record)
                records[block_hash] = record
                self._remember(block_hash, record)
                continue
            if record.last == request:  # a repeat within the batch
                self._to_most_recent(block_hash, record)
                continue
            if latest is not None and record.last > latest:
                record.is_shared = True
            # The use covers all blocks before it, too: this record replaces lost ones.
            if use_class is None or record.last >= last_use:
                last_use, use_class = record.last, record.reuse_class
            is_counted = self._end_age(record)
            being_stored = self._is_being_stored(block_hash, record)
            if being_stored:
                num_stored = index
            if finishes or being_stored:
                record.last = request
                if not finishes:
                    self._belong(block_hash, record, turn)
                self._count_start(record)
                self._to_most_recent(block_hash, record)
            else:
                if is_counted:
                    self._count_reuse(record, request - record.last)
                self._reuse(block_hash, record, class_after(request - last_use, use_class), turn)
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
        """Return the number of leading blocks that are not being stored."""
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
        if record.is_released:
            record.is_released = False
            self._count_start(record)
        if record.position == _NOT_A_GHOST:
            self._place(record).move_to_end(block_hash)

    def _use_at_once(self, batch: list[BlockHash]) -> None:
        """Move the blocks of an immediately repeated request to ARC's T2."""
        for block_hash in reversed(batch):
            record = self._records[block_hash]
            status = self._resident.get(block_hash)
            if status is not None and record.ring == 0 and status.ref_cnt >= 0:
                self._take_off(block_hash, record)
                record.is_again = True
                self._change_part(record)
                self._put_on(block_hash, record, status)

    def _is_being_stored(self, block_hash: BlockHash, record: _Record) -> bool:
        """Return whether a block is being stored, or was declined since its last touch."""
        if record.position == _NOT_A_GHOST:
            return self._resident[block_hash].ref_cnt < 0
        return record.declined

    def _reuse(
        self, block_hash: BlockHash, record: _Record, reuse_class: int, turn: Turn | None
    ) -> None:
        """Set the class, turn and last use of a block that is used again."""
        record.last = self._request
        if record.position == _NOT_A_GHOST:
            status = self._take_off(block_hash, record)
            self._classify(record, reuse_class, turn)
            self._put_on(block_hash, record, status)
        elif record.reuse_class:
            self._classify(record, reuse_class, turn)
            record.passed_over = True
        else:
            self._leave_clock(record)
            self._classify(record, reuse_class, turn)
            self._remember(block_hash, record)

    def _classify(self, record: _Record, reuse_class: int, turn: Turn | None) -> None:
        """Start an age."""
        record.is_again = False
        record.reuse_class = reuse_class
        record.part = None if turn is None or record.is_shared else turn.part(reuse_class)
        self._count_start(record)

    # -- turns -----------------------------------------------------------------------------

    def _said(self, hints: Hints | None) -> _Said | None:
        """Return the hint of a return, or None if the session ends."""
        if hints is None or hints.expect_s is None:
            return None
        if self._returns is None:
            self._returns = Returns()
            if self._guard is not None:
                self._plain = self._densities.copy()
                self._guard.divide(self._returns, self._plain)
        source = self._returns.number_of(hints.source)
        return None if hints.ends else (said_seconds(hints.expect_s), source)

    def _return(self, batch: list[BlockHash], *, is_timed: bool) -> int | None:
        """Count a return to the turn of the deepest known block; return that block's last use."""
        deepest = self._deepest(batch)
        if deepest is None:
            return None
        part = None if deepest.is_released else deepest.part
        if is_timed and part is not None and self._returns is not None:
            self._returns.count_return(part.turn)
        return deepest.last

    def _deepest(self, batch: list[BlockHash]) -> _Record | None:
        """Return the record of the deepest known block."""
        records = (self._records.get(block_hash) for block_hash in reversed(batch))
        return next((record for record in records if record is not None), None)

    def _own(self, batch: list[BlockHash]) -> list[BlockHash]:
        """Return the blocks of a request except those used after the deepest known one."""
        deepest = self._deepest(batch)
        if deepest is None:
            return batch
        latest = deepest.last
        records = self._records
        return [block for block in batch if block not in records or records[block].last <= latest]

    def _turn_with(self, own: list[BlockHash], said: _Said) -> Turn | None:
        """Return the turn of a request's own blocks, if it began with the same hint."""
        records = (self._records.get(block_hash) for block_hash in reversed(own))
        parts = (record.part for record in records if record is not None)
        turns = (part.turn for part in parts if part is not None)
        return next((turn for turn in turns if (turn.said, turn.source) == said), None)

    def _join(self, own: list[BlockHash], turn: Turn) -> None:
        """Add a request's own blocks to a turn, except those that sessions share."""
        for block_hash in reversed(own):
            record = self._records.get(block_hash)
            if record is None or record.is_shared:
                continue
            if record.part is None or record.part.turn is not turn:
                is_counted = self._end_age(record)
                self._belong(block_hash, record, turn)
                record.is_released = not is_counted
                if is_counted:
                    self._count_start(record)
            if record.position == _NOT_A_GHOST:
                self._place(record).move_to_end(block_hash)

    def _belong(self, block_hash: BlockHash, record: _Record, turn: Turn | None) -> None:
        """Assign a block to a turn or none; its age is not counted meanwhile."""
        part = None if turn is None or record.is_shared else turn.part(record.ring)
        if part is record.part:
            return
        if record.position == _NOT_A_GHOST:
            status = self._take_off(block_hash, record)
            record.part = part
            self._put_on(block_hash, record, status)
        else:
            record.part = part

    def _change_part(self, record: _Record) -> None:
        """Move a block that is on no ring to the part of its turn on its ring."""
        if record.part is None:
            return
        if not record.is_released:
            self._count_end(record)
        record.part = record.part.turn.part(record.ring)
        if not record.is_released:
            self._count_start(record)

    # -- counting --------------------------------------------------------------------------

    def _end_age(self, record: _Record) -> bool:
        """End an age; return whether it was counted, unlike those of released blocks."""
        if record.is_released:
            record.is_released = False
            return False
        self._count_end(record)
        return True

    def _count_start(self, record: _Record) -> None:
        if record.part is not None and self._returns is not None:
            self._returns.start(record.part)
        else:
            self._densities.start(record.reuse_class, record.last)
        if self._plain is not None:
            self._plain.start(record.reuse_class, record.last)

    def _count_end(self, record: _Record) -> None:
        if record.part is not None and self._returns is not None:
            self._returns.end(record.part)
        else:
            self._densities.end(record.reuse_class, record.last)
        if self._plain is not None:
            self._plain.end(record.reuse_class, record.last)

    def _count_reuse(self, record: _Record, age: int) -> None:
        if record.part is not None and self._returns is not None:
            self._returns.count_reuse(record.part)
        else:
            self._densities.count_reuse(record.reuse_class, age)
        if self._plain is not None:
            self._plain.count_reuse(record.reuse_class, age)

    def _count_drop(self, record: _Record) -> None:
        age = self._request - record.last
        if record.part is not None and self._returns is not None:
            self._returns.count_drop(record.part)
        else:
            self._densities.count_drop(record.reuse_class, age)
        if self._plain is not None:
            self._plain.count_drop(record.reuse_class, age)

    # -- ghosts ----------------------------------------------------------------------------

    def _ghost(self, block_hash: BlockHash) -> _Record | None:
        record = self._records.get(block_hash)
        return None if record is None or record.position == _NOT_A_GHOST else record

    def _remember(self, block_hash: BlockHash, record: _Record) -> None:
        """Turn a record into a ghost, in place of the next ghost to forget."""
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
        """Drop a record; the end of its age stays unknown."""
        if not record.is_released:
            self._count_drop(record)
        self._end_age(record)
        del self._records[block_hash]

    def _leave_clock(self, record: _Record) -> None:
        """Take a ghost out of its clock."""
        self._clocks[record.reuse_class > 0].ghosts[record.position] = None
        record.position = _NOT_A_GHOST
        record.passed_over = False
        self._num_ghosts -= 1

    # -- residence -------------------------------------------------------------------------

    def _place(self, record: _Record) -> _Ring:
        """Return the ring, or part of a turn, that holds a resident block."""
        return self._rings[record.ring] if record.part is None else record.part.blocks

    def _take_off(self, block_hash: BlockHash, record: _Record) -> BlockStatus:
        if record.part is not None:
            return self._turns.take(record.part, block_hash)
        return self._rings[record.ring].pop(block_hash)

    def _put_on(self, block_hash: BlockHash, record: _Record, status: BlockStatus) -> None:
        """Make a block the most recent of its ring or of its turn's."""
        if record.part is not None:
            self._turns.add(record.part, block_hash, status)
        else:
            self._rings[record.ring][block_hash] = status

    def _release(self, batch: list[BlockHash]) -> None:
        super()._release(batch)
        for block_hash in batch:
            record = self._records.get(block_hash)
            if record is not None:
                self._end_age(record)
                record.is_released = True
        if self._guard is not None:
            self._guard.release(batch)

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
            self._guard.set_declining(allowed)

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        for block_hash, status in blocks.items():
            record = self._records.get(block_hash)
            if record is None:
                record = self._records[block_hash] = _Record(0, self._request)
                self._count_start(record)
            else:
                self._leave_clock(record)
            record.declined = False
            self._resident[block_hash] = status
            self._put_on(block_hash, record, status)
        if self._guard is not None and blocks:
            self._guard.note_insert(next(iter(blocks)))

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        for block_hash in hashes:
            record = self._records[block_hash]
            self._end_age(record)
            self._take_off(block_hash, record)
            self._drop(block_hash)
            del self._records[block_hash]

    def _make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, Victims]:
        if self.rule in (HIT_DENSITY, PLAIN) or not self._declines:
            num_admitted, victims = self._admit(hashes, num_free, protected)
        else:
            num_admitted, victims = self._admit_all(hashes, num_free, protected)
        return self._take_in(hashes, num_admitted, victims)

    def _take_in(
        self, hashes: list[BlockHash], num_admitted: int, victims: list[BlockHash]
    ) -> tuple[int, Victims]:
        """Evict the victims for the leading blocks, and mark the others as declined."""
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
        """Admit the leading blocks that are denser than the blocks that they replace.

        If nothing is declined, admit the leading blocks for which others may leave.
        """
        candidates = self._in_order_of_leaving(protected)
        victims: list[BlockHash] = []
        num_admitted = min(num_free, len(hashes))
        for block_hash in hashes[num_admitted:]:
            victim, density = next(candidates, (None, 0.0))
            if victim is None:
                break
            ghost = self._ghost(block_hash)
            # A continuation is no denser than its prefix: the first block to fail decides.
            if self._declines and density >= self._stored_density(ghost):
                break
            victims.append(victim)
            num_admitted += 1
        return num_admitted, victims

    def _stored_density(self, ghost: _Record | None) -> float:
        """Return the density of a block that is stored now."""
        reuse_class = 0 if ghost is None else ghost.reuse_class
        if self.rule == PLAIN and self._plain is not None:
            return self._plain.table[reuse_class][_STORED]
        if ghost is not None and ghost.part is not None and self._returns is not None:
            return self._returns.stored_density(ghost.part)
        return self._densities.table[reuse_class][_STORED]

    def _admit_all(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, list[BlockHash]]:
        """Admit all blocks, as LRU and ARC do, or none if there is no room for all."""
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
        released = self._choose_released(len(self._resident), protected)
        for block_hash in released:
            yield block_hash, 0.0
        rule = self.rule
        if rule == HIT_DENSITY:
            tails = self._tails(protected, released, self._measure_by(self._densities))
            yield from by_density(tails, self._tails_of_turns(protected, released))
            return
        measure = self._measure_by(self._plain or self._densities)
        again = self._tails_of_all(_SPARSEST_FIRST[1:], protected, released, measure)
        once = self._tails_of_all(_SPARSEST_FIRST[:1], protected, released, measure)
        if rule == PLAIN:
            yield from by_density(once + again, [])
        elif rule == LRU:
            yield from least_recent(once + again)
        elif self._guard is not None:
            t1_size = len(self._rings[0]) + self._turns.num_blocks(0)
            # The blocks that replace them enter T1.
            t1_size += sum(self._records[block_hash].ring != 0 for block_hash in released)
            yield from by_arc(once, again, t1_size, self._guard.target_t1_size)

    def _tails(
        self,
        protected: Collection[BlockHash],
        released: Collection[BlockHash],
        measure: Measure,
        rings: Sequence[int] = _SPARSEST_FIRST,
    ) -> list[Tail]:
        """Return the tails of the rings of blocks that belong to no turn."""
        return [
            Tail(
                _PLACES * _SPARSEST_FIRST.index(ring),
                evictable(self._rings[ring], protected, released),
                measure,
            )
            for ring in rings
        ]

    def _tails_of_turns(
        self, protected: Collection[BlockHash], released: Collection[BlockHash]
    ) -> list[Tail]:
        """Return two tails for each ring of turns: of the oldest turn and of the youngest."""
        tails = []
        for key in self._turns.rings:
            for side, blocks in enumerate(
                (self._turns.oldest_first(key), self._turns.youngest_first(key))
            ):
                leaving = _leaving(blocks, protected, released)
                tails.append(Tail(2 * key + side, leaving, self._measure_by_return))
        return tails

    def _tails_of_all(
        self,
        rings: Sequence[int],
        protected: Collection[BlockHash],
        released: Collection[BlockHash],
        measure: Measure,
    ) -> list[Tail]:
        """Return the tails of some rings and of the rings of turns with these classes."""
        tails = self._tails(protected, released, measure, rings)
        for key in self._turns.rings:
            others, half_octave = divmod(key, NUM_HALF_OCTAVES)
            source, ring = divmod(others, AGAIN + 1)
            if ring in rings:
                place = _PLACES * _SPARSEST_FIRST.index(ring)
                place += 1 + source * NUM_HALF_OCTAVES + half_octave
                blocks = _leaving(self._turns.oldest_first(key), protected, released)
                tails.append(Tail(place, blocks, measure))
        return tails

    def _measure_by(self, densities: Densities) -> Measure:
        """Return a function of a block's last use and of its density by last use and class."""
        table, records, request = densities.table, self._records, self._request

        def measure(block_hash: BlockHash) -> tuple[int, float]:
            record = records[block_hash]
            # Its next chance is the next request.
            return record.last, table[record.reuse_class][age_bin(request - record.last + 1)]

        return measure

    def _measure_by_return(self, block_hash: BlockHash) -> tuple[int, float]:
        """Return a block's last use and its density by its session's return."""
        record = self._records[block_hash]
        if record.part is None or self._returns is None:
            return record.last, 0.0
        return record.last, self._returns.density(record.part)

    def _let_go(self, victims: list[BlockHash]) -> Victims:
        """Make ghosts of the victims."""
        evicted = [(block_hash, self._drop(block_hash)) for block_hash in victims]
        for block_hash in victims:
            record = self._records[block_hash]
            self._take_off(block_hash, record)
            if record.is_again:
                record.is_again = False
                self._change_part(record)
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
        self._turns.clear()
        self._returns = self._plain = None
        self._request = self._num_ghosts = 0
        if self._guard is not None:
            self._guard.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        for ring in _SPARSEST_FIRST:
            yield from self._rings[ring].values()
            for _, status in self._turns.of_class(ring):
                yield status

    def _check(self) -> None:
        super()._check()
        ages: dict[int, list[int]] = {}
        ages_of_all: dict[int, list[int]] = {}
        living: dict[Part, int] = {}
        num_ghosts = 0
        for block_hash, record in self._records.items():
            if not record.is_released:
                ages_of_all.setdefault(record.reuse_class, []).append(record.last)
                if record.part is None:
                    ages.setdefault(record.reuse_class, []).append(record.last)
                else:
                    living[record.part] = living.get(record.part, 0) + 1
            require(record.last <= self._request, "no block was used in the future")
            require(not (record.is_shared and record.part), "shared blocks belong to no turn")
            if record.part is not None:
                require(record.part.ring == record.ring, "a block is of its part's class")
            if record.position == _NOT_A_GHOST:
                status = self._place(record).get(block_hash)
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
        on_rings = sum(map(len, self._rings)) + len(self._turns)
        require(on_rings == len(self._resident), "resident is all rings")
        require(len(self._records) == len(self._resident) + num_ghosts, "every record is in use")
        for block_hash in self._released:
            require(self._records[block_hash].is_released, "what leaves first is counted nowhere")
        self._turns._check()
        self._densities._check(ages)
        if self._plain is not None:
            self._plain._check(ages_of_all)
        if self._returns is not None:
            self._check_returns(self._returns, living)
        if self._guard is not None:
            self._guard._check()

    def _check_returns(self, returns: Returns, living: dict[Part, int]) -> None:
        returns._check(living)


def _leaving(
    blocks: Iterator[tuple[BlockHash, BlockStatus]],
    protected: Collection[BlockHash],
    released: Collection[BlockHash],
) -> Iterator[tuple[BlockHash, BlockStatus]]:
    """Yield the blocks that may leave and are not released."""
    for block_hash, status in blocks:
        if may_leave(block_hash, status, protected) and block_hash not in released:
            yield block_hash, status


class _Trial(HitDensityCachePolicy, DensityTrial):
    """A small cache of hit density for the guard of another policy, whose densities it reads."""

    __slots__ = ("_turn",)

    _turn: Turn | None  # begun by the request being served

    def __init__(self, cache_capacity: int, ghosts: float, learned: Densities) -> None:
        super().__init__(cache_capacity, ghosts=ghosts, guard=0)
        self._densities = SharedDensities(learned)
        self._turn = None

    def begin_turn(self, turn: Turn | None) -> None:
        """Let the next request begin a turn, or none."""
        self._turn = turn

    def join(self, batch: list[BlockHash], turn: Turn) -> None:
        """Apply a later hint of the return of a request's session."""
        self._join(self._own(batch), turn)

    def heed(self, returns: Returns) -> None:
        """Rank blocks by the statistics of returns, too."""
        self._returns = returns

    def copy(self, learned: Densities) -> _Trial:
        """Return a copy with the same blocks and ghosts, without turns, that reads `learned`."""
        other = _Trial(self._cache_capacity, self._ghosts, learned)
        other._declines = self._declines
        other._request, other._num_ghosts = self._request, self._num_ghosts
        for clock, same in zip(self._clocks, other._clocks, strict=True):
            same.ghosts[:] = clock.ghosts
            same.hand = clock.hand
        for block_hash, record in self._records.items():
            other._records[block_hash] = replace(record)
        for block_hash, status in self._resident.items():
            other._resident[block_hash] = BlockStatus(status.block_id)
            other._resident[block_hash].ref_cnt = status.ref_cnt
        for ring, copied in zip(self._rings, other._rings, strict=True):
            for block_hash in ring:
                copied[block_hash] = other._resident[block_hash]
        other._released.update(self._released)
        return other

    def _touch(self, batch: list[BlockHash]) -> None:
        # The present request of the guarded policy.
        self._request = self._densities.request
        latest = None if self._returns is None else self._return(batch, is_timed=False)
        self._use(batch, turn=self._turn, latest=latest)

    def _count_start(self, record: _Record) -> None:
        """Do nothing: the guarded policy counts."""

    def _count_end(self, record: _Record) -> None:
        """Do nothing."""

    def _count_reuse(self, record: _Record, age: int) -> None:
        """Do nothing."""

    def _count_drop(self, record: _Record) -> None:
        """Do nothing."""

    def _check_returns(self, returns: Returns, living: dict[Part, int]) -> None:
        """Do nothing: the guarded policy does this."""
