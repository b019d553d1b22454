"""The end of the command where its output is full, closed, or a pipe without a reader.

One line of error, or none where it cannot be written; the files that it writes are complete.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from kvoffload.traces import Workload

from .conftest import BARE, HOSTILE, run_shell

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="runs a shell"),
]
WORKLOAD = Workload(30)

ENVIRONMENTS = {"bare": BARE, "hostile": HOSTILE}
COMMANDS = {
    "generate": "kvoffload generate --requests 20",
    "convert": 'kvoffload convert "$trace"',
    "info": 'kvoffload info "$trace"',
    "replay": 'kvoffload replay "$trace" --policy lru --capacity 9',
    "sweep": 'kvoffload sweep "$trace" --policy lru --capacity 9 --jobs 1',
    "advise": 'kvoffload advise "$trace" --capacity 1MiB --kv-bytes-per-token 100 --jobs 1',
    "help": "kvoffload --help",
    "version": "kvoffload --version",
}
CASES = [(command, BARE) for command in COMMANDS]
CASES += [(command, HOSTILE) for command in ("replay", "help")]
IDS = [f"{name}-{'bare' if environment is BARE else 'hostile'}" for name, environment in CASES]


@pytest.mark.parametrize(("command", "environment"), CASES, ids=IDS)
def test_standard_output_that_cannot_be_written_is_one_line_and_status_1(
    command, environment, trace, tmp_path
):
    ends = {"closed": (">&-", "<stdout>: Bad file descriptor")}
    if Path("/dev/full").exists():
        ends["full"] = (">/dev/full", "<stdout>: No space left on device")
    for how, (redirection, message) in ends.items():
        script = f"{COMMANDS[command]} {redirection}; echo $? >&2"
        done = run_shell(script, environment, trace=trace)
        assert done.err == f"kvoffload: {message}\n1\n", how


@pytest.mark.parametrize(("command", "environment"), CASES, ids=IDS)
def test_a_pipe_that_nobody_reads_ends_it_without_a_word_and_with_status_141(
    command, environment, trace, tmp_path
):
    """As SIGPIPE ends other commands. The reader is gone before the command begins."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f'exec 3<>"$pipe" 4>"$pipe" 3>&-; {COMMANDS[command]} >&4; echo $? >&2'
    done = run_shell(script, environment, trace=trace, pipe=pipe)
    assert done.err == "141\n"


@pytest.mark.parametrize(
    ("redirection", "environment"),
    [("2>&-", "bare"), ("2>/dev/full", "bare"), ("2>/dev/full", "hostile"), ("2>&4", "bare")],
)
def test_standard_error_that_cannot_be_written_changes_nothing(
    environment, redirection, trace, tmp_path
):
    if redirection == "2>/dev/full" and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    pipe, bad = tmp_path / "pipe", tmp_path / "bad"
    os.mkfifo(pipe)
    bad.write_bytes(b"bad\n" + trace.read_bytes())
    start = 'exec 3<>"$pipe" 4>"$pipe" 3>&-;'
    for command, status in (
        ('kvoffload info "$bad" --skip-bad --json', 0),  # with a note
        ('kvoffload info "$bad" --json', 1),
        ("kvoffload info", 2),
        ("kvoffload", 2),
    ):
        script = f"{start} {command} {redirection}"
        done = run_shell(script, ENVIRONMENTS[environment], pipe=pipe, bad=bad)
        assert done.code == status, command
        if status == 0:
            assert done.value["bad_lines"] == 1


def test_where_all_streams_are_closed_no_file_is_taken_for_one(trace, tmp_path):
    """The next file that is opened has the number of what is closed."""
    close, out = "<&- >&- 2>&-", tmp_path / "out"
    done = run_shell(f'kvoffload convert "$trace" -o "$out" {close}', trace=trace, out=out)
    assert done.code == 0
    assert out.read_bytes() == trace.read_bytes()
    done = run_shell(f'kvoffload convert - -o "$out" {close}', out=out)
    assert done.code == 1
    assert out.read_bytes() == trace.read_bytes()
    done = run_shell(f'kvoffload info "$trace" {close}', trace=trace)
    assert (done.code, done.out, done.err) == (1, "", "")
    done = run_shell("kvoffload info - <&-")
    assert done.error == "<stdin>: must be a readable file: Bad file descriptor"


def test_a_file_that_a_library_opened_in_place_of_a_stream_is_not_taken_for_it(trace, tmp_path):
    """libffi keeps a file open, from before the command begins."""
    library = (
        "import os, sys; assert os.open(os.environ['kept'], os.O_RDWR) in (0, 1);"
        "from kvoffload.__main__ import main; sys.exit(main())"
    )
    command = f'{shlex.quote(sys.executable)} -c "$library" info'
    done = run_shell(f"{command} - <&-", library=library, kept=trace)
    assert (done.code, done.error) == (1, "<stdin>: must be a readable file: Bad file descriptor")
    kept = tmp_path / "kept"
    kept.write_bytes(b"")
    done = run_shell(f'{command} "$trace" >&-', library=library, kept=kept, trace=trace)
    assert (done.code, kept.read_bytes()) == (1, b"")
    assert done.error == "<stdout>: Bad file descriptor"


@pytest.mark.parametrize(
    ("module", "command", "option", "end"),
    [("matplotlib", "sweep", "--plot", b"</svg>"), ("jinja2", "advise", "--report", b"</html>")],
    ids=["picture", "report"],
)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_page_is_written_before_anything_is_printed(
    environment, module, command, option, end, trace, tmp_path
):
    pytest.importorskip(module, reason="it needs an extra")
    pipe, page = tmp_path / "pipe", tmp_path / ("page.svg" if command == "sweep" else "page.html")
    os.mkfifo(pipe)
    script = f'exec 3<>"$pipe" 4>"$pipe" 3>&-; {COMMANDS[command]} {option} "$page" >&4'
    done = run_shell(script, ENVIRONMENTS[environment], trace=trace, pipe=pipe, page=page)
    assert done.code == 141
    assert end in page.read_bytes()


@pytest.mark.parametrize(
    ("command", "option", "module"),
    [
        ("sweep", "--plot", "matplotlib"),
        ("sweep", "--results", "click"),
        ("advise", "--report", "jinja2"),
    ],
)
def test_a_file_that_turns_out_full_does_not_keep_the_result_from_the_user(
    command, option, module, trace, tmp_path
):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    pytest.importorskip(module, reason="needs the plot and the report extra")
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    done = run_shell(f'{COMMANDS[command]} {option} "$full"', trace=trace, full=full)
    assert done.code == 1
    assert done.err == f"kvoffload: {full}: No space left on device\n"
    assert "lru" in done.out


@pytest.mark.parametrize(("command", "environment"), CASES, ids=IDS)
def test_it_works_in_any_environment(command, environment, trace):
    done = run_shell(COMMANDS[command], environment, trace=trace)
    assert (done.code, done.err) == (0, "")
    assert done.out
    assert "\x1b" not in done.out
