"""The steps of ``.ci/run`` and ``.ci/release``."""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
STEPS = {
    "run": sorted((ROOT / ".ci" / "steps").glob("*")),
    "release": sorted((ROOT / ".ci" / "release-steps").glob("*")),
}

if not STEPS["run"]:
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


@pytest.mark.parametrize("command", STEPS)
def test_each_number_is_one_step(command: str) -> None:
    numbers = [path.name.partition("-")[0] for path in STEPS[command]]
    assert all(re.fullmatch(r"\d\d", number) for number in numbers), numbers
    assert len(set(numbers)) == len(numbers), numbers


def test_a_step_can_be_run_and_says_in_one_line_what_it_checks() -> None:
    for path in [*STEPS["run"], *STEPS["release"]]:
        assert os.access(path, os.X_OK), path
        shebang, comment, *rest = path.read_text(encoding="utf-8").splitlines()
        assert shebang == "#!/usr/bin/env bash", path
        assert comment.startswith("# "), path
        assert ". .ci/lib.sh" in rest, path


@pytest.mark.parametrize("command", STEPS)
def test_the_steps_that_documents_name_exist(command: str) -> None:
    numbers = {path.name.partition("-")[0] for path in STEPS[command]}
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for named in re.findall(rf"\.ci/{command}((?: \d\d)+)", text):
            assert numbers.issuperset(named.split()), f"{path.name}: .ci/{command}{named}"


def test_the_steps_that_the_workflow_names_are_those_of_the_release() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    (named,) = re.findall(r"^ +steps: \[(.*)\]$", workflow, re.MULTILINE)
    numbers = {path.name.partition("-")[0] for path in STEPS["release"]}
    assert set(re.findall(r"\d\d", named)) | {"00"} == numbers
