"""The direction of imports in the source tree."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvoffload.policies import registry

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvoffload"

if not PACKAGE.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

# A layer may import from the layers of the lines above its own, and from itself.
LAYERS = [
    {"errors"},
    {"types"},
    {"_checks", "_extras", "_hold", "_interrupts", "_metrics", "_sampling"},
    {"_sizes"},
    {"_collector"},
    {"_implementation"},
    {"_core"},
    {"policies"},
    {"backends"},
    {"managers"},
    {"__init__", "_output_file", "_printable"},
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
DOCUMENTED |= {"_sampling", "_sizes"}
BUILT_ON_THE_CORE = {"tiers", "watch", "integrations"}
# Within tiers a module or folder may import from those of the lines above, and from itself; those
# of the first line may import from each other.
TIERS_LAYERS = [
    {
        *("base", "deletion", "folder", "generation", "metrics", "namespace", "options", "region"),
        *("native", "seal"),
    },
    {"engine"},
    {"local", "remote"},
    {"tiered_store"},
    {"prometheus"},
    {"__init__"},
]
TIERS_LEVELS = {name: level for level, names in enumerate(TIERS_LAYERS) for name in names}

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


def faults_in_tiers(path: Path) -> Iterator[str]:
    """Yield the imports of a file of tiers that do not lie below it."""
    here = path.relative_to(PACKAGE / "tiers").with_suffix("").parts[0]
    if here not in TIERS_LEVELS:
        yield f"tiers.{here}: give this folder or module its place in TIERS_LAYERS"
        return
    for target in imports(path):
        if not target.startswith("tiers."):
            continue
        there = target.split(".")[1]  # a name of the package itself lies at the top
        level = TIERS_LEVELS.get(there, TIERS_LEVELS["__init__"])
        is_below = level < TIERS_LEVELS[here] or level == 0
        if there != here and not is_below:
            yield f"{name_of(path)} imports kvoffload.{target}"


def test_imports_of_tiers_run_one_way() -> None:
    files = [path for path in LIBRARY if "tiers" in path.relative_to(PACKAGE).parts[:1]]
    assert len(files) > 30
    assert [fault for path in files for fault in faults_in_tiers(path)] == []


def test_cython_imports_are_seen() -> None:
    text = (
        "from kvoffload._core.ring cimport Ring, ring_init as init\n"
        "cimport cython, kvoffload._core.index as index\n"
        "    from kvoffload.errors import (\n    OffloadError,\n    BackendError,\n)\n"
    )
    assert list(cython_imports(text)) == [
        "kvoffload._core.ring.Ring",
        "kvoffload._core.ring.ring_init",
        "cython",
        "kvoffload._core.index",
        "kvoffload.errors.OffloadError",
        "kvoffload.errors.BackendError",
    ]


def test_cython_imports_name_modules_in_full() -> None:
    """These tests and the picture of modules do not see ``from . cimport``."""
    for path in LIBRARY:
        if path.suffix in {".pyx", ".pxd"}:
            text = path.read_text(encoding="utf-8")
            assert re.search(r"^\s*from\s+\.", text, re.MULTILINE) is None, path


def test_no_extension_says_that_it_does_without_the_lock() -> None:
    """A free-threaded interpreter then enables its lock, and says so, when it imports one."""
    for path in [ROOT / "setup.py", *LIBRARY]:
        assert "freethreading_compatible" not in path.read_text(encoding="utf-8"), path


STEPS = {
    "_insert": "c_insert",
    "_remove": "c_removed",
    "_touch": "c_touch",
    "_evict": "c_search|sift",
    "_clear": "c_clear",
    "_check": "c_check",
}
"""The Python twin's steps, and the compiled one's."""
CLASS = re.compile(r"^(?:cdef )?class (\w+)\(", re.MULTILINE)


def places(names: Iterable[str], text: str) -> dict[str, int]:
    """Return where each method is defined, of those that are."""
    found = {
        name: re.search(rf"^    (?:c?def) (?:\w+ )?(?:{name})\(", text, re.MULTILINE)
        for name in names
    }
    return {name: match.start() for name, match in found.items() if match}


def classes(path: Path) -> dict[str, str]:
    """Return the text of each class, by its name in the compiled twin."""
    _, *parts = CLASS.split(path.read_text(encoding="utf-8"))
    names = (re.sub(r"^([A-Z]\w*)CachePolicy$", r"_\1", name) for name in parts[::2])
    texts: dict[str, str] = {}
    for name, text in zip(names, parts[1::2], strict=True):
        texts[name] = texts.get(name, "") + text
    return texts


@pytest.mark.parametrize("stem", sorted({registry.entry(name).stem for name in registry.names()}))
def test_twins_have_their_steps_in_the_same_order(stem: str) -> None:
    python, compiled = (
        classes(PACKAGE / "policies" / f"_{stem}_{twin}") for twin in ("py.py", "c.pyx")
    )
    compared = set()
    for name in python.keys() & compiled.keys():
        in_python, in_compiled = (
            places(STEPS, python[name]),
            places(STEPS.values(), compiled[name]),
        )
        both = [step for step in in_python if STEPS[step] in in_compiled]
        compared.update(both)
        assert sorted(both, key=lambda step: in_python[step]) == sorted(
            both, key=lambda step: in_compiled[STEPS[step]]
        ), name
    assert compared


def test_each_change_for_users_is_named_as_its_tool_reads_it() -> None:
    kinds = "added|changed|fixed|deprecated|removed"
    for path in (ROOT / "changes.d").glob("*"):
        named = re.fullmatch(rf"(\d+|\+[\w-]+)\.({kinds})\.md", path.name)
        assert named or path.name == "README.md", f"{path.name}: NAME must be a number or +words"
