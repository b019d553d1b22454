"""Which twins `import kvoffload` gives: every value of the variable, with and without the build."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kvoffload
from tests.conftest import AVAILABLE
from tests.differential.pairs import Twins
from tests.isolated.scripts import run_script

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
    **dict.fromkeys(("1", "yes", "00", "false", " 0", "0 "), ("python",) * 2),
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


def choose(value: str | None, *hidden: str) -> str:
    """Return what importing the package prints under a value, without what is hidden."""
    return run_script(IMPORT, *hidden, environment={VARIABLE: value})


def require_refusal(printed: str, hidden: str) -> None:
    """Check that the refusal names the variable, and its cause what is hidden."""
    refusal, cause = printed.splitlines()
    assert refusal.startswith(f"refused {VARIABLE}=0 ")
    assert re.fullmatch(f"cause ImportError {hidden} is hidden", cause)


@pytest.mark.thorough
@pytest.mark.parametrize("value", VALUES)
def test_every_value(twins: Twins, value: str | None) -> None:
    present, absent = VALUES[value]
    assert choose(value) == f"implementation {present}\n"
    printed = choose(value, *extension_modules())
    if absent == "refused":
        require_refusal(printed, r"kvoffload\.[\w.]+")
    else:
        assert printed == "implementation python\n"


def twin_modules() -> list[str]:
    """Return the compiled modules that the choice imports; recorders and tiers follow it."""
    followers = ("kvoffload.traces.", "kvoffload._core.io")
    return [name for name in extension_modules() if not name.startswith(followers)]


@pytest.mark.thorough
def test_all_twins_or_none(twins: Twins) -> None:
    for name in twin_modules():
        assert choose(None, name) == "implementation python\n"
        require_refusal(choose("0", name), re.escape(name))


@needs_extensions
def test_a_compiled_module_that_fails_in_another_way_is_named_too() -> None:
    broken = 'ModuleNotFoundError("undefined symbol: kvo_map"'
    script = IMPORT.replace('ImportError(f"{name} is hidden"', broken)
    printed = run_script(script, "kvoffload.managers._manager_c", environment={VARIABLE: "0"})
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
