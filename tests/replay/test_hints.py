"""Hints of clients in replays: what they say, and who hears it."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload import CPUOffloadingManager, Hints, HitDensityCachePolicy, LRUCachePolicy
from kvoffload.policies import registry
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    HintOptions,
    Tier,
    replay,
    replay_all,
)
from kvoffload.replay.hints import TraceHints
from kvoffload.replay.requests import digest_of
from kvoffload.traces import Request
from tests.isolated.scripts import run_python

MINUTE = 60_000
POLICIES = ("lru", "arc", "hit-density")


def sessions(count: int = 60, seed: int = 3) -> list[Request]:
    """Sessions whose prompts grow; those that end late are cut off."""
    dice = random.Random(seed)
    rows = []
    for name in range(count):
        time, ids = dice.uniform(0, 50 * MINUTE), tuple(range(name * 1000, name * 1000 + 5))
        turns = dice.randint(1, 12)
        for turn in range(turns):
            ends = turn == turns - 1 and time < 45 * MINUTE
            rows.append(Request(round(time), 16 * len(ids), 1, ids, f"s{name}", ends=ends))
            time += dice.expovariate(1 / MINUTE)
            ids += tuple(range(name * 1000 + 10 * turn + 100, name * 1000 + 10 * turn + 103))
    return sorted(rows, key=lambda row: row.timestamp)


TRACE = sessions()
MANY = sessions(2000)


def later_of(rows: list[Request], index: int) -> list[Request]:
    """Return the later rows of a row's session."""
    session = rows[index].session
    return [row for row in rows[index + 1 :] if row.session == session is not None]


def gap_of(rows: list[Request], index: int) -> float | None:
    """Return the milliseconds until the session of a row is back; None where nobody knows."""
    row, later = rows[index], later_of(rows, index)
    if row.expect is None and later:
        return later[0].timestamp - row.timestamp
    return row.expect


def expected(rows: list[Request], told: str) -> list[str | float | None]:
    """Return what the client of each row says: a time, "ends", "drawn" or nothing."""
    found: list[str | float | None] = []
    for index, row in enumerate(rows):
        gap = gap_of(rows, index)
        ends = row.ends and not later_of(rows, index)
        if ends and told != "expect":
            found.append("ends")
        elif told == "ends" or (gap is None and row.session is None and not ends):
            found.append(None)
        else:
            found.append("drawn" if gap is None else max(gap, 1) / 1000)
    return found


ROWS = st.lists(
    st.tuples(
        st.integers(-5, 5000),
        st.sampled_from([None, "a", "b", "c"]),
        st.booleans(),
        st.sampled_from([None, None, 0, 7, 12_000.5]),
    ),
    min_size=2,
    max_size=30,
)


@settings(deadline=None)
@given(ROWS, st.sampled_from(["ends", "expect", "both"]))
def test_what_is_told_is_what_a_plain_search_finds(drawn, told) -> None:
    time, rows = 0, []
    for step, session, ends, expect in drawn:
        time += step
        rows.append(Request(time, 16, 1, (1,), session, ends=ends, expect=expect))
    wanted, options = expected(rows, told), HintOptions(told=told)
    gaps = [gap for index in range(len(rows)) if (gap := gap_of(rows, index)) is not None]
    if "ends" not in wanted and (told == "ends" or max(gaps, default=0) <= 0):
        with pytest.raises(ValueError, match="told must be what the trace knows"):
            TraceHints.of(rows, options)
        return
    known = {max(gap, 1) / 1000 for gap in gaps} or {None}
    told_by_all = TraceHints.of(rows, options).of_each()
    for row, said, found in zip(rows, wanted, told_by_all, strict=True):
        assert found.now_s == row.timestamp / 1000
        if said == "ends":
            assert found[1:] == (None, Hints(ends=True))
            continue
        seconds = None if found.at_begin is None else found.at_begin.expect_s
        hints = None if seconds is None else Hints(expect_s=seconds)
        assert found[1:] == (hints, hints)
        assert seconds in (known if said == "drawn" else {said})


