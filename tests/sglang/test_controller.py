"""SGLang's own controller, with its threads, stores prompts and loads them from a tier."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.sglang.engine import (
    PAGE_TOKENS,
    Controller,
    device_pool,
    host_pool,
    mamba_pool,
    page_bytes,
    page_keys,
    slab,
)

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


def test_a_medium_that_is_gone_is_a_miss(tmp_path, close_all):
    engine = Controller(URLS["directory"](tmp_path))
    close_all.append(engine)
    engine.store(PROMPTS[0])
    shutil.rmtree(tmp_path / "kv")
    assert engine.load(PROMPTS[0]) == []


def pools_of(url: str, *, side: bool = False) -> dict:
    """Return memory and tier of the pools of a model with states and windows."""
    return {
        "mamba": (mamba_pool(side=side), url),
        "swa": (host_pool(device_pool(), "page_first_direct"), url),
    }


def block_of(pool, block: int) -> bytes:
    return page_bytes(pool, block * pool.page_size)


@pytest.mark.parametrize("side", [False, True], ids=["states in place", "states copied"])
@pytest.mark.parametrize("copied", [False, True], ids=["pages in place", "pages copied"])
def test_a_prompt_is_resumed_where_its_states_are(copied, side, tmp_path, close_all):
    """Of a prompt of eight pages, states are stored with its first three, five and all pages."""
    url = slab(tmp_path, CAPACITY)
    engine = Controller(url, copied=copied, pools=pools_of(url, side=side))
    close_all.append(engine)
    mamba, swa = engine.pools[PoolName.MAMBA], engine.pools[PoolName.SWA]
    prompt, stored = PROMPTS[0], []
    for number, pages in enumerate((3, 5, 8)):
        states = {PoolName.MAMBA: [number], PoolName.SWA: [2 * number, 2 * number + 1]}
        stored += engine.store(prompt[: pages * PAGE_TOKENS], states)[len(stored) :]
    before = [block_of(mamba, number) for number in range(3)]
    windows = [block_of(swa, block) for block in range(6)]
    for asked, resumed, number in ((8, 8, 2), (7, 5, 1), (5, 5, 1), (4, 3, 0), (2, 0, None)):
        slot = {PoolName.MAMBA: [20 + asked], PoolName.SWA: [20, 21]}
        assert engine.load(prompt[: asked * PAGE_TOKENS], slot) == stored[:resumed]
        if number is None:
            continue
        assert engine.loaded["mamba"] == 1
        assert engine.loaded["swa"] == 2
        assert block_of(mamba, 20 + asked) == before[number]
        assert [block_of(swa, block) for block in (20, 21)] == windows[2 * number : 2 * number + 2]
    branch = [*prompt[: 6 * PAGE_TOKENS], *range(9000, 9000 + 2 * PAGE_TOKENS)]
    assert engine.load(branch, {PoolName.MAMBA: [9]}) == stored[:5]
    assert block_of(mamba, 9) == before[1]


def test_pages_of_an_indexer_come_with_those_of_the_cache(tmp_path, close_all):
    """They are at the same places; SGLang loads both in turns of 128 pages."""
    url = slab(tmp_path, CAPACITY)
    indexer = host_pool(device_pool(head_size=2))
    engine = Controller(url, pools={"indexer": (indexer, url), "mamba": (mamba_pool(), url)})
    close_all.append(engine)
    prompt = PROMPTS[0]
    stored = engine.store(prompt, {PoolName.MAMBA: [3]})
    keys = page_keys(prompt)
    before = [block_of(indexer, block) for block in range(8)]  # the first that were free
    indexer.kv_buffer.view(torch.uint8).random_()
    assert engine.load(prompt, {PoolName.MAMBA: [4]}) == stored
    found = [block_of(indexer, block) for block in range(indexer.page_num)]
    assert [found.count(page) for page in before] == [1] * 8
    assert engine.storage.stats("indexer")["blocks"] == len(keys)
    (path,) = [path for path in tmp_path.rglob("blocks.dat") if before[5] in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(before[5])] ^= 1
    path.write_bytes(data)
    assert engine.load(prompt) == stored[:5]


@pytest.mark.parametrize("has_states", [False, True])
def test_a_restarted_engine_resumes_where_the_one_before_did(has_states, tmp_path, close_all):
    url = slab(tmp_path, CAPACITY)
    first, second = {PoolName.MAMBA: [4]}, {PoolName.MAMBA: [11]}
    pools = [pools_of(url) if has_states else {} for _ in range(2)]
    engine = Controller(url, pools=pools[0])
    state = block_of(engine.pools[PoolName.MAMBA], 4) if has_states else None
    pages = engine.store(PROMPTS[0], first if has_states else None)
    engine.close()
    engine = Controller(url, pools=pools[1])
    close_all.append(engine)
    assert engine.storage.stats()["restored"] == len(pages)
    assert engine.load(PROMPTS[0], second if has_states else None) == pages
    assert not has_states or block_of(engine.pools[PoolName.MAMBA], 11) == state


def test_what_is_stored_can_be_forgotten_with_its_states(tmp_path, close_all):
    url = slab(tmp_path, CAPACITY)
    engine = Controller(url, pools=pools_of(url))
    close_all.append(engine)
    engine.store(PROMPTS[0], {PoolName.MAMBA: [4]})
    assert engine.controller.clear_storage_backend()
    assert engine.load(PROMPTS[0]) == []
    engine.store(PROMPTS[0])
    assert engine.load(PROMPTS[0], {PoolName.MAMBA: [11]}) == []
    assert len(engine.load(PROMPTS[0])) == 8


def test_ranks_resume_at_a_page_that_all_can_and_each_loads_its_own(tmp_path):
    """The shorter of what each alone would resume, 8 and 6 pages, is no page at which both can."""
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
    for (_, error), rank in zip(ended, ranks, strict=True):
        assert rank.returncode == 0, error[-3000:]
    # of the second prompt what is before the page that one of them found damaged
    assert [json.loads(out.splitlines()[-1]) for out, _ in ended] == [
        {"alone": [2, 4, 8], "pages": [2, 3], "are_right": True},
        {"alone": [2, 6], "pages": [2, 3], "are_right": True},
    ]
