"""Observation of a manager, in Python: the shadow of a sample, and the open transfers.

Structure
    A block is sampled if 24 bits of its keyed hash are below a threshold; two of them select its
    quarter. Each quarter is a list of fingerprints, most recent first, cut into segments: LRU would
    hold the blocks up to segment ``i`` at size ``i``. Here each segment is a dict, and its overflow
    moves on to the next. A reset moves all blocks to one more segment at the end: no size would
    hold them any longer, but their fates are remembered until new blocks need the room.
Invariants
    No segment holds more than its room, nor a list more than that of the largest size. Nothing here
    changes a decision of the manager.
    A manager notifies the watch last, so that a failed call is never counted. An exception from
    outside the call (KeyboardInterrupt, MemoryError) may leave the watch in an intermediate state.
Cost
    O(1) per sampled block and size; a block that is not sampled costs only its hash.
Source
    Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015. Differs from it: the
    rate is fixed, and the sample is split into quarters, from which the error is estimated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic, monotonic_ns
from typing import Any

from kvoffload._sampling import hash_key, new_secret, sample_of, words_of
from kvoffload.types import MOST_SOURCES, BlockHash, BlockStatus, Hints

from ._watching import (
    BROKEN_PREFIX,
    CAUSES,
    DECLINED,
    EVICTED,
    FAILED,
    FINISHED,
    LOAD,
    NEVER_OR_LONG_AGO,
    OTHERS,
    PENDING,
    REFUSED,
    RELEASED,
    RESET,
    STORE,
    STORED,
    UNKNOWN,
    SampledRequest,
    Watching,
    WatchPlan,
)

AGE_BINS = 256
"""Bins of the histograms of ages: eight for each doubling of the age in ms."""

DRAIN_KEYS = 256
"""Sampled keys, and requests with such keys, after which a watch takes them."""

MOST_KEYS = 2**14
"""Most sampled keys, and requests, collected if no lookup lets the watch take them."""

MOST_OPEN = 4096
MOST_OPEN_BLOCKS = 2**18
"""Most transfers, and blocks of them, in the ledger; further ones are only counted."""

LAG_STEPS = 16.0
"""Stores over which the lag is averaged."""

Find = Callable[[BlockHash], BlockStatus | None]

_TICKS = 2**32


def age_bin(age: int) -> int:
    """Return the bin of an age in ms: exact below 8, then eight bins for each doubling."""
    if age < 8:
        return age
    exponent = age.bit_length() - 1
    return (exponent - 2) * 8 + (age >> (exponent - 3) & 7)


@dataclass(slots=True, eq=False)
class Record:
    """The history of a sampled block that is on the list; times in ms, modulo 2**32."""

    last_use: int = 0
    changed: int = 0  # time of its fate: when it was stored or evicted
    fate: int = UNKNOWN
    used: bool = False  # since it was stored


class WatchCore:
    """The observer of one manager."""

    waits_for_stores = False
    """Whether a lookup waits for a block being stored, as in vLLM; here such a block misses."""

    block_tokens = 0
    """Tokens per block, if an integration counts tokens; None if no block is judged."""

    def __init__(self, plan: WatchPlan, watch: Watching) -> None:
        self.watch = watch
        self.due = False
        self.next_due = 0  # ms
        self._find: Find = _find_nothing
        self._secret = words_of(new_secret() if plan.secret is None else plan.secret)
        self._sample_below = plan.sample_below
        self._policy_below = plan.policy_below
        self._keeps_below = plan.policy_below if plan.keeps_keys else 0
        self._quarters = plan.quarters
        self._lengths = plan.lengths
        self._rooms = [
            limit - before for before, limit in zip((0, *plan.limits), plan.limits, strict=False)
        ]
        self._lists: list[list[OrderedDict[int, Record]]] = [
            [OrderedDict() for _ in (*self._rooms, None)] for _ in range(plan.quarters)
        ]
        self._clock = plan.clock
        self._start = monotonic_ns() // 1_000_000 if plan.clock is None else plan.clock()
        self._present = self._start
        self.hears_releases = False  # since the first
        self._hears_returns = False  # since the first hint of one: times are kept
        self._told: Hints | None = None  # of the request at work
        self._moment: float | None = None  # its time in seconds, if it gave one
        self._latest: float | None = None  # that of the last collected request
        self._keys: list[list[BlockHash]] = [[] for _ in range(plan.quarters)]  # of a request
        self._requests: list[list[list[SampledRequest]]] = [[[]] for _ in range(plan.quarters)]
        self._num_collected = 0
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._causes = [0] * len(CAUSES)
        self._evicted_used = [0, 0]
        self._long = [0] * len(plan.lengths)
        self._fullest = [0] * len(self._rooms)
        self._judged = [[0] * (len(self._rooms) + 1) for _ in range(plan.quarters)]
        self._policy_judged = [[0] * (len(self._rooms) + 1) for _ in range(plan.quarters)]
        self._unused_ages = [0] * AGE_BINS
        self._stored_ages = [0] * AGE_BINS
        self._sources: dict[str, int] = {}  # of hints, the distinct ones, by number
        self._hints = [[0, 0] for _ in range(MOST_SOURCES + 1)]  # by source: ends, expectations
        self._serial = 0
        # Number, and kind, time, block ids, number of the request at the time.
        # Iterated as a copy: a thread that asks for overdue transfers may remove some.
        self._open: dict[int, tuple[int, int, list[int], int]] = {}
        self._lag = -1.0

    def attach(self, find: Find) -> None:
        """Begin to observe the blocks of a manager's policy, which `find` returns."""
        self._find = find

    # -- calls of a manager, after each change ------------------------------------------------

    def looked_up(self, batch: Sequence[BlockHash], num_hits: int) -> None:
        """Judge the sampled blocks of a request, then use them, last first."""
        find = self._find
        self._count(batch, num_hits)
        uses = []
        now = -1
        for index, key in enumerate(batch):
            if type(key) is not bytes or not key:
                break  # beyond what the lookup had to check
            fingerprint = hash_key(key, self._secret)
            sample = sample_of(fingerprint)
            if sample >= self._sample_below:
                continue
            if now < 0:
                now = self.now()
            record, segment = self._at(fingerprint)
            quarter = sample % self._quarters
            self._judged[quarter][segment] += 1
            if sample < self._policy_below:
                self._policy_judged[quarter][segment] += 1
            self._collect_key(sample, key)
            if index >= num_hits:
                self._causes[self._cause(find(key), record)] += 1
            elif record is not None:
                record.used = True
            uses.append(fingerprint)
        if now >= 0:
            for fingerprint in reversed(uses):
                self._use(fingerprint, now)
            self._collect_request(0)
        self.tell(None, None)
        self.due = self.due or now >= self.next_due

    def tell(self, hints: Hints | None, now: float | None) -> None:
        """Hear what the client of the request that is looked up next said when it began."""
        self._told = hints
        self._moment = None if now is None else float(now)

    def finished(self, batch: Sequence[BlockHash], hints: Hints, now: float | None) -> None:
        """Hear that a request has finished with hints."""
        if hints.expect_s is not None:
            self._hears_returns = True
            self.tell(hints, now)
            self._collect_event(batch, FINISHED)
            self.tell(None, None)

    def released(self, batch: Sequence[BlockHash]) -> None:
        """Hear that blocks were released; from now on keys are collected."""
        self.hears_releases = True
        self._keeps_below = self._policy_below
        self._collect_event(batch, RELEASED)

    def stored(
        self, missing: Sequence[BlockHash], num_admitted: int, evicted: Sequence[BlockHash]
    ) -> None:
        """Note the fates of an accepted store, and open its transfer."""
        now = self.now()
        self._use_unseen(missing, now)
        admitted, declined = missing[:num_admitted], missing[num_admitted:]
        counts = self._counts
        counts["stored"] += len(admitted)
        counts["declined"] += len(declined)
        counts["evicted"] += len(evicted)
        for fingerprint in self._sampled(evicted):
            record, _ = self._at(fingerprint)
            self._evicted_used[record is not None and record.used] += 1
            if record is not None:
                self._unused_ages[age_bin((now - record.last_use) % _TICKS)] += 1
                if record.fate == STORED:
                    self._stored_ages[age_bin((now - record.changed) % _TICKS)] += 1
                record.fate = EVICTED
                record.changed = now % _TICKS
        self._set_fates(declined, DECLINED)
        for fingerprint in self._sampled(admitted):
            record, _ = self._at(fingerprint)
            if record is not None:
                record.fate = STORED
                record.changed = now % _TICKS
                record.used = False
        statuses = [status for key in admitted if (status := self._find(key)) is not None]
        self.opened(STORE, [status.block_id for status in statuses])

    def refused(self, missing: Sequence[BlockHash]) -> None:
        """Note the fates of a refused store."""
        self._counts["refused"] += 1
        self._use_unseen(missing, self.now())
        self._set_fates(missing, REFUSED)

    def ended(
        self, batch: Sequence[BlockHash], slots: Mapping[BlockHash, int], success: bool
    ) -> None:
        """Close the transfer of a store that ended, and note the fates if it failed.

        `slots` are the block ids of the blocks that were pending.
        """
        if batch and batch[0] in slots and batch[-1] in slots:
            self._close(STORE, len(batch), slots[batch[0]], slots[batch[-1]])
        if not success:
            self._counts["failed"] += len(slots)
            self._set_fates(list(slots), FAILED)

    def loaded(self, block_ids: Sequence[int]) -> None:
        """Close the transfer of a load that ended."""
        if block_ids:
            self._close(LOAD, len(block_ids), block_ids[0], block_ids[-1])

    def hinted(self, hints: Hints) -> None:
        """Count a client's hints on its session."""
        if not hints.ends and hints.expect_s is None:
            return
        said = self._hints[self._number_of(str(hints.source))]
        said[0] += hints.ends
        said[1] += hints.expect_s is not None
        self._hears_returns = self._hears_returns or hints.expect_s is not None

    def _number_of(self, source: str) -> int:
        """Return the number of a source of hints; register an unknown one if there is room."""
        number = self._sources.get(source)
        if number is None:
            if source == OTHERS or len(self._sources) == MOST_SOURCES:
                return MOST_SOURCES
            number = self._sources[source] = len(self._sources)
        return number

    def dropped(self) -> None:
        """Reset the shadows with the cache, and note the fates of its blocks."""
        self._counts["resets"] += 1
        self._fullest = self._fullest_yet()
        for segments in self._lists:
            for segment in segments:
                for record in segment.values():
                    if record.fate == STORED:
                        record.fate = RESET
            for segment in reversed(segments[:-1]):
                segments[-1].update(segment)
                segment.clear()
        latest = [stretches[-1] for stretches in self._requests]
        if any(latest) or len(self._requests[0]) == 1:
            for stretches in self._requests:
                stretches.append([])
        self._open.clear()

    def _held(self) -> list[int]:
        """Return the sampled blocks that each size holds, of all quarters."""
        by_segment = zip(*(map(len, segments[:-1]) for segments in self._lists), strict=True)
        return list(accumulate(map(sum, by_segment)))

    def _fullest_yet(self) -> list[int]:
        """Return the most sampled blocks that each size held, at a reset or now."""
        return list(map(max, self._fullest, self._held()))

    # -- the ledger ----------------------------------------------------------------------------

    def opened(self, kind: int, block_ids: Sequence[int]) -> None:
        """Open a transfer."""
        size = len(block_ids)
        if size == 0:
            return
        open_blocks = sum(len(ids) for _, _, ids, _ in list(self._open.values()))
        if len(self._open) >= MOST_OPEN or open_blocks + size > MOST_OPEN_BLOCKS:
            self._counts["untracked"] += 1
            return
        self._serial += 1
        ids = [int(block_id) for block_id in block_ids]
        self._open[self._serial] = (kind, self.now(), ids, self._counts["requests"])

    def _close(self, kind: int, size: int, first: int, last: int) -> None:
        """Close the newest transfer of this kind and size with this first and last block id.

        A leaked transfer of the same blocks stays and ages.
        """
        for serial, (own_kind, _, ids, request) in reversed(list(self._open.items())):
            if own_kind == kind and len(ids) == size and ids[0] == first and ids[-1] == last:
                if kind == STORE:
                    self._note_lag(self._counts["requests"] - request)
                self.close_transfer(serial)
                return

    def _note_lag(self, requests: int) -> None:
        """Note the number of requests that came during a store."""
        if self._lag < 0:
            self._lag = float(requests)
        else:
            self._lag += (requests - self._lag) / LAG_STEPS

    def open_transfers(self) -> list[tuple[int, int, int, list[int]]]:
        """Return the open transfers, oldest first: number, kind, time in ms, block ids."""
        return [(serial, *transfer[:3]) for serial, transfer in list(self._open.items())]

    def close_transfer(self, serial: int) -> None:
        """Close a transfer by its number."""
        self._open.pop(serial, None)

    # -- what can be seen ----------------------------------------------------------------------

    def now(self) -> int:
        """Return the time since the start in ms; the last time if a user's clock fails."""
        if self._clock is None:
            self._present = monotonic_ns() // 1_000_000
        else:
            with suppress(Exception):
                self._present = self._clock()
        return max(self._present - self._start, 0)

    def progress(self) -> tuple[int, int, int, float]:
        """Return the requests, those that met a block being stored, refused stores, and the lag.

        The lag is the recent mean number of requests that come during a store; 0 before the first
        store ends.
        """
        counts = self._counts
        lag = max(self._lag, 0.0)
        return counts["requests"], counts["met_pending"], counts["refused"], lag

    def counts(self) -> dict[str, Any]:
        """Return every counter since the start."""
        return {
            **self._counts,
            "causes": list(self._causes),
            "evicted_used": list(self._evicted_used),
            "long_requests": list(self._long),
            "hints": [list(said) for said in self._hints],
            "judged": [list(counts) for counts in self._judged],
            "policy_judged": [list(counts) for counts in self._policy_judged],
            "unused_ages": list(self._unused_ages),
            "stored_ages": list(self._stored_ages),
            "held": self._held(),
            "fullest": self._fullest_yet(),
            "open": len(self._open),
        }

    def sources(self) -> list[str]:
        """Return the distinct sources of hints, in the order of their counts."""
        return list(self._sources)

    def take_requests(self) -> list[list[list[SampledRequest]]]:
        """Return and clear the requests collected for the policies.

        One list per quarter, of one list per stretch between resets.
        """
        requests, self._requests = self._requests, [[[]] for _ in range(self._quarters)]
        self._num_collected = 0
        self.due = False
        return requests

    def explain(self, key: bytes) -> tuple[int | None, bool, Any]:
        """Return the facts on a block: its ref_cnt, whether it is sampled, its record.

        The record is None, or the segment, last fate, whether it was used since it was stored,
        and the times, in ms modulo 2**32, of its last use and of its store or eviction.
        """
        status = self._find(BlockHash(key))
        ref_cnt = None if status is None else status.ref_cnt
        fingerprint = hash_key(key, self._secret)
        if sample_of(fingerprint) >= self._sample_below:
            return ref_cnt, False, None
        record, segment = self._at(fingerprint)
        if record is None:
            return ref_cnt, True, None
        times = record.last_use, record.changed
        return ref_cnt, True, (segment, record.fate, record.used, *times)

    def order(self) -> list[list[int]]:
        """Return the fingerprints of each quarter, most recent first."""
        return [
            [fingerprint for segment in segments for fingerprint in reversed(segment)]
            for segments in self._lists
        ]

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        for quarter, segments in enumerate(self._lists):
            if sum(map(len, segments)) > sum(self._rooms):
                raise AssertionError("no list holds more than its room")
            for room, segment in zip(self._rooms, segments, strict=False):
                if len(segment) > room:
                    raise AssertionError("no segment holds more than its room")
            for segment in segments:
                if any(sample_of(each) % self._quarters != quarter for each in segment):
                    raise AssertionError("a block is on the list of its quarter")

    # -- parts ---------------------------------------------------------------------------------

    def _sampled(self, keys: Sequence[BlockHash]) -> list[int]:
        """Return the fingerprints of the sampled keys."""
        hashes = [hash_key(key, self._secret) for key in keys]
        return [each for each in hashes if sample_of(each) < self._sample_below]

    def _at(self, fingerprint: int) -> tuple[Record | None, int]:
        """Return the record of a block and its segment, the one at the end if it is not listed."""
        segments = self._lists[sample_of(fingerprint) % self._quarters]
        for segment_index, segment in enumerate(segments):
            record = segment.get(fingerprint)  # atomic, since another thread may ask
            if record is not None:
                return record, segment_index
        return None, len(self._rooms)

    def _use(self, fingerprint: int, now: int) -> None:
        """Move a block to the front, and the overflow of each segment on to the next."""
        segments = self._lists[sample_of(fingerprint) % self._quarters]
        found, segment_index = self._at(fingerprint)
        record = Record() if found is None else segments[segment_index].pop(fingerprint)
        record.last_use = now % _TICKS
        segments[0][fingerprint] = record
        for index, room in enumerate(self._rooms):
            while len(segments[index]) > room:
                moved, its_record = segments[index].popitem(last=False)
                if index + 1 < len(self._rooms):
                    segments[index + 1][moved] = its_record
        if segments[-1] and sum(map(len, segments)) > sum(self._rooms):
            segments[-1].popitem(last=False)

    def _use_unseen(self, missing: Sequence[BlockHash], now: int) -> None:
        """Use the sampled blocks of a store that no lookup since a reset has shown, last first.

        Generated tokens are stored but not asked for; they take room like others.
        """
        unseen = [
            (key, fingerprint)
            for key in missing
            if sample_of(fingerprint := hash_key(key, self._secret)) < self._sample_below
            and self._at(fingerprint)[1] == len(self._rooms)
        ]
        for key, fingerprint in unseen:
            self._collect_key(sample_of(fingerprint), key)
        for _, fingerprint in reversed(unseen):
            self._use(fingerprint, now)
        self._moment = self._latest
        self._collect_request(None)
        self._moment = None

    def _collect_key(self, sample: int, key: BlockHash) -> None:
        """Collect a key of the present request for the policies, if they see it."""
        if sample < self._keeps_below and self._num_collected < MOST_KEYS:
            self._keys[sample % self._quarters].append(key)
            self._num_collected += 1

    def _collect_event(self, batch: Sequence[BlockHash], event: int) -> None:
        """Collect the sampled keys of a batch that something happened to."""
        for key in batch:
            self._collect_key(sample_of(hash_key(key, self._secret)), key)
        self._collect_request(event)

    def _collect_request(self, first: int | None) -> None:
        """End the present request, which asked for its keys from `first` on or for none."""
        told: tuple[Hints | None, float | None] = (None, None)
        if first != RELEASED and any(self._keys) and (self._hears_returns or self._told):
            self._latest = monotonic() if self._moment is None else self._moment
            told = self._told, self._latest
        for quarter, keys in enumerate(self._keys):
            if keys:
                end = len(keys) if first == 0 else 0
                self._requests[quarter][-1].append((keys, first or 0, end, *told))
                self._keys[quarter] = []
                self._num_collected += 1
        self.due = self.due or self._num_collected >= DRAIN_KEYS

    def _count(self, batch: Sequence[BlockHash], num_hits: int) -> None:
        """Count a request."""
        counts = self._counts
        counts["requests"] += 1
        counts["asked"] += len(batch)
        counts["missed"] += len(batch) - num_hits
        if num_hits < len(batch):
            status = self._find(batch[num_hits])
            counts["met_pending"] += status is not None and status.ref_cnt < 0
        for size, length in enumerate(self._lengths):
            self._long[size] += len(batch) > length

    def _cause(self, status: BlockStatus | None, record: Record | None) -> int:
        """Return why a block missed."""
        if status is not None:
            return PENDING if status.ref_cnt < 0 else BROKEN_PREFIX
        fate = UNKNOWN if record is None else record.fate
        return fate if fate >= EVICTED else NEVER_OR_LONG_AGO

    def _set_fates(self, keys: Sequence[BlockHash], fate: int) -> None:
        for fingerprint in self._sampled(keys):
            record, _ = self._at(fingerprint)
            if record is not None:
                record.fate = fate


_COUNTS = (
    "requests",
    "asked",
    "missed",
    "met_pending",
    "stored",
    "evicted",
    "declined",
    "refused",
    "failed",
    "resets",
    "untracked",
    "tail_missed_tokens",  # of an integration whose engine has several KV groups
)


def _find_nothing(key: BlockHash) -> None:
    """Return None: no manager is observed yet."""
    del key
