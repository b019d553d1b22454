"""Libraries of extras: tests that read traces need msgspec, some need that of Parquet files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
READ_NOTHING = ("extras", "outputs", "prompts", "request_lines", "survey")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what reads traces in an environment that cannot."""
    if find_spec("msgspec") is not None:
        return
    files = {HERE / f"test_{name}.py" for name in (*READ_NOTHING, "workload")}
    for item in items:
        if HERE in item.path.parents and item.path not in files:
            item.add_marker(pytest.mark.skip(reason="reading traces needs the cli extra"))


@pytest.fixture
def arrow() -> ModuleType:
    """Return pyarrow; skip the test without it."""
    return pytest.importorskip("pyarrow", reason="needs the parquet extra")


@pytest.fixture
def parquet() -> ModuleType:
    """Return its module of Parquet files; skip the test without it."""
    return pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")
