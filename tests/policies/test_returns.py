"""Hit density with hints of returns: calibration, tables, turns, and how they rank blocks."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest

from kvoffload import Hints
from kvoffload.policies._returns_py import (
    HALF_OCTAVES,
    MOST_SOURCES,
    RATIO_WIDTH,
    Moments,
    Returns,
    ratio_bin,
    said_seconds,
)
from kvoffload.policies._turns_py import NUM_HALF_OCTAVES, Turn, TurnRings
from kvoffload.testing.policies import check_invariants
from tests import _python
from tests.blocks import A, B, C, D, E, F, block_hashes
from tests.policies.steps import idle, policy_of


def manager_of(twin: ModuleType, capacity: int, options: str = "") -> Any:
    return twin.CPUOffloadingManager(16, capacity, f"hit-density{options}")


def serve(
    manager: Any, hashes: list[bytes], now: float | None = None, hints: Hints | None = None
) -> int:
    """Serve a request by the protocol of a connector; return its hits."""
    request = manager.begin(hashes, hints=hints, now=now)
    found = request.lookup()
    request.prepare_store()
    request.complete_store()
    request.finish()
    return found


def returned(said: list[float], came: list[float], source: str = "") -> Returns:
    """Return what is learned where each of these was said and came."""
    returns = Returns()
    number = returns.number_of(source)
    for says, comes in zip(said, came, strict=True):
        returns.begin(0.0)
        turn = returns.turn(said_seconds(says), number, 0.0)
        returns.begin(comes)
        returns.count_return(turn)
    return returns


def expected(returns: Returns, said: float, source: str = "") -> float:
    """Return T', rounded to half an octave."""
    turn = returns.turn(said_seconds(said), returns.number_of(source), 0.0)
    return HALF_OCTAVES[turn.half_octave]


# -- calibration -----------------------------------------------------------------------------


def test_a_fit_leans_on_twenty_returns_of_another() -> None:
    moments = Moments()
    assert moments.fit((0.5, 3.4, 3.0)) == pytest.approx((0.5, 3.4, 3.0))
    for x, y in ((1.0, 2.0), (3.0, 8.0)):
        moments.add(x, y, 1.0)
    # Sxx = 1 + 9 - 16 / 2 = 2, Sxy = 2 + 24 - 40 / 2 = 6
    slope, x, y = moments.fit((0.5, 3.4, 3.0))
    assert slope == pytest.approx((6 + 20 * 0.5) / (2 + 20))
    assert (x, y) == pytest.approx(((4 + 20 * 3.4) / 22, (10 + 20 * 3.0) / 22))


def test_moments_fade_before_a_return_is_added() -> None:
    moments = Moments()
    moments.add(2.0, 3.0, 0.5)
    moments.add(4.0, 5.0, 0.5)
    assert (moments.n, moments.x, moments.y) == (1.5, 5.0, 6.5)
    assert (moments.xx, moments.xy) == (18.0, 23.0)


@pytest.mark.parametrize("slope", [-5.0, 5.0])
def test_a_slope_is_within_nothing_and_all(slope: float) -> None:
    moments = Moments()
    for number in range(200):
        moments.add(number / 10, slope * number / 10, 1.0)
    assert moments.fit((0.5, 3.4, 3.4))[0] == (0.0 if slope < 0 else 1.0)


def test_before_any_return_a_hint_is_half_believed() -> None:
    returns = Returns()
    for said in (1.0, 30.0, 3600.0):
        assert expected(returns, said) == pytest.approx(
            math.exp(3.4 + 0.5 * (math.log(said) - 3.4)), rel=0.19
        )


def test_a_source_that_is_right_is_believed() -> None:
    draw = random.Random(1)
    said = [math.exp(draw.uniform(0, 8)) for _ in range(3000)]
    returns = returned(said, said)
    for says in (2.0, 60.0, 1000.0):
        assert expected(returns, says) == pytest.approx(says, rel=0.25)


def test_a_source_that_says_a_second_always_is_taken_for_its_mean() -> None:
    returns = returned([1.0] * 2000, [90.0] * 2000)
    assert expected(returns, 1.0) == pytest.approx(90.0, rel=0.2)


def test_sources_are_calibrated_apart_and_the_unknown_one_by_all() -> None:
    returns = returned([1.0] * 500, [90.0] * 500, "liar")
    assert expected(returns, 1.0, "new") == pytest.approx(90.0, rel=0.5)
    number = returns.number_of("right")
    for _ in range(500):
        returns.begin(0.0)
        turn = returns.turn(1.0, number, 0.0)
        returns.begin(1.0)
        returns.count_return(turn)
    assert expected(returns, 1.0, "right") < 2.0
    assert expected(returns, 1.0, "liar") > 60.0


