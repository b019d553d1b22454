"""``--dask``: a scheduler and two workers, one of which is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

import kvoffload as package
from kvoffload.cli import _machines
from kvoffload.replay.processes import code_here
from kvoffload.traces import Workload, write_trace
from tests.waiting import PATIENCE_S, wait_until

from .conftest import COMMAND

Client = pytest.importorskip("distributed", reason="it needs the dask extra").Client
pytestmark = pytest.mark.thorough
WORKLOAD = Workload(3000, seed=1)


class Cluster:
    """A scheduler, and workers that run a kvoffload of their own if they are told where it is."""

    def __init__(self, ending: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self._ending = ending
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", f"{port}", "--no-dashboard"
        )
        self.workers: list[subprocess.Popen[bytes]] = []

    def add(self, package: Path | None = None) -> None:
        options = ("--nthreads", "1", "--no-dashboard", "--no-nanny")
        self.workers.append(self._start("worker", self.address, *options, package=package))
        with self.client() as client:
            client.wait_for_workers(len(self.workers), timeout=PATIENCE_S)

    def client(self) -> Client:
        return Client(self.address, timeout=PATIENCE_S, set_as_default=False)

    def _start(self, *arguments: str, package: Path | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments],
            env=os.environ | ({} if package is None else {"PYTHONPATH": os.fspath(package)}),
            cwd=package,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._ending.callback(process.wait, PATIENCE_S)
        self._ending.callback(process.kill)
        return process


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def scheduler():
    """Provide a scheduler without workers."""
    with contextlib.ExitStack() as ending:
        yield Cluster(ending)


@pytest.fixture
def cluster(scheduler):
    """Provide the address of a scheduler, and its two workers."""
    scheduler.add()
    scheduler.add()
    return scheduler.address, scheduler.workers


def test_a_killed_worker_changes_nothing(kvoffload, trace, cluster) -> None:
    address, workers = cluster
    arguments = [
        *("sweep", trace, "--policy", "lru,arc,hit-density,belady", "--quiet", "--json"),
        *("--capacity", "1%,2%,3%,4%,5%,6%,8%,10%,15%,20%"),
    ]
    alone = kvoffload(*arguments, "--jobs", "1")
    process = started(*arguments, "--dask", address)
    with Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
        wait_until(lambda: all(client.processing().values()))  # both have some to do
    os.kill(workers[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads(alone.out)


def test_fleets_and_advice_are_those_of_this_machine(kvoffload, trace, cluster) -> None:
    address, _ = cluster
    advise = ("advise", trace, "--capacity", "auto", "--kv-bytes-per-token", "2048")
    for asked in (
        ("fleet", trace, "--engines", "1,3", "--capacity", "2%"),
        (*advise, "--policy", "lru,sieve"),
        (*advise, "--engines", "2", "--router", "session,events"),
    ):
        there = kvoffload(*asked, "--quiet", "--json", "--dask", address)
        assert there.code == 0, there.err
        assert there.out == kvoffload(*asked, "--quiet", "--json", "--jobs", "1").out


SWEEP = ("--policy", "lru", "--capacity", "2%,5%", "--quiet")


def changed(folder: Path) -> str:
    """Copy the package with one more comment; return its code."""
    copied = shutil.copytree(
        Path(package.__file__).parent,
        folder / "kvoffload",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (copied / "replay" / "simulate.py").open("a") as file:
        file.write("# another\n")
    return rf"{re.escape(package.__version__)}, code (?!{code_here()[1]})[0-9a-f]{{12}}"


def earlier(folder: Path) -> str:
    """Write a package with a version and nothing else; return that."""
    (folder / "kvoffload").mkdir()
    (folder / "kvoffload" / "__init__.py").write_text("__version__ = '0.4.0'")
    return r"0\.4\.0"


def broken(folder: Path) -> str:
    (folder / "kvoffload.py").write_text("raise ImportError('there is none')")
    return r"no kvoffload \(there is none\)"


@pytest.mark.parametrize("other", [changed, earlier, broken])
def test_a_worker_with_other_code_is_refused_by_name(kvoffload, trace, scheduler, tmp_path, other):
    """Whether it is there at the start or comes later, beside one with the same code."""
    found = other(tmp_path)
    scheduler.add()
    scheduler.add(tmp_path)
    with scheduler.client() as client:
        names = "|".join(map(re.escape, client.nthreads()))
    done = kvoffload("sweep", trace, *SWEEP, "--dask", scheduler.address)
    assert (done.code, done.out) == (2, "")
    version, code = code_here()
    assert re.fullmatch(
        f"--dask {scheduler.address}: worker ({names}) must have kvoffload {re.escape(version)}, "
        f"code {code}, got {found}; install the same on all machines and restart the worker",
        done.error,
    )


def test_jobs_refuse_a_worker_that_nobody_has_asked(
    kvoffload, trace, scheduler, tmp_path, monkeypatch
):
    changed(tmp_path)
    scheduler.add(tmp_path)
    monkeypatch.setattr(_machines._Workers, "watch", lambda *_: None)
    done = kvoffload("sweep", trace, *SWEEP, "--dask", scheduler.address)
    assert (done.code, done.out) == (2, "")
    assert re.search(r": worker tcp://127\.0\.0\.1:\d+ must have kvoffload .*, got ", done.error)


def test_another_trace_is_refused_by_name(kvoffload, trace, scheduler, tmp_path, monkeypatch):
    scheduler.add()
    monkeypatch.setattr(_machines.Path, "absolute", lambda _: tmp_path / "other.jsonl")
    write_trace(Workload(2000, seed=2), tmp_path / "other.jsonl")
    done = kvoffload("sweep", trace, *SWEEP, "--dask", scheduler.address)
    assert (done.code, done.out) == (2, "")
    assert "trace must be the same on all machines, got another one on tcp://" in done.error


def test_a_cluster_without_workers_is_noted_and_waited_for(kvoffload, trace, scheduler) -> None:
    asked = ("sweep", trace, *SWEEP[:-1], "--json")
    process = started(*asked, "--dask", scheduler.address)
    line = process.stderr.readline()
    assert re.fullmatch(
        f"note: --dask {scheduler.address}: no worker for \\d+ s, 2 jobs wait for one; "
        f"start: dask worker {scheduler.address}\n",
        line,
    )
    scheduler.add()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert out == kvoffload(*asked, "--jobs", "1").out


def test_the_end_of_a_scheduler_is_one_line(trace, scheduler) -> None:
    process = started("sweep", trace, *SWEEP[:-1], "--dask", scheduler.address)
    assert "no worker for" in process.stderr.readline()
    scheduler.scheduler.kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert err == f"kvoffload: --dask {scheduler.address}: the scheduler has ended\n"


def test_notes_of_a_cluster_without_workers_become_rare(monkeypatch, capsys) -> None:
    class Nobody:
        def nthreads(self) -> dict[str, int]:
            return {}

    now = [0.0]
    monkeypatch.setattr(_machines.time, "monotonic", lambda: now[0])
    workers = _machines._Workers(Nobody(), "a")
    with click.Context(click.Command("sweep")):
        for second in range(3600):
            now[0] = second
            workers.watch(7)
    noted = re.findall(r"no worker for (\d+) s, 7 jobs wait", capsys.readouterr().err)
    assert list(map(int, noted)) == [5, 10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440, 3040]


def test_what_cannot_be_asked_is_one_line(kvoffload, trace) -> None:
    arguments = ("--policy", "lru", "--capacity", "5%", "--quiet")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    message = kvoffload("sweep", trace, *arguments, "--dask", free).error
    assert message.startswith(f"--dask {free}: no scheduler answers: ")
    assert "standard input" in kvoffload("sweep", "-", *arguments, "--dask", free).error
