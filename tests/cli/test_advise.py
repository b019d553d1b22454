"""`kvoffload advise`: what it prints, and one line for whatever is wrong."""

import json

import pytest

from kvoffload.advise import model_shape
from kvoffload.policies import registry
from kvoffload.traces import Request, Workload, write_trace

WORKLOAD = Workload(300, seed=3)
SIZE = ["--kv-bytes-per-token", "2048", "--memory", "200MiB", "--processes", "1"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    write_trace(WORKLOAD, path)
    return path


def test_it_prints_table_recommendation_and_configuration(kvoffload, trace):
    done = kvoffload("advise", trace, *SIZE)
    assert (done.code, done.err) == (0, "")
    for policy in registry.names():
        assert f"\n{policy} " in done.out
    assert "hit ratio" in done.out
    assert "100 MiB" in done.out
    assert "800 MiB" in done.out
    assert "\nTake " in done.out
    assert "\nMore memory: Doubling it to 400 MiB buys " in done.out
    assert "num_blocks=200" in done.out
    python = done.out.partition("\nPython:\n\n")[2].partition("\nvLLM, ")[0]
    made = {}
    exec(compile("\n".join(line[4:] for line in python.splitlines()), "pasted", "exec"), made)
    assert made["manager"].block_size == 512
    vllm = json.loads(done.out.partition("--kv-transfer-config:\n\n")[2])
    extra = vllm["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 200 * 2**20
    assert extra["spec_name"] == "KVOffloadSpec"
    assert extra["spec_module_path"] == "kvoffload.integrations.vllm"
    assert extra["block_size"] == 512
    assert extra["eviction_policy"] in registry.names()


def test_json_is_one_object(kvoffload, trace):
    done = kvoffload("advise", trace, *SIZE, "--json")
    assert done.code == 0, done.err
    whole = json.loads(done.out)
    assert whole["trace"] == str(trace)
    assert whole["recommendation"] in registry.names()
    assert whole["objections"] == []
    assert [row["capacity"] for row in whole["memories"]] == [100, 200, 400, 800]
    for row in whole["memories"]:
        assert set(row["policies"]) == set(registry.names())
        assert row["best_possible_hit_ratio"] <= whole["unbounded_hit_ratio"]
    vllm = whole["configuration"]["vllm"]["kv_connector_extra_config"]
    assert vllm["eviction_policy"] == whole["recommendation"]


def test_a_model_gives_the_bytes(kvoffload, trace):
    arguments = ["--model", "deepseek-ai/DeepSeek-V3", "--memory", "8GiB", "--json"]
    more = ["--kv-cache-dtype", "fp8", "--tensor-parallel", "8", "--processes", "1"]
    whole = json.loads(kvoffload("advise", trace, *arguments, *more).out)
    assert whole["model"] == "deepseek-v3"
    assert whole["token_bytes"] == model_shape("deepseek-v3").bytes_per_token("fp8")
    assert whole["memories"][1]["capacity"] == 8 * 2**30 // (512 * whole["token_bytes"])


def test_blocks_filled_in_part_are_left_out_where_the_lengths_say_which(kvoffload, trace, tmp_path):
    whole = json.loads(kvoffload("advise", trace, *SIZE, "--json").out)
    full = sum(min(len(r.hash_ids), r.input_length // 512) for r in WORKLOAD)
    assert (whole["full_blocks"], whole["blocks"]) == (True, full)
    arguments = ["--block-tokens", "64", "--json"]
    whole = json.loads(kvoffload("advise", trace, *SIZE, *arguments).out)
    assert (whole["full_blocks"], whole["blocks"]) == (
        False,
        sum(len(r.hash_ids) for r in WORKLOAD),
    )


def test_a_trace_that_does_not_suffice_is_no_error(kvoffload, tmp_path):
    path = tmp_path / "short.jsonl"
    write_trace([Request(n, 512, 1, (1,)) for n in range(20)], path)
    done = kvoffload("advise", path, *SIZE)
    assert (done.code, done.err) == (0, "")
    assert "No recommendation: the trace is too short: 20 requests" in done.out
    assert "Python" not in done.out
    assert "vLLM" not in done.out
    whole = json.loads(kvoffload("advise", path, *SIZE, "--json").out)
    assert (whole["recommendation"], whole["configuration"]) == (None, None)
    assert len(whole["objections"]) == 2


def test_standard_input_and_processes(kvoffload):
    import io

    from kvoffload.traces import write_requests

    text = io.BytesIO()
    write_requests(WORKLOAD, text)
    arguments = [*SIZE[:-1], "2", "--json"]
    done = kvoffload("advise", "-", *arguments, stdin=text.getvalue())
    assert done.code == 0, done.err
    assert json.loads(done.out)["trace"] == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--memory'."),
        (["--memory", "many"], "'--memory': must be bytes >= 1, as 2097152 or 2MiB, got 'many'"),
        (["--memory", "1GiB"], "exactly one of --model and --kv-bytes-per-token must be given"),
        (
            ["--memory", "1GiB", "--model", "qwen3-8b", "--kv-bytes-per-token", "5"],
            "exactly one of --model and --kv-bytes-per-token must be given",
        ),
        (["--memory", "1GiB", "--model", "qwen"], "Invalid value for '--model': model must be one"),
        (
            ["--memory", "1GiB", "--kv-bytes-per-token", "5", "--tensor-parallel", "2"],
            "--tensor-parallel must go with --model, got 2 without it",
        ),
        (
            ["--memory", "1GiB", "--model", "qwen3-8b", "--tensor-parallel", "3"],
            "--tensor-parallel: tensor_parallel must divide the 8 KV heads of qwen3-8b",
        ),
        (
            ["--memory", "1KiB", "--kv-bytes-per-token", "2"],
            "--memory must be 2 ... 536870911 blocks of 1,024 bytes, got 1,024 bytes",
        ),
        (["--memory", "9TiB", "--kv-bytes-per-token", "1"], "got 9,895,604,649,984 bytes"),
        ([*SIZE, "--report", "nowhere/out.html"], "--report must be in a folder that exists"),
        ([*SIZE, "--processes", "0"], "'--processes': 0 is not in the range x>=1."),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line(kvoffload, trace, arguments, message):
    done = kvoffload("advise", trace, *arguments)
    assert done.code == 2
    assert message in done.error


def test_bad_data_is_one_line(kvoffload, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp":0}\n')
    done = kvoffload("advise", path, *SIZE)
    assert done.code == 1
    assert f"{path}:1: " in done.error
    assert kvoffload("advise", tmp_path / "absent", *SIZE).code == 1


def test_a_trace_that_fits_no_block_size_needs_one(kvoffload, tmp_path):
    path = tmp_path / "odd.jsonl"
    write_trace([Request(0, 10, 1, (1,)), Request(0, 1, 1, (1, 2, 3))], path)
    done = kvoffload("advise", path, *SIZE)
    assert done.code == 2
    assert done.error == (
        "--block-tokens is needed: no block size fits all requests; "
        "they have 3 tokens a block on average"
    )


def test_a_trace_without_lengths_needs_a_block_size(kvoffload, tmp_path):
    path = tmp_path / "hashes.txt"
    path.write_text("00c0ffee 0badcafe\n00c0ffee\n")
    done = kvoffload("advise", path, *SIZE)
    assert done.code == 2
    assert done.error == (
        "--block-tokens is needed: the trace does not say how long its requests are"
    )
    done = kvoffload("advise", path, *SIZE, "--block-tokens", "16")
    assert done.code == 0, done.err
    assert "too short: 2 requests" in done.out
