"""``kvoffload diff`` sets rows of one configuration side by side."""

import json

import pytest


def row(**more):
    return {"policy": "lru", "capacity_given": "5%", "hit_ratio": 0.5, "stored": 100, **more}


@pytest.fixture
def files(tmp_path):
    def write(name, *rows):
        path = tmp_path / name
        path.write_text(json.dumps({"results": rows}))
        return path

    return write


def test_an_output_of_0_4_is_read(kvoffload, files):
    old = {"engines": 2, "router": "session", "policy": "lru", "capacity": "5%"}
    old |= {"host_stored": 7, "ttft": {"p95": 3.0}}
    new = row(engines=2, router="session", stored=8, ttft_p95=3.0)
    done = kvoffload("diff", files("old.json", old), files("new.json", new))
    assert "8 (+1)" in done.out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"results": 3}',
        '{"results": [{}]}',
        '{"results": [{"policy": 3}]}',
        "[" * 9999,
    ],
)
def test_anything_else_is_refused_in_one_line(kvoffload, files, tmp_path, text):
    (tmp_path / "wrong.json").write_text(text)
    done = kvoffload("diff", files("right.json", row()), tmp_path / "wrong.json")
    assert done.code == 2
    assert "must be the output of kvoffload replay, sweep or fleet --json" in done.error
