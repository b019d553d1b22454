"""Beside SGLang's own file store: the same hits, where both are asked the same."""

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
    """SGLang's file store, called as SGLang calls it, beside a host memory.

    Parameters
    ----------
    folder : Path
        Of its files.
    host : HostKVCache
        The host memory.
    max_pages : int
        Pages that it keeps at most; 0: all.
    """

    def __init__(self, folder, host, max_pages: int = 0) -> None:
        page = len(page_bytes(host, 0))
        extra = {"file_storage_path": str(folder)}
        if max_pages:
            extra |= {"max_size": max_pages * page, "eviction_ratio": 1.0}
        plain = config(None)
        plain.extra_config = extra
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


@pytest.fixture
def stores(tmp_path, close_all):
    """Make the file store and a slab under LRU of the same size, each with memory of its own."""

    def make(max_pages: int):
        device = device_pool()
        theirs, own = host_pool(device), host_pool(device)
        theirs.kv_buffer.copy_(own.kv_buffer)
        ours = storage(slab(tmp_path / "slab", max_pages * 4096), own)
        assert ours.tier.num_slots == max_pages
        close_all.append(ours)
        return FileStore(tmp_path / "files", theirs, max_pages), ours

    return make


def test_single_pages_hit_and_leave_as_in_the_file_store(stores, seed):
    theirs, ours = stores(NUM_SLOTS)
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


def prompts(rng: random.Random, number: int) -> list[list[int]]:
    """Return prompts of whole pages; many begin as one before."""
    made: list[list[int]] = []
    for _ in range(number):
        before = rng.choice(made) if made and rng.random() < 0.7 else []
        keep = rng.randint(0, len(before) // PAGE_TOKENS) * PAGE_TOKENS
        new = [rng.randrange(1000) for _ in range(rng.randint(1, 4) * PAGE_TOKENS)]
        made.append([*before[:keep], *new][: 12 * PAGE_TOKENS])
    return made


def serve(store, get, put, asked: list[list[int]]) -> list[int]:
    """Ask for prompts as SGLang does: what is there is loaded, the rest stored; return the hits."""
    hits = []
    for prompt in asked:
        keys, places = page_keys(prompt), torch.arange(len(prompt))
        count = store.batch_exists(keys)
        hits.append(count)
        if count:
            assert all(get(keys[:count], places[: count * PAGE_TOKENS]))
        if count < len(keys):
            put(keys[count:], places[count * PAGE_TOKENS :])
    return hits


def test_prompts_hit_as_in_the_file_store_while_all_fit(stores):
    theirs, ours = stores(1000)
    asked = prompts(random.Random(0), 150)
    expected = serve(theirs, theirs.get, theirs.set, asked)
    assert serve(ours, ours.batch_get_v1, ours.batch_set_v1, asked) == expected
    assert sum(expected) > 100


def test_prompts_hit_at_least_as_often_when_some_have_to_leave(stores):
    """A prompt's last pages leave first here, its first ones there: without these none is used."""
    theirs, ours = stores(40)
    asked = prompts(random.Random(1), 400)
    expected = sum(serve(theirs, theirs.get, theirs.set, asked))
    found = sum(serve(ours, ours.batch_get_v1, ours.batch_set_v1, asked))
    print(f"pages hit: {found}, SGLang's file store {expected}")
    assert found >= expected > 0
