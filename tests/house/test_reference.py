"""Every public name of the modules that programs import has its place in the reference."""

import importlib
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
