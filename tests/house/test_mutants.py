"""The faults that `tests.mutants` puts into the library."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import ROOT, mutants

PATH = "kvoffload/policies/_lists_py.py"

if not (ROOT / PATH).is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


def test_each_is_one_fault_and_a_draw_repeats_them() -> None:
    plain = ast.unparse(ast.parse((ROOT / PATH).read_text(encoding="utf-8"))).splitlines()
    drawn = list(mutants([PATH], 20))
    assert len(drawn) == 20
    assert drawn == list(mutants([PATH], 20))
    assert len({text for _, text, _ in drawn}) == 20
    for path, text, fault in drawn:
        ast.parse(text)
        lines = text.splitlines()
        assert path == PATH
        assert fault.startswith(f"{PATH}:")
        assert "  ->  " in fault
        assert sum(one != other for one, other in zip(plain, lines, strict=True)) == 1, fault
