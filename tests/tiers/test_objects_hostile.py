"""Object stores that answer what no store answers, and the process that is to bear it.

Whatever a server sends, the engine's process lives, grows by no more than what it asked for, and is
told in time; the client's process may end, and is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of, run
from kvoffload.tiers import Namespace, ObjectTier, Region, Status, TierError
from kvoffload.tiers.deletion import delete_blocks
from kvoffload.tiers.remote import _objects_worker as worker
from kvoffload.tiers.remote.objects_client import ObjectsClient, ObjectsClientError
from tests.isolated.scripts import ROOT, run_python
from tests.tiers.attack import report, rounds, start
from tests.tiers.inside import attached, descriptors, medium_of, wait_until
from tests.tiers.servers import patient, s3_options, stop

pytestmark = pytest.mark.servers

pytest.importorskip("obstore", reason="the tier needs the objects extra")

LENGTHS = {"2**62": 2**62, "2**40": 2**40, "2**33": 2**33}
CHUNK = b"40000\r\n" + bytes(0x40000) + b"\r\n"
FOUND = b'HTTP/1.1 200 X\r\nETag: "a"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'

Answer = Callable[[socket.socket], None]


def sends(
    head: bytes, pieces: Iterable[bytes] = (), pause_s: float = 0.0, *, stalls: bool = False
) -> Answer:
    """Return an answer of a head and pieces of a body, which ends when the client has enough."""

    def answer(client: socket.socket) -> None:
        client.sendall(head)
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause_s)
        if stalls:
            client.recv(1)

    return answer


def frames(head: bytes, count: int = 2) -> Answer:
    """Return an answer with a few pieces of a body, which then stalls."""
    return sends(head + b"\r\n", [bytes(1000)] * count, 0.02, stalls=True)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
ANSWERS: dict[str, Answer] = {
    **{
        f"error-{status}-of-{name}": frames(
            b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n" % (status, length)
        )
        for status in (400, 403, 404, 409, 412, 500, 503)
        for name, length in LENGTHS.items()
        if status in (403, 500) or name == "2**62"
    },
    "found-of-2**62": frames(FOUND + b"Content-Length: %d\r\n" % 2**62),
    "found-of-2**64": frames(FOUND + b"Content-Length: %d\r\n" % 2**64),
    "found-of-less": frames(FOUND + b"Content-Length: 10\r\n"),
    "found-cut": sends(FOUND + b"Content-Length: 16448\r\n\r\n" + bytes(100)),
    "two-lengths": sends(FOUND + b"Content-Length: 16448\r\nContent-Length: 7\r\n\r\n" + bytes(7)),
    "negative": sends(FOUND + b"Content-Length: -1\r\n\r\n"),
    "endless-error": sends(b"HTTP/1.1 500 X\r\n" + CHUNKED + b"\r\n", repeat(CHUNK)),
    "endless-absence": sends(b"HTTP/1.1 404 X\r\n" + CHUNKED + b"\r\n", repeat(CHUNK)),
    "endless-body": sends(FOUND + CHUNKED + b"\r\n", repeat(CHUNK)),
    "endless-body-of-no-length": sends(FOUND + b"\r\n", repeat(bytes(2**18))),
    "endless-chunk-head": sends(FOUND + CHUNKED + b"\r\n", repeat(b"0" * 2**16)),
    "endless-trailers": sends(FOUND + CHUNKED + b"\r\n0\r\n", repeat(b"a: b\r\n" * 1000)),
    "endless-heads": sends(b"HTTP/1.1 200 X\r\n", repeat(b"a: b\r\n" * 10_000)),
    "endless-head": sends(b"HTTP/1.1 200 X\r\na: ", repeat(b"b" * 2**16)),
    "endless-informal": sends(b"", repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)),
    "drip": sends(FOUND + b"Content-Length: 16448\r\n\r\n", repeat(b"x"), 0.02),
    "drip-of-heads": sends(b"HTTP/1.1 200 X\r\n", repeat(b"a: b\r\n"), 0.02),
    "gzip": sends(
        FOUND + b"Content-Encoding: gzip\r\nContent-Length: 16448\r\n\r\n" + bytes(16448)
    ),
    "zeros": sends(b"", repeat(bytes(2**16))),
    "nothing": sends(b""),
    "silence": frames(b"", 0),
    "to-itself": sends(b"HTTP/1.1 307 X\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n"),
    "elsewhere": sends(
        b"HTTP/1.1 302 X\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
    ),
}


class HostileServer:
    """A store of objects that answers as its bucket is named; what lies in none is kept."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._clients: set[socket.socket] = set()
        self.gate = threading.Event()
        """The event that the bucket ``gated`` waits for before it answers for blocks."""
        self.gate.set()
        self.waiting = threading.Event()
        """That somebody waits, or has."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, client.makefile("rb") as lines:
            while line := lines.readline():
                method, path, _ = line.decode().split(" ")
                length = 0
                while (head := lines.readline()) not in {b"\r\n", b""}:
                    name, _, value = head.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                data = lines.read(length)
                bucket, _, name = path.lstrip("/").partition("?")[0].partition("/")
                of_tier = name.endswith("/namespace.json")
                kind, _, where = bucket.partition("--")
                if kind == "gated" and not of_tier:
                    self.waiting.set()
                    self.gate.wait()
                if kind not in ANSWERS or (of_tier and where != "everywhere"):
                    self._answer(client, method, path, data)
                    continue
                ANSWERS[kind](client)
                return
        self._clients.discard(client)

    def _answer(self, client: socket.socket, method: str, path: str, data: bytes) -> None:
        if method == "PUT":
            self._kept[path] = data
        found = self._kept.get(path)
        if found is None:
            client.sendall(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
            return
        body = found if method == "GET" else b""
        size = len(found) if method in {"GET", "HEAD"} else 0
        client.sendall(FOUND + b"Content-Length: %d\r\n\r\n" % size + body)

    def close(self) -> None:
        self.gate.set()
        for sock in (self._listener, *list(self._clients)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    made = HostileServer()
    yield made
    made.close()


ENGINE = """
import json, os, re, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from kvoffload.tiers import Namespace, ObjectTier, Region
from kvoffload.testing.tiers import run

