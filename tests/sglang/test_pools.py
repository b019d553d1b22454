"""Pools of state beside the KV cache: what a prefix needs of them, and what is kept apart."""

from __future__ import annotations

import random
import time

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.runtime_context import get_context

from kvoffload.integrations.sglang import KVOffloadStorage
from kvoffload.integrations.sglang.memory import memory_of, pages_by_address
from kvoffload.integrations.sglang.pool import CopiedPool
from kvoffload.tiers import TierInUseError
from tests.sglang.engine import (
    PAGE_TOKENS,
    config,
    device_pool,
    host_pool,
    mamba_pool,
    page_bytes,
    page_keys,
    slab,
    storage,
    tokens_of,
    trailing,
)

CAPACITY = 1 << 20
SLOT_BYTES = 4096
KV, MAMBA, SWA, INDEXER = PoolName.KV, PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER
POLICIES = {
    INDEXER: PoolHitPolicy.ALL_PAGES,
    SWA: PoolHitPolicy.TRAILING_PAGES,
    MAMBA: PoolHitPolicy.TRAILING_PAGES,
}
MAX_PAGES = 12
FOUND_S = 300


def own_pools(*, side: bool = False) -> dict:
    """Return host memory of each pool."""
    return {
        KV: host_pool(device_pool()),
        INDEXER: host_pool(device_pool(head_size=2)),
        SWA: host_pool(device_pool(), "page_first_direct"),
        MAMBA: mamba_pool(side=side),
    }


@pytest.fixture
def make(tmp_path, close_all):
    """Make storages with pools, of which each has a slab; they are closed at the end."""

    def made(pools, urls=None, *, url=None, folder="kv", **fields):
        if urls is None:
            urls = {str(name): slab(tmp_path / folder, CAPACITY) for name in pools if name != KV}
        extra = {"pools": urls, **fields.pop("extra", {})}
        one = storage(url or slab(tmp_path / folder, CAPACITY), pools[KV], extra=extra, **fields)
        close_all.append(one)
        for name, pool in pools.items():
            one.register_mem_host_pool_v2(pool, name)
        return one

    return made


def keys_of(number: int, pages: int = MAX_PAGES) -> list[str]:
    """Return the keys of a prompt's pages; prompts of different numbers have none in common."""
    return page_keys([number, *range(1, pages * PAGE_TOKENS)])


def set_of(made, pools, name: PoolName, keys: list[str], blocks: list[int]) -> list[bool]:
    """Store pages of one pool."""
    transfer = trailing(name, keys, tokens_of(pools[name], blocks))
    return made.batch_set_v2([transfer])[name]


def get_of(made, pools, name: PoolName, keys: list[str], blocks: list[int]) -> list[bool]:
    """Load pages of one pool."""
    transfer = trailing(name, keys, tokens_of(pools[name], blocks))
    return made.batch_get_v2([transfer])[name]


def block_bytes(pool, block: int) -> bytes:
    return page_bytes(pool, block * pool.page_size)


def wipe(pool) -> None:
    """Put other bytes everywhere."""
    for tensor in memory_of(pool):
        tensor.view(-1).view(torch.uint8).random_()


# -- beside SGLang's own file store ----------------------------------------------------------


def sets(rng: random.Random, pages: int) -> list[int]:
    """Return the pages that a store has: mostly the first ones, sometimes all but a few."""
    if rng.random() < 0.5:
        return list(range(rng.randint(0, pages)))
    share = rng.random()
    return [page for page in range(pages) if rng.random() < share]


