"""SGLang's own controller, with its threads, stores prompts and loads them from a tier."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang; see .ci/sglang-env")

from tests.sglang.engine import PAGE_TOKENS, Controller, slab

PROMPTS = [list(range(start, start + 8 * PAGE_TOKENS)) for start in (0, 1000, 2000)]
ROOT = Path(__file__).parents[2]
CAPACITY = 1 << 20
RANKS_S = 300
URLS = {
    "slab": lambda folder: slab(folder / "kv", CAPACITY),
    "memory": lambda folder: f"memory:?capacity={CAPACITY}",
    "directory": lambda folder: f"dir:{folder / 'kv'}?capacity={CAPACITY}&ack=stored",
}


@pytest.mark.parametrize("copied", [False, True], ids=["pages in place", "pages copied"])
@pytest.mark.parametrize("tier", URLS)
def test_a_prompt_is_loaded_as_it_was_stored(tier, copied, tmp_path, close_all):
    engine = Controller(URLS[tier](tmp_path), copied=copied)
    close_all.append(engine)
    stored = [engine.store(prompt) for prompt in PROMPTS]
    for prompt, pages in zip(PROMPTS, stored, strict=True):
        assert engine.load(prompt) == pages
        longer = [*prompt, *range(9000, 9000 + PAGE_TOKENS)]
        assert engine.load(longer) == pages  # the page that nobody stored is computed
    assert engine.load(list(range(5000, 5000 + PAGE_TOKENS))) == []


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_pages_are_the_same_in_every_layout(layout, tmp_path, close_all):
    engine = Controller(slab(tmp_path, CAPACITY), layout, copied=layout == "layer_first")
    close_all.append(engine)
    pages = engine.store(PROMPTS[0])
    assert engine.load(PROMPTS[0]) == pages


def test_a_restarted_engine_loads_what_the_one_before_stored(tmp_path, close_all):
    url = slab(tmp_path, CAPACITY)
    first = Controller(url)
    pages = first.store(PROMPTS[0])
    first.close()
    second = Controller(url)
    close_all.append(second)
    assert second.storage.stats()["restored"] == len(pages)
    assert second.load(PROMPTS[0]) == pages


def test_two_engines_share_a_directory(tmp_path, close_all):
    engines = [Controller(URLS["directory"](tmp_path)) for _ in range(2)]
    close_all += engines
    pages = engines[0].store(PROMPTS[0])
    assert engines[1].load(PROMPTS[0]) == pages


def test_what_is_stored_can_be_forgotten(tmp_path, close_all):
    engine = Controller(slab(tmp_path, CAPACITY))
    close_all.append(engine)
    engine.store(PROMPTS[0])
    assert engine.controller.clear_storage_backend()
    assert engine.load(PROMPTS[0]) == []


def test_a_medium_that_is_gone_is_a_miss(tmp_path, close_all):
    engine = Controller(URLS["directory"](tmp_path))
    close_all.append(engine)
    engine.store(PROMPTS[0])
    shutil.rmtree(tmp_path / "kv")
    assert engine.load(PROMPTS[0]) == []


def test_ranks_agree_on_what_comes_and_each_loads_its_own(tmp_path):
    command = [sys.executable, "-m", "tests.sglang.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(number), "2", str(tmp_path / "store"), str(tmp_path / "kv")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=RANKS_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for (out, error), rank in zip(ended, ranks, strict=True):
        assert rank.returncode == 0, error[-3000:]
        # of the second prompt what is before the page that one of them found damaged
        expected = {"pages": [8, 3], "are_right": [True, True]}
        assert json.loads(out.splitlines()[-1]) == expected
