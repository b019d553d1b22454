"""Tests against the released SGLang on a CPU: its storage side, in threads and memory of its own.

They run with the Python that `.ci/engine-env sglang` prints, where kvoffload is built in place:

    KVOFFLOAD_PURE_PYTHON=0 $(.ci/engine-env sglang) setup.py --quiet build_ext --inplace
    $(.ci/engine-env sglang) -m pytest tests/sglang
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvoffload.testing.tiers import FaultyTier
from kvoffload.tiers import Namespace
from tests.needed import needs

pytest_pycollect_makemodule = needs("sglang")


def pytest_configure(config: pytest.Config) -> None:
    """Leave SGLang and torch their own warnings: importing them meets these."""
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        for module in ("sglang", "torch", "transformers", "triton"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}:{module}")


if find_spec("sglang") is not None and find_spec("torch") is not None:
    import torch

    # Stand-ins: torchvision's compiled operators need an accelerator's libraries, and without these
    # two it cannot be imported. SGLang imports it for models that see; nothing here calls them.
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture
def close_all() -> Iterator[list]:
    """Give a list of what is closed at the end, the last first."""
    opened: list = []
    yield opened
    for one in reversed(opened):
        one.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTier]:
    """Give a list of the tiers that storages open, which fail when they are told to."""
    tiers: list[FaultyTier] = []

    def open_faulty(url: str, namespace: Namespace, generation: str | None) -> FaultyTier:
        tiers.append(FaultyTier(1 << 20, namespace=namespace, ack="stored"))
        return tiers[-1]

    monkeypatch.setattr("kvoffload.integrations.sglang.pool.open_tier", open_faulty)
    return tiers
