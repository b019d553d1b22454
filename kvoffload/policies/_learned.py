# cython: annotation_typing=False
"""Learn how likely blocks are used again, and what a slot for them is worth, for hit density.

This is the source of both implementations: plain Python, and compiled with ``_learned.pxd``.

Structure
    The *hazard* of reuse of a class of blocks at an age is the number of uses at that age over the
    time that blocks spent at it. The caller counts both, whether blocks are resident or not, so no
    block needs a book of its own. A hint multiplies the hazard of a block's class by *uses over
    expected uses* of its source at this share of the stated time: a source whose hints mean nothing
    has the factor 1.
    The *density* of a block is the most hits per request and slot that keeping it can bring (LHD:
    Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI'18).
Ages
    Ages are in requests, by bin: one request wide up to 6, then four bins per doubling. Stated
    times have two steps per doubling, so that an age's bin less twice the step is its share of the
    time.
Classes
    0: never used again. 1-7: used again once. 8-14: more often. Within the seven, a shorter gap
    between the last two uses has a lower number.
Labels
    A label is a class and what was said: ``source * NUM_STEPS + step``. Nobody said anything: 0. A
    block that several sessions use belongs to none of them: `SHARED`.
Cost
    O(1) per count; O(classes x bins) per computation, whatever the capacity. Sums are doubles,
    evaluated in the order written here.
"""

from __future__ import annotations

import math
from array import array

from kvoffload.types import HintGain

# The names with an underscore are of C where this is compiled.
_GAPS = 7
_CLASSES = NUM_CLASSES = 15
_BINS = NUM_BINS = 64
_STEPS = NUM_STEPS = 36
#: Sources: none, several sessions, 16 that are told apart, and all others together.
_SOURCES = 19
SHARED = 36
#: Shares of a stated time: a bin less twice a step, from the least on.
_SHARES = 134

# A block that was never used again is half as likely to be used as blocks are on average.
_NEVER_REUSED = 0.5
# Chance of reuse in the first bin before any data.
_FIRST_CHANCE = 0.02
_MOST_CHANCE = 0.999
# Weight of a prior, in blocks: this share of the capacity, or this many requests' blocks.
_PRIOR_CAPACITY_SHARE = 64.0
_PRIOR_REQUESTS = 4.0
_FACTOR_PRIOR_SHARE = 20.0
# A factor is shown if so many times a prior's weight of blocks shows it.
_EVIDENCE = 4.0
# Share of the counts of the two neighbouring gaps in those of a class.
_NEIGHBOUR_SHARE = 0.25
# Counts lose half their weight over this many requests, or this many capacities of blocks.
_HALF_LIFE_REQUESTS = 1000.0
_HALF_LIFE_CAPACITIES = 8.0
_MEAN_LENGTH_GAIN = 0.01
_LEAST_TOUCHES = 1024
_COMPUTATIONS_PER_CAPACITY = 16

#: 2 ** (-1 / 600): hits of miniatures lose half their weight over 600 requests.
_FADE = FADE = 0.9988454217380301
# Requests after which the gain by hints is reported; half the width of its interval in standard
# errors, more than 1.96 since requests depend on one another; and the additional error of
# miniatures of one block, which for n blocks is divided by sqrt(n).
_LEAST_COMPARED = 256
_STANDARD_ERRORS = 2.5
_MINIATURE_BIAS = 0.17


def age_bin(age: int) -> int:
    """Return the bin of an age in requests."""
    value = age + 1
    exponent = 0
    while value >> exponent >= 8:
        exponent += 1
    return min(4 * exponent + (value >> exponent), _BINS - 1)


