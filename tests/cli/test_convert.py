"""`kvoffload convert`, and the other formats in the commands that read a trace."""

import json
import pickle
import re

import pytest

from kvoffload.traces import Request, Trace, Workload, write_trace
from tests.isolated.scripts import run_python

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


DELTAS = [
    {
        "session_id": "s",
        "timestamp": 0,
        "input_length": 128,
        "output_length": 9,
        "hash_ids": [1, 2],
    },
    {"session_id": "s", "delay": 500, "input_length": 114, "output_length": 9, "hash_ids": [3, 4]},
]


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [None, DELTAS], ids=["chats", "deltas"])
def test_standard_input_is_read_as_a_file_of_the_same_bytes(kvoffload, chats, rows):
    if rows is not None:
        chats.write_text("\n".join(map(json.dumps, rows)))
    names = ("requests", "blocks", "unique_blocks", "block_tokens", "unchained_ids")
    for command, *options in (
        ("info", "--json"),
        ("convert",),
        ("advise", "--capacity", "50", "--kv-bytes-per-token", "1KiB", "--json"),
        ("sweep", "--capacity", "50", "--policy", "lru", "--csv", "-", "--jobs", "1"),
        ("fleet", "--capacity", "50", "--policy", "lru", "--engines", "2", "--csv", "-"),
    ):
        options += [] if rows else ["--salt", "x"]
        whole = kvoffload(command, chats, *options)
        piped = kvoffload(command, "-", *options, stdin=chats.read_bytes())
        assert (piped.code, piped.err) == (0, whole.err)
        if "--json" in options:
            assert [piped.value[name] for name in names] == [whole.value[name] for name in names]
        else:
            assert piped.out == whole.out
        assert "secret" not in whole.out + whole.err


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


IMPATIENT = """
import sys
from kvoffload.__main__ import main
from kvoffload.cli import _terminal
_terminal.LINE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "stdin"),
    [("info", True), ("replay", False), ("advise --kv-bytes-per-token=1KiB --policy=lru", False)],
)
def test_a_log_shows_progress_while_it_is_read(tmp_path, command, stdin):
    path = tmp_path / "chats.jsonl"
    rows = ({"ts": 999 - number, "prompt": f"{number} {'x' * 99}"} for number in range(999))
    path.write_text("\n".join(map(json.dumps, rows)))
    shows = {(): [256, 512, 768]} | ({("--quiet",): []} if stdin else {})
    for options, wanted in shows.items():
        arguments = [*command.split(), "-" if stdin else path, *options]
        given = path.read_text() if stdin else ""
        done = run_python("-c", IMPATIENT, *arguments, input=given)
        assert done.returncode == 0
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
