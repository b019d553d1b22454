"""Servers on the loopback that tests start, stop, starve and kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.tiers.remote.tier import RemoteTier
from tests.tiers.inside import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

SomeTier = TypeVar("SomeTier", bound=RemoteTier)


def free_port() -> int:
    """Return a free port of the loopback, of those that a node of a Redis cluster may have."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if port <= 55_535:
            return port


def stop(process: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    wait_until(lambda: all(") T " in (path / "stat").read_text() for path in threads.iterdir()))


class Server:
    """A process that listens on a port of the loopback."""

    def __init__(self, command: Callable[[int, Path], list[str]]) -> None:
        self.port = free_port()
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="kvoffload-server-")
        self._process: subprocess.Popen | None = None

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            self._command(self.port, self.folder), stdout=log, stderr=log, cwd=self.folder
        )
        log.close()
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        text = (self.folder / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the server does not answer: {text}")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """End it as nothing can prevent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def hang(self) -> None:
        """Stop it; connections stay open."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


def redis_server(*options: str) -> Server:
    """Return a Redis server that keeps nothing on disk, not yet started."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    return Server(
        lambda port, _: [
            program,
            *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *options,
        ]
    )


def s3_server(*options: str) -> Server:
    """Return moto's server, a stand-in for S3, not yet started."""
    pytest.importorskip("moto.server", reason="needs moto, of the servers extra")
    return Server(
        lambda port, _: [
            *(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)),
            *options,
        ]
    )


def patient(kind: type[SomeTier]) -> type[SomeTier]:
    """Return tiers whose jobs have more time by default: other tests run beside these."""

    class Patient(kind):
        def query(self, keys, deadline_s=PATIENCE_S):
            return super().query(keys, deadline_s)

        def put(self, keys, ids, deadline_s=PATIENCE_S):
            return super().put(keys, ids, deadline_s)

        def get(self, keys, ids, deadline_s=PATIENCE_S):
            return super().get(keys, ids, deadline_s)

    return Patient


def make_bucket(server: Server, context: ssl.SSLContext | None = None) -> None:
    """Make the bucket ``blocks``, as any client does."""
    from urllib.request import Request, urlopen

    scheme = "http" if context is None else "https"
    request = Request(f"{scheme}://127.0.0.1:{server.port}/blocks", method="PUT")
    urlopen(request, context=context, timeout=PATIENCE_S).close()


def s3_options(server: Server, secret: str = "testing") -> dict:
    """Return what opens a bucket of this server."""
    return {
        "config": {
            "endpoint": f"http://127.0.0.1:{server.port}",
            "region": "us-east-1",
            "access_key_id": "testing",
            "secret_access_key": secret,
        },
        "client_options": {"allow_http": True},
    }
