"""The tutorial's output is that of the command on a public trace, and its tables are right.

The trace is Mooncake's conversation trace; ``KVOFFLOAD_TRACES`` names the folder it is read from.
"""

import doctest
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("click", reason="the command needs the cli extra")

from kvoffload.advise import (
    RecordedTrace,
    Setup,
    accelerator,
    advise,
    details,
    engine_of,
    model_shape,
)
from kvoffload.advise.accelerators import accelerator_names
from kvoffload.advise.advice import DEVICE_SHARES
from kvoffload.advise.subject import Subject
from kvoffload.cli._advice_result import print_answer
from kvoffload.policies import registry
from kvoffload.replay import Selection
from kvoffload.traces import Trace

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


def shown_policies(shown):
    """Return the policies in a page's table: one that was added later has no row there yet."""
    rows = set(re.findall(r"^(?!none )([a-z0-9-]+)(?: \*)? +\d+\.\d %", shown, re.MULTILINE))
    assert {"lru", "hit-density", "belady", "infinite"} <= rows
    assert rows <= {*registry.names(), "belady", "infinite"}
    return tuple(name for name in registry.names() if name in rows)


@needs_trace
@pytest.mark.thorough
def test_the_tutorial_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs/tutorial/from-trace-to-configuration.md").read_text(encoding="utf-8")
    command = "$ kvoffload advise conversation_trace.jsonl --model llama-3.1-70b --capacity 1TiB\n"
    shown = text.partition(command)[2].partition("\n```\n")[0]
    model = model_shape("llama-3.1-70b")
    engine = engine_of(model, accelerator("h100"))
    alone = Setup(
        2**40,
        512,
        model.bytes_per_token(),
        full_blocks=True,
        engine=engine,
    )
    recorded = RecordedTrace.of(Selection(Trace(TRACE), full_block_tokens=512))
    behind = replace(alone, device_memory=engine.device_memory, device_is_assumed=True)
    advice = advise(recorded, behind, jobs=2)
    shares = tuple(
        advise(recorded, replace(behind, device_memory=int(engine.device_memory * share)), jobs=2)
        for share in DEVICE_SHARES
    )
    subject = Subject(
        advice, "conversation_trace.jsonl", model,
        alone=advise(recorded, alone, jobs=2), details=details(recorded, advice), shares=shares,
    )  # fmt: skip
    print_answer(subject)
    assert len(words(shown)) > 200
    assert matches(shown, capsys.readouterr().out)


@needs_trace
def test_the_size_of_a_disk_is_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs/how-to/tiers.md").read_text(encoding="utf-8")
    command = "--capacity 1TiB --device-memory 512GiB\n"
    shown = text.partition(command)[2].partition("\n```\n")[0]
    model = model_shape("llama-3.1-70b")
    engine = engine_of(model, accelerator("h100"))
    setup = Setup(
        2**40,
        512,
        model.bytes_per_token(),
        full_blocks=True,
        device_memory=2**39,
        engine=engine,
        policies=shown_policies(shown),
    )
    advice = advise(Selection(Trace(TRACE), full_block_tokens=512), setup)
    print_answer(Subject(advice, "conversation_trace.jsonl", model))
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