def test_sources_beyond_the_sixteenth_are_one() -> None:
    returns = Returns()
    numbers = [returns.number_of(f"source {number}") for number in range(MOST_SOURCES + 5)]
    assert numbers == [*range(MOST_SOURCES), *[MOST_SOURCES] * 5]
    assert returns.number_of("source 3") == 3
    assert returns.num_sources == MOST_SOURCES + 1


@pytest.mark.parametrize("said", [5e-324, 1e-3, 1.0, 2.0**31, 1e300])
def test_any_number_of_seconds_may_be_said(said: float) -> None:
    returns = returned([said] * 50, [1e300] * 50)
    turn = returns.turn(said_seconds(said), 0, 0.0)
    assert 0 <= turn.half_octave < NUM_HALF_OCTAVES
    assert 1.0 <= turn.said <= 2.0**31


def test_a_clock_that_goes_back_makes_no_negative_ages() -> None:
    returns = Returns()
    number = returns.number_of("")
    returns.begin(1e9)
    turn = returns.turn(30.0, number, 1e9)
    part = turn.part(0)
    young = returns.density(part) / returns.interval
    returns.begin(-1e9)
    assert returns.interval == pytest.approx(0.98)
    assert returns.density(part) / returns.interval == pytest.approx(young)
    returns.count_return(turn)
    returns.count_reuse(part)
    returns.compute(1.0)
    assert expected(returns, 30.0) >= 1.0


# -- tables ----------------------------------------------------------------------------------


def test_bins_are_of_a_quarter_octave() -> None:
    assert ratio_bin(0.0) == ratio_bin(1 / 16) == 0
    assert ratio_bin(1 / 16 * 1.0001) == 1
    assert ratio_bin(1.0) == 17
    assert ratio_bin(2.0**40) == 63
    start = 0.0
    for number, width in enumerate(RATIO_WIDTH):
        assert ratio_bin(start + width / 2) == number
        start += width


def test_a_density_falls_behind_when_the_session_was_expected() -> None:
    returns = Returns()
    number = returns.number_of("")
    draw = random.Random(2)
    for _ in range(2000):
        returns.begin(0.0)
        part = Turn(0.0, 64.0, number, 12).part(0)
        returns.start(part)
        returns.begin(64.0 * draw.uniform(0.8, 1.2))
        returns.end(part)
        returns.count_reuse(part)
    returns.compute(16.0)
    part = Turn(0.0, 64.0, number, 12).part(0)
    before, then, behind = (returns._density(part, age) for age in (1.0, 60.0, 200.0))
    assert then > 1.5 * before > 10 * behind


# -- rings -----------------------------------------------------------------------------------


def test_a_ring_is_of_a_source_a_class_and_half_an_octave() -> None:
    rings = TurnRings()
    for number, (source, half_octave, ring) in enumerate(
        [(0, 9, 0), (0, 9, 0), (1, 9, 0), (0, 10, 0), (0, 9, 1)]
    ):
        part = Turn(float(number), 20.0, source, half_octave).part(ring)
        rings.add(part, block_hashes(number)[0], idle())
    assert sorted(map(len, rings.rings.values())) == [1, 1, 1, 2]
    rings._check()


def test_a_ring_gives_the_deepest_of_the_oldest_turn_and_of_the_youngest() -> None:
    rings = TurnRings()
    for number, blocks in enumerate(((B, A), (D, C), (F, E))):
        part = Turn(float(number), 20.0, 0, 9).part(0)
        for block in blocks:  # as a touch does, last first
            rings.add(part, block, idle())
    (key,) = rings.rings
    assert [block for block, _ in rings.oldest_first(key)] == [B, A, D, C, F, E]
    assert [block for block, _ in rings.youngest_first(key)] == [F, E, D, C, B, A]


# -- hit density -----------------------------------------------------------------------------