BLOCK, SECONDS = 16_384, 0.4
KEYS = [b"key-%d" % number for number in range(4)]


def most_memory():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024


def meet(bucket):
    tier = ObjectTier(
        f"s3://{bucket}/kv",
        threads=2,
        namespace=Namespace("hostile", BLOCK),
        ack="stored",
        **json.loads(sys.argv[1]),
    )
    region = Region.allocate(8, BLOCK)
    tier.attach(region)
    until = time.monotonic() + 300
    while not bucket.endswith("everywhere") and tier._medium.store._visited_at < 0:
        assert time.monotonic() < until
        tier.health(reset=True)
        run(tier, tier.query(KEYS, SECONDS))  # what `attach` could not learn the next job asks for
    found = {}
    for verb, job in (
        ("get", lambda: tier.get(KEYS, range(4), SECONDS)),
        ("query", lambda: tier.query(KEYS, SECONDS)),
        ("put", lambda: tier.put(KEYS, range(4), SECONDS)),
    ):
        tier._medium.verdicts.clear()
        tier.health(reset=True)
        if tier._medium.store._client._process:
            tier._medium.store._client._process.started = 0.0  # it may be started again at once
        found[verb] = sorted(set(run(tier, job()).status.tolist()))
    tier.close(30)
    return found


signal.signal(signal.SIGPIPE, signal.SIG_DFL)
meet("sound")
before = most_memory()
with ThreadPoolExecutor(4) as threads:
    buckets = sys.argv[2].split(",")
    results = dict(zip(buckets, threads.map(meet, buckets)))
