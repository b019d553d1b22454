"""`replay`, `sweep` and `advise` of a model with several KV groups."""

import csv
import json

import pytest

from kvoffload.traces import Request, Workload, write_trace

from .conftest import read

pytestmark = pytest.mark.thorough

SLOT = 393_216  # of gpt-oss-20b and blocks of 16 tokens
MODEL = ("--model", "gpt-oss-20b")
ONE = ("--jobs", "1", "--quiet")
ADVISE = ("--capacity", "512MiB", "--device-memory", "0", "--policy", "lru", "--jobs", "1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Prompts of 2,000 tokens that share the first 1,536, and ask for it again at once."""
    path = tmp_path_factory.mktemp("groups") / "trace.jsonl"
    system = tuple(range(96))
    requests = []
    for n in range(240):
        own = tuple(range(1000 + 29 * (n // 2), 1029 + 29 * (n // 2)))
        requests.append(Request(1000 * n, 2001, 1, (*system, *own, 50_000 + n)))
    write_trace(requests, path)
    return path


def test_replay_counts_tokens_and_slots(kvoffload, trace):
    whole = read(kvoffload, "replay", trace, *MODEL, "--capacity", "1GiB", "--policy", "lru")
    assert whole["slot_bytes"] == SLOT
    assert whole["retention"] == 0
    kinds = [(group["kind"], group["window"], group["chunk_tokens"]) for group in whole["groups"]]
    assert sorted(kinds) == [("full", 0, 16), ("window", 128, 16)]
    (result,) = whole["results"]
    assert result["capacity"] == 2**30 // SLOT
    # of two prompts that are equal up to 2,000 tokens the second resumes there
    assert result["hits"] == 120 * 2000
    assert result["asked"] == 240 * 2001
    assert result["stored"] == 96 + 120 * (29 + 8)
    found = read(
        kvoffload, "replay", trace, *MODEL, "--capacity", "1GiB", "--policy", "lru",
        "--retention", "768",
    )  # fmt: skip
    assert found["retention"] == 768
    assert found["results"][0]["hits"] == 120 * 2000 + 119 * 1536
    found = read(
        kvoffload, "replay", trace, *MODEL, "--capacity", "1GiB", "--policy", "lru",
        "--retention", "none",
    )  # fmt: skip
    assert found["retention"] == "none"
    assert found["results"][0]["hits"] == 120 * 2000 + 119 * 1536


def test_a_share_of_the_blocks_is_one_of_the_chunks(kvoffload, tmp_path):
    """Blocks of 16 tokens, of which a chunk of two has half as many."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "trace.jsonl"
    write_trace([Request(n, 80, 1, tuple(range(10 * n, 10 * n + 10))) for n in range(10)], path)
    arguments = ("--model", tmp_path / "config.json", "--capacity", "50%", "--policy", "lru")
    whole = read(kvoffload, "replay", path, *arguments)
    assert whole["block_tokens"] == 8
    assert whole["groups"][0]["chunk_tokens"] == 16
    assert whole["results"][0]["capacity"] == 100 // 2 // 2


def test_a_model_of_one_full_group_is_as_its_bytes(kvoffload, trace):
    sizes = ("--capacity", "64MiB,20%", "--policy", "lru,belady")
    named = kvoffload("sweep", trace, *ONE, *sizes, "--model", "llama-3.1-8b", "--json")
    given = kvoffload("sweep", trace, *ONE, *sizes, "--block-bytes", str(16 * 131_072), "--json")
    assert named.out == given.out
    whole = named.value
    assert "groups" not in whole
    assert all(row["loaded"] == row["hits"] for row in whole["results"])
    named = kvoffload("replay", trace, "--quiet", *sizes, "--model", "llama-3.1-8b")
    assert "llama-3.1-8b, bfloat16: 2 MiB per block" in named.out


def test_sweep_agrees_with_replay_in_any_number_of_processes(kvoffload, trace):
    arguments = (*MODEL, "--capacity", "64MiB,1GiB", "--policy", "lru,arc,infinite")
    arguments += ("--device-memory", "100MiB", "--retention", "768")
    one = read(kvoffload, "sweep", trace, *arguments, "--jobs", "1")
    assert read(kvoffload, "sweep", trace, *arguments, "--jobs", "2") == one
    replayed = read(kvoffload, "replay", trace, *arguments)
    assert one["groups"] == replayed["groups"]
    names = ("policy", "capacity", "asked", "hits", "stored", "hit_ratio", "token_hit_ratio")
    swept = sorted(tuple(row[name] for name in names) for row in one["results"])
    assert swept == sorted(tuple(row[name] for name in names) for row in replayed["results"])
    done = kvoffload("sweep", trace, *ONE, *arguments, "--csv", "-")
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [int(row["loaded"]) for row in rows] == [row["loaded"] for row in one["results"]]


def test_a_sweep_does_not_repeat_ratios_or_make_up_loads(kvoffload, trace):
    """Where no accelerator is in front the two ratios are one; `belady` knows one group's loads."""
    arguments = (*MODEL, "--capacity", "1GiB")
    both = (*arguments, "--policy", "lru,belady")
    lru, belady = read(kvoffload, "sweep", trace, *both, "--jobs", "1")["results"]
    assert lru["hit_ratio"] == lru["token_hit_ratio"]
    assert lru["loaded"] > 0
    assert belady["hits"] > 0
    assert belady["loaded"] is None
    for policies in ("lru,belady", "belady"):
        table = kvoffload("sweep", trace, *ONE, *arguments, "--policy", policies).out
        assert "hit ratio of tokens" in table
        assert "share of prompt tokens found" not in table


def test_a_sweep_of_prompts_of_unknown_length_continues(kvoffload, tmp_path):
    """A prompt of unknown length is a token longer than its blocks, since one is computed."""
    path, file = tmp_path / "trace.jsonl", tmp_path / "results.jsonl"
    lengths = [0, 16 * 20 + 1, 0, 0, 16 * 20 + 1]
    prompt = tuple(range(20))
    write_trace([Request(n, length, 1, prompt) for n, length in enumerate(lengths)], path)
    arguments = (*MODEL, "--capacity", "500", "--policy", "lru", "--jobs", "1", "--json")
    arguments += ("--block-tokens", "16", "--results", file)
    first, again = (kvoffload("sweep", path, *arguments) for _ in range(2))
    assert "1 of 1 results were known" in again.err
    assert again.out == first.out
    (result,) = first.value["results"]
    assert result["hits"] == result["hit_tokens"] == 4 * 320
    assert result["tokens"] == 5 * 321
    replayed = read(kvoffload, "replay", path, *arguments[:6], "--block-tokens", "16")
    assert replayed["results"][0]["token_hit_ratio"] == result["token_hit_ratio"] == 1280 / 1605


def test_a_picture_has_slots(kvoffload, trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.svg"
    sizes = ("--capacity", "64MiB,1GiB", "--policy", "lru")
    done = kvoffload("sweep", trace, *ONE, *sizes, *MODEL, "--plot", picture)
    assert done.code == 0, done.err
    assert "<!-- capacity, slots -->" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "workers"), [("qwen3.5-122b-a10b", 4), ("qwen3-235b-a22b", 8), ("gpt-oss-20b", 1)]
)
def test_advise_counts_for_the_workers_that_it_names(kvoffload, trace, model, workers):
    arguments = ("advise", trace, "--model", model, *ADVISE, "--limit", "20")
    assumed = read(kvoffload, *arguments)
    given = read(kvoffload, *arguments, "--tensor-parallel", workers)
    assert assumed["engine"]["workers"] == workers
    assert assumed == given
    one = read(kvoffload, *arguments, "--tensor-parallel", "1")
    assert (assumed["block_bytes"] == one["block_bytes"]) == (workers == 1)


def test_a_disk_holds_slots_and_its_hits_are_tokens(kvoffload, trace):
    """It holds all of the trace: what memory has lost comes back from it, window included."""
    small = ("--capacity", "50", "--policy", "lru", "--jobs", "1", "--disk", "1GB")
    asked = ("advise", trace, *MODEL, *small, "--device-memory", "0")
    value = read(kvoffload, *asked)
    cells = [cell for cell in value["details"]["disk_cells"] if cell["memory"] == 50 * SLOT]
    assert [cell["policy"] for cell in cells] == ["lru", "hit-density"]
    for cell in cells:
        counts = cell["counts"]
        assert cell["alone"] == value["memories"][1]["policies"]["lru"]["hit_ratio"] == 0
        assert counts["asked"] == 240 * 2001
        assert counts["host_hits"] + counts["tier_hits"] == 0  # a prompt's 133 slots do not fit
    roomy = [arg if arg != "50" else "200" for arg in asked]
    (cell, _) = (
        cell
        for cell in read(kvoffload, *roomy)["details"]["disk_cells"]
        if cell["memory"] == 200 * SLOT
    )
    assert cell["counts"]["host_hits"] == 120 * 2000
    assert cell["counts"]["tier_stored"] == 96 + 120 * (29 + 8)
    (line,) = [
        finding["text"]
        for finding in read(kvoffload, *roomy)["findings"]
        if finding["title"] == "Disk"
    ]
    assert "adds hardly any hits: both hit 50.0 % of the tokens" in line


def test_a_disk_beside_an_accelerators_cache_counts_repeated_loads(kvoffload, tmp_path):
    path = tmp_path / "chats.jsonl"
    write_trace(Workload(400, seed=3), path)
    asked = ("--capacity", "2GiB", "--device-memory", "1GiB", "--policy", "lru", "--jobs", "1")
    value = read(kvoffload, "advise", path, *MODEL, *asked, "--disk", "100GB")
    (line,) = [one["text"] for one in value["findings"] if one["title"] == "Disk"]
    assert line.startswith("With a disk of 93.1 GiB behind 2 GiB both hit ")
    alone = [cell["alone"] for cell in value["details"]["disk_cells"]][1]
    assert (
        f" % of the tokens, host memory on its own {100 * alone:.1f} %, repeated loads of windows "
        "and states included, with lru on the disk and lru in memory; "
    ) in line


def test_advise_tells_what_slots_hold_and_which_interval_gains(kvoffload, trace):
    done = kvoffload("advise", trace, *MODEL, *ADVISE)
    assert (done.code, done.err) == (0, "")
    words = " ".join(done.out.split())
    assert (
        "gpt-oss-20b, bfloat16: 384 KiB per slot; 512 MiB holds 1,365 slots; a prompt of 8,192 "
        "tokens takes 512, and 8 for its window"
    ) in words
    assert "Retention: A prompt with windows or states can be resumed only at its end" in words
    assert "vllm serve --prefix-cache-retention-interval 512" in words
    assert "\nvLLM, in addition:\n\n    --prefix-cache-retention-interval 512\n" in done.out
    assert '"blocks_per_chunk": 1' in done.out
    assert '"block_size"' not in done.out
    assert "counted as if they kept all" not in done.out
    whole = kvoffload("advise", trace, *MODEL, *ADVISE, "--json").value
    assert whole["slot_bytes"] == whole["block_bytes"] == SLOT
    assert (whole["retention"], whole["token_bytes"]) == (0, None)
    assert [cell["interval"] for cell in whole["retentions"]] == [0, 512, "none"]
    argument = "--prefix-cache-retention-interval 512"
    assert whole["configuration"]["vllm_argument"] == argument


def test_no_reuse_for_want_of_resume_points_names_the_interval(kvoffload, tmp_path):
    path = tmp_path / "shared.jsonl"
    prompts = [(*range(64), *range(1_000 + 23 * n, 1_023 + 23 * n)) for n in range(220)]
    write_trace([Request(n, 16 * 87, 1, prompt) for n, prompt in enumerate(prompts)], path)
    words = " ".join(kvoffload("advise", path, *MODEL, *ADVISE).out.split())
    assert (
        "No recommendation: there is almost no reuse at this retention interval: a cache" in words
    )
    arguments = (*ADVISE[:2], *ADVISE[4:])
    words = " ".join(kvoffload("advise", path, *MODEL, *arguments).out.split())
    assert "cache lacks; without that cache it would hit 0.0 % of all." in words


def test_the_interval_given_is_advised_on(kvoffload, trace, tmp_path):
    report = tmp_path / "advice.html"
    arguments = (*MODEL, *ADVISE, "--retention", "512", "--report", report)
    whole = kvoffload("advise", trace, *arguments, "--json").value
    assert whole["retention"] == 512
    assert whole["configuration"]["vllm_argument"] == "--prefix-cache-retention-interval 512"
    page = report.read_text(encoding="utf-8")
    assert "--retention 512" in page
    assert '<pre id="vllm-argument">--prefix-cache-retention-interval 512</pre>' in page
    assert "is a token of a prompt" in page


def test_with_one_full_group_advise_says_nothing_of_groups(kvoffload, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(Workload(220, seed=3), path)
    arguments = ("advise", path, "--model", "deepseek-v3", "--capacity", "8GiB", "--jobs", "1")
    whole = kvoffload(*arguments, "--json").value
    assert not {"groups", "slot_bytes", "retention", "retentions"} & set(whole)
    assert "vllm_argument" not in (whole["configuration"] or {})
    assert not any("loaded" in row["policies"]["lru"] for row in whole["memories"])
    assert "slot" not in kvoffload(*arguments).out
