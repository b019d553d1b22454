"""Check the types of the Python in the documents with `mypy --strict`.

usage: typed_blocks.py

Each page becomes a module of its name: its blocks share a namespace, as in a reader's session, and
stand on the lines that they have in the page.
"""

import subprocess
import sys
from pathlib import Path

from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".mypy_cache" / "documents"  # the same each time, as the cache names its files


def module(page: Path) -> str:
    """Return the Python of a page, every statement on its line, without the output of blocks."""
    lines: list[str] = []
    for example in Document.parse(str(page), PythonCodeBlockParser()):
        block = example.parsed
        if isinstance(block, str):
            first, source = example.line + block.line_offset + 1, str(block)
        else:  # a statement after a prompt
            first, source = example.line, block.source
        lines += [""] * (first - 1 - len(lines))
        lines += source.splitlines()
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    """Print mypy's messages, and return its exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    modules = []
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        if text := module(page):
            name = "_".join(page.relative_to(ROOT).with_suffix(".py").parts)
            path = FOLDER / name.replace("-", "_")
            path.write_text(text, encoding="utf-8")
            modules.append(str(path.relative_to(ROOT)))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", *modules]
    return subprocess.call(command, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
