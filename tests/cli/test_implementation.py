"""The command's line on the implementation that drives the managers, where none was chosen."""

import contextlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload import __main__ as entry
from tests.conftest import AVAILABLE
from tests.isolated.scripts import ROOT, run_python

VARIABLE = "KVOFFLOAD_PURE_PYTHON"
RUN = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name == "kvoffload.managers._manager_c":
            raise {error}

if {hidden}:
    sys.meta_path.insert(0, Hider())
from kvoffload.__main__ import main
sys.exit(main())
"""


def run(
    *arguments: object,
    choice: str | None = None,
    hidden: bool = True,
    error: str = "ModuleNotFoundError(name)",
) -> "subprocess.CompletedProcess[str]":
    """Run the command where the compiled modules are hidden."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(VARIABLE, None)
    if choice is not None:
        environment[VARIABLE] = choice
    code = RUN.format(error=error, hidden=hidden)
    return run_python("-W", "error", "-c", code, *arguments, env=environment)


def test_python_that_nobody_asked_for_is_said_once_on_standard_error() -> None:
    done = run("replay", "--limit", 50, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["implementation"] == "python"
    line, end = done.stderr.split("\n")
    assert end == ""
    assert line.startswith("kvoffload: running in Python, tens of times slower: ")
    assert "the compiled implementation is not installed" in line
    assert f"{VARIABLE}=1 silences this line" in line
    if sys.platform != "win32":
        assert f"{VARIABLE}=0 {sys.executable} -m pip install " in line


@pytest.mark.skipif("compiled" not in AVAILABLE, reason="the extensions are not built")
def test_compiled_modules_that_cannot_be_imported_are_named() -> None:
    done = run("replay", "--limit", 50, error="ImportError('undefined symbol: kvo_map')")
    assert done.returncode == 0
    assert "the compiled implementation cannot be imported: undefined symbol: kvo_map" in (
        done.stderr
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        (["replay", "--limit", 50], "1"),
        (["replay", "--limit", 50, "--quiet"], None),
        (["generate", "--requests", 5], None),
    ],
)
def test_python_that_was_asked_for_or_drives_no_manager_is_not_mentioned(arguments, choice) -> None:
    done = run(*arguments, choice=choice)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_compiled_implementation_is_not_mentioned(twins: object) -> None:
    done = run("replay", "--limit", 50, "--json", hidden=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["implementation"] == "compiled"


def test_without_the_global_lock_compiled_twins_are_refused(twins: object) -> None:
    """As a free-threaded interpreter that was told to keep it off: PYTHON_GIL=0."""
    unlocked = "import sys; sys._is_gil_enabled = lambda: False; import kvoffload"
    for choice in ("", "0", "1"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: choice}
        done = run_python("-c", unlocked, env=env)
        if choice == "1":
            assert (done.returncode, done.stderr) == (0, "")
        else:
            *_, line = done.stderr.splitlines()
            assert done.returncode == 1
            assert line.startswith("ImportError: the compiled implementation needs the global")
            assert f"{VARIABLE}=1" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_line_that_cannot_be_written_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "IMPLEMENTATION", "python")
    monkeypatch.delenv(VARIABLE, raising=False)
    with open("/dev/full", "w") as full:  # noqa: PTH123
        for stream in (full, None):  # None where the caller closed it
            monkeypatch.setattr(sys, "stderr", stream)
            entry._warn_of_python()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (None, ["--no-binary", "kvoffload", "kvoffload"]),
        ({"url": "file:///kv-py3-none-any.whl"}, ["--no-binary", "kvoffload", "kvoffload"]),
        ({"url": "file:///a%20b/kv", "dir_info": {"editable": True}}, ["-e", "/a b/kv"]),
        ({"url": "file:///kv", "dir_info": {}}, ["/kv"]),
        ({"url": "file:///kv.tar.gz", "archive_info": {"hash": "x"}}, ["/kv.tar.gz"]),
        ({"url": "https://h/kv.tar.gz", "archive_info": {}}, ["https://h/kv.tar.gz"]),
        ({"url": "https://h/kv", "vcs_info": {"vcs": "git"}}, ["git+https://h/kv"]),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="paths of POSIX")
def test_what_builds_it_is_installed_from_where_the_package_came_from(
    record: dict[str, object] | None, requirement: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if record is None else json.dumps(record)
    # a source tree stands before the package
    found = [SimpleNamespace(read_text={"direct_url.json": one}.get) for one in (None, text)]
    monkeypatch.setattr(metadata, "distributions", lambda name: found)
    assert entry._requirement() == requirement
