"""Tests against the released LMCache on a CPU: its adapters' interface, storage and server.

They run with the Python that `.ci/engine-env lmcache` prints, where kvoffload is built in place:

    KVOFFLOAD_PURE_PYTHON=0 $(.ci/engine-env lmcache) setup.py --quiet build_ext --inplace
    $(.ci/engine-env lmcache) -m pytest tests/lmcache
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.needed import needs

pytest_pycollect_makemodule = needs("lmcache")


def pytest_configure(config: pytest.Config) -> None:
    """Leave LMCache and torch their own warnings: importing them meets these."""
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        for module in ("lmcache", "torch", "transformers", "numba", "opentelemetry"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}:{module}")


@pytest.fixture
def close_all() -> Iterator[list]:
    """Give a list of what is closed at the end, the last first."""
    opened: list = []
    yield opened
    for one in reversed(opened):
        one.close()
