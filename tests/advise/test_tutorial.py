"""The tutorial's output is that of the command on a public trace, and its tables are right.

The trace is Mooncake's conversation trace; ``KVOFFLOAD_TRACES`` names the folder it is read from.
"""

import doctest
import gzip
import os
import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("click", reason="the command needs the cli extra")

from kvoffload.advise import accelerator, model_shape
from kvoffload.advise.accelerators import accelerator_names
from kvoffload.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("KVOFFLOAD_TRACES") or os.devnull)
TRACE = FOLDER / "mooncake_conversation.jsonl.gz"
needs_trace = pytest.mark.skipif(
    not TRACE.exists(), reason=f"no {TRACE.name} in the folder that KVOFFLOAD_TRACES names"
)

if not (ROOT / "docs").is_dir():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)


def words(text):
    """Leave out how text is spaced and how wide its rules are."""
    return re.sub(r"─+", "─", text).split()


def matches(shown, printed):
    """Return whether a page shows what is printed; ``...`` stands for anything."""
    checker = doctest.OutputChecker()
    both = (" ".join(words(text)) for text in (shown, printed))
    return checker.check_output(*both, doctest.ELLIPSIS)


@needs_trace
@pytest.mark.thorough
@pytest.mark.parametrize(
    "page", ["docs/tutorial/from-trace-to-configuration.md", "docs/how-to/tiers.md"]
)
def test_a_page_shows_what_is_printed(capsys, monkeypatch, tmp_path, page):
    text = (ROOT / page).read_text(encoding="utf-8").replace(" \\\n", "")
    (tmp_path / "conversation_trace.jsonl").write_bytes(gzip.decompress(TRACE.read_bytes()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    console = text.partition("$ kvoffload advise ")[2].partition("\n```\n")[0]
    options, _, shown = console.partition("\n")
    assert main(["advise", *options.split(), "--quiet", "--jobs=2"]) == 0
    assert len(words(shown)) > 80
    assert matches(shown, capsys.readouterr().out)


def test_the_table_of_models_is_right():
    text = (ROOT / "docs/how-to/advise.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| \d+ × .*$", text, re.MULTILINE)
    assert len(rows) > 4
    for name in rows:
        shape = model_shape(name)
        layout = shape.layout()
        groups = []
        for group, count in Counter(layout.groups).items():
            window = f" {group.window:,}" if group.window else ""
            groups.append(
                f"{count} × {group.layers} {group.kind}{window}, {group.block_tokens:,} tokens"
            )
        cells = [f"`{name}`", "; ".join(groups), f"{layout.block_bytes:,}"]
        source = f"[{shape.repository}]({shape.source})"
        assert f"| {' | '.join([*cells, source])} |" in text


@pytest.mark.parametrize("name", accelerator_names())
def test_the_table_of_accelerators_is_right(name):
    text = (ROOT / "docs/how-to/advise.md").read_text(encoding="utf-8")
    found = accelerator(name)
    figures = [found.memory / 1e9, found.flops / 1e12, found.link / 1e9]
    cells = [f"`{name}`", *(f"{figure:,.0f}" for figure in figures)]
    row = re.escape(f"| {' | '.join(cells)} | [") + r"[^\]]+\]\(" + re.escape(found.source)
    assert re.search(row, text)
