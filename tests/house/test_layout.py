"""The direction of imports in the source tree."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvoffload"

if not PACKAGE.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

# A layer may import from the layers of the lines above its own, and from itself.
LAYERS = [
    {"errors"},
    {"types"},
    {"_checks", "_extras", "_hold", "_interrupts", "_metrics", "_printable", "_sampling"},
    {"_sizes"},
    {"_collector"},
    {"_implementation"},
    {"_core"},
    {"policies"},
    {"backends"},
    {"managers"},
    {"__init__", "_output_file"},
    {"tiers", "watch"},
    {"testing"},
    {"traces"},
    {"replay"},
    {"advise"},
    {"cli"},
    {"__main__"},
    {"integrations"},
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
PUBLIC = LEVELS["__init__"]
# Below the public level, but everyone may import them by path: their names are documented.
DOCUMENTED = {"errors", "types", "policies.registry", "managers.calls", "managers.forwarding"}
# and these are the same for every module
DOCUMENTED |= {"_checks", "_extras", "_hold", "_implementation", "_interrupts"}
DOCUMENTED |= {"_printable", "_sampling", "_sizes"}
BUILT_ON_THE_CORE = {"tiers", "watch", "integrations"}

LIBRARY = sorted(
    path for suffix in ("py", "pyi", "pyx", "pxd") for path in PACKAGE.rglob(f"*.{suffix}")
)

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<origin>[\w.]+)[ \t]+c?import[ \t]+(?P<names>\([^)]*\)|[^\n#]+)"
    r"|c?import[ \t]+(?P<modules>[\w., \t]+))",
    re.MULTILINE,
)


def name_of(path: Path) -> Path:
    return path.relative_to(ROOT)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = module_of(path).split(".")
                keep = len(package) - node.level + (path.name == "__init__.py")
                origin = ".".join([*package[:keep], *filter(None, [origin])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def cython_imports(text: str) -> Iterator[str]:
    for match in CYTHON_IMPORT.finditer(text):
        if match["modules"]:
            yield from (part.split()[0] for part in match["modules"].split(",") if part.strip())
            continue
        names = match["names"].strip("()").split(",")
        yield from (f"{match['origin']}.{part.split()[0]}" for part in names if part.strip())


def imports(path: Path) -> Iterator[str]:
    """Yield the imports of a file from this package, without the leading ``kvoffload.``."""
    python = path.suffix in (".py", ".pyi")
    found = python_imports(path) if python else cython_imports(path.read_text(encoding="utf-8"))
    for name in found:
        if name == "kvoffload" or name.startswith("kvoffload."):
            yield name.removeprefix("kvoffload").lstrip(".")


def layer(dotted: str) -> str:
    """Return the layer of a dotted name below the package; public names lie in ``__init__``."""
    first = dotted.partition(".")[0]
    is_module = any((PACKAGE / first).with_suffix(s).exists() for s in ("", ".py", ".pyx", ".pxd"))
    return first if first and (is_module or first in LEVELS) else "__init__"


def faults(path: Path) -> Iterator[str]:
    """Yield the imports of a file from above it, or from below the public names without reason."""
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if here not in LEVELS:
        yield f"{here}: give this folder or module its place in LAYERS"
        return
    for target in imports(path):
        there = layer(target)
        if there not in LEVELS:
            yield f"{there}: give this folder or module its place in LAYERS"
        elif there != here and LEVELS[there] >= LEVELS[here]:
            yield f"{name_of(path)} imports kvoffload.{target}"
        elif (
            LEVELS[there] < PUBLIC < LEVELS[here]
            and here not in BUILT_ON_THE_CORE
            and path.suffix != ".pyx"  # compiled code is built on compiled code
            and not any(target == name or target.startswith(f"{name}.") for name in DOCUMENTED)
        ):
            yield f"{name_of(path)} imports kvoffload.{target}, not a public name from kvoffload"


def test_imports_run_one_way() -> None:
    assert len(LIBRARY) > 100
    compiled = [path for path in LIBRARY if path.suffix == ".pyx"]
    assert sum(len([*imports(path)]) for path in compiled) > 200
    assert [fault for path in LIBRARY for fault in faults(path)] == []


@functools.cache
def private_names(package: str) -> set[str]:
    """Return the private methods and attributes that the classes of a package define."""
    found = set()
    for path in LIBRARY:
        if path.relative_to(PACKAGE).parts[0] == package and path.suffix in (".py", ".pyx"):
            text = path.read_text(encoding="utf-8")
            found.update(re.findall(r"^ +(?:def|cp?def [\w*]+) (_[a-z]\w*)\(", text, re.MULTILINE))
            found.update(re.findall(r"\bself\.(_[a-z]\w*)(?:: [^=\n]+)? = ", text))
    return found


@functools.cache
def foreign_names(path: Path) -> frozenset[str]:
    """Return the private attributes of objects other than its own that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            holder = node.value
            is_super = isinstance(holder, ast.Call) and ast.unparse(holder.func) == "super"
            if not is_super and ast.unparse(holder) not in ("self", "cls"):
                found.add(node.attr)
    return frozenset(found)


@pytest.mark.parametrize("package", ["managers", "policies"])
def test_no_other_package_calls_private_methods(package: str) -> None:
    private = private_names(package)
    assert len(private) > 20
    found = []
    for path in LIBRARY:
        here = path.relative_to(PACKAGE).parts[0]
        if path.suffix == ".py" and LEVELS.get(here, 0) > LEVELS["managers"]:
            used = private.intersection(foreign_names(path)) - private_names(here)
            found += [f"{name_of(path)}: {name}" for name in sorted(used)]
    assert found == []


def test_the_page_of_the_engine_has_each_compiled_module_after_those_that_it_cimports() -> None:
    page = (ROOT / "docs" / "development" / "engine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| (.*) \|$", page, re.MULTILINE)
    listed = [f"{folder}/{name}" for folder, row in rows for name in re.findall(r"`(\w+)`", row)]
    used: dict[str, set[str]] = {}
    for path in (each for each in LIBRARY if each.suffix in {".pyx", ".pxd"}):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        targets = {target.replace(".", "/") for target in imports(path)}
        targets |= {target.rpartition("/")[0] for target in targets}
        used.setdefault(name, set()).update(targets - {name})
    assert sorted(listed) == sorted(used)
    for place, name in enumerate(listed):
        assert used[name].isdisjoint(listed[place:]), name


def test_cython_imports_name_modules_in_full() -> None:
    """These tests do not see ``from . cimport``."""
    for path in LIBRARY:
        if path.suffix in {".pyx", ".pxd"}:
            text = path.read_text(encoding="utf-8")
            assert re.search(r"^\s*from\s+\.", text, re.MULTILINE) is None, path


def test_no_extension_says_that_it_does_without_the_lock() -> None:
    """A free-threaded interpreter then enables its lock, and says so, when it imports one."""
    for path in [ROOT / "setup.py", *LIBRARY]:
        assert "freethreading_compatible" not in path.read_text(encoding="utf-8"), path
