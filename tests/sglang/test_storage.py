"""HiCache's storage over a tier: what is bounded, sealed, kept apart, refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.runtime_context import get_context

from kvoffload.integrations.sglang import KVOffloadStorage
from kvoffload.integrations.sglang.memory import pages_of
from kvoffload.tiers import TierError, TierInUseError
from tests.sglang.engine import (
    BACKEND,
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


NAMED = "url must name a tier, as slab:/nvme/kv?capacity=2TB"
LONG = "k" * 100
OPTIONS = "url, pools, weights_id, revision, salt, generation, generation_file"


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


@pytest.mark.parametrize(
    ("layout", "copied"),
    [("page_first", False), ("page_first_direct", False), ("layer_first", True)],
)
def test_memory_of_a_model_with_latents(layout, copied, tmp_path, make):
    pool = host_pool(device_pool("mla"), layout)
    made = make(slab(tmp_path, CAPACITY), pool, copied=copied, is_mla_model=True)
    before = store_all(made, pool, copied)
    assert load_all(made, pool, copied) == before


def test_keys_and_values_of_different_sizes(tmp_path, make):
    """They lie in two tensors, wherever the allocator put them."""
    pool = host_pool(device_pool(value_size=4))
    made = make(slab(tmp_path, CAPACITY), pool)
    keys, indices = prompt()
    tensors = [tensor.view(torch.uint8) for tensor in pool.kv_buffer]
    before = [tensor.clone() for tensor in tensors]
    assert all(made.batch_set_v1(keys, indices))
    for tensor in tensors:
        tensor[: PAGES * PAGE_TOKENS].random_()
    assert all(made.batch_get_v1(keys, indices))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize(("head_size", "is_aligned"), [(128, True), (8, False)])
def test_pages_of_whole_kernel_pages_need_no_copy(head_size, is_aligned):
    region = pages_of(host_pool(device_pool(head_size=head_size)))
    assert region.aligned == is_aligned


def test_a_long_prompt_keeps_its_first_pages_where_sglang_tells_them(tmp_path, host, make):
    """SGLang loads a long prompt in parts; the first part must not be the first to leave."""
    made = make(slab(tmp_path, PAGES * SLOT_BYTES), host)
    keys, indices = prompt()
    half = PAGES // 2
    tokens = half * PAGE_TOKENS
    assert all(made.batch_set_v1(keys, indices))
    assert all(made.batch_get_v1(keys[:half], indices[:tokens]))
    told = HiCacheStorageExtraInfo(prefix_keys=keys[:half])
    assert all(made.batch_get_v1(keys[half:], indices[tokens:], told))
    other, place = prompt(2, 5000)
    assert all(made.batch_set_v1(other, place))
    assert made.batch_exists(keys) == PAGES - 2


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


def fingerprints(tmp_path, close_all, *variants) -> list[bytes]:
    found = []
    for number, (pool, fields) in enumerate(variants):
        made = storage(slab(tmp_path / str(number), CAPACITY), pool, **fields)
        close_all.append(made)
        found.append(made.namespace.fingerprint)
    return found


def test_what_changes_the_bytes_changes_the_namespace(tmp_path, close_all):
    device = device_pool()
    plain = host_pool(device)
    variants = [
        (plain, {}),
        (plain, {"copied": True}),
        (plain, {"model_name": "other"}),
        (plain, {"tp_rank": 1, "tp_size": 2}),
        (plain, {"pp_rank": 1, "pp_size": 2}),
        (plain, {"attn_cp_rank": 1, "attn_cp_size": 2}),
        (plain, {"extra": {"weights_id": "7"}}),
        (plain, {"extra": {"revision": "7"}}),
        (plain, {"extra": {"salt": "7"}}),
        (host_pool(device, "page_first_direct"), {}),
        (host_pool(device, "page_head"), {}),
        (host_pool(device_pool(dtype=torch.float16)), {}),
        (host_pool(device_pool("mla")), {"is_mla_model": True}),
    ]
    found = fingerprints(tmp_path, close_all, *variants)
    assert len(set(found)) == len(found)


def test_what_sglang_was_told_of_the_model_counts(tmp_path, close_all):
    """An 8-bit data type has memory of plain bytes, which does not say which of them it is."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    told = [
        {"model_path": str(model)},
        {"model_path": str(model), "kv_cache_dtype": "fp8_e4m3"},
        {"model_path": str(model), "kv_cache_dtype": "fp8_e5m2"},
        {"model_path": str(model), "quantization": "fp8"},
        {"model_path": "someone/model"},
        {"model_path": "someone/model", "revision": "7"},
    ]
    host = host_pool(device_pool(dtype=torch.float8_e4m3fn))
    assert host.dtype == torch.uint8
    found = []
    for number, fields in enumerate(told):
        with get_context().override_server_args(**fields):
            found += fingerprints(tmp_path / str(number), close_all, (host, {}))
    with get_context().override_server_args(model_path=str(model)):
        found += fingerprints(tmp_path / "same", close_all, (host, {}))
        (model / "model.safetensors").write_bytes(b"other weights")
        found += fingerprints(tmp_path / "other", close_all, (host, {}))
    assert found[-2] == found[0]
    assert len(set(found)) == len(found) - 1