def bin_width(bin_index: int) -> float:
    """Return the number of ages in a bin."""
    return 1.0 if bin_index < 8 else float(1 << (bin_index // 4 - 1))


def class_after(gap: int, reuse_class: int) -> int:
    """Return the class of a block of `reuse_class` that is used again after `gap` requests."""
    number = 1 + (gap > 2) + (gap > 6) + (gap > 14) + (gap > 30) + (gap > 126) + (gap > 510)
    return number + _GAPS if reuse_class else number


class Learned:
    """Counts of uses and time by class and age, and the densities that follow from them.

    Parameters
    ----------
    capacity : int
        Number of blocks of the cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.uses = _zeros(_CLASSES * _BINS)
        self.time = _zeros(_CLASSES * _BINS)
        self.chances = _zeros(_CLASSES * _BINS)
        self.logs = _zeros(_CLASSES * _BINS)
        self.used = _zeros(_SOURCES * _SHARES)
        self.expected = _zeros(_SOURCES * _SHARES)
        self.row = _zeros(_BINS)
        self._run_hits = _zeros(_BINS)
        self._run_time = _zeros(_BINS)
        self._run_lasting = _zeros(_BINS)
        self.num_computed = 0  # whoever keeps rows tells by it whether they still hold
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        index = 0
        for index in range(_CLASSES * _BINS):
            self.uses[index] = self.time[index] = 0.0
        for index in range(_SOURCES * _SHARES):
            self.used[index] = self.expected[index] = 0.0
        self.request = 0
        self.mean_length = 0.0
        self.is_hinted = False
        self._touches = 0
        self._compute()

    def hint(self) -> None:
        """Learn from hints from now on."""
        if not self.is_hinted:
            self.is_hinted = True
            self._compute()

    def count_use(self, reuse_class: int, said: int, bin_index: int) -> None:
        """Count a use of a block at an age of a bin."""
        self.uses[reuse_class * _BINS + bin_index] += 1.0
        if said:
            self.used[share_index(said, bin_index)] += 1.0

    def count_time(self, reuse_class: int, said: int, bin_index: int, requests: float) -> None:
        """Count the time, in requests, that blocks spent at the ages of a bin."""
        index = reuse_class * _BINS + bin_index
        self.time[index] += requests
        if said:
            self.expected[share_index(said, bin_index)] += (
                requests * self.logs[index] / bin_width(bin_index)
            )

    def end_request(self, length: int) -> None:
        """Note a request of `length` blocks; if enough were touched, compute and fade."""
        if self.mean_length == 0.0:
            self.mean_length = length
        else:
            self.mean_length += _MEAN_LENGTH_GAIN * (length - self.mean_length)
        self._touches += length
        if self._touches >= max(_LEAST_TOUCHES, self.capacity // _COMPUTATIONS_PER_CAPACITY):
            self._compute()
            self._fade()
            self._touches = 0

    def weight(self) -> float:
        """Return the weight of a prior, in blocks."""
        return max(
            max(self.capacity, 1) / _PRIOR_CAPACITY_SHARE, _PRIOR_REQUESTS * self.mean_length
        )

    def factor(self, said: int, bin_index: int) -> float:
        """Return by how much what was said multiplies the hazard in a bin."""
        prior = self.weight() / _FACTOR_PRIOR_SHARE
        index = share_index(said, bin_index)
        return (self.used[index] + prior) / (self.expected[index] + prior)

    def factors(self, source: int) -> list[tuple[float, float]]:
        """Return the factors of a source for which there is evidence, from the least share on.

        A share is a number of requests per stated second.
        """
        prior = self.weight() / _FACTOR_PRIOR_SHARE
        found = []
        share = 0
        for share in range(_SHARES):
            index = source * _SHARES + share
            if self.used[index] + self.expected[index] > _EVIDENCE * self.weight():
                requests = 2.0 ** ((share - 2 * (_STEPS - 1)) / 4.0 + 1.0)
                factor = (self.used[index] + prior) / (self.expected[index] + prior)
                found.append((requests, factor))
        return found

    def compute_row(self, reuse_class: int, said: int) -> None:
        """Set ``row[b]`` to the density of a label's blocks at the ages of bin b, from 1 on.

        Staying for a run of bins brings ``hits`` in ``time`` on average and goes on with
        probability ``lasting``; from the oldest bin on, runs are joined while that raises the
        density of the younger one.
        """
        num_runs = 0
        bin_index = _BINS - 1
        while bin_index > 0:
            chance = self.chances[reuse_class * _BINS + bin_index]
            if said:
                index = reuse_class * _BINS + bin_index
                chance = -math.expm1(-self.logs[index] * self.factor(said, bin_index))
            hits = chance
            time = bin_width(bin_index) * (1.0 - chance / 2.0)
            lasting = 1.0 - chance
            while (
                num_runs
                and self._run_hits[num_runs - 1] * time > hits * self._run_time[num_runs - 1]
            ):
                num_runs -= 1
                hits += lasting * self._run_hits[num_runs]
                time += lasting * self._run_time[num_runs]
                lasting *= self._run_lasting[num_runs]
            self._run_hits[num_runs] = hits
            self._run_time[num_runs] = time
            self._run_lasting[num_runs] = lasting
            num_runs += 1
            self.row[bin_index] = hits / time
            bin_index -= 1
        if not self.is_hinted:  # a prefix is then worth at least as much as its continuation
            for bin_index in range(2, _BINS):
                self.row[bin_index] = min(self.row[bin_index], self.row[bin_index - 1])

    def _compute(self) -> None:
        """Compute the chance of reuse by class and bin."""
        weight = self.weight()
        common = _FIRST_CHANCE
        for bin_index in range(1, _BINS):
            width = bin_width(bin_index)
            uses = time = 0.0
            for reuse_class in range(_CLASSES):
                uses += self.uses[reuse_class * _BINS + bin_index]
                time += self.time[reuse_class * _BINS + bin_index]
            common = _chance(uses, time, width, weight, common)
            for reuse_class in range(_CLASSES):
                index = reuse_class * _BINS + bin_index
                uses = self.uses[index]
                time = self.time[index]
                gap = (reuse_class - 1) % _GAPS
                if reuse_class and gap:
                    uses += _NEIGHBOUR_SHARE * self.uses[index - _BINS]
                    time += _NEIGHBOUR_SHARE * self.time[index - _BINS]
                if reuse_class and gap < _GAPS - 1:
                    uses += _NEIGHBOUR_SHARE * self.uses[index + _BINS]
                    time += _NEIGHBOUR_SHARE * self.time[index + _BINS]
                prior = common
                if reuse_class == 0:
                    prior = _NEVER_REUSED * common
                elif reuse_class > _GAPS:
                    prior = self.chances[index - _GAPS * _BINS]
                self.chances[index] = _chance(uses, time, width, weight, prior)
                if self.is_hinted:
                    self.logs[index] = -math.log1p(-self.chances[index])
        self.num_computed += 1

    def _fade(self) -> None:
        """Let the counts lose the weight that they lose over the touches since the last time."""
        half_life = max(
            _HALF_LIFE_CAPACITIES * self.capacity, _HALF_LIFE_REQUESTS * self.mean_length
        )
        factor = 2.0 ** (-self._touches / half_life)
        index = 0
        for index in range(_CLASSES * _BINS):
            self.uses[index] *= factor
            self.time[index] *= factor
        if self.is_hinted:
            for index in range(_SOURCES * _SHARES):
                self.used[index] *= factor
                self.expected[index] *= factor


class Gain:
    """Fading sums over the requests that miniatures have served with hints and without.

    The gain is a ratio of sums, hits gained over blocks asked for. Its variance, with weights w
    whose squares enter the error, is that of independent requests,
    ``sum(w * w * (d - gain * a) ** 2) / sum(w * a) ** 2`` for d hits gained of a blocks. The
    difference between small and large caches adds to it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.requests = 0
        self.blocks = self.hits = self.plain = 0.0
        # By the squares of the weights: sums of d * d, d * a, a * a.
        self.squares = self.products = self.squared_blocks = 0.0

    def add(self, blocks: float, hits: float, plain: float) -> None:
        """Count a request."""
        gained = hits - plain
        self.requests += 1
        self.blocks = self.blocks * _FADE + blocks
        self.hits = self.hits * _FADE + hits
        self.plain = self.plain * _FADE + plain
        self.squares = self.squares * (_FADE * _FADE) + gained * gained
        self.products = self.products * (_FADE * _FADE) + gained * blocks
        self.squared_blocks = self.squared_blocks * (_FADE * _FADE) + blocks * blocks

    def seen(self, capacity: int, followed: bool) -> HintGain | None:
        """Return the gain in miniatures of a capacity; None without enough data."""
        if self.requests < _LEAST_COMPARED or self.blocks <= 0.0:
            return None
        hit_ratio = self.hits / self.blocks
        plain = self.plain / self.blocks
        gain = hit_ratio - plain
        squares = self.squares - 2.0 * gain * self.products + gain * gain * self.squared_blocks
        variance = max(0.0, squares) / (self.blocks * self.blocks)
        error = math.sqrt(
            _STANDARD_ERRORS * _STANDARD_ERRORS * variance
            + _MINIATURE_BIAS * _MINIATURE_BIAS / capacity
        )
        return HintGain(hit_ratio, plain, error, followed)


def share_index(said: int, bin_index: int) -> int:
    """Return the index of a bin's share of a stated time."""
    source = said // _STEPS
    step = said % _STEPS
    return source * _SHARES + bin_index + 2 * (_STEPS - 1 - step)


def _chance(uses: float, time: float, width: float, weight: float, prior: float) -> float:
    """Return the chance of a use in a bin, given uses and time there, and a prior's chance."""
    expected = (uses + weight * prior) / (time / width + weight)
    if width > 1.0:  # those that were used leave the bin halfway, on average
        expected /= 1.0 + expected / 2.0
    return min(_MOST_CHANCE, expected)


def _zeros(size: int) -> array[float]:
    return array("d", bytes(8 * size))
