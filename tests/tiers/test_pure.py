"""In pure Python tiers say what they need."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.isolated.scripts import ROOT, run_python

MESSAGE = (
    "a tier needs the compiled implementation, and KVOFFLOAD_PURE_PYTHON=1 asks for the Python "
    "one; unset it"
)


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in pure Python."""
    environment = {**os.environ, "KVOFFLOAD_PURE_PYTHON": "1", "PYTHONPATH": str(ROOT)}
    return run_python(*command, env=environment, cwd=folder)


@pytest.mark.parametrize(
    "url", ["memory:?capacity=1MiB", "slab:slab?capacity=1MiB", "dir:dir?capacity=1MiB"]
)
def test_tiers_need_the_extensions(url: str, tmp_path: Path) -> None:
    code = "from kvoffload.tiers import Namespace, open_tier; open_tier({!r}, Namespace('m', 4096))"
    done = run("-c", code.format(url), folder=tmp_path)
    assert done.stderr.splitlines()[-1] == f"kvoffload.errors.MissingExtraError: {MESSAGE}"
    assert not [*tmp_path.iterdir()]


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    slab = tmp_path / ("0" * 32)
    slab.mkdir()
    (slab / "slots.tbl").write_bytes(bytes(4096))
    done = run("-m", "kvoffload", "tier", "info", str(tmp_path), folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"kvoffload: {MESSAGE}\n")
