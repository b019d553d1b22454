"""`kvoffload convert`, and the other formats in the commands that read a trace."""

import json
import pickle
import re
import subprocess
import sys

import pytest

from kvoffload.traces import Request, SessionOptions, Trace, Workload, write_trace

from .conftest import run_shell

pytestmark = pytest.mark.fast

LMCACHE = [
    {"timestamp": 1e9 + i, "chunk_size": 256, "seq_len": 600 + i, "chunk_hashes": ["0xa1", "0xb2"]}
    for i in range(3)
]


@pytest.fixture
def lmcache(tmp_path):
    path = tmp_path / "lookup_hashes.jsonl"
    path.write_text("\n".join(map(json.dumps, LMCACHE)))
    return path


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_writes_the_mooncake_form(kvoffload, lmcache, tmp_path, name):
    done = kvoffload("convert", lmcache, "-o", tmp_path / name)
    assert (done.code, done.out) == (0, "")
    assert done.err == (
        "note: blocks of 256 tokens, full ones only: replay it with --block-tokens 256\n"
    )
    converted = Trace(tmp_path / name)
    assert list(converted) == list(Trace(lmcache))
    assert converted.format == "mooncake"


def test_writes_to_standard_output_and_reads_standard_input(kvoffload, tmp_path):
    done = kvoffload("convert", "-", "--quiet", stdin=b"aabbccdd 11223344\naabbccdd\n")
    path = tmp_path / "t"
    path.write_text(done.out)
    first, second = Trace(path)
    assert first.hash_ids[0] == second.hash_ids[0]
    assert (done.code, done.err) == (0, "")


def test_the_mooncake_form_stays_as_it_is(kvoffload, tmp_path):
    write_trace(Workload(50), tmp_path / "a")
    assert kvoffload("convert", tmp_path / "a", "-o", tmp_path / "b").code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_block_size_of_full_chunks_is_found_again(kvoffload, lmcache, tmp_path):
    rows = [
        LMCACHE[0] | {"seq_len": length, "chunk_hashes": ["0xa1", "0xb2"][: length // 256]}
        for length in (700, 500, 200)
    ]
    lmcache.write_text("\n".join(map(json.dumps, rows)))
    assert kvoffload("convert", lmcache, "-o", tmp_path / "out", "--quiet").code == 0
    info = kvoffload("info", tmp_path / "out", "--json").value
    assert info["block_tokens"] == 256


def test_a_bad_trace_leaves_no_file(kvoffload, lmcache, tmp_path):
    lmcache.write_text(lmcache.read_text() + "\nbad")
    done = kvoffload("convert", lmcache, "-o", tmp_path / "out")
    assert done.code == 1
    assert done.error.startswith(f"{lmcache}:4: must be a JSON object")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("stdin", [False, True])
def test_other_forms_replay_with_the_block_size_that_they_name(kvoffload, lmcache, stdin):
    source, data = ("-", lmcache.read_bytes()) if stdin else (lmcache, b"")
    done = kvoffload("replay", source, "--capacity=5", "--policy=lru", "--json", stdin=data)
    whole = done.value
    assert whole["block_tokens"] == 256
    (row,) = whole["results"]
    assert row["hits"] == 4
    assert row["token_hit_ratio"] == pytest.approx(2 * 512 / (600 + 601 + 602))
    info = kvoffload("info", source, "--json", stdin=data).value
    assert (info["format"], info["block_tokens"], info["seconds"]) == ("lmcache", 256, 2)


def test_sessions_are_written_whole_and_read_again(tmp_path, kvoffload):
    def request(seconds, ids, **more):
        lengths = {"in": 4 * len(ids), "out": 5}
        return {"t": seconds, "model": "m", "hash_ids": ids, **lengths, **more}

    agent = {"type": "subagent", "t": 1, "agent_id": "a", "requests": [request(2, [3, 4])]}
    first = request(0, [1, 2], api_time=0.25, stop="tool_use")
    requests = [first, agent, request(5, [1, 2, 5])]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"id": "s", "block_size": 4, "requests": requests}))
    out = tmp_path / "rows.jsonl"
    done = kvoffload("convert", path, "--output", out, "--starts", "100", "--seed", "3")
    assert done.code == 0, done.err
    assert "blocks of 4 tokens, full ones only" in done.err
    assert list(Trace(out)) == list(Trace(path, sessions=SessionOptions(starts_s=100.0, seed=3)))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[1]["parent"] == "s"
    assert [row.get("ends") for row in rows] == [None, True, True]


@pytest.mark.parametrize("name", ["out.oracleGeneral", "out.oracleGeneral.bin", "out.records"])
def test_blocks_become_objects_and_are_read_again(kvoffload, tmp_path, name):
    write_trace(Workload(40), tmp_path / "trace.jsonl")
    out = tmp_path / name
    done = kvoffload("convert", tmp_path / "trace.jsonl", "--to", "oracle-general", "-o", out)
    assert (done.code, done.out, done.err) == (0, "", "")
    ids = [hash_id for request in Workload(40) for hash_id in request.hash_ids]
    assert out.stat().st_size == 24 * len(ids)
    named = [] if "oracleGeneral" in name else ["--format", "oracle-general"]
    info = kvoffload("info", out, *named, "--json")
    assert info.err == "note: oracle-general: each object is one block, whatever its size\n"
    counts = json.loads(info.out)
    assert (counts["format"], counts["requests"]) == ("oracle-general", len(ids))
    assert counts["unique_blocks"] == len(set(ids))
    back = tmp_path / "back.jsonl"
    assert kvoffload("convert", out, *named, "-o", back, "--quiet").err == ""
    assert [request.hash_ids for request in Trace(back)] == [(hash_id,) for hash_id in ids]


