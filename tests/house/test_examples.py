"""The engine in miniature runs; policies/ and torch_engine.py have tests of their own."""

import os
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="tiers need the extensions")
def test_the_engine_in_miniature_runs(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-W", "error", ROOT / "examples" / "engine.py", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "every byte as computed" in done.stdout
    assert "0 pinned, 0 pending" in done.stdout
