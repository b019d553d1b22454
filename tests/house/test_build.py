"""Builds with a compiler that works, with one that fails, and without one.

A tree with one small extension is built by the project's own ``setup.py``.
"""

import os
import shlex
import shutil
import sysconfig
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
BUILD = "from setuptools import build_meta; print(build_meta.build_{}('dist'))"
LINE = (
    "kvoffload: the extensions cannot be built, see above; "
    "KVOFFLOAD_PURE_PYTHON=1 installs the Python implementation instead"
)

pytest.importorskip("setuptools", minversion="77", reason="builds a wheel")
pytest.importorskip("Cython", reason="builds a wheel")
if not (ROOT / "setup.py").exists():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree with one extension."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "kvoffload"
    (package / "_core").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "_core" / "__init__.py").touch()
    (package / "answer.pyx").write_text("def answer():\n    return 42\n")
    return tmp_path


def build(tree: Path, kind: str = "wheel", **variables: str) -> "CompletedProcess[str]":
    """Build a wheel as pip would, with no variable of the caller's that a compiler heeds."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    return run_python("-c", BUILD.format(kind), cwd=tree, env=kept | variables)


def wheel_of(built: "CompletedProcess[str]") -> str:
    """Return the name of the wheel."""
    assert built.returncode == 0, built.stderr
    return built.stdout.splitlines()[-1]


def held(tree: Path, wheel: str) -> set[str]:
    """Return what kinds of files a wheel holds."""
    with zipfile.ZipFile(tree / "dist" / wheel) as archive:
        return {Path(name).suffix for name in archive.namelist() if name.startswith("kvoffload/")}


def nowhere(tree: Path) -> str:
    """Return a folder in which no program is found."""
    folder = tree / "nothing"
    folder.mkdir()
    return str(folder)


@pytest.mark.skipif(not shutil.which(COMPILER), reason="there is no C compiler")
def test_with_a_compiler_the_wheel_is_compiled(tree: Path) -> None:
    wheel = wheel_of(build(tree))
    assert not wheel.endswith("-none-any.whl")
    assert ".so" in held(tree, wheel)


@pytest.mark.skipif(not shutil.which(COMPILER), reason="there is no C compiler")
def test_an_editable_install_compiles_only_what_is_not_built_yet(tree: Path) -> None:
    wheel_of(build(tree, "editable"))
    failing = failing_compiler(tree)
    wheel_of(build(tree, "editable", **failing))
    (tree / "kvoffload" / "answer.pyx").write_text("def answer():\n    return 43\n")
    assert build(tree, "editable", **failing).returncode == 1


@pytest.mark.parametrize("why", ["there is no compiler", "it is asked for"])
def test_the_wheel_is_pure_and_its_tag_says_so_where(tree: Path, why: str) -> None:
    is_asked = why == "it is asked for"
    built = build(tree, **{"KVOFFLOAD_PURE_PYTHON": "1"} if is_asked else {"PATH": nowhere(tree)})
    wheel = wheel_of(built)
    assert wheel.endswith("-py3-none-any.whl")
    assert held(tree, wheel) == {".py"}
    assert is_asked != (f"there is no C compiler: {COMPILER} is not found" in built.stderr)


def test_an_editable_install_is_a_folder_on_the_path_where_type_checkers_look(tree: Path) -> None:
    """They read the lines of a .pth file that name folders, and run no import hook."""
    wheel = wheel_of(build(tree, "editable", KVOFFLOAD_PURE_PYTHON="1"))
    with zipfile.ZipFile(tree / "dist" / wheel) as archive:
        (name,) = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert name.endswith(".pth")
        (line,) = archive.read(name).decode().splitlines()
    assert Path(line).samefile(tree)


def failing_compiler(tree: Path) -> dict[str, str]:
    folder = Path(nowhere(tree))
    (folder / COMPILER).write_text("#!/bin/sh\necho 'stdio.h: No such file' >&2\nexit 1\n")
    (folder / COMPILER).chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("case", "choice"), [("own", ""), ("named", "0"), ("absent", ""), ("none", "0")]
)
def test_a_build_without_its_extensions_fails_with_one_line(
    tree: Path, case: str, choice: str
) -> None:
    """Where the compiler fails, or there is none and the extensions are required."""
    variables = {
        "own": failing_compiler,
        "named": lambda tree: {"CC": "false"},
        "absent": lambda tree: {"CC": "no-such-compiler"},
        "none": lambda tree: {"PATH": nowhere(tree)},
    }[case](tree)
    built = build(tree, KVOFFLOAD_PURE_PYTHON=choice, **variables)
    assert built.returncode == 1
    assert built.stderr.splitlines()[-1] == LINE
    assert "Traceback" not in built.stderr
    assert not list(tree.glob("dist/*"))


def test_without_cython_the_command_says_what_is_missing(tree: Path) -> None:
    (tree / "Cython").mkdir()
    (tree / "Cython" / "__init__.py").write_text("raise ImportError('No module named Cython')")
    env = {"PATH": os.environ["PATH"], "KVOFFLOAD_PURE_PYTHON": "0"}
    done = run_python("setup.py", "--quiet", "build_ext", "--inplace", cwd=tree, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvoffload: the extensions cannot be built: No module named Cython; ")
    assert "pip install cython numpy" in line
    assert line.endswith("KVOFFLOAD_PURE_PYTHON=1 installs the Python implementation instead")