def workload(seed: int, requests: int) -> list[tuple[list[bytes], float, Hints | None]]:
    """Return sessions that return when they say, those of two kinds: soon and late."""
    draw = random.Random(seed)
    times: list[tuple[float, int]] = [(draw.uniform(0, 50), number) for number in range(60)]
    lengths = dict.fromkeys(range(60), 4)
    rows = []
    for _ in range(requests):
        times.sort()
        now, number = times.pop(0)
        lengths[number] += draw.randrange(1, 3)
        gap = draw.choice([3.0, 300.0])
        blocks = [1, 2, *range(number * 10_000, number * 10_000 + lengths[number])]
        rows.append((block_hashes(*blocks), now, Hints(expect_s=gap)))
        times.append((now + gap * draw.uniform(0.9, 1.1), number))
    return rows


def hits_of(manager: Any, rows: list[tuple[list[bytes], float, Hints | None]]) -> int:
    return sum(serve(manager, hashes, now, hints) for hashes, now, hints in rows)


def test_hints_that_are_right_bring_hits(twin: ModuleType) -> None:
    rows = workload(1, 900)
    without = hits_of(manager_of(twin, 400), [(hashes, now, None) for hashes, now, _ in rows])
    with_hints = hits_of(manager_of(twin, 400), rows)
    assert with_hints > 1.1 * without


def test_without_hints_the_clock_changes_nothing(twin: ModuleType) -> None:
    rows = [(hashes, now, None) for hashes, now, _ in workload(2, 400)]
    managers = [manager_of(twin, 90) for _ in range(2)]
    for hashes, now, _ in rows:
        assert serve(managers[0], hashes, now) == serve(managers[1], hashes)
    first, second = (manager.policy for manager in managers)
    assert first.densities == second.densities
    assert first.trial_hits == second.trial_hits
    assert [list(ring) for ring in first.rings] == [list(ring) for ring in second.rings]


def test_an_end_alone_makes_no_trial(twin: ModuleType) -> None:
    manager = manager_of(twin, 64)
    serve(manager, [A, B], 0.0, Hints(ends=True))
    assert set(manager.policy.trial_hits) == {"lru", "hit-density", "arc-classic"}
    serve(manager, [C, D], 1.0, Hints(expect_s=5.0))
    assert list(manager.policy.trial_hits) == ["lru", "hit-density", "plain", "arc-classic"]
    check_invariants(manager)
    manager.reset_cache()
    assert set(manager.policy.trial_hits) == {"lru", "hit-density", "arc-classic"}


def test_a_block_that_others_use_belongs_to_no_turn() -> None:
    manager = manager_of(_python, 64)
    records = manager.policy._records
    hints = Hints(expect_s=20.0)
    serve(manager, [A, B], 0.0, hints)
    assert records[A].part.turn is records[B].part.turn
    serve(manager, [A, C], 1.0, hints)  # nobody knows yet that A is not of this session
    assert records[A].part.turn is records[C].part.turn is not records[B].part.turn
    serve(manager, [A, B, D], 2.0, hints)
    assert records[A].part is None
    assert records[B].part.turn is records[D].part.turn
    serve(manager, [A, C], 3.0, hints)
    assert records[A].part is None
    check_invariants(manager)
    serve(manager, [A, B, D], 4.0)
    assert records[B].part is records[D].part is None
    check_invariants(manager)


def test_a_return_is_counted_each_time() -> None:
    manager = manager_of(_python, 64)
    hints = Hints(expect_s=20.0)
    serve(manager, [A, B], 0.0, hints)
    moments = manager.policy._returns._all
    serve(manager, [C], 3.0)
    assert moments.n == 0.0
    serve(manager, [A, B, D], 20.0)
    assert (moments.n, moments.x, moments.y) == (1.0, math.log(20), math.log(20))
    serve(manager, [A, B, D], 30.0, hints)
    assert moments.n == 1.0  # that turn's session has said nothing
    serve(manager, [C], 31.0)
    serve(manager, [A, B, D, E], 90.0)
    assert moments.n == pytest.approx(2.0, abs=1e-3)


def test_no_return_to_what_was_released_is_counted() -> None:
    manager = manager_of(_python, 64)
    serve(manager, [A, B], 0.0, Hints(expect_s=20.0))
    manager.release([A, B])
    serve(manager, [C], 3.0)
    serve(manager, [A, B], 20.0)
    returns = manager.policy._returns
    assert returns._all.n == 0.0
    assert sum(map(sum, returns._sources[0].reused)) == 0.0
    assert manager.policy._records[A].reuse_class > 0
    check_invariants(manager)


