"""Recording: the manager behaves as before, the trace replays, no error reaches the engine."""

import contextlib
import copy
import gc
import gzip
import importlib
import json
import logging
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from kvoffload import CPUOffloadingManager, Hints, OffloadingManager
from kvoffload.replay import Configuration, replay
from kvoffload.traces import Trace, TraceError, TraceRecorder, Workload, request_log
from tests.blocks import METHODS
from tests.observation import attempt, observe
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough

HASHES = [bytes([n]) * 32 for n in range(1, 9)]


@pytest.fixture(params=[".zst", ".gz"])
def path(request, tmp_path):
    if request.param == ".zst":
        pytest.importorskip(request_log.zstd_module())
    return tmp_path / f"trace.jsonl{request.param}"


def recorded(path):
    return [request.hash_ids for request in Trace(path)]


def rows(path):
    """Read the rows as they are written."""
    module = gzip if path.suffix == ".gz" else importlib.import_module(request_log.zstd_module())
    with module.open(path) as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("policy", ["lru", "arc", "lfu"])
def test_a_recorded_trace_replays_to_the_same_counters(path, policy):
    workload = Workload(800, seed=5)
    manager = CPUOffloadingManager(512, 50, policy)
    configuration = Configuration(policy=policy, host=50)
    with TraceRecorder(manager, path) as recorder:
        original = replay(workload, configuration, manager=recorder)
    assert recorder.log.dropped_requests == 0
    again = replay(Trace(path), configuration)
    assert replace(again, tokens=original.tokens) == original
    assert original.refused > 0
    assert original.evicted > 0


FORMS = [None, tuple, iter, lambda hashes: (one for one in hashes), dict.fromkeys]
REFUSED = [5, b"abc", "abc", [b""], ["text"], [bytearray(b"b"), b"a"], [b"a", 3]]
SAID = {
    None: (None, False),
    Hints(): (None, False),
    Hints(source="somebody"): (None, False),
    Hints(ends=True): (None, True),
    Hints(expect_s=2.5): (2500, False),
    Hints(expect_s=3, ends=True, source="somebody"): (3000, True),
    Hints(expect_s=1.2345): (1234, False),
    Hints(expect_s=1e-9): (1, False),
    Hints(expect_s=1e308): (2**53, False),
}
"""Hints, and what a row has of them: `expect` and `ends`."""


@pytest.mark.parametrize("block_tokens", [None, 7])
def test_a_recorder_does_what_its_manager_does_and_each_lookup_is_a_row(path, seed, block_tokens):
    dice = random.Random(seed)
    managers = [CPUOffloadingManager(48, 9, enable_events=True) for _ in range(2)]
    wanted, requests, now = [], [], time.monotonic_ns
    earliest = now()
    with TraceRecorder(managers[0], path, block_tokens=block_tokens) as recorder:
        both, latest = (recorder, managers[1]), now()

        def same(of, method, *arguments, form=None):
            before = now()
            one, other = (attempt(each, method, *arguments, form=form) for each in of)
            assert one == other, (method, arguments)
            return one[0] == "returned", (before - latest, now() - earliest)

        for _ in range(600):
            batch, hints = dice.sample(HASHES, dice.randint(0, 8)), dice.choice([*SAID])
            kept = tuple(batch)
            call = dice.choice(["lookup", "part", "begin", "finish", "wrong", *METHODS])
            if call in METHODS:
                returned, when = same(both, call, batch, form=dice.choice(FORMS))
                batch.clear()  # a recorder keeps nothing of a caller's list
                if call == "lookup" and returned:
                    wanted.append((kept, None, when))
            elif call == "begin":
                pair = [each.begin(batch, hints=hints) for each in both]
                requests.append((pair, kept, hints))
            elif call == "part" and requests:
                pair, kept, hints = dice.choice(requests)
                first = dice.randint(0, len(kept))
                returned, when = same(pair, "lookup", first)
                if returned:
                    wanted.append((kept[first:], hints, when))
            elif call == "finish" and requests:
                for request in dice.choice(requests)[0]:
                    request.finish(hints=Hints(ends=True))  # too late for the row
            elif call == "wrong":
                odd = dice.choice(REFUSED)
                returned, _ = same(both, "lookup", odd, form=iter if odd == [b"a", 3] else None)
                assert not returned
                same(both, "begin", odd)
                for more in ({"hints": 5}, {"now": "now"}, {"now": float("nan"), "hints": Hints()}):
                    same([partial(each.begin, HASHES, **more) for each in both], "__call__")
                same(both, "take_events")
            assert [HASHES[0] in each for each in both].count(True) != 1
        assert observe(managers[0]) == observe(managers[1])
        assert (recorder.stats(), len(recorder)) == (managers[1].stats(), len(managers[1]))
        assert (recorder.block_size, recorder.policy) == (48, managers[0].policy)
    recorder.close()
    assert recorder.lookup(HASHES) == managers[1].lookup(HASHES), "after the end, too"
    ids, tokens = {}, block_tokens or 48
    for row, (hashes, hints, (before, after)) in zip(rows(path), wanted, strict=True):
        assert [
            ids.setdefault(key, one) for key, one in zip(hashes, row["hash_ids"], strict=True)
        ] == row["hash_ids"]
        assert row["input_length"] == tokens * len(hashes)
        assert (row.get("expect"), row.get("ends", False)) == SAID[hints]
        assert before // 10**6 <= row["timestamp"] <= after // 10**6
        named = {"timestamp", "input_length", "output_length", "hash_ids", "expect", "ends"}
        assert row.keys() <= named
    assert len(set(ids.values())) == len(ids) == 8
    assert recorder.log.dropped_requests == 0


