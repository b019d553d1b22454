"""An exception from outside a call may leave a Python manager in between, but costs it no slot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import kvoffload
from kvoffload.policies import registry
from tests.blocks import block_hashes

PACKAGE = str(Path(kvoffload.__file__).parent)
CAPACITY = 6


class OutsideError(BaseException):
    """The exception from outside."""


def call_until_line(number: int, method: Any, *arguments: Any) -> bool:
    """Make a call that ends at its `number`-th line; return whether it came so far."""
    left = number

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename.startswith(PACKAGE):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise OutsideError
        return trace  # for other files, too: Cython's line events call what it returns, even None

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        method(*arguments)
    except OutsideError:
        pass
    finally:
        sys.settrace(former)
    return left == 0


# Python 3.13 traces a generator that is deleted, and an exception there goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", registry.names())
@pytest.mark.parametrize("method", ["prepare_store", "complete_store", "reset_cache"])
def test_no_line_of_the_python_twin_costs_a_slot(
    twins: tuple[ModuleType, ModuleType], policy: str, method: str
) -> None:
    python, _ = twins
    for line in range(1, 2_000):
        manager = python.CPUOffloadingManager(16, CAPACITY, policy)
        manager.prepare_store(block_hashes(*range(CAPACITY)))
        if method != "complete_store":
            manager.complete_store(block_hashes(*range(CAPACITY)))
        arguments: dict[str, tuple[Any, ...]] = {
            "prepare_store": (block_hashes(7, 8, 9),),
            "complete_store": (block_hashes(0, 1, 2), False),
            "reset_cache": (),
        }
        is_interrupted = call_until_line(line, getattr(manager, method), *arguments[method])
        manager.complete_store(block_hashes(*range(10)))
        manager.prepare_store(block_hashes(20))
        now = manager.stats()
        assert now["resident"] + now["free"] == CAPACITY, f"line {line}"
        if not is_interrupted:
            break
    assert line > 10
