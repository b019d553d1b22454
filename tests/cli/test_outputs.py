"""Outputs are checked before the work: writable, and each a file of its own."""

import shlex
import sys
from pathlib import Path

import pytest

from kvoffload.traces import Workload, write_trace

from .conftest import run_shell

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="runs a shell"),
]


@pytest.fixture
def folder(tmp_path):
    write_trace(Workload(30), tmp_path / "trace")
    (tmp_path / "link.svg").symlink_to("trace")
    (tmp_path / "hard").hardlink_to(tmp_path / "trace")
    return tmp_path


@pytest.fixture
def run(kvoffload, folder, monkeypatch):
    """Run a line in the folder; in a shell, and a process of its own, if it redirects."""

    def run_line(line):
        if "<" in line or ">" in line:
            return run_shell(f'cd "$folder"; {line}', folder=folder)
        monkeypatch.chdir(folder)
        return kvoffload(*shlex.split(line)[1:])

    return run_line


ADVISE = "kvoffload advise trace --capacity 1MiB --kv-bytes-per-token 100"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kvoffload convert - -o trace < trace", "--output must be another file than TRACE"),
        ("kvoffload convert - -o link.svg < hard", "--output must be another file than TRACE"),
        ("kvoffload convert /dev/stdin -o trace < trace", "--output must be another file than"),
        ("kvoffload convert trace >> trace", "standard output must be another file than TRACE"),
        ("kvoffload convert - < trace >> trace", "standard output must be another file than TRACE"),
        ("kvoffload convert trace -o /dev/stdout >> trace", "--output must be another file than"),
        ("kvoffload info trace >> hard", "standard output must be another file than TRACE"),
        ("kvoffload replay trace --json >> trace", "standard output must be another file than"),
        ("kvoffload sweep - --results trace < trace", "--results must be another file than TRACE"),
        ("kvoffload sweep trace --plot a.svg > a.svg", "--plot must be another file than standard"),
        (f"{ADVISE} --report a >> a", "--report must be another file than standard output"),
    ],
)  # fmt: skip
def test_one_file_in_two_places_is_an_error_that_changes_nothing(folder, run, command, message):
    """Those that need no shell are in ``golden.txt``."""
    before = (folder / "trace").read_bytes()
    done = run(command)
    assert done.code == 2
    assert done.error.startswith(message)
    assert (folder / "trace").read_bytes() == before
    assert (folder / "link.svg").readlink() == Path("trace")
    left = {path.name for path in folder.iterdir()}
    assert left - {"a", "a.svg"} == {"trace", "link.svg", "hard"}


def test_standard_streams_that_are_one_socket_or_terminal_are_no_error(folder):
    done = run_shell('cd "$folder"; kvoffload convert - < /dev/null > /dev/null', folder=folder)
    assert done.error == "<stdin>:1: a trace must hold at least one request, got an empty file"


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_the_report_may_go_where_the_advice_is_printed(folder):
    pytest.importorskip("jinja2", reason="the report needs the report extra")
    script = f'cd "$folder"; echo before > out; {ADVISE} --report /dev/stdout >> out; cat out'
    done = run_shell(script, folder=folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("before\n<!DOCTYPE html>\n")
    assert "\n</html>" in done.out
    assert "\npolicy" in done.out