@pytest.mark.parametrize("side", [False, True], ids=["states in place", "states copied"])
def test_random_sets_of_pages_are_served_as_by_the_file_store(side, make, tmp_path, seed):
    rounds = 150
    pools = own_pools(side=side)
    urls = {str(name): slab(tmp_path / "kv", 16 * CAPACITY) for name in POLICIES}
    ours = make(pools, urls, url=urls["mamba"])
    assert isinstance(ours._pools["mamba"], CopiedPool) is side
    plain = config(None)
    plain.extra_config = {"file_storage_path": str(tmp_path / "files")}
    theirs = HiCacheFile(plain)
    for name, pool in pools.items():
        theirs.register_mem_host_pool_v2(pool, name)
    rng = random.Random(seed)
    num_loaded = num_sparse = 0
    for number in range(rounds):
        pages = rng.randint(1, MAX_PAGES)
        keys = keys_of(number, pages)
        kinds = rng.sample(list(POLICIES), rng.randint(0, 3))
        before = {}
        for name in (KV, *kinds):
            there = sets(rng, pages) if name != KV or rng.random() < 0.3 else list(range(pages))
            some = [keys[page] for page in there]
            expected = [True] * len(some)
            assert set_of(theirs, pools, name, some, there) == expected
            assert set_of(ours, pools, name, some, there) == expected
            before[name] = [block_bytes(pools[name], page) for page in range(pages)]
        window = rng.randint(1, 4)
        windows = {SWA: ["?"] * window, MAMBA: rng.choice([None, ["?"]])}
        transfers = [
            PoolTransfer(name, keys=windows.get(name), hit_policy=POLICIES[name]) for name in kinds
        ]
        found = ours.batch_exists_v2(keys, transfers)
        assert found == theirs.batch_exists_v2(keys, transfers)
        ends = found.restorable_prefix_pages
        num_sparse += bool(ends) and len(ends) < ends[-1]
        if not ends:
            continue
        end = rng.choice(ends)
        for name, pool in pools.items():
            if name in before:
                wipe(pool)
                number_needed = {SWA: window, MAMBA: 1}.get(name, end)
                needed = list(range(max(0, end - number_needed), end))
                some = [keys[page] for page in needed]
                assert get_of(ours, pools, name, some, needed) == [True] * len(needed)
                loaded = [block_bytes(pool, page) for page in needed]
                assert loaded == [before[name][page] for page in needed]
                num_loaded += len(needed)
    assert num_loaded > rounds
    assert num_sparse > rounds / 20


def test_single_pages_leave_as_in_the_file_store(make, tmp_path, seed):
    """Under LRU, in as much room."""
    num_pages, num_slots = 60, 20
    own, host = host_pool(device_pool()), host_pool(device_pool())
    ours = make({KV: own}, {}, url=slab(tmp_path / "slab", num_slots * SLOT_BYTES))
    plain = config(None)
    size = num_slots * len(block_bytes(host, 0))
    files = {"file_storage_path": str(tmp_path / "files"), "max_size": size, "eviction_ratio": 1.0}
    plain.extra_config = files
    theirs = HiCacheFile(plain)
    theirs.register_mem_host_pool_v2(host, KV)
    both = (ours, {KV: own}), (theirs, {KV: host})
    rng = random.Random(seed)
    keys = keys_of(0, num_pages)
    weights = [1 / (page + 1) ** 0.6 for page in range(num_pages)]
    hits = 0
    for _ in range(3000):
        (page,) = rng.choices(range(num_pages), weights)
        what = rng.choices((set_of, get_of, None), (3, 6, 1))[0]  # also of a page that is there
        if what is None:
            assert ours.batch_exists([keys[page]]) == theirs.batch_exists([keys[page]])
        else:
            answers = [what(*each, KV, [keys[page]], [page]) for each in both]
            assert answers[0] == answers[1], page
            hits += what is get_of and answers[0] == [True]
    there = [[one.batch_exists([key]) for key in keys] for one, _ in both]
    assert there[0] == there[1]
    assert sum(there[0]) == num_slots  # so that it had to evict
    assert hits > 150


# -- states ----------------------------------------------------------------------------------


def paged_pool(layout: str):
    """Return SGLang's host memory of rows of bytes, one for each page and layer."""
    buffers = [torch.zeros(16, 96, dtype=torch.uint8) for _ in range(2)]
    return DeepSeekV4PagedHostPool("rows", buffers, 96, 32, PAGE_TOKENS, layout, pin_memory=False)


