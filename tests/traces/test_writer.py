"""The writer of traces."""

import gzip

import pytest

from kvoffload.traces import Request, Trace, write_trace
from kvoffload.traces.lines import zstd_module

pytestmark = pytest.mark.fast

REQUESTS = [
    Request(0, 1000, 7, (0, 2**64 - 1), "chat-1", parent="p", think=1, service=2, stop="s"),
    Request(1.5, 0, 0, (), ends=True, expect=3, type="t", turn=4),
]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_what_is_written_is_read_back(tmp_path, name):
    if name.endswith(".zst"):
        pytest.importorskip(zstd_module())
    path = tmp_path / name
    assert write_trace(REQUESTS, path) == 2
    assert list(Trace(path)) == REQUESTS


def test_the_same_requests_make_the_same_bytes(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_trace(REQUESTS, tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert len(gzip.decompress((tmp_path / "a.gz").read_bytes()).splitlines()) == 2
