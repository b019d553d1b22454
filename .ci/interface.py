"""Write the interface of an installed engine, as far as an integration uses it.

    $(.ci/sglang-env) .ci/interface.py kvoffload/integrations/sglang sglang.version:__version__

The names and rules of ``interface.json`` in that folder are kept, and those that ``has`` lists; the
others are written anew, with the release. Differences from the old file are printed.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvoffload.integrations.structure import describe, differences, read_interface

CONFTEST = Path(__file__).parents[1] / "tests" / "sglang" / "conftest.py"


def text_of(value: Mapping[str, Any], depth: int = 0) -> str:
    """Return JSON in which each name has one line."""
    if depth == 3 or not isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    pad = "  " * depth
    lines = [f"{pad}  {json.dumps(key)}: {text_of(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"


def written(folder: Path, version: str) -> str:
    """Return the file for the installed release."""
    _, declared = read_interface(folder / "interface.json")
    found = describe(declared)
    for line in differences(declared, found):
        print(line)
    return f"{text_of({'release': version, 'interface': found})}\n"


def main() -> None:
    """Write the file; print the differences."""
    folder, where = sys.argv[1:]
    module, _, name = where.partition(":")
    kept = runpy.run_path(str(CONFTEST)) if "sglang" in where else {}  # operators for its imports
    version = getattr(importlib.import_module(module), name)
    (Path(folder) / "interface.json").write_text(written(Path(folder), version), encoding="utf-8")
    kept.clear()


if __name__ == "__main__":
    main()