def test_a_file_that_is_there_is_kept_as_the_previous_one_and_ids_are_salted_anew(path):
    for hashes in (HASHES[:7], HASHES):
        with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
            recorder.lookup(hashes)
    (previous,), (ids,) = recorded(recorder.log.previous_path), recorded(path)
    assert (len(previous), len(ids)) == (7, 8)
    assert set(ids).isdisjoint(previous)
    assert all(len(str(hash_id)) == 16 for hash_id in ids), "they hold nothing of the hash"
    assert recorder.log.previous_path.name.startswith("trace-previous.jsonl.")


def bytes_on_disk(folder):
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
            total += file.stat().st_size
    return total


def test_the_disk_is_bounded_and_the_latest_requests_stay(path, monkeypatch):
    monkeypatch.setattr(request_log, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(request_log, "FLUSH_SECONDS", 0.0)
    hashes = [os.urandom(32) for _ in range(60_000)]
    with TraceRecorder(CPUOffloadingManager(16, 9), path, max_bytes=2**16) as recorder:
        for start in range(0, len(hashes), 100):
            recorder.lookup(hashes[start : start + 100])
            time.sleep(0.0005)
            assert bytes_on_disk(path.parent) <= 2**16
    assert recorder.log.dropped_requests == 0
    previous, present = recorded(recorder.log.previous_path), recorded(path)
    assert len(list(path.parent.iterdir())) == 2
    ids = list(chain.from_iterable(previous + present))
    assert len(ids) == len(set(ids)) > 2000
    last = list(Trace(path))[-1].timestamp
    assert last >= list(Trace(recorder.log.previous_path))[-1].timestamp


@pytest.mark.parametrize(
    ("hashes", "hints", "waiting_blocks", "kept"),
    [(HASHES, None, 48, 2), ([], None, 48, 3), (HASHES, Hints(ends=True), 50, 2)],
    ids=["some", "no blocks", "a word of hints"],
)
def test_memory_is_bounded_by_dropping_requests(
    path, monkeypatch, caplog, hashes, hints, waiting_blocks, kept
):
    monkeypatch.setattr(request_log, "WAITING_BLOCKS", waiting_blocks)
    monkeypatch.setattr(request_log, "POLL_SECONDS", 100)
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        for _ in range(50):
            recorder.begin(hashes, hints=hints).lookup()
        assert recorder.log.dropped_requests == 50 - kept
        assert recorder.log._added == waiting_blocks  # not one more would fit
        recorder.log._call.set()
        wait_until(lambda: recorder.log._taken == waiting_blocks)
    assert [len(ids) for ids in recorded(path)] == [len(hashes)] * kept
    messages = [record.message for record in caplog.records]
    assert messages == [
        f"{path}: requests come faster than they can be recorded; some are left out"
    ]


@pytest.mark.parametrize("is_first", [True, False], ids=["no frame", "one frame"])
def test_a_limit_on_the_size_of_files_stops_the_recording_and_says_so(path, is_first):
    """The part written before is a trace; if it is empty, reading says so."""
    pytest.importorskip("resource", reason="needs setrlimit")
    code = """
import logging, os, resource, sys, time
from kvoffload import CPUOffloadingManager
from kvoffload.traces import TraceRecorder, request_log
logging.basicConfig(stream=sys.stdout, format="%(message)s")
request_log.FLUSH_SECONDS = 0.0
recorder = TraceRecorder(CPUOffloadingManager(16, 9), sys.argv[1])
if sys.argv[2] == "False":
    recorder.lookup([b"before"])
    while not os.path.getsize(sys.argv[1]):
        time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
recorder.lookup([os.urandom(32) for _ in range(5_000)])
recorder.close()
assert recorder.lookup([b"after"]) == 0
"""
    command = [sys.executable, "-c", code, str(path), str(is_first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path}: recording stopped: [Errno 27] File too large\n"
    if is_first:
        with pytest.raises(TraceError, match="must hold at least one request, got an empty file"):
            recorded(path)
    else:
        assert [len(ids) for ids in recorded(path)] == [1]


def test_a_file_that_cannot_be_exchanged_stops_the_recording(path, monkeypatch, caplog):
    monkeypatch.setattr(request_log, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(request_log, "POLL_SECONDS", 0.001)
    real = os.open

    def no_new_file(name, *arguments):
        if name == path:
            raise OSError(24, "Too many open files", os.fspath(path))
        return real(name, *arguments)

    with TraceRecorder(CPUOffloadingManager(16, 9), path, max_bytes=2**16) as recorder:
        monkeypatch.setattr(request_log.os, "open", no_new_file)
        before = recorder.log._file
        deadline = time.monotonic() + 300
        while recorder.log.recording:
            recorder.lookup([os.urandom(32) for _ in range(100)])
            assert time.monotonic() < deadline
        recorder.log._thread.join()
        with pytest.raises(OSError, match="Bad file descriptor"):  # closed, and only once
            os.fstat(before)
    (record,) = caplog.records
    assert "recording stopped: [Errno 24] Too many open files" in record.message
    assert len(recorded(recorder.log.previous_path)) > 10


def test_a_request_that_is_too_long_for_the_files_is_left_out_and_reported(path, caplog):
    with TraceRecorder(CPUOffloadingManager(16, 9), path, max_bytes=2**16) as recorder:
        recorder.lookup(HASHES)
        recorder.lookup([os.urandom(32) for _ in range(20_000)])
        recorder.lookup(HASHES[:3])
    assert [len(ids) for ids in recorded(path)] == [8, 3]
    assert recorder.log.dropped_requests == 1
    (record,) = caplog.records
    assert record.message == (
        f"{path}: a request is too long for files of 32768 bytes; some are left out"
    )


class Unhashable:
    __hash__ = None


class AnyManager(OffloadingManager):
    """A manager that takes anything, and has neither length nor block size."""

    def lookup(self, hashes):
        return len(list(hashes))

    def prepare_load(self, hashes):
        raise NotImplementedError

    def prepare_store(self, hashes):
        raise NotImplementedError


def test_a_key_without_a_hash_stops_the_recording_and_not_the_engine(path, caplog):
    path = path.with_name(f"esc\x1b[31m\n{path.name}")
    with TraceRecorder(AnyManager(), path) as recorder:
        assert recorder.lookup(HASHES) == 8
        assert recorder.lookup([Unhashable()]) == 1
        assert not recorder.log.recording
        assert recorder.lookup([Unhashable()]) == 1
    assert [len(ids) for ids in recorded(path)] == [8]
    (record,) = caplog.records
    assert "recording stopped: " in record.message
    assert "esc\\x1b[31m\\n" in record.message, "a name cannot move the cursor"
    assert record.message.isprintable()


def test_a_recorder_is_true_where_its_manager_is(path):
    with TraceRecorder(AnyManager(), path) as recorder:
        assert bool(recorder) is bool(recorder.manager) is True
        with pytest.raises(TypeError):
            len(recorder)
        assert recorder.log._block_tokens == 1
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        assert bool(recorder) is bool(recorder.manager)


@pytest.mark.parametrize("copy", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_recorder_is_neither_copied_nor_pickled(path, copy):
    with (
        TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder,
        pytest.raises(TypeError, match="a TraceRecorder cannot be copied or pickled"),
    ):
        copy(recorder)


def test_threads_may_record_at_once(path):
    """Over a manager whose calls are atomic; each request is recorded whole."""
    manager = CPUOffloadingManager(16, 9)
    batches = [[os.urandom(32) for _ in range(size)] for size in range(1, 9)]

    def ask(batch):
        for _ in range(200):
            recorder.lookup(batch)

    with TraceRecorder(manager, path) as recorder:
        threads = [threading.Thread(target=ask, args=(batch,)) for batch in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    requests = recorded(path)
    assert len(requests) + recorder.log.dropped_requests == 1600
    assert len(set(requests)) == 8
    assert sum(len(set(ids)) for ids in set(requests)) == 36


def test_a_killed_process_leaves_a_readable_file(path):
    code = """
import os, sys
from kvoffload import CPUOffloadingManager
from kvoffload.traces import TraceRecorder, request_log
request_log.FLUSH_SECONDS = 0.0
recorder = TraceRecorder(CPUOffloadingManager(16, 9), sys.argv[1])
for number in range(10**9):
    recorder.lookup([os.urandom(32) for _ in range(20)])
"""
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as process:
        try:
            wait_until(lambda: path.exists() and path.stat().st_size > 20_000)
        finally:
            process.send_signal(signal.SIGKILL)
    assert len(recorded(path)) > 100


def test_requests_that_follow_one_another_share_a_frame_and_the_last_is_written_soon(
    path, monkeypatch
):
    monkeypatch.setattr(request_log, "FLUSH_SECONDS", 10_000)
    monkeypatch.setattr(request_log, "POLL_SECONDS", 0.001)
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(request_log, "IDLE_SECONDS", 10_000)
            for _ in range(5):
                recorder.lookup(HASHES)
                time.sleep(0.01)
            assert not path.stat().st_size
        wait_until(lambda: path.stat().st_size)
        assert len(recorded(path)) == 5


def test_what_waits_is_written_when_the_interpreter_ends(path):
    code = """
import sys
from kvoffload import CPUOffloadingManager
from kvoffload.traces import TraceRecorder
TraceRecorder(CPUOffloadingManager(16, 9), sys.argv[1]).lookup([b"a", b"b"])
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(path)], check=True)
    assert [len(ids) for ids in recorded(path)] == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_record(path):
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside a thread
            child = os.fork()
        if child == 0:
            recorder.lookup(HASHES)
            recorder.close()
            os._exit(int(recorder.log.recording))
        assert os.waitpid(child, 0)[1] == 0
        recorder.lookup(HASHES[:1])
    assert [len(ids) for ids in recorded(path)] == [1]


ANY, INTEGER = CPUOffloadingManager(16, 9), "must be an integer, got "


@pytest.mark.parametrize(
    ("manager", "name", "options", "error", "message"),
    [
        (ANY, "t.jsonl", {}, ValueError, r"path must end in \.zst or \.gz, got 't\.jsonl'"),
        (ANY, "none/t.gz", {}, FileNotFoundError, "No such file or directory"),
        (ANY, "t.gz", {"max_bytes": 65535}, ValueError, "max_bytes must be >= 65536, got 65535"),
        (ANY, "t.gz", {"block_tokens": 0}, ValueError, "block_tokens must be >= 1, got 0"),
        (ANY, "t.gz", {"block_tokens": 2**31}, ValueError, "block_tokens must be <= 2147483647,"),
        (ANY, "t.gz", {"block_tokens": 1.5}, TypeError, f"block_tokens {INTEGER}"),
        (ANY, "t.gz", {"block_tokens": True}, TypeError, f"block_tokens {INTEGER}"),
        (ANY, "t.gz", {"max_bytes": "16"}, TypeError, f"max_bytes {INTEGER}"),
        (None, "t.gz", {}, TypeError, "manager must be an OffloadingManager, got None"),
        (CPUOffloadingManager, "t.gz", {}, TypeError, "manager must be an OffloadingManager, got "),
    ],
)
def test_refuses(tmp_path, manager, name, options, error, message):
    with pytest.raises(error, match=message):
        TraceRecorder(manager, tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_whose_construction_failed_says_so():
    class Forgetful(TraceRecorder):
        def __init__(self):
            pass

    calls = [(name, [[b"a"]]) for name in METHODS] + [("__contains__", [b"a"])]
    calls += [(name, []) for name in ("take_events", "close", "stats", "__len__", "__bool__")]
    for recorder in (TraceRecorder.__new__(TraceRecorder), Forgetful()):
        for method, arguments in calls:
            with pytest.raises(RuntimeError, match="the recorder is not initialised"):
                getattr(recorder, method)(*arguments)


def test_a_recording_that_is_cut_off_ends_with_its_last_whole_line(path, monkeypatch):
    monkeypatch.setattr(request_log, "FRAME_BYTES", 1000)
    monkeypatch.setattr(request_log, "BATCH_BYTES", 200)
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        for _ in range(60):
            recorder.lookup([os.urandom(32) for _ in range(8)])
    whole, expected = path.read_bytes(), recorded(path)
    assert len(expected) == 60
    readable = 0
    for length in range(len(whole) - 900, len(whole) + 1):  # a frame begins among them
        path.write_bytes(whole[:length])
        found = recorded(path)
        assert found == expected[: len(found)]
        assert len(found) >= readable
        readable = len(found)
    path.write_bytes(whole + b"garbage")
    with pytest.raises(TraceError, match="must be readable to its end"):
        recorded(path)


def open_files():
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("counts open files in /proc")
    return {file.readlink() for file in folder.iterdir() if file.is_symlink()}


@pytest.mark.parametrize("kept", ["nothing", "itself", "its lookup"])
def test_a_recorder_that_is_dropped_writes_what_waits_and_leaves_no_thread_and_no_file(path, kept):
    recorder = TraceRecorder(CPUOffloadingManager(16, 9), path)
    recorder.lookup(HASHES)
    thread, log = recorder.log._thread, weakref.ref(recorder.log)
    assert path in open_files()
    if kept == "itself":
        recorder.myself = recorder
    lookup = recorder.lookup if kept == "its lookup" else None
    del recorder
    gc.collect()
    if lookup is not None:  # it goes on
        lookup(HASHES)
    del lookup
    thread.join(300)
    assert not thread.is_alive()
    assert path not in open_files()
    assert [len(ids) for ids in recorded(path)] == [8] * (1 + (kept == "its lookup"))
    gc.collect()
    assert log() is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_pipe_is_refused_at_once(path, is_link):
    pipe = path.with_name("pipe") if is_link else path
    os.mkfifo(pipe)
    if is_link:
        path.symlink_to("pipe")
    threads = threading.active_count()
    with pytest.raises(ValueError, match="path must be a file or a device, got a pipe: "):
        TraceRecorder(CPUOffloadingManager(16, 9), path)
    assert threading.active_count() == threads
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev/fd")  # noqa: PTH110
def test_a_stream_of_the_process_is_refused(path):
    """The recorder must not rename the file behind it."""
    other = path.with_name("output")
    other.write_bytes(b"what was printed")
    with other.open("ab") as file:
        path.symlink_to(f"/dev/fd/{file.fileno()}")
        with pytest.raises(ValueError, match="path must be a file or a device, got a stream: "):
            TraceRecorder(CPUOffloadingManager(16, 9), path)
    assert other.read_bytes() == b"what was printed"


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_a_link_stays_and_the_file_that_it_names_is_recorded_to_with_its_mode(path):
    folder = path.with_name("far")
    folder.mkdir()
    real = folder / path.name
    real.write_bytes(b"old")
    real.chmod(0o640)
    path.symlink_to(real)
    with TraceRecorder(CPUOffloadingManager(16, 9), path) as recorder:
        recorder.lookup(HASHES)
    assert path.readlink() == real
    assert [len(ids) for ids in recorded(path)] == [8]
    assert recorder.log.previous_path.read_bytes() == b"old"
    assert recorder.log.previous_path.parent == folder
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o640}
    assert list(path.parent.iterdir()) in ([folder, path], [path, folder])


def handle(monkeypatch, emit):
    """Have a handler of the recorder's messages that does not catch exceptions."""
    handler = logging.Handler()
    handler.emit = emit
    logger = logging.getLogger("kvoffload.traces.request_log")
    monkeypatch.setattr(logger, "handlers", [handler])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_close_may_be_called_from_a_handler_of_the_log(path, monkeypatch):
    monkeypatch.setattr(request_log, "FLUSH_SECONDS", 0.0)
    path.symlink_to("/dev/full")
    recorder = TraceRecorder(CPUOffloadingManager(16, 9), path)
    seen = []

    def close(record):
        seen.append(record.getMessage())
        try:
            recorder.close()
        except RuntimeError as error:
            seen.append(error)

    handle(monkeypatch, close)
    recorder.lookup(HASHES)
    wait_until(lambda: not recorder.log.recording)
    assert [recorder.lookup(HASHES) for _ in range(5)] == [0] * 5
    recorder.close()
    assert seen == [f"{path}: recording stopped: [Errno 28] No space left on device"]
    assert not recorder.log._thread.is_alive()


def test_a_handler_of_the_log_that_raises_reaches_nobody(path, monkeypatch):
    monkeypatch.setattr(request_log, "WAITING_BLOCKS", 50)
    seen = []

    def fail(record):
        seen.append(threading.current_thread().name)
        raise RuntimeError("the handler is broken")

    handle(monkeypatch, fail)
    with TraceRecorder(AnyManager(), path) as recorder:
        for _ in range(50):
            recorder.lookup(HASHES * 5)  # too many at a time
        recorder.lookup([Unhashable()])
        assert recorder.lookup(HASHES) == 8
    assert seen == ["kvoffload-recorder"] * 2, "not the engine's"
