"""Import the integration with names of vLLM renamed: a script of its own.

``python -m tests.vllm.renamed FOLDER < CASES`` reads a JSON list of cases, each a list of names,
and prints for each a line of JSON: the case, what importing the plain spec raised and what
importing the tiers raised, "" where nothing. vLLM is imported once. For each case a child of this
process gets a copy of vLLM's offloading code in FOLDER in which these names are others everywhere,
and imports that code anew.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

#: What is copied, renamed and imported anew: below the package ``vllm``.
PARTS = (
    "v1/kv_hints",
    "v1/kv_offload",
    "v1/metrics/cache_hit_source.py",
    "distributed/kv_transfer/kv_connector/v1/offloading",
)
PACKAGE = "kvoffload.integrations.vllm"


def copy_renamed(source: Path, folder: Path, names: list[str]) -> None:
    """Copy the parts of vLLM to `folder`; in them each of `names` is another.

    A name with dots is a module, which gets another name; any other is an identifier. What stays
    the same is linked, compiled files too.
    """
    words = "|".join(rf"\b{re.escape(name)}\b" for name in names)
    # An identifier in the path of a module stays; a module is renamed there.
    paths = "" if any("." in name for name in names) else r"^\s*from \S+ import|"
    pattern = re.compile(paths + words, re.MULTILINE)

    def other(found: re.Match[str]) -> str:
        return f"{found[0]}_renamed" if found[0] in names else found[0]

    for part in PARTS:
        for path in sorted(source.glob(f"{part}/**/*.py" if "." not in part else part)):
            place = path.relative_to(source)
            if ".".join(["vllm", *place.with_suffix("").parts]) in names:
                place = place.with_name(f"{place.stem}_renamed.py")
            target = folder / place
            if not target.parent.exists():
                target.parent.mkdir(parents=True)
                (target.parent / "__pycache__").symlink_to(path.parent / "__pycache__")
            text = path.read_text(encoding="utf-8")
            renamed = pattern.sub(other, text)
            if renamed == text:
                target.symlink_to(path)
            else:
                target.write_text(renamed, encoding="utf-8")


def use(folder: Path) -> None:
    """Let the copied parts be found in `folder`, and forget those that were imported."""
    for part in PARTS:
        above = importlib.import_module(".".join(["vllm", *Path(part).parts[:-1]]))
        above.__path__ = [str(folder / Path(part).parent), *above.__path__]
        name = f"{above.__name__}.{Path(part).stem}"
        for known in list(sys.modules):
            if known == name or known.startswith(f"{name}."):
                del sys.modules[known]
        vars(above).pop(Path(part).stem, None)
        if not (folder / part).exists():
            sys.modules[name] = None  # type: ignore[assignment]  # nor is the original one there
    importlib.invalidate_caches()


def outcome(names: tuple[str, ...]) -> str:
    try:
        package = importlib.import_module(PACKAGE)
        for name in names:
            getattr(package, name)
    except ImportError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    cases = json.load(sys.stdin)
    vllm = importlib.import_module("vllm")
    source = Path(vllm.__file__).parent
    for name in ("cpu.spec", "tiering.spec", "tiering.base"):
        importlib.import_module(f"vllm.v1.kv_offload.{name}")
    for name in ("kvoffload", "kvoffload.tiers", "kvoffload.watch", "kvoffload.traces.request_log"):
        importlib.import_module(name)
    for number, names in enumerate(cases):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            copy = folder / str(number)
            if names:
                copy_renamed(source, copy, names)
                use(copy)
            plain = outcome(("KVOffloadSpec", "KVOffloadManager"))
            tiers = outcome(("KVOffloadTieringSpec", "KVOffloadFileTier"))
            print(json.dumps([names, plain, tiers]), flush=True)
            shutil.rmtree(copy, ignore_errors=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
