"""Return times of sessions as their clients say them, and what these hints are worth.

A client says after how many seconds its session asks again, T. This is only evidence: the times
that sessions of the same source then took calibrate it to T', and a block's age is counted in units
of T'. Densities over that ratio are learned as ``_densities_py`` learns those over requests, so
that bias, noise and missing returns lower the hazard, and false hints gain nothing.

Structure
    A *source* says when sessions return: 16 are distinguished, all further ones count as one. It
    has moments of the said and the observed times, in logarithms of seconds, and, by class and bin
    of the ratio, counts of the ages that have ended; the ages that continue are counted by turn.
    A return is a request whose deepest known block has a turn with a hint; the same turn may be
    returned to more than once.
Calibration
    A line from ln T to ln of the elapsed time, fitted to the moments of the source. Its prior is
    the line of all sources, whose prior is a line of slope 1/2 through 30 seconds.
Choices
    Said times and times between request and return are clipped to 1 ... 2**31 seconds. If the clock
    goes back, ages are 0, not negative. T' is rounded to half an octave once, for counting and for
    ranking. The time is that of the last `begun`; a touch outside a request has no time of its own,
    is not a return, and its ratio is counted at that time.
Cost
    O(1) per event; O(sources x classes x bins + turns) per epoch. 23 KB per source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvoffload.types import HintSource

from ._densities_py import (
    MOST_HAZARD,
    NEIGHBOUR_SHARE,
    NUM_BINS,
    NUM_CLASSES,
    best_densities,
    neighbours,
)
from ._turns_py import NUM_HALF_OCTAVES, Part, Turn
from ._twin_py import require

#: Number of distinct sources; one more stands for all others.
MOST_SOURCES = 16
#: Returns after which the quality of a source is reported.
LEAST_RETURNS = 10

_LEAST_SECONDS = 1.0
_MOST_SECONDS = 2147483648.0
_MOST_LOG_SECONDS = 22.0
# Weight of a fit's prior, in returns, and the line before any data.
_PRIOR_RETURNS = 20.0
_FIRST_LINE = (0.5, 3.4, 3.4)
# Moments fade by this at each return.
_SOURCE_FADE = 1.0 - 1.0 / 500.0
_ALL_FADE = 1.0 - 1.0 / 2000.0
# Seconds between requests: the value before the first, and the share of each new one in the mean.
_FIRST_INTERVAL = 1.0
_INTERVAL_GAIN = 0.02
_FIRST_HAZARD = 0.05

#: Bin 0: ratios up to 1/16; then four bins per doubling. The width of each, as a ratio.
_FIRST_RATIO = 0.0625
RATIO_WIDTH: tuple[float, ...] = tuple(
    _FIRST_RATIO * (2.0 ** (b / 4.0) - 2.0 ** ((b - 1) / 4.0)) if b else _FIRST_RATIO
    for b in range(NUM_BINS)
)
#: T' by half octave, in seconds.
HALF_OCTAVES: tuple[float, ...] = tuple(2.0 ** (number / 2.0) for number in range(NUM_HALF_OCTAVES))

#: Slope of a line, and a point on it.
_Line = tuple[float, float, float]


def ratio_bin(ratio: float) -> int:
    """Return the bin of an age in units of T', which is finite and >= 0."""
    if ratio <= _FIRST_RATIO:
        return 0
    return min(NUM_BINS - 1, 1 + math.floor(4.0 * math.log2(16.0 * ratio)))


def said_seconds(expect_s: float) -> float:
    """Return T, clipped for counting."""
    return min(max(_LEAST_SECONDS, float(expect_s)), _MOST_SECONDS)


def _passed(now: float, since: float) -> float:
    """Return the seconds since then, 0 if the clock has gone back."""
    return min(max(0.0, now - since), _MOST_SECONDS)


@dataclass(slots=True, eq=False)
class Moments:
    """Fading sums over returns of 1, x, y, xx, xy, yy: x is ln of the said time, y of the real."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float, fade: float) -> None:
        """Count a return."""
        self.n = self.n * fade + 1.0
        self.x = self.x * fade + x
        self.y = self.y * fade + y
        self.xx = self.xx * fade + x * x
        self.xy = self.xy * fade + x * y
        self.yy = self.yy * fade + y * y

    def fit(self, leans_on: _Line) -> _Line:
        """Return the fitted line, with another as its prior."""
        slope, mean_x, mean_y = leans_on
        n = self.n + _PRIOR_RETURNS
        x = (self.x + _PRIOR_RETURNS * mean_x) / n
        y = (self.y + _PRIOR_RETURNS * mean_y) / n
        s_xx = s_xy = 0.0
        if self.n > 0.0:
            s_xx = self.xx - self.x * self.x / self.n
            s_xy = self.xy - self.x * self.y / self.n
        fitted = (s_xy + _PRIOR_RETURNS * slope) / (s_xx + _PRIOR_RETURNS)
        return min(max(fitted, 0.0), 1.0), x, y

    def spread(self, line: _Line) -> float:
        """Return the standard deviation of y around a line; requires at least one return."""
        slope, mean_x, mean_y = line
        offset = mean_y - slope * mean_x
        squares = (
            self.yy
            - 2.0 * slope * self.xy
            - 2.0 * offset * self.y
            + slope * slope * self.xx
            + 2.0 * slope * offset * self.x
            + self.n * offset * offset
        )
        return math.sqrt(max(0.0, squares) / self.n)


@dataclass(slots=True, eq=False)
class _Source:
    """The hints of one source, and the densities over age in units of T'."""

    moments: Moments = field(default_factory=Moments)
    hints: int = 0  # turns that it began
    returns: int = 0
    reused: list[list[float]] = field(default_factory=lambda: _rows(0.0))
    dropped: list[list[float]] = field(default_factory=lambda: _rows(0.0))
    #: ``table[reuse_class][ratio_bin(ratio)]``: hits per block and T'.
    table: list[list[float]] = field(default_factory=lambda: [list(row) for row in _FRESH])


