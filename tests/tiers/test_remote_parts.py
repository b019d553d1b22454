"""The parts of remote tiers: verdicts, addresses, missing packages, the namespace's file."""

import errno
import itertools
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import (
    DirectoryTier,
    Namespace,
    Region,
    State,
    Status,
)
from kvoffload.tiers.remote.sweeper import Sweeper
from kvoffload.tiers.remote.tier import HIT_S, MISS_S, Verdicts
from tests.tiers.inside import Clock, ask_anew, is_busy, wait_until

NAMESPACE = Namespace("model", 4096)


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
    import time

    from kvoffload.tiers.engine.contract import Block
    from kvoffload.tiers.remote import _objects_worker as worker
    from kvoffload.tiers.remote.objects import ObjectStore
    from kvoffload.tiers.remote.objects_client import ObjectsClient

    client = ObjectsClient({"url": "memory:///", "options": {}}, 1, 2**28)
    store = ObjectStore(NAMESPACE, client)
    store.deadline = time.monotonic() + 300
    keys = [b"%d" % number for number in range(4096)]
    stored = 0
    for there in (0, 1, 63, 2500, 4095, 4096):
        items = [worker.Item(store._path(key, 0), data=b"x") for key in keys[stored:there]]
        stored = there
        for start in range(0, len(items), 64):
            store._ask(worker.CREATE, items[start : start + 64])
        asked = itertools.count()
        ask = client.ask

        def counting(verb, items, *rest, ask=ask, asked=asked, **more):
            for _ in items:
                next(asked)
            ask(verb, items, *rest, **more)

        client.ask = counting
        run_of_blocks = [Block(key, 0, []) for key in keys]
        store.find(run_of_blocks, 0)
        client.ask = ask
        assert [block.status for block in run_of_blocks] == (
            [Status.OK] * there + [Status.MISS] * (4096 - there)
        )
        assert next(asked) <= 130
    store.close()


def test_removals_that_wait_are_bounded(
    tmp_path: Path,
    namespace: Namespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        tier.attach(Region.allocate(1, namespace.block_bytes))
        tier.discard(keys)
        assert len(tier._medium._dropping) <= most >= len(tier._medium._undropped)
    assert "has more than 1000 blocks to remove: everything is forgotten" in caplog.text


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), os.strerror(errno.EIO)),
        (KeyError(1), "KeyError"),
    ],
)
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
    with DirectoryTier(tmp_path, 32 * size, namespace=namespace, sweep_s=3600.0) as tier:
        tier.attach(Region.allocate(64, size))
        run(tier, tier.put(keys, range(64)))

        def is_swept() -> bool:
            ask_anew(tier)
            done = run(tier, tier.query(keys))
            return not is_busy(tier) and (done.status == Status.OK).sum() <= 32 + 2

        wait_until(is_swept)


def test_a_sweep_before_anything_was_stored_makes_nothing(tmp_path: Path) -> None:
    with DirectoryTier(tmp_path / "kv", 2**20, namespace=NAMESPACE) as tier:
        assert tier.sweep() is None
    assert not list(tmp_path.iterdir())


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
        tier.attach(Region.allocate(1, 4096))
        assert run(tier, tier.put([b"key"], [0], PATIENCE_S)).status.tolist() == [status]
