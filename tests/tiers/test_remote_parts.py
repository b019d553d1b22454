"""Remote tiers: six methods make one, and mistakes in them harm nothing else; and their parts."""

import errno
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvoffload.testing.tiers import PATIENCE_S, TierConformance, block_bytes_of, run
from kvoffload.tiers import (
    Block,
    DirectoryTier,
    Namespace,
    RemoteStore,
    RemoteTier,
    State,
    Status,
    TierOptions,
    read_options,
)
from kvoffload.tiers.remote.sweeper import Sweeper
from kvoffload.tiers.remote.tier import HIT_S, MISS_S, Verdicts
from tests.contract.test_conformance import failures
from tests.tiers.inside import Clock, ask_anew, attached, is_busy, let_probe, settle, wait_until

BLOCK = 4096
KEYS = [b"key%d" % number for number in range(8)]
NAMESPACE = Namespace("test", BLOCK)


class DictStore(RemoteStore):
    """Blocks as values of a dict."""

    visit_s = 0.0

    def __init__(self, namespace: Namespace = NAMESPACE) -> None:
        super().__init__(namespace)
        self.values: dict[str, bytes] = {}

    def path(self, key: bytes, generation: int) -> str:
        return f"{generation:016x}/{key.hex()}"

    def visit(self) -> None:
        if not self.is_ours(self.values.get("namespace")):
            self.values["namespace"] = self.namespace.json.encode()

    def find(self, run: Sequence[Block], generation: int) -> None:
        for block in run:
            is_there = self.path(block.key, generation) in self.values
            block.status = Status.OK if is_there else Status.MISS

    def fetch(self, run: Sequence[Block], generation: int) -> None:
        for block in run:
            value = self.values.get(self.path(block.key, generation))
            if value is None:
                block.status = Status.MISS
            else:
                self.check(block, memoryview(value), generation)

    def store(self, run: Sequence[Block], generation: int) -> None:
        for block in run:
            self.values.setdefault(self.path(block.key, generation), bytes(block.views[0]))
            block.status = Status.OK

    def drop(self, keys: Sequence[bytes], generation: int) -> None:
        for key in keys:
            self.values.pop(self.path(key, generation), None)

    def status_of(self, error: Exception) -> Status:
        return Status.UNAVAILABLE if isinstance(error, OSError) else Status.FAILED


class TestRemoteTier(TierConformance):
    def open_tier(self, num_blocks: int) -> RemoteTier:
        self.last = DictStore()
        return RemoteTier(self.last)

    def reopen_tier(self) -> RemoteTier:
        return RemoteTier(self.last)


@pytest.mark.parametrize("name", ["find", "forget", "release", "end_request", "generation"])
def test_the_suite_finds_a_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = lambda _, run, __: [setattr(block, "status", Status.MISS) for block in run]  # noqa: E731
    wrong = {"find": find, "forget": lambda *_: None}.get(name)
    monkeypatch.setattr(DictStore if name == "find" else RemoteTier, name, wrong)
    assert failures(TestRemoteTier())


def test_a_block_that_a_file_system_refuses_is_logged(tmp_path: Path, monkeypatch, caplog) -> None:
    with DirectoryTier(tmp_path, BLOCK, namespace=NAMESPACE, ack="stored") as tier:
        attached(tier, 1)
        monkeypatch.setattr(tier._files, "_store_one", Mock(side_effect=PermissionError))
        run(tier, tier.put(KEYS[:1], [0]))
    assert "tier 'directory' met PermissionError" in caplog.text


World = SimpleNamespace


@pytest.fixture
def world() -> Iterator[World]:
    """Give a store, its tier with a region, and all keys stored."""
    store = DictStore()
    tier = RemoteTier(store, TierOptions(threads=2, name="mine"))
    region = attached(tier, 16, KEYS)
    assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
    settle(tier)
    yield World(store=store, tier=tier, region=region)
    tier.close(PATIENCE_S)


def get(world: World) -> list[int]:
    """Load all keys; no bytes may be wrong."""
    world.region.array[:] = 0
    done = run(world.tier, world.tier.get(KEYS, range(8), PATIENCE_S))
    for place, status in enumerate(done.status.tolist()):
        expected = block_bytes_of(KEYS[place], BLOCK) if status == Status.OK else bytes(BLOCK)
        assert world.region.read(place) == expected
    return done.status.tolist()


