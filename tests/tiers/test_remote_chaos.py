"""Servers that are killed, stopped, slow, empty, full, strict or hostile; what tiers make of it.

No byte is ever wrong; a job ends by its deadline; a server that does not answer costs one deadline
and is found again; the region's memory is never held by it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import (
    DirectoryTier,
    Namespace,
    ObjectTier,
    RedisTier,
    Region,
    State,
    Status,
    Tier,
    TierError,
    open_tier,
)
from kvoffload.tiers.deletion import delete_blocks
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.attack import new_fuse_disk, start_clock, stop_clock
from tests.tiers.inside import ask_anew, attached, doubt, medium_of, number_of, settle
from tests.tiers.servers import (
    Server,
    free_port,
    make_bucket,
    redis_server,
    s3_options,
    s3_server,
    stop,
)

pytestmark = pytest.mark.servers

pytest.importorskip("redis", reason="the tiers need the redis extra")
pytest.importorskip("obstore", reason="the tiers need the objects extra")

BLOCK = 16_384
NAMESPACE = Namespace("chaos", BLOCK)
KEYS = [b"key-%02d" % number for number in range(64)]


def open_redis(server: Server, **options) -> RedisTier:
    return RedisTier(f"redis://127.0.0.1:{server.port}", **{"namespace": NAMESPACE, **options})


def open_objects(server: Server, **options) -> ObjectTier:
    return ObjectTier("s3://blocks/kv", **{"namespace": NAMESPACE, **s3_options(server), **options})


class World:
    """A server and how a tier on it is opened."""

    def __init__(self, server: Server, opener: Callable[..., RemoteTier], prepare=None) -> None:
        self.server = server
        self.opener = opener
        self.prepare = prepare or (lambda _: None)

    def start(self) -> None:
        self.server.start()
        self.prepare(self.server)

    def open(self, **options) -> tuple[RemoteTier, Region]:
        tier = self.opener(self.server, **options)
        return tier, attached(tier, 128, KEYS)


class FileServer(NamedTuple):
    """The process that serves a file system."""

    process: int

    def hang(self) -> None:
        stop(self.process)

    def resume(self) -> None:
        os.kill(self.process, signal.SIGCONT)


def open_directory(path: Path, _: FileServer, **options) -> DirectoryTier:
    return DirectoryTier(path, 2**30, **{"namespace": NAMESPACE, **options})


@pytest.fixture(params=["redis", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Give a server that runs, or a directory on a file system that a process serves."""
    if request.param == "directory":
        with new_fuse_disk(tmp_path, 64) as (folder, process):
            yield World(FileServer(process), partial(open_directory, folder / "kv"))
        return
    if request.param == "redis":
        made = World(redis_server("--maxmemory", "64mb"), open_redis)
    else:
        made = World(s3_server(), open_objects, make_bucket)
    try:
        made.start()
        yield made
    finally:
        made.server.close()


def store(tier: RemoteTier, count: int) -> None:
    done = run(tier, tier.put(KEYS[:count], range(count), PATIENCE_S))
    assert not done.status.any(), done.status
    settle(tier)
    tier.poll()
    assert tier.stats()["store_ok"] >= count, tier.stats()


def check(tier: Tier, region: Region, count: int, deadline_s: float = PATIENCE_S) -> list[int]:
    """Get keys behind the first 64 blocks; compare every byte of what is OK."""
    region.array[64 * BLOCK :] = 0xA5
    done = run(tier, tier.get(KEYS[:count], range(64, 64 + count), deadline_s))
    for place, status in enumerate(done.status.tolist()):
        if status == Status.OK:
            assert region.read(64 + place) == block_bytes_of(KEYS[place], BLOCK), "WRONG BYTES"
    return done.status.tolist()


