"""The example programs run, in each implementation that is built."""

import os
from pathlib import Path

import pytest

from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))  # policies/ has its own tests


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("choice", ["", "1"], ids=["any", "python"])
def test_example_runs(path: Path, choice: str, tmp_path: Path) -> None:
    env = {**os.environ, "KVOFFLOAD_PURE_PYTHON": choice, "PYTHONPATH": str(ROOT)}
    done = run_python("-W", "error", path, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "every byte as computed" in done.stdout
    assert "0 pinned, 0 pending" in done.stdout
