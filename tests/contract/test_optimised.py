"""`python -O` changes nothing: mistakes make the same errors with it and without."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

SCRIPT = """
import importlib
import sys

from tests.differential.test_mistakes import MISTAKES, outcome

twin = importlib.import_module(sys.argv[1])
for name, mistake in MISTAKES.items():
    print(name, *outcome(twin, mistake))
print("debug", __debug__)
"""


def test_optimised_python_changes_nothing(twin: ModuleType) -> None:
    plain, optimised, stripped = (
        run_script(SCRIPT, twin.__name__, options=options).splitlines()
        for options in ((), ("-O",), ("-OO",))
    )
    assert (plain.pop(), optimised.pop(), stripped.pop()) == (
        "debug True",
        "debug False",
        "debug False",
    )
    assert plain == optimised == stripped
    assert sum("Error " in line for line in plain) > 300
    assert not any("AssertionError" in line for line in plain)
