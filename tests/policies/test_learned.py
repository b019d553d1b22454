"""What hit density learns: hazards, factors of hints, densities, alike plain and compiled."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest

import kvoffload.policies
from kvoffload.policies import _learned
from tests.sources import plain

SOURCE = Path(kvoffload.policies.__file__).with_name("_learned.py")
LENGTH = 4
FIRST_SAID = 2 * _learned.NUM_STEPS  # the least of what a source may say


def serve(learned: Any, gaps: Any, num_blocks: int, requests: int, says: Any = lambda: 0) -> None:
    """Let blocks be used again after the gaps that `gaps` gives, and count all of their time."""
    ages = [0] * num_blocks
    due = [gaps() for _ in range(num_blocks)]
    said = [says() for _ in range(num_blocks)]
    for _ in range(requests):
        for block in range(num_blocks):
            ages[block] += 1
            bin_index = _learned.age_bin(ages[block])
            learned.count_time(0, said[block], bin_index, 1.0)
            if ages[block] == due[block]:
                learned.count_use(0, said[block], bin_index)
                ages[block], due[block], said[block] = 0, gaps(), says()
        learned.end_request(LENGTH)


def hazard(learned: Any, age: int) -> float:
    """Return the chance of a use per request at an age, by its bin."""
    width = _learned.bin_width(_learned.age_bin(age))
    chance = learned.chances[_learned.age_bin(age)]
    return float(chance if width == 1 else chance / (1 - chance / 2) / width)


@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_the_hazard_of_geometric_gaps_is_found(rate: float) -> None:
    learned = _learned.Learned(400)
    even = ((number * (math.sqrt(5) - 1) / 2) % 1 for number in itertools.count(1))
    serve(learned, lambda: math.ceil(math.log(next(even)) / math.log1p(-rate)), 400, 2000)
    for age in range(1, round(1.5 / rate)):
        assert hazard(learned, age) == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("gap", [1, 5, 10, 46])
def test_the_hazard_of_a_fixed_gap_is_found(gap: int) -> None:
    learned = _learned.Learned(400)
    serve(learned, lambda: gap, 400, 2000)
    same = [age for age in range(1, gap + 1) if _learned.age_bin(age) == _learned.age_bin(gap)]
    assert hazard(learned, gap) == pytest.approx(1 / len(same), rel=0.05)
    for age in range(1, same[0]):
        assert hazard(learned, age) < 0.01


def test_times_that_are_drawn_independently_of_the_return_have_the_factor_1() -> None:
    draw = random.Random(1)
    learned = _learned.Learned(400)
    learned.hint()
    serve(
        learned,
        lambda: math.ceil(math.log(1 - draw.random()) / math.log1p(-0.02)),
        400,
        3000,
        lambda: FIRST_SAID + draw.randrange(4, 20),
    )
    factors = dict(learned.factors(2))
    evidence = 0
    start = 2 * len(learned.expected) // 19
    for share, expected in enumerate(learned.expected[start : start + len(learned.expected) // 19]):
        if expected > 50:
            factor = factors[2.0 ** ((share - 2 * (_learned.NUM_STEPS - 1)) / 4 + 1)]
            assert abs(factor - 1) < 3 / math.sqrt(expected)
            evidence += 1
    assert evidence > 10


def test_times_that_are_right_have_a_great_factor_at_their_share_and_a_small_one_before() -> None:
    draw = random.Random(2)
    learned = _learned.Learned(400)
    learned.hint()
    steps = iter(lambda: draw.randrange(6, 14), None)
    told, kept = itertools.tee(steps)
    serve(
        learned,
        lambda: round(2 ** (next(told) / 2)),
        400,
        2000,
        lambda: FIRST_SAID + next(kept),
    )
    factors = dict(learned.factors(2))
    best = max(factors, key=factors.__getitem__)
    assert 0.7 <= best <= 1.4
    assert factors[best] > 4
    assert all(factor < 0.5 for share, factor in factors.items() if share < 0.7)


def filled(module: Any, seed: int, hinted: bool) -> Any:
    """Return what is learned from random counts."""
    draw = random.Random(seed)
    learned = module.Learned(200)
    for number in range(3000):
        if hinted and number == 1000:
            learned.hint()
        said = draw.choice([0, module.SHARED, FIRST_SAID + draw.randrange(3 * module.NUM_STEPS)])
        bin_index = module.age_bin(int(draw.expovariate(1) * 10 ** draw.randrange(6)))
        reuse_class = draw.randrange(module.NUM_CLASSES)
        if draw.random() < 0.4:
            learned.count_use(reuse_class, said, bin_index)
        else:
            learned.count_time(reuse_class, said, bin_index, 100 * draw.random())
        if number % 3 == 0:
            learned.request += 1
            learned.end_request(draw.randrange(1, 40))
        if number == 200:
            learned.clear()
    return learned


@pytest.mark.parametrize("said", [0, FIRST_SAID, FIRST_SAID + 50])
@pytest.mark.parametrize("reuse_class", [0, 3, 14])
def test_a_density_is_the_most_hits_per_request_over_all_horizons(
    reuse_class: int, said: int
) -> None:
    learned = filled(_learned, 1, hinted=True)
    learned.compute_row(reuse_class, said)
    for first in range(1, _learned.NUM_BINS):
        most = hits = time = 0.0
        staying = 1.0
        for bin_index in range(first, _learned.NUM_BINS):
            index = reuse_class * _learned.NUM_BINS + bin_index
            factor = learned.factor(said, bin_index) if said else 1.0
            chance = 1 - (1 - learned.chances[index]) ** factor
            hits += staying * chance
            time += staying * _learned.bin_width(bin_index) * (1 - chance / 2)
            staying *= 1 - chance
            most = max(most, hits / time)
        assert learned.row[first] == pytest.approx(most, rel=1e-9)


def test_without_hints_a_density_never_rises_with_age() -> None:
    learned = filled(_learned, 1, hinted=False)
    for reuse_class in range(_learned.NUM_CLASSES):
        learned.compute_row(reuse_class, 0)
        row = list(learned.row[1:])
        assert row == sorted(row, reverse=True)


def test_plain_and_compiled_are_equal_to_the_bit(seed: int) -> None:
    if _learned.__file__ == str(SOURCE):
        pytest.skip("there is no compiled twin")
    from_source = plain(_learned)
    for hinted in (False, True):
        one, other = (filled(module, seed, hinted) for module in (from_source, _learned))
        for name in ("uses", "time", "chances", "logs", "used", "expected"):
            assert list(getattr(one, name)) == list(getattr(other, name))
        for source in range(2, 5):
            assert one.factors(source) == other.factors(source)
        for label in itertools.product(range(_learned.NUM_CLASSES), (0, FIRST_SAID + 9)):
            one.compute_row(*label)
            other.compute_row(*label)
            assert list(one.row) == list(other.row)
        assert one.num_computed == other.num_computed > 10
    gains = from_source.Gain(), _learned.Gain()
    for number in range(300):
        _ = [gain.add(number % 7, number % 5, number % 3) for gain in gains]
    assert gains[0].seen(9, True) == gains[1].seen(9, True) is not None
    for age in [*range(3000), *(2**bit - 1 for bit in range(12, 31))]:
        assert from_source.age_bin(age) == _learned.age_bin(age)
        assert from_source.class_after(age, age % 15) == _learned.class_after(age, age % 15)
