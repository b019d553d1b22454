"""Mutants: small faults put into the library one at a time, and the tests that find each.

``python -m tests.mutants 40 kvoffload/managers/_manager_py.py -- tests/contract`` draws 40 faults
with a fixed seed, runs the tests after ``--`` on each in a copy of the tree, and prints the faults
that no test finds. The number of those found says how sharp the tests are, whatever their number.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED = 0
SECONDS = 300
"""Time after which a fault counts as found: the tests hang."""

PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.And, ast.Or),
)
SWAPPED = {**dict(PAIRS), **{other: one for one, other in PAIRS}, ast.Mult: ast.FloorDiv}


def faults(tree: ast.Module) -> Iterator[tuple[ast.AST, str, object]]:
    """Yield what can be changed: a node, a field of it, and the other value."""
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if isinstance(getattr(node, name, None), ast.AST)
        for part in ast.walk(getattr(node, name))
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPPED:
            yield node, "op", SWAPPED[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, "value", not node.value
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value", node.value + 1
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "value", ast.Constant(None)  # the call is left out


def mutants(paths: list[str], count: int) -> Iterator[tuple[str, str, str]]:
    """Yield a path, the source with one fault, and the fault in words, in the order of a draw."""
    every = [
        (path, index)
        for path in paths
        for index, _ in enumerate(faults(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    ]
    for path, index in random.Random(SEED).sample(every, min(count, len(every))):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        node, field, value = list(faults(tree))[index]
        before = ast.unparse(copy.copy(node)).partition("\n")[0]
        setattr(node, field, value)
        after = ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]
        line = getattr(node, "lineno", 0)
        yield path, ast.unparse(tree), f"{path}:{line}: {before}  ->  {after}"


def main() -> None:
    """Print the faults that no test finds, and how many are found."""
    if "--" not in sys.argv:
        sys.exit(__doc__)
    split = sys.argv.index("--")
    count, paths, tests = int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
    found = total = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("kvoffload", "tests", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder, name))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        for path, text, fault in mutants(paths, count):
            target = Path(folder, path)
            kept = target.read_bytes()
            target.write_text(text, encoding="utf-8")
            try:
                run = {"cwd": folder, "env": env, "capture_output": True, "timeout": SECONDS}
                code = subprocess.run(command, check=False, **run).returncode  # type: ignore[call-overload]
            except subprocess.TimeoutExpired:
                code = 1
            target.write_bytes(kept)
            found, total = found + (code != 0), total + 1
            if not code:
                print("not found:", fault, flush=True)
    print(f"{found} of {total} found")


if __name__ == "__main__":
    main()
