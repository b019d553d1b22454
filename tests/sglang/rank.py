"""A tensor-parallel rank as a process of its own: stores prompts, loads them, says what came.

    python -m tests.sglang.rank NUMBER SIZE FILE FOLDER

Each rank has a slab below the same folder. The last one damages a page of its slab in between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import tests.sglang.conftest  # noqa: F401  (so that SGLang can be imported)
from tests.sglang.engine import PAGE_TOKENS, Controller, slab

CAPACITY = 1 << 20
PROMPTS = [list(range(start, start + 8 * PAGE_TOKENS)) for start in (0, 1000)]
DAMAGED = 3  # page of the second prompt


def main(number: int, size: int, file: str, folder: Path) -> dict:
    engine = Controller(slab(folder, CAPACITY), rank=(number, size, file))
    stored = [engine.store(prompt) for prompt in PROMPTS]
    torch.distributed.barrier()
    if number == size - 1:
        own = folder / engine.storage.namespace.fingerprint.hex()
        (path,) = own.rglob("blocks.dat")
        data = bytearray(path.read_bytes())
        data[data.index(stored[1][DAMAGED])] ^= 1
        path.write_bytes(data)
    torch.distributed.barrier()
    # Ranks share the number of pages, each has its own bytes.
    loaded = [engine.load(prompt) for prompt in PROMPTS]
    are_right = [
        pages == before[: len(pages)] for pages, before in zip(loaded, stored, strict=True)
    ]
    engine.close()
    torch.distributed.barrier()
    return {"pages": [len(pages) for pages in loaded], "are_right": are_right}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))))
