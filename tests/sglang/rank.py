"""A tensor-parallel rank as a process of its own: stores prompts, loads them, says what came.

    python -m tests.sglang.rank NUMBER SIZE FILE FOLDER

Each rank has slabs below the same folder, and stores states of other pages of the first prompt; of
the last rank's, one state is damaged, and a page of the second prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import tests.sglang.conftest  # noqa: F401  (so that SGLang can be imported)
from tests.sglang.engine import (
    PAGE_TOKENS,
    Controller,
    PoolName,
    mamba_pool,
    page_bytes,
    page_keys,
    slab,
    trailing,
)

CAPACITY = 1 << 20
PROMPTS = [list(range(start, start + 8 * PAGE_TOKENS)) for start in (0, 1000)]
DAMAGED = 3  # page of the second prompt
STATES = [(2, 4, 8), (2, 6, 8)]  # pages of the first prompt at which a rank has states
LOST = 8  # the last rank's


def damage(folder: Path, content: bytes) -> None:
    """Change a byte of what a slab has stored."""
    (path,) = [path for path in folder.rglob("blocks.dat") if content in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(content)] ^= 1
    path.write_bytes(data)


def main(number: int, size: int, file: str, folder: Path) -> dict:
    url = slab(folder, CAPACITY)
    host = mamba_pool()
    engine = Controller(url, rank=(number, size, file), pools={"mamba": (host, url)})
    prompt, name = PROMPTS[0], PoolName.MAMBA
    ends, stored = STATES[number], []
    for end in (2, 4, 6, 8):
        slots = {name: [end]} if end in ends else None
        stored += engine.store(prompt[: end * PAGE_TOKENS], slots)[len(stored) :]
    before = {end: page_bytes(host, end) for end in ends}
    other = engine.store(PROMPTS[1])
    if number == size - 1:
        damage(folder, other[DAMAGED])
        damage(folder, before[LOST])
        loaded = engine.storage.batch_get_v2(
            [trailing(name, page_keys(prompt)[LOST - 1 : LOST], torch.tensor([20]))]
        )
        assert loaded == {name: [False]}
    found = engine.storage.batch_exists_v2(page_keys(prompt), [trailing(name, ["?"], None)])
    torch.distributed.barrier()
    came = engine.load(prompt, {name: [9]})
    are_right = came == stored[: len(came)] and page_bytes(host, 9) == before[len(came)]
    torch.distributed.barrier()
    # Ranks share the number of pages, each has its own bytes.
    pages = engine.load(PROMPTS[1])
    are_right &= pages == other[: len(pages)]
    engine.close()
    torch.distributed.barrier()
    return {
        "alone": found.restorable_prefix_pages,
        "pages": [len(came), len(pages)],
        "are_right": are_right,
    }


if __name__ == "__main__":
    number, size, file, folder = sys.argv[1:]
    print(json.dumps(main(int(number), int(size), file, Path(folder))))