def query(world: World) -> list[int]:
    """Ask for all keys anew."""
    ask_anew(world.tier)
    return run(world.tier, world.tier.query(KEYS, PATIENCE_S)).status.tolist()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError, Status.FAILED),
        (ConnectionError, Status.UNAVAILABLE),
        (None, Status.FAILED),  # blocks are given no status
    ],
)
def test_an_error_is_a_status_and_its_text_is_not_logged(
    world: World, error: type[Exception] | None, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Sequence[Block], generation: int) -> None:
        if error:
            raise error("a secret")

    world.store.find = world.store.fetch = fail
    assert query(world) == [status] * 8
    assert get(world) == [status] * 8
    if error is not None:
        line = fail.__code__.co_firstlineno + 2
        where = f" at {Path(__file__).name}:{line}" if status == Status.FAILED else ""
        assert f"tier 'mine' met {error.__name__}{where}: {status.name}" in caplog.text
    assert "secret" not in caplog.text
    world.store.status_of = Mock(side_effect=ValueError)
    assert query(world) == get(world) == [Status.FAILED] * 8


def test_blocks_with_a_status_keep_it(world: World) -> None:
    """An error after some blocks says nothing about these."""
    fetch = world.store.fetch

    def fetch_some(run: Sequence[Block], generation: int) -> None:
        fetch(run[:3], generation)
        raise ConnectionError

    world.store.fetch = fetch_some
    assert get(world) == [*[Status.OK] * 3, Status.UNAVAILABLE] * 2  # a call by each thread


@pytest.mark.parametrize("change", ["flipped", "short", "long", "of another key"])
def test_a_wrong_value_is_corrupt_and_dropped(world: World, change: str) -> None:
    names = {key: world.store.path(key, 0) for key in KEYS}
    value = world.store.values[names[KEYS[0]]]
    world.store.values[names[KEYS[0]]] = {
        "flipped": bytes([value[0] ^ 1]) + value[1:],
        "short": value[:-1],
        "long": value + b"\0",
        "of another key": world.store.values[names[KEYS[1]]],
    }[change]
    assert get(world) == [Status.CORRUPT] + [Status.OK] * 7
    settle(world.tier)
    assert names[KEYS[0]] not in world.store.values


def test_another_namespace_in_its_place_is_refused(world: World) -> None:
    world.store.values["namespace"] = b'{"model": "another"}'
    assert get(world) == [Status.FAILED] * 8
    assert world.store.values["namespace"] == b'{"model": "another"}'


def test_a_medium_that_touches_is_told_once(world: World) -> None:
    told: list[list[bytes]] = []
    world.store.touch_s = 60.0
    world.store.touch = lambda keys, generation: told.append(list(keys))
    for _ in range(2):
        world.tier.touch(KEYS)
        settle(world.tier)
    assert told == [KEYS[::-1]]


def test_what_is_discarded_in_two_generations_comes_back_in_none(world: World) -> None:
    """Also if the medium does not answer in between, and a block of one is hidden in no other."""
    tier, drop = world.tier, world.store.drop

    def is_there(generation: str) -> bool:
        tier.forget(generation)
        return run(tier, tier.query(KEYS[:1], PATIENCE_S)).status[0] == Status.OK

    tier.forget("two")
    run(tier, tier.put(KEYS[:1], [0], PATIENCE_S))
    settle(tier)
    world.store.drop = Mock(side_effect=ValueError)
    tier.forget("")
    tier.discard(KEYS[:1])
    settle(tier)
    assert [is_there(""), is_there("two")] == [False, True]
    tier.discard(KEYS[:1])
    settle(tier)
    world.store.drop = drop
    wait_until(lambda: tier.poll() is not None and len(world.store.values) == len(KEYS))
    assert [is_there(""), is_there("two")] == [False, False]


def test_a_block_that_is_discarded_and_stored_over_a_forget_is_removed(world: World) -> None:
    answers = threading.Event()
    tier, store = world.tier, world.store.store

    def hang(run: Sequence[Block], generation: int) -> None:
        assert answers.wait(PATIENCE_S)
        store(run, generation)

    world.store.store = hang
    tier.put([b"new", b"other"], [0, 1], PATIENCE_S)
    tier.discard([b"new"])
    for generation in ("two", "three"):
        tier.forget(generation)
    answers.set()
    settle(tier)
    tier.forget("")
    done = run(tier, tier.query([b"new", b"other"], PATIENCE_S))
    assert done.status.tolist() == [Status.MISS, Status.OK]


def test_a_late_end_does_not_open_a_breaker_that_is_closed_again(world: World) -> None:
    """A job counts as silent once, at its deadline."""
    answers = threading.Event()
    fetch = world.store.fetch

    def hang(run: Sequence[Block], generation: int) -> None:
        if run[0].key == KEYS[0]:
            assert answers.wait(PATIENCE_S)
            raise TimeoutError
        fetch(run, generation)

    world.store.fetch = hang
    world.store.status_of = lambda error: Status.TIMEOUT
    tier = world.tier
    assert run(tier, tier.get(KEYS[:1], [0], 0.05)).status[0] == Status.TIMEOUT
    states = [tier.health().reads]
    let_probe(tier)
    assert run(tier, tier.get(KEYS[1:2], [1], PATIENCE_S)).status[0] == Status.OK
    states.append(tier.health().reads)
    answers.set()
    settle(tier)
    assert [*states, tier.health().reads] == ["open", "closed", "closed"]


