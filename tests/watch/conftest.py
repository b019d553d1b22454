"""A watch needs the extensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run in pure Python."""
    if IMPLEMENTATION == "compiled":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="a watch needs the extensions"))
