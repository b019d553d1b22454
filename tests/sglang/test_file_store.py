"""Beside SGLang's own file store, under LRU and of the same size: the same pages hit."""

from __future__ import annotations

import random

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from tests.sglang.engine import (
    PAGE_TOKENS,
    config,
    device_pool,
    host_pool,
    page_bytes,
    page_keys,
    slab,
    storage,
    tokens_of,
)

NUM_CALLS = 3000
NUM_KEYS = 60
NUM_SLOTS = 20


class FileStore:
    """SGLang's file store of some pages, called as SGLang calls it, beside a host memory."""

    def __init__(self, folder, host) -> None:
        plain = config(None)
        size = NUM_SLOTS * len(page_bytes(host, 0))
        plain.extra_config = {
            "file_storage_path": str(folder),
            "max_size": size,
            "eviction_ratio": 1.0,
        }
        self.store, self.host = HiCacheFile(plain), host

    def batch_exists(self, keys: list[str]) -> int:
        return self.store.batch_exists(keys)

    def get(self, keys: list[str], indices: torch.Tensor) -> list[bool]:
        targets = [self.host.get_dummy_flat_data_page() for _ in keys]
        pages = self.store.batch_get(keys, targets)
        for place, page in enumerate(pages):
            if page is not None:
                self.host.set_from_flat_data_page(int(indices[place * PAGE_TOKENS]), page)
        return [page is not None for page in pages]

    def set(self, keys: list[str], indices: torch.Tensor) -> bool:
        pages = [self.host.get_data_page(int(first)) for first in indices[::PAGE_TOKENS]]
        return self.store.batch_set(keys, pages)


def test_single_pages_hit_and_leave_as_in_the_file_store(tmp_path, close_all, seed):
    device = device_pool()
    host, own = host_pool(device), host_pool(device)
    host.kv_buffer.copy_(own.kv_buffer)
    theirs = FileStore(tmp_path / "files", host)
    ours = storage(slab(tmp_path / "slab", NUM_SLOTS * 4096), own)
    close_all.append(ours)
    assert ours.tier.num_slots == NUM_SLOTS
    rng = random.Random(seed)
    keys = [page_keys([number] * PAGE_TOKENS)[0] for number in range(NUM_KEYS)]
    weights = [1 / (number + 1) ** 0.6 for number in range(NUM_KEYS)]
    hits = 0
    for _ in range(NUM_CALLS):
        number = rng.choices(range(NUM_KEYS), weights)[0]
        one, indices = [keys[number]], tokens_of(theirs.host, [number])
        what = rng.random()
        if what < 0.3:  # also of a page that is there
            assert theirs.set(one, indices) == all(ours.batch_set_v1(one, indices))
        elif what < 0.4:
            assert theirs.batch_exists(one) == ours.batch_exists(one)
        elif theirs.get(one, indices) != ours.batch_get_v1(one, indices):
            pytest.fail(f"another answer for page {number}")
        elif theirs.batch_exists(one):
            hits += 1
            first = number * PAGE_TOKENS
            assert page_bytes(ours.mem_pool_host, first) == page_bytes(theirs.host, first)
    assert theirs.batch_exists(keys) == ours.batch_exists(keys)
    there = [theirs.batch_exists([key]) for key in keys]
    assert there == [ours.batch_exists([key]) for key in keys]
    assert sum(there) == NUM_SLOTS  # so that it had to evict
    assert hits > NUM_CALLS / 20
