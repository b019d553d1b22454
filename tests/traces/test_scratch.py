"""Temporary files: read repeatedly, by other processes too, and gone at any end."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvoffload.traces import scratch
from kvoffload.traces.scratch import scratch_file


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
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code],
        capture_output=True, check=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"a temporary file in {tmp_path} File too large\n", "")