OTHER_MEMORY = {
    "layers apart": lambda: host_pool(device_pool(), "layer_first"),
    "keys and values of different sizes": lambda: host_pool(device_pool(value_size=4)),
    "heads apart": lambda: host_pool(device_pool(), "page_head"),
    "one head": lambda: host_pool(device_pool("mla"), "page_first_direct"),
    "rows": lambda: paged_pool("page_first"),
    "rows apart": lambda: paged_pool("layer_first"),
}


@pytest.mark.parametrize("kind", OTHER_MEMORY)
def test_other_kinds_of_memory(kind, make):
    window = OTHER_MEMORY[kind]()
    pools = {KV: host_pool(device_pool()), SWA: window}
    wipe(window)
    made = make(pools)
    assert not isinstance(made._pools["swa"], CopiedPool)
    keys, blocks = keys_of(0, 4), [5, 2, 3, 9]
    region = pages_by_address(window)
    before = [region.read(block) for block in blocks]
    if kind != "keys and values of different sizes":  # of which SGLang flattens no page
        flat = [block_bytes(window, block) for block in blocks]
        assert [sorted(page) for page in before] == [sorted(page) for page in flat]
    assert all(set_of(made, pools, SWA, keys, blocks))
    wipe(window)
    assert all(get_of(made, pools, SWA, keys, blocks))
    assert [region.read(block) for block in blocks] == before


# -- what is kept ----------------------------------------------------------------------------


def test_a_state_that_is_loaded_stays(make, tmp_path):
    pools = {KV: host_pool(device_pool()), MAMBA: mamba_pool()}
    made = make(pools, {"mamba": slab(tmp_path / "states", 4 * SLOT_BYTES)})
    keys = keys_of(0, 6)
    assert all(set_of(made, pools, MAMBA, keys[:4], [0, 1, 2, 3]))
    assert get_of(made, pools, MAMBA, keys[:1], [0]) == [True]
    assert all(set_of(made, pools, MAMBA, keys[4:], [4, 5]))
    there = [get_of(made, pools, MAMBA, [key], [0])[0] for key in keys]
    assert there[0]
    assert sum(there) == 4


def test_only_pages_that_are_all_needed_keep_those_before_them(make, tmp_path):
    """SGLang loads a long prompt in parts, and a state without those of the pages before."""
    pools = {name: pool for name, pool in own_pools().items() if name in (KV, MAMBA, INDEXER)}
    urls = {name: slab(tmp_path / name, 4 * SLOT_BYTES) for name in ("mamba", "indexer")}
    made = make(pools, urls)
    keys = keys_of(0, 6)
    told = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    for name in (MAMBA, INDEXER):
        assert all(set_of(made, pools, name, keys[:4], [0, 1, 2, 3]))
        places = tokens_of(pools[name], [2, 3])
        transfer = PoolTransfer(name, places, keys=keys[2:4], hit_policy=POLICIES[name])
        assert made.batch_get_v2([transfer], told)
        assert all(set_of(made, pools, name, keys[4:], [4, 5]))
    assert get_of(made, pools, INDEXER, keys[:2], [0, 1]) == [True, True]
    assert get_of(made, pools, MAMBA, keys[:2], [0, 1]) == [False, False]


@pytest.mark.parametrize("side", [False, True], ids=["in place", "copied"])
def test_a_store_that_ends_when_copied_is_found_a_little_later(side, make, tmp_path):
    """Meanwhile fewer prefixes count, and none whose state cannot be loaded."""
    pools = own_pools(side=side)
    url = slab(tmp_path / "kv", CAPACITY).replace("ack=stored", "ack=copied&staged=yes")
    made = make(pools, {str(name): url for name in pools if name != KV}, url=url)
    pages = 8
    blocks = list(range(pages))
    wanted = [PoolTransfer(name, keys=["?"], hit_policy=POLICIES[name]) for name in POLICIES]
    before = {name: [block_bytes(pools[name], block) for block in blocks] for name in pools}
    for number in range(20):
        keys = keys_of(number, pages)
        for name in pools:
            assert all(set_of(made, pools, name, keys, blocks))
        give_up = time.monotonic() + FOUND_S
        ends: list[int] = []
        while ends != [block + 1 for block in blocks]:
            assert time.monotonic() < give_up
            found = made.batch_exists_v2(keys, wanted)
            ends = found.restorable_prefix_pages
            assert found.kv_hit_pages == (ends[-1] if ends else 0)
            if ends:
                assert get_of(made, pools, MAMBA, [keys[ends[-1] - 1]], [pages]) == [True]
                assert block_bytes(pools[MAMBA], pages) == before[MAMBA][ends[-1] - 1]


