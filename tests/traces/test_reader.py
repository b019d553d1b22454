"""Trace files: those that are read, those that are refused, and the messages."""

import gzip
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvoffload import OffloadError
from kvoffload.traces import Request, Trace, TraceError
from kvoffload.traces.lines import Lines, zstd_module

GOOD = (
    b'{"timestamp":5,"input_length":1000,"output_length":7,"hash_ids":[0,3,18446744073709551615]}'
)
REQUEST = Request(5, 1000, 7, (0, 3, 2**64 - 1))


def zst(data: bytes) -> bytes:
    return pytest.importorskip(zstd_module()).compress(data)


def write(folder: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def fault(path: Path | str, **options: object) -> str:
    """Return the message of the error that reading a trace raises, without its file."""
    with pytest.raises(TraceError) as caught:
        list(Trace(path, **options))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path) + ":")
    return message[len(str(path)) + 1 :].strip()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("name", ["trace", "trace.jsonl"])
def test_reads_requests_whatever_the_name(tmp_path, pack, name):
    path = write(tmp_path, pack(GOOD + b"\n" + GOOD + b"\n") + pack(GOOD), name)  # two members
    assert list(Trace(path)) == [REQUEST] * 3


def test_is_lazy_and_leaves_nothing_open(tmp_path):
    trace = iter(Trace(write(tmp_path, GOOD + b"\nnot json\n")))
    assert next(trace) == REQUEST
    with pytest.raises(TraceError):
        next(trace)
    trace = iter(Trace(write(tmp_path, gzip.compress(GOOD + b"\n" + GOOD))))
    next(trace)
    trace.close()  # a file left open is a ResourceWarning, and warnings are errors


def row(**fields: object) -> bytes:
    whole = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]} | fields
    return json.dumps({name: value for name, value in whole.items() if value != "gone"}).encode()


@pytest.mark.parametrize("pack", [gzip.compress, zst], ids=["gz", "zst"])
def test_refuses_a_truncated_file_at_every_length(tmp_path, pack):
    whole = pack(b"\n".join([GOOD] * 50))
    for length in range(5, len(whole)):
        path = write(tmp_path, whole[:length])
        with pytest.raises(TraceError, match=r":\d+: must be readable to its end: .*cut off$"):
            list(Trace(path))


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, ".gz"), (zst, ".zst")])
def test_refuses_what_its_name_does_not_hold(tmp_path, pack, suffix):
    for start in (b"\x1f", GOOD):
        path = write(tmp_path, start, "trace" + suffix)
        assert "as its name says, got a file that starts with" in fault(path)