def test_touches_do_not_pile_up_while_a_medium_hangs(world: World) -> None:
    """One at a time: others would take threads from stores. What was left out is told later."""
    told: list[list[bytes]] = []
    answers = threading.Event()

    def touch(keys: Sequence[bytes], generation: int) -> None:
        told.append(list(keys))
        assert answers.wait(PATIENCE_S)

    world.store.touch_s = 60.0
    world.store.touch = touch
    for key in KEYS:
        world.tier.touch([key])
    under_way = world.tier.stats()["unsettled_jobs"]
    answers.set()
    settle(world.tier)
    assert under_way == 1
    assert told == [KEYS[:1]]
    world.tier.touch(KEYS[:2])
    settle(world.tier)
    assert told == [KEYS[:1], KEYS[1:2]]


def test_the_descriptor_stays_readable_while_a_query_hangs(world: World) -> None:
    answers = threading.Event()
    assert world.tier.wait([world.tier.query(KEYS[:1], PATIENCE_S)], PATIENCE_S)
    world.store.find = lambda *_: answers.wait(PATIENCE_S)
    world.tier.query([b"another"], PATIENCE_S)
    assert select.select([world.tier.fileno()], [], [], 0)[0]
    answers.set()


def test_options_as_text() -> None:
    text = {
        "threads": "8",
        "queue": "1GiB",
        "name": "mine",
        "events": "yes",
        "generation": "step 5",
        "staging": "256 MB",
        "ack": "stored",
    }
    assert TierOptions(**read_options(text)) == TierOptions(
        8,
        "mine",
        256_000_000,
        "stored",
        enable_events=True,
        max_queued_bytes=2**30,
        generation="step 5",
    )


def test_a_buffer_may_be_filled_in_place(world: World) -> None:
    """A client that reads into memory of the caller's needs no copy."""

    def fetch(run: Sequence[Block], generation: int) -> None:
        for block in run:
            view = block.views[0]
            assert len(view) == world.store.block_bytes == BLOCK + 64
            view[:] = world.store.values[world.store.path(block.key, generation)]
            world.store.check(block, view, generation)

    world.store.fetch = fetch
    assert get(world) == [Status.OK] * 8


# -- parts -----------------------------------------------------------------------------------------


class TestVerdicts:
    def test_they_end(self) -> None:
        clock = Clock()
        verdicts = Verdicts(clock=clock.time)
        verdicts.there([b"a"])
        verdicts.absent([b"b"])
        assert [verdicts.state(key) for key in (b"a", b"b", b"c")] == [
            State.HIT,
            State.MISS,
            State.UNKNOWN,
        ]
        clock.now += MISS_S
        assert verdicts.state(b"b") == State.UNKNOWN
        clock.now += HIT_S - MISS_S
        assert verdicts.state(b"a") == State.UNKNOWN

    def test_they_are_bounded(self) -> None:
        verdicts = Verdicts(limit=10)
        keys = [b"%d" % number for number in range(100)]
        verdicts.there(keys)
        assert len(verdicts) == 10
        assert [verdicts.state(key) for key in keys[-10:]] == [State.HIT] * 10

    def test_an_answer_does_not_overrule_what_was_learned_since_the_question(self) -> None:
        clock = Clock()
        verdicts = Verdicts(clock=clock.time)
        asked_at = clock.now
        clock.now += 0.5
        verdicts.there([b"stored"])
        verdicts.absent([b"dropped"])
        verdicts.absent([b"stored"], asked_at=asked_at)
        verdicts.there([b"dropped"], asked_at=asked_at)
        assert verdicts.state(b"stored") == State.HIT
        assert verdicts.state(b"dropped") == State.MISS
        clock.now += 0.1
        verdicts.absent([b"stored"], asked_at=clock.now)
        assert verdicts.state(b"stored") == State.MISS


