"""Which twins `import kvoffload` gives: every value of the variable, with and without the build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

import kvoffload
from tests.conftest import AVAILABLE
from tests.isolated.scripts import ROOT, run_script

needs_extensions = pytest.mark.skipif(
    "compiled" not in AVAILABLE, reason="the extensions are not built"
)

VARIABLE = "KVOFFLOAD_PURE_PYTHON"
PACKAGE = Path(kvoffload.__file__).parent

IMPORT = """
import sys

hidden = set(sys.argv[1:])


class Hider:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ImportError(f"{name} is hidden", name=name)


sys.meta_path.insert(0, Hider())
try:
    import kvoffload
except ImportError as error:
    print("refused", error)
    cause = error.__cause__
    print("cause", type(cause).__name__, cause)
else:
    print("implementation", kvoffload.IMPLEMENTATION)
    twin = "c" if kvoffload.IMPLEMENTATION == "compiled" else "py"
    for name in ("LRUCachePolicy", "ARCCachePolicy", "CPUBackend", "CPUOffloadingManager",
                 "LRUOffloadingManager", "ARCOffloadingManager"):
        kinds = getattr(kvoffload, name).__mro__
        defined = next((k for k in kinds if k.__name__ == "Manager"), kinds[0]).__module__
        assert defined.endswith(f"_{twin}"), (name, defined)
    manager = kvoffload.CPUOffloadingManager(16, 2)
    manager.complete_store(manager.prepare_store([b"x"]).block_hashes_to_store)
    assert manager.lookup([b"x"]) == 1
    loaded = sorted(name for name in sys.modules if name in set(sys.argv[1:]))
    assert not loaded, loaded
"""

VALUES = {
    None: ("compiled", "python"),
    "": ("compiled", "python"),
    "0": ("compiled", "refused"),
    "1": ("python", "python"),
    "yes": ("python", "python"),
    "00": ("python", "python"),
    "false": ("python", "python"),
    "no": ("python", "python"),
    " 0": ("python", "python"),
    "0 ": ("python", "python"),
    " ": ("python", "python"),
    "-0": ("python", "python"),
    "2": ("python", "python"),
}
"""Value -> what is chosen where the compiled twins are present, and where they are not."""


def extension_modules() -> list[str]:
    """Return the names of the compiled modules that the twins are made of.

    Without what is compiled from a .py file, which is then imported instead, and without what
    Cython adds to each of them.
    """
    found = set()
    for path in PACKAGE.rglob("*"):
        suffix = next((suffix for suffix in EXTENSION_SUFFIXES if path.name.endswith(suffix)), None)
        if suffix is not None:
            folders = path.relative_to(PACKAGE.parent).parent.parts
            name = path.name.removesuffix(suffix)
            if not path.with_name(f"{name}.py").exists() and name != "_cython":
                found.add(".".join([*folders, name]))
    rooms = tuple(f"kvoffload.{room}." for room in ("_core", "backends", "managers", "policies"))
    return sorted(name for name in found if name.startswith(rooms))


SERVER = """
import importlib.metadata
import json
import os
import sys
import traceback

import numpy

for line in sys.stdin:
    script, variable, value, hidden = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
            sys.argv[1:] = hidden
            exec(script, {})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as printed:
        text = printed.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, text]), flush=True)
"""
"""Imports numpy, and then runs one script after the other in a child of its own."""

Choose = Callable[[str | None, list[str]], str]


@pytest.fixture(scope="module")
def choose(twins: tuple[ModuleType, ModuleType]) -> Iterator[Choose]:
    """Return what imports the package in a process under a value, without what is hidden."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OPENBLAS_NUM_THREADS": "1",  # threads and fork do not mix
    }
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        to_server, from_server = server.stdin, server.stdout

        def ask(value: str | None, hidden: list[str]) -> str:
            print(json.dumps([IMPORT, VARIABLE, value, hidden]), file=to_server, flush=True)
            status, printed = json.loads(from_server.readline())
            assert status == 0, printed
            return str(printed)

        yield ask
        to_server.close()


@pytest.mark.parametrize("value", VALUES)
def test_every_value_where_the_compiled_twins_are_present(
    choose: Choose, value: str | None
) -> None:
    assert choose(value, []) == f"implementation {VALUES[value][0]}\n"


@needs_extensions
@pytest.mark.parametrize("value", VALUES)
def test_every_value_where_the_compiled_twins_are_absent(choose: Choose, value: str | None) -> None:
    printed = choose(value, extension_modules())
    if VALUES[value][1] == "python":
        assert printed == "implementation python\n"
        return
    refusal, cause = printed.splitlines()
    assert refusal.startswith(f"refused {VARIABLE}=0 ")
    assert cause.startswith("cause ImportError kvoffload.")
    assert cause.endswith(" is hidden")


def twin_modules() -> list[str]:
    """Return the compiled modules that the choice imports; recorders and tiers follow it."""
    followers = ("kvoffload.traces.", "kvoffload._core.io")
    return [name for name in extension_modules() if not name.startswith(followers)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", twin_modules() or ["none"])
def test_all_twins_or_none(choose: Choose, name: str) -> None:
    assert choose(None, [name]) == "implementation python\n"
    refusal, cause = choose("0", [name]).splitlines()
    assert VARIABLE in refusal
    assert cause == f"cause ImportError {name} is hidden"


@needs_extensions
def test_a_compiled_module_that_fails_in_another_way_is_named_too() -> None:
    script = """
    import sys

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "kvoffload.managers._manager_c":
                raise ModuleNotFoundError("undefined symbol: kvo_map", name=name)

    sys.meta_path.insert(0, Broken())
    try:
        import kvoffload
    except ImportError as error:
        print(error, "|", error.__cause__)
    """
    printed = run_script(script, environment={VARIABLE: "0"})
    assert printed.count("undefined symbol: kvo_map") == 2


def test_the_choice_is_made_once() -> None:
    script = """
    import os
    os.environ["KVOFFLOAD_PURE_PYTHON"] = "1"
    import kvoffload
    os.environ["KVOFFLOAD_PURE_PYTHON"] = ""
    import kvoffload.replay, kvoffload.traces
    print(kvoffload.IMPLEMENTATION, type(kvoffload.CPUOffloadingManager(16, 1).policy).__module__)
    """
    assert run_script(script) == "python kvoffload.policies._lists_py\n"


def test_both_twins_stay_importable_beside_each_other(
    twins: tuple[ModuleType, ModuleType],
) -> None:
    script = """
    import kvoffload
    from tests import _compiled, _python
    for name in ("LRUCachePolicy", "CPUOffloadingManager"):
        assert getattr(_python, name) is not getattr(_compiled, name)
        assert getattr(kvoffload, name) in (getattr(_python, name), getattr(_compiled, name))
    print(kvoffload.IMPLEMENTATION)
    """
    assert run_script(script, environment={VARIABLE: "1"}) == "python\n"
    assert run_script(script, environment={VARIABLE: None}) == "compiled\n"


@pytest.mark.parametrize("value", ["1", ""])
def test_importing_the_package_imports_no_extra(value: str) -> None:
    script = """
    import sys
    import kvoffload
    extras = {"vllm", "torch", "click", "rich", "msgspec", "zstandard", "hypothesis", "pytest",
              "Cython", "asv", "sphinx"}
    print(sorted(extras & set(sys.modules)))
    ours = {name for name in sys.modules if name.startswith("kvoffload.")}
    print(sorted(name for name in ours if name.split(".")[1] in
          {"cli", "replay", "traces", "integrations", "__main__"}))
    """
    assert run_script(script, environment={VARIABLE: value}) == "[]\n[]\n"
