"""`kvoffload replay`: its output and its options."""

import gzip
import os
import threading

import pytest

import kvoffload as library
from kvoffload.replay import Configuration, GroupChunks, Selection, replay
from kvoffload.traces import Request, Survey, Workload, write_trace

WORKLOAD = Workload(300, seed=3)
TWO = ("--policy", "lru,arc")
COUNTED = (
    *("requests", "blocks", "tokens", "asked", "hits", "hit_ratio", "hit_tokens", "missed_tokens"),
    *("token_hit_ratio", "missed_p50", "missed_p95", "loaded", "stored", "evicted", "refused"),
    "not_admitted",
)
TIMES = (
    *("manager_seconds", "request_seconds_p50", "request_seconds_p99", "request_seconds_max"),
    "blocks_per_second",
)


def expected(requests, policy, capacity, block_tokens=512):
    groups = GroupChunks.of_blocks(block_tokens)
    result = replay(requests, Configuration(policy=policy, host=capacity, groups=groups))
    return {name: getattr(result, name) for name in COUNTED}


UNEVEN = [Request(n, 900 - n, 1, (n % 3, 9)) for n in range(30)]  # 450 to 870 tokens a block
TENTH = Selection(WORKLOAD, limit=100, full_block_tokens=512)


@pytest.mark.parametrize(
    ("written", "replayed", "options", "capacities", "block_tokens"),
    [
        (WORKLOAD, WORKLOAD, "--capacity 100 --capacity 400", [100, 400], 512),
        (None, Workload(200, seed=9), "--limit 200 --seed 9 --capacity 300", [300], 512),
        (
            WORKLOAD,
            TENTH,
            "--capacity 10% --limit 100 --full-blocks",
            [Survey.of(TENTH).unique_blocks // 10],
            512,
        ),
        (
            UNEVEN,
            Selection(UNEVEN, full_block_tokens=860),
            "--full-blocks --capacity 50 --block-tokens 860",
            [50],
            860,
        ),
    ],
)
def test_json_is_one_object_with_what_the_library_counts(
    kvoffload, tmp_path, written, replayed, options, capacities, block_tokens
):
    path = tmp_path / "trace.jsonl"
    if written is not None:
        write_trace(written, path)
    source = [] if written is None else [path]
    whole = kvoffload("replay", *source, *TWO, *options.split(), "--json").value
    assert whole["trace"] == ("generated, seed 9" if written is None else str(path))
    assert (whole["block_tokens"], whole["bad_lines"]) == (block_tokens, 0)
    assert "groups" not in whole
    assert whole["implementation"] == library.IMPLEMENTATION
    assert whole["version"] == library.__version__
    order = [(row["policy"], row["capacity"]) for row in whole["results"]]
    assert order == [(policy, size) for size in capacities for policy in ("lru", "arc")]
    for row in whole["results"]:
        counts = expected(replayed, row["policy"], row["capacity"], block_tokens)
        assert {name: row[name] for name in counts} == counts
        whole_time, p50, p99, most = (row[name] for name in TIMES[:4])
        assert 0 < p50 <= p99 <= most <= whole_time
        assert row["blocks_per_second"] == pytest.approx(row["blocks"] / row["manager_seconds"])


def test_without_a_policy_the_default_stands_between_lru_and_the_ceiling(kvoffload):
    done = kvoffload("replay", "--limit", 1000, "--capacity", "2%", "--json")
    assert done.err == ""
    rows = done.value["results"]
    assert [row["policy"] for row in rows] == ["lru", "hit-density", "belady"]
    hits = [row["hits"] for row in rows]
    assert hits == sorted(hits)
    assert rows[1]["not_admitted"] > 0
    assert "admitted" in kvoffload("replay", "--limit", 1000, "--capacity", "2%").out
    loop = kvoffload("replay", "--limit", 100, "--closed-loop", "recorded", "--json")
    assert loop.err == ""
    policies = {row["policy"] for row in loop.value["results"]}
    assert policies == {"lru", "hit-density"}  # belady has no loop


def test_without_a_block_size_the_token_ratio_is_left_out(kvoffload, tmp_path):
    path = tmp_path / "unsized.jsonl"
    write_trace([Request(0, 1000, 1, (1, 2)), Request(1, 1000, 1, (1,))], path)
    done = kvoffload("replay", path, "--capacity=5", "--json", "--policy=lru")
    (row,) = done.value["results"]
    assert row["token_hit_ratio"] is None
    assert row["hit_ratio"] == pytest.approx(1 / 3)
    assert done.err.startswith("note: no block size fits all requests")
    table = kvoffload("replay", path, "--capacity=5", "--quiet")
    assert " 33.3 % " in table.out
    assert "tokens" not in table.out
    assert table.err == ""


@pytest.mark.parametrize("how", ["plain", "gz", "named pipe"])
def test_a_pipe_is_read_once_and_replayed_often(kvoffload, trace, tmp_path, how):
    asked = ("--capacity=10%,100", "--json")
    source, data = "-", trace.read_bytes()
    if how == "named pipe":
        source = tmp_path / "pipe"
        os.mkfifo(source)
        feeder = threading.Thread(target=source.write_bytes, args=(data,))
        feeder.start()
        done = kvoffload("replay", source, *asked)
        feeder.join()
    else:
        data = gzip.compress(data) if how == "gz" else data
        done = kvoffload("replay", source, *asked, stdin=data)
    assert done.value["trace"] == str(source)
    hits = [row["hits"] for row in done.value["results"]]
    assert hits == [row["hits"] for row in kvoffload("replay", trace, *asked).value["results"]]


def test_a_file_or_pipe_gets_the_table_whole(kvoffload, trace):
    done = kvoffload("replay", *TWO, trace, "--capacity=1%,200")
    title, time, blank, above, head, rule, *rows = done.out.splitlines()
    assert (done.err, blank) == ("", "")
    assert time == f"ms: time in the manager per request, {library.IMPLEMENTATION} implementation"
    assert title.startswith(f"{trace}; blocks of 512 tokens; ")
    assert len(rows) == 4
    words = "policy blocks given requests blocks hits hit ratio tokens hit p50 p95 stored evicted"
    assert head.split() == [*words.split(), "refused", "ms", "ms", "ms", "blocks/s"]
    assert above.split() == ["capacity", "tokens", "missed", "p50", "p99", "max"]
    assert set(rule) == {"─"}
    counts = expected(WORKLOAD, "arc", 200)
    row = rows[3].replace(" %", "%").split()
    assert row[:6] == ["arc", "200", "200", "300", f"{counts['blocks']:,}", f"{counts['hits']:,}"]
    assert row[6:8] == [f"{counts[name] * 100:.1f}%" for name in ("hit_ratio", "token_hit_ratio")]
    assert row[10:13] == [f"{counts[name]:,}" for name in ("stored", "evicted", "refused")]


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_table_fits_the_width_and_cuts_no_number(kvoffload, trace, columns):
    done = kvoffload("replay", *TWO, trace, "--capacity=1%,200", COLUMNS=str(columns))
    _, _, table = done.out.partition("\n\n")  # above it, a long path is not cut
    lines = table.splitlines()
    assert max(map(len, lines)) <= columns
    assert any({"p50", "p99", "max"} <= set(line.split()) for line in lines), "times together"
    assert "…" not in done.out
    counts = expected(WORKLOAD, "lru", 200)
    for name in ("blocks", "hits", "stored", "evicted"):
        assert f" {counts[name]:,} " in done.out
    if columns < 200:
        assert sum(line.startswith("policy") for line in lines) > 1


def test_the_lines_above_a_table_fit_the_width_where_a_word_does(kvoffload):
    done = kvoffload("replay", "--limit", "60", "--capacity", "7", COLUMNS="40")
    assert done.out.splitlines()[:5] == [
        "generated, seed 0; blocks of 512 tokens;",
        "60 requests; 425 blocks; 232 unique",
        "ms: time in the manager per request,",
        f"{library.IMPLEMENTATION} implementation",
        "",
    ]