@pytest.mark.parametrize("pack", [gzip.compress, zst], ids=["gz", "zst"])
def test_skipping_bad_lines_does_not_skip_the_rest_of_a_file(tmp_path, pack):
    """What is lost is not a line, and nobody knows how much it is."""
    lines = b"".join(row(timestamp=i * 7919) + b"\n" for i in range(3000))
    whole = pack(lines)
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 8] = bytes(8)
    no_block = whole[:10] + b"\xff" * 9 + whole[19:]
    for data in (whole[: len(whole) // 2], whole[:-1], bytes(damaged), no_block):
        path = write(tmp_path, data)
        assert "must be readable to its end: " in fault(path, skip_bad=True)
    # a whole file of a log whose writer was killed: only a line is bad
    trace = Trace(write(tmp_path, pack(lines[:-20])), skip_bad=True)
    assert len(list(trace)) == 2999
    assert trace.bad_lines == 1


def test_refuses_what_cannot_be_opened(tmp_path):
    assert fault(tmp_path) == "must be a readable file: Is a directory"
    assert fault(tmp_path / "none") == "must be a readable file: No such file or directory"
    with pytest.raises(TraceError, match=r"a\\x00b: must be a readable file: "):
        list(Trace("a\0b"))


def test_refuses_a_file_without_permission(tmp_path):
    path = write(tmp_path, GOOD)
    path.chmod(0)
    try:
        path.open().close()
    except PermissionError:
        assert fault(path) == "must be a readable file: Permission denied"
    else:
        pytest.skip("this user may read every file")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
def test_refuses_an_overlong_line_and_goes_on_after_it(tmp_path, pack):
    path = write(tmp_path, pack(GOOD + b"\n" + b"[" * 5000 + b"\n" + GOOD))
    rule = "2: a line must be at most 1000 bytes long, got a longer one"
    assert fault(path, max_line_bytes=1000) == rule
    trace = Trace(path, skip_bad=True, max_line_bytes=1000)
    assert list(trace) == [REQUEST, REQUEST]
    assert trace.bad_lines == 1


@pytest.mark.thorough
@pytest.mark.parametrize("pack", [gzip.compress, zst], ids=["gz", "zst"])
def test_a_decompression_bomb_takes_bounded_memory(tmp_path, pack):
    """150 MB of one line, in a process that may hold a fraction of it."""
    pytest.importorskip("resource")
    bomb = pack(b"[" * (1 << 20)) * 150
    path = write(tmp_path, bomb)
    code = (
        "import resource, sys; from kvoffload.traces import Trace\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "t = Trace(sys.argv[1], skip_bad=True)\n"
        "try: list(t)\n"
        "except ValueError as e: print(e)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    message, grown = done.stdout.splitlines()
    assert message.endswith("got 1 bad line")
    assert int(grown) < 100, "MiB"


def test_error_is_one_of_the_package_and_carries_its_parts():
    error = TraceError("a", 3, "rule")
    assert isinstance(error, OffloadError)
    assert isinstance(error, ValueError)
    assert (error.file, error.line, error.rule, str(error)) == ("a", 3, "rule", "a:3: rule")
    assert str(TraceError("a", None, "rule")) == "a: rule"


@pytest.mark.thorough
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_slow_pipe_is_recognised_however_little_it_gives_at_first(pack, step):
    code = (
        "from kvoffload.traces import Trace; print('ready', flush=True)\n"
        "print(*Trace('-'), sep='\\n')"
    )
    data = pack(b"\xef\xbb\xbf" + GOOD)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        for start in range(0, 48, step):
            process.stdin.write(data[start : start + step])
            process.stdin.flush()
            wait_until_taken(process.stdin)
        process.stdin.write(data[start + step :])
        process.stdin.close()
        assert process.stdout.read().decode().strip() == str(REQUEST)


def wait_until_taken(pipe):
    """Wait until a pipe is empty, so that the next bytes come by a read of their own."""
    fcntl, termios = (pytest.importorskip(name) for name in ("fcntl", "termios"))
    while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        time.sleep(0.001)


def test_an_overlong_line_is_reported_before_it_ends(tmp_path):
    """The writer waits for the answer before it continues the line."""
    mkfifo = getattr(os, "mkfifo", None) or pytest.skip("needs named pipes")
    mkfifo(tmp_path / "pipe")
    found = []

    def read():
        trace = Trace(tmp_path / "pipe", max_line_bytes=1000)
        with pytest.raises(TraceError) as caught:
            list(trace)
        found.append(str(caught.value))

    reader = threading.Thread(target=read)
    reader.start()
    with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
        pipe.write(GOOD + b"\n" + b"[" * 2000)
        reader.join()
    assert found[0].endswith(":2: a line must be at most 1000 bytes long, got a longer one")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t\n", b"\x0b\x0c\n"])
def test_blank_lines_are_counted_and_cost_no_step_each(tmp_path, monkeypatch, pack, blank):
    count = 300_000
    path = write(tmp_path, pack(GOOD + b"\n" + blank * count + GOOD + b"\n" + blank * 40 + b"bad"))
    reads = 0
    real = Lines._read

    def counted(self, *most):
        nonlocal reads
        reads += 1
        return real(self, *most)

    monkeypatch.setattr(Lines, "_read", counted)
    trace = iter(Trace(path))
    assert [next(trace), next(trace)] == [REQUEST, REQUEST]
    with pytest.raises(TraceError) as caught:
        next(trace)
    assert caught.value.line == count + 43
    assert reads < count / 100


@pytest.mark.parametrize("blanks", [15, 16, 17, 18, 40])
@pytest.mark.parametrize("rest", [b"", b" ", b" " + GOOD, GOOD + b"\n ", b"  \n\n" + GOOD])
def test_what_follows_many_blank_lines_is_read(tmp_path, blanks, rest):
    path = write(tmp_path, GOOD + b"\n" * blanks + rest)
    assert list(Trace(path)) == [REQUEST] * (1 + rest.count(GOOD))


def test_a_fault_after_many_blank_lines_is_reported(tmp_path):
    whole = gzip.compress(GOOD + b"\n" * 500_000)
    path = write(tmp_path, whole[: len(whole) // 2])
    for skip_bad in (False, True):
        message = fault(path, skip_bad=skip_bad)
        assert message.endswith("must be readable to its end: the compressed data is cut off")


@pytest.mark.parametrize("pack", [gzip.compress, zst], ids=["gz", "zst"])
def test_a_line_of_a_small_compressed_file_may_not_unpack_to_much(tmp_path, pack):
    line = row(other="x" * 2**20)
    assert list(Trace(write(tmp_path, line))) == [Request(0, 1, 1, (1,))]
    path = write(tmp_path, pack(GOOD + b"\n" + line + b"\n" + GOOD))
    assert "bytes long this early in a compressed file (a file that is not may have" in fault(path)
    trace = Trace(path, skip_bad=True)
    assert list(trace) == [REQUEST, REQUEST]
    assert trace.bad_lines == 1
    varied = row(other=random.Random(1).randbytes(2**19).hex())
    assert list(Trace(write(tmp_path, pack(varied)))) == [Request(0, 1, 1, (1,))]


@pytest.mark.parametrize("log", [23, 25, 26, 27])
def test_the_window_of_a_zstandard_file_is_bounded_by_its_size(tmp_path, log):
    """By twice what a file of this size may unpack to; 2**23 bytes are always accepted."""
    zstd = pytest.importorskip(zstd_module())
    options = {zstd.CompressionParameter.window_log: log}
    for data, most in ((GOOD, 23), (row(other=random.Random(1).randbytes(2**18).hex()), 25)):
        packer = zstd.ZstdCompressor(options=options)
        path = write(tmp_path, packer.compress(data) + packer.flush())
        if log <= most:
            assert len(list(Trace(path))) == 1
        else:
            assert "must be readable to its end: " in fault(path)


def test_skipping_counts_anew_at_each_iteration(tmp_path):
    trace = Trace(write(tmp_path, b"x\n" + GOOD + b"\ny"), skip_bad=True)
    for _ in range(2):
        assert list(trace) == [REQUEST]
        assert trace.bad_lines == 2
