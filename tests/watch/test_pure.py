"""In pure Python a watch says what it needs, and everything else goes on."""

from __future__ import annotations

import os

import pytest

from tests.isolated.scripts import run_python

MESSAGE = (
    "a watch needs the compiled implementation, and KVOFFLOAD_PURE_PYTHON=1 asks for the Python "
    "one; unset it"
)
WATCH = """
from kvoffload import CPUOffloadingManager
from kvoffload.watch import Watch, WatchReport

manager = CPUOffloadingManager(16, 4)
print(manager.lookup([b"key"]), manager.watch)
try:
    Watch()
except ImportError as error:
    print(type(error).__name__, error)
"""


PURE = {**os.environ, "KVOFFLOAD_PURE_PYTHON": "1"}


def test_a_watch_needs_the_extensions():
    assert run_python("-c", WATCH, env=PURE).stdout.splitlines() == [
        "0 None",
        f"MissingExtraError {MESSAGE}",
    ]


def test_the_demo_says_so_in_one_line():
    pytest.importorskip("prometheus_client", reason="the command needs the watch extra")
    done = run_python("-m", "kvoffload", "demo", "--capacity", "64", env=PURE)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(MESSAGE)
    assert "Traceback" not in done.stderr
