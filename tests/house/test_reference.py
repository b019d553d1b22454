"""Public names of the modules that programs import: in the reference, with named booleans."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

if not REFERENCE.is_dir():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)

DIRECTIVE = re.compile(
    r"^\.\. (?:(?P<module>currentmodule)|auto\w+):: (?P<name>[\w.]+)", re.MULTILINE
)


def documented():
    """Return the full names that the pages describe."""
    names = set()
    for page in REFERENCE.glob("*.md"):
        module = "kvoffload"
        for found in DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
            name = found["name"]
            if found["module"]:
                module = name
            names.add(name if name.startswith("kvoffload.") else f"{module}.{name}")
    return names


@pytest.mark.parametrize("module", ["traces", "replay", "advise"])
def test_every_public_name_has_a_place(module):
    public = importlib.import_module(f"kvoffload.{module}").__all__
    names = documented()
    constants = {name for name in public if name.isupper()}
    missing = {f"kvoffload.{module}.{name}" for name in public if name not in constants} - names
    assert missing == set()


MADE_BY_THE_LIBRARY = {"Advice", "Explanation", "GroupChunks"}  # only it calls their constructors


def signatures(name, value):
    """Yield the signatures of a function, or of a class and its public methods, by name."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    if inspect.isclass(value):
        methods = inspect.getmembers(value, inspect.isroutine)
        public = [pair for pair in methods if not pair[0].startswith("_")]
        constructed = [] if name in MADE_BY_THE_LIBRARY else [("__init__", value)]
        pairs = [(f"{name}.{each}", member) for each, member in [*constructed, *public]]
    else:
        pairs = [(name, value)] if inspect.isroutine(value) else []
    for each, member in pairs:
        yield each, inspect.signature(member)


@pytest.mark.parametrize("module", ["traces", "replay", "advise", "watch"])
def test_booleans_are_given_by_name(module):
    package = importlib.import_module(f"kvoffload.{module}")
    positional = [
        f"{name}({parameter.name})"
        for public in package.__all__
        for name, signature in signatures(public, getattr(package, public))
        for parameter in signature.parameters.values()
        if parameter.annotation in ("bool", bool) and parameter.kind != parameter.KEYWORD_ONLY
        if parameter.name != "success"  # of the contract's complete_store
    ]
    assert positional == []