print(json.dumps({"grown": most_memory() - before, "results": results}))
"""


NO_ANSWER = {Status.TIMEOUT, Status.UNAVAILABLE}
ANSWERED_PUT = re.compile("found|endless-(body|chunk|trailers)|drip$|gzip")
"""Answers whose heads say that what was put is stored."""

WORST = [
    "error-500-of-2**62",
    "error-403-of-2**40--everywhere",
    "error-500-of-2**33",
    "endless-error",
    "endless-absence--everywhere",
    "endless-heads",
]


@pytest.mark.attack
def test_no_answer_harms_the_engine(server: HostileServer) -> None:
    """The process lives, grows by little, ends each job and takes nothing for a block."""
    buckets = [f"{name}{where}" for name in ANSWERS for where in ("", "--everywhere")]
    others = [bucket for bucket in buckets if bucket not in WORST]
    buckets = WORST + others[:: len(others) // min(len(others), 2 * rounds(len(others)))]
    options = json.dumps(s3_options(server))
    done = run_python("-c", ENGINE, options, ",".join(buckets), cwd=ROOT, timeout=None)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["grown"] < 192 * 2**20
    for bucket, result in found["results"].items():
        for verb, statuses in result.items():
            if bucket.startswith("error"):
                assert verb == "query" or set(statuses) <= NO_ANSWER, (bucket, verb, statuses)
        assert Status.OK not in result["get"], bucket
        assert Status.OK not in result["put"] or ANSWERED_PUT.match(bucket), bucket
    report(f"{len(found['results'])} buckets of hostile answers, {found['grown'] >> 20} MiB grown")


@pytest.mark.parametrize("answer", ["endless-error", "endless-body", "to-itself"])
def test_a_deletion_is_bounded(server: HostileServer, monkeypatch, answer: str) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "testing")
    url = f"s3://{answer}/kv?endpoint=http://127.0.0.1:{server.port}&http=yes&region=x"
    error = "GenericError" if answer == "to-itself" else "ObjectsClientError"
    with pytest.raises(TierError, match=f"^s3://{answer}/kv: {error}$"):
        delete_blocks(url)


# -- the client's process ------------------------------------------------------------------------

BLOCK = 16_384
KEYS = [b"key-%d" % number for number in range(8)]
SECRET = "s3cr3t-key"


def options_of(port: int) -> dict:
    return {
        "namespace": Namespace("client", BLOCK),
        **s3_options(SimpleNamespace(port=port), SECRET),
    }


@pytest.fixture
def opened(server: HostileServer) -> Iterator[tuple[ObjectTier, Region]]:
    """Give a tier whose blocks are stored, behind a gate."""
    tier = patient(ObjectTier)(
        "s3://gated/kv", threads=2, ack="stored", name="gated", **options_of(server.port)
    )
    region = attached(tier, 16, KEYS)
    run(tier, tier.query(KEYS[:1]))
    assert not run(tier, tier.put(KEYS, range(8), PATIENCE_S)).status.any()
    server.waiting.clear()
    try:
        yield tier, region
    finally:
        server.gate.set()
        tier.close(PATIENCE_S)


def client_of(tier: ObjectTier) -> int:
    """Return the number of a tier's client's process."""
    return medium_of(tier)._client._process._popen.pid


def has_all(tier: ObjectTier, region: Region) -> bool:
    """Get every block, as soon as a client may be started; compare the bytes."""

    def are_loaded() -> bool:
        tier.health(reset=True)
        region.array[8 * BLOCK :] = 0xA5
        done = run(tier, tier.get(KEYS, range(8, 16), PATIENCE_S))
        assert set(done.status.tolist()) <= {*NO_ANSWER, Status.OK}
        return not done.status.any()

    wait_until(are_loaded)
    return all(region.read(8 + i) == block_bytes_of(key, BLOCK) for i, key in enumerate(KEYS))


def is_running(process: int) -> bool:
    """Return whether there is a process that is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestClient:
    @pytest.mark.parametrize("verb", ["get", "put"])
    def test_one_that_is_killed_costs_its_requests_and_is_started_again(
        self, opened, server: HostileServer, verb: str
    ) -> None:
        tier, region = opened
        region.array[8 * BLOCK :] = 7
        server.gate.clear()
        if verb == "get":
            job = tier.get(KEYS, range(8, 16), PATIENCE_S)
        else:
            job = tier.put([b"new-" + key for key in KEYS], range(8), PATIENCE_S)
        assert server.waiting.wait(PATIENCE_S)
        killed = client_of(tier)
        os.kill(killed, signal.SIGKILL)
        done = run(tier, job)
        assert set(done.status.tolist()) == {Status.UNAVAILABLE}
        assert (region.array[8 * BLOCK :] == 7).all()
        assert not Path(f"/proc/{killed}").exists(), "it is waited for"
        server.gate.set()
        assert has_all(tier, region)
        assert client_of(tier) != killed

    def test_one_that_hangs_costs_a_deadline_and_is_replaced(self, opened) -> None:
        tier, region = opened
        hung = client_of(tier)
        stop(hung)
        region.array[8 * BLOCK :] = 7
        done = run(tier, tier.get(KEYS, range(8, 16), 0.2))
        assert set(done.status.tolist()) == {Status.TIMEOUT}
        assert (region.array[8 * BLOCK :] == 7).all()
        assert has_all(tier, region)
        wait_until(lambda: not is_running(hung))

    def test_no_descriptor_and_no_process_is_left_behind(self, server: HostileServer) -> None:
        before = descriptors()
        seen = []
        tier = ObjectTier("s3://sound/kv", threads=2, **options_of(server.port))
        tier.attach(Region.allocate(1, BLOCK))
        for _ in range(rounds(20)):
            run(tier, tier.get(KEYS[:1], [0], PATIENCE_S))
            seen.append(client_of(tier))
            os.kill(seen[-1], signal.SIGKILL)
            run(tier, tier.get(KEYS[:1], [0], PATIENCE_S))
            medium_of(tier)._client._process.started = 0.0  # it may be started again at once
            tier.health(reset=True)
        assert len(set(seen)) == len(seen)
        assert tier.close(PATIENCE_S)
        assert not any(is_running(process) for process in seen)
        # the server's side of a connection is closed a moment later
        wait_until(lambda: descriptors() <= before)

    def test_it_ends_with_the_engine(self, server: HostileServer) -> None:
        """Although a child that Python does not know of holds the engine's sockets."""
        program = f"""
import ctypes, sys, time
from tests.tiers.test_objects_hostile import *
tier = ObjectTier("s3://sound/kv", **options_of({server.port}))
tier.attach(Region.allocate(1, BLOCK))
run(tier, tier.get(KEYS[:1], [0], PATIENCE_S))
child = ctypes.PyDLL(None).fork()
if not child:
    time.sleep(600)
print(client_of(tier), child, flush=True)
time.sleep(600)
"""
        engine = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        with engine:
            client, child = map(int, engine.stdout.readline().split())
            try:
                assert is_running(client)
                engine.kill()
                wait_until(lambda: not is_running(client))
            finally:
                os.kill(child, signal.SIGKILL)

    def test_a_forked_child_has_one_of_its_own(self, opened, server: HostileServer) -> None:
        tier, region = opened

        def work() -> None:
            with pytest.raises(RuntimeError, match="belongs to process"):
                tier.get(KEYS, range(8))
            sockets = medium_of(tier)._client._process._sockets
            assert all(each.fileno() < 0 for each in sockets), "they are the parent's"
            own = patient(ObjectTier)("s3://gated/kv", threads=2, **options_of(server.port))
            assert has_all(own, attached(own, 16))
            assert client_of(own) != client_of(tier)
            own.close(PATIENCE_S)

        _, status = os.waitpid(start(work), 0)
        assert status == 0
        assert has_all(tier, region)

    def test_it_shows_no_secret_and_has_a_limit(self, opened) -> None:
        tier, _ = opened
        process = Path(f"/proc/{client_of(tier)}")
        for shown in ("cmdline", "environ"):
            assert SECRET.encode() not in (process / shown).read_bytes()
        limits = (process / "limits").read_text()
        assert int(re.search(r"Max data size\s+(\d+)", limits)[1]) < 2**30
        assert re.search(r"Max core file size\s+0\s+0", limits)

    def test_one_that_cannot_be_started_is_trouble_and_no_exception(
        self, server: HostileServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nonexistent")
            tier = patient(ObjectTier)("s3://sound/kv", **options_of(server.port))
            tier.attach(Region.allocate(1, BLOCK))
            done = run(tier, tier.query(KEYS[:1]))
            assert done.status.tolist() == [Status.UNAVAILABLE]
        tier.health(reset=True)
        assert run(tier, tier.query(KEYS[:1])).status.tolist() == [Status.MISS]
        tier.close(PATIENCE_S)

    def test_one_that_keeps_ending_is_started_once_per_second(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvoffload.tiers.remote.objects_client.RESTART_S", 2 * PATIENCE_S)
        client = ObjectsClient({"url": "memory:///", "options": {}}, 1, 2**28)
        answers = []
        ask = partial(client.ask, worker.HEAD, [worker.Item("x")], PATIENCE_S, answers.append)
        ask()
        first = client._process
        os.kill(first._popen.pid, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(ObjectsClientError):
                ask()
        assert client._process is first
        first.started -= 2 * PATIENCE_S
        ask()
        assert client._process is not first
        assert [answer.outcome for answer in answers] == [worker.ABSENT] * 2
        client.close()

    def test_settings_arrive_as_they_were_given(self) -> None:
        settings = {
            "config": {"skip_signature": True, "region": "x"},
            "timeout": timedelta(seconds=2.5),
            "default_headers": {"a": b"\0\xff", "b": "c"},
        }
        assert worker.decode_settings(worker.encode_settings(settings)) == settings
        with pytest.raises(TypeError) as caught:
            worker.encode_settings({"secret_access_key": {SECRET}})
        assert SECRET not in str(caught.value)
