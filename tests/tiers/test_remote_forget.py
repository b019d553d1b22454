"""Forgotten means gone: whoever stored it, whatever became of the server or the directory since.

Servers are restored from snapshots, cut off and hung, epochs are lost and overwritten, and other
engines' puts are on their way meanwhile. What was put before a `forget` is never found after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import shutil
import signal
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import RedisTier, Region, State, Status
from kvoffload.tiers.engine.contract import FORGET, NOBODY
from kvoffload.tiers.epoch import epoch_text, new_epoch, parse_epoch
from kvoffload.tiers.remote.shared import EPOCH_S
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.attack import report, rounds, start
from tests.tiers.inside import ask_anew, doubt, epoch_of, medium_of, threads_of
from tests.tiers.places import (
    BLOCK,
    KEYS,
    NAMESPACE,
    NUMBERS,
    Place,
    attach_to,
    directory_place,
    found,
    lose_epoch,
    objects_place,
    redis_place,
    settle,
    store,
    wait_until,
)
from tests.tiers.servers import Server, make_bucket, redis_server, s3_server, stop

pytest.importorskip("redis", reason="the tier needs the redis extra")

from redis import Redis
from redis.client import Pipeline

from kvoffload.tiers.remote.redis import _BoundedSocket

pytestmark = pytest.mark.servers


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiers.engine.threads.RETRY_S", 0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """Give a server that may be killed; it finds again what `Redis.save` wrote."""
    with redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(params=["redis", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "redis":
        made = redis_place(request.getfixturevalue("server"))
    else:
        made = directory_place(tmp_path)
    yield made
    made.close()


class TestPutsUnderWay:
    def test_what_another_engine_had_put_is_not_found_after_a_forget(self, place: Place) -> None:
        """It has acknowledged the puts, and is paused before it writes them."""
        one, other = place.tier(), place.tier()
        store(one, 4)
        goes_on = threading.Event()
        write = other._shared.write

        def paused(run, epoch):
            goes_on.wait(PATIENCE_S)
            doubt(other)  # longer than any epoch is believed without a look
            write(run, epoch)

        other._shared.write = paused
        done = run(other, other.put(KEYS, range(len(KEYS)), PATIENCE_S))
        assert not done.status.any()
        assert one.forget() is True
        goes_on.set()
        settle(other)
        assert found(one) == found(place.tier()) == found(other) == 0
        assert other.stats()["dropped"] == len(KEYS)
        assert other.stats()["store_ok"] == 0
        other._shared.write = write
        store(other)
        assert found(one) == len(KEYS), "what is put from then on is stored"

    def test_they_are_dropped_when_they_are_acknowledged_once_stored(self, place: Place) -> None:
        one, other = place.tier(), place.tier(ack="stored")
        doubt(other)
        ask = medium_of(other).ask_epoch

        def forget_first() -> int | None:
            assert one.forget() is True
            return ask()

        medium_of(other).ask_epoch = forget_first
        done = run(other, other.put(KEYS[:4], range(4), PATIENCE_S))
        assert done.status.tolist() == [Status.OK] * 4
        settle(other)
        assert other.stats()["dropped"] == 4
        assert found(one, 4) == 0

    def test_those_of_before_the_epoch_was_known_are_dropped(self, own_server: Server) -> None:
        """Whether they are older than the last forget cannot be told."""
        place = redis_place(own_server)
        own_server.kill()
        tier = place.tier()
        own_server.start()
        done = run(tier, tier.put(KEYS[:4], range(4), PATIENCE_S))
        assert not done.status.any()
        settle(tier)
        assert tier.stats()["dropped"] == 4
        assert found(tier, 4) == 0
        store(tier, 4)
        assert found(tier, 4) == 4
        place.close()

    def test_a_get_under_way_serves_nothing_of_before(self, place: Place) -> None:
        one, other = place.tier(), place.tier()
        store(one, 4)
        assert found(other, 4) == 4
        fetch = medium_of(other).fetch

        def slow(run, epoch):
            fetch(run, epoch)
            if epoch == before:
                one.forget()
                doubt(other)
                other._shared.meet()  # as another thread of the tier does

        before = epoch_of(other)
        medium_of(other).fetch = slow
        assert found(other, 1) == 0


def test_a_socket_past_its_deadline_neither_reads_nor_writes(server: Server) -> None:
    """However much is there: a server that sends byte by byte has no more time than another."""
    place = redis_place(server)
    store = medium_of(place.tier(attach=False))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(100))
        bounded = _BoundedSocket(ours, store)
        store.deadline = time.monotonic() + PATIENCE_S
        bounded.sendall(b"ok")
        assert (bounded.recv(1), theirs.recv(2)) == (b"\0", b"ok")
        store.deadline = time.monotonic() - 1
        for call in (lambda: bounded.recv(1), lambda: bounded.sendall(b"no")):
            with pytest.raises(TimeoutError):
                call()
    place.close()


@pytest.mark.attack
def test_an_engine_that_is_stopped_among_its_puts_brings_nothing_back(place: Place) -> None:
    """Another process, stopped with 400 acknowledged puts; it goes on when all is forgotten."""
    keys = [b"key-%03d" % number for number in range(400)]
    times, dropped, written = rounds(40), 0, 0
    for _ in range(times):
        receiver, sender = os.pipe()

        def put_all(sender: int = sender) -> None:
            tier = place.opener(namespace=NAMESPACE, threads=2)
            region = Region.allocate(len(keys), BLOCK)
            tier.attach(region)
            done = run(tier, tier.put(keys, range(len(keys)), PATIENCE_S))
            assert not done.status.any()
            os.write(sender, b"!")
            settle(tier)
            stats = tier.stats()
            os.write(sender, b"%08d" % stats["dropped"] + b"%08d" % stats["store_ok"])
            assert tier.close(PATIENCE_S)

        child = start(put_all)
        os.close(sender)
        assert os.read(receiver, 1) == b"!"
        stop(child)
        one = place.tier()
        assert one.forget() is True
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        counts = os.read(receiver, 16)
        dropped, written = dropped + int(counts[:8]), written + int(counts[8:])
        os.close(receiver)
        for tier in (one, place.tier()):
            done = run(tier, tier.query(keys, PATIENCE_S))
            assert set(done.status.tolist()) == {Status.MISS}, "forgotten blocks came back"
        place.close()
        place.opened.clear()
    report(f"{times} engines stopped among {len(keys)} puts: {written} written, {dropped} dropped")


@pytest.mark.attack
def test_no_get_after_a_forget_finds_what_was_put_before_it(place: Place, tmp_path: Path) -> None:
    """Four engines put, get and forget at once; now and then the epoch itself is deleted.

    Each block says which weights it was computed with. A lock orders what the engines have to
    order themselves: which weights are there when blocks are put, and when all is forgotten.
    """
    ledger = tmp_path / "weights"
    ledger.write_bytes(bytes(8))
    times = rounds(4000)

    def engine(number: int) -> None:
        chance = random.Random(number)
        tier = place.opener(namespace=NAMESPACE, threads=2)
        region = Region.allocate(16, BLOCK)
        tier.attach(region)
        with ledger.open("r+b", buffering=0) as file:
            for _ in range(times):
                keys = [KEYS[chance.randrange(len(KEYS))] for _ in range(8)]
                what = chance.random()
                if what < 0.01:
                    lose_epoch(tier)
                with held(file):
                    weights = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
                    if what < 0.05:
                        os.pwrite(file.fileno(), (weights + 1).to_bytes(8, "little"), 0)
                        tier.forget()
                        wait_until(lambda: tier.health().forgotten)  # a busy disk may take a second
                        continue
                    if what < 0.5:
                        region.array[: 8 * BLOCK].view(np.uint64)[:] = weights
                        job = tier.put(keys, range(8), PATIENCE_S)
                if what < 0.5:
                    run_job(tier, job)
                    continue
                doubt(tier)  # a directory is believed for a second
                keys = list(set(keys))
                done = run(tier, tier.get(keys, range(8, 8 + len(keys)), PATIENCE_S))
                for block_id, status in enumerate(done.status.tolist(), 8):
                    assert status in (Status.OK, Status.MISS), Status(status)
                    if status == Status.OK:
                        found = np.frombuffer(region.read(block_id), np.uint64)
                        assert (found == found[0]).all()
                        assert found[0] >= weights, "of forgotten weights"
        assert tier.stats()["get_ok"] > 0
        assert tier.close(PATIENCE_S)

    children = [start(lambda number=number: engine(number)) for number in range(4)]
    for child in children:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    weights = int.from_bytes(ledger.read_bytes(), "little")
    report(f"4 engines, {times} calls each, {weights} times forgotten: nothing old was found")
    assert weights > 0


@contextlib.contextmanager
def held(file) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def run_job(tier: RemoteTier, job: int) -> None:
    assert tier.wait([job], PATIENCE_S)
    assert not next(done for done in tier.poll() if done.job == job).status.any()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="gone"),
        b"",
        b"0000000000000000",
        b"-000000000000005",
        b"ffffffffffffffff",
        b"not an epoch at all" * 10_000,
        pytest.param(("rpush", "a", "b"), id="list"),
        pytest.param(("sadd", "a"), id="set"),
        pytest.param(("hset", "a", "b"), id="hash"),
    ],
)
def test_a_redis_epoch_that_is_lost_or_nonsense_forgets_for_all(server: Server, value) -> None:
    place = redis_place(server)
    one, other = place.tier(), place.tier()
    store(one, 4)
    assert found(other, 4) == 4
    before, name = epoch_of(one), medium_of(one)._epoch_name
    with Redis(port=server.port) as client:
        client.delete(name)
        if isinstance(value, tuple):
            getattr(client, value[0])(name, *value[1:])
        elif value is not None:
            client.set(name, value)
        assert found(other, 4) == 0
        assert parse_epoch(client.get(name)) == epoch_of(other) > before
    assert found(one, 4) == 0
    store(other, 4)
    assert found(one, 4) == found(other, 4) == 4, "it heals"
    place.close()


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"-000000000000005"),
        lambda path: path.write_bytes(b"ffffffffffffffff"),
        lambda path: path.write_bytes(bytes(10**6)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.mkdir(), (path / "file").touch()),
        lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        lambda path: (path.unlink(), path.symlink_to(path)),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), listening(path)),
    ],
    ids=[
        "gone",
        "empty",
        "negative",
        "last",
        "long",
        "folder",
        "full-folder",
        "link",
        "loop",
        "fifo",
        "socket",
    ],
)
def test_an_epoch_file_that_is_lost_or_nonsense_forgets_for_all(tmp_path: Path, damage) -> None:
    place = directory_place(tmp_path)
    one, other = place.tier(), place.tier()
    store(one, 4)
    before, path = epoch_of(one), one.folder / "epoch"
    damage(path)
    doubt(one)
    assert found(one, 4) == 0
    assert parse_epoch(path.read_bytes()) == epoch_of(one) > before
    doubt(other)
    assert found(other, 4) == 0
    store(other, 4)
    assert found(one, 4) == 4, "it heals"
    place.close()


def listening(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # `bind` takes no path as long as a worker's


@pytest.mark.parametrize(
    "text",
    [b"", NAMESPACE.json[:40].encode(), b"[]", b"[" * 100_000, b"\0" * 4096],
    ids=["empty", "half", "list", "deep", "zeros"],
)
def test_half_a_namespace_is_written_again(tmp_path: Path, text: bytes) -> None:
    place = directory_place(tmp_path)
    tier = place.tier()
    store(tier, 4)
    path = tier.folder / "namespace.json"
    path.write_bytes(text)
    doubt(tier)
    assert found(tier, 4) == 4
    assert path.read_text() == NAMESPACE.json
    place.close()


def test_an_epoch_ahead_of_the_clock_is_gone_by_and_forgotten(server: Server) -> None:
    """As a machine writes it whose clock is a year ahead."""
    place = redis_place(server)
    one, other = place.tier(), place.tier()
    ahead = new_epoch() + (365 * 86_400_000 << 20)
    with Redis(port=server.port) as client:
        client.set(medium_of(one)._epoch_name, epoch_text(ahead))
    assert found(one, 4) == found(other, 4) == 0
    assert epoch_of(one) == ahead
    store(one, 4)
    assert found(other, 4) == 4
    assert one.forget() is True
    assert found(other, 4) == 0
    assert epoch_of(other) == epoch_of(one) > ahead
    place.close()


class TestSnapshots:
    def test_a_server_restored_from_one_serves_nothing_forgotten(self, own_server: Server) -> None:
        place = redis_place(own_server)
        one, other = place.tier(), place.tier()
        store(one)
        assert found(other) == len(KEYS)
        with Redis(port=own_server.port) as client:
            client.save()
        assert one.forget() is True
        assert found(other) == 0, "it knows better, too"
        own_server.kill()
        own_server.start()
        with Redis(port=own_server.port) as client:
            assert client.dbsize() == len(KEYS) + 2, "the server has the old blocks again"
        one.health(reset=True)
        done = run(one, one.get(KEYS, range(len(KEYS)), PATIENCE_S))
        assert Status.OK not in done.status.tolist()
        wait_until(lambda: one.health().forgotten and found(one) == 0)
        assert found(other) == 0
        assert found(place.tier()) == 0, "the server has been told"
        store(one)
        assert found(other) == len(KEYS)
        place.close()

    def test_a_directory_restored_from_one_serves_nothing_forgotten(self, tmp_path: Path) -> None:
        place = directory_place(tmp_path / "kv")
        one = place.tier()
        store(one)
        shutil.copytree(one.folder, tmp_path / "snapshot")
        assert one.forget() is True
        shutil.rmtree(one.folder)
        (tmp_path / "snapshot").rename(one.folder)
        doubt(one)
        assert found(one) == 0
        assert found(place.tier()) == 0, "the directory has been told"
        place.close()


class TestDiscarded:
    """What is discarded while a server hangs is not served again, however much it is."""

    def test_what_is_discarded_again_and_again_takes_no_memory(self, own_server: Server) -> None:
        place = redis_place(own_server)
        tier = place.tier(enable_events=True)
        store(tier, 8)
        own_server.hang()
        keys = [*KEYS[:4], *(b"%d" % number for number in range(1020))]
        with grown() as nbytes:
            for _ in range(391):
                tier.discard(keys)
                tier.take_events()
            assert nbytes() < 8 * 2**20
        own_server.resume()
        wait_until(lambda: is_rid_of_removals(tier))
        assert found(tier, 8) == found(place.tier(), 8) == 4, "the others stay"
        place.close()

    def test_what_others_store_again_before_it_is_discarded_again_is_gone(
        self, server: Server
    ) -> None:
        """The chore of the first call has removed the block, and nobody has polled."""
        place = redis_place(server)
        one, other = place.tier(), place.tier()
        store(one, 1)
        one.discard(KEYS[:1])
        wait_until(lambda: found(other, 1) == 0)
        ask_anew(other)
        store(other, 1)
        one.discard(KEYS[:1])
        wait_until(lambda: is_rid_of_removals(one))
        assert found(one, 1) == found(other, 1) == 0
        place.close()

    def test_more_than_can_be_queued_is_forgotten(
        self, own_server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = redis_place(own_server)
        tier = place.tier()
        store(tier, 8)
        keys = [b"%d" % number for number in range(400_384)]
        own_server.hang()
        with grown() as nbytes:
            for start in range(0, len(keys), 1024):
                tier.discard(keys[start : start + 1024])
            tier.discard(KEYS[:1])
            assert nbytes() < 64 * 2**20
        assert "everything is forgotten" in caplog.text
        assert tier.state(KEYS[0]) == State.MISS
        assert not tier.health().forgotten
        own_server.resume()
        wait_until(lambda: tier.health().forgotten)
        assert found(tier, 8) == found(place.tier(), 8) == 0
        store(tier, 8)
        assert found(tier, 8) == 8
        place.close()


@contextlib.contextmanager
def grown() -> Iterator[Callable[[], int]]:
    """Give a function that returns by how many bytes Python's objects have grown."""
    gc.collect()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def is_rid_of_removals(tier: RemoteTier) -> bool:
    tier.health(reset=True)
    tier.wait([], 0)
    return not (tier._catalog._dropping or tier._catalog._undropped)