def test_ranks_of_an_mla_model_have_one_namespace(tmp_path, close_all):
    pool = host_pool(device_pool("mla"))
    made = []
    for rank in range(2):
        url = f"dir:{tmp_path}?capacity=1MiB&ack=stored"
        made.append(storage(url, pool, is_mla_model=True, tp_rank=rank, tp_size=2))
    close_all += made
    keys, indices = prompt()
    assert all(made[0].batch_set_v1(keys, indices))
    assert made[1].batch_exists(keys) == PAGES


def test_ranks_have_a_slab_each_below_one_folder(tmp_path, host, make):
    made = [make(slab(tmp_path, CAPACITY), host, tp_rank=rank, tp_size=2) for rank in range(2)]
    keys, indices = prompt()
    assert all(made[0].batch_set_v1(keys, indices))
    assert made[1].batch_exists(keys) == 0
    assert len(list(tmp_path.rglob("blocks.dat"))) == 2


def test_replicas_have_a_slab_each(tmp_path, host, make):
    for rank in range(2):
        make(slab(tmp_path, CAPACITY), host, dp_rank=rank)
    assert len(list((tmp_path / "replica1").rglob("blocks.dat"))) == 1
    assert len(list(tmp_path.rglob("blocks.dat"))) == 2


def test_two_processes_of_one_rank_cannot_share_a_slab(tmp_path, host, make):
    make(slab(tmp_path, CAPACITY), host)
    with pytest.raises(TierInUseError):
        storage(slab(tmp_path, CAPACITY), host)


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"url": None}, ValueError, f"{NAMED}, got None"),
        ({"url": 7}, TypeError, "url must be text, got 7"),
        ({"salt": 7}, TypeError, "salt must be text, got 7"),
        ({"slat": "7"}, ValueError, f"an option must be one of {OPTIONS}, got 'slat'"),
        ({LONG: "7"}, ValueError, f"an option must be one of {OPTIONS}, got {LONG!r}"),
    ],
)
def test_wrong_options(extra, error, message):
    wrong = replace(config("memory:?capacity=1MiB"))
    wrong.extra_config = {**BACKEND, "url": "memory:?capacity=1MiB", **extra}
    with pytest.raises(error) as raised:
        KVOffloadStorage(wrong, {})
    assert str(raised.value) == message


def test_a_wrong_tier_is_refused_with_the_memory(host):
    made = KVOffloadStorage(config("memory:?capacity=nothing"), {})
    with pytest.raises(ValueError, match="option capacity must be bytes"):
        made.register_mem_pool_host(host)
    made.close()


def test_ranks_of_an_mla_model_cannot_have_a_slab(tmp_path):
    with pytest.raises(ValueError, match="url must name a tier that the 2 ranks of an MLA model"):
        KVOffloadStorage(config(slab(tmp_path, 1), is_mla_model=True, tp_size=2), {})


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


def test_closed_it_has_nothing(tmp_path, host):
    made = storage(slab(tmp_path, CAPACITY), host)
    keys, indices = prompt()
    assert all(made.batch_set_v1(keys, indices))
    made.close()
    made.close()
    assert made.batch_exists(keys) == 0
    assert made.batch_get_v1(keys, indices) == made.batch_set_v1(keys, indices) == [False] * PAGES
    assert not made.clear()
    assert made.stats() == {}


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
