"""Two runs of the tests draw the same values, whatever has been imported before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRAWN = """
import random
from hypothesis import given, settings, strategies as st

EXAMPLES = []

@settings(max_examples=100)
@given(st.lists(st.integers() | st.text() | st.binary(), min_size=5))
def draw(example):
    EXAMPLES.append(example)

def test_draw(seed):
    {before}
    draw()
    with open({path!r}, "w") as file:
        print(seed, hash("text"), random.random(), EXAMPLES, file=file)
"""


def drawn(folder: Path, *options: str, before: str = "") -> str:
    """Return what a test draws in a worker of pytest-xdist."""
    found = folder / "found"
    (folder / "test_draws.py").write_text(DRAWN.format(before=before, path=str(found)))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "tests.conftest", *options]
    command += ["-p", "no:cacheprovider", f"--rootdir={folder}", "--import-mode=importlib", folder]
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    return found.read_text()


@pytest.mark.thorough
def test_runs_draw_the_same_values(tmp_path: Path) -> None:
    first = drawn(tmp_path)
    assert drawn(tmp_path, before="import tests.parts, kvoffload.traces") == first
    assert drawn(tmp_path, "--hypothesis-seed=random") != first
