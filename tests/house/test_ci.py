"""Whatever ends ``.ci/run`` ends all that it has started, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
# in the place of an interpreter: its environments hold it, and its nox runs scripts
case "$2 $3" in
"venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"pip install") name=environment ;;
"nox --list") cat sessions.json ;;
"nox --session") name=$4 ;;
*) [ "$1" != -c ] || exec {python} "$@" ;;
esac
[ -z "${{name:-}}" ] || . "steps/$name"
"""
STEP = """sleep 1000 &
touch "$KVO_WORK/began-$name"
{}
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists() or not shutil.which("git"),
    reason="needs Linux and git",
)


class Runs:
    """A repository with sessions that sleep, and runs of ``.ci/run`` in it."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.work = folder / "work"
        self.python = folder / "python"
        for part in (".ci", "steps"):
            (self.tree / part).mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", self.tree / ".ci")
        self.python.write_text(PYTHON.format(python=sys.executable))
        self.python.chmod(0o755)
        self.mark = f"KVO_WORK={self.work}".encode()
        self.sessions: list[dict[str, object]] = []
        self.add("environment", "")

    def add(self, name: str, last: str, *tags: str) -> None:
        """Add a session that leaves a process behind; one without tags is the environment."""
        (self.tree / "steps" / name).write_text(STEP.format(last))
        if tags:
            self.sessions.append({"session": name, "tags": tags})
        (self.tree / "sessions.json").write_text(json.dumps(self.sessions))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        git = ["git", "-C", str(self.tree), "-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "steps"], check=True)
        outer = {name for name in os.environ if name.startswith("KVO_")}  # of a run of this test
        kept = {name: value for name, value in os.environ.items() if name not in outer}
        return subprocess.Popen(
            # the tests may run where these are ignored, and a shell cannot change that
            ["env", "--default-signal=INT,HUP,TERM", "bash", ".ci/run", *arguments],
            cwd=self.tree,
            env={**kept, "KVO_WORK": str(self.work), "KVO_PYTHON": str(self.python)},
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
@pytest.mark.parametrize("first", ["environment", "lane"])
def test_what_ends_it_ends_its_steps(runs: Runs, number: int, first: str) -> None:
    """In the step before the lanes, and in both lanes."""
    runs.add("environment", "sleep 1000" if first == "environment" else "")
    runs.add("lane", "sleep 1000", "job")
    runs.add("other", "sleep 1000", "job", "beside")
    names = [first] if first == "environment" else [first, "other"]
    with runs.start() as run:
        wait_until(lambda: runs.has_begun(*names))
        assert len(runs.running()) > len(names)
        run.send_signal(number)
        run.communicate(timeout=PATIENCE_S)
    assert run.returncode == -number
    wait_until(lambda: not runs.running())  # the kernel takes a moment to end what was killed


def test_sessions_run_in_lanes_get_interrupts_and_leave_nothing_behind(runs: Runs) -> None:
    runs.add("first", 'until [ -e "$KVO_WORK/began-other" ]; do sleep 0.02; done', "job")
    runs.add("fails", "exit 3", "job")
    runs.add("says", "echo result: 1; echo result: 2", "job")
    runs.add("other", "echo; kill -INT $$", "job", "beside")
    runs.add("long", "", "nightly")
    with runs.start() as run:
        out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "3 passed, 2 failed" in out
    assert re.search(r"^says +passed +\d+ s  1; 2$", out, re.MULTILINE)
    assert {line.split()[0] for line in out.splitlines() if " FAILED " in line} == {
        "fails",
        "other",
    }
    assert not runs.has_begun("long")
    wait_until(lambda: not runs.running())  # the kernel takes a moment to end what was killed


def test_each_run_of_a_nightly_session_has_a_seed_of_its_own(runs: Runs) -> None:
    for name, tag in (("each", "job"), ("long", "nightly"), ("longer", "nightly")):
        runs.add(name, 'echo "result: seed ${KVO_SEED:-none}"', tag)
    with runs.start("job", "nightly") as run:
        out, _ = run.communicate(timeout=PATIENCE_S)
    seeds = dict(re.findall(r"^(\w+) +passed +\d+ s  seed (\w+)$", out, re.MULTILINE))
    assert seeds["each"] == "none"
    assert len({int(seeds[name]) for name in ("long", "longer")}) == 2
