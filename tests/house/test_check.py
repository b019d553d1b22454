"""The steps of ``.ci/run``: one for each number, and those that the documents name."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / ".ci" / "steps").glob("*"))

if not STEPS:
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


def test_each_number_is_one_step() -> None:
    numbers = [path.name.partition("-")[0] for path in STEPS]
    assert all(re.fullmatch(r"\d\d", number) for number in numbers), numbers
    assert len(set(numbers)) == len(numbers), numbers


def test_a_step_can_be_run_and_says_in_one_line_what_it_checks() -> None:
    for path in STEPS:
        assert os.access(path, os.X_OK), path
        shebang, comment, *rest = path.read_text(encoding="utf-8").splitlines()
        assert shebang == "#!/usr/bin/env bash", path
        assert comment.startswith("# "), path
        assert ". .ci/lib.sh" in rest, path


def test_the_steps_that_documents_name_exist() -> None:
    numbers = {path.name.partition("-")[0] for path in STEPS}
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for named in re.findall(r"\.ci/run((?: \d\d)+)", path.read_text(encoding="utf-8")):
            assert numbers.issuperset(named.split()), f"{path.name}: .ci/run{named}"
