"""Tests with a real engine: vLLM's server on a CPU, its model made here, asked over HTTP.

They run with the Python that `.ci/vllm-env --engine` prints, where kvoffload is built in place:

    KVOFFLOAD_PURE_PYTHON=0 $(.ci/vllm-env --engine) setup.py --quiet build_ext --inplace
    $(.ci/vllm-env --engine) -m pytest tests/engine

Each change has those that are not marked `nightly`. A release before the newest has the tests that
are marked `every_release`:

    $(.ci/vllm-env --engine 0.31.0) -m pytest -m every_release tests/engine
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.runs import Run

SERVERS_AT_ONCE = 2
MARK = "engine_runs"
EVERY_RELEASE = "every_release"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(*names): the servers whose runs a test judges")
    config.addinivalue_line(
        "markers", f"{EVERY_RELEASE}: run with every release of vLLM, not with the newest alone"
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.model import make_model

    return make_model(tmp_path_factory.mktemp("model"))


class Runs:
    """The runs that the chosen tests need, each made once, two at a time."""

    def __init__(self, names: list[str], model: Path, folder: Path):
        self.pool = ThreadPoolExecutor(SERVERS_AT_ONCE)
        self.made: dict[str, Future[Run]] = {
            name: self.pool.submit(self.make, name, model, folder) for name in names
        }

    def make(self, name: str, model: Path, folder: Path) -> Run:
        from tests.engine.runs import SETTINGS, make_run

        setting = SETTINGS[name]
        own = folder / "".join(letter for letter in name if letter.isalnum())
        return make_run(setting, model, own, self[setting.after] if setting.after else None)

    def __getitem__(self, name: str) -> Run:
        return self.made[name].result()

    def close(self) -> None:
        from tests.engine.server import kill_all

        self.pool.shutdown(wait=False, cancel_futures=True)
        kill_all()  # where the tests were interrupted
        self.pool.shutdown()


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Return runs by the name of their setting; only those that a chosen test is marked with."""
    from tests.engine.runs import SETTINGS

    asked = {
        name
        for item in request.session.items
        for mark in item.iter_markers(MARK)
        for name in mark.args
    }
    asked |= {SETTINGS[name].after for name in asked}
    made = Runs([name for name in SETTINGS if name in asked], model, tmp_path_factory.mktemp("run"))
    yield made
    made.close()
