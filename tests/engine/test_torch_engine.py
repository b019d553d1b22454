"""The engine on PyTorch answers alike with and without offloading, on a CPU and in a tiny shape."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

pytest.importorskip("torch", reason="the example needs torch")
ROOT = Path(__file__).parents[2]


def test_answers_are_the_same_recomputed_and_loaded() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "torch_engine.py"), "--rounds", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *rows, last = done.stdout.splitlines()
    assert first.startswith("CPU, 400 tokens")
    loaded = [int((re.findall(r"(\d+) blocks loaded", row) or ["0"])[0]) for row in rows]
    assert loaded == [0, 24, 24]
    assert last == "the same 16 tokens each time"
