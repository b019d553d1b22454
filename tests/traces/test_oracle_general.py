"""Traces of libCacheSim: the records that are read, and those that are written."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.traces import (
    MergedTrace,
    Request,
    Trace,
    TraceError,
    oracle_general,
)
from kvoffload.traces.lines import zstd_module
from kvoffload.traces.merged import trace_files
from kvoffload.traces.oracle_general import is_named_oracle_general, write_oracle_general

pytestmark = pytest.mark.fast

HUGE = 2**64 - 1
ACCESSES = [(100, 5, 4096, 3), (101, HUGE, 1, -1), (103, 5, 2**32 - 1, -1), (103, 0, 7, -1)]
REQUESTS = [
    Request(0, 0, 0, (5,)),
    Request(1000, 0, 0, (HUGE,)),
    Request(3000, 0, 0, (5,)),
    Request(3000, 0, 0, (0,)),
]


def zst(data: bytes) -> bytes:
    return pytest.importorskip(zstd_module()).compress(data)


def packed(accesses) -> bytes:
    return b"".join(struct.pack("<IQIq", *access) for access in accesses)


def written(folder: Path, data: bytes, name: str = "w.oracleGeneral") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def records_of(requests) -> list[tuple[int, int, int, int]]:
    """Return the records that requests are written as."""
    stream = io.BytesIO()
    count = write_oracle_general(requests, stream)
    records = list(struct.iter_unpack("<IQIq", stream.getvalue()))
    assert len(records) == count
    return records


def naive_records(requests) -> list[tuple[int, int, int, int]]:
    """Return the same, looking ahead from each block."""
    accesses = [
        (int(request.timestamp // 1000), hash_id)
        for request in requests
        for hash_id in request.hash_ids
    ]
    ids = [hash_id for _, hash_id in accesses]
    return [
        (seconds, hash_id, 1, ids.index(hash_id, number) + 1 if hash_id in ids[number:] else -1)
        for number, (seconds, hash_id) in enumerate(accesses, start=1)
    ]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
def test_each_record_is_a_request_of_one_block(tmp_path, pack):
    trace = Trace(written(tmp_path, pack(packed(ACCESSES))))
    assert list(trace) == REQUESTS
    assert (trace.format, trace.has_hashes, trace.start) == ("oracle-general", True, None)
    assert (trace.block_tokens, trace.block_bytes) == (None, None)
    assert list(trace) == REQUESTS, "again"
    named = Trace(written(tmp_path, pack(packed(ACCESSES)), "w"), format="oracle-general")
    assert list(named) == REQUESTS


@pytest.mark.parametrize("first", [0x1F8B, 0xFEFF, 0xFFFE])
def test_times_that_look_like_the_start_of_another_file(tmp_path, first):
    time = int.from_bytes(first.to_bytes(2, "big"), "little")
    trace = Trace(written(tmp_path, packed([(time, 1, 1, -1)])))
    assert list(trace) == [Request(0, 0, 0, (1,))]
    trace = Trace(
        written(tmp_path, packed([(time, 1, 1, -1), (8, 2, 1, -1), (time + 2, 3, 1, -1)]))
    )
    assert [request.timestamp for request in trace] == [0, 0, 2000]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
def test_a_cut_off_record_is_named_by_its_offset_and_nothing_is_an_error(
    tmp_path, monkeypatch, pack, skip_bad
):
    monkeypatch.setattr(oracle_general, "_BATCH", 2)
    path = written(tmp_path, pack(packed(ACCESSES)[:-1]))
    requests = iter(Trace(path, skip_bad=skip_bad))
    assert [next(requests) for _ in range(3)] == REQUESTS[:3]
    with pytest.raises(TraceError) as caught:
        next(requests)
    assert str(caught.value) == f"{path}: a record must have 24 bytes, got 23 at byte 72"
    whole, none = (
        pack(packed(ACCESSES)),
        "a trace must hold at least one request, got an empty file",
    )
    cut = "must be readable to its end: the compressed data is cut off"
    for data, rule in ((pack(b""), none), *([] if pack is bytes else [(whole[:-3], cut)])):
        with pytest.raises(TraceError) as caught:
            list(Trace(written(tmp_path, data), skip_bad=skip_bad))
        assert str(caught.value) == f"{path}: {rule}"


def test_a_model_cannot_be_chosen(tmp_path):
    path = written(tmp_path, packed(ACCESSES))
    with pytest.raises(TraceError, match=r"log of prompts, or .*, got oracle-general"):
        list(Trace(path, model_name="m"))


def test_files_share_their_objects_and_lie_in_a_folder(tmp_path):
    written(tmp_path, packed(ACCESSES[:2]), "1.oracleGeneral")
    written(tmp_path, packed(ACCESSES[2:]), "2.oracleGeneral.bin")
    paths = trace_files([str(tmp_path)])
    assert len(paths) == 2
    trace = MergedTrace(paths)
    assert [request.hash_ids[0] for request in trace] == [5, 5, 0, HUGE]
    assert (trace.format, trace.id_spaces) == ("oracle-general", 1)


@pytest.mark.parametrize("timestamp", [-1, 1000 * 2**32, 1e18])
def test_times_that_a_record_cannot_hold_are_refused(timestamp):
    stream = io.BytesIO()
    with pytest.raises(
        OverflowError, match="timestamp must be >= 0 and below 2\\*\\*32 seconds, got"
    ):
        write_oracle_general([Request(0, 1, 1, (1,)), Request(timestamp, 1, 1, (1,))], stream)
    assert stream.getvalue() == b""
    assert records_of([Request(1000 * 2**32 - 1, 1, 1, (1,))]) == [(2**32 - 1, 1, 1, -1)]


@given(
    st.lists(
        st.builds(
            Request,
            st.integers(0, 1000 * 2**32 - 1) | st.floats(0, 1e6),
            st.just(0),
            st.just(0),
            st.lists(st.sampled_from([0, 1, 2, 2**63, HUGE]), max_size=4).map(tuple),
        ),
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_what_is_written_is_what_looking_ahead_finds_and_is_read_again(
    tmp_path_factory, requests, batch
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_general, "_BATCH", batch)
        records = records_of(requests)
        assert records == naive_records(requests)
        if records:
            path = written(tmp_path_factory.mktemp("written"), packed(records))
            ids = [hash_id for request in requests for hash_id in request.hash_ids]
            assert [request.hash_ids for request in Trace(path)] == [(each,) for each in ids]


def test_names_of_these_traces():
    ends = ("", ".bin", ".zst", ".bin.zst", ".gz")
    assert all(is_named_oracle_general(f"w.oracleGeneral{end}") for end in ends)
    others = ("w.oracleGeneral.jsonl", "oracleGeneral", "w.oracleGeneral/trace", "w.bin", "w.zst")
    assert not any(map(is_named_oracle_general, others))
