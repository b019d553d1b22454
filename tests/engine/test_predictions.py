"""What kvoffload predicts of chats and agents, 16 at once, is near what the engine counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.predictions import SETTINGS, Compared, compare, workload

pytestmark = pytest.mark.nightly

NUM_REQUESTS = 600
SMALL = {"device": 450, "host": 400, "disk": 800}  # blocks, of which few requests ask for more
POINTS = 1.5  # of the prompts' tokens; one request has .2 of them at most


@pytest.fixture(scope="module")
def compared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    requests = workload(NUM_REQUESTS)

    def run(name: str) -> Compared:
        setting = replace(SETTINGS[name], **SMALL)
        return compare(setting, requests, model, tmp_path_factory.mktemp(name))

    with ThreadPoolExecutor(len(SETTINGS)) as threads:
        return dict(zip(SETTINGS, threads.map(run, SETTINGS), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_predictions_are_within_some_points_of_the_engine(compared, name):
    found = compared[name]
    assert found.requests == NUM_REQUESTS
    points = found.points
    assert abs(points.device) < POINTS
    assert abs(points.host) < POINTS
    assert abs(points.disk) < POINTS
    assert found.engine.disk > 0
    assert found.engine.device > 30
    # What host memory holds of the dense model, the device holds as well, more or less of it as the
    # guard's sample has it; there, what counts is that both tiers together serve something.
    served = found.engine.host + (found.engine.disk if name == "dense" else 0.0)
    assert served > 0.5
