"""LMCache's storage manager over a slab: `python -m tests.lmcache.storing FOLDER store|check FILE`.

`store` stores chunks until it is killed, and writes the number of each that LMCache is told is in
the second level; `check` prefetches the numbers of a file and prints how many are missing, wrong.
"""

import sys
import time
from pathlib import Path

import numpy as np
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from .memory import KIB, MIB, config_of, keys_of, layout, slab, spec

CHUNK = 64 * KIB
BATCH = 8


class Told(L2AdapterListener):
    def __init__(self, file) -> None:
        self.file = file

    def on_l2_keys_stored(self, keys, sizes) -> None:
        for key in keys:
            self.file.write(f"{int.from_bytes(key.chunk_hash, 'big')}\n")
        self.file.flush()

    def on_l2_keys_accessed(self, keys) -> None:
        pass

    def on_l2_keys_deleted(self, keys) -> None:
        pass


def manager_of(folder: Path, memory: int = 64 * MIB, seconds: int = 300) -> StorageManager:
    """Return a manager with so much memory, whose locks expire after so many seconds."""
    adapter = config_of(spec(slab(folder, 512 * MIB), CHUNK))
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(
                L1MemoryManagerConfig(memory, use_lazy=False, shm_name=""),
                write_ttl_seconds=2 * seconds,
                read_ttl_seconds=seconds,
            ),
            EvictionConfig("LRU", trigger_watermark=0.5, extra_logging_enabled=False),
            L2AdaptersConfig([adapter]),
        )
    )


def chunk(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, CHUNK, np.uint8)


def store(manager: StorageManager, file: Path) -> None:
    with file.open("a") as told:
        manager.register_l2_listener(Told(told))
        numbers = [int(line) for line in file.read_text().split()]
        number = max(numbers, default=-1) + 1000
        while True:
            keys = keys_of(number, BATCH)
            reserved = manager.reserve_write(keys, layout(CHUNK))
            for key, obj in reserved.items():
                which = int.from_bytes(key.chunk_hash, "big")
                np.frombuffer(obj.byte_array, np.uint8)[:] = chunk(which)
            manager.finish_write(list(reserved))
            if len(reserved) < BATCH:
                time.sleep(0.05)
            number += BATCH


def check(manager: StorageManager, file: Path) -> None:
    missing = wrong = 0
    numbers = [int(line) for line in file.read_text().split()]
    for first in range(0, len(numbers), BATCH):
        keys = [keys_of(number, 1)[0] for number in numbers[first : first + BATCH]]
        groups = [GroupedObjectKeys(keys, 0, layout(CHUNK))]
        handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups, fetching_policy="full"))
        assert manager.wait_prefetch_status(handle, 30)
        (cells,) = manager.query_prefetch_status(handle).hit_cells
        hit = [key for index, key in enumerate(keys) if cells.test(index)]
        missing += len(keys) - len(hit)
        found, objects = manager.unsafe_read(hit)
        assert found == hit
        for key, obj in zip(found, objects, strict=True):
            bytes_ = np.frombuffer(obj.byte_array, np.uint8)
            wrong += not (bytes_ == chunk(int.from_bytes(key.chunk_hash, "big"))).all()
        manager.finish_read_prefetched(hit)
    print(f"checked {len(numbers)} missing {missing} wrong {wrong}", flush=True)


if __name__ == "__main__":
    made = manager_of(Path(sys.argv[1]))
    print("ready", flush=True)
    {"store": store, "check": check}[sys.argv[2]](made, Path(sys.argv[3]))
    made.close()
