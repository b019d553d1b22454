"""The library of Parquet files."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def arrow() -> ModuleType:
    """Return pyarrow; skip the test without it."""
    return pytest.importorskip("pyarrow", reason="needs the parquet extra")


@pytest.fixture
def parquet() -> ModuleType:
    """Return its module of Parquet files; skip the test without it."""
    return pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")
