"""What the commands print, to the letter: ``golden.txt``.

A command stands behind ``$``, its exit code behind it if that is not 0, and lines of standard error
behind ``!``. ``python -m tests.cli.test_golden`` writes the file anew, from the commands in it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION
from kvoffload.traces import Request, Workload, write_trace
from kvoffload.traces.oracle_general import write_oracle_general
from tests.advise.model_configs import FAMILIES

from .conftest import run_here
from .test_vocabulary import OWN

FILE = Path(__file__).with_name("golden.txt")
CASES = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", FILE.read_text(encoding="utf-8"), re.MULTILINE)


def prepare(folder: Path) -> None:
    """Write the traces that the commands read."""
    write_trace(Workload(60), folder / "t.jsonl")
    write_trace(Workload(40, seed=5), folder / "u.jsonl")
    write_trace([Request(0, 1000, 1, (1, 2)), Request(1, 1000, 1, (1,))], folder / "unsized.jsonl")
    write_trace([Request(0, 512, 1, (n,), "a") for n in range(3)], folder / "still.jsonl")
    write_trace(Workload(30, block_tokens=100), folder / "hundred.jsonl")
    write_trace([Request(0, 500, 1, (1,))], folder / "one.jsonl")
    longer = [Request(0, 1024 + n, 1, (1, 2, 100 + n)) for n in range(1, 30)]
    write_trace(longer, folder / "range.jsonl")
    write_trace([*Workload(30), Request(10**6, 1, 1, (1, 2, 3))], folder / "most.jsonl")
    seconds = (Request(n / 2, 1536, 200, (0, 1, n + 2)) for n in range(99))
    write_trace(seconds, folder / "seconds.jsonl")
    backwards = [0, 9000, 10, 20, 9000, 30]
    requests = [Request(time, 1, 1, (n,)) for n, time in enumerate(backwards)]
    write_trace(requests, folder / "backwards.jsonl")
    turns = [(0, "a", (1,)), (1, "b", (2,)), (9, "a", (1, 3)), (3_609, "a", (1, 3, 4))]
    requests = [Request(1000 * second, 0, 0, ids, name) for second, name, ids in turns]
    write_trace(requests, folder / "sessions.jsonl")
    rows = [
        {"ts": n, "messages": [{"role": "user", "content": f"At 1{n % 10}:{10 + n}. {'s' * 900}"}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lengths = {"model": "m", "in": 8, "out": 5, "api_time": 0.25, "stop": "tool_use"}
    turns = [lengths | {"t": t, "hash_ids": ids} for t, ids in ((0, [1, 2]), (2, [3, 4]))]
    agent = {"type": "subagent", "t": 1, "agent_id": "a", "requests": turns[1:]}
    last = lengths | {"t": 5, "in": 12, "hash_ids": [1, 2, 5]}
    agents = {"id": "s", "block_size": 4, "requests": [turns[0], agent, last]}
    (folder / "agents.json").write_text(json.dumps(agents))
    fresh = iter(range(3, 10**6))  # sessions whose rows list only what is new
    turns = [(320, {"hash_ids": [0, 1, 2]}), *[(178, {"hash_ids": [], "delay": 500.5})] * 6]
    deltas = [
        {"session_id": f"s{session}", "input_length": tokens, "output_length": 20}
        | ({"timestamp": 1000 * session} if not number else {})
        | more
        | {"hash_ids": [*more["hash_ids"], *[next(fresh) for _ in range(2 + (number > 0))]]}
        for session in range(20)
        for number, (tokens, more) in enumerate(turns)
    ]
    (folder / "deltas.jsonl").write_text("\n".join(map(json.dumps, deltas)))
    (folder / "bad.jsonl").write_bytes(b"bad\n" + (folder / "t.jsonl").read_bytes())
    write_trace([Request(0, 0, 1, ())], folder / "noblocks.jsonl")
    picture = {"type": "image_url", "image_url": {"url": "https://x.org/" + "p" * 40}}
    messages = [{"role": "user", "content": [picture, picture, {"type": "note"}]}]
    row = {"created": 5, "messages": messages, "system_prompt": "secret", "secret\n": "x" * 300}
    (folder / "pictures.jsonl").write_text(json.dumps(row))
    (folder / "wrong.jsonl").write_text(
        f'{json.dumps(row)}\n{{"messages": ["secret"]}}\n{{"secret\n'
    )
    (folder / "table.csv").write_text('at;the prompt;tokens\n;"secret\n\n""text""";4\n')
    write_trace([Request(2**42, 1, 1, (1,))], folder / "late.jsonl")
    with (folder / "o.oracleGeneral").open("wb") as file:
        write_oracle_general([Request(0, 0, 0, (1, 2)), Request(0, 0, 0, (1,))], file)
    (folder / "lmcache.jsonl").write_text(
        '{"timestamp":0,"chunk_size":256,"seq_len":600,"chunk_hashes":["0xa1","0xb2"]}'
    )
    (folder / "bailian.jsonl").write_text(
        '{"timestamp":0,"chat_id":1,"input_length":20,"output_length":1,"hash_ids":[1,2]}'
    )
    (folder / "hashes.txt").write_text("00c0ffee 0badcafe\n00c0ffee\n")
    (folder / "mine.py").write_text(OWN)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "package").mkdir()
    (folder / "package" / "policies.py").write_text("from mine import Fifo\n")
    (folder / "package" / "broken.py").write_text("1 / 0")
    shutil.copy(FAMILIES / "llama4.json", folder)
    row = {"policy": "lru", "capacity_given": "5%", "hit_ratio": 0.5, "stored": 100}
    timed = {"policy": "arc", "capacity_given": "5%", "ttft_p95": 2.0}
    results = {
        "before": [row, timed],
        "now": [row | {"hit_ratio": 0.525, "stored": 90}, timed | {"ttft_p95": 1.5}],
        "alone": [row | {"capacity_given": "9%"}],
        "both": [row, row | {"capacity_given": "9%"}],
    }
    for name, found in results.items():
        (folder / f"{name}.json").write_text(json.dumps({"results": found}))


def printed(line: str) -> str:
    """Return what the file has for a command."""
    done = run_here(*shlex.split(line))
    lines = [f"[{done.code}]"] if done.code else []
    lines += [one.rstrip() for one in done.out.splitlines()]
    lines += [f"! {one}" for one in done.err.splitlines()]
    return "".join(f"{one}\n" for one in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("golden")
    prepare(path)
    yield path
    for module in ("mine", "package", "package.policies"):
        sys.modules.pop(module, None)


@pytest.mark.thorough
@pytest.mark.parametrize(("line", "wanted"), CASES, ids=[line for line, _ in CASES])
def test_it_prints_what_it_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, wanted: str
) -> None:
    if line.startswith("demo ") and IMPLEMENTATION == "python":
        pytest.skip("a watch needs the extensions")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert printed(line) == wanted


if __name__ == "__main__":
    import tempfile

    os.environ.pop("COLUMNS", None)
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        os.chdir(name)
        text = "".join(f"$ {line}\n{printed(line)}" for line, _ in CASES)
    FILE.write_text(text, encoding="utf-8")