class TestDeath:
    def test_a_server_that_is_killed_is_found_again(self, world: World) -> None:
        tier, region = world.open(threads=2)
        store(tier, 16)
        assert set(check(tier, region, 16)) == {Status.OK}
        world.server.kill()
        ask_anew(tier)
        ends = [run(tier, tier.query(KEYS[:8], 5.0)) for _ in range(8)]
        assert not {Status.OK, Status.MISS} & {s for end in ends for s in end.status.tolist()}
        assert tier.health().reads == "open"
        for _ in range(100):
            assert run(tier, tier.get(KEYS[:8], range(64, 72))).status.min() == Status.UNAVAILABLE
        assert (tier.lookup(KEYS) == State.MISS).all(), "to an engine they are misses"
        world.start()  # empty: both servers keep everything in memory
        start_clock(tier)
        done = run(tier, tier.query(KEYS[:16], PATIENCE_S))
        assert set(done.status.tolist()) == {Status.MISS}
        assert tier.health().reads == "closed"
        store(tier, 16)
        assert set(check(tier, region, 16)) == {Status.OK}
        world.server.kill()
        world.start()  # empty once more, and the tier believes that all is there
        start_clock(tier)
        doubt(tier)  # as after its seconds
        assert not {Status.OK, Status.CORRUPT} & set(check(tier, region, 16))
        start_clock(tier)
        assert set(check(tier, region, 16)) == {Status.MISS}
        assert tier.close(PATIENCE_S)

    def test_a_tier_opens_although_no_server_is_there(self, world: World) -> None:
        world.server.kill()
        tier, region = world.open()
        assert Status.OK not in check(tier, region, 4, 5.0)
        assert tier.forget() is True, "it needs no server"
        world.start()
        start_clock(tier)
        store(tier, 4)
        assert set(check(tier, region, 4)) == {Status.OK}
        assert tier.close(PATIENCE_S)


class TestHangs:
    @pytest.mark.parametrize("world", ["redis", "s3", "directory"], indirect=True)
    def test_a_server_that_hangs_costs_one_deadline(self, world: World) -> None:
        """Of a directory no thread comes back before it does."""
        tier, region = world.open(threads=2)
        store(tier, 16)
        medium_of(tier).visit_s = np.inf
        world.server.hang()
        for op in ("get",) if isinstance(tier, DirectoryTier) else ("get", "query"):
            settle(tier)  # while every thread waits for the server, calls are UNAVAILABLE at once
            ask_anew(tier)
            tier.health(reset=True)
            if op == "get":
                done = run(tier, tier.get(KEYS[:16], range(64, 80), 0.2))
            else:
                done = run(tier, tier.query(KEYS[:16], 0.2))
            assert set(done.status.tolist()) <= {Status.TIMEOUT, Status.UNAVAILABLE}
            assert tier.health().reads == "open", "one deadline is enough"
        stop_clock(tier)  # the breaker stays open
        for _ in range(100):
            done = run(tier, tier.query(KEYS[16:20], PATIENCE_S))
            assert set(done.status.tolist()) == {Status.UNAVAILABLE}, "the server is not asked"
        region.array[64 * BLOCK :] = 7
        world.server.resume()
        settle(tier)
        assert (region.array[64 * BLOCK :] == 7).all(), "a late answer wrote to the region"
        start_clock(tier)
        assert set(check(tier, region, 16)) == {Status.OK}
        assert tier.health().reads == "closed"
        assert tier.close(PATIENCE_S)

    def test_host_memory_is_not_pinned_by_a_server_that_hangs(self, world: World) -> None:
        tier, region = world.open(threads=2)
        store(tier, 1)
        world.server.hang()
        done = run(tier, tier.put(KEYS[1:33], range(1, 33), 0.3))
        assert not done.status.any(), "it was copied, and the region is the caller's again"
        region.array[BLOCK : 33 * BLOCK] = 7
        assert run(tier, tier.put(KEYS[33:34], [33], 0.2)).status[0] in {
            Status.OK,
            Status.UNAVAILABLE,
        }
        settle(tier)
        assert tier.stats()["staging_bytes"] == 0, "what cannot be written is given up"
        assert tier.health().writes == "open"
        world.server.resume()
        start_clock(tier)
        ask_anew(tier)
        assert not {Status.CORRUPT} & set(check(tier, region, 33))
        assert tier.close(PATIENCE_S)


