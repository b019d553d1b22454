"""LMCache's memory, objects and keys, and adapters made as LMCache makes them."""

from __future__ import annotations

import random
import select
import time
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

KIB = 2**10
MIB = 2**20
SMALL, LARGE = 16 * KIB, 40 * KIB


class Arena:
    """Host memory as LMCache's, with an allocator that only goes on."""

    def __init__(self, nbytes: int = 16 * MIB) -> None:
        self.memory = make_aligned_tensor(nbytes, 4096)
        self.desc = L1MemoryDesc(self.memory.data_ptr(), nbytes, 4096)
        self.used = 0

    def objects(self, count: int, nbytes: int = SMALL, fill: int | None = None) -> list:
        """Allocate objects, of random bytes or of one."""
        made = []
        for _ in range(count):
            made.append(object_of(self.memory[self.used : self.used + nbytes], fill))
            self.used += -(-nbytes // 4096) * 4096
        return made


def object_of(raw: torch.Tensor, fill: int | None = None) -> TensorMemoryObj:
    if fill is None:
        raw.copy_(torch.frombuffer(bytearray(random.randbytes(len(raw))), dtype=torch.uint8))
    else:
        raw.fill_(fill)
    metadata = MemoryObjMetadata(
        shape=raw.shape,
        dtype=torch.uint8,
        address=0,
        phy_size=len(raw),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
    )
    return TensorMemoryObj(raw_data=raw, metadata=metadata, parent_allocator=None)


def keys_of(first: int, count: int, **fields: Any) -> list[ObjectKey]:
    given = {"model_name": "org/model", "kv_rank": 0, **fields}
    return [
        ObjectKey(chunk_hash=number.to_bytes(32, "big"), **given)
        for number in range(first, first + count)
    ]


def layout(nbytes: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([nbytes // 2])], [torch.bfloat16])


def slab(folder: Path, capacity: int = 16 * MIB, more: str = "") -> str:
    return f"slab:{folder}?capacity={capacity}{more}"


def spec(url: str, *sizes: int, **params: Any) -> dict[str, Any]:
    """Return what LMCache's command takes, as from JSON."""
    return {
        "type": "plugin",
        "module_path": "kvoffload.integrations.lmcache",
        "class_name": "KVOffloadL2Adapter",
        "adapter_params": {
            "url": url,
            "weights_id": "w",
            "object_bytes": list(sizes),
            **params,
        },
    }


def config_of(given: dict[str, Any]) -> Any:
    return get_l2_adapter_config_class(given["type"]).from_dict(given)


def adapter_of(arena: Arena, url: str, *sizes: int, **params: Any) -> Any:
    return create_l2_adapter(config_of(spec(url, *sizes, **params)), arena.desc)


def _wait(fd: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if poller.poll(timeout_s * 1000):
        consume_fd(fd)


def store(adapter: Any, keys: list, objects: list, timeout_s: float = 300.0) -> Any:
    """Store as LMCache's controller does; return the result."""
    task = adapter.submit_store_task(keys, objects)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        ended = adapter.pop_completed_store_tasks()
        if task in ended:
            return ended[task]
        _wait(adapter.get_store_event_fd(), 0.2)
    raise TimeoutError("the store has not ended")


def bits(bitmap: Any) -> list[bool]:
    return [bitmap.test(index) for index in range(bitmap.size())]


def lookup(adapter: Any, keys: list, **sizes: int) -> list[bool]:
    """Look up as LMCache's controller does; `g0=16384` is the layout of object group 0."""
    layouts = {int(name[1:]): layout(nbytes) for name, nbytes in sizes.items()}
    task = adapter.submit_lookup_and_lock_task(keys, layouts or {0: layout(SMALL)})
    return result_of(adapter, "lookup_and_lock", task)


def load(adapter: Any, keys: list, objects: list) -> list[bool]:
    return result_of(adapter, "load", adapter.submit_load_task(keys, objects))


def result_of(adapter: Any, kind: str, task: int, timeout_s: float = 300.0) -> list[bool]:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        found = getattr(adapter, f"query_{kind}_result")(task)
        if found is not None:
            return bits(found)
        _wait(getattr(adapter, f"get_{kind}_event_fd")(), 0.2)
    raise TimeoutError(f"the {kind} has not ended")


def bytes_of(objects: list) -> list[bytes]:
    return [bytes(each.byte_array) for each in objects]


def wipe(objects: list, byte: int = 0) -> None:
    for each in objects:
        each.raw_data.fill_(byte)


def eventually(holds: Any, timeout_s: float = 300.0) -> bool:
    until = time.monotonic() + timeout_s
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(found)
