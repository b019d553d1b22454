"""A policy has both twins and an entry: what is missing is named, with the file that lacks it."""

import re
from pathlib import Path

import pytest

from kvoffload.policies import registry

ROOT = Path(__file__).parents[2]
POLICIES = Path("kvoffload") / "policies"
TABLE = POLICIES / "builtin.py"
CLASS = re.compile(r"^class (\w+CachePolicy)\(", re.MULTILINE)

if not (ROOT / POLICIES).is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


@pytest.mark.parametrize(
    "entry", [*map(registry.entry, registry.names())], ids=lambda entry: entry.name
)
@pytest.mark.parametrize("ending", ["py.py", "c.pyx"])
def test_every_entry_has_both_twins(entry: registry.Entry, ending: str) -> None:
    path = POLICIES / f"_{entry.stem}_{ending}"
    missing = f"{path} is missing: {entry.name!r} of {TABLE} has its classes there"
    assert (ROOT / path).is_file(), missing
    classes = CLASS.findall((ROOT / path).read_text(encoding="utf-8"))
    entries = map(registry.entry, registry.names())
    expected = [other.class_name for other in entries if other.stem == entry.stem]
    assert sorted(classes) == sorted(expected), f"{path} must define {' and '.join(expected)}"


def test_every_policy_has_an_entry() -> None:
    known = {registry.entry(name).class_name for name in registry.names()}
    for path in sorted((ROOT / POLICIES).glob("_*_*.py*")):
        if path.name.endswith(("_py.py", "_c.pyx")):
            for name in CLASS.findall(path.read_text(encoding="utf-8")):
                assert name in known, f"{TABLE} has no entry for {name} of {path.name}"