class Returns:
    """When sessions are expected to return, and the densities that follow from it."""

    __slots__ = ("_all", "_begun", "_interval", "_living", "_now", "_numbers", "_sources")

    def __init__(self) -> None:
        self._sources: list[_Source] = []
        self._numbers: dict[str, int] = {}  # of the distinct sources
        self._all = Moments()
        self._living: dict[Part, None] = {}  # with ages that continue
        self._now = 0.0
        self._begun = False  # at `_now`
        self._interval = _FIRST_INTERVAL

    @property
    def now(self) -> float:
        """The time of the last request, in seconds."""
        return self._now

    @property
    def interval(self) -> float:
        """Recent mean of the seconds between requests."""
        return self._interval

    @property
    def num_sources(self) -> int:
        """Number of sources so far; those beyond the distinct ones count as one."""
        return len(self._sources)

    def begin(self, now: float) -> None:
        """Note the time of a request."""
        if self._begun:
            self._interval += _INTERVAL_GAIN * (_passed(now, self._now) - self._interval)
        self._now = now
        self._begun = True

    def number_of(self, source: str) -> int:
        """Return the number of a source, from 0; register it if it is unknown."""
        number = self._numbers.get(source)
        if number is None:
            number = min(len(self._numbers), MOST_SOURCES)
            if number < MOST_SOURCES:
                self._numbers[source] = number
            if number == len(self._sources):
                self._sources.append(_Source())
        return number

    # -- calibration -----------------------------------------------------------------------

    def count_return(self, turn: Turn) -> None:
        """Count that a session has returned to a turn, now."""
        x = math.log(turn.said)
        y = math.log(max(_LEAST_SECONDS, _passed(self._now, turn.begun)))
        source = self._sources[turn.source]
        source.returns += 1
        source.moments.add(x, y, _SOURCE_FADE)
        self._all.add(x, y, _ALL_FADE)

    def turn(self, said: float, source: int, now: float) -> Turn:
        """Return a turn that begins now, with `said` calibrated."""
        self._sources[source].hints += 1
        slope, mean_x, mean_y = self._line(self._sources[source])
        seconds = mean_y + slope * (math.log(said) - mean_x)
        expected = max(_LEAST_SECONDS, math.exp(min(seconds, _MOST_LOG_SECONDS)))
        half_octave = min(math.floor(2.0 * math.log2(expected) + 0.5), NUM_HALF_OCTAVES - 1)
        return Turn(now, said, source, half_octave)

    def _line(self, source: _Source) -> _Line:
        """Return the line that calibrates a source."""
        return source.moments.fit(self._all.fit(_FIRST_LINE))

    def seen(self) -> tuple[HintSource, ...]:
        """Return the facts of each source, in the order of their first hints."""
        names: list[str | None] = [*self._numbers, None]
        found = []
        for name, source in zip(names, self._sources, strict=False):
            slope = spread = None
            if source.returns >= LEAST_RETURNS:
                line = self._line(source)
                slope, spread = line[0], source.moments.spread(line)
            found.append(HintSource(name, source.hints, source.returns, slope, spread))
        return tuple(found)

    # -- ages ------------------------------------------------------------------------------

    def _bin(self, turn: Turn) -> int:
        return ratio_bin(_passed(self._now, turn.begun) / HALF_OCTAVES[turn.half_octave])

    def start(self, part: Part) -> None:
        """Count a block, resident or not, whose age continues in units of a turn's T'."""
        if not part.living:
            self._living[part] = None
        part.living += 1

    def end(self, part: Part) -> None:
        """Count that such an age has ended."""
        part.living -= 1
        if not part.living:
            del self._living[part]

    def count_reuse(self, part: Part) -> None:
        """Count an age that ended in a use."""
        turn = part.turn
        self._sources[turn.source].reused[part.reuse_class][self._bin(turn)] += 1.0

    def count_drop(self, part: Part) -> None:
        """Count an age with an unknown end: the block was forgotten."""
        turn = part.turn
        self._sources[turn.source].dropped[part.reuse_class][self._bin(turn)] += 1.0

    # -- densities -------------------------------------------------------------------------

    def density(self, part: Part) -> float:
        """Return the hits per request that a block brings; its next chance is the next request."""
        return self._density(part, _passed(self._now, part.turn.begun) + self._interval)

    def stored_density(self, part: Part) -> float:
        """Return the density of a block that is stored now."""
        return self._density(part, self._interval)

    def _density(self, part: Part, age: float) -> float:
        turn = part.turn
        expected = HALF_OCTAVES[turn.half_octave]
        row = self._sources[turn.source].table[part.reuse_class]
        return row[ratio_bin(age / expected)] / expected * self._interval

    def compute(self, prior: float) -> None:
        """Recompute all tables; `prior` is the weight of an estimate's prior."""
        survivors = self._count_survivors()
        source_reused, source_reached = [], []
        all_reused, all_reached = [0.0] * NUM_BINS, [0.0] * NUM_BINS
        for source, reached in zip(self._sources, survivors, strict=True):
            source_reused.append(_sums(source.reused))
            source_reached.append(_sums(reached))
            for bin_index in range(NUM_BINS):
                all_reused[bin_index] += source_reused[-1][bin_index]
                all_reached[bin_index] += source_reached[-1][bin_index]
        common = _hazards(all_reused, all_reached, prior, [_FIRST_HAZARD] * NUM_BINS)
        for number, source in enumerate(self._sources):
            own = _hazards(source_reused[number], source_reached[number], prior, common)
            for reuse_class in range(NUM_CLASSES):
                reused = list(source.reused[reuse_class])
                reached_class = list(survivors[number][reuse_class])
                for other in neighbours(reuse_class):
                    for bin_index in range(NUM_BINS):
                        reused[bin_index] += NEIGHBOUR_SHARE * source.reused[other][bin_index]
                        reached_class[bin_index] += (
                            NEIGHBOUR_SHARE * survivors[number][other][bin_index]
                        )
                hazards = _hazards(reused, reached_class, prior, own)
                for bin_index in range(NUM_BINS):
                    hazards[bin_index] = min(MOST_HAZARD, hazards[bin_index])
                source.table[reuse_class] = best_densities(hazards, RATIO_WIDTH, 0)

    def decay(self, factor: float) -> None:
        """Let the counts fade."""
        for source in self._sources:
            for counts in (*source.reused, *source.dropped):
                for bin_index in range(NUM_BINS):
                    counts[bin_index] *= factor

    def _count_survivors(self) -> list[list[list[float]]]:
        """Return, by source, class and bin, how many ages reached the bin and were decided."""
        living = [_rows(0.0) for _ in self._sources]
        for part in self._living:
            living[part.turn.source][part.reuse_class][self._bin(part.turn)] += part.living
        survivors = [_rows(0.0) for _ in self._sources]
        for number, source in enumerate(self._sources):
            for reuse_class in range(NUM_CLASSES):
                total = 0.0
                for bin_index in range(NUM_BINS - 1, -1, -1):
                    total += (
                        source.reused[reuse_class][bin_index]
                        + source.dropped[reuse_class][bin_index]
                    )
                    survivors[number][reuse_class][bin_index] = total
                    total += living[number][reuse_class][bin_index]
        return survivors

    def _check(self, living: dict[Part, int]) -> None:
        """Verify the counts of continuing ages against `living`: part -> number."""
        require({part: part.living for part in self._living} == living, "ages are counted by turn")
        require(len(self._sources) <= MOST_SOURCES + 1, "so many sources are told apart")
        require(self._interval >= 0.0, "requests come one after the other")
        for source in self._sources:
            for row in source.table:
                require(all(density >= 0.0 for density in row), "densities are no debts")


def _rows(value: float) -> list[list[float]]:
    return [[value] * NUM_BINS for _ in range(NUM_CLASSES)]


def _sums(rows: list[list[float]]) -> list[float]:
    """Return the sums over the classes."""
    sums = [0.0] * NUM_BINS
    for row in rows:
        for bin_index in range(NUM_BINS):
            sums[bin_index] += row[bin_index]
    return sums


def _hazards(
    reused: list[float], reached: list[float], prior: float, leans_on: list[float]
) -> list[float]:
    """Return the probability of reuse by bin; without any weight, the prior."""
    hazards = list(leans_on)
    for bin_index in range(NUM_BINS):
        weight = reached[bin_index] + prior
        if weight > 0.0:
            hazards[bin_index] = (reused[bin_index] + prior * leans_on[bin_index]) / weight
    return hazards


# Before anything is known.
_FRESH: list[list[float]] = [
    best_densities([_FIRST_HAZARD] * NUM_BINS, RATIO_WIDTH, 0)
] * NUM_CLASSES