def test_noise_share_and_liars_are_as_large_as_asked_for() -> None:
    truth = TraceHints.of(MANY, HintOptions(told="both"))
    names = np.unique([row.session for row in MANY], return_inverse=True)[1]
    found = TraceHints.of(MANY, HintOptions(told="both", noise=5, share=0.3, liars=0.2, seed=4))
    says = ~np.isnan(found.expect_s) | found.ends
    lies = {name for name in set(names) if (found.expect_s[names == name] == 1).all()}
    assert 0.16 < len(lies) / 2000 < 0.24
    np.testing.assert_array_equal(found.lies, np.isin(names, list(lies)))
    honest = says & ~found.lies
    assert 0.26 < len(set(names[honest])) / (2000 - len(lies)) < 0.34
    for name in set(names):  # all of a session, or nothing
        assert len(set(says[names == name])) == 1
    assert not found.ends[np.isin(names, list(lies))].any()
    assert (found.ends[honest] == truth.ends[honest]).all()
    before = {row.session: index for index, row in enumerate(MANY)}  # the last of each
    returns = honest & ~np.isin(np.arange(len(MANY)), list(before.values()))
    errors = np.log(found.expect_s[returns] / truth.expect_s[returns])
    assert abs(errors.mean()) < 0.1
    assert abs(errors.std() / math.log(5) - 1) < 0.05


def digest(rows: list[Request], **options: float) -> str:
    return digest_of(TraceHints.of(rows, HintOptions(told="both", **options)).arrays())


def test_draws_depend_on_the_seed_and_the_session_alone() -> None:
    noisy = {"noise": 2.7, "share": 0.5, "liars": 0.1}
    assert digest(TRACE, **noisy) != digest(TRACE, **noisy, seed=1)
    # in a part of the trace a session says what it says in the whole
    options = HintOptions(told="both", **noisy)
    last = {row.session: index for index, row in enumerate(TRACE[:200])}
    whole, part = TraceHints.of(TRACE, options), TraceHints.of(TRACE[:200], options)
    inner = [index for index in range(200) if last[TRACE[index].session] != index]
    np.testing.assert_array_equal(whole.expect_s[inner], part.expect_s[inner])
    code = (
        "from tests.replay.test_hints import TRACE, digest;"
        "print(digest(TRACE, noise=2.7, share=0.5, liars=0.1))"
    )
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = run_python("-c", code, env=env)
    assert done.stdout.strip() == digest(TRACE, **noisy)


def test_a_trace_that_knows_nothing_is_refused() -> None:
    rows = [Request(1000 * n, 16, 1, (n,), "one") for n in range(3)]
    with pytest.raises(ValueError, match="got 'ends', and none of 3 requests ends a session"):
        TraceHints.of(rows, HintOptions(told="ends"))
    for useless in ([Request(0, 16, 1, (n,), "one") for n in range(3)], [Request(0, 16, 1, (1,))]):
        with pytest.raises(ValueError, match="has a time until the session's next one"):
            DecodedTrace.of(useless, hints=HintOptions(told="expect"))


# -- who hears it ----------------------------------------------------------------------------------


class Hearing:
    """A policy that notes what it hears: the hints of begin, those of finish, what is released."""

    def begun(self, hashes, hints=None):
        self.heard.append(("begun", len(hashes), hints))
        super().begun(hashes, hints)

    def finished(self, hashes, hints=None):
        self.heard.append(("finished", len(hashes), hints))
        super().finished(hashes, hints)

    def release(self, hashes):
        self.heard.append(("released", len(hashes), None))
        super().release(hashes)


class HearingLRU(Hearing, LRUCachePolicy):
    heard: list = []


class HearingHitDensity(Hearing, HitDensityCachePolicy):
    heard: list = []


def calls(rows: list[Request], hints: TraceHints) -> list[tuple[str, int, Hints | None]]:
    """Return what a policy should hear."""
    found = []
    for row, told in zip(rows, hints.of_each(), strict=True):
        size = len(row.hash_ids)
        found += [("begun", size, told.at_begin), ("finished", size, told.at_finish)]
        if told.at_finish is not None and told.at_finish.ends:
            found.append(("released", size, None))
    return found


def test_a_policy_hears_the_time_at_begin_and_the_end_at_finish() -> None:
    hints = TraceHints.of(TRACE, HintOptions(told="both", share=0.5))
    wanted = calls(TRACE, hints)
    assert {kind for kind, _, _ in wanted} == {"begun", "finished", "released"}
    policy = HearingLRU(cache_capacity=2000)  # nothing leaves: every session goes on
    policy.heard = []
    trace = DecodedTrace.of(TRACE, hints=HintOptions(told="both", share=0.5))
    replay(trace, Configuration(host=2000), manager=CPUOffloadingManager(16, 2000, policy))
    assert policy.heard == wanted
    HearingLRU.heard.clear()
    replay(trace, Configuration(policy=f"{__name__}:HearingLRU", host=2000, pending=2))
    assert HearingLRU.heard == wanted


