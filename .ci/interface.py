"""Write the interface of an installed engine, as far as an integration uses it, and compare it.

    $(.ci/vllm-env 0.34.0) .ci/interface.py vllm [FILE]
    $(.ci/engine-env sglang) .ci/interface.py sglang [FILE]

The file is ``interface.json`` of the integration; that of vLLM is ``interfaces/0.34.json``, and
``used.json`` beside it lists the used names. The names and rules of the old file are kept, and
those that ``has`` lists; the others are written anew. Differences are printed.
"""

import json
import runpy
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvoffload.integrations.structure import describe, differences, read_interface

ROOT = Path(__file__).parents[1]
INTEGRATIONS = ROOT / "kvoffload" / "integrations"


def text_of(value: Mapping[str, Any], depth: int = 0) -> str:
    """Return JSON in which each name has one line."""
    if depth == 3 or not isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    pad = "  " * depth
    lines = [f"{pad}  {json.dumps(key)}: {text_of(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"


def of_vllm() -> tuple[Path, dict[str, Any]]:
    """Return the file of the installed vLLM, and the used parts without those that it lacks."""
    folder = INTEGRATIONS / "vllm"
    # Without its package, which cannot be imported with an unsupported release.
    upstream = SimpleNamespace(**runpy.run_path(str(folder / "_upstream.py")))
    installed = ".".join((upstream.installed_version() or "none").split(".")[:2])
    for name in reversed(upstream.RELEASES):
        if name != installed:
            release = upstream.Release.read(name)
            declared = [getattr(release, kind) for kind in upstream.KINDS]
            lines = [line for each in declared for line in differences(each, describe(each))]
            print(f"{len(lines)} differences from {name}", *lines, sep="\n  ")
    found = {kind: dict(_present(describe(upstream.USED[kind]))) for kind in upstream.KINDS}
    return folder / "interfaces" / f"{installed}.json", found


def _present(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for module, names in found.items():
        if not isinstance(names, Exception):
            yield module, names
        elif not isinstance(names, ModuleNotFoundError) or not module.startswith(names.name or "/"):
            raise names


def of_other(engine: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of another engine, and its interface."""
    file = INTEGRATIONS / engine / "interface.json"
    _, declared = read_interface(file)
    found = describe(declared)
    print(*differences(declared, found), sep="\n")
    return file, {"release": metadata.version(engine), "interface": found}


def main(engine: str, target: str = "") -> None:
    """Write the file."""
    stubs = ROOT / "tests" / engine / "conftest.py"  # operators that SGLang's imports need
    kept = runpy.run_path(str(stubs)) if engine == "sglang" else {}
    file, interface = of_vllm() if engine == "vllm" else of_other(engine)
    Path(target or file).write_text(f"{text_of(interface)}\n", encoding="utf-8")
    kept.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
