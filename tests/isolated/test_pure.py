"""In pure Python tiers and a watch say what they need, and everything else goes on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.isolated.scripts import ROOT, run_python

MESSAGE = (
    "needs the compiled implementation, and KVOFFLOAD_PURE_PYTHON=1 asks for the Python one; "
    "unset it"
)
WATCH = """
from kvoffload import CPUOffloadingManager
from kvoffload.watch import Watch, WatchReport

print(CPUOffloadingManager(16, 4).lookup([b"key"]), CPUOffloadingManager(16, 4).watch)
Watch()
"""
TIER = "from kvoffload.tiers import Namespace, open_tier; open_tier({!r}, Namespace('m', 4096))"
URLS = ("memory:?capacity=1MiB", "slab:slab?capacity=1MiB", "dir:dir?capacity=1MiB")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in pure Python."""
    environment = {**os.environ, "KVOFFLOAD_PURE_PYTHON": "1", "PYTHONPATH": str(ROOT)}
    return run_python(*command, env=environment, cwd=folder)


@pytest.mark.parametrize(
    ("code", "what", "printed"),
    [(WATCH, "a watch", "0 None\n"), *((TIER.format(url), "a tier", "") for url in URLS)],
)
def test_they_need_the_extensions(code: str, what: str, printed: str, tmp_path: Path) -> None:
    done = run("-c", code, folder=tmp_path)
    assert done.stdout == printed
    last = done.stderr.splitlines()[-1]
    assert last == f"kvoffload.errors.MissingExtraError: {what} {MESSAGE}"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("command", "what"), [("demo --capacity 64", "a watch"), ("tier info .", "a tier")]
)
def test_the_command_says_so_in_one_line(command: str, what: str, tmp_path: Path) -> None:
    for module in ("click", "msgspec", "prometheus_client"):
        pytest.importorskip(module, reason="the commands need the cli and the watch extra")
    slab = tmp_path / ("0" * 32)
    slab.mkdir()
    (slab / "slots.tbl").write_bytes(bytes(4096))
    done = run("-m", "kvoffload", *command.split(), folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"kvoffload: {what} {MESSAGE}\n")