def test_objects_go_through_pipes(tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace([Request(0, 9, 9, (2**64 - 1, 0)), Request(5000, 9, 9, (0,))], trace)
    done = run_shell(
        'kvoffload convert - --to oracle-general < "$TRACE" '
        "| kvoffload replay - --format oracle-general --capacity 1 --policy lru --json --quiet",
        TRACE=trace,
    )
    assert done.err == ""
    (row,) = done.value["results"]
    assert (row["blocks"], row["hits"]) == (3, 1)


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    system = {"role": "system", "content": "You answer in secret sentences. " * 10}
    rows = [
        {"created": 1732550000 + second, "messages": [system, {"role": "user", "content": text}]}
        for second, text in ((0, "secret one"), (2, "secret two"), (1, "secret three"))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


BYTES = "4 bytes of text count as a token (--tokenizer counts them)"
READ = f"note: read as openai: messages, created; {BYTES}\n"
SIZE = "note: blocks of 16 tokens, full ones only: replay it with --block-tokens 16\n"


def test_a_log_of_chats_becomes_a_trace_without_their_text(tmp_path, kvoffload, chats):
    out = tmp_path / "trace.jsonl"
    done = kvoffload("convert", chats, "--output", out)
    assert (done.code, done.out, done.err) == (0, "", READ + SIZE)
    requests = list(Trace(out))
    assert [request.timestamp for request in requests] == [0, 1000, 2000]
    assert len({request.hash_ids[:5] for request in requests}) == 1
    assert "secret" not in out.read_text()
    done = kvoffload("info", out, "--json")
    assert done.value["block_tokens"] == 16
    assert kvoffload("convert", "--format", "openai", chats, "--quiet").err == ""


def test_chats_are_converted_alike_under_one_salt(tmp_path, kvoffload, chats):
    def converted(*options):
        done = kvoffload("convert", "--format", "openai", chats, "--quiet", *options)
        assert done.code == 0, done.err
        return done.out

    assert converted("--salt", "pepper") == converted("--salt", "pepper")
    assert converted() != converted()
    rows = converted("--bytes-per-token", "2", "--block-tokens", "8").splitlines()
    assert len(json.loads(rows[0])["hash_ids"]) == json.loads(rows[0])["input_length"] // 8


def test_a_log_has_the_same_figures_each_time_and_other_words(tmp_path, kvoffload):
    log = tmp_path / "log.jsonl"
    row = '{"prompt": "%d %s", "user": "%d"}\n'
    log.write_text("".join(row % (n % 40, "x" * 300, n % 40) for n in range(200)))

    def printed(*command):
        done = kvoffload(command[0], log, "--quiet", *command[1:])
        assert done.code == 0, done.err
        return done.out

    fleet = ("fleet", "--engines", "8", "--capacity", "40", "--router", "session", "--csv", "-")
    assert printed(*fleet) == printed(*fleet)
    assert printed(*fleet) != printed(*fleet, "--salt", "pepper")
    assert printed("workload") != printed("workload")


GRID = ("--capacity", "50", "--policy", "lru")


def of_every_command(kvoffload, source, data):
    """Yield what each command says; two, if standard input is kept in a file for all alike."""
    commands = [("advise", "--capacity", "50", "--kv-bytes-per-token", "1KiB"), ("convert",)]
    if not data:
        commands += [("info",), ("replay", *GRID), ("sweep", *GRID), ("workload",)]
        commands.append(("fleet", *GRID, "--engines", "2"))
    for command, *arguments in commands:
        done = kvoffload(command, source, *arguments, stdin=data)
        assert done.code == 0, done.err
        yield done


@pytest.mark.parametrize("stdin", [False, True])
def test_every_command_reads_a_log(kvoffload, chats, tmp_path, stdin):
    whole = tmp_path / "whole.jsonl"
    assert kvoffload("convert", chats, "--quiet", "--output", whole).code == 0
    source, data = ("-", chats.read_bytes()) if stdin else (chats, b"")
    figures = []
    for trace, given in ((whole, b""), (source, data)):
        found = kvoffload("info", trace, "--json", stdin=given).value
        names = ("requests", "blocks", "unique_blocks", "seconds", "ideal_hit_ratio")
        figures.append([found[name] for name in names])
    assert figures[0] == figures[1]
    for done in of_every_command(kvoffload, source, data):
        assert done.err.startswith(READ)
        assert "secret" not in done.out + done.err
    done = kvoffload("replay", source, *GRID, "--block-tokens", "8", "--json", stdin=data)
    assert done.value["results"][0]["blocks"] > figures[0][1]


IMPATIENT = """
import sys
from kvoffload.__main__ import main
from kvoffload.cli import _terminal
_terminal.LINE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "stdin"),
    [("info", True), ("replay", False), ("advise --kv-bytes-per-token=1KiB", False)],
)
def test_a_log_shows_progress_while_it_is_read(tmp_path, command, stdin):
    path = tmp_path / "chats.jsonl"
    rows = ({"ts": 999 - number, "prompt": f"{number} {'x' * 99}"} for number in range(999))
    path.write_text("\n".join(map(json.dumps, rows)))
    shows = {(): [256, 512, 768]} | ({("--quiet",): []} if stdin else {})
    for options, wanted in shows.items():
        done = subprocess.run(
            [sys.executable, "-c", IMPATIENT, *command.split(), "-" if stdin else path, *options],
            input=path.read_text() if stdin else "",
            capture_output=True,
            text=True,
            check=True,
        )
        shown = [
            int(text)
            for text in re.findall(r"^reading: (\d+) requests$", done.stderr, re.MULTILINE)
        ]
        assert shown[:3] == wanted


def test_another_process_makes_the_same_blocks_of_a_log(chats):
    from kvoffload.cli._decoding import Decoding
    from kvoffload.cli._sources import Reading

    reading = Reading(None, None, None, skip_bad=False, same_ids=False)
    decoding = Decoding((str(chats),), reading, None, None, full_blocks=False, arrivals=False)
    again = pickle.loads(pickle.dumps(decoding))
    assert again().fingerprint() == decoding().fingerprint()
    assert "secret" not in repr(reading)


@pytest.mark.parametrize("command", ["info", "advise --capacity=50 --kv-bytes-per-token=1KiB"])
def test_what_breaks_prefixes_is_said_and_its_text_only_if_asked_for(kvoffload, tmp_path, command):
    path = tmp_path / "chats.jsonl"
    rows = [
        {
            "ts": n,
            "messages": [{"role": "system", "content": f"Now: 1{n % 10}:{10 + n}. " + "s" * 900}],
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    done = kvoffload(*command.split(), path)
    assert "a time at character 6 of the system message" in " ".join(done.out.split())
    assert "'1" not in done.out
    assert "('1" in kvoffload(*command.split(), path, "--show-text").out
    found = kvoffload(*command.split(), path, "--json").value
    (one,) = found["breaks"]
    assert (one["kind"], one["role"], one["character"]) == ("a time", "system", 6)
    assert "text" not in one
    assert found["ideal_hit_ratio_without_breaks"] > 0.9
    done = kvoffload(*command.split(), "-", "--json", stdin=path.read_bytes())
    assert done.value["ideal_hit_ratio_without_breaks"] is None


def test_a_tokenizer_that_is_not_there_is_named(tmp_path, kvoffload, chats):
    pytest.importorskip("tokenizers", reason="needs the tokenizer extra")
    path = tmp_path / "tokenizer.json"
    done = kvoffload("convert", "--format", "openai", chats, "--tokenizer", path)
    assert (done.code, done.error) == (
        1,
        f"{path}: must be a readable file: No such file or directory",
    )


@pytest.fixture
def deltas(tmp_path):
    """Sessions of seven rows that list only what is new, as AIPerf writes them."""
    rows, fresh = [], iter(range(3, 10**6))
    for session in range(20):
        base = {"session_id": f"s{session}", "output_length": 20}
        first = {"input_length": 64 * 5, "hash_ids": [0, 1, 2, next(fresh), next(fresh)]}
        rows.append(base | first | {"timestamp": 1000 * session})
        for _ in range(6):
            more = {"input_length": 64 * 2 + 50, "hash_ids": [next(fresh) for _ in range(3)]}
            rows.append(base | more | {"delay": 500.5})
    path = tmp_path / "deltas.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("stdin", [False, True])
def test_delta_rows_are_put_together_in_every_command_and_a_note_says_so(
    kvoffload, deltas, tmp_path, stdin
):
    whole = tmp_path / "whole.jsonl"
    options = ("--format", "mooncake-delta", "--block-tokens", 64, "--quiet")
    assert kvoffload("convert", deltas, *options, "--output", whole).code == 0
    source, data = ("-", deltas.read_bytes()) if stdin else (deltas, b"")
    ratios = []
    for trace, given in ((whole, b""), (source, data)):
        found = kvoffload("info", trace, "--json", stdin=given).value
        ratios.append((found["ideal_hit_ratio"], found["block_tokens"], found["requests"]))
    assert ratios[0] == ratios[1]
    assert ratios[0][0] > 0.7
    for done in of_every_command(kvoffload, source, data):
        assert "read as listing only what is new, 64 tokens per id (mooncake-delta)" in done.err
    named = kvoffload("replay", source, *GRID, "--format", "mooncake-delta", stdin=data)
    assert (named.code, "(mooncake-delta)" in named.err) == (0, False)
    done = kvoffload("info", source, "--json", "--format", "mooncake", stdin=data)
    assert done.value["ideal_hit_ratio"] < 0.2
