"""Output files are replaced whole or kept; temporary ones are gone at any end."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvoffload.traces import Request, scratch, write_trace
from kvoffload.traces.outputs import check_output, open_output, own_descriptor
from kvoffload.traces.scratch import scratch_file
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

REQUESTS = [Request(0, 1000, 7, (0, 1)), Request(1.5, 0, 0, ())]

posix = pytest.mark.skipif(os.name != "posix", reason="needs the files of POSIX")
with_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def write(path, data=b"new"):
    with open_output(path) as file:
        file.write(data)


def write_and_raise(path, error):
    with open_output(path) as file:
        file.write(b"new" * 100_000)
        raise error


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_a_link_stays_and_the_file_that_it_names_is_replaced_with_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    real, first, second = tmp_path / "far" / "real", tmp_path / "first", tmp_path / "second"
    real.write_bytes(b"old")
    real.chmod(0o640)
    first.symlink_to("far/real")
    second.symlink_to(first)
    write(second)
    assert (real.read_bytes(), mode(real)) == (b"new", 0o640)
    assert (first.readlink(), second.readlink()) == (Path("far/real"), first)
    assert list((tmp_path / "far").iterdir()) == [real]
    real.unlink()  # a link to nothing stays, and the file that it names is made
    write(second)
    assert (real.read_bytes(), first.readlink()) == (b"new", Path("far/real"))


@posix
def test_a_new_file_has_the_mode_that_the_process_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o640


@posix
def test_another_name_of_the_old_file_keeps_the_old_content(tmp_path):
    path, other = tmp_path / "path", tmp_path / "other"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    write(path)
    assert (path.read_bytes(), other.read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_when_writing_fails_the_file_is_what_it_was(tmp_path, error):
    path = tmp_path / "path"
    for before in (None, b"old"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(error):
            write_and_raise(path, error)
        assert list(tmp_path.iterdir()) == ([] if before is None else [path])
    assert path.read_bytes() == b"old"


@posix
@pytest.mark.parametrize("name", ["path", "path.gz", "path.zst"])
def test_a_full_disk_leaves_the_file_and_is_named(tmp_path, name):
    """A limit on the size of files simulates the disk."""
    if name.endswith(".zst"):
        from kvoffload.traces.lines import zstd_module

        pytest.importorskip(zstd_module())
    path = tmp_path / name
    path.write_bytes(b"old")
    code = """
import random, resource, signal, sys
from kvoffload.traces import Request, write_trace
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
some = random.Random(0).randbytes(1_600_000)
ids = tuple(int.from_bytes(some[n : n + 8], "big") for n in range(0, len(some), 8))
try:
    write_trace([Request(0, 0, 0, ids)], sys.argv[1])
except OSError as error:
    assert error.filename == sys.argv[1], error.filename
    print(error.strerror)
"""
    done = run_python("-B", "-W", "error", "-c", code, path)
    assert (done.stdout, done.stderr) == (os.strerror(errno.EFBIG) + "\n", "")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@with_full_device
def test_a_device_is_written_through_and_its_fault_names_it(tmp_path):
    for path in (Path("/dev/full"), tmp_path / "link.gz"):
        if not path.exists():
            path.symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_trace(REQUESTS, path)
        assert caught.value.filename == str(path)
        assert path.is_char_device()
    write_trace(REQUESTS, "/dev/null")
    assert Path("/dev/null").is_char_device()


@posix
def test_a_named_pipe_is_written_through(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    check_output(path)  # shows nothing to the reader
    write(path)
    reader.join()
    assert found == [b"new"]
    assert path.is_fifo()


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_is_written_through_at_its_place(tmp_path, name):
    if name.startswith("/proc") and not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    path = tmp_path / "out"
    path.write_bytes(b"before\n")
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = """
import sys
from kvoffload.traces.outputs import check_output, open_output
check_output(sys.argv[1])
print("one", flush=True)
with open_output(sys.argv[1]) as file:
    file.write(b"two\\n")
