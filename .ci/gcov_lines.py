"""Print the lines of inline files that gcov knows and that were not run.

usage: gcov_lines.py BUILD      the folder with the .gcda files, from the root of the checkout

A line of a .pxd or .h file counts as run if any of the extensions that contain it ran it.
"""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path


def counts(build: Path) -> dict[str, Counter[int]]:
    """Return how often each line of each inline file was run."""
    seen: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for data in sorted(build.rglob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", str(data)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for file in json.loads(done.stdout)["files"]:
            path = Path(file["file"])
            if path.parts[0] != "kvoffload" or path.suffix not in {".pxd", ".h"}:
                continue
            if not path.exists():  # utilities of Cython, which it names after the module with them
                continue
            length = len(path.read_text(encoding="utf-8").splitlines())
            for line in file["lines"]:
                if line["line_number"] <= length:  # Cython's own code follows under the same name
                    seen[str(path)][line["line_number"]] += line["count"]
    return seen


def main(build: str) -> None:
    """Print a line per file, and the sum."""
    lines = missed = 0
    for name, count in sorted(counts(Path(build)).items()):
        never = sorted(line for line, times in count.items() if not times)
        lines, missed = lines + len(count), missed + len(never)
        print(f"{name:35} {len(count):5} lines {len(never):5} not run {never or ''}")
    print(f"{lines} lines, {missed} not run: {100 - 100 * missed / lines:.1f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
