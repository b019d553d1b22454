"""Epochs that a medium lost, that a wrong clock drew, or that a full server refuses.

On real media: whoever lost an epoch may have forgotten since. Nothing that was put before a
confirmed `forget` is served afterwards, whatever the clock of an engine shows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvoffload.tiers.epoch
from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import RedisTier
from kvoffload.tiers.epoch import AHEAD_MS, is_far_ahead
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.inside import doubt, epoch_of, medium_of
from tests.tiers.places import (
    BLOCK,
    KEYS,
    NUMBERS,
    Place,
    directory_place,
    found,
    lose_epoch,
    mooncake_place,
    objects_place,
    redis_place,
    settle,
    store,
    wait_until,
)
from tests.tiers.servers import MooncakeServers, Server, make_bucket, redis_server, s3_server

pytest.importorskip("redis", reason="the tier needs the redis extra")

from redis import Redis

pytestmark = pytest.mark.servers

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiers.engine.threads.RETRY_S", 0.05)


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru") as server:
        yield server


@pytest.fixture(scope="module")
def bucket() -> Iterator[Server]:
    pytest.importorskip("obstore", reason="the tier needs the objects extra")
    with s3_server() as server:
        make_bucket(server)
        yield server


@pytest.fixture(scope="module")
def mooncake() -> Iterator[MooncakeServers]:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed", exc_type=ImportError)
    with MooncakeServers() as servers:
        yield servers


@pytest.fixture(params=["redis", "directory", "objects", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "redis":
        made = redis_place(request.getfixturevalue("redis"))
    elif request.param == "directory":
        made = directory_place(tmp_path)
    elif request.param == "objects":
        made = objects_place(request.getfixturevalue("bucket"))
    else:
        made = mooncake_place(request.getfixturevalue("mooncake"))
    yield made
    made.close()


@contextlib.contextmanager
def clock_ahead(ahead_ms: int) -> Iterator[None]:
    """Let the clock of the engines that draw an epoch meanwhile be ahead."""
    now_ms = kvoffload.tiers.epoch._now_ms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvoffload.tiers.epoch, "_now_ms", lambda: now_ms() + ahead_ms)
        yield


def losses(*tiers: RemoteTier) -> int:
    return sum(tier.stats()["lost_missing"] + tier.stats()["lost_lower"] for tier in tiers)


def check_quiet(*tiers: RemoteTier) -> None:
    """Check that tiers have one epoch, find each other's blocks, and forget nothing any more."""
    for tier in tiers:
        doubt(tier)
        found(tier, 4)
    for tier in tiers:  # the first may have been overtaken by the last
        doubt(tier)
        found(tier, 4)
    before = losses(*tiers)
    store(tiers[0], 4)
    for tier in tiers:
        doubt(tier)
        assert found(tier, 4) == 4
    assert len({epoch_of(tier) for tier in tiers}) == 1
    assert losses(*tiers) == before


