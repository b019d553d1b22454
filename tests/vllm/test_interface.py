"""The declared interface of vLLM, against a vLLM in which one name at a time is renamed.

``_upstream`` finds every difference from what a release declares, and says which; a difference in
what only tiers use leaves the plain spec alone; a newer release without any difference works.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvoffload.integrations.vllm import _upstream
from tests.isolated.scripts import run_python
from tests.vllm.renamed import PARTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "kvoffload" / "integrations" / "vllm"
RELEASE = _upstream.installed_release()


#: Declared, and no names in what is copied: what vLLM's statistics inherit.
INHERITED = {"data"}


def copied(module: str) -> bool:
    """Return whether a module is among what is renamed."""
    path = "/".join(module.split(".")[1:])
    return any(path.startswith(part.removesuffix(".py")) for part in PARTS)


def declared(kind: str) -> tuple[set[str], set[str]]:
    """Return every name of vLLM that a release declares: modules, what they hold; what that holds.

    Modules have their dotted names; the third kind are methods, fields, members and parameters.
    """
    outer, inner = set(), set()
    for module, things in getattr(RELEASE, kind).items():
        if not copied(module):
            continue
        outer.add(module)
        for thing, rules in things.items():
            first, *methods = thing.split(".")
            outer.add(first)
            inner |= {
                *methods,
                *(text.partition("=")[0] for found in rules.values() for text in found),
            }
    return outer, inner - outer - {"self"} - INHERITED


PLAIN = declared("plain")
TIERING = tuple(only - plain for only, plain in zip(declared("tiering"), PLAIN, strict=True))
AT_ONCE = 8
"""Inner names that are renamed in one case: none hides another's difference."""


def cases_of(outer: set[str], inner: set[str]) -> list[list[str]]:
    names = sorted(inner - PLAIN[0])
    batches = [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]
    return [*([name] for name in sorted(outer)), *batches]


