"""The group of tests against the real vLLM: its seed and its size, which are printed.

``KVOFFLOAD_VLLM_SEED`` is another seed; ``KVOFFLOAD_VLLM_SEQUENCES`` is the number of random
sequences of each differential test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.needed import needs

SEED = int(os.environ.get("KVOFFLOAD_VLLM_SEED", "") or conftest.SEED)
SEQUENCES = int(os.environ.get("KVOFFLOAD_VLLM_SEQUENCES", "") or 750)

pytest_pycollect_makemodule = needs("vllm", "test_import.py", "test_advised_configuration.py")


def pytest_configure(config: pytest.Config) -> None:
    """Leave torch its own deprecations: importing vLLM meets them, and warnings are errors."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:torch")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"vllm group: KVOFFLOAD_VLLM_SEED={SEED} KVOFFLOAD_VLLM_SEQUENCES={SEQUENCES}"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture
def engines() -> Iterator[Callable[..., Any]]:
    """Make drivers of tiering managers, which are shut down at the end."""
    from tests.vllm.tiered import Engine

    with ExitStack() as opened:
        yield lambda *arguments, **extra: opened.enter_context(closing(Engine(*arguments, **extra)))


@pytest.fixture
def host_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM believe that the machine has a platform on which its scheduler side can run."""
    from vllm import platforms
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from tests.vllm.engine import HostPlatform

    monkeypatch.setattr(platforms, "_current_platform", HostPlatform())
    init_none_hash(sha256)
