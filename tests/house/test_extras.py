"""What is said where an extra is missing: each feature, and the one line that names the command."""

import ast
import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import kvoffload
from kvoffload._extras import require
from kvoffload.errors import MissingExtraError
from kvoffload.traces.lines import zstd_module
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvoffload.__file__).parent
PIP = shlex.join([sys.executable, "-m", "pip"])

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

TIER = "from kvoffload.tiers import Namespace, open_tier; open_tier({!r}, Namespace('m', 4096))"
READER = "from kvoffload.traces import Trace; list(Trace({!r}))"
PARQUET = "from kvoffload.traces import Trace; list(Trace('x', format='parquet'))"
WRITER = "from kvoffload.traces import Workload, write_trace; write_trace(Workload(1), 'new.zst')"
RECORDER = """
from kvoffload import CPUOffloadingManager
from kvoffload.traces import TraceRecorder
TraceRecorder(CPUOffloadingManager(16, 10), 'new.zst')"""
TOKENIZE = "kvoffload convert trace.jsonl --format openai --tokenizer x"

# what needs an extra: code, or a command; the subject of the line; the module; the extra
CASES = [
    ("kvoffload --version", "the command", "click", "cli"),
    ("kvoffload policies", "the command", "rich", "cli"),
    ("kvoffload policies", "the command", "msgspec", "cli"),
    ("kvoffload sweep trace.jsonl --plot x.svg", "--plot", "matplotlib", "plot"),
    ("kvoffload sweep trace.jsonl --capacity 1 --dask x:1", "--dask", "distributed", "dask"),
    ("kvoffload advise trace.jsonl --capacity 1 --report x", "a report", "jinja2", "report"),
    ("kvoffload advise trace.jsonl --capacity 1 --report x", "a report", "matplotlib", "report"),
    (TOKENIZE, "--tokenizer", "jinja2", "tokenizer"),
    (TOKENIZE, "--tokenizer", "tokenizers", "tokenizer"),
    ("kvoffload demo", "kvoffload demo", "prometheus_client", "watch"),
    ("import kvoffload.watch.prometheus", "export to Prometheus", "prometheus_client", "watch"),
    ("import kvoffload.tiers.prometheus", "export to Prometheus", "prometheus_client", "watch"),
    (TIER.format("redis://localhost"), "RedisTier", "redis", "redis"),
    (TIER.format("s3://bucket"), "ObjectTier", "obstore", "objects"),
    (READER.format("trace.jsonl"), "reading a trace", "msgspec", "cli"),
    (PARQUET, "reading Parquet", "pyarrow", "parquet"),
    (READER.format("trace.zst"), "a zstandard trace", "backports.zstd", "cli"),
    (WRITER, "a zstandard trace", "backports.zstd", "cli"),
    (RECORDER, "a .zst trace", "backports.zstd", "cli"),
]
NEEDED_HERE = [case for case in CASES if not case[2].startswith("backports.")]
if zstd_module() == "backports.zstd":  # before Python 3.14, which has its own
    NEEDED_HERE = CASES
HIDE = """
import importlib.metadata, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == {0!r} or name.startswith({0!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

class Installed:
    version = "1"

sys.meta_path.insert(0, Absent())
importlib.metadata.distribution = lambda name: Installed
"""


@pytest.mark.parametrize(("needy", "purpose", "module", "extra"), NEEDED_HERE)
def test_a_missing_extra_is_one_line_that_ends_with_what_installs_it_for_this_python(
    needy: str, purpose: str, module: str, extra: str, tmp_path: Path
) -> None:
    if "kvoffload.tiers" in needy and kvoffload.IMPLEMENTATION == "python":
        pytest.skip("tiers need the extensions")
    (tmp_path / "trace.jsonl").write_text("{}\n")
    (tmp_path / "trace.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    program, *arguments = needy.split(" ")
    is_command = program == "kvoffload"
    code = f"from kvoffload.__main__ import main; sys.exit(main({arguments}))"
    code = HIDE.format(module) + (code if is_command else needy)
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = run_python("-c", code, cwd=tmp_path, env=env)
    hint = f"{purpose} needs {module}: {PIP} install 'kvoffload[{extra}]'"
    if is_command:
        assert (done.returncode, done.stderr) == (2, f"kvoffload: {hint}\n")
    else:
        last = done.stderr.splitlines()[-1]
        assert last == f"kvoffload.errors.MissingExtraError: {hint}"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.jsonl", "trace.zst"}


def sources() -> Iterator[tuple[str, str]]:
    for path in PACKAGE.rglob("*.py"):
        yield str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")


def calls() -> Iterator[tuple[str, str]]:
    """Yield the purpose and the extra of each call of `require` in the library."""
    for _, text in sources():
        if not re.search(r"from kvoffload\._extras import .*\brequire\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                purpose, *extra = map(ast.literal_eval, node.args[1:])
                yield purpose, *(extra or ["cli"])


def test_the_cases_are_all_there_are() -> None:
    assert set(calls()) == {(purpose, extra) for _, purpose, _, extra in CASES}


def test_no_other_line_tells_how_to_install_anything() -> None:
    """Such a line would name a bare pip."""
    assert [name for name, text in sources() if re.search(r"pip3? install\b", text)] == []


@pytest.mark.parametrize(("module", "extra"), sorted({case[2:] for case in CASES}))
def test_the_extra_that_is_named_installs_what_is_missing(module: str, extra: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (held,) = re.findall(rf"^{extra} = (\[.*\])", text, re.MULTILINE)
    wanted = "backports.zstd" if module == zstd_module() else module
    names = [re.split(r"[^\w.]", each)[0] for each in ast.literal_eval(held)]
    assert wanted in names


def test_in_a_source_tree_that_is_not_installed_no_index_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(MissingExtraError) as caught:
        require("kvoffload.no_such_module", "a feature", "plot")
    command = f"{PIP} install -e {shlex.quote(f'{PACKAGE.parent}[plot]')}"
    assert str(caught.value) == f"a feature needs kvoffload.no_such_module: {command}"
