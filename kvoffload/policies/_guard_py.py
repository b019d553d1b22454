"""The guard of hit density: follows LRU or ARC while they bring more hits.

Hit density has fewer hits while it learns how blocks are reused, and when its assumptions do not
hold. So three small caches, the *trials*, serve a sample of the blocks side by side, by LRU, by hit
density and by ARC as published; the guarded cache evicts by the rule of the trial with the most
hits. The first hint of a session's return adds a fourth trial, hit density without hints, which
begins as a copy of the trial of hit density.

Structure
    The trials hold keys, no slots. One block in ``2**shift`` is sampled, by a hash of its key whose
    secret no client knows, and a trial has that share of the capacity. The trial of hit density has
    its own rings, ghosts and turns; it reads the densities that the guarded policy learns, and
    counts nothing. The fourth trial reads densities by class and last use that count all blocks.
    While the cache stores blocks, they are not hits and may not leave. So the stores of the trials
    take equally long: the *lag*, in requests, which is measured. The guard notes the stores of the
    cache, at most 256, each by its first block and its request. A request removes the stores at the
    old end whose block is no longer pending; the lag is the number of requests since the last of
    these began. It starts at 1: a store ends before the next request.
Invariants
    A block that a trial has stored is pending for `lag` requests, this one included.
Cost
    O(1) per block to decide whether it is sampled; a sampled block costs three times as much as in
    a policy. A trial has fewer than 1,024 blocks, whatever the capacity.
Differs from set sampling (Qureshi et al., "A Case for MLP-Aware Cache Replacement", ISCA 2006)
    The trials run beside the cache instead of in a part of it; the hits of all three count, with a
    half-life, so that the guard recovers after a change.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvoffload._sampling import hash_key, new_secret, sample_of, words_of
from kvoffload.types import BlockHash, BlockStatus, HintGain

from ._arc_classic_py import ARCClassicCachePolicy
from ._densities_py import Densities
from ._lru_py import LRUCachePolicy
from ._returns_py import Returns
from ._turns_py import Turn
from ._twin_py import PythonPolicy, require

#: The trials, in the order in which they are compared; ``plain`` is hit density without hints.
RULES = ("lru", "hit-density", "plain", "arc-classic")
LRU, HIT_DENSITY, PLAIN, ARC = RULES

# 2 ** (-1 / 600): hits lose half their weight over 600 requests.
_FADE = 0.9988454217380301
# The leader must be ahead by the blocks of this many requests.
_LEAD = 1.0
# Most stores of the cache that are noted.
_MOST_NOTED = 256
# A trial has at least this many blocks while at least one block in four is sampled ...
_LEAST_TRIAL_BLOCKS = 64
_MOST_SHIFT = 2
# ... and fewer than this many, however small the sample then is.
_TRIAL_BLOCKS_BOUND = 1024
# Most blocks of a request that a trial examines, as a multiple of its capacity.
_SAMPLE_CAPACITIES = 4

# Requests after which the gain by hints is reported; half the width of its interval in standard
# errors, more than 1.96 since requests depend on one another; and the additional error of trials of
# one block, which for n blocks is divided by sqrt(n).
_LEAST_COMPARED = 256
_STANDARD_ERRORS = 2.5
_TRIAL_BIAS = 0.17


def sample_shift(capacity: int) -> int:
    """Return s such that one block in ``2**s`` is sampled for a cache of `capacity` blocks."""
    shift = 0
    while capacity >> shift >= 2 * _LEAST_TRIAL_BLOCKS and shift < _MOST_SHIFT:
        shift += 1
    while capacity >> shift >= _TRIAL_BLOCKS_BOUND:
        shift += 1
    return shift


def is_sampled(block_hash: BlockHash, shift: int, secret: Sequence[int]) -> bool:
    """Return whether a block is in the sample of a guard with these secret words."""
    return sample_of(hash_key(block_hash, secret)) & ((1 << shift) - 1) == 0


class Trial:
    """A cache of keys, without slots, whose stores take some requests."""

    __slots__ = ("_storing", "policy")

    def __init__(self, policy: PythonPolicy) -> None:
        self.policy = policy
        self._storing: deque[tuple[int, list[BlockHash]]] = deque()  # by request, oldest first

    def complete_stores(self, request: int, lag: int) -> None:
        """End the stores that began `lag` requests ago, or earlier."""
        resident = self.policy._resident
        while self._storing and request - self._storing[0][0] >= lag:
            for block_hash in self._storing.popleft()[1]:
                resident[block_hash].ref_cnt = 0

    def serve(self, batch: list[BlockHash], request: int, *, ends: bool) -> int:
        """Serve a request; return the number of leading blocks that were ready.

        If the session `ends`, the request takes only free slots and those of released blocks.
        """
        policy = self.policy
        resident = policy._resident
        policy._take_back(batch)
        policy._touch(batch)
        missing = [block_hash for block_hash in batch if block_hash not in resident]
        ready = takewhile(lambda block: block in resident and resident[block].ref_cnt == 0, batch)
        found = sum(1 for _ in ready)
        if not missing:
            return found
        num_free = policy.cache_capacity - len(resident)
        decide = policy._make_room_of_released if ends else policy._make_room
        room = decide(missing, num_free, set(batch))
        stored = missing[: room[0]] if room is not None else []
        policy._insert({block_hash: BlockStatus(0) for block_hash in stored})
        policy._touch(batch)
        if stored:
            self._storing.append((request, stored))
        return found

    def copy(self, policy: PythonPolicy) -> Trial:
        """Return a copy in the same state, over `policy`, a copy of its policy."""
        other = Trial(policy)
        other._storing.extend((request, list(stored)) for request, stored in self._storing)
        return other

    def clear(self) -> None:
        """Forget everything."""
        self._storing.clear()
        self.policy._clear()


@dataclass(slots=True, eq=False)
class Gain:
    """Fading sums over the requests that hit density has served with hints and without.

    The gain is a ratio of sums, hits gained over blocks asked for. Its variance, with weights w
    whose squares enter the error, is that of independent requests,
    ``sum(w * w * (d - gain * a) ** 2) / sum(w * a) ** 2`` for d hits gained of a blocks. The
    difference between small and large caches adds to it.
    """

    requests: int = 0
    blocks: float = 0.0
    hits: float = 0.0
    plain: float = 0.0
    # Weighted by the squares: sums of d * d, d * a, a * a.
    squares: float = 0.0
    products: float = 0.0
    squared_blocks: float = 0.0

    def add(self, blocks: int, hits: int, plain: int) -> None:
        """Count a request."""
        gained = hits - plain
        self.requests += 1
        self.blocks = self.blocks * _FADE + blocks
        self.hits = self.hits * _FADE + hits
        self.plain = self.plain * _FADE + plain
        self.squares = self.squares * (_FADE * _FADE) + gained * gained
        self.products = self.products * (_FADE * _FADE) + gained * blocks
        self.squared_blocks = self.squared_blocks * (_FADE * _FADE) + blocks * blocks

    def seen(self, capacity: int, *, followed: bool) -> HintGain | None:
        """Return the gain by hints in trials of a capacity; None without enough data."""
        if self.requests < _LEAST_COMPARED or self.blocks <= 0.0:
            return None
        hit_ratio, plain = self.hits / self.blocks, self.plain / self.blocks
        gain = hit_ratio - plain
        squares = self.squares - 2.0 * gain * self.products + gain * gain * self.squared_blocks
        variance = max(0.0, squares) / (self.blocks * self.blocks)
        error = math.sqrt(
            _STANDARD_ERRORS * _STANDARD_ERRORS * variance + _TRIAL_BIAS * _TRIAL_BIAS / capacity
        )
        return HintGain(hit_ratio, plain, error, followed)


class DensityTrial(PythonPolicy):
    """The interface of the trial of hit density that the guard calls."""

    __slots__ = ()

    @abstractmethod
    def begin_turn(self, turn: Turn | None) -> None:
        """Let the next request begin a turn, or none."""

    @abstractmethod
    def heed(self, returns: Returns) -> None:
        """Rank blocks by the statistics of returns, too."""

    @abstractmethod
    def copy(self, learned: Densities) -> PythonPolicy:
        """Return a copy with the same blocks and ghosts, without turns, that reads `learned`."""

    @abstractmethod
    def join(self, batch: list[BlockHash], turn: Turn) -> None:
        """Apply a later hint of the return of a request's session."""


