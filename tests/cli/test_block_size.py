"""Tokens per block: those of the trace, or of `--block-tokens` where it does not state them."""

import pytest

from kvoffload.traces import Request, Workload, write_trace

pytestmark = pytest.mark.fast

ADVISE = ["--capacity", "1MiB", "--kv-bytes-per-token", "100", "--jobs", "1"]
COMMANDS = {
    "replay": ["--capacity", "9", "--policy", "lru"],
    "replay --full-blocks": ["--capacity", "9", "--policy", "lru"],
    "sweep": ["--capacity", "9", "--policy", "lru", "--jobs", "1"],
    "sweep --full-blocks": ["--capacity", "9", "--policy", "lru", "--jobs", "1"],
    "advise": ADVISE,
    "info": [],
    "workload": [],
}
LMCACHE = '{"timestamp":0,"chunk_size":256,"seq_len":600,"chunk_hashes":["0xa1","0xb2"]}'
BAILIAN = '{"timestamp":0,"chat_id":1,"input_length":20,"output_length":1,"hash_ids":[1,2]}'


@pytest.fixture
def run(kvoffload, tmp_path):
    """Run a command on requests, or on the lines of a file."""

    def run(command, trace, *arguments):
        path = tmp_path / "trace"
        if isinstance(trace, str):
            path.write_text(trace)
        else:
            write_trace(trace, path)
        name, *options = command.split()
        return kvoffload(name, path, *options, *COMMANDS[command], *arguments)

    return run


def test_its_origin_is_reported(run):
    for trace, origin in ((Workload(30), "lengths"), (LMCACHE, "trace"), (BAILIAN, "trace")):
        for command in ("replay", "advise", "sweep"):
            whole = run(command, trace, "--json").value
            assert whole["block_tokens_from"] == origin
    unsized = [Request(0, 1000, 1, (1, 2)), Request(1, 1000, 1, (1,))]
    for command in ("replay", "sweep"):
        whole = run(command, unsized, "--json").value
        assert (whole["block_tokens"], whole["block_tokens_from"]) == (None, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_has_a_bound(run, command):
    done = run(command, Workload(3), "--block-tokens", 2**24 + 1)
    assert (done.code, done.out) == (2, "")
    assert "16777217 is not in the range 1<=x<=16777216" in done.err


def test_advice_says_why_it_is_needed(run):
    for length, ids, why in (
        (2**40, (1,), "no block size fits all requests; they have 1,099,511,627,776 tokens per"),
        (3, (), "no request has a block"),
    ):
        done = run("advise", [Request(time, length, 1, ids) for time in range(3)])
        assert done.code == 2
        assert f"kvoffload: --block-tokens is needed: {why}" in done.err


HEX = "00c0ffee 0badcafe\n00c0ffee\n"
CONVERTED = [Request(0, 0, 0, (1, 2)), Request(0, 0, 0, (1,))]


@pytest.mark.parametrize("trace", [HEX, CONVERTED], ids=["hex", "mooncake"])
def test_where_the_trace_has_no_lengths_it_is_believed_and_said(run, trace):
    said = "blocks of 16 tokens (as given; the trace has no lengths)"
    for command in ("replay", "advise"):
        done = run(command, trace, "--block-tokens", 16)
        assert (done.code, done.err) == (0, "")
        assert said in done.out
        whole = run(command, trace, "--block-tokens", 16, "--json").value
        assert (whole["block_tokens"], whole["block_tokens_from"]) == (16, "option")
    whole = run("sweep", trace, "--block-tokens", 16, "--json").value
    assert whole["no_token_hit_ratio"] is None
    found = run("info", trace, "--block-tokens", 16, "--json").value
    assert (found["block_tokens"], found["input_tokens"]) == (16, 48)
    (row,) = whole["results"]  # prompts are as long as their blocks
    assert (row["tokens"], row["token_hit_ratio"]) == (48, row["hit_ratio"])
