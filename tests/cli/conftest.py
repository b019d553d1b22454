"""The command as a user runs it: a process of its own."""

import contextlib
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from kvoffload.cli import main
from kvoffload.traces import Request, write_trace

for module in ("click", "rich", "msgspec"):
    pytest.importorskip(module, reason="the command needs the cli extra")

COMMAND = [sys.executable, "-W", "error", "-m", "kvoffload"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The object that ``--json`` prints."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvoffload: ")
        assert self.out == ""
        return lines[0].removeprefix("kvoffload: ")


def ended(command: list[str], **options: Any) -> Done:
    """Run a command to its end."""
    done = subprocess.run(command, capture_output=True, check=False, timeout=300, **options)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_process(*arguments: object, stdin: bytes = b"", **environment: str) -> Done:
    """Run the command as a process, with no terminal anywhere."""
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    return ended([*COMMAND, *map(str, arguments)], input=stdin, env=env | environment)


BARE = {
    name: os.environ[name]
    for name in ("HOME", "PATH", "KVOFFLOAD_PURE_PYTHON")  # which implementation is under test
    if name in os.environ
}
"""The environment of a bare shell, with no settings of the developer's."""

HOSTILE = BARE | {
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    "COLUMNS": "20",
    "LC_ALL": "C",
    "TERM": "dumb",
}


def run_shell(script: str, environment: dict[str, str] = BARE, **variables: object) -> Done:
    """Run a script of bash in which ``kvoffload`` is the command."""
    command = f'kvoffload() {{ {shlex.join(COMMAND)} "$@"; }}\n{script}'
    env = environment | {name: os.fspath(value) for name, value in variables.items()}
    return ended(["bash", "-c", command], env=env, stdin=subprocess.DEVNULL)


def heed_signals() -> None:
    """Undo what these tests inherit: background jobs of a shell ignore SIGINT, nohup's SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def open_for(process: "subprocess.Popen[bytes]", pipe: Path) -> BinaryIO:
    """Open a named pipe for writing as soon as a process has opened it for reading."""
    while process.poll() is None:
        with contextlib.suppress(OSError):  # nobody reads it yet
            return open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb")  # noqa: PTH123
        time.sleep(0.01)
    raise AssertionError(f"ended with {process.returncode}")


def run_here(*arguments: object) -> Done:
    """Run the command in this process, which saves its start; a slow machine shows no progress."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    patience = mock.patch("kvoffload.cli._terminal.LINE_SECONDS", math.inf)
    with patience, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments)])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Done(code, *texts)


@pytest.fixture
def kvoffload(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the command in this process, or in its own if it needs one."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Done:
        if stdin or environment:
            return run_process(*arguments, stdin=stdin, **environment)
        return run_here(*arguments)

    return run


def read(kvoffload: Callable[..., Done], *arguments: object) -> Any:
    """Return what a command prints as JSON."""
    return kvoffload(*arguments, "--json", "--quiet").value


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the workload of the module."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(request.module.WORKLOAD, path)
    return path


def growing(turns: int, sessions: int, **more: int) -> list[Request]:
    """Return sessions each turn of which is a block longer than the one before."""
    return [
        Request(
            1000 * turn + 37 * session,
            16 * (turn + 2),
            5,
            (0, *(100 * session + block for block in range(1, turn + 2))),
            str(session),
            **more,
        )
        for turn in range(turns)
        for session in range(sessions)
    ]
