"""The guard of hit density: follow LRU or ARC while they bring more hits.

Hit density learns how blocks are used again, and is behind while it does, and where what it
assumes does not hold. So three small caches, the *trials*, serve a sample of the blocks side by
side, by LRU, by hit density and by ARC as published; and the cache that is guarded evicts by the
rule of the one with the most hits.

Structure
    The trials hold keys, no slots. A block is sampled by its hash, one in ``2**shift``, and a trial
    has that share of the capacity. The trial of hit density has rings and ghosts of its own; it
    reads the densities that the guarded policy learns, and counts nothing.
Invariants
    A store of a trial ends within its request: between requests all of its blocks are idle.
    A request that is interrupted while it is served makes the guard forget everything. Only `touch`
    serves, and `clear` clears: no other call changes the guard.
Cost
    O(1) a block for the choice whether it is sampled; three times that of a policy for one that
    is. Below 1,024 blocks in a trial, whatever the capacity.
Differs from set sampling (Qureshi et al., "A Case for MLP-Aware Cache Replacement", ISCA 2006)
    The trials lie beside the cache instead of in a part of it; the hits of all three count, with
    a half-life, so that the guard finds back after a change.
"""

from __future__ import annotations

from itertools import islice

from kvoffload.types import BlockHash, BlockStatus

from ._arc_classic_py import ARCClassicCachePolicy
from ._lru_py import LRUCachePolicy
from ._twin_py import PythonPolicy, require
from ._undo import Undo

#: The trials, in the order in which they are compared.
RULES = ("lru", "hit-density", "arc-classic")
LRU, HIT_DENSITY, ARC = RULES

# 2 ** (-1 / 600): hits lose half their weight over 600 requests.
_FADE = 0.9988454217380301
# The leader must be ahead by this many requests' blocks.
_LEAD = 0.5
# A trial has from this many blocks on, while at least one block in four is sampled ...
_LEAST_TRIAL_BLOCKS = 64
_MOST_SHIFT = 2
# ... and fewer than this many, however few are sampled then.
_TRIAL_BLOCKS_BOUND = 1024
# Blocks of a request that a trial looks at, in its capacities.
_SAMPLE_CAPACITIES = 4

_MIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def sample_shift(capacity: int) -> int:
    """Return s where one block in ``2**s`` is sampled for a cache of so many blocks."""
    shift = 0
    while capacity >> shift >= 2 * _LEAST_TRIAL_BLOCKS and shift < _MOST_SHIFT:
        shift += 1
    while capacity >> shift >= _TRIAL_BLOCKS_BOUND:
        shift += 1
    return shift


def is_sampled(block_hash: BlockHash, shift: int) -> bool:
    """Tell whether a block is in the sample: by its hash alone, the same in both twins."""
    mixed = 0
    for start in range(0, len(block_hash), 8):
        word = int.from_bytes(block_hash[start : start + 8], "little")
        mixed = (mixed ^ word) * _MIX & _MASK
        mixed ^= mixed >> 32
    mixed ^= mixed >> 29
    return mixed & ((1 << shift) - 1) == 0


def serve(policy: PythonPolicy, batch: list[BlockHash]) -> int:
    """Serve a request by a policy without slots; return how many leading blocks it has found.

    Nothing is taken back: after an interrupt the policy is good for nothing until it is emptied.
    """
    resident = policy._resident
    policy._touch(batch)
    missing = [block_hash for block_hash in batch if block_hash not in resident]
    if not missing:
        return len(batch)
    found = batch.index(missing[0])
    num_free = policy.cache_capacity - len(resident)
    room = policy._make_room(missing, num_free, set(batch), Undo())
    stored = missing[: room[0]] if room is not None else []
    policy._insert({block_hash: BlockStatus(0) for block_hash in stored}, Undo())
    policy._touch(batch)
    for block_hash in stored:
        resident[block_hash].ref_cnt = 0
    return found


class Guard:
    """Say by which rule a cache is to evict.

    Parameters
    ----------
    cache_capacity : int
        Blocks of the cache that is guarded, >= 1.
    density_trial : PythonPolicy
        Hit density at ``cache_capacity >> sample_shift(cache_capacity)`` blocks, reading the
        densities of the policy that is guarded.
    """

    __slots__ = ("_arc", "_capacity", "_hits", "_rule", "_shift", "_trials")

    def __init__(self, cache_capacity: int, density_trial: PythonPolicy) -> None:
        capacity = density_trial.cache_capacity
        self._capacity = cache_capacity
        self._shift = sample_shift(cache_capacity)
        self._arc = ARCClassicCachePolicy(capacity)
        self._trials: dict[str, PythonPolicy] = {
            LRU: LRUCachePolicy(capacity),
            HIT_DENSITY: density_trial,
            ARC: self._arc,
        }
        self._rule = HIT_DENSITY
        self._hits = dict.fromkeys(RULES, 0.0)

    @property
    def rule(self) -> str:
        """Name of the trial that is followed."""
        return self._rule

    @property
    def hits(self) -> dict[str, float]:
        """Recent hits of each trial, fading."""
        return dict(self._hits)

    @property
    def target_t1_size(self) -> float:
        """Size that ARC's T1 should have in the cache that is guarded, in blocks."""
        return self._arc.target_t1_size * self._capacity / self._arc.cache_capacity

    def serve(self, batch: list[BlockHash], num_stored: int, mean_length: float) -> None:
        """Serve a request to the trials, and follow the leader.

        Parameters
        ----------
        batch : list of BlockHash
            All blocks of the request.
        num_stored : int
            Leading blocks that are not being stored: no trial has a hit behind them.
        mean_length : float
            Of the requests of late, in blocks.
        """
        with Undo() as undo:
            undo.append((self.clear,))
            self._serve(batch, num_stored, mean_length)

    def _serve(self, batch: list[BlockHash], num_stored: int, mean_length: float) -> None:
        sample = self._sample(batch)
        most_hits = len(self._sample(batch[:num_stored]))
        hits, best = self._hits, self._rule
        for name, trial in self._trials.items():
            hits[name] = hits[name] * _FADE + min(serve(trial, sample), most_hits)
        for name in RULES:
            if hits[name] > hits[best]:
                best = name
        lead = (hits[best] - hits[self._rule]) * (1 << self._shift)
        if lead > _LEAD * mean_length:
            self._rule = best

    def _sample(self, batch: list[BlockHash]) -> list[BlockHash]:
        sampled = (block_hash for block_hash in batch if is_sampled(block_hash, self._shift))
        most = _SAMPLE_CAPACITIES * self._arc.cache_capacity
        return list(islice(dict.fromkeys(sampled), most))

    def clear(self) -> None:
        """Forget everything, or what is left of it."""
        self._rule = HIT_DENSITY
        for name, trial in self._trials.items():
            trial._empty()
            self._hits[name] = 0.0

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(self._rule in RULES, "the rule is one of three")
        require(all(count >= 0.0 for count in self._hits.values()), "hits are counted")
        for trial in self._trials.values():
            require(len(trial) <= trial.cache_capacity, "each trial is within its capacity")
            trial._check()
