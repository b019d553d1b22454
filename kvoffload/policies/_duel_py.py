"""The duel: hit density follows recency while a sample of its blocks has more hits that way.

Hit density has fewer hits while it learns how blocks are reused, and when its assumptions do not
hold. So two miniatures serve a sample of the blocks side by side, one of the policy itself and one
of LRU, and the cache follows the one with the most hits.

Structure
    One block in ``2**shift`` is sampled, by a hash whose secret no client knows, and a miniature
    has that share of the capacity. That of the policy reads what the policy learns, and counts
    nothing. Their stores take as long as those of the cache: its stores are noted, at most 256,
    each by its first block and its request; when the block at the old end of the list is no longer
    pending, its age is the lag.
    From the first time that the gain by hints is read after a hint, a third miniature serves the
    requests without their hints.
Cost
    O(1) per block; a sampled block costs two or three times as much as in a policy. A miniature
    has fewer than 512 blocks, whatever the capacity.
Differs from set dueling (Qureshi et al., "Adaptive Insertion Policies", ISCA 2007)
    The miniatures run beside the cache instead of in a part of it, and their hits count with a
    half-life, so that the rule recovers after a change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvoffload._sampling import hash_key, sample_of
from kvoffload.types import BlockHash, BlockStatus, HintGain, Hints

from ._hit_density import sample_shift
from ._learned import FADE, Gain
from ._lists_py import LRUCachePolicy
from ._miniature_py import Miniature
from ._twin_py import require

DENSITY, LRU = "hit-density", "lru"
_WITHOUT_HINTS = ""

# The leader must be ahead by the blocks of this many requests.
_LEAD = 1.0
# Most stores of the cache that are noted.
_MOST_NOTED = 256
# Most blocks of a request that a miniature examines, as a multiple of its capacity.
_SAMPLE_CAPACITIES = 2


class Sample:
    """One block in ``2**shift``, by a hash whose secret words no client knows."""

    def __init__(self, shift: int, secret: Sequence[int]) -> None:
        self.shift = shift
        self._secret = secret

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a block is in the sample."""
        return sample_of(hash_key(block_hash, self._secret)) % (1 << self.shift) == 0


class Duel:
    """The choice of the rule by which hit density evicts.

    `policy` is the policy that follows the rule, of `capacity` blocks; the words of its `secret`
    draw the sample.
    """

    def __init__(self, policy: Any, capacity: int, secret: Sequence[int]) -> None:
        self._sample = Sample(sample_shift(capacity), secret)
        self._small_capacity = capacity >> self._sample.shift
        self._miniatures = {
            DENSITY: Miniature(policy._small(self._small_capacity)),
            LRU: Miniature(LRUCachePolicy(self._small_capacity)),
        }
        self._learned = policy._learned
        self._gain = Gain()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._rule = DENSITY
        self.hits = {DENSITY: 0.0, LRU: 0.0}  # recent ones, fading
        self._noted: deque[tuple[BlockHash, int]] = deque(maxlen=_MOST_NOTED)
        self._store_begins = False  # nothing was inserted since
        self._request = 0  # immediate repeats count as well
        self._lag = 1
        self._gain.clear()
        self._miniatures.pop(_WITHOUT_HINTS, None)
        for miniature in self._miniatures.values():
            miniature.clear()

    def serve(
        self, batch: list[BlockHash], hints: Hints | None, resident: Mapping[BlockHash, BlockStatus]
    ) -> str:
        """Serve a request to the miniatures; return the rule that leads."""
        self._request += 1
        while self._noted:  # stores of the cache that have ended
            block_hash, began = self._noted[0]
            if block_hash in resident and resident[block_hash].ref_cnt < 0:
                break
            self._noted.popleft()
            self._lag = self._request - began
        sample = self._of(batch)
        found = {}
        for rule, miniature in self._miniatures.items():
            told = hints
            if rule == _WITHOUT_HINTS and hints is not None:
                told = Hints(ends=hints.ends)
            found[rule] = miniature.serve(
                *(sample, 0, len(sample), told),
                position=self._request,
                before=self._request + 1 - self._lag,
                again=False,
            )
        for rule in self.hits:
            self.hits[rule] = self.hits[rule] * FADE + found[rule]
        if _WITHOUT_HINTS in found:
            self._gain.add(len(sample), found[DENSITY], found[_WITHOUT_HINTS])
        other = LRU if self._rule == DENSITY else DENSITY
        lead = (self.hits[other] - self.hits[self._rule]) * (1 << self._sample.shift)
        if lead > _LEAD * self._learned.mean_length:
            self._rule = other
        return self._rule

    def finish(self, batch: list[BlockHash], hints: Hints | None) -> None:
        """Apply a hint that came at the end of a request."""
        sample = self._of(batch)
        for rule in self.hits:
            self._miniatures[rule].finish(sample, hints)

    def release(self, batch: list[BlockHash]) -> None:
        """Release blocks in all miniatures."""
        sample = self._of(batch)
        for miniature in self._miniatures.values():
            miniature.release(sample)

    def begin_store(self) -> None:
        """Note that the cache begins a store."""
        self._store_begins = True

    def note_insert(self, block_hash: BlockHash) -> None:
        """Note a store of the cache by its first block."""
        if self._store_begins:
            self._store_begins = False
            self._noted.append((block_hash, self._request))

    def set_declining(self, allowed: bool) -> None:
        """Allow or forbid the miniatures to decline blocks."""
        for miniature in self._miniatures.values():
            miniature.policy.set_declining(allowed)

    def gain(self, policy: Any) -> HintGain | None:
        """Return the recent gain by hints; the first call begins the comparison."""
        if _WITHOUT_HINTS not in self._miniatures:
            self._miniatures[_WITHOUT_HINTS] = Miniature(policy._small(self._small_capacity))
        return self._gain.seen(self._small_capacity, self._rule == DENSITY)

    def _of(self, batch: list[BlockHash]) -> list[BlockHash]:
        """Return the sampled part of a request."""
        sampled = filter(self._sample.has, batch)
        return list(islice(sampled, _SAMPLE_CAPACITIES * self._small_capacity))

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        require(all(count >= 0.0 for count in self.hits.values()), "hits are counted")
        require(self._lag >= 1, "a store takes a request")
        for miniature in self._miniatures.values():
            miniature._check()