def run(arguments: list[str], text: str = "", *paths: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python(*arguments, input=text, env=os.environ | env, timeout=900)


def outcomes(folder: Path, cases: list[list[str]]) -> list[tuple[list[str], str, str]]:
    """Return the cases, each with what the plain spec and the tiers say under these names."""
    done = run(["-m", "tests.vllm.renamed", str(folder)], json.dumps(cases))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert [names for names, *_ in found] == cases, done.stderr
    return found


def silent(folder: Path, cases: list[list[str]], kind: int) -> list[str]:
    """Return the names that no error gives; 1: of the plain spec, 2: of the tiers.

    Where a name keeps a module from being imported, it hides others of its case, which are then
    renamed alone.
    """
    found = [
        name
        for case in outcomes(folder / str(len(cases)), cases)
        for name in case[0]
        if not re.search(rf"\b{re.escape(name)}\b", case[kind])
    ]
    if not found or all(len(names) == 1 for names in cases):
        return found
    return silent(folder, [[name] for name in found], kind)


def test_where_nothing_is_renamed_nothing_is_said(tmp_path: Path) -> None:
    """The control, with a name that vLLM does not have."""
    cases = [["nonesuch"], ["OffloadingWorker_"]]
    assert outcomes(tmp_path, cases) == [[names, "", ""] for names in cases]


def test_each_name_that_the_plain_spec_uses_is_missed_by_name(tmp_path: Path) -> None:
    cases = cases_of(*PLAIN)
    assert len(cases) > 40
    assert silent(tmp_path, cases, 1) == []


@pytest.mark.nightly
def test_each_name_that_only_tiers_use_is_missed_by_name(tmp_path: Path) -> None:
    cases = cases_of(*TIERING)
    assert len(cases) > 15
    assert silent(tmp_path, cases, 2) == []


@pytest.mark.nightly
def test_no_name_that_only_tiers_use_keeps_the_plain_spec_from_working(tmp_path: Path) -> None:
    found = outcomes(tmp_path, cases_of(*TIERING))
    assert [(names, plain) for names, plain, _ in found if plain] == []


NEWER = """
import logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("vllm.kvoffload").addHandler(Keep())
from kvoffload.integrations.vllm import KVOffloadManager, KVOffloadSpec, KVOffloadTieringSpec
from kvoffload.integrations.vllm import KVOffloadFileTier, _upstream
from vllm.v1.kv_offload.base import ReqContext
manager = KVOffloadManager(2, "arc")
context = ReqContext("r")
output = manager.prepare_store([b"a" * 36, b"b" * 36], context)
manager.complete_store(output.keys_to_store, context)
assert manager.lookup(b"a" * 36, context).name == "HIT"
_upstream.installed_release()
print([line for line in lines if "newer" in line])
"""


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A folder in which the distribution of vLLM says that it is 0.34.0."""
    info = tmp_path / "vllm-0.34.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    return tmp_path


newest = pytest.mark.skipif(
    RELEASE.name != _upstream.RELEASES[-1], reason="compares a newer vLLM with the newest release"
)


@newest
def test_a_newer_release_without_a_difference_works_and_is_warned_of_once(newer: Path) -> None:
    done = run(["-c", NEWER], "", newer)
    assert done.returncode == 0, done.stderr
    warnings = ast.literal_eval(done.stdout.splitlines()[-1])
    assert warnings == [
        (
            "kvoffload: vLLM 0.34.0 is newer than what was tested; its offloading interface is "
            f"that of {RELEASE.name}"
        )
    ]


@newest
def test_a_newer_release_with_a_difference_names_it(newer: Path) -> None:
    broken = "import vllm.v1.kv_offload.base as base\ndel base.OffloadingEvent\n"
    done = run(["-c", broken + "import kvoffload.integrations.vllm"], "", newer)
    assert done.returncode == 1
    assert "found vLLM 0.34.0, whose offloading interface is not that of" in done.stderr
    assert "vllm.v1.kv_offload.base has no OffloadingEvent" in done.stderr


@pytest.mark.parametrize("name", _upstream.RELEASES)
def test_the_interfaces_of_the_releases_differ(name: str) -> None:
    """The control: what is installed has one of them."""
    plain = _upstream.Release.read(name).plain
    found = _upstream.differences(plain, _upstream.describe(plain))
    assert (not found) == (name == RELEASE.name)


def test_the_file_of_the_installed_release_is_what_the_script_writes(tmp_path: Path) -> None:
    """Byte by byte, so that it has all of what is used and nothing else."""
    done = run([str(ROOT / ".ci" / "vllm-interface.py"), str(tmp_path / "written.json")])
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "written.json").read_text("utf-8")
    assert written == (FOLDER / "interfaces" / f"{RELEASE.name}.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        ({"fields": ["a", "b"]}, {"fields": ["a", "b", "c=1"]}, "fields: found c=1"),
        ({"fields": ["a", "b"]}, {"fields": ["a"]}, "fields: expected b; found none"),
        ({"methods": ["a", "b"]}, {"methods": ["a", "c"]}, "methods: expected b; found c"),
        ({"fields": ["a", "b"]}, {"fields": ["b", "a"]}, "fields: expected a, b; found b, a"),
        ({"has": ["a"], "sets": ["b"]}, {"has": ["a"]}, "sets: expected b; found none"),
    ],
)
def test_a_difference_is_said_in_one_line(
    expected: dict[str, list[str]], found: dict[str, list[str]], text: str
) -> None:
    said = _upstream.differences({"vllm.v1": {"N": expected}}, {"vllm.v1": {"N": found}})
    assert said == [f"vllm.v1.N: {text}"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "No such file or directory"),
        ("", "Expecting value"),
        ("[]", "it must have plain and tiering"),
        ('{"plain": {}, "tiering": {}}', "it must have plain and tiering"),
        ('{"plain": {"vllm": {}}}', "it must have plain and tiering"),
        (
            '{"plain": {"vllm": {"N": {"hsa": []}}}, "tiering": {"vllm": {}}}',
            "N: 'hsa' must be a rule",
        ),
        (
            '{"plain": {"vllm": {"N": {"has": "a"}}}, "tiering": {"vllm": {}}}',
            "N: 'has' must be a rule",
        ),
        ('{"plain": {"vllm": {"N": []}}, "tiering": {"vllm": {}}}', "has no attribute 'items'"),
    ],
)
def test_a_file_that_is_missing_or_malformed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, cause: str
) -> None:
    monkeypatch.setattr(_upstream, "_FOLDER", tmp_path)
    if text is not None:
        (tmp_path / "0.33.json").write_text(text)
    with pytest.raises(ImportError, match=re.escape(cause)) as caught:
        _upstream.Release.read("0.33")
    assert str(tmp_path / "0.33.json") in str(caught.value)


def test_no_other_file_of_the_folder_imports_vllm() -> None:
    statement = re.compile(r"^\s*(from|import|cimport)\s+vllm\b", re.MULTILINE)
    text = re.compile(r"""(import_module|__import__)\(\s*f?["']vllm\b""")
    files = [path for path in FOLDER.iterdir() if path.suffix in (".py", ".pyx", ".pxd", ".pyi")]
    assert len(files) > 10
    importing = [
        path.name
        for path in files
        if path.name != "_upstream.py"
        and (statement.search(path.read_text("utf-8")) or text.search(path.read_text("utf-8")))
    ]
    assert importing == []
    assert "importlib.import_module(module)" in (FOLDER / "_upstream.py").read_text("utf-8")


def test_only_declared_names_can_be_had() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'BlockStored'"):
        _ = _upstream.BlockStored
