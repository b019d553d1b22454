"""Damage what a store of KV blocks wrote, ask for the block, and say what the store serves.

Four stores keep blocks in files: kvoffload's slab, the ``fs`` tier of vLLM, the file store of
SGLang's HiCache, and the ``fs`` adapter of LMCache. Those that are installed store two blocks of
random bytes. The file of the first is then damaged in one of three ways, and the store, opened
anew, is asked for that block. It serves the block as stored, serves other bytes, misses, or raises.
Usage::

    $(.ci/vllm-env) -m examples.stacks.flipped_byte
    $(.ci/engine-env sglang) -m examples.stacks.flipped_byte
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

BLOCK_BYTES = 1 << 20
PATIENCE_S = 30.0  # for one call of LMCache's adapter, which answers later

Blocks = dict[bytes, bytes]
"""Key -> bytes."""

Opened = tuple[Callable[[Blocks], None], Callable[[bytes], bytes | None]]
"""Functions that put blocks, and that get the bytes of a key or None."""

Store = Callable[[Path], Opened]
Damage = Callable[[Path, bytes, bytes], None]
"""Change what a store wrote into a folder, knowing the bytes of its two blocks."""


def slab(folder: Path) -> Opened:
    """Open a slab of kvoffload, once per call, as one process has it."""
    from kvoffload.tiers import Namespace, Region, Status, open_tier

    namespace = Namespace(model="model", weights="main", block_bytes=BLOCK_BYTES)
    url = f"slab:{folder}?capacity={8 * BLOCK_BYTES}"

    def put(blocks: Blocks) -> None:
        with open_tier(url, namespace) as tier:
            region = Region.allocate(len(blocks), BLOCK_BYTES)
            tier.attach(region)
            for block_id, data in enumerate(blocks.values()):
                region.write(block_id, data)
            tier.wait([tier.put(list(blocks), list(range(len(blocks))))], timeout_s=PATIENCE_S)

    def get(key: bytes) -> bytes | None:
        with open_tier(url, namespace) as tier:
            region = Region.allocate(1, BLOCK_BYTES)
            tier.attach(region)
            tier.wait([tier.get([key], [0])], timeout_s=PATIENCE_S)
            (done,) = tier.poll()
            return region.read(0) if done.status[0] == Status.OK else None

    return put, get


def vllm_fs(folder: Path) -> Opened:
    """Open a folder with the functions that vLLM's ``fs`` tier stores and loads with."""
    from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

    def path(key: bytes) -> str:
        return str(folder / f"{key.hex()}.bin")

    def put(blocks: Blocks) -> None:
        view = memoryview(bytearray(b"".join(blocks.values())))
        offsets = list(range(0, len(view), BLOCK_BYTES))
        batch_store_block([path(key) for key in blocks], view, offsets, BLOCK_BYTES, False)

    def get(key: bytes) -> bytes | None:
        view = memoryview(bytearray(BLOCK_BYTES))
        try:
            batch_load_block([path(key)], view, [0], BLOCK_BYTES, False)
        except OSError:  # the tier reports these blocks as not loaded
            return None
        return bytes(view)

    return put, get


def sglang_file(folder: Path) -> Opened:
    """Open the file store of SGLang's HiCache."""
    import torch

    try:
        import torchvision  # noqa: F401 - SGLang imports it for models that see
    except RuntimeError:  # its compiled operators are missing on a machine without an accelerator
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    flags = dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False)
    config = HiCacheStorageConfig(**ranks, **sizes, **flags, model_name="model")
    store = HiCacheFile(config, str(folder))

    def put(blocks: Blocks) -> None:
        for key, data in blocks.items():
            store.set(key.hex(), torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def get(key: bytes) -> bytes | None:
        page = store.get(key.hex(), torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
        return None if page is None else page.numpy().tobytes()

    return put, get


def lmcache_fs(folder: Path) -> Opened:
    """Open LMCache's ``fs`` adapter of its second level."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    adapter = FSL2Adapter(FSL2AdapterConfig(str(folder)))

    def key_of(key: bytes) -> object:
        return ObjectKey(key, "model", 0)

    def put(blocks: Blocks) -> None:
        objects = [SimpleNamespace(byte_array=data) for data in blocks.values()]
        adapter.submit_store_task([key_of(key) for key in blocks], objects)
        ends = time.monotonic() + PATIENCE_S
        while not adapter.pop_completed_store_tasks() and time.monotonic() < ends:
            time.sleep(0.01)
        adapter.close()

    def get(key: bytes) -> bytes | None:
        buffer = bytearray(BLOCK_BYTES)
        target = SimpleNamespace(byte_array=memoryview(buffer))
        task = adapter.submit_load_task([key_of(key)], [target])
        ends = time.monotonic() + PATIENCE_S
        while (found := adapter.query_load_result(task)) is None and time.monotonic() < ends:
            time.sleep(0.01)
        adapter.close()
        return bytes(buffer) if found is not None and found.test(0) else None

    return put, get


STORES: dict[str, tuple[str, Store]] = {
    "kvoffload slab": ("kvoffload", slab),
    "vLLM fs": ("vllm", vllm_fs),
    "SGLang file": ("sglang", sglang_file),
    "LMCache fs": ("lmcache", lmcache_fs),
}
"""Name -> the module that has to be installed, and what opens the store."""


def place(folder: Path, data: bytes) -> tuple[Path, int]:
    """Return the file that holds these bytes, and where in it they begin."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
            return path, at
    raise ValueError(f"folder must hold the stored bytes, got {folder}")


def write(path: Path, at: int, data: bytes) -> None:
    """Write bytes into a file from an offset on."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(folder: Path, first: bytes, _second: bytes) -> None:
    """Change one byte in the middle of the first block."""
    path, at = place(folder, first)
    middle = BLOCK_BYTES // 2
    write(path, at + middle, bytes([first[middle] ^ 1]))


def cut(folder: Path, first: bytes, _second: bytes) -> None:
    """End the file in the middle of the first block."""
    path, at = place(folder, first)
    with path.open("r+b") as file:
        file.truncate(at + BLOCK_BYTES // 2)


def misplace(folder: Path, first: bytes, second: bytes) -> None:
    """Write the second block where the first one was."""
    path, at = place(folder, first)
    write(path, at, second)


DAMAGES: dict[str, Damage] = {
    "a flipped byte": flip,
    "a cut file": cut,
    "another block's bytes": misplace,
}
"""Name -> what does it to the folder of a store."""


def outcome(store: Store, damage: Damage) -> str:
    """Return what a store does with a block that was damaged on its medium."""
    draw = random.Random(7)
    first, second = draw.randbytes(BLOCK_BYTES), draw.randbytes(BLOCK_BYTES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put, _ = store(folder)
        put({b"first" * 4: first, b"other" * 4: second})
        damage(folder, first, second)
        _, get = store(folder)
        try:
            served = get(b"first" * 4)
        except OSError as error:
            return f"raises {type(error).__name__}"
    if served is None:
        return "miss"
    return "the block" if served == first else "other bytes"


def main() -> None:
    """Print a line per store and damage."""
    for name, (module, store) in STORES.items():
        if find_spec(module) is None:
            print(f"{name}: not installed")
            continue
        for damage, make in DAMAGES.items():
            print(f"{name}, {damage}: {outcome(store, make)}")


if __name__ == "__main__":
    main()
