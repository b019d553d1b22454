"""Several files as one trace, one model of a log, and the size of a log's chunks."""

import json
import os

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.traces import (
    MergedTrace,
    Request,
    Survey,
    Trace,
    TraceError,
    TraceRecorder,
    Workload,
    write_trace,
)
from kvoffload.traces.merged import trace_files

pytestmark = pytest.mark.fast


def lookup(seconds, hashes=("0a",), model="m", **more):
    row = {"timestamp": seconds, "chunk_size": 4, "seq_len": 4 * len(hashes), "model_name": model}
    return json.dumps(row | {"chunk_hashes": list(hashes)} | more) + "\n"


def times(trace):
    return [request.timestamp for request in trace]


def test_files_with_times_of_a_clock_are_placed_by_it_and_formats_are_named(tmp_path):
    (tmp_path / "1.jsonl").write_text(lookup(1000.5) + lookup(1002.5))
    (tmp_path / "2.jsonl").write_text(lookup(1000) + lookup(1001) + lookup(1004))
    merged = MergedTrace(trace_files([str(tmp_path / "*.jsonl")]))
    assert times(merged) == [0, 500, 1000, 2500, 4000]
    assert merged.block_tokens == 4
    write_trace([Request(0, 1, 1, (1,))], tmp_path / "3.jsonl")
    merged = MergedTrace(trace_files([str(tmp_path)]))
    assert merged.format is None
    assert len(times(merged)) == 6
    assert (merged.format, merged.block_tokens) == ("lmcache, mooncake", None)
    log = tmp_path / "4.jsonl"
    rows = [{"prompt": "x", "datetime": second} for second in (1_764_000_007, 1_764_000_009)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    merged = MergedTrace([str(log), str(tmp_path / "3.jsonl")])
    assert times(merged) == [1_764_000_007_000, 1_764_000_007_000, 1_764_000_009_000]
    alone = MergedTrace([str(log)])
    assert (len(times(alone)), len(alone.remarks)) == (2, 1)
    assert merged.remarks == [f"{log}: {one}" for one in alone.remarks]


def test_ids_that_number_the_blocks_of_a_file_are_no_other_files(tmp_path):
    paths, alone = [], []
    for seed in (0, 1):
        paths.append(str(tmp_path / f"{seed}.jsonl"))
        write_trace(Workload(200, seed=seed), paths[-1])
        alone.append(Survey.of(Trace(paths[-1])))
    apart, one = MergedTrace(paths), MergedTrace(paths, same_ids=True)
    survey = Survey.of(apart)
    assert survey.unique_blocks == sum(each.unique_blocks for each in alone)
    assert survey.ideal_hits == sum(each.ideal_hits for each in alone)
    assert apart.id_spaces == 2
    assert Survey.of(one).unique_blocks == max(each.unique_blocks for each in alone)
    assert one.id_spaces == 1
    assert [r.hash_ids for r in MergedTrace(paths[:1])] == [r.hash_ids for r in Trace(paths[0])]


def test_ids_up_to_the_largest_stay_apart_and_valid(tmp_path):
    most = 2**64
    ids = (0, 1, most // 3 - 1, most // 3, most // 3 + 1, most // 2, most - 2, most - 1)
    for name in "abc":
        write_trace([Request(0, 1, 1, ids)] * 2, tmp_path / f"{name}.jsonl")
    requests = list(MergedTrace(trace_files([str(tmp_path)])))
    assert len({hash_id for request in requests for hash_id in request.hash_ids}) == 3 * len(ids)
    assert all(0 <= hash_id < most for request in requests for hash_id in request.hash_ids)


def test_hashes_are_one_space_by_nature(tmp_path):
    """LMCache's log, hexadecimal text, and the two files that a recorder leaves."""
    (tmp_path / "a.log-20261120").write_text(lookup(1, ("0a", "0b")))
    (tmp_path / "a.log.1").write_text(lookup(2, ("0a", "0c")))
    logs = MergedTrace(trace_files([str(tmp_path)]))  # rotated
    assert Survey.of(logs).unique_blocks == 3
    assert logs.id_spaces == 1
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("00c0ffee 0badcafe\n")
    hexadecimal = MergedTrace(trace_files([str(tmp_path / "*.txt")]))
    assert Survey.of(hexadecimal).unique_blocks == 2
    path = tmp_path / "recorded.jsonl.gz"
    with TraceRecorder(CPUOffloadingManager(16, 10), path, max_bytes=2**16) as recorder:
        for index in range(2500):  # more than one of the two files may hold
            recorder.lookup([b"shared", *(b"%d %d" % (index, k) for k in range(8))])
    assert recorder.log.previous_path.exists()
    recorded = MergedTrace([str(recorder.log.previous_path), str(path)])
    first = {request.hash_ids[0] for request in recorded}
    assert (len(first), recorded.id_spaces) == (1, 1)
    write_trace([Request(0, 1, 1, (1,))], tmp_path / "m.jsonl")
    end, start = os.pipe()
    os.write(start, (tmp_path / "a.txt").read_bytes())
    os.close(start)
    assert len(list(MergedTrace([f"/dev/fd/{end}", str(tmp_path / "m.jsonl")]))) == 2
    os.close(end)
    mixed = MergedTrace([str(tmp_path / "m.jsonl"), *hexadecimal.paths])
    assert Survey.of(mixed).unique_blocks == 3
    assert mixed.id_spaces == 2


def test_what_stands_for_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.md", "[x].jsonl"):
        (tmp_path / name).write_text("")
    inside = [str(tmp_path / name) for name in ("[x].jsonl", "a.jsonl", "b.jsonl")]
    assert trace_files([str(tmp_path)]) == inside
    assert trace_files([str(tmp_path / "[ab].jsonl")]) == inside[1:]
    assert trace_files([inside[0], "absent", "-"]) == [inside[0], "absent", "-"]  # no patterns
    (tmp_path / "empty").mkdir()
    rules = {"z*": "must match a file, got none", "empty": "a folder must hold a file that ends in"}
    for name, rule in rules.items():
        with pytest.raises(TraceError, match=rule):
            trace_files([str(tmp_path / name)])
    with pytest.raises(TraceError, match="must be at most 500 files, got 501"):
        MergedTrace(["x"] * 501)
    with pytest.raises(ValueError, match="paths must name a file"):
        MergedTrace([])


def test_a_fault_names_its_file_a_line_that_is_too_long_too(tmp_path):
    write_trace([Request(0, 1, 1, (1,))], tmp_path / "a.jsonl")
    write_trace([Request(1, 1, 1, (2,) * 300)], tmp_path / "b.jsonl")
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert len(list(MergedTrace(paths))) == 2
    with pytest.raises(TraceError, match=r"b\.jsonl:1: .*400"):
        list(MergedTrace(paths, max_line_bytes=400))
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(TraceError, match=r"b\.jsonl:1: must have the field timestamp"):
        list(MergedTrace(paths))


@pytest.mark.parametrize("empty", ["", "\n\n", lookup(3, model="b")])
def test_a_file_without_a_request_is_left_out_and_named(tmp_path, empty):
    paths = [str(tmp_path / f"{name}.jsonl") for name in range(3)]
    for path, text in zip(paths, (lookup(1), empty, lookup(2)), strict=True):
        (tmp_path / path).write_text(text)
    merged = MergedTrace(paths, model_name="m")
    assert times(merged) == [0, 1000]
    assert merged.remarks == [f"{paths[1]}: no request"]
    assert (merged.format, merged.block_tokens, merged.id_spaces) == ("lmcache", 4, 1)
    with pytest.raises(TraceError, match=r"1.jsonl:.*must hold at least one request"):
        list(MergedTrace([paths[1]] * 2, model_name="m"))
    write_trace([Request(0, 1, 1, (1,))], paths[0])
    merged = MergedTrace([paths[0], paths[0], paths[1]])
    assert len(times(merged)) == 2 + bool(empty.strip())
    assert merged.id_spaces == 3, "ids that number the blocks of a file"


def test_sessions_are_apart_where_ids_are(tmp_path):
    for name in "ab":
        rows = [Request(0, 1, 1, (7,), "1"), Request(0, 1, 1, (8,), parent="1")]
        write_trace(rows, tmp_path / f"{name}.gz")
    apart, one = (MergedTrace(trace_files([str(tmp_path)]), same_ids=same) for same in (0, 1))
    assert [r.session or r.parent for r in apart] == ["0:1", "0:1", "1:1", "1:1"]
    assert {(r.session, r.parent) for r in one} == {("1", None), (None, "1")}