print("three")
"""
    for mode, expected in (("ab", "before\none\ntwo\nthree\n"), ("wb", "one\ntwo\nthree\n")):
        with path.open(mode) as out:
            subprocess.run([sys.executable, "-c", code, name], stdout=out, check=True, cwd=tmp_path)
        assert path.read_text() == expected
    assert (tmp_path / "link").readlink() == Path("/dev/stdout")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_the_own_descriptors_are_known_by_any_name(tmp_path):
    (tmp_path / "a").symlink_to("/dev/fd/7")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "7").write_bytes(b"")
    assert own_descriptor(str(tmp_path / "b")) == 7
    assert own_descriptor("/dev/fd/../fd/12") == 12
    assert own_descriptor(str(tmp_path / "7")) is None
    assert own_descriptor(str(tmp_path / "absent")) is None
    assert own_descriptor("/proc/1/fd/1") is None


@posix
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "path"
    path.write_bytes(b"old")
    path.chmod(0o444)
    if os.access(path, os.W_OK):  # this user may write every file: do as for another
        monkeypatch.setattr(os, "access", lambda name, mode, **_: False)
    for call in (check_output, write):
        with pytest.raises(PermissionError) as caught:
            call(path)
        assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@posix
@pytest.mark.parametrize("make", [
    lambda folder: folder,
    lambda folder: f"{folder}/new/",
    lambda folder: f"{folder}/absent/new",
    lambda folder: "",
], ids=["folder", "slash", "no folder", "empty"])  # fmt: skip
def test_what_cannot_be_written_is_found_out_before_and_named(tmp_path, make):
    path = make(tmp_path)
    for call in (check_output, write):
        with pytest.raises(OSError, match="directory") as caught:
            call(path)
        assert caught.value.filename == os.fspath(path)
    assert list(tmp_path.iterdir()) == []


@posix
def test_links_in_a_circle_are_an_error_that_names_the_first(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(other)
    for call in (check_output, write):
        with pytest.raises(OSError, match="symbolic links") as caught:
            call(tmp_path / "a")
        assert caught.value.filename == str(tmp_path / "a")


def test_finding_out_leaves_everything_as_it_is(tmp_path):
    path = tmp_path / "path"
    check_output(path)
    check_output(path, append=True)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    before = path.stat()
    check_output(path)
    check_output(path, append=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (b"old", before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [path]
    for _ in range(2):  # appending keeps what is there
        with open_output(path, append=True) as file:
            file.write(b"new")
    assert path.read_bytes() == b"oldnewnew"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("has_names", [False, True])
def test_what_is_written_is_read_again_and_gone_in_the_end(folder, monkeypatch, has_names):
    if has_names:
        monkeypatch.setattr(scratch, "NAMELESS", "/nowhere/{}/{}")
    elif not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    with scratch_file() as (stream, path), scratch_file() as (other, other_path):
        stream.write(b"one")
        stream.flush()
        other.write(b"other")
        other.flush()
        for _ in range(2):
            assert Path(path).read_bytes() == b"one"
        code = "import sys; print(open(sys.argv[1]).read())"
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
        assert done.stdout.strip() == b"one"
        assert Path(other_path).read_bytes() == b"other"
        assert len(list(folder.iterdir())) == 2 * has_names
    assert list(folder.iterdir()) == []
    assert not Path(path).exists()


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_names_the_folder(tmp_path):
    code = """
import resource
from kvoffload.traces.scratch import scratch_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with scratch_file() as (stream, _):
        stream.write(bytes(100_000))
        stream.flush()
except OSError as error:
    print(error.filename, error.strerror)
"""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = run_python("-B", "-W", "error", "-c", code, env=env)
    assert (done.stdout, done.stderr) == (f"a temporary file in {tmp_path} File too large\n", "")
