"""The sessions of ``noxfile.py``, and the workflows that name them."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
JOBS = ("readme", "lint", "tests", "sanitizers", "packages", "tiers", "vllm", "engine")

if not (ROOT / ".github").exists():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


def tags_of(function: ast.FunctionDef) -> list[str]:
    """Return the tags of a session: the arguments of ``@check(…)``, or ``tags=[…]`` of nox's."""
    return [
        node.value
        for call in function.decorator_list
        if isinstance(call, ast.Call)
        for part in (*call.args, *(word.value for word in call.keywords if word.arg == "tags"))
        for node in ast.walk(part)
        if isinstance(node, ast.Constant)
    ]


SESSIONS = {
    node.name: tags
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and (tags := tags_of(node))
}


def matrix(workflow: str, name: str) -> set[str]:
    """Return a list of a workflow's matrix."""
    text = (ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^ +{name}: \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"[\w.-]+", listed))


def test_each_session_belongs_to_one_job_or_is_nightly() -> None:
    for name, tags in SESSIONS.items():
        assert set(tags) - {"beside"} <= {*JOBS, "nightly"}, name
        assert len(set(tags) - {"beside"}) == 1, name


def test_the_workflows_run_every_job_and_every_nightly_session() -> None:
    assert matrix("tests.yml", "job") == set(JOBS)
    nightly = {name for name, tags in SESSIONS.items() if "nightly" in tags}
    assert matrix("nightly.yml", "session") == nightly
