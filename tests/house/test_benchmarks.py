"""The page has what the benchmarks print, and each ablation is one."""

import re
from pathlib import Path

import pytest

from kvoffload.traces import Workload, write_trace
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "asv_benchmarks"

if not FOLDER.exists():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)


def test_the_page_has_the_table_that_its_command_prints() -> None:
    printed = run_python(FOLDER / "history.py", encoding="utf-8").stdout
    page = ROOT / "docs" / "development" / "benchmark.md"
    assert printed.count("\n") > 5
    assert printed in page.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_each_ablation_takes_its_rule_out(tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    pytest.importorskip("tests._compiled", reason="needs compiled twins", exc_type=ImportError)
    trace = tmp_path / "generated.jsonl"
    write_trace(Workload(200), trace)
    script = (FOLDER / "ablations.py", "--quick", "--requests", "150", trace)
    table = run_python(*script, encoding="utf-8")
    rows = table.stdout.splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        changes = re.findall(r"[-+]\d\.\d{4}", row)
        assert len(changes) == 4, row
        assert any(map(float, changes)), row
