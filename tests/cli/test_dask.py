"""``--dask``: a scheduler and two workers, one of which is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvoffload.traces import Workload, write_trace

from .conftest import COMMAND

Client = pytest.importorskip("distributed", reason="it needs the dask extra").Client
pytestmark = pytest.mark.thorough

PATIENCE_S = 300


@pytest.fixture
def cluster():
    """Provide the address of a scheduler, and its two workers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    started = [
        [*("scheduler", "--host", "127.0.0.1", "--port", f"{port}", "--no-dashboard")],
        *[["worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny"]] * 2,
    ]
    with contextlib.ExitStack() as ending:
        processes = []
        for arguments in started:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ending.callback(process.wait, PATIENCE_S)
            ending.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + PATIENCE_S
        with Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=deadline - time.monotonic())
        yield address, processes[1:]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("dask") / "trace.jsonl"
    write_trace(Workload(3000, seed=1), path)
    return path


def test_a_killed_worker_changes_nothing(kvoffload, trace, cluster) -> None:
    address, workers = cluster
    arguments = [
        *("sweep", trace, "--policy", "lru,arc,hit-density,belady", "--quiet", "--json"),
        *("--capacity", "1%,2%,3%,4%,5%,6%,8%,10%,15%,20%"),
    ]
    alone = kvoffload(*arguments, "--jobs", "1")
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--dask", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
        deadline = time.monotonic() + PATIENCE_S
        while not all(client.processing().values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(client.processing().values())  # both have some to do
    os.kill(workers[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads(alone.out)


def test_fleets_are_those_of_this_machine(kvoffload, trace, cluster) -> None:
    address, _ = cluster
    arguments = ("fleet", trace, "--engines", "1,3", "--capacity", "2%", "--quiet", "--json")
    assert kvoffload(*arguments, "--dask", address).out == kvoffload(*arguments, "--jobs", "1").out


def test_advice_is_that_of_this_machine(kvoffload, trace, cluster) -> None:
    address, _ = cluster
    asked = ("advise", trace, "--capacity", "auto", "--kv-bytes-per-token", "2048", "--quiet")
    for more in (("--policy", "lru,sieve"), ("--engines", "2", "--router", "session,events")):
        there = kvoffload(*asked, *more, "--json", "--dask", address)
        assert there.code == 0, there.err
        assert there.out == kvoffload(*asked, *more, "--json", "--jobs", "1").out


def test_what_cannot_be_asked_is_one_line(kvoffload, trace) -> None:
    arguments = ("--policy", "lru", "--capacity", "5%", "--quiet")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    message = kvoffload("sweep", trace, *arguments, "--dask", free).error
    assert message.startswith(f"--dask {free}: no scheduler answers: ")
    assert "standard input" in kvoffload("sweep", "-", *arguments, "--dask", free).error
