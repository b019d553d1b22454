"""Whatever ends ``.ci/run`` ends all that it has started, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
STEP = """#!/usr/bin/env bash
sleep 1000 &
touch "$KVO_WORK/began-$(basename "$0")"
{}
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists() or not shutil.which("git"),
    reason="needs Linux and git",
)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


class Runs:
    """A repository with steps that sleep, and runs of ``.ci/run`` in it."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.work = folder / "work"
        (self.tree / ".ci" / "steps").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", self.tree / ".ci")
        self.mark = f"KVO_WORK={self.work}".encode()

    def add(self, name: str, last: str) -> None:
        """Add a step that leaves a process behind."""
        path = self.tree / ".ci" / "steps" / name
        path.write_text(STEP.format(last))
        path.chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        git = ["git", "-C", str(self.tree), "-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "steps"], check=True)
        outer = {name for name in os.environ if name.startswith("KVO_")}  # of a run of this test
        kept = {name: value for name, value in os.environ.items() if name not in outer}
        return subprocess.Popen(
            # the tests may run where SIGINT is ignored, and a shell cannot change that
            ["env", "--default-signal=INT", "bash", ".ci/run"],
            cwd=self.tree,
            env={**kept, "KVO_WORK": str(self.work)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def has_begun(self, *names: str) -> bool:
        return all((self.work / f"began-{name}").exists() for name in names)

    def running(self) -> list[str]:
        """Return the command lines of the processes that a run has started."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                if self.mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("first", ["00-environment", "10-lane"])
def test_what_ends_it_ends_its_steps(runs: Runs, number: int, first: str) -> None:
    """In the step before the lanes, and in both lanes."""
    runs.add("00-environment", "sleep 1000" if first.startswith("00") else "")
    runs.add("10-lane", "sleep 1000")
    runs.add("50-lane", "sleep 1000")
    names = [first] if first.startswith("00") else [first, "50-lane"]
    with runs.start() as run:
        wait_until(lambda: runs.has_begun(*names))
        assert len(runs.running()) > len(names)
        run.send_signal(number)
        run.communicate(timeout=PATIENCE_S)
    assert run.returncode == -number
    wait_until(lambda: not runs.running())  # the kernel takes a moment to end what was killed


def test_steps_run_in_lanes_get_interrupts_and_leave_nothing_behind(runs: Runs) -> None:
    runs.add("00-environment", "echo result: ready")
    runs.add("10-first", 'until [ -e "$KVO_WORK/began-50-beside" ]; do sleep 0.02; done')
    runs.add("20-fails", "exit 3")
    runs.add("50-beside", "echo; kill -INT $$")
    with runs.start() as run:
        out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "2 passed, 2 failed" in out
    assert "00-environment           passed      0 s  ready" in out
    assert {line.split()[0] for line in out.splitlines() if " FAILED " in line} == {
        "20-fails",
        "50-beside",
    }
    wait_until(lambda: not runs.running())  # the kernel takes a moment to end what was killed


def test_processes_are_never_ended_by_name() -> None:
    for path in [*(ROOT / ".ci").rglob("*"), ROOT / "noxfile.py"]:
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text()
            assert "pkill" not in text, path
            assert "killall" not in text, path
