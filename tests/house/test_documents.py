"""Every code block of the documents is run, and every public name is in the reference.

``python`` blocks share one namespace a document, doctest blocks compare their output.
``sh`` blocks must succeed; ``console`` blocks must print what stands below each ``$`` line, where
``...`` stands for anything. A block is left out only by ``<!--- skip: next "the reason" --->``.
"""

import ast
import contextlib
import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Document, Example
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

import kvoffload
from kvoffload import IMPLEMENTATION
from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.parts
)
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MINUTES_IN_PYTHON = {"advise.md", "from-trace-to-configuration.md"}
"""Documents whose commands compare all policies at many capacities."""
LANGUAGES = {"python", "sh", "console", "text", "json", "toml", "cython", "c", "bibtex", "yaml"}

if not (ROOT / "docs").is_dir():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)


COMMAND = Path(sys.executable).with_name("kvoffload")


def shell(command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a reader with this environment activated would, 100 columns wide."""
    if not COMMAND.exists():
        pytest.skip("kvoffload is not installed in this environment")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env={**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_script(example: Example) -> str | None:
    done = shell(example.parsed)
    if done.returncode:
        return f"{example.parsed}\nexit status {done.returncode}\n{done.stdout}{done.stderr}"
    return None


def run_console(example: Example) -> str | None:
    for part in re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        length = 1
        while lines[length - 1].endswith("\\\n"):
            length += 1
        command, expected = "".join(lines[:length]), "".join(lines[length:])
        # the pages show a compiled build
        expected = expected.replace("compiled implementation", f"{IMPLEMENTATION} implementation")
        done = shell(command)
        printed = done.stdout + done.stderr
        if not doctest.OutputChecker().check_output(expected, printed, OUTPUT):
            return f"$ {command}expected:\n{expected}\nprinted:\n{printed}"
    return None


PARSERS = [
    SkipParser(),
    PythonCodeBlockParser(doctest_optionflags=OUTPUT),
    CodeBlockParser("sh", run_script),
    CodeBlockParser("console", run_console),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if IMPLEMENTATION == "python" and path.name in MINUTES_IN_PYTHON:
        pytest.skip("takes minutes in Python")
    if IMPLEMENTATION == "python" and path.name == "watch.md":
        pytest.skip("a watch needs the extensions")
    monkeypatch.chdir(tmp_path)
    for example in Document.parse(str(path), *PARSERS):
        with contextlib.suppress(SkipTest):  # a block left out, with its reason
            example.evaluate()


def test_the_page_for_python_runs_and_is_short(tmp_path: Path) -> None:
    for library in ("polars", "matplotlib"):
        pytest.importorskip(library, reason="needs polars and the plot extra")
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    page = (ROOT / "docs" / "tutorial" / "in-python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 60
    code += """
for row in cells:
    configuration = Configuration(policy=row["policy"], host=row["blocks"])
    assert row["ratio"] == replay(trace, configuration).hit_ratio, row
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = run_python("-c", code, cwd=tmp_path, env=env, timeout=1800)
    assert not done.returncode, done.stderr
    assert "hit-density" in done.stdout
    assert (tmp_path / "hits.svg").stat().st_size > 1000


def test_code_blocks_name_a_language_that_is_run_or_is_no_program() -> None:
    for path in DOCUMENTS:
        fences = re.findall(r"^ *(```+)([^`\n]*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, path
        languages = {info for _, info in fences[::2] if not info.startswith("{")}
        assert languages <= LANGUAGES, path  # neither run nor known as text


def test_yaml_on_the_pages_is_valid_and_refers_to_plugins_that_it_lists() -> None:
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "how-to" / "router-configs.md").read_text(encoding="utf-8")
    picker, chart = map(
        yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    )
    listed = {plugin["type"] for plugin in picker["plugins"]}
    assert set(re.findall(r"pluginRef: ([\w-]+)", page)) <= listed
    assert chart == {"routerSpec": {"routingLogic": "session", "sessionKey": "x-session-id"}}


def without_code(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return what may stand behind `#`: headings, as GitHub and MyST write them, and labels."""
    text = without_code(path)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_links_lead_to_files_and_headings() -> None:
    """In the source tree too, where there is no Sphinx to find a page without its suffix."""
    broken = []
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)(?: \"[\w.]+\")?\)", without_code(path)):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if re.match(r"https?:", link) or (
                target.is_file() and (not anchor or anchor in anchors(target))
            ):
                continue
            broken.append((path.name, link))
    assert broken == []


def test_the_tables_of_the_reference_are_as_their_script_makes_them(tmp_path: Path) -> None:
    path = ROOT / ".ci" / "make-reference.py"
    if not path.exists():
        pytest.skip("the source tree is not beside the tests")
    shutil.copytree(ROOT / "docs" / "reference", tmp_path, dirs_exist_ok=True)
    subprocess.run([sys.executable, str(path), str(tmp_path)], check=True)
    for page in tmp_path.glob("*.md"):
        is_current = page.read_bytes() == (ROOT / "docs" / "reference" / page.name).read_bytes()
        assert is_current, f"{page.name}: run `python .ci/make-reference.py`"


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    """``kvoffload[extra]`` adds to a package that is installed already, without asking for it."""
    command = re.compile(r"pip install (?!.*--no-index)[^&\n]*\bkvoffload\b(?!\[).*|\buvx .*")
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    pages = [name for name, text in texts.items() if command.search(text)]
    assert pages == ["README.md"]
    assert "not on PyPI yet" in texts["README.md"].partition("pip install kvoffload")[0]


PUBLIC_MODULES = ("", "traces", "replay", "advise", "tiers", "integrations/vllm")


def public_names(module: str) -> set[str]:
    """Return ``__all__`` of a module, which need not be importable here."""
    if not module:
        return set(kvoffload.__all__)
    source = ROOT / "kvoffload" / module / "__init__.py"
    if not source.is_file():
        pytest.skip("the source tree is not beside the tests")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{source} has no __all__")


def documented_names() -> set[str]:
    """Return the full names of all that the reference documents: in tables, in directives."""
    found = set()
    titled = re.compile(r'^\| \[`\w+`\]\([^)\s]+ "(kvoffload[\w.]*)"\)', re.MULTILINE)
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        module = ""
        text = page.read_text(encoding="utf-8")
        found.update(titled.findall(text))
        directive = re.compile(r"^\.\. (?:py:)?(auto)?(\w+):: ([\w.]+)", re.MULTILINE)
        for _, kind, name in directive.findall(text):
            if kind in {"currentmodule", "module"}:
                module = name
            else:
                found.add(name if name.startswith("kvoffload.") else f"{module}.{name}")
    return found


@pytest.mark.parametrize("module", PUBLIC_MODULES, ids=lambda module: module or "kvoffload")
def test_every_public_name_has_its_place_in_the_reference(module: str) -> None:
    dotted = ".".join(["kvoffload", *module.split("/")]).rstrip(".")
    names = {f"{dotted}.{name}" for name in public_names(module)}
    assert len(names) > 5
    assert names - documented_names() == set()
