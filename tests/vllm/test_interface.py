"""The declared interface of vLLM, against the installed one and against one that lacks a name.

``_upstream`` finds every difference from what a release declares, and says which; a difference in
what only tiers use leaves the plain spec alone; a newer release without any difference works.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from pathlib import Path

import pytest

from kvoffload.integrations.structure import describe, differences
from kvoffload.integrations.vllm import _upstream
from tests.isolated.scripts import run_copy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "kvoffload" / "integrations" / "vllm"
RELEASE = _upstream.installed_release()


@pytest.mark.parametrize("kind", _upstream.KINDS)
def test_each_name_and_module_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of vLLM's own modules and classes, one after the other."""
    _upstream.check_tiering()  # all of them are imported, and nothing is missing
    for module, names in getattr(RELEASE, kind).items():
        for dotted in names:
            owner, _, name = f"module.{dotted}".rpartition(".")
            holder = operator.attrgetter(owner)(type("", (), {"module": sys.modules[module]}))
            if name not in vars(holder):
                continue  # of a class above, where another case removes it
            with monkeypatch.context() as patched:
                patched.delattr(holder, name)
                if hasattr(holder, name):
                    continue  # of a class above, again
                with pytest.raises(ImportError, match=rf"\b{re.escape(dotted)}\b"):
                    _upstream._check(RELEASE, kind)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=f"{re.escape(module)} cannot be imported"):
                _upstream._check(RELEASE, kind)


def test_no_name_that_only_tiers_use_keeps_the_plain_spec_from_working() -> None:
    """They are missing once vLLM's own modules have been imported."""
    outer = {
        module: {name.partition(".")[0] for name in names}
        - {name.partition(".")[0] for name in RELEASE.plain.get(module, ())}
        for module, names in RELEASE.tiering.items()
    }
    program = f"""
import importlib, sys
modules = {{name: importlib.import_module(name) for name in {[*RELEASE.plain, *outer]!r}}}
for module, names in {outer!r}.items():
    for name in names:
        delattr(modules[module], name)
    if module not in {[*RELEASE.plain]!r}:
        sys.modules[module] = None
from kvoffload.integrations.vllm import KVOffloadManager, KVOffloadSpec
print("plain")
from kvoffload.integrations.vllm import KVOffloadTieringSpec
"""
    done = run_copy(program)
    assert done.stdout.splitlines()[-1:] == ["plain"], done.stderr
    assert "tiering interface is not that of" in done.stderr


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
    done = run_copy(NEWER, newer)
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
    done = run_copy(broken + "import kvoffload.integrations.vllm", newer)
    assert done.returncode == 1
    assert "found vLLM 0.34.0, whose offloading interface is not that of" in done.stderr
    assert "vllm.v1.kv_offload.base has no OffloadingEvent" in done.stderr


@pytest.mark.parametrize("name", _upstream.RELEASES)
def test_the_interfaces_of_the_releases_differ(name: str) -> None:
    """The control: what is installed has one of them."""
    plain = _upstream.Release.read(name).plain
    found = differences(plain, describe(plain))
    assert (not found) == (name == RELEASE.name)


def test_the_file_of_the_installed_release_is_what_the_script_writes(tmp_path: Path) -> None:
    """Byte by byte, so that it has all of what is used and nothing else."""
    script = ROOT / ".ci" / "interface.py"
    arguments = [str(script), "vllm", str(tmp_path / "written.json")]
    program = f"import runpy, sys; sys.argv[:] = {arguments}\n"
    done = run_copy(program + "runpy.run_path(sys.argv[0], run_name='__main__')")
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
    said = differences({"vllm.v1": {"N": expected}}, {"vllm.v1": {"N": found}})
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


def test_only_declared_names_can_be_had() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'BlockStored'"):
        _ = _upstream.BlockStored
