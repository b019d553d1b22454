"""Write the interface of the installed vLLM, as far as kvoffload uses it, and compare it.

    $(.ci/vllm-env 0.34.0) .ci/vllm-interface.py [FILE]

It is written to kvoffload/integrations/vllm/interfaces/0.34.json, or to another file; ``used.json``
in that folder lists the used names. The differences from each other release are printed.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from interface import text_of

from kvoffload.integrations.structure import describe, differences

FOLDER = Path(__file__).parents[1] / "kvoffload" / "integrations" / "vllm"

# Without its package, which cannot be imported with an unsupported release.
upstream = SimpleNamespace(**runpy.run_path(str(FOLDER / "_upstream.py")))


def interface(kind: str) -> dict[str, Any]:
    """Describe the used parts of the installed vLLM, without those that it lacks."""
    found = {}
    for module, names in describe(upstream.USED[kind]).items():
        if not isinstance(names, Exception):
            found[module] = names
        elif not isinstance(names, ModuleNotFoundError) or not module.startswith(names.name):
            raise names
    return found


def main() -> None:
    """Write the file; print the differences."""
    version = upstream.installed_version()
    if version is None:
        sys.exit("vllm-interface: vLLM is not installed")
    installed = ".".join(version.split(".")[:2])
    for name in reversed(upstream.RELEASES):
        if name != installed:
            release = upstream.Release.read(name)
            lines = [
                f"  {kind}: {line}"
                for kind in upstream.KINDS
                for line in differences(getattr(release, kind), describe(getattr(release, kind)))
            ]
            print(f"{len(lines)} differences from {name}", *lines, sep="\n")
    file = Path(sys.argv[1]) if sys.argv[1:] else FOLDER / "interfaces" / f"{installed}.json"
    text = text_of({kind: interface(kind) for kind in upstream.KINDS})
    file.write_text(f"{text}\n", encoding="utf-8")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
