"""`info`, `generate`, `--version`, and exit statuses."""

import json
import os
import subprocess
import sys

import pytest

import kvoffload as library
from kvoffload.traces import Request, Trace, Workload, write_trace
from kvoffload.traces.writer import trace_line
from tests.isolated.scripts import run_python

from .conftest import COMMAND

pytest.importorskip("click", reason="the command needs the cli extra")
import click

from kvoffload.cli._app import root
from kvoffload.cli._fields import milliseconds
from kvoffload.cli._group import SUMMARIES

COMMANDS = {name: root.get_command(click.Context(root), name) for name in SUMMARIES}
GROUPS = [name for name, command in COMMANDS.items() if isinstance(command, click.Group)]


def test_version_names_the_implementation(kvoffload):
    done = kvoffload("--version")
    assert done.out == f"kvoffload {library.__version__} ({library.IMPLEMENTATION})\n"
    python = kvoffload("--version", KVOFFLOAD_PURE_PYTHON="1")
    assert python.out == f"kvoffload {library.__version__} (python)\n"


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in COMMANDS)],
    ids=" ".join,
)
def test_help(kvoffload, command):
    for flag in ("-h", "--help"):
        done = kvoffload(*command, flag)
        assert done.code == 0
        assert done.out.startswith(f"Usage: {' '.join(['kvoffload', *command])} ")
        assert max(map(len, done.out.splitlines())) <= 80
        assert ("Examples:" in done.out) == bool(command)


@pytest.mark.parametrize("group", [(), *((name,) for name in GROUPS)])
def test_a_group_without_a_subcommand_prints_its_help_as_an_error(kvoffload, group):
    done = kvoffload(*group)
    assert (done.code, done.out) == (2, "")
    assert done.err == kvoffload(*group, "--help").out


def test_the_list_of_commands_imports_none_of_them():
    code = (
        "import sys; from kvoffload.cli import main; main(['--help']); main(['--version']); "
        "print(sorted({'rich', 'msgspec', 'kvoffload.traces', 'kvoffload.replay', "
        "'kvoffload.advise', 'kvoffload.cli.sweep'} & set(sys.modules)), file=sys.stderr)"
    )
    done = run_python("-c", code)
    assert done.stderr == "[]\n"


def test_generate_writes_the_workload(kvoffload, tmp_path):
    done = kvoffload("generate", "--requests", 30, "--seed", 4, "--block-tokens", 64)
    workload = Workload(30, seed=4, block_tokens=64)
    assert done.out.encode() == b"".join(map(trace_line, workload))
    for name in ("t.jsonl", "t.jsonl.gz", "t.jsonl.zst"):
        quiet = kvoffload("generate", "--requests", 30, "--seed", 4, "-o", tmp_path / name)
        assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
        assert list(Trace(tmp_path / name)) == list(Workload(30, seed=4))


def test_info_draws_how_long_blocks_are_worth_keeping(kvoffload, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the plot extra")
    path, picture = tmp_path / "t.jsonl", tmp_path / "kept.svg"
    write_trace([Request(1000 * seconds, 0, 0, (1, seconds)) for seconds in (0, 90)], path)
    assert kvoffload("info", path, "--plot", picture).code == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (milliseconds(99_949e-9), "0.0999"),
        (milliseconds(9_876_543e-9), "9.88"),
        (milliseconds(98_765_432e-9), "98.8"),
        (milliseconds(1_234_567_890e-9), "1,235"),
    ],
)
def test_times_have_three_digits_that_count(shown, text):
    assert shown == text


@pytest.mark.parametrize("name", ["esc\x1b[31m\x9b31m\rline\n", "un\udcffdecodable"])
def test_a_name_cannot_move_the_cursor(kvoffload, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    path = folder / name
    kvoffload("generate", "--requests", 30, "-o", path)
    shown = [
        kvoffload("info", path).out,
        kvoffload("replay", path, "--policy", "lru", "--capacity", 9).out,
        kvoffload("sweep", path, "--policy", "lru", "--capacity", 9, "--jobs", 1).out,
        kvoffload("advise", path, "--capacity=1MB", "--kv-bytes-per-token=9", "--jobs=1").out,
        kvoffload("info", folder).err,
        kvoffload("info", path / "absent").err,
        kvoffload("generate", "-o", path / "absent").err,
        kvoffload("sweep", path, "--results", folder).err,
        kvoffload("info", path, name).err,
        kvoffload(name).err,
        kvoffload("info", path, f"--{name}").err,
        kvoffload("info", path, "--format", name).err,
    ]
    for text in shown:
        assert text.replace("\n", "").isprintable(), text
        assert "\\x1b[31m\\x9b31m" in text or "\\udcff" in text, text
    whole = kvoffload("info", path, "--json").out
    assert json.loads(whole)["trace"] == str(path)
    assert whole.isascii()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("quiet", "kind", "wanted"),
    [(False, "xterm", True), (True, "xterm", False), (False, "dumb", False)],
)
def test_a_terminal_gets_a_progress_bar_on_standard_error_unless_quiet_or_dumb(quiet, kind, wanted):
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "replay", "--limit", "3000", *["--quiet"] * quiet],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": kind, "COLUMNS": "80"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # how Linux says that the other side is closed
    out = process.stdout.read()
    process.stdout.close()
    assert process.wait(300) == 0
    os.close(ours)
    assert b"policy" in out
    assert (b"lru, " in shown and b"requests" in shown) is wanted
    assert wanted is (shown != b"")


def test_the_list_of_commands_has_the_first_lines_of_their_help():
    for name, command in COMMANDS.items():
        assert command.name == name
        assert SUMMARIES[name] == command.short_help == command.help.partition("\n")[0]
