"""Estimates of reuse by age and class, for the hit-density policy.

Structure
    A *use* of a block starts an *age*, counted in requests, that ends with the next use or when the
    block is forgotten. Ages are counted by the block's class and by bin; continuing ages are
    counted by the epoch in which they started. At the end of each epoch these counts give the
    probability of reuse in each bin, and from it the *density*: the expected hits per request that
    the block stays (LHD: Beckmann, Chen & Cidon, NSDI'18).
Differs from the paper
    Classes are numbers of uses and gaps between them, not applications. The counts include blocks
    that are remembered after eviction, so that ages longer than blocks stay in the cache are known.
    The densities are made to fall with age and to rise with use, so that no prefix is worth less
    than its continuation.
Classes
    0: never used again. 1-7: used again once. 8-14: more often. Within the seven, a shorter gap
    between the last two uses has a lower number.
Cost
    O(1) per event; O(classes x bins) per epoch, whatever the capacity. All sums are doubles,
    evaluated in the order written here, so that both twins compute the same bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from ._twin_py import require

NUM_GAPS = 7
NUM_CLASSES = 1 + 2 * NUM_GAPS
NUM_BINS = 64
#: Number of distinct epochs; ages that started earlier count as the oldest.
NUM_EPOCHS = 256

#: Longest gap of each class but the last, in requests.
_LONGEST_GAP = (2, 6, 14, 30, 126, 510)

#: Bins: of one request up to an age of 6, then four per doubling. Bin 0 is not used.
BIN_START = tuple(b if b < 8 else (4 + (b - 8) % 4) << ((b - 8) // 4 + 1) for b in range(65))
BIN_WIDTH = tuple(float(after - before) for before, after in pairwise(BIN_START))

# Without data, a block that was never used again is assumed half as likely to be used.
_NEVER_REUSED = 0.5
# Weight of the estimate over all classes: this many requests' blocks, or capacity / 64.
_PRIOR_REQUESTS = 4.0
_PRIOR_CAPACITY_SHARE = 64.0
# Hazard of the first bin before any data.
_FIRST_HAZARD = 0.02
MOST_HAZARD = 0.999
# Share of the counts of the two neighbouring gaps in those of a class.
NEIGHBOUR_SHARE = 0.25
# Counts lose half their weight over this many requests, or this many capacities of touches.
_HALF_LIFE_REQUESTS = 1000.0
_HALF_LIFE_CAPACITIES = 8.0
_MEAN_LENGTH_GAIN = 0.01
_LEAST_EPOCH_TOUCHES = 1024
_EPOCHS_PER_CAPACITY = 16


def age_bin(age: int) -> int:
    """Return the bin of an age in requests."""
    value = age + 1
    if value < 8:
        return value
    exponent = value.bit_length() - 1
    return min(8 + 4 * (exponent - 3) + (value >> (exponent - 2) & 3), NUM_BINS - 1)


def class_after(gap: int, reuse_class: int) -> int:
    """Return the class of a block of `reuse_class` that is used again after `gap` requests."""
    return 1 + bisect_left(_LONGEST_GAP, gap) + (NUM_GAPS if reuse_class else 0)


class Densities:
    """The density of hits by class and age, learned from the ages that have ended."""

    __slots__ = (
        "_ancient",
        "_capacity",
        "_dropped",
        "_epoch_starts",
        "_epoch_touches",
        "_living",
        "_reused",
        "mean_length",
        "request",
        "table",
    )

    #: ``table[reuse_class][age_bin(age)]``: expected hits per block and request.
    table: list[list[float]]
    #: Recent mean length of a request, in blocks.
    mean_length: float
    #: Number of the last request that was counted.
    request: int

    def __init__(self, cache_capacity: int) -> None:
        self._capacity = cache_capacity
        # Without data, the density is that of LRU, half of it for class 0.
        self.table = [
            [(1.0 if reuse_class else _NEVER_REUSED) / max(1, start) for start in BIN_START[:-1]]
            for reuse_class in range(NUM_CLASSES)
        ]
        self._reused = _zeros()
        self._dropped = _zeros()
        # Continuing ages, by the epoch in which they started: after its start, not at it.
        self._epoch_starts = [0]
        self._living = [[0] * NUM_CLASSES]
        self._ancient = [0] * NUM_CLASSES
        self._epoch_touches = 0
        self.mean_length = 0.0
        self.request = 0

    def clear(self) -> None:
        """Forget everything."""
        fresh = Densities(self._capacity)
        for name in Densities.__slots__:
            setattr(self, name, getattr(fresh, name))

    def start(self, reuse_class: int, request: int) -> None:
        """Count a use at `request`, of a block that is of `reuse_class` from now on."""
        self._living_at(request)[reuse_class] += 1

    def end(self, reuse_class: int, request: int) -> None:
        """Count the end of the age that started at `request`."""
        self._living_at(request)[reuse_class] -= 1

    def count_reuse(self, reuse_class: int, age: int) -> None:
        """Count an age that ended in a use."""
        self._reused[reuse_class][age_bin(age)] += 1.0

    def count_drop(self, reuse_class: int, age: int) -> None:
        """Count an age with an unknown end: the block was forgotten."""
        self._dropped[reuse_class][age_bin(age)] += 1.0

    def copy(self) -> Densities:
        """Return a copy with the same counts."""
        other = Densities(self._capacity)
        for name in Densities.__slots__:
            value = getattr(self, name)
            if isinstance(value, list):
                value = [list(item) if isinstance(item, list) else item for item in value]
            setattr(other, name, value)
        return other

    @property
    def prior(self) -> float:
        """Weight of an estimate's prior, in blocks."""
        return max(self._capacity / _PRIOR_CAPACITY_SHARE, _PRIOR_REQUESTS * self.mean_length)

    def end_request(self, length: int, request: int) -> float | None:
        """Count a request of `length` blocks; at the end of an epoch, recompute the table.

        Returns the factor by which counts fade at the end of an epoch, else None.
        """
        self.request = request
        if self.mean_length == 0.0:
            self.mean_length = float(length)
        else:
            self.mean_length += _MEAN_LENGTH_GAIN * (length - self.mean_length)
        self._epoch_touches += length
        if self._epoch_touches >= max(_LEAST_EPOCH_TOUCHES, self._capacity // _EPOCHS_PER_CAPACITY):
            self._compute(request)
            factor = self._decay()
            self._start_epoch(request)
            return factor
        return None

    def _living_at(self, request: int) -> list[int]:
        """Return the counts of the epoch that `request` is in."""
        index = bisect_left(self._epoch_starts, request)
        return self._living[index - 1] if index else self._ancient

    def _start_epoch(self, request: int) -> None:
        self._epoch_touches = 0
        self._epoch_starts.append(request)
        self._living.append([0] * NUM_CLASSES)
        if len(self._epoch_starts) > NUM_EPOCHS:
            del self._epoch_starts[0]
            for reuse_class, count in enumerate(self._living.pop(0)):
                self._ancient[reuse_class] += count

    def _decay(self) -> float:
        half_life = max(
            _HALF_LIFE_CAPACITIES * self._capacity, _HALF_LIFE_REQUESTS * self.mean_length
        )
        factor: float = 2.0 ** (-self._epoch_touches / half_life)
        for counts in (*self._reused, *self._dropped):
            for bin_index in range(NUM_BINS):
                counts[bin_index] *= factor
        return factor

    def _compute(self, request: int) -> None:
        survivors = self._count_survivors(request)
        prior = self.prior
        common = self._common_hazards(survivors, prior)
        for reuse_class in range(NUM_CLASSES):
            reused = list(self._reused[reuse_class])
            reached = list(survivors[reuse_class])
            for other in neighbours(reuse_class):
                for bin_index in range(NUM_BINS):
                    reused[bin_index] += NEIGHBOUR_SHARE * self._reused[other][bin_index]
                    reached[bin_index] += NEIGHBOUR_SHARE * survivors[other][bin_index]
            trust = 1.0 if reuse_class else _NEVER_REUSED
            hazards = [0.0] * NUM_BINS
            for bin_index in range(1, NUM_BINS):
                expected = reused[bin_index] + prior * common[bin_index] * trust
                hazards[bin_index] = min(MOST_HAZARD, expected / (reached[bin_index] + prior))
            self.table[reuse_class] = best_densities(hazards, BIN_WIDTH, 1)
        _order(self.table)

    def _count_survivors(self, request: int) -> list[list[float]]:
        """Return, by class and bin, how many ages reached the bin and were decided there."""
        living = _zeros()
        for reuse_class, count in enumerate(self._ancient):
            living[reuse_class][-1] += count
        for start, counts in zip(self._epoch_starts, self._living, strict=True):
            bin_index = age_bin(request - start)
            for reuse_class, count in enumerate(counts):
                living[reuse_class][bin_index] += count
        survivors = _zeros()
        for reuse_class in range(NUM_CLASSES):
            total = 0.0
            for bin_index in range(NUM_BINS - 1, 0, -1):
                total += (
                    self._reused[reuse_class][bin_index] + self._dropped[reuse_class][bin_index]
                )
                survivors[reuse_class][bin_index] = total
                # A continuing age is known to have survived only the younger bins.
                total += living[reuse_class][bin_index]
        return survivors

    def _common_hazards(self, survivors: list[list[float]], prior: float) -> list[float]:
        """Return the probability of reuse by bin over all classes, weighted by their room."""
        weights = []
        uses = held = 0.0
        for counts in survivors:
            room = 0.0
            for bin_index in range(1, NUM_BINS):
                room += counts[bin_index] * BIN_WIDTH[bin_index]
            weight = room / max(1.0, counts[1])
            weights.append(weight)
            uses += counts[1]
            held += weight * counts[1]
        scale = uses / held if held > 0.0 else 0.0
        hazards = [0.0] * NUM_BINS
        hazard = _FIRST_HAZARD
        for bin_index in range(1, NUM_BINS):
            reused = reached = 0.0
            for reuse_class, weight in enumerate(weights):
                reused += weight * self._reused[reuse_class][bin_index]
                reached += weight * survivors[reuse_class][bin_index]
            hazard = (scale * reused + prior * hazard) / (scale * reached + prior)
            hazards[bin_index] = hazard
        return hazards

    def _check(self, ages: dict[int, list[int]]) -> None:
        """Verify the counts of continuing ages against `ages`: class -> requests of last use."""
        starts = self._epoch_starts
        require(starts == sorted(set(starts)), "epochs start one after the other")
        require(len(starts) == len(self._living) <= NUM_EPOCHS, "epochs are told apart")
        expected = [[0] * NUM_CLASSES for _ in range(len(starts) + 1)]
        for reuse_class, requests in ages.items():
            for request in requests:
                expected[bisect_left(starts, request)][reuse_class] += 1
        require(expected == [self._ancient, *self._living], "ages that go on are counted")
        for before, after in pairwise(range(1, NUM_BINS)):
            for row in self.table:
                require(row[before] >= row[after] > 0.0, "densities fall with age")
        for bin_index in range(1, NUM_BINS):
            for gap in range(1, NUM_GAPS + 1):
                once, again = self.table[gap][bin_index], self.table[gap + NUM_GAPS][bin_index]
                require(again >= once >= self.table[0][bin_index], "densities rise with use")


class SharedDensities(Densities):
    """The densities that another policy learns; the uses here are not counted."""

    __slots__ = ("_learned",)

    def __init__(self, learned: Densities) -> None:
        self._learned = learned

    @property
    def table(self) -> list[list[float]]:  # type: ignore[override]
        """The other policy's table."""
        return self._learned.table

    @property
    def request(self) -> int:  # type: ignore[override]
        """The present request of the other policy."""
        return self._learned.request

    def clear(self) -> None:
        """Do nothing: the other policy clears them."""

    def _check(self, ages: dict[int, list[int]]) -> None:
        """Do nothing: nothing is counted."""


def _zeros() -> list[list[float]]:
    return [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]


def neighbours(reuse_class: int) -> list[int]:
    """Return the classes of the next shorter and the next longer gap."""
    first = 1 if reuse_class <= NUM_GAPS else 1 + NUM_GAPS
    both = (reuse_class - 1, reuse_class + 1) if reuse_class else ()
    return [other for other in both if first <= other < first + NUM_GAPS]


def best_densities(hazards: list[float], widths: Sequence[float], first: int) -> list[float]:
    """Return, for each bin from `first` on, the most hits that staying on from there can bring.

    The hits are per block and unit of the bins' `widths`.

    Staying for a run of bins brings ``hits`` after ``time`` on average, and continues with
    probability ``lasting``; runs are joined, from the oldest bin, while that raises the density.
    """
    table = [1.0] * NUM_BINS
    runs: list[tuple[float, float, float]] = []
    for bin_index in range(NUM_BINS - 1, first - 1, -1):
        hazard = hazards[bin_index]
        hits, time, lasting = hazard, widths[bin_index] * (1.0 - hazard / 2.0), 1.0 - hazard
        while runs and runs[-1][0] * time > hits * runs[-1][1]:
            more_hits, more_time, still_lasting = runs.pop()
            hits += lasting * more_hits
            time += lasting * more_time
            lasting *= still_lasting
        runs.append((hits, time, lasting))
        table[bin_index] = hits / time
    return table


def _order(table: list[list[float]]) -> None:
    """Make densities fall with age, fall with the gap, and rise with use."""
    for row in table:
        for bin_index in range(2, NUM_BINS):
            row[bin_index] = min(row[bin_index], row[bin_index - 1])
    for bin_index in range(1, NUM_BINS):
        for gap in range(NUM_GAPS - 1, 0, -1):
            for row, longer in (
                (table[gap], table[gap + 1]),
                (table[gap + NUM_GAPS], table[gap + NUM_GAPS + 1]),
            ):
                row[bin_index] = max(row[bin_index], longer[bin_index])
        for gap in range(1, NUM_GAPS + 1):
            once, again = table[gap], table[gap + NUM_GAPS]
            once[bin_index] = max(once[bin_index], table[0][bin_index])
            again[bin_index] = max(again[bin_index], once[bin_index])
