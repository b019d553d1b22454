"""The script that makes a trace of LMCache's agent sessions, on sessions of the same form."""

import json
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)

from examples.traces import lmcache_agents  # noqa: E402
from kvoffload.traces import Request, Trace  # noqa: E402

FIRST, SECOND = "0123456789abcdef" * 4, "ä" * 64


def line(milliseconds, text, answer="yes!"):
    row = {"timestamp": 1_760_000_000_000_000 + 1000 * milliseconds, "session_id": "s"}
    return json.dumps({**row, "input": text, "output": answer}) + "\n"


def convert(source, output, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lmcache_agents.py", str(source), str(output)])
    lmcache_agents.main()


def test_sessions_become_requests_in_the_order_of_time(tmp_path, monkeypatch, capsys):
    for folder in ("magagent", "miniswe", "taubench"):
        (tmp_path / folder).mkdir()
    later = line(1500, FIRST + SECOND + "rest")
    (tmp_path / "magagent" / "a.jsonl").write_text(later + line(0, FIRST) + line(9, "short"))
    (tmp_path / "miniswe" / "b.jsonl").write_text(line(0, SECOND + SECOND) + line(20, FIRST))
    (tmp_path / "taubench" / "c.jsonl").write_text(line(0, FIRST))
    output = tmp_path / "trace.jsonl.gz"
    convert(tmp_path, output, monkeypatch)
    assert capsys.readouterr().out == "4 requests\n"
    draw = random.Random(5)
    starts = [draw.uniform(0, 600_000) for _ in range(2)]
    assert starts[0] + 1500 < starts[1]  # so that these ids are those
    assert list(Trace(output)) == [
        Request(int(starts[0]), 16, 1, (0,), "a.jsonl"),
        Request(int(starts[0] + 1500), 33, 1, (0, 1), "a.jsonl"),
        Request(int(starts[1]), 32, 1, (2, 3), "b.jsonl"),
        Request(int(starts[1] + 20), 16, 1, (0,), "b.jsonl"),
    ]


def test_a_folder_without_sessions_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        convert(tmp_path, tmp_path / "trace.jsonl", monkeypatch)
    assert "source must hold magagent and miniswe, got " in capsys.readouterr().err
    assert not (tmp_path / "trace.jsonl").exists()