class Guard:
    """The choice of the rule by which a cache evicts: that of the trial with the most hits.

    `density_trial` is hit density at ``cache_capacity >> sample_shift(cache_capacity)`` blocks,
    and reads the densities of the guarded policy.
    """

    __slots__ = (
        "_arc",
        "_capacity",
        "_density_trial",
        "_gain",
        "_hits",
        "_lag",
        "_noted",
        "_request",
        "_rule",
        "_secret",
        "_shift",
        "_store_begins",
        "_trials",
    )

    def __init__(self, cache_capacity: int, density_trial: DensityTrial) -> None:
        capacity = density_trial.cache_capacity
        self._capacity = cache_capacity
        self._shift = sample_shift(cache_capacity)
        self._secret = words_of(new_secret())
        self._arc = ARCClassicCachePolicy(capacity)
        self._density_trial = density_trial
        self._trials = {
            LRU: Trial(LRUCachePolicy(capacity)),
            HIT_DENSITY: Trial(density_trial),
            ARC: Trial(self._arc),
        }
        self._noted: deque[tuple[BlockHash, int]] = deque(maxlen=_MOST_NOTED)
        self._lag = 1
        self._request = 0  # number of the request being served
        self._store_begins = False  # nothing was inserted since
        self._rule = HIT_DENSITY
        self._hits = dict.fromkeys(self._trials, 0.0)
        self._gain = Gain()  # since there are two trials of hit density

    @property
    def rule(self) -> str:
        """Name of the followed trial."""
        return self._rule

    @property
    def hits(self) -> dict[str, float]:
        """Recent hits of each trial, fading."""
        return dict(self._hits)

    @property
    def gain(self) -> HintGain | None:
        """Recent gain by hints of returns in the trial that heeds them."""
        return self._gain.seen(self._arc.cache_capacity, followed=self._rule == HIT_DENSITY)

    def set_declining(self, allowed: bool) -> None:
        """Allow or forbid the trials of hit density to decline blocks."""
        for name in (HIT_DENSITY, PLAIN):
            if name in self._trials:
                self._trials[name].policy._set_declining(allowed)

    def divide(self, returns: Returns, plain: Densities) -> None:
        """Go on with two trials of hit density: one with hints, and one that reads `plain`."""
        trial = self._trials[HIT_DENSITY]
        without_hints = trial.copy(self._density_trial.copy(plain))
        self._density_trial.heed(returns)
        trials = {**self._trials, PLAIN: without_hints}
        hits = {**self._hits, PLAIN: self._hits[HIT_DENSITY]}
        self._trials = {name: trials[name] for name in RULES}
        self._hits = {name: hits[name] for name in RULES}

    def say(self, batch: list[BlockHash], turn: Turn) -> None:
        """Apply a later hint of the return of the session that has used the blocks."""
        self._density_trial.join(self._sample(batch), turn.copy())

    def release(self, batch: list[BlockHash]) -> None:
        """Release blocks in all trials."""
        sample = self._sample(batch)
        for trial in self._trials.values():
            trial.policy._release(sample)

    @property
    def target_t1_size(self) -> float:
        """Target size of ARC's T1 in the guarded cache, in blocks."""
        return self._arc.target_t1_size * self._capacity / self._arc.cache_capacity

    def begin_store(self) -> None:
        """Note that the cache begins a store."""
        self._store_begins = True

    def note_insert(self, block_hash: BlockHash) -> None:
        """Note a store of the cache by its first block."""
        if self._store_begins:
            self._store_begins = False
            self._noted.append((block_hash, self._request))

    def serve(
        self,
        batch: list[BlockHash],
        num_stored: int,
        resident: Mapping[BlockHash, BlockStatus],
        mean_length: float,
        turn: Turn | None,
        *,
        ends: bool,
    ) -> None:
        """Serve a request to the trials, and follow the leader.

        No trial has a hit after the `num_stored` leading blocks, which are not being stored.
        `resident` holds the cache's blocks, `mean_length` is the mean length of recent requests in
        blocks. The request begins `turn`, or none; `ends` says whether its session ends with it.
        """
        self._request += 1
        self._measure_lag(resident)
        self._density_trial.begin_turn(None if turn is None else turn.copy())
        self._serve(batch, num_stored, mean_length, ends=ends)

    def _measure_lag(self, resident: Mapping[BlockHash, BlockStatus]) -> None:
        """Forget the noted stores that have ended; take the lag from the last of them."""
        while self._noted:
            block_hash, began = self._noted[0]
            status = resident.get(block_hash)
            if status is not None and status.ref_cnt < 0:
                break
            self._noted.popleft()
            self._lag = self._request - began

    def _serve(
        self, batch: list[BlockHash], num_stored: int, mean_length: float, *, ends: bool
    ) -> None:
        sample = self._sample(batch)
        most_hits = len(self._sample(batch[:num_stored]))
        hits, best = self._hits, self._rule
        found = {}
        for name, trial in self._trials.items():
            trial.complete_stores(self._request, self._lag)
            found[name] = min(trial.serve(sample, self._request, ends=ends), most_hits)
            hits[name] = hits[name] * _FADE + found[name]
        if PLAIN in found:
            self._gain.add(len(sample), found[HIT_DENSITY], found[PLAIN])
        for name in self._trials:
            if hits[name] > hits[best]:
                best = name
        lead = (hits[best] - hits[self._rule]) * (1 << self._shift)
        if lead > _LEAD * mean_length:
            self._rule = best

    def _sample(self, batch: list[BlockHash]) -> list[BlockHash]:
        shift, secret = self._shift, self._secret
        sampled = (block_hash for block_hash in batch if is_sampled(block_hash, shift, secret))
        most = _SAMPLE_CAPACITIES * self._arc.cache_capacity
        return list(islice(dict.fromkeys(sampled), most))

    def clear(self) -> None:
        """Forget everything."""
        self._rule = HIT_DENSITY
        self._noted.clear()
        self._lag = 1
        self._request = 0
        self._store_begins = False
        self._trials.pop(PLAIN, None)
        for trial in self._trials.values():
            trial.clear()
        self._hits = dict.fromkeys(self._trials, 0.0)
        self._gain = Gain()

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(self._rule in self._trials, "the rule is that of a trial")
        require(all(count >= 0.0 for count in self._hits.values()), "hits are counted")
        require(self._lag >= 1, "a store takes a request")
        for trial in self._trials.values():
            policy = trial.policy
            require(len(policy) <= policy.cache_capacity, "each trial is within its capacity")
            policy._check()