class TestDoubts:
    def test_an_engine_whose_clock_was_ahead_undoes_no_forget(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Engine `late` drew its epoch; it was lost; engine `fresh` has forgotten meanwhile."""
        with clock_ahead(HOUR_MS):
            late = place.tier()
        store(late, 4)
        lose_epoch(late)
        fresh = place.tier()
        assert fresh.forget() is True
        assert epoch_of(fresh) < epoch_of(late)
        for tier in (late, fresh, place.tier(), late):
            doubt(tier)
            assert found(tier, 4) == 0, "forgotten blocks are back"
        assert late.stats()["lost_lower"] == 1
        assert "found an older epoch on its medium" in caplog.text
        check_quiet(late, fresh)

    def test_a_lost_epoch_is_counted_and_named(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = place.tier()
        store(tier, 4)
        lose_epoch(tier)
        doubt(tier)
        assert found(tier, 4) == 0
        assert tier.stats()["lost_missing"] == 1
        assert "found no epoch on its medium" in caplog.text
        check_quiet(tier, place.tier())

    def test_a_block_put_while_a_forget_was_pending_is_not_served_after_another(
        self, place: Place
    ) -> None:
        """Engine `late` could not tell its medium; `other` forgets; then `late` writes."""
        late, other = place.tier(threads=8), place.tier()  # four of them are held up
        store(late, 4)
        goes_on = threading.Event()
        write = late._shared.write

        def paused(*arguments) -> None:
            goes_on.wait(PATIENCE_S)
            write(*arguments)

        def cut_off(*_: int) -> None:
            raise ConnectionRefusedError

        medium_of(late).raise_epoch = cut_off
        late._shared.write = paused
        with clock_ahead(HOUR_MS):
            assert late.forget() is False
            done = run(late, late.put(KEYS[:4], range(4), PATIENCE_S))
            assert not done.status.any(), "it is acknowledged"
        doubt(other)
        assert other.forget() is True
        del medium_of(late).raise_epoch
        wait_until(lambda: late.health().forgotten)
        goes_on.set()
        settle(late)
        for tier in (other, late, place.tier()):
            doubt(tier)
            assert found(tier, 4) == 0, "a block of before the forget"
        assert late.stats()["dropped"] == 4
        late._shared.write = write
        check_quiet(late, other)


class TestClocks:
    @pytest.mark.parametrize("ahead_ms", [2 * DAY_MS, AHEAD_MS + DAY_MS], ids=["days", "century"])
    def test_an_epoch_of_a_wrong_clock_heals_when_the_clock_is_right(
        self, place: Place, ahead_ms: int
    ) -> None:
        with clock_ahead(ahead_ms):
            wrong = place.tier()
            store(wrong, 4)
        assert is_far_ahead(epoch_of(wrong))
        lose_epoch(wrong)
        right = place.tier()
        store(right, 4)
        check_quiet(wrong, right)
        assert not is_far_ahead(epoch_of(wrong))
        assert losses(wrong, right) == 1, "each call does not make the others forget"

    def test_a_pending_forget_of_a_wrong_clock_is_written_by_the_right_one(
        self, place: Place
    ) -> None:
        tier = place.tier()
        store(tier, 4)
        drawn: list[int] = []

        def cut_off(epoch: int, above: int) -> None:
            drawn.append(epoch)
            raise ConnectionRefusedError

        medium_of(tier).raise_epoch = cut_off
        with clock_ahead(AHEAD_MS):
            assert tier.forget() is False
        assert is_far_ahead(max(drawn))
        del medium_of(tier).raise_epoch
        wait_until(lambda: tier.health().forgotten)
        assert not is_far_ahead(epoch_of(tier))
        check_quiet(tier, place.tier())


class TestFullServers:
    @pytest.fixture
    def full(self) -> Iterator[Server]:
        with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
            yield server

    @pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
    def test_one_that_refuses_an_epoch_forgets_all_the_same(
        self, full: Server, scripts: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = f"full{next(NUMBERS)}"
        with Redis(port=full.port) as client:
            client.acl_setuser(
                name,
                True,
                nopass=True,
                keys=["*"],
                categories=["+@all"] + ([] if scripts else ["-@scripting"]),
            )
            url = f"redis://{name}:x@127.0.0.1:{full.port}"
            place = Place(lambda **options: RedisTier(url, prefix=name, **options))
            one, other = place.tier(), place.tier()
            store(one, 4)
            assert found(other, 4) == 4
            client.config_set("maxmemory", 2**19)  # of which it has more in use
            assert one.forget() is True, "the epoch was deleted, which forgets for everyone"
            assert one.health().forgotten
            assert not client.exists(medium_of(one)._epoch_name)
            assert "is full and refused an epoch" in caplog.text
            for tier in (other, one, place.tier()):
                tier.health(reset=True)
                done = run(tier, tier.get(KEYS[:4], range(len(KEYS), len(KEYS) + 4), PATIENCE_S))
                assert done.status.all(), "nothing is served"
            client.config_set("maxmemory", 2**23)
            for tier in (one, other):
                tier.health(reset=True)
            check_quiet(one, other)
        place.close()

    def test_one_that_can_not_even_delete_it_is_told_again(self, full: Server) -> None:
        place = redis_place(full)
        tier = place.tier()
        store(tier, 4)
        with Redis(port=full.port) as client:
            client.config_set("maxmemory", 2**19)  # of which it has more in use
            delete_epoch = medium_of(tier).delete_epoch

            def cut_off() -> bool:
                raise ConnectionResetError

            medium_of(tier).delete_epoch = cut_off
            assert tier.forget() is False
            assert client.exists(medium_of(tier)._epoch_name)
            medium_of(tier).delete_epoch = delete_epoch
            wait_until(lambda: tier.health().forgotten)
            assert not client.exists(medium_of(tier)._epoch_name)
        place.close()

    def test_the_epoch_of_a_mooncake_store_is_deleted_too(self, mooncake: MooncakeServers) -> None:
        place = mooncake_place(mooncake)
        one, other = place.tier(), place.tier()
        store(one, 4)

        def refuse(*_: int) -> None:
            from kvoffload.tiers.remote.mooncake import StoreError

            raise StoreError(-200)

        medium_of(one).raise_epoch = refuse
        assert one.forget() is True
        medium_of(other).deadline = time.monotonic() + PATIENCE_S
        assert medium_of(other).ask_epoch() is None
        del medium_of(one).raise_epoch
        doubt(other)
        assert found(other, 4) == 0
        check_quiet(one, other)
        place.close()


class TestEviction:
    @pytest.mark.parametrize(
        ("policy", "line", "times"),
        [
            ("allkeys-lru", "may evict the epoch", 1),
            ("allkeys-random", "use volatile-lru", 1),
            ("volatile-lru", "maxmemory", 0),
            ("noeviction", "evicts no blocks", 1),
        ],
    )
    def test_a_policy_that_harms_is_named_once(
        self, policy: str, line: str, times: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with redis_server("--maxmemory", "64mb", "--maxmemory-policy", policy) as server:
            place = redis_place(server)
            with caplog.at_level(logging.WARNING):
                tier = place.tier()
                for _ in range(3):
                    lose_epoch(tier)
                    found(tier, 1)
            assert sum(line in record.getMessage() for record in caplog.records) == times
            with Redis(port=server.port) as client:
                assert client.info("commandstats")["cmdstat_info"]["calls"] == 1
            place.close()

    def test_a_volatile_policy_evicts_blocks_and_not_the_epoch(self) -> None:
        with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "volatile-lru") as server:
            place = redis_place(server)
            tier = place.tier(ack="stored")
            epoch = epoch_of(tier)
            for start in range(0, 4096, len(KEYS)):
                keys = [b"%d" % number for number in range(start, start + len(KEYS))]
                assert not run(tier, tier.put(keys, range(len(KEYS)), PATIENCE_S)).status.any()
            with Redis(port=server.port) as client:
                assert client.info("stats")["evicted_keys"] > 1000
            assert 4096 * BLOCK > 2**22
            assert epoch_of(tier) == epoch
            assert losses(tier) == 0
            place.close()

    def test_a_block_that_is_touched_expires_later(self, redis: Server) -> None:
        place = redis_place(redis)
        tier = place.tier()
        store(tier, 2)
        medium = medium_of(tier)
        names = [medium._name(key, epoch_of(tier)) for key in KEYS[:2]]
        with Redis(port=redis.port) as client:
            assert all(29 * 86_400 < client.ttl(name) <= 30 * 86_400 for name in names)
            assert client.ttl(medium._epoch_name) == client.ttl(medium._namespace_name) == -1
            for name in names:
                client.expire(name, 100)
            assert found(tier, 2) == 2
            tier.touch(KEYS[:1])
            settle(tier)
            assert client.ttl(names[0]) > 29 * 86_400
            assert client.ttl(names[1]) <= 100
        place.close()
