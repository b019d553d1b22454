"""The example programs run, in each implementation that is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))  # policies/ has its own tests


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("choice", ["", "1"], ids=["any", "python"])
def test_example_runs(path: Path, choice: str, tmp_path: Path) -> None:
    if "kvoffload.tiers" in path.read_text() and "python" in (choice and "python", IMPLEMENTATION):
        pytest.skip("tiers need the extensions")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**os.environ, "KVOFFLOAD_PURE_PYTHON": choice, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "every byte as computed" in done.stdout
    assert "0 pinned, 0 pending" in done.stdout