class Proxy:
    """A way to a server that drips and makes things up."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.drips = False
        self.reply: bytes | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self._sockets += [client, server]
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pass, args=(source, sink, is_reply), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _pass(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65_536):
                if is_reply and self.reply is not None:
                    sink.sendall(self.reply)
                    while True:  # and on without an end
                        sink.sendall(bytes(2**20))
                if is_reply and self.drips:
                    for byte in data:
                        sink.sendall(bytes([byte]))
                        time.sleep(0.001)
                else:
                    sink.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):  # or accept() would go on waiting
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def proxied() -> Iterator[tuple[Server, Proxy]]:
    with redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        proxy = Proxy(server.port)
        yield server, proxy
        proxy.close()


class TestRedisInTrouble:
    def test_queries_of_a_server_that_hangs_are_bounded(self, proxied) -> None:
        """All at once they ask for 100,000 keys; the others are unavailable at once."""
        server, _ = proxied
        tier, _ = World(server, open_redis).open(threads=2)
        store(tier, 1)
        keys = [b"%d" % number for number in range(100_000)]
        server.hang()
        tracemalloc.start()
        jobs = [tier.query(keys, PATIENCE_S) for _ in range(50)]
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 128 * 2**20
        others = {done.job: done.status for done in tier.poll()}
        assert set(others) == set(jobs[1:])
        assert all((status == Status.UNAVAILABLE).all() for status in others.values())
        assert tier.state(keys[-1]) == State.UNKNOWN, "nothing was learned"
        many = [tier.query([b"%d" % number]) for number in range(10)]
        assert {done.job for done in tier.poll()} == set(many), "the queue is full"
        server.resume()
        run(tier, jobs[0])
        tier.health(reset=True)
        assert set(run(tier, tier.query(keys[-8:], PATIENCE_S)).status.tolist()) == {Status.MISS}
        tier.close()

    def test_a_server_that_drips_holds_no_thread_beyond_the_deadline(self, proxied) -> None:
        """A thousand bytes per second: the blocks of one get would take two minutes."""
        _, proxy = proxied
        tier = RedisTier(f"redis://127.0.0.1:{proxy.port}", threads=1, namespace=NAMESPACE)
        region = attached(tier, 128, KEYS)
        store(tier, 8)
        proxy.drips = True
        done = run(tier, tier.get(KEYS[:8], range(64, 72), 0.2))
        assert set(done.status.tolist()) == {Status.TIMEOUT}
        settle(tier)
        assert tier.stats()["late_jobs"] == 0, (
            "the only thread is free again, and the rest drips on"
        )
        proxy.drips = False
        start_clock(tier)
        assert set(check(tier, region, 8)) == {Status.OK}
        tier.close()

    @pytest.mark.parametrize(
        "reply",
        [
            b"$9999999999\r\n",
            b"*2147483647\r\n",
            b"*1\r\n" * 100_000,
            b"+" + b"x" * 2**20,
            b"-ERR secret " + b"y" * 200 + b"\r\n",
            b"\0" * 2**16,
            b":5\r\n" * 1000,
        ],
        ids=["long", "many", "deep", "endless", "error", "zeros", "numbers"],
    )
    def test_a_hostile_server_takes_no_memory_and_gives_no_byte(
        self, proxied, reply: bytes, caplog, monkeypatch
    ) -> None:
        _, proxy = proxied
        url = f"redis://u:secret@127.0.0.1:{proxy.port}"
        tier = RedisTier(url, namespace=NAMESPACE)
        region = attached(tier, 128, KEYS)
        proxy.reply = reply
        before = _resident()
        with caplog.at_level(logging.DEBUG):
            statuses = check(tier, region, 8, 1.0)
            assert not {Status.OK, Status.FULL} & set(statuses)
            assert Status.OK not in run(tier, tier.query(KEYS[:8], 0.5)).status.tolist()
        monkeypatch.setattr("kvoffload.tiers.remote.redis.DELETE_S", 0.5)
        with pytest.raises(TierError, match=rf"^redis://127\.0\.0\.1:{proxy.port}: \w+$"):
            delete_blocks(url)
        assert _resident() - before < 64 * 2**20
        assert "secret" not in caplog.text
        tier.close(1.0)

    def test_values_of_strangers_are_corrupt_and_dropped(self, proxied) -> None:
        from redis import Redis

        server, _ = proxied
        tier, region = World(server, open_redis).open(threads=2)
        store(tier, 8)
        prefix = medium_of(tier)._prefix
        with Redis(port=server.port) as client:
            names = [medium_of(tier)._name(key, number_of(tier)) for key in KEYS[:8]]
            client.set(names[0], b"short")
            client.set(names[1], bytes(10 * BLOCK))
            client.delete(names[4])
            client.lpush(names[4], b"a list")
            assert all(name.startswith(prefix) for name in names)
            corrupt = {0, 1, 4}
            statuses = check(tier, region, 8)
            assert {i for i, s in enumerate(statuses) if s == Status.CORRUPT} == corrupt
            assert all(statuses[i] == Status.OK for i in (2, 3, 5, 6, 7)), "neighbours are unhurt"
            settle(tier)
            assert not client.exists(*[names[i] for i in corrupt])
        assert tier.stats()["removed_corrupt"] == 3
        store(tier, 8)
        assert set(check(tier, region, 8)) == {Status.OK}
        tier.close()

    def test_a_server_out_of_memory_is_full(self, caplog) -> None:
        with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
            tier, _ = World(server, open_redis).open(ack="stored", threads=2)
            statuses = []
            with caplog.at_level(logging.WARNING):
                for start in range(0, 64, 8):
                    for copy in range(4):
                        keys = [b"%d-" % copy + key for key in KEYS[start : start + 8]]
                        done = run(tier, tier.put(keys, range(8), PATIENCE_S))
                        statuses += done.status.tolist()
            assert Status.FULL in statuses
            assert set(statuses) <= {Status.OK, Status.FULL, Status.UNAVAILABLE}
            assert tier.health().writes == "open"
            assert tier.health().reads == "closed"
            assert "evicts no blocks" in caplog.text
            tier.close()

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (("--cluster-enabled", "yes"), "its server is part of a cluster"),
            (("--rename-command", "EVAL", ""), "its server has no scripts (EVAL)"),
        ],
    )
    def test_a_server_that_does_not_suffice_is_refused_by_name(self, caplog, options, why) -> None:
        with redis_server("--maxmemory", "64mb", *options) as server:
            tier, region = World(server, open_redis).open()
            assert set(check(tier, region, 1)) == {Status.FAILED}
            run(tier, tier.put(KEYS[:1], [0], PATIENCE_S))
            settle(tier)
            assert tier.stats()["store_ok"] == 0
            tier.close()
        assert f"is refused: {why}" in caplog.text


class TestCredentials:
    SECRET = "s3cr3t-passw0rd"

    def everything_shown(self, tier: RemoteTier, caplog) -> str:
        samples = "".join(f"{s.metric.name}{s.labels}{s.value}" for s in tier.samples())
        shown = f"{tier!r}{tier}{tier.place}{tier.stats()}{tier.health()}{samples}"
        return shown + caplog.text + tier.namespace.json + repr(vars(tier))

    @pytest.mark.parametrize("kind", ["redis", "redis, wrong", "redis, none", "s3"])
    def test_they_are_never_shown(self, caplog, kind: str) -> None:
        is_right = kind in ("redis", "s3")
        server = s3_server() if kind == "s3" else redis_server("--requirepass", self.SECRET)
        with server, caplog.at_level(logging.DEBUG):
            if kind == "s3":
                make_bucket(server)
                tier = open_objects(server, **s3_options(server, self.SECRET))
            else:
                place = f"redis://127.0.0.1:{server.port}/0"
                user = f"default:{self.SECRET if is_right else f'wr0ng-{self.SECRET}'}@"
                url = place.replace("//", f"//{'' if kind == 'redis, none' else user}")
                tier = open_tier(f"{url}?name=kv", NAMESPACE)
                assert tier.place == place
            region = attached(tier, 128, KEYS)
            if is_right:
                store(tier, 4)
                assert set(check(tier, region, 4)) == {Status.OK}
                server.kill()
            assert set(check(tier, region, 4, 5.0)) == {Status.UNAVAILABLE}
            assert "UNAVAILABLE" in caplog.text
            assert self.SECRET not in self.everything_shown(tier, caplog)
            tier.close()

    @pytest.mark.parametrize(
        "url",
        [
            "reddis://user:{}@host",
            "redis://user:{}/x@host:port",
            "redis://:{}@host:99999999",
            "redis://user:{}@host/x",
            "redis://user:1/{}@host",
            "redis://user:p?{}@host",
            "redis://user:{}@host?nonsense",
            "redis://user:{}@host?name=a&name=b",
            "redis://user:{}@host?{}@=1",
            "s3://user:{}@bucket/kv",
            "s3://bucket/kv?secret_access_key={}&secret_access_key=x",
            "{}@host",
        ],
    )
    def test_errors_do_not_show_them(self, url: str) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            open_tier(url.replace("{}", self.SECRET), NAMESPACE)
        assert self.SECRET not in str(caught.value)
        assert caught.value.__cause__ is None

    def test_a_bucket_that_is_not_there_is_unavailable(self) -> None:
        with s3_server() as server:
            tier, region = World(server, open_objects).open()
            assert set(check(tier, region, 4)) <= {Status.UNAVAILABLE, Status.MISS}
            done = run(tier, tier.query(KEYS[:4], PATIENCE_S))
            assert Status.OK not in done.status.tolist()
            tier.close()


class TestTLS:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> tuple[Path, Path]:
        """Return a new key with a certificate that no client trusts yet."""
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
                *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
                *("-addext", "basicConstraints=critical,CA:FALSE"),
            ],
            check=True,
            capture_output=True,
        )
        return key, certificate

    @pytest.mark.parametrize("kind", ["redis", "s3"])
    def test_a_certificate_is_checked(self, certificate, kind: str) -> None:
        """The process of an object store's client is told whom to trust."""
        key, certificate = map(str, certificate)
        if kind == "redis":
            port = free_port()
            tls = ("--tls-port", str(port), "--tls-cert-file", certificate)
            server = redis_server(*tls, "--tls-key-file", key, "--tls-auth-clients", "no")
            url = f"rediss://127.0.0.1:{port}"
            without = f"rediss://127.0.0.1:{server.port}?ca={certificate}"  # the port of no TLS
            urls = (url, without, f"{url}?ca={certificate}")
            tiers = [partial(open_tier, url, NAMESPACE) for url in urls]
        else:
            server = s3_server("--ssl", "-c", certificate, "-k", key)
            config = s3_options(server)["config"]
            config["endpoint"] = config["endpoint"].replace("http:", "https:")
            trust = {"root_certificate": Path(certificate).read_bytes()}
            if sys.version_info < (3, 11):  # the last obstore for it does not know this one
                trust = {"allow_invalid_certificates": True}
            tiers = [partial(open_objects, server, config=config, client_options={})]
            tiers += [partial(open_objects, server, config=config, client_options=trust)]
        with server:
            if kind == "s3":
                make_bucket(server, ssl.create_default_context(cafile=certificate))
            for opener in tiers:
                with opener() as tier:
                    region = attached(tier, 128, KEYS)
                    if opener is tiers[-1]:
                        store(tier, 4)
                        assert set(check(tier, region, 4)) == {Status.OK}
                    else:
                        found = set(check(tier, region, 4, 2.0))
                        assert found <= {Status.UNAVAILABLE, Status.TIMEOUT}


def _resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
