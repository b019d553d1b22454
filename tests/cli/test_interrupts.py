"""Signals while processes share the work: no output, process or file is left, at any time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kvoffload.policies import registry
from kvoffload.replay import Configuration, DecodedTrace, processes, replay_all
from kvoffload.traces import Workload
from kvoffload.traces.writer import trace_line
from tests.isolated.scripts import run_python
from tests.waiting import PATIENCE_S, wait_until

from .conftest import COMMAND, heed_signals, open_for

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        sys.platform != "linux", reason="looks for the processes of a process in /proc"
    ),
]
WORKLOAD = Workload(20_000, seed=1)

COMMANDS = {
    "advise": ["advise", "--kv-bytes-per-token", "2048", "--capacity", "1GiB", "--jobs", "2"],
    "sweep": ["sweep", "--jobs", "2"],
}


def running(pid):
    """Return whether a process runs; one that has ended may still wait for its parent."""
    try:
        return state(pid)[0] != "Z"
    except OSError:
        return False


def state(pid):
    """Return the state of a process, the number of its parent, and more."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()


def children(parent):
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(state(entry.name)[1]) == parent:
                found.append(int(entry.name))
    return found


def workers_of(process):
    """Return the processes that share the work, without the resource tracker."""
    found = []
    for child in children(process.pid):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path("/proc", str(child), "cmdline").read_bytes():
                found.append(child)
    return found


@contextlib.contextmanager
def working(command, trace, tmp_path, *options):
    """Run a command in a process group of its own, until its processes have been started."""
    with subprocess.Popen(
        [*COMMAND, *COMMANDS[command], *options, trace],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": os.fspath(tmp_path)},
        start_new_session=True,
        preexec_fn=heed_signals,  # noqa: PLW1509 (no thread yet)
    ) as process:
        try:
            wait_until(lambda: len(workers_of(process)) == 2 or process.poll() is not None)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "name", "whole_group", "delay"),
    [
        ("advise", "SIGINT", True, 0.0),
        ("advise", "SIGINT", False, 0.5),
        ("sweep", "SIGINT", True, 0.5),
        ("sweep", "SIGINT", False, 0.0),
        ("advise", "SIGTERM", True, 0.0),
        ("advise", "SIGHUP", False, 0.0),
        ("sweep", "SIGTERM", False, 0.0),
        ("sweep", "SIGHUP", True, 0.0),
    ],
)
def test_a_signal_ends_all_processes_quietly_and_leaves_nothing_behind(
    command, name, whole_group, delay, trace, tmp_path
):
    with working(command, trace, tmp_path) as process:
        time.sleep(delay)
        workers, signum = children(process.pid), getattr(signal, name)
        os.killpg(process.pid, signum) if whole_group else process.send_signal(signum)
        out, error = process.communicate(timeout=300)
        assert process.returncode == 128 + signum
        assert (out, error) == (b"", b"")
        wait_until(lambda: not any(map(running, workers)))
    assert list(tmp_path.iterdir()) == []


def test_a_pool_whose_processes_end_before_it_is_shut_down_says_nothing(monkeypatch):
    """Its thread gives their error to each job, which it could not if that had been cancelled."""

    class Late(ProcessPoolExecutor):
        def shutdown(self, *arguments, **options):
            self._executor_manager_thread.join(PATIENCE_S)
            super().shutdown(*arguments, **options)

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Late)
    cells = [Configuration(host=slots) for slots in range(10, 60)]
    results = replay_all(DecodedTrace.of(Workload(200, seed=1)), cells, jobs=2)
    next(results)
    results.close()


def test_a_sweep_that_is_interrupted_says_what_is_kept(trace, tmp_path):
    """All of it but what was still being computed."""
    results = tmp_path / "results.jsonl"
    with working("sweep", trace, tmp_path, "--results", results) as process:
        wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") >= 3)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, b"")
    kept = results.read_bytes().count(b"\n")
    cells = 7 * (len(registry.names()) + 2)
    assert error.decode() == (
        f"note: --results has {kept} of {cells} results; the same command continues there\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_end_when_the_one_that_started_them_is_killed(command, trace, tmp_path):
    with working(command, trace, tmp_path) as process:
        time.sleep(0.5)
        workers = children(process.pid)
        assert workers
        process.kill()
        process.wait(300)
        wait_until(lambda: not any(map(running, workers)))
    assert list(tmp_path.iterdir()) == [], "nor is a temporary file left"


def test_standard_input_that_is_kept_is_gone_with_a_process_that_is_killed(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "info", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": os.fspath(tmp_path)},
    ) as process:
        for line in map(trace_line, Workload(3_000)):
            process.stdin.write(line)
        process.stdin.flush()
        process.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_asks_to_end_keeps_the_file_that_would_have_been_replaced(tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"old")
    with subprocess.Popen([*COMMAND, "generate", "--requests", str(10**9), "-o", out]) as process:
        try:
            wait_until(lambda: len(list(tmp_path.iterdir())) > 1 or process.poll() is not None)
            process.terminate()
            assert process.wait(300) == 143
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"old"


def test_a_signal_that_someone_ignores_stays_ignored(tmp_path):
    """As nohup does with SIGHUP."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [*COMMAND, "info", pipe],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # noqa: PLW1509 (no thread yet)
    ) as process:
        with open_for(process, pipe) as trace:
            process.send_signal(signal.SIGHUP)
            trace.write(b"".join(map(trace_line, Workload(3))))
        assert b"requests" in process.stdout.read()
        assert process.wait(300) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_process_that_is_killed_is_an_error_of_one_line(command, trace, tmp_path):
    with working(command, trace, tmp_path) as process:
        time.sleep(0.5)
        # While it stands still it does not see one of them die and end the other one.
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.pid)[0] == "T")
        workers = workers_of(process)
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        out, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert out == b""
    assert error == (
        b"kvoffload: a process was killed, perhaps for want of memory; fewer of them need less\n"
    )


CONSOLE_SCRIPT = "import sys; from kvoffload.__main__ import main; sys.exit(main())"
IMPORTED = re.compile(rb"import time: .*\n|imp[^\n]*\Z")  # the last line may be cut


@pytest.mark.parametrize("called", ["module", "script"])
def test_control_c_while_modules_are_imported_prints_nothing(called, tmp_path):
    """At any moment from the package's first module on; before, Python itself is starting."""
    script = tmp_path / "kvoffload"
    script.write_text(CONSOLE_SCRIPT)
    command = ["-m", "kvoffload"] if called == "module" else [script]
    environment = os.environ | {"PYTHONPATH": os.fspath(Path(__file__).parents[2])}
    for attempt in range(40):
        with subprocess.Popen(
            [sys.executable, "-X", "importtime", *command, "replay"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # what is read ahead would be missing in what `communicate` returns
            env=environment,
            preexec_fn=heed_signals,  # noqa: PLW1509 (no thread yet)
        ) as process:
            while not process.stderr.readline().rstrip().endswith(b" kvoffload._interrupts"):
                assert process.poll() is None
            time.sleep(0.3 * attempt / 40)
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=300)
        assert process.returncode == 130, attempt
        assert (out, IMPORTED.sub(b"", error)) == (b"", b""), attempt


def test_a_program_that_imports_the_package_keeps_its_handling_of_control_c():
    code = (
        "import signal, kvoffload; from kvoffload.cli import main; main(['policies']); "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    for arguments in ([], ["kvoffload"]):
        done = run_python("-c", code, *arguments, preexec_fn=heed_signals)
        assert done.stdout.endswith("True\n")
