"""The native threads alone, under sanitizers: a program in C that drives nothing else."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import read_budget

from .attack import STATED_BUDGET, report

pytestmark = pytest.mark.attack

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "kvoffload" / "_core"
FLAGS = ("-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all")

if not (HEADERS / "io.h").exists():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


@pytest.fixture(scope="module", params=["plain", "thread", "address,undefined"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if request.param != "plain" and read_budget() < STATED_BUDGET:
        pytest.skip(f"KVOFFLOAD_TEST_BUDGET={STATED_BUDGET} runs it")
    sanitizer = [] if request.param == "plain" else [f"-fsanitize={request.param}"]
    path = tmp_path_factory.mktemp("stress") / "stress"
    source = Path(__file__).with_name("pool_stress.c")
    command = ["gcc", *FLAGS, *sanitizer, f"-I{HEADERS}", source, "-lpthread", "-o", path]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find -l" in build.stderr or "unrecognized argument" in build.stderr:
        pytest.skip(f"no -fsanitize={request.param} here")
    assert build.returncode == 0, build.stderr
    return path


@pytest.mark.parametrize("mode", ["direct", "copied", "stored", "memory", "calls"])
def test_random_jobs_under_a_sanitizer(program: Path, mode: str, seed: int) -> None:
    """Slow and failing calls, deadlines, closing. Stated: 6 s each."""
    seconds = min(6.0, 0.3 * read_budget())
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [program, mode, str(seconds), str(seed)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    report(done.stdout.strip())
