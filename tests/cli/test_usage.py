"""Wrong usage and bad data: one line, the right exit code, no traceback."""

import gzip

import pytest

from kvoffload.traces import Workload

from .conftest import run_process, run_shell

pytest.importorskip("click", reason="the command needs the cli extra")
from kvoffload.cli._options import read_capacity, values_of

GOOD = b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "value for '--capacity': must be 1 ... 2147483647 blocks, got 0"),
        (["--capacity", "-1"], "value for '--capacity': must be 1 ... 2147483647 blocks, got -1"),
        (["--capacity", "99999999999"], "blocks, got 99999999999, which is too large"),
        (["--capacity", "9" * 19], "at most 18 digits, got '9999999999999999999', which is too la"),
        (["--capacity", "9" * 5000], "Invalid value for '--capacity': must have at most 18 digits"),
        (["--capacity", "9" * 19 + "GiB"], "GiB', which is too large"),
        (["--capacity", "9TiB", "--block-bytes", "1"], "bytes per block), which is too large"),
        (["--capacity", "1,418"], "got '1,418': write 1418 for a number, '1, 418' for a list"),
        (["--capacity", "5%,12,345,678"], "write 12345678 for a number, '12, 345, 678' for a list"),
        (["--capacity", "1,024MiB"], "got '1,024': write 1024 for a number"),
        (["--capacity", "64G"], "must be 64GB or 64GiB, got '64G': which?"),
        (["--capacity", "0.5gi"], "must be 0.5GB or 0.5GiB, got '0.5gi': which?"),
        (["--block-bytes", "2M"], "must be 2MB or 2MiB, got '2M': which?"),
        (["--block-bytes", "9" * 19], "which is too large"),
        (["--capacity", "many"], "unique blocks (5%) or a size (64GiB), got 'many'"),
        (["--capacity", "-5%"], "got '-5%'"),
        (["--capacity", "5,"], "got ''"),
        (
            ["--capacity", "5 GB"],
            "--capacity in bytes needs --model or --block-bytes, got '5 GB' without",
        ),
        (["--capacity", "5XB", "--block-bytes", "1"], "got '5XB'"),
        (["--capacity", "5B", "--block-bytes", "6"], "blocks, got 0 (5 bytes / 6 bytes per block)"),
        (["--capacity", "9TB", "--block-bytes", "1"], "got 9000000000000 (9,000,"),
        (["--capacity", "0.0001%"], "got 0 (0.0001% of "),
        (["--block-bytes", "0"], "must be bytes >= 1, as 2097152 or 2MiB, got '0'"),
        (["--block-bytes", "x"], "must be bytes >= 1"),
        (["--block-tokens", "0"], "'--block-tokens': 0 is not in the range 1<=x<=16777216."),
        (["--limit", "0"], "'--limit': 0 is not in the range x>=1."),
        (["--seed", "-1"], "'--seed': -1 is not in the range x>=0."),
        (["--policy", "Belady"], "infinite, or MODULE:CLASS, got 'Belady'; did you mean 'belady'?"),
        (["--policy", "mine"], "infinite, or MODULE:CLASS, got 'mine'"),
        (["--policy", "belady?x=1"], "policy belady has no options, got 'belady?x=1'"),
        (["--csv"], "No such option '--csv': it is an option of sweep, fleet."),
        (["--policy", "lur"], "got 'lur'; did you mean 'lru'?"),
        (["--policy", "LRU"], "got 'LRU'; did you mean 'lru'?"),
        (["absent", "--seed", "3"], "--seed must go without TRACE, got 3 with 'absent'"),
        (["absent", "--seed", "0"], "--seed must go without TRACE, got 0 with 'absent'"),
        (["--format", "hex"], "--format must go with TRACE, got it without"),
        (["--skip-bad"], "--skip-bad must go with TRACE, got it without"),
        (["--a\x1b[31m"], "No such option '--a\\x1b[31m'."),
        (["--policy", "lru?x=1"], "policy: lru has no option 'x'"),
        (["--policy", ""], "got ''"),
        (["--nothing"], "No such option '--nothing'."),
        (["-", "b"], "TRACE must be only - for standard input, got 2 names"),
        (["--model-name", "m"], "--model-name must go with TRACE, got it without"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_usage_of_replay(kvoffload, arguments, message):
    done = kvoffload("replay", *arguments)
    assert done.code == 2
    assert message in done.error


@pytest.mark.parametrize("text", ["9,10", "10, 200", "1000,200", "0.5%,10%", "5%,100", "20,1000"])
def test_lists_of_capacities_are_no_numbers_in_groups(text):
    found = values_of(read_capacity)(None, None, (text,))
    assert [capacity.text for capacity in found] == [part.strip() for part in text.split(",")]


@pytest.mark.thorough
def test_standard_input_that_is_not_read_is_named(tmp_path):
    (tmp_path / "trace").write_bytes(GOOD)
    replay = "kvoffload replay --limit 20 --policy lru --capacity 5"
    said = "note: a generated workload was replayed; standard input was not read: TRACE - reads it"
    for script in (f'{replay} < "$folder/trace"', f'cat "$folder/trace" | {replay}'):
        done = run_shell(script, folder=tmp_path)
        assert (done.code, done.err) == (0, f"{said}\n"), script
        assert run_shell(script.replace("replay", "replay --quiet"), folder=tmp_path).err == ""
    for script in (f"{replay} < /dev/null", f"{replay} <&-", f": | {replay}"):
        assert run_shell(script, folder=tmp_path).err == "", script
    assert "note" not in run_shell(f'{replay} - < "$folder/trace"', folder=tmp_path).err


def test_a_limit_that_no_trace_reaches_is_none(kvoffload, tmp_path):
    (tmp_path / "trace").write_bytes(GOOD)
    done = kvoffload("info", tmp_path / "trace", "--limit", 10**30)
    assert (done.code, done.err) == (0, "")
    assert next(iter(Workload(10**30))) == next(iter(Workload(1)))


def test_unknown_command(kvoffload):
    done = kvoffload("repaly")
    assert done.code == 2
    assert done.error == "No such command 'repaly'. Did you mean 'replay'?"


@pytest.mark.parametrize("command", [["replay", "--capacity=5"], ["info"]], ids=["replay", "info"])
@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (GOOD + b'{"timestamp":0}\n', "2: must have the field input_length"),
        (b"", "1: a trace must hold at least one request, got an empty file"),
        (
            gzip.compress(GOOD)[:-4],
            "2: must be readable to its end: the compressed data is",
        ),
    ],
    ids=["missing", "empty", "cut"],
)
def test_bad_data(kvoffload, tmp_path, command, data, rule):
    path = tmp_path / "t"
    path.write_bytes(data)
    done = kvoffload(*command, path)
    assert done.code == 1
    assert done.error.startswith(f"{path}:{rule}")
    piped = kvoffload(*command, "-", stdin=data)
    assert piped.code == 1
    assert piped.error.startswith(f"<stdin>:{rule}")


@pytest.mark.parametrize("command", [["replay", "--capacity=5"], ["info"]], ids=["replay", "info"])
def test_what_cannot_be_opened(kvoffload, tmp_path, command):
    done = kvoffload(*command, tmp_path)
    assert done.code == 1
    assert done.error.startswith(f"{tmp_path}: a folder must hold a file that ends in .jsonl, ")
    done = kvoffload(*command, tmp_path / "no\nne")
    assert done.code == 1
    assert done.error.endswith("no\\nne: must be a readable file: No such file or directory")


def test_an_error_is_reported_without_a_traceback_by_the_process(tmp_path):
    done = run_process("info", tmp_path / "absent")
    absent = f"{tmp_path / 'absent'}: must be a readable file: No such file or directory"
    assert (done.code, done.error) == (1, absent)
    done = run_process("replay", "--capacity", "0")
    assert done.code == 2
    assert done.error.startswith("Invalid value for '--capacity'")
