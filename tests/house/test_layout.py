"""The layout of the source tree: imports one way, no assert that guards behaviour."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvoffload"

if not PACKAGE.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

# A room may import from the rooms of the lines above its own, and from itself.
ROOMS = [
    {"types", "errors"},
    {"_checks"},
    {"_core"},
    {"policies"},
    {"backends"},
    {"managers"},
    {"_python", "_compiled"},
    {"_impl"},
    {"__init__"},
    {"tiers", "watch"},
    {"traces"},
    {"replay"},
    {"advise"},
    {"cli"},
    {"__main__"},
    {"integrations"},
]
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
PUBLIC = LEVELS["__init__"]
# Below the public level, but everyone may import them by path: their names are documented.
DOCUMENTED = {"errors", "types", "policies.registry"}

SOURCES = sorted(
    path
    for suffix in ("py", "pyi", "pyx", "pxd", "pxi", "h")
    for folder in ("kvoffload", "tests", "examples", "asv_benchmarks", "docs")
    for path in (ROOT / folder).rglob(f"*.{suffix}")
    if not {"_build", "env", "html", "results"} & set(path.relative_to(ROOT).parts)
)
LIBRARY = [path for path in SOURCES if path.is_relative_to(PACKAGE) and path.suffix != ".h"]

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
    """Give what a file imports of ours, without the leading ``kvoffload.``."""
    python = path.suffix in (".py", ".pyi")
    found = python_imports(path) if python else cython_imports(path.read_text(encoding="utf-8"))
    for name in found:
        if name == "kvoffload" or name.startswith("kvoffload."):
            yield name.removeprefix("kvoffload").lstrip(".")


def room(dotted: str) -> str:
    """Give the room a dotted name below the package lies in; public names lie in ``__init__``."""
    first = dotted.partition(".")[0]
    is_module = any((PACKAGE / first).with_suffix(s).exists() for s in ("", ".py", ".pyx", ".pxd"))
    return first if first and (is_module or first in LEVELS) else "__init__"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(name_of(path)))
def test_imports_run_one_way(path: Path) -> None:
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert here in LEVELS, f"{here}: give this room its place in ROOMS"
    for target in imports(path):
        there = room(target)
        assert there in LEVELS, f"{there}: give this room its place in ROOMS"
        if there == here:
            continue
        assert LEVELS[there] < LEVELS[here], f"{name_of(path)} imports kvoffload.{target}"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(name_of(path)))
def test_users_of_the_library_import_public_names(path: Path) -> None:
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if LEVELS.get(here, 0) <= PUBLIC or here in {"tiers", "watch", "integrations"}:
        return  # these stand on the C level themselves
    for target in imports(path):
        there = room(target)
        if LEVELS[there] >= PUBLIC:
            continue
        assert any(target == name or target.startswith(f"{name}.") for name in DOCUMENTED), (
            f"{name_of(path)} imports kvoffload.{target}; import the public name from kvoffload"
        )


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(name_of(path)))
def test_no_assert_guards_behaviour(path: Path) -> None:
    found = re.findall(r"^[ \t]*assert\b.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert not found, f"python -O drops {found}"


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


def test_no_extension_says_that_it_does_without_the_lock() -> None:
    """A free-threaded interpreter then enables its lock, and says so, when it imports one."""
    for path in [ROOT / "setup.py", *LIBRARY]:
        assert "freethreading_compatible" not in path.read_text(encoding="utf-8"), path
