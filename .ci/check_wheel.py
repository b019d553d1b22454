"""Check the contents of a wheel: every module, stub and extension, and no source of an extension.

usage: check_wheel.py WHEEL {compiled,python}
"""

import sys
import zipfile
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]


def problems(wheel: str, implementation: str) -> list[str]:
    """Return the problems of the wheel, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        held = {PurePath(name) for name in archive.namelist()}
    package = {path for path in held if path.parts[0] == "kvoffload"}
    found = [
        f"{path}: not for a wheel"
        for path in held
        if path.suffix in {".c", ".pyx", ".pxd", ".h", ".html"}
        or (path not in package and not path.parts[0].endswith(".dist-info"))
    ]
    wanted = {
        path.relative_to(ROOT)
        for path in (ROOT / "kvoffload").rglob("*")
        if path.suffix in {".py", ".pyi", ".json", ".jinja", ".css", ".js"}
        or path.name == "py.typed"
    }
    found += [f"{path}: missing" for path in wanted - package]
    modules = {
        path.relative_to(ROOT).with_suffix("")
        for path in ROOT.glob("kvoffload/**/*.py*")
        if path.suffix == ".pyx" or (path.suffix == ".py" and path.with_suffix(".pxd").exists())
    }
    built = {
        path.with_name(path.name.partition(".")[0])
        for path in package
        if path.suffix in {".so", ".pyd"}
    }
    expected = modules if implementation == "compiled" else set()
    found += [f"{path}: extension missing" for path in expected - built]
    found += [f"{path}: extension not expected" for path in built - expected]
    return found


if __name__ == "__main__":
    lines = problems(*sys.argv[1:])
    print("\n".join(lines))
    sys.exit(bool(lines))