def test_the_later_word_counts_and_the_same_word_says_nothing_new() -> None:
    manager = manager_of(_python, 64)
    records = manager.policy._records
    request = manager.begin([A, B], hints=Hints(expect_s=20.0), now=0.0)
    request.prepare_store()
    request.complete_store()
    first = records[A].part.turn
    request.extend([C])
    assert records[C].part is None
    request.finish(hints=Hints(expect_s=20.0), now=7.0)
    assert records[A].part.turn is records[C].part.turn is first
    check_invariants(manager)
    request = manager.begin([A, B], hints=Hints(expect_s=20.0), now=10.0)
    request.finish(hints=Hints(expect_s=90.0), now=12.0)
    turn = records[A].part.turn
    assert (turn.begun, turn.said) == (12.0, 90.0)
    check_invariants(manager)
    # The session ends: what else was said is no longer meant.
    manager.begin([A, B], hints=Hints(expect_s=20.0), now=20.0).finish(now=20.0)
    request = manager.begin([A, B], hints=Hints(expect_s=20.0), now=20.0)
    request.finish(hints=Hints(expect_s=90.0, ends=True), now=21.0)
    assert records[B].part.turn.said == 20.0


def test_the_word_at_the_finish_leaves_what_others_have_used_since() -> None:
    manager = manager_of(_python, 64)
    records = manager.policy._records
    first = manager.begin([A, B], now=0.0)
    second = manager.begin([A, C], hints=Hints(expect_s=20.0), now=1.0)
    first.finish(hints=Hints(expect_s=20.0), now=2.0)
    assert records[A].part.turn is records[C].part.turn
    assert records[B].part.turn.begun == 2.0
    second.finish()
    assert records[A].part.turn.begun == 1.0
    check_invariants(manager)


def test_released_blocks_leave_first_and_count_nowhere(twin: ModuleType) -> None:
    manager = manager_of(twin, 4)
    for number, block in enumerate((A, B, C, D)):
        serve(manager, [block], float(number), Hints(expect_s=1.0))
    manager.release([C, D])
    output = manager.begin([E, F], now=5.0).prepare_store()
    assert output.block_hashes_evicted == [D, C]
    check_invariants(manager)


def test_the_plain_densities_count_all_blocks_as_without_hints() -> None:
    rows = workload(3, 500)
    with_hints, without = (manager_of(_python, 20_000) for _ in range(2))
    hits_of(with_hints, rows)
    hits_of(without, [(hashes, now, None) for hashes, now, _ in rows])
    assert with_hints.policy._plain.table == without.policy._densities.table
    assert with_hints.policy.densities != without.policy.densities


@pytest.mark.parametrize("options", ["", "?guard=0", "?ghosts=0"])
def test_invariants_hold_whatever_is_said(twin: ModuleType, options: str) -> None:
    draw = random.Random(4)
    manager = manager_of(twin, 60, options)
    rows = workload(4, 500)
    waiting: list[Any] = []
    for number, (hashes, now, _) in enumerate(rows):
        hints = Hints(
            ends=draw.random() < 0.05,
            expect_s=draw.choice([None, 1e-3, 3.0, 3.0, 40.0, 1e300]),
            source=str(int(draw.expovariate(0.15))),
        )
        time = None if draw.random() < 0.1 else now - 100.0 * (draw.random() < 0.05)
        request = manager.begin(hashes, hints=draw.choice([None, hints, hints]), now=time)
        request.prepare_store()
        if draw.random() < 0.2:
            request.extend(block_hashes(9_000_000 + number))
            request.prepare_store()
        waiting.append(request)
        while waiting and draw.random() < 0.55:
            other = waiting.pop(draw.randrange(len(waiting)))
            other.complete_store(draw.random() < 0.95)
            other.finish(hints=draw.choice([None, None, hints]), now=now)
        if draw.random() < 0.02:
            manager.release(hashes)
        if number % 10 == 0:
            check_invariants(manager)
    assert manager.policy.rule in manager.policy.trial_hits or "guard=0" in options


def test_a_policy_alone_hears_hints_too(twin: ModuleType) -> None:
    policy = policy_of(twin, "hit-density", 8, [A, B])
    policy.begun([A, B], Hints(expect_s=5.0))
    assert "plain" in policy.trial_hits
    check_invariants(policy)


def test_a_touch_of_a_subclass_hears_of_requests(twin: ModuleType) -> None:
    class Own(twin.policy_class("hit-density")):  # type: ignore[misc]
        def touch(self, hashes: Any) -> None:
            seen.append(list(hashes))
            super().touch(hashes)

    seen: list[list[bytes]] = []
    Own(8).begun([A, B], Hints(expect_s=5.0))
    assert seen == [[A, B]]
