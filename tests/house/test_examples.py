"""The engine in miniature runs; policies/ and torch_engine.py have tests of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="tiers need the extensions")
def test_the_engine_in_miniature_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "engine.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "every byte as computed" in done.stdout
    assert "0 pinned, 0 pending" in done.stdout
