"""Wrong usage and bad data: one line, the right exit code, no traceback."""

import gzip

import pytest

from kvoffload.traces import Workload, write_trace
from tests.advise.model_configs import FAMILIES

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
        (["--capacity", "30,60,120,342MiB"], "got '60,120,342': write 60120342 for a number"),
        (["--capacity", "60,120,342"], "got '60,120,342': write 60120342 for a number"),
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


WITH_A_TRACE = [
    # sizes and models
    ("advise --capacity many", "'--capacity': must be blocks (4096), a share of"),
    ("advise --capacity 1GiB", "one of --model and --kv-bytes-per-token must be given: the"),
    ("advise --model qwen3-8b --kv-bytes-per-token 5", "at most one of --model and --kv-bytes-per"),
    ("replay --model qwen3-8b --block-bytes 5", "at most one of --model and --block-bytes must be"),
    ("advise --model qwen", "value for '--model': model must be"),
    ("advise --model absent/config.json", "absent/config.json: No such file or directory"),
    ("advise --model .", ": config.json: No such file or directory"),
    ("advise --kv-bytes-per-token 5 --tensor-parallel 2", "must go with --model, got 2 without it"),
    ("advise --model qwen3-8b --tensor-parallel 3", "--tensor-parallel: tensor_parallel must"),
    ("sweep --model gpt-oss-20b --tensor-parallel 3", "tensor_parallel must divide the 8 "),
    ("advise --capacity 1KiB --kv-bytes-per-token 2", "must be 2 ... 536870911 blocks of 1"),
    ("advise --capacity 9TiB --kv-bytes-per-token 1", "bytes / 512 bytes per block)"),
    ("sweep --capacity 1GB", "--capacity in bytes needs --model or --block-bytes"),
    ("replay --model gpt-oss-20b --capacity 1KiB", "slots, got 0 (1,024 bytes / "),
    (f"sweep --model gpt-oss-20b --block-tokens {20 * '9'}", "9 is not in the range 1<=x<="),
    ("replay --retention 512", "--retention must go with --model, got 512 without it"),
    ("sweep --model llama-3.1-8b --retention none", "states, got none with llama-3.1-8b, "),
    (f"advise --model {FAMILIES}/llama4.json --retention none", "has windows or states, got none"),
    ("replay --model gpt-oss-20b --retention 100", "must be 0, none or a multiple of"),
    ("sweep --model gpt-oss-20b --retention many", "a number of tokens or none, got 'many'"),
    (f"sweep --model gpt-oss-20b --retention 1{18 * '0'}", "must have at most 18 digits, got "),
    # policies and engines
    ("sweep --policy best", "policy must be one of "),
    ("sweep --plot picture.txt", "must end in .png, .svg, .pdf, got 'picture.txt'"),
    ("sweep --csv - --json", "--csv and --json exclude each other"),
    ("sweep --pending -1", "-1 is not in the range x>=0"),
    ("advise --jobs 0", "'--jobs': 0 is not in the range x>=1."),
    ("advise --accelerator h10", "accelerator must be one of l4, "),
    ("advise --prefill-tokens-per-second 0", "must be a number > 0, got '0'"),
    ("advise --prefill-tokens-per-second inf", "must be a number > 0, got 'inf'"),
    ("advise --disk-policy lru", "--disk-policy must go with --disk, got lru without"),
    ("advise --disk 1TB --disk-policy belady", "'--disk-policy': policy must be one of lru, "),
    ("advise --policy belady --kv-bytes-per-token 5", "must name a policy, got ceilings only"),
    # loops and hints
    ("replay --closed-loop 0", "--closed-loop must be recorded or an integer 1 ... 1000000000000"),
    ("sweep --closed-loop fast", "integer 1 ... 1000000000000, got 'fast'"),
    ("replay --closed-loop 1e4", "integer 1 ... 1000000000000, got '1e4'"),
    ("sweep --closed-loop 99999999999999999999", "got '99999999999999999999'"),
    ("replay --decode-ms 5", "--decode-ms must go with --closed-loop, got 5 without"),
    ("sweep --closed-loop recorded --decode-ms 5", "--decode-ms must go with a rate, got 5 with"),
    ("replay --closed-loop 9 --decode-ms -1", "Invalid value for '--decode-ms'"),
    ("sweep --closed-loop 9 --step-tokens 512", "--closed-loop and --step-tokens exclude each"),
    ("sweep --closed-loop 9 --pending 3", "--closed-loop and --pending exclude each"),
    ("sweep --closed-loop 9 --results absent", "--closed-loop and --results exclude each other"),
    ("replay --closed-loop 9 --policy belady", "--policy must name another policy: belady needs"),
    ("sweep --closed-loop 9 --model gpt-oss-20b", "--closed-loop needs a model with one group"),
    ("replay --hints-noise 2", "--hints-noise must go with --hints, got 2 without"),
    ("sweep --hints none --hints-seed 2", "--hints-seed must go with --hints, got 2 without"),
    ("advise --hints ends --hints-noise 2", "noise must go with expect or both, got 2"),
    ("replay --hints ends --hints-liars .1", "--hints-liars must go with expect or both, got 0.1"),
    ("sweep --hints both --hints-noise .5", "--hints-noise must be 1 ... 1e+06, got 0.5"),
    ("advise --hints both --hints-noise nan", "--hints-noise must be 1 ... 1e+06, got nan"),
    ("replay --hints both --hints-share 30", "--hints-share must be 0 ... 1, got 30.0"),
    ("sweep --hints both --hints-liars x", "Invalid value for '--hints-liars': 'x' is not a"),
    ("advise --hints end", "Invalid value for '--hints': 'end' is not one of 'none', 'ends', "),
    # several engines
    ("fleet --engines 0", "must be 1 ... 256, got '0'"),
    ("fleet --router rand", "router must be one of round-robin, random, "),
    ("fleet --router events?sees=tier", "must have a tier to see, got none"),
    ("fleet --router events?lag_ms=1", "must have a rate for its lag, got none"),
    ("fleet --shared slab:/x?policy=lru", "address must have a capacity, got none in 'slab:/x'"),
    ("fleet --shared slab:/x?capacity=a", "capacity must be bytes, as 4096, 2TB"),
    ("fleet --shared 64MiB", "--shared in bytes needs --model or --block-bytes"),
    ("fleet --prefill-tokens-per-second 5", "needs --model or --block-bytes, for the times"),
    ("fleet --prefill-tokens-per-second 0", "must be an integer 1 ... "),
    ("fleet --price host=5", "must have the form host=N,tier=N, got 'host=5'"),
    ("fleet --price host=5,tier=-1", "tier must be a number >= 0, got '-1'"),
    ("fleet --price host=5,tier=1", "--price needs --model or --block-bytes, got neither"),
    ("fleet --block-tokens 7", "--block-tokens must agree with the trace, got 7"),
    ("fleet --model gpt-oss-20b", "--model must have one group for a fleet, got several"),
    ("fleet --link-bandwidth 50", "must have a unit if it is below 1,000,000, as 25GB, got '50'"),
    ("fleet --tier-bandwidth 999999", "as 25GB, got '999999'"),
    ("advise --link-bandwidth 25", "as 25GB, got '25'"),
    ("advise --router session", "--router must go with --engines"),
    ("advise --shared 1GiB", "--shared must go with --engines"),
    ("advise --price host=1,tier=1", "--price must go with --engines"),
    ("advise --engines 0", "must be 1 ... 256, got '0'"),
    ("advise --engines 2 --capacity 1MiB,2MiB", "--capacity must be one size"),
    ("advise --capacity auto,4MiB", "--capacity auto must be the only value, got 2 values"),
    ("advise --engines 2 --step-tokens 512", "--step-tokens must go without --engines"),
    ("advise --engines 2 --router best", "router must be one of "),
    ("advise --engines 2 --kv-bytes-per-token 5 --router events?sees=tier", "must have a tier"),
    ("advise --engines 2 --kv-bytes-per-token 5 --router events?lag_ms=5", "must have a rate"),
    ("advise --engines 2 --model gpt-oss-20b", "must have one group for a fleet"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("usage") / "trace.jsonl"
    write_trace(Workload(100, seed=1), path)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "message"), WITH_A_TRACE, ids=[one for one, _ in WITH_A_TRACE])
def test_wrong_usage_with_a_trace(kvoffload, trace, words, message):
    command, *arguments = words.split()
    if "--capacity" not in words:
        arguments += ["--capacity", "5%"]
    done = kvoffload(command, trace, *arguments, "--quiet")
    assert done.code == 2
    assert message in done.error


@pytest.mark.parametrize(
    "text",
    [
        "9,10",
        "10, 200",
        "1000,200",
        "0.5%,10%",
        "5%,100",
        "20,1000",
        "30,60,120,342",
        "100,200,400,1000",
    ],
)
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
