"""Hints of clients: counted by source, how good they are, what they bring, and safely shown."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload import CPUOffloadingManager, Hints
from kvoffload._sampling import secrets_from
from kvoffload.managers._watching import RELEASED
from kvoffload.policies._learned import FADE, Gain
from kvoffload.testing.policies import check_invariants
from kvoffload.traces import TraceRecorder
from kvoffload.types import MOST_SOURCES, HintSource
from kvoffload.watch.hints import HeardHints, heard
from kvoffload.watch.metrics import samples, source_label
from tests.blocks import A, B, C, block_hashes
from tests.policies.steps import announced
from tests.policies.steps import request as serve_request

from .watched import SECRET, whole

HOSTILE = ["\n", "\\n", '"', "{}", "\ud800", "\u202e", "\x1b[31m", "\U000e0001" * 64, ""]


def heard_by(manager: Any) -> dict[str | None, tuple[int, int]]:
    return {each.source: (each.ends, each.expects) for each in manager.watch.report().hints}


# -- counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_hints_are_counted_by_source_and_kind(twin: ModuleType, policy: str) -> None:
    manager = whole(twin, 16, policy)
    serve_request(manager, [A], Hints(ends=True, source="job"), 0.0)
    serve_request(manager, [A], Hints(expect_s=3.0, source="chat"), 1.0)
    serve_request(manager, [B], Hints(ends=True, expect_s=3.0, source="chat"), 2.0)
    serve_request(manager, [B], Hints(source="silent"), 3.0)
    serve_request(manager, [B])
    assert heard_by(manager) == {"job": (1, 0), "chat": (1, 2)}
    manager.reset_cache()
    assert heard_by(manager) == {"job": (1, 0), "chat": (1, 2)}
    check_invariants(manager)


def test_the_same_words_at_the_finish_count_once(twin: ModuleType) -> None:
    manager = whole(twin, 16)
    said = Hints(expect_s=3.0, source="chat")
    for words in (None, said, Hints(expect_s=3.0, source="chat")):
        manager.begin([A], hints=said).finish(hints=words)
    assert heard_by(manager) == {"chat": (0, 3)}
    request = manager.begin([A], hints=said)
    for _ in range(2):  # the second does nothing
        request.finish(hints=Hints(ends=True, source="chat"))
    manager.begin([A]).finish(hints=said)
    assert heard_by(manager) == {"chat": (1, 5)}


def test_a_call_that_fails_is_not_counted(twin: ModuleType) -> None:
    manager = whole(twin, 16)
    with pytest.raises(TypeError):
        manager.begin([A, "no hash"], hints=Hints(ends=True))
    request = manager.begin([A])
    with pytest.raises(ValueError, match="now"):
        request.finish(hints=Hints(ends=True), now=math.inf)
    assert heard_by(manager) == {}


def test_requests_that_make_the_calls_of_a_manager_are_counted(
    twin: ModuleType, tmp_path: Path
) -> None:
    class Own(twin.CPUOffloadingManager):  # type: ignore[misc, name-defined]
        def touch(self, hashes: Any) -> None:
            super().touch(hashes)

    managers = [
        whole(SimpleNamespace(CPUOffloadingManager=Own), 16),
        TraceRecorder(whole(twin, 16), tmp_path / "trace.gz"),
    ]
    for manager in managers:
        request = manager.begin([A], hints=Hints(expect_s=3.0))
        request.finish(hints=Hints(ends=True))
    managers[1].close()
    assert heard_by(managers[0]) == heard_by(managers[1].manager) == {"": (1, 1)}


def test_as_many_sources_as_there_may_be_take_no_memory(twin: ModuleType) -> None:
    manager = whole(twin, 16)
    serve_request(manager, [A], Hints(ends=True, source="others"))
    assert heard_by(manager) == {None: (1, 0)}
    manager = whole(twin, 16)
    for number in range(100_000):
        manager._hinted(Hints(ends=True, source=str(number)))
    found = heard_by(manager)
    assert list(found) == [*map(str, range(MOST_SOURCES)), None]
    assert found[None] == (100_000 - MOST_SOURCES, 0)
    assert len(manager.watch._core.sources) == MOST_SOURCES


# -- what they are worth ---------------------------------------------------------------------


def test_how_good_a_source_is_shows_in_its_greatest_factor(twin: ModuleType) -> None:
    draw = random.Random(6)
    manager = whole(twin, 400, "hit-density")
    due = [(draw.uniform(0, 100), number) for number in range(200)]
    heapq.heapify(due)
    for _ in range(2000):
        now, number = heapq.heappop(due)
        seconds, other = (math.exp(draw.uniform(4, 6.7)) for _ in range(2))
        right = number % 2 == 0
        said = seconds if right else other
        hints = Hints(expect_s=said, source="right" if right else "random")
        serve_request(manager, block_hashes(*range(4 * number, 4 * number + 4)), hints, now)
        heapq.heappush(due, (now + seconds, number))
    found = {each.source: each for each in manager.watch.report().hints}
    right, other = found["right"], found["random"]
    assert right.factor > 4
    assert 0.3 < right.requests_per_s < 2  # one request per second or so
    assert 1 < other.factor < 2.5
    for each in manager.policy.hint_sources:
        best = max(each.factors, key=lambda pair: pair[1])
        assert (found[each.name].requests_per_s, found[each.name].factor) == best
        assert found[each.name].returns == each.returns > 500
    manager.reset_cache()
    assert manager.policy.hint_sources == ()
    assert [each.factor for each in manager.watch.report().hints] == [None, None]


def test_a_policy_tells_sources_apart_as_the_watch_does(twin: ModuleType) -> None:
    manager = whole(twin, 400, "hit-density")
    for number in range(40):
        serve_request(manager, [A], Hints(expect_s=3.0, source=str(number)), 3.0 * number)
        serve_request(manager, [B])
    known = manager.policy.hint_sources
    assert [each.name for each in known] == [*map(str, range(MOST_SOURCES)), None]
    assert (known[-1].hints, known[-1].returns) == (24, 23)
    assert manager.watch.report().hints[-1].returns == 23


def test_others_of_other_sources_are_not_taken_for_these() -> None:
    learned = (HintSource("b", 5, 4, ()), HintSource(None, 7, 6, ((0.5, 1.2), (1.0, 3.0))))
    said = [[1, 0], [0, 5], *([0, 0] for _ in range(MOST_SOURCES - 2)), [0, 8]]
    policy = SimpleNamespace(hint_sources=learned)
    assert heard(["a", "b"], said, policy) == (
        HeardHints("a", 1, 0),
        HeardHints("b", 0, 5, 4),
        HeardHints(None, 0, 8),
    )
    assert heard(["b"], [[0, 5], *said[2:], [0, 8]], policy)[-1] == HeardHints(
        None, 0, 8, 6, 3.0, 1.0
    )


def test_the_error_of_a_gain_is_that_of_a_ratio_of_weighted_sums() -> None:
    draw = random.Random(7)
    gain, requests = Gain(), []
    for _ in range(1_000):
        blocks = draw.randrange(40)
        plain = draw.randrange(blocks + 1)
        requests.append((blocks, draw.randrange(blocks + 1), plain))
        gain.add(*requests[-1])
    weights = [FADE**age for age in reversed(range(len(requests)))]
    total = sum(weight * each[0] for weight, each in zip(weights, requests, strict=True))
    gained = sum(
        weight * (each[1] - each[2]) for weight, each in zip(weights, requests, strict=True)
    )
    ratio = gained / total
    squares = sum(
        (weight * (hits - plain - ratio * blocks)) ** 2
        for weight, (blocks, hits, plain) in zip(weights, requests, strict=True)
    )
    found = gain.seen(10**12, followed=True)
    assert found is not None
    assert found.gain == pytest.approx(ratio)
    assert found.error == pytest.approx(2.5 * math.sqrt(squares) / total)


@pytest.mark.thorough
def test_what_hints_bring_shows_after_256_requests_from_the_first_reading(twin: ModuleType) -> None:
    rows = announced(1, 1_300)
    managers = [whole(twin, 400, "hit-density") for _ in range(2)]
    for number, (hashes, now, hints) in enumerate(rows):
        useless = Hints(expect_s=7.0)
        for manager, words in zip(managers, (hints, useless), strict=True):
            serve_request(manager, hashes, words, now)
            if number in (0, 255, 256):
                assert (manager.watch.report().hint_gain is None) == (number < 256)
    right, useless_gain = (manager.watch.report().hint_gain for manager in managers)
    assert right.gain > right.error
    assert right.followed
    assert abs(useless_gain.gain) < useless_gain.error
    managers[0].reset_cache()
    assert managers[0].watch.report().hint_gain is None


def test_without_a_guard_or_with_ends_alone_nothing_is_brought(twin: ModuleType) -> None:
    manager = whole(twin, 16, "hit-density?guard=0")
    other = whole(twin, 16, "hit-density")
    for index in range(400):
        serve_request(manager, block_hashes(index % 30), Hints(expect_s=3.0), float(index))
        serve_request(other, block_hashes(index % 30), Hints(ends=True), float(index))
    assert manager.watch.report().hint_gain is other.watch.report().hint_gain is None
    assert manager.watch.report().hints[0].returns == manager.policy.hint_sources[0].returns > 0
    assert other.policy.hint_sources == ()


# -- what leaves the process -----------------------------------------------------------------


def test_each_source_has_a_label_of_its_own_that_prints() -> None:
    labels = [source_label(name) for name in [*HOSTILE, "a", None]]
    assert len(set(labels)) == len(labels)
    assert all(label.isprintable() for label in labels)
    assert labels[-1] == "others"


def test_hostile_names_pass_prometheus_and_top(twin: ModuleType) -> None:
    pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")
    pytest.importorskip("rich", reason="the command needs the cli extra")
    from prometheus_client import CollectorRegistry, generate_latest
    from rich.console import Console

    from kvoffload.cli.top import screen
    from kvoffload.watch.prometheus import WatchCollector
    from kvoffload.watch.scraped import read_engines, view

    manager = whole(twin, 16)
    for number, name in enumerate(HOSTILE):
        for _ in range(number + 1):
            serve_request(manager, [C], Hints(ends=True, source=name))
    registry = CollectorRegistry()
    registry.register(WatchCollector(manager.watch))
    engines = read_engines("here", generate_latest(registry).decode())
    found = view(engines)
    assert {each.source: each.ends for each in found.hints} == {
        source_label(name): number + 1 for number, name in enumerate(HOSTILE)
    }
    console = Console(width=120)
    with console.capture() as captured:
        console.print(screen(found, "since the start", {}, 120))
    lines = captured.get().splitlines()
    assert all(line.isprintable() for line in lines)
    assert sum("(no name)" in line for line in lines) == 1


def test_a_fleet_shows_sixteen_sources_and_the_rest_as_others(twin: ModuleType) -> None:
    pytest.importorskip("prometheus_client", reason="exporting needs the watch extra")
    from kvoffload.watch.scraped import Engine, view

    engines = []
    for engine in range(3):
        manager = whole(twin, 16)
        for number in range(engine * 10, engine * 10 + 12):
            serve_request(manager, [A], Hints(ends=True, source=str(number)))
        found = Engine((("url", str(engine)),))
        for sample in samples(manager.watch):
            if isinstance(sample.value, int | float):
                found.values[sample.metric.name][tuple(sample.labels.values())] = sample.value
        engines.append(found)
    hints = view(engines).hints
    assert len(hints) == MOST_SOURCES + 1
    assert hints[-1].source == "others"
    assert sum(each.ends for each in hints) == 36
    assert {each.ends for each in hints[:4]} == {2}  # of two engines
    assert (hints[-1].returns, hints[-1].factor) == (None, None)


# -- what it hears -----------------------------------------------------------------------------

Row = tuple[list[bytes], float, Hints | None]


def sessions(seed: int, count: int, tells: str) -> list[Row]:
    """Return requests of sessions that grow and end, with their times and what clients say."""
    draw = random.Random(seed)
    open_sessions: list[tuple[list[bytes], int]] = []  # blocks, and turns to come
    coming: list[tuple[list[bytes], float, int]] = []  # blocks, time, turns to come
    heads = [block_hashes(*range(10**7 + 100 * head, 10**7 + 100 * head + 6)) for head in range(4)]
    now = 0.0
    for number in range(count):
        now += draw.expovariate(1.0)
        if len(open_sessions) < 12 or draw.random() < 0.1:
            open_sessions.append(([*draw.choice(heads)], draw.randrange(3, 14)))
        at = draw.randrange(len(open_sessions))
        blocks, turns = open_sessions[at]
        first = 1000 * number
        blocks = [*blocks, *block_hashes(*range(first, first + draw.randrange(2, 9)))]
        open_sessions[at] = blocks, turns - 1
        if turns == 1:
            del open_sessions[at]
        coming.append((blocks, now, turns - 1))
    rows: list[Row] = []
    later: dict[bytes, float] = {}  # when each block is asked for next
    for blocks, time, turns in reversed(coming):
        wait = max(0.001, later.get(blocks[-1], time + 50.0) - time) * math.exp(draw.gauss(0, 1))
        later.update(dict.fromkeys(blocks, time))
        ends = tells != "returns" and turns == 0
        expects = wait if tells != "ends" and not ends else None
        rows.append((blocks, time, Hints(ends=ends, expect_s=expects, source="agents")))
    return rows[::-1]


def serve_sessions(manager: Any, rows: list[Row], at: str) -> None:
    """Serve requests whose clients speak at the `begin` or the `finish`."""
    for blocks, now, hints in rows:
        request = manager.begin(blocks, hints=None if at == "finish" else hints, now=now)
        request.lookup()
        request.prepare_store()
        request.finish(hints=None if at == "begin" else hints)
        request.complete_store()


@pytest.mark.parametrize(
    ("tells", "at"), [("ends", "finish"), ("returns", "begin"), ("all", "begin"), ("all", "finish")]
)
@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_a_miniature_of_every_block_hears_what_a_manager_hears(
    twin: ModuleType, policy: str, tells: str, at: str
) -> None:
    rows = sessions(3, 100, tells)

    def serve_all(manager: Any) -> Any:
        manager.release([A])
        serve_sessions(manager, rows, at)
        manager.release(rows[-1][0])
        serve_sessions(manager, rows[:20], at)
        check_invariants(manager)
        return manager

    watch = serve_all(whole(twin, 120, policy, memory=(0.5, 1), policies=("hit-density",))).watch
    watch.report()
    minis = {(mini.policy, mini.memory): mini for mini in watch._shadows.minis}
    assert minis.keys() >= {(policy, 0.5), (policy, 1), ("lru", 0.5), ("hit-density", 1)}
    for (name, memory), mini in minis.items():
        with secrets_from(SECRET):
            other = serve_all(CPUOffloadingManager(16, int(120 * memory), name))
        # Another one does not know the same blocks, and so may find others to be shared.
        is_equal = tells == "returns" or (name, memory) == (policy, 1)
        expected = pytest.approx(other.stats()["hit_blocks"], rel=0 if is_equal else 0.06)
        assert mini.quarters[0].hits == expected, (name, memory)


def test_without_other_policies_keys_are_kept_from_the_first_release_on(twin: ModuleType) -> None:
    manager = whole(twin, 16, policies=())
    serve_request(manager, [A, B])
    assert manager.watch._core.take_requests() == [[[]]]
    manager.release([B, C])
    serve_request(manager, [A])
    (((released, asked),),) = manager.watch._core.take_requests()
    assert released == ([B, C], RELEASED, 0, None)
    assert asked == ([A], 0, 1, None)


def test_what_clients_say_is_kept_no_longer_than_their_requests(twin: ModuleType) -> None:
    """Requests without a sampled key say nothing to the watch, and what others said is taken."""
    manager = whole(twin, 16)
    said = Hints(expect_s=3.0)
    for number in range(2_000):
        serve_request(manager, [], said, float(number))
        serve_request(manager, [A], said, float(number))
        manager.lookup([A])
    core = manager.watch._core
    ((kept,),) = core.take_requests()
    assert len(kept) < 1_000
    serve_request(manager, [B], said, 7.0)
    manager.lookup([C])  # it is nobody's request
    ((first, *_, last),) = core.take_requests()[0]
    assert (first, last) == (([B], 0, 1, said), ([C], 0, 1, None))
