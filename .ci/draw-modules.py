"""Draw the compiled modules and their cimports: docs/_static/modules.svg.

    python .ci/draw-modules.py [FILE]

It rewrites the size and the shapes of the file, which has its own styles. A module is a .pyx, .pxd
or .h file, with the others of its name. Each arrow leads right, then down; one that follows from
others is left out.
"""

import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvoffload"
CIMPORT = re.compile(r"^ *(?:from|cimport) kvoffload\.([\w.]+)(?![\w.]| import)", re.MULTILINE)
INCLUDE = re.compile(r'^ *(?:cdef extern from|#include) "(\w+\.h)"', re.MULTILINE)
MADE = re.compile(r'(?<=viewBox="0 0 )[^"]*(".*<!-- made .*? -->\n).*(?=<!-- end -->)', re.DOTALL)
ACROSS, DOWN = 18, 21  # from a module to the next
LEFT, MODULE_WIDTH = 276, 126  # where the first module's name ends; of the longest name


def name_of(path: Path) -> str:
    """Return the name of a file's module; that of a header without a .pyx has its suffix."""
    is_alone = path.suffix == ".h" and not path.with_suffix(".pyx").exists()
    return (path if is_alone else path.with_suffix("")).relative_to(PACKAGE).as_posix()


def cimports() -> dict[str, set[str]]:
    """Return the modules and headers from which each module takes declarations."""
    found: dict[str, set[str]] = {}
    for path in (each for suffix in ("pyx", "pxd", "h") for each in PACKAGE.rglob(f"*.{suffix}")):
        text = path.read_text(encoding="utf-8")
        used = {name.replace(".", "/") for name in CIMPORT.findall(text)}
        headers = (PACKAGE / "_core" / name for name in INCLUDE.findall(text))
        used.update(name_of(header) for header in headers if header.exists())
        found.setdefault(name_of(path), set()).update(used - {name_of(path)})
    return found


def closure(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return all names that each one leads to, also by way of others; a cycle is an error."""
    found: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        found[name] = graph[name].union(*(found[each] for each in graph[name]))
    return found


def drawing(graph: dict[str, set[str]]) -> tuple[str, str]:
    """Return the size and the shapes: modules from corner to corner, users before what they use."""
    package = {name: name.rpartition("/")[0] for name in graph}
    between: dict[str, set[str]] = {each: set() for each in package.values()}
    for name, used in graph.items():
        between[package[name]] |= {package[each] for each in used} - {package[name]}
    below, lower = closure(graph), closure(between)
    order = sorted(graph, key=lambda n: (-len(lower[package[n]]), package[n], -len(below[n]), n))
    at = {name: (LEFT + i * ACROSS, (i + 1) * DOWN) for i, name in enumerate(order)}
    shapes = []
    for each in dict.fromkeys(package[name] for name in order):
        names = [name for name in order if package[name] == each]
        (x, y), (right, bottom) = at[names[0]], at[names[-1]]
        x -= MODULE_WIDTH
        size = f'width="{right + 12 - x}" height="{bottom - y + DOWN}"'
        shapes.append(f'<rect class="package" x="{x}" y="{y - DOWN // 2}" {size} rx="5"/>')
        shapes.append(f'<text class="name" x="{x - 8}" y="{y + 4}">{each}</text>')
    for name, (x, y) in at.items():
        shapes.append(f'<text x="{x - 4}" y="{y + 4}">{name.rpartition("/")[2]}</text>')
        direct = graph[name].difference(*(below[each] for each in graph[name]))
        for to_x, to_y in sorted(at[each] for each in direct):
            path = f"M{x} {y} H{to_x - 10} q6 0 6 6 V{to_y - 6}"
            shapes.append(f'<path class="arrow" d="{path}"/>')
    return f"{x + 28} {y + DOWN}", "\n".join(shapes)


def main() -> None:
    """Rewrite the file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "_static" / "modules.svg"
    size, shapes = drawing(cimports())
    text, count = MADE.subn(rf"{size}\1{shapes}\n", file.read_text(encoding="utf-8"))
    if not count:
        sys.exit(f"{file} does not have the lines between which the shapes belong")
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