# -- media that are asked --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dir", "memory"])
def test_other_tiers(kind, make, tmp_path, monkeypatch):
    pools = own_pools()
    place = tmp_path / "shared" if kind == "dir" else ""
    ack = "&ack=stored" if kind == "dir" else ""
    url = f"{kind}:{place}?capacity={CAPACITY}{ack}"
    urls = {str(name): url for name in pools if name != KV}
    made = make(pools, urls, url=url)
    pages = 100
    keys = keys_of(0, pages)
    assert all(set_of(made, pools, KV, keys, [block % 60 for block in range(pages)]))
    ends = [3, 4, 40, 71, 99]
    assert all(set_of(made, pools, MAMBA, [keys[end - 1] for end in ends], [0, 1, 2, 3, 4]))
    wanted = [trailing(MAMBA, ["?"], None)]
    assert made.batch_exists_v2(keys, wanted).restorable_prefix_pages == ends
    if kind == "dir":  # another engine, which knows nothing yet and has to ask
        other = make(pools, urls, url=url)
        states, asked = other._pools["mamba"].tier, []
        query = states.query
        monkeypatch.setattr(states, "query", lambda some: asked.append(len(some)) or query(some))
        assert other.batch_exists_v2(keys, wanted).restorable_prefix_pages == ends
        assert max(asked) <= 64, "an object store takes more keys for a chain, without gaps"


# -- what is kept apart ----------------------------------------------------------------------


def fingerprints(make, folder: str, pool=None, name=MAMBA, kv=None, **fields) -> list[bytes]:
    """Return what tells bytes apart: of the KV cache, and of a pool beside it."""
    pools = {KV: kv or host_pool(device_pool()), name: pool or mamba_pool()}
    made = make(pools, folder=folder, **fields)
    return [made._pools[str(each)].namespace.fingerprint for each in pools]


def test_what_changes_the_bytes_changes_the_namespace(make):
    of_pool = [
        {"pool": mamba_pool(side=True)},
        {"pool": mamba_pool(dtype=torch.float16)},
        {"pool": host_pool(device_pool()), "name": SWA},
        {"pool": host_pool(device_pool()), "name": PoolName.DRAFT},
    ]
    of_both = [
        {"kv": host_pool(device_pool(), "page_first_direct")},
        {"kv": host_pool(device_pool(), "page_head")},
        {"kv": host_pool(device_pool(dtype=torch.float16))},
        {"kv": host_pool(device_pool("mla")), "is_mla_model": True},
        {"copied": True},
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        *({"extra": {name: "7"}} for name in ("weights_id", "revision", "salt")),
    ]
    plain = fingerprints(make, "plain")
    assert fingerprints(make, "same") == plain
    found = [fingerprints(make, str(n), **each) for n, each in enumerate(of_pool + of_both)]
    kv, pool = zip(plain, *found, strict=True)
    assert len(set(kv)) == 1 + len(of_both)
    assert len(set(pool)) == len(pool)