def test_a_chain_is_probed_in_two_rounds() -> None:
    """Of 4,096 keys of which the first 2,500 are there, at most 128 are asked for."""
    pytest.importorskip("obstore", reason="the tier needs the objects extra")
    from kvoffload.tiers.remote import _objects_worker as worker
    from kvoffload.tiers.remote.objects import ObjectStore
    from kvoffload.tiers.remote.objects_client import ObjectsClient

    client = ObjectsClient({"url": "memory:///", "options": {}}, 1, 2**28)
    store = ObjectStore(NAMESPACE, client)
    store.deadline = time.monotonic() + 300
    keys = [b"%d" % number for number in range(4096)]
    stored, asked, ask = 0, [], client.ask
    client.ask = lambda verb, items, *rest, **more: (
        asked.extend(items),
        ask(verb, items, *rest, **more),
    )
    for there in (0, 1, 63, 2500, 4095, 4096):
        items = [worker.Item(store._path(key, 0), data=b"x") for key in keys[stored:there]]
        stored = there
        for start in range(0, len(items), 64):
            store._ask(worker.CREATE, items[start : start + 64])
        asked.clear()
        run_of_blocks = [Block(key, 0, []) for key in keys]
        store.find(run_of_blocks, 0)
        assert [block.status for block in run_of_blocks] == (
            [Status.OK] * there + [Status.MISS] * (4096 - there)
        )
        assert len(asked) <= 130
    store.close()


def test_removals_that_wait_are_bounded(tmp_path, namespace, caplog, monkeypatch) -> None:
    """Whatever a caller drops before there is a region; for what is too much all is forgotten."""
    most = 1000
    monkeypatch.setattr("kvoffload.tiers.remote.tier.MAX_VERDICTS", most)
    with DirectoryTier(tmp_path, 2**20, namespace=namespace) as tier:
        keys = [b"%d" % number for number in range(3 * most)]
        tier.discard(keys[:most])
        assert len(tier._medium._undropped) == most
        assert tier.generation == ""
        tier.discard(keys)
        assert not tier._medium._undropped
        assert len(tier.generation) == 32, "a random one"
        attached(tier, 1)
        tier.discard(keys)
        assert len(tier._medium._dropping) <= most >= len(tier._medium._undropped)
    assert "has more than 1000 blocks to remove: everything is forgotten" in caplog.text


@pytest.mark.parametrize(("error", "why"), [(OSError(5, "no"), "no"), (KeyError(1), "KeyError")])
def test_a_sweep_that_fails_is_repeated_after_a_period(error: Exception, why: str) -> None:
    """At once it would keep a core, and fill a log."""
    tried = 0
    said: list[tuple[str, int]] = []

    def open_namespace() -> None:
        nonlocal tried
        tried += 1
        sweeper.count_written()  # so that a sweep is due early once more
        raise error

    sweeper = Sweeper(open_namespace, 1, 3600.0, lambda text, level: said.append((text, level)))
    sweeper.count_written()
    sweeper.start()
    wait_until(lambda: bool(said))
    time.sleep(0.02)
    assert said == [(f"could not sweep: {why}", logging.WARNING)]
    assert tried == 1
    wait_until(lambda: sweeper.count_written() or len(said) >= 2)
    sweeper.stop(PATIENCE_S)
    assert tried > 1, "what is written since makes one due"


def test_a_directory_that_grows_is_swept_before_the_period(
    tmp_path: Path, namespace: Namespace
) -> None:
    size = namespace.block_bytes
    keys = [b"%d" % number for number in range(64)]
    with DirectoryTier(tmp_path, 32 * size, namespace=namespace, sweep_s=math.inf) as tier:
        attached(tier, 64)
        run(tier, tier.put(keys, range(64)))

        def is_swept() -> bool:
            ask_anew(tier)
            done = run(tier, tier.query(keys))
            return not is_busy(tier) and (done.status == Status.OK).sum() <= 32 + 2

        wait_until(is_swept)


def test_a_sweep_before_anything_was_stored_makes_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DirectoryTier("kv", 2**20, namespace=NAMESPACE, ack="stored") as tier:
        assert tier.sweep() is None
        assert not list(tmp_path.iterdir())
        (tmp_path / "another").mkdir()
        monkeypatch.chdir("another")
        attached(tier, 1)
        run(tier, tier.put(KEYS[:1], [0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "kv"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that cannot be made")
def test_a_directory_that_cannot_be_made_has_failed() -> None:
    with DirectoryTier("/proc/kv", 2**20, namespace=NAMESPACE, ack="stored") as tier:
        attached(tier, 4)
        assert run(tier, tier.put([b"k"], [0])).status.tolist() == [Status.FAILED]
        assert run(tier, tier.get([b"k"], [1])).status.tolist() == [Status.FAILED]


@pytest.mark.parametrize(("happens", "status"), [(False, Status.FAILED), (True, Status.OK)])
def test_an_answer_of_a_file_server_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool, status: Status
) -> None:
    """A link that was made counts, although the call reports an error; another does not."""
    link = os.link

    def lose(*arguments: Any, **options: Any) -> None:
        if happens:
            link(*arguments, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", lose)
    with DirectoryTier(tmp_path, 2**20, namespace=NAMESPACE, ack="stored") as tier:
        attached(tier, 1)
        assert run(tier, tier.put([b"key"], [0], PATIENCE_S)).status.tolist() == [status]
