"""The engine in miniature and the one on PyTorch run; those of policies/ have their own tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str, *arguments: str) -> str:
    """Run an example in a folder of its own; return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = run_python("-W", "error", EXAMPLES / name, *arguments, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="tiers need the extensions")
def test_the_engine_in_miniature_runs(tmp_path: Path) -> None:
    printed = run(tmp_path, "engine.py")
    assert "every byte as computed" in printed
    assert "0 pinned, 0 pending" in printed


def test_an_engine_on_pytorch_answers_alike_recomputed_and_loaded(tmp_path: Path) -> None:
    """On a CPU and in a tiny shape."""
    pytest.importorskip("torch", reason="the example needs torch")
    first, *rows, last = run(tmp_path, "torch_engine.py", "--rounds", "2").splitlines()
    assert first.startswith("CPU, 400 tokens")
    loaded = [int((re.findall(r"(\d+) blocks loaded", row) or ["0"])[0]) for row in rows]
    assert loaded == [0, 24, 24]
    assert last == "the same 16 tokens each time"