def test_what_sglang_was_told_of_the_models_counts(make, tmp_path):
    """An 8-bit data type has memory of plain bytes, which does not say which of them it is."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    of_kv = [
        {"model_path": str(model)},
        {"model_path": str(model), "kv_cache_dtype": "fp8_e4m3"},
        {"model_path": str(model), "kv_cache_dtype": "fp8_e5m2"},
        {"model_path": str(model), "quantization": "fp8"},
        {"model_path": "someone/model"},
        {"model_path": "someone/model", "revision": "7"},
    ]
    drafts = [
        {"model_path": str(model), "speculative_draft_model_path": f"someone/{name}"}
        for name in ("draft", "other")
    ]
    kv = host_pool(device_pool(dtype=torch.float8_e4m3fn))
    assert kv.dtype == torch.uint8
    found = []
    for number, told in enumerate([*of_kv, *drafts, of_kv[0]]):
        with get_context().override_server_args(**told):
            if number == len(of_kv + drafts):
                assert fingerprints(make, "same", name=PoolName.DRAFT, kv=kv) == found[0]
                (model / "model.safetensors").write_bytes(b"other weights")
            found.append(fingerprints(make, str(number), name=PoolName.DRAFT, kv=kv))
    of_cache, of_draft = zip(*found, strict=True)
    assert len(set(of_cache)) == len(of_kv) + 1
    assert len(set(of_draft)) == len(found)


def test_ranks_of_an_mla_model_have_states_of_their_own_and_share_the_rest(make, tmp_path):
    kv, indexer = host_pool(device_pool("mla")), host_pool(device_pool("mla"))
    url = f"dir:{tmp_path}?capacity=1MiB&ack=stored"
    urls = {"mamba": slab(tmp_path / "states", CAPACITY), "indexer": url}
    made = [
        make(
            {KV: kv, MAMBA: mamba_pool(), INDEXER: indexer},
            urls,
            url=url,
            is_mla_model=True,
            tp_rank=rank,
            tp_size=2,
        )
        for rank in range(2)
    ]
    for name, is_shared in ((KV, True), (INDEXER, True), (MAMBA, False)):
        first, second = (each._pools[str(name)].namespace for each in made)
        assert (first == second) is is_shared


# -- what is refused -------------------------------------------------------------------------


def test_a_pool_without_a_tier_or_with_a_wrong_one_is_refused_by_name(make, tmp_path):
    pools = {KV: host_pool(device_pool()), SWA: host_pool(device_pool()), MAMBA: mamba_pool()}
    given = {"swa": slab(tmp_path / "kv", CAPACITY)}
    wrong = given | {"mamba": "memory:?capacity=nothing"}
    for urls, message in (
        (given, r"pools must name a tier for 'mamba'.*got \['swa'\]$"),
        ({}, r"pools must name a tier for 'swa'.*got \[\]$"),
        (wrong, r"pools\['mamba'\]: url: option capacity must be"),
    ):
        with pytest.raises(ValueError, match=message):
            make(pools, urls)
    make({KV: pools[KV]}, {})  # the slab is free again


def test_block_groups_are_refused_by_name(make):
    pools = {KV: host_pool(device_pool()), SWA: host_pool(device_pool())}
    made = make(pools)
    keys = keys_of(0, 2)
    transfer = PoolTransfer(SWA, tokens_of(pools[SWA], [0, 1]), keys=keys)
    transfer.hit_policy = PoolHitPolicy.BLOCK_GROUPS
    message = "hit_policy of pool 'swa' must be all_pages or trailing_pages, got 'block_groups'"
    for call in (
        lambda: made.batch_exists_v2(keys, [transfer]),
        lambda: made.batch_set_v2([transfer]),
        lambda: made.batch_get_v2([transfer]),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert made.stats("swa")["put_ok"] == 0


@pytest.mark.parametrize("copied", [False, True])
def test_an_anchor_without_memory_is_refused(copied, tmp_path):
    with pytest.raises(ValueError, match=r"mem_pool_host must have memory.*got LogicalHostPool"):
        storage(slab(tmp_path, CAPACITY), LogicalHostPool(64, PAGE_TOKENS), copied=copied)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_are_cut_are_refused_where_sglang_stores_those_of_one_rank(make, tmp_path):
    pools = {KV: host_pool(device_pool("mla")), PoolName.DRAFT: host_pool(device_pool())}
    url = f"dir:{tmp_path}?capacity=1MiB"
    with pytest.raises(ValueError, match="pool 'draft' must have the same pages on all 2 ranks"):
        make(pools, {"draft": url}, url=url, is_mla_model=True, tp_size=2)
    make(pools, {"draft": url}, url=url, is_mla_model=True)


def test_ranks_of_an_mla_model_share_no_slab_but_for_states(tmp_path):
    shared, own = f"dir:{tmp_path}?capacity=1MiB", slab(tmp_path, 1)
    for option, url, pools in (
        ("", shared, {"mamba": own}),
        ("url", own, {}),
        (r"pools\['indexer'\]", shared, {"indexer": own}),
    ):
        wanted = config(url, is_mla_model=True, tp_size=2, extra={"pools": pools})
        if not option:
            KVOffloadStorage(wanted)
            continue
        with pytest.raises(ValueError, match=f"{option} must name a tier that the 2 ranks of"):
            KVOffloadStorage(wanted)


def test_memory_that_moves_or_has_no_pages_is_refused(make):
    kv, window = host_pool(device_pool()), host_pool(device_pool())
    window.shared_allocation_domain = object()
    with pytest.raises(ValueError, match="pool 'swa' must keep its pages in place"):
        make({KV: kv, SWA: window})
    apart = host_pool(device_pool(value_size=4))
    apart.get_page_buffer_meta = refuse
    with pytest.raises(ValueError, match="pool 'swa': host memory must have flat pages"):
        make({KV: kv, SWA: apart})


def refuse(indices):
    raise NotImplementedError("not in place")


def test_wrong_calls_load_and_store_nothing(make, caplog):
    pools = {KV: host_pool(device_pool()), MAMBA: mamba_pool()}
    made = make(pools)
    keys = keys_of(0, 2)
    short = trailing(MAMBA, keys, torch.tensor([0]))
    assert made.batch_set_v2([short]) == made.batch_get_v2([short]) == {MAMBA: [False, False]}
    assert made.batch_set_v2([trailing(MAMBA, keys, None)]) == {MAMBA: [False, False]}
    assert "host_indices of pool 'mamba' must be 2, 1 for each of 2 keys, got 0" in caplog.text
    assert made.batch_set_v2([trailing(SWA, keys, torch.arange(8))]) == {SWA: [False, False]}
    assert made.batch_get_v2([trailing(MAMBA, [], torch.arange(0))]) == {MAMBA: []}
    assert made.stats("mamba")["put_ok"] == 0
    with pytest.raises(ValueError, match="pool 'mamba' must be registered once"):
        made.register_mem_host_pool_v2(pools[MAMBA], MAMBA)
    unready = KVOffloadStorage(config("memory:?capacity=1MiB", extra={"pools": {}}))
    with pytest.raises(ValueError, match="mem_pool_host must be registered before pool 'mamba'"):
        unready.register_mem_host_pool_v2(pools[MAMBA], MAMBA)


def test_two_pools_may_have_one_folder_and_two_storages_may_not(make):
    pools = own_pools()
    make(pools)
    with pytest.raises(TierInUseError):
        make(pools)


def test_closed_it_has_nothing(make):
    pools = {KV: host_pool(device_pool()), MAMBA: mamba_pool()}
    made = make(pools)
    keys = keys_of(0, 2)
    for name in pools:
        assert all(set_of(made, pools, name, keys, [0, 1]))
    made.tier.close(0.0)
    assert made.clear() is False
    assert not any(get_of(made, pools, MAMBA, keys, [0, 1]))  # it has forgotten all the same
    made.close()
    made.close()
    for name in pools:
        assert set_of(made, pools, name, keys, [0, 1]) == [False, False]
        assert get_of(made, pools, name, keys, [0, 1]) == [False, False]
    places = tokens_of(pools[KV], [0, 1])
    assert made.batch_set_v1(keys, places) == made.batch_get_v1(keys, places) == [False, False]
    assert not made.clear()
    found = made.batch_exists_v2(keys, [trailing(MAMBA, ["?"], None)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert made.stats() == made.stats("mamba") == {}
