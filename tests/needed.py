"""Files of tests that need an engine, which are skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


class Skipped(pytest.File):
    """A file that cannot be imported without its engine."""

    engine = ""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(f"needs {self.engine}; see .ci/vllm-env and .ci/engine-env")


def needs(engine: str, *others: str) -> Callable[..., Any]:
    """Return a hook that skips the files of a folder, but for others, without an engine."""

    def collect(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
        if module_path.name in others or find_spec(engine):
            return None
        skipped: Skipped = Skipped.from_parent(parent, path=module_path)
        skipped.engine = engine
        return skipped

    return collect
