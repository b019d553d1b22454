"""HiCache's storage over a tier: what is bounded, sealed, kept apart, refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvoffload.integrations.sglang import KVOffloadStorage
from kvoffload.integrations.sglang.memory import pages_of
from kvoffload.tiers import TierError
from tests.sglang.engine import (
    PAGE_TOKENS,
    config,
    device_pool,
    host_pool,
    page_bytes,
    page_keys,
    slab,
    storage,
)

PAGES = 8
CAPACITY = 1 << 20
SLOT_BYTES = 4096


@pytest.fixture
def host():
    return host_pool(device_pool())


@pytest.fixture
def make(close_all):
    """Make storages that are closed at the end."""

    def made(url, pool, **fields):
        close_all.append(storage(url, pool, **fields))
        return close_all[-1]

    return made


def prompt(pages: int = PAGES, first: int = 0) -> tuple[list[str], torch.Tensor]:
    """Return the keys of a prompt's pages, and where they lie in host memory."""
    tokens = list(range(first, first + pages * PAGE_TOKENS))
    return page_keys(tokens), torch.arange(pages * PAGE_TOKENS)


def bytes_of(pool, pages: int = PAGES) -> list[bytes]:
    return [page_bytes(pool, page * PAGE_TOKENS) for page in range(pages)]


def page_bytes_of(page: torch.Tensor) -> bytes:
    return page.view(torch.uint8).numpy().tobytes()


def store_all(made, pool, copied: bool) -> list[bytes]:
    """Store the pages of a prompt; return their bytes."""
    keys, indices = prompt()
    if copied:
        pages = [pool.get_data_page(page * PAGE_TOKENS) for page in range(PAGES)]
        assert made.batch_set(keys, pages)
    else:
        assert all(made.batch_set_v1(keys, indices))
    return bytes_of(pool)


def load_all(made, pool, copied: bool) -> list[bytes | None]:
    """Load the pages of that prompt; return the bytes of those that came."""
    keys, indices = prompt()
    if copied:
        found = made.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        return [None if page is None else page_bytes_of(page) for page in found]
    pool.kv_buffer.zero_()
    loaded = made.batch_get_v1(keys, indices)
    pages = zip(loaded, bytes_of(pool), strict=True)
    return [page if is_there else None for is_there, page in pages]


# -- what is kept ----------------------------------------------------------------------------


def test_what_the_policy_declines_is_not_an_error(tmp_path, host, make):
    made = make(slab(tmp_path, 2 * SLOT_BYTES, "hit-density"), host)
    for first in range(0, 400 * PAGE_TOKENS, PAGE_TOKENS):
        keys, indices = prompt(1, first)
        assert made.batch_set_v1(keys, indices) == [True]
    assert made.stats()["put_declined"] > 0


@pytest.mark.parametrize("copied", [False, True])
def test_a_flipped_byte_is_a_miss(copied, tmp_path, host, make):
    made = make(slab(tmp_path, CAPACITY), host, copied=copied)
    before = store_all(made, host, copied)
    (path,) = tmp_path.rglob("blocks.dat")
    data = bytearray(path.read_bytes())
    data[data.index(before[3]) + 5] ^= 0x10
    path.write_bytes(data)
    keys, _ = prompt()
    assert made.batch_exists(keys) == PAGES
    assert load_all(made, host, copied) == [*before[:3], None, *before[4:]]
    assert made.batch_exists(keys) == 3
    assert made.stats()["removed_corrupt"] == 1


def test_pages_that_are_copied_come_back_in_the_tensors_that_are_given(
    tmp_path, host, make, monkeypatch
):
    """In turns, where they are more than a buffer has."""
    monkeypatch.setattr("kvoffload.integrations.sglang.pool.COPY_BYTES", 3 * 512)
    made = make(slab(tmp_path, CAPACITY), host, copied=True)
    keys, _ = prompt()
    pages = [host.get_data_page(page * PAGE_TOKENS) for page in range(PAGES)]
    assert made.batch_set(keys, pages)
    assert made.set(keys[0], pages[0])
    targets = [host.get_dummy_flat_data_page() for _ in keys]
    found = made.batch_get(keys, targets)
    assert [page_bytes_of(page) for page in found] == bytes_of(host)
    assert made.get(keys[0], targets[1]) is targets[1]
    assert page_bytes_of(targets[1]) == page_bytes_of(pages[0])
    assert made.get("nothing", targets[0]) is None
    assert made.exists(keys[0])
    assert not made.exists("nothing")


@pytest.mark.parametrize(("head_size", "is_aligned"), [(128, True), (8, False)])
def test_pages_of_whole_kernel_pages_need_no_copy(head_size, is_aligned):
    region = pages_of(host_pool(device_pool(head_size=head_size)))
    assert region.aligned == is_aligned


def test_a_tier_that_hangs_is_a_miss_by_its_deadline(host, make, opened):
    made = make("faulty:", host)
    keys, indices = prompt()
    assert all(made.batch_set_v1(keys, indices))
    opened[0].hang()
    try:
        assert made.batch_get_v1(keys, indices) == [False] * PAGES
        more, place = prompt(first=1000)
        assert made.batch_set_v1(more, place) == [False] * PAGES
    finally:
        opened[0].resume()


