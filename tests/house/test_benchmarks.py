"""The benchmarks import at any commit, and what is kept of their results is what the page says."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.traces import Workload, write_trace

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "asv_benchmarks"
KEPT = sorted((FOLDER / "results").rglob("*.json"))

if not FOLDER.exists():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)


@pytest.mark.parametrize("path", sorted((FOLDER / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_a_module_imports_nothing_that_a_commit_may_lack(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names, name


def test_benchmarks_use_public_names_only() -> None:
    for path in (FOLDER / "benchmarks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"kvoffload[\w.]*\._|"tests\b', text), path.name


def test_the_page_has_the_table_that_its_command_prints() -> None:
    command = [sys.executable, str(FOLDER / "history.py")]
    printed = subprocess.check_output(command, text=True, encoding="utf-8")
    page = ROOT / "docs" / "development" / "benchmark.md"
    assert printed.count("\n") > 5
    assert printed in page.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_each_ablation_takes_its_rule_out(tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    pytest.importorskip("tests._compiled", reason="needs compiled twins", exc_type=ImportError)
    trace = tmp_path / "generated.jsonl"
    write_trace(Workload(200), trace)
    script = [str(FOLDER / "ablations.py"), "--quick", "--requests", "150", str(trace)]
    table = subprocess.run(
        [sys.executable, *script], check=True, capture_output=True, text=True, encoding="utf-8"
    )
    rows = table.stdout.splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        changes = re.findall(r"[-+]\d\.\d{4}", row)
        assert len(changes) == 4, row
        assert any(map(float, changes)), row


def test_results_name_neither_paths_nor_hosts() -> None:
    assert KEPT
    for path in KEPT:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(?:home|root|tmp|work|usr)\b", text), path.name
        if path.name != "benchmarks.json":
            assert json.loads(text).get("params", {}).get("machine", path.parent.name) == (
                path.parent.name
            )