class TestCutOff:
    def test_a_forget_is_repeated_until_the_server_has_it(
        self, own_server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = redis_place(own_server)
        tier = place.tier()
        store(tier)
        with Redis(port=own_server.port) as client:
            client.save()
        own_server.kill()
        assert tier.forget() is False
        assert tier.health().forgotten is False
        assert tier.health(reset=True).ok is False
        assert "try again" in caplog.text
        own_server.start()
        wait_until(lambda: tier.health().forgotten)  # no job runs
        assert found(place.tier()) == 0
        place.close()

    def test_a_forget_is_repeated_after_a_time_when_no_thread_could_be_started(
        self, own_server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No job comes: the tier tries by itself."""
        place = redis_place(own_server)
        tier = place.tier()
        store(tier, 4)
        own_server.hang()

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert tier.forget() is False
            time.sleep(EPOCH_S)  # the call under way ends, and others are due
        own_server.resume()
        wait_until(lambda: tier.health().forgotten)
        assert found(place.tier(), 4) == 0
        place.close()

    def test_of_two_during_a_stall_the_newest_wins(self, own_server: Server) -> None:
        """The server takes no epoch that was drawn before the second for an answer to it."""
        place = redis_place(own_server)
        tier = place.tier()
        store(tier)
        own_server.hang()
        drawn, raise_epoch = [], medium_of(tier).raise_epoch

        def record(epoch: int, above: int) -> int | None:
            drawn.append((tier._shared._agreement.forgets, epoch))
            return raise_epoch(epoch, above)

        medium_of(tier).raise_epoch = record
        for _ in range(2):
            thread = threading.Thread(target=tier._shared.forget)  # as `forget`, without its wait
            thread.start()
            thread.join()
            threads_of(tier).chore(NOBODY, FORGET, b"", sync=False)
            assert epoch_of(tier) == 0, "none is used until the server has one"
        own_server.resume()
        wait_until(lambda: tier.health().forgotten)
        forgets, epoch = drawn[-1]
        assert forgets == 2
        with Redis(port=own_server.port) as client:
            assert parse_epoch(client.get(medium_of(tier)._epoch_name)) == epoch == epoch_of(tier)
        assert found(place.tier()) == 0
        place.close()

    def test_a_tier_that_is_closed_before_says_so(
        self, own_server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = redis_place(own_server)
        tier = place.tier()
        own_server.kill()
        assert tier.forget() is False
        tier.close(PATIENCE_S)
        assert "closed before its medium could be told to forget" in caplog.text


def test_before_a_region_is_there_it_is_remembered(place: Place) -> None:
    one = place.tier()
    store(one, 4)
    other = place.tier(attach=False)
    other.discard(KEYS)
    assert other.forget() is False
    assert other.health().forgotten is False
    attach_to(other)
    assert other.health().forgotten is True
    doubt(one)
    assert found(one, 4) == found(other, 4) == 0


def test_where_scripts_may_not_run_a_forget_works_too(server: Server) -> None:
    name = f"user{next(NUMBERS)}"
    with Redis(port=server.port) as client:
        client.acl_setuser(name, True, nopass=True, keys=["*"], categories=["+@all", "-@scripting"])
    url = f"redis://{name}:x@127.0.0.1:{server.port}"
    place = Place(lambda **options: RedisTier(url, prefix=name, **options))
    one, other = place.tier(), place.tier()
    store(one, 4)
    assert other.forget() is True
    assert found(one, 4) == 0
    raise_from_threads([one, other])
    place.close()


def test_where_scripts_may_not_run_no_epoch_of_another_is_overwritten(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"user{next(NUMBERS)}"
    with Redis(port=server.port) as client:
        client.acl_setuser(name, True, nopass=True, keys=["*"], categories=["+@all", "-@scripting"])
        url = f"redis://{name}:x@127.0.0.1:{server.port}"
        place = Place(lambda **options: RedisTier(url, prefix=name, **options))
        tier = place.tier()
        store(tier, 4)
        medium, epoch = medium_of(tier), new_epoch(epoch_of(tier))
        others: list[int] = []
        read = Pipeline.getrange

        def getrange(*arguments: Any) -> Any:
            found = read(*arguments)
            if not others:  # another process writes one between this and the next step
                others.append(epoch + 1)
                client.set(medium._epoch_name, epoch_text(epoch + 1))
            return found

        monkeypatch.setattr(Pipeline, "getrange", getrange)
        medium.deadline = time.monotonic() + PATIENCE_S
        assert medium.raise_epoch(epoch, epoch - 1) == epoch + 1
        assert parse_epoch(client.get(medium._epoch_name)) == epoch + 1
        place.close()


def raise_from_threads(tiers: list[RemoteTier]) -> None:
    """Give a medium epochs from several threads at once: the highest stays."""
    first = new_epoch(max(epoch_of(tier) for tier in tiers))
    epochs = (first + np.random.default_rng(7).permutation(24)).tolist()
    answers: list[tuple[int, int]] = []

    def give(tier: RemoteTier, epochs: list[int]) -> None:
        for epoch in epochs:
            medium_of(tier).deadline = time.monotonic() + PATIENCE_S
            answers.append((epoch, medium_of(tier).raise_epoch(epoch, epoch - 1)))

    threads = [
        threading.Thread(target=give, args=(tiers[part % len(tiers)], epochs[part::4]))
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(epochs)
    assert all(given <= found for given, found in answers)
    medium_of(tiers[0]).deadline = time.monotonic() + PATIENCE_S
    assert medium_of(tiers[0]).ask_epoch() == max(epochs)


def test_the_highest_epoch_stays(place: Place) -> None:
    raise_from_threads([place.tier(), place.tier()])


def test_tiers_that_begin_at_once_have_one_epoch(place: Place) -> None:
    """Or what the first of them has put by then would be lost."""
    tiers = [place.tier(attach=False) for _ in range(4)]
    together = threading.Barrier(len(tiers))
    for tier in tiers:
        ask = medium_of(tier).ask_epoch

        def ask_together(ask: Callable[[], int | None] = ask) -> int | None:
            found = ask()
            if found is None:
                together.wait(PATIENCE_S)
            return found

        medium_of(tier).ask_epoch = ask_together
    threads = [threading.Thread(target=attach_to, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(epoch_of(tier) for tier in tiers))
    assert len({tier._shared.meet() for tier in tiers}) == 1


def test_the_highest_epoch_of_a_bucket_stays() -> None:
    pytest.importorskip("obstore", reason="the tier needs the objects extra")
    with s3_server() as server:
        make_bucket(server)
        place = objects_place(server)
        one = place.tier()
        raise_from_threads([one, place.tier()])
        place.close()


def test_a_directory_whose_lock_is_kept_says_that_it_has_not_forgotten(tmp_path: Path) -> None:
    """As by a process that was stopped; blocks are stored and found meanwhile."""
    place = directory_place(tmp_path)
    one, other = place.tier(), place.tier()
    store(other, 4)
    with (one.folder / "epoch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert one.forget() is False
        assert one.health().forgotten is False
        assert found(other, 4) == 4
        os.utime(lock.fileno(), (1e9, 1e9))  # it is kept, and has not been renewed for long
        wait_until(lambda: one.health().forgotten)
    doubt(other)
    assert found(other, 4) == 0
    place.close()
