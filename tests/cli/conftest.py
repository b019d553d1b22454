"""The command as a user runs it: a process of its own."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvoffload.cli import main

for module in ("click", "rich", "msgspec"):
    pytest.importorskip(module, reason="the command needs the cli extra")

COMMAND = [sys.executable, "-W", "error", "-m", "kvoffload"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvoffload: ")
        assert self.out == ""
        return lines[0].removeprefix("kvoffload: ")


def run_process(*arguments: object, stdin: bytes = b"", **environment: str) -> Done:
    """Run the command as a process, with no terminal anywhere."""
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=env | environment,
        check=False,
        timeout=120,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def kvoffload(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the command in this process, which saves its start, or in its own if it needs one."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Done:
        if stdin or environment:
            return run_process(*arguments, stdin=stdin, **environment)
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*map(str, arguments)])
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
        return Done(code, *texts)

    return run