def test_a_policy_that_learns_by_request_hears_it_from_steps_too() -> None:
    trace = DecodedTrace.of(TRACE, hints=HintOptions(told="both"))
    policy = HearingHitDensity(cache_capacity=60)
    policy.heard = []
    manager = CPUOffloadingManager(16, 60, policy)
    groups = GroupChunks.of_blocks(16, step_tokens=64)
    replay(trace, Configuration(host=60, groups=groups), manager=manager)
    begun = [said for kind, _, said in policy.heard if kind == "begun"]
    finished = [said for kind, _, said in policy.heard if kind == "finished"]
    released = [size for kind, size, _ in policy.heard if kind == "released"]
    told = list(trace.hints.of_each())
    assert begun == [one.at_begin for one in told]
    assert finished == [one.at_finish for one in told]
    assert len(released) >= trace.hints.num_ending > 0


@pytest.mark.parametrize("policy", registry.names())
@pytest.mark.parametrize("step_tokens", [None, 16, 8192])
def test_a_session_that_goes_on_shares_nothing_with_itself(policy, step_tokens) -> None:
    ends = [False, False, True]
    rows = [
        Request(1000 * number, 0, 0, tuple(range(4 + number)), "a", ends=ending, expect=1000)
        for number, ending in enumerate(ends)
    ]
    trace = DecodedTrace.of(rows, hints=HintOptions(told="both"))
    manager = CPUOffloadingManager(16, 60, policy)
    groups = GroupChunks.of_blocks(16, step_tokens=step_tokens)
    replay(trace, Configuration(policy=policy, host=60, groups=groups), manager=manager)
    assert manager.policy.num_released == 6


def test_every_kind_of_replay_hears_the_same() -> None:
    trace = DecodedTrace.of(TRACE, hints=HintOptions(told="both", noise=2.7))
    silent = DecodedTrace.of(TRACE)
    for step in (None, 64):
        groups = GroupChunks.of_blocks(16, step_tokens=step)
        every = [
            Configuration(policy=policy, host=size, groups=groups)
            for policy in POLICIES
            for size in (60, 120)
        ]
        alone, together, without = (
            {result.configuration: result for result in replay_all(one, every, jobs=jobs)}
            for one, jobs in ((trace, 1), (trace, 2), (silent, 1))
        )
        assert alone.keys() == set(every)
        assert alone == together
        for one, heard in alone.items():
            manager = CPUOffloadingManager(16, one.host, one.policy)
            assert replay(trace, one, manager=manager) == heard
            # many sessions end: their room is worth something
            assert heard.hits > without[one].hits
    timed = DecodedTrace.of(TRACE, hints=HintOptions(told="both", noise=2.7), arrivals=True)
    policy = HearingLRU(cache_capacity=2000)
    policy.heard = []
    loop = Configuration(host=2000, groups=GroupChunks.of_blocks(16), rate=10**6, loop="closed")
    replay(timed, loop, manager=CPUOffloadingManager(16, 2000, policy))
    assert Counter(policy.heard) == Counter(calls(TRACE, timed.hints))
    tiers = Configuration(host=60, tier=Tier("private", 200))
    assert replay(trace, tiers).host_hits > replay(silent, tiers).host_hits


def test_with_arrivals_a_session_ends_with_the_last_of_these() -> None:
    rows = [Request(MINUTE, 1, 1, (1,), "one", ends=True), Request(0, 1, 1, (0,), "one")]
    hints = DecodedTrace.of(rows, hints=HintOptions(told="both"), arrivals=True).hints
    assert hints is not None
    assert [(told.at_begin, told.at_finish) for told in hints.of_each()] == [
        (None, Hints(ends=True)),
        (Hints(expect_s=60.0), Hints(expect_s=60.0)),
    ]


def test_liars_are_counted_by_session_where_files_are_out_of_order() -> None:
    early = [Request(minute * MINUTE, 1, 1, (minute,), "new") for minute in range(1, 6)]
    late = [Request(minute * MINUTE, 1, 1, (0,), "same") for minute in range(10, 14)]
    rows = [*late, *early]
    for options in (HintOptions(told="expect", liars=0.5, seed=seed) for seed in range(100)):
        trace = DecodedTrace.of(rows, hints=options, arrivals=True)
        if trace.hints is not None and trace.hints.lies.tolist() == [True] * 4 + [False] * 5:
            break
    for missed, engines, tier in ((1, 1, None), (2, 2, None), (1, 2, Tier("shared", 100))):
        found = replay(trace, Configuration(host=100, engines=engines, tier=tier))  # in turns
        assert (found.liar_asked, found.liar_hits) == (4, 4 - missed)
        assert (found.honest_hit_ratio, found.liar_hit_ratio) == (0.0, 1 - missed / 4)