def test_a_file_names_the_weights_at_the_start_and_when_all_is_dropped(host, make, tmp_path):
    file = tmp_path / "generation"
    file.write_text("step 1")
    made = make(slab(tmp_path, CAPACITY), host, extra={"generation_file": str(file)})
    keys, indices = prompt()
    assert all(made.batch_set_v1(keys, indices))
    assert made.tier.generation == "step 1"
    file.write_text("step 2")
    assert made.clear() is True
    assert made.tier.generation == "step 2"
    assert made.batch_exists(keys) == 0
    assert made.batch_set_v1(keys, indices) == [True] * PAGES
    assert made.batch_exists(keys) == PAGES


# -- what is kept apart ----------------------------------------------------------------------


def test_ranks_and_replicas_have_a_slab_each_below_one_folder(tmp_path, host, make):
    ranks = [make(slab(tmp_path, CAPACITY), host, tp_rank=rank, tp_size=2) for rank in range(2)]
    keys, indices = prompt()
    assert all(ranks[0].batch_set_v1(keys, indices))
    assert ranks[1].batch_exists(keys) == 0
    make(slab(tmp_path, CAPACITY), host, dp_rank=1)
    assert len(list((tmp_path / "replica1").rglob("blocks.dat"))) == 1
    assert len(list(tmp_path.rglob("blocks.dat"))) == 3


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slat", "k" * 100])
def test_an_option_that_is_not_known_is_named(name):
    known = "url, pools, weights_id, revision, salt, generation, generation_file"
    with pytest.raises(ValueError, match=f"an option must be one of {known}, got '{name}'"):
        KVOffloadStorage(config("memory:?capacity=1MiB", extra={name: "7"}))


@pytest.mark.parametrize(
    ("layout", "value_size", "copied", "message"),
    [
        ("layer_first", 0, False, "hicache_mem_layout must be page_first, .* got 'layer_first'"),
        ("page_first", 4, True, "host memory must have flat pages, got AsymmetricMHA"),
    ],
)
def test_memory_whose_pages_cannot_be_moved(layout, value_size, copied, message, tmp_path):
    pool = host_pool(device_pool(value_size=value_size), layout)
    with pytest.raises(ValueError, match=message):
        storage(slab(tmp_path, CAPACITY), pool, copied=copied)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_change_nothing(tmp_path, host, make):
    made = make(slab(tmp_path, CAPACITY), host)
    keys, indices = prompt()
    with pytest.raises(ValueError, match="host_indices must be 32, 4 for each of 8 keys, got 28"):
        made.batch_set_v1(keys, indices[:-PAGE_TOKENS])
    with pytest.raises(TierError, match="interface_v1 must be 0 for pages that are copied, got 1"):
        made.batch_set(keys, [])
    with pytest.raises(ValueError, match="mem_pool_host must be registered once"):
        made.register_mem_pool_host(host)
    assert made.stats()["put_ok"] == made.batch_exists([]) == 0
    copying = make(slab(tmp_path, CAPACITY), host, copied=True)
    with pytest.raises(TierError, match="interface_v1 must be 1 for pages of HiCache's memory"):
        copying.batch_get_v1(keys, indices)
    with pytest.raises(ValueError, match="values must be as many as keys, 8, got 1"):
        copying.batch_set(keys, [host.get_data_page(0)])
    with pytest.raises(ValueError, match=r"values\[0\] must have 512 bytes, got 510"):
        copying.set(keys[0], host.get_data_page(0)[1:])
    with pytest.raises(TypeError, match=r"target_locations\[0\] must be a tensor, got None"):
        copying.get(keys[0])


def test_a_page_that_cannot_be_written_or_read_is_the_only_failure(tmp_path, host, make):
    made = make(slab(tmp_path, CAPACITY), host, copied=True)
    pool, keys = made._pools["kv"], [b"%d" % number for number in range(4)]

    def taking(index, page):
        if index == 1:
            raise RuntimeError("its memory was freed")
        taken.append((index, bytes(page)))

    def page_of(index):
        if index == 2:
            raise RuntimeError("its memory was freed")
        return bytes([index]) * pool.copies.region.block_bytes

    def page(index):
        return np.frombuffer(page_of(index), np.uint8)

    taken = []
    assert pool.copy_in(keys, page) == [True, True, False, False]
    assert pool.copy_in(keys[3:], lambda _: page(3)) == [True]
    assert pool.copy_out(keys, taking) == [True, False, False, True]
    assert taken == [(0, page_of(0)), (3, page_of(3))]


@pytest.mark.parametrize("op", ["put", "get", "touch", "lookup"])
def test_a_tier_that_raises_is_a_miss_or_a_failed_store(tmp_path, host, make, monkeypatch, op):
    made, (keys, indices) = make(slab(tmp_path, CAPACITY), host), prompt()
    assert all(made.batch_set_v1(keys, indices))

    def raising(*_arguments):
        raise KeyError("of a plug-in")

    with monkeypatch.context() as patched:
        patched.setattr(made.tier, op, raising)
        assert made.batch_set_v1(keys, indices) == [op != "put"] * PAGES
        assert made.batch_get_v1(keys, indices) == [op != "get"] * PAGES
        assert made.batch_exists(keys) == (0 if op == "lookup" else PAGES)
    assert all(made.batch_get_v1(keys, indices))
