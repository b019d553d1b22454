"""The contract of LMCache's L2 adapters."""

import logging
import random
import select
import threading
import time
from collections import Counter

import prometheus_client
import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.memory_management import TensorMemoryObj

from kvoffload.integrations.lmcache import KVOffloadL2Adapter, KVOffloadL2AdapterConfig
from kvoffload.integrations.lmcache import adapter as module
from kvoffload.tiers import TierInUseError, TierSpaceError

from .memory import (
    KIB,
    LARGE,
    MIB,
    SMALL,
    Arena,
    adapter_of,
    bytes_of,
    eventually,
    keys_of,
    layout,
    load,
    lookup,
    object_of,
    result_of,
    slab,
    store,
    wipe,
)


class Listener(L2AdapterListener):
    def __init__(self, adapter) -> None:
        self.sizes: dict[ObjectKey, int] = {}
        self.adapter = adapter
        self.accessed: list = []

    def on_l2_keys_stored(self, keys, sizes) -> None:
        self.adapter.get_usage()  # without the adapter's lock
        for key, size in zip(keys, sizes, strict=True):
            assert key not in self.sizes
            self.sizes[key] = size

    def on_l2_keys_accessed(self, keys) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys) -> None:
        self.adapter.report_status()
        for key in keys:
            del self.sizes[key]


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def make(close_all, arena):
    def made(url, *sizes, memory=arena, **params):
        adapter = adapter_of(memory, url, *sizes, **params)
        close_all.append(adapter)
        return adapter

    return made


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "url must name a tier"),
        ({"url": "slab:/x?capacity=1MiB"}, "weights_id must name the weights"),
        ({"url": ["redis://:pass@h"], "weights_id": "w"}, "url must be text, got list$"),
        ({"url": "slab:/x", "weights_id": 5}, "weights_id must be text, got 5"),
        ({"url": "slab:/x", "weights_id": "w", "serde": {}}, "got 'serde'"),
        ({"url": "slab:/x", "weights_id": "w", "capacity": 1}, "got 'capacity'"),
        ({"url": "slab:/x", "weights_id": "w", "object_bytes": 5}, "object_bytes must be a list"),
        ({"url": "slab:/x", "weights_id": "w", "object_bytes": [0]}, "object_bytes must be >= 1"),
        ({"url": "slab:/x?a", "weights_id": "w"}, "options must read option=value"),
    ],
)
def test_a_wrong_option_is_refused_by_name(params, message):
    with pytest.raises((TypeError, ValueError), match=message):
        KVOffloadL2AdapterConfig.from_dict(params)


def test_the_start_fails_without_memory_or_space_or_lock(tmp_path, make):
    config = KVOffloadL2AdapterConfig(slab(tmp_path), "w", object_bytes=(SMALL,))
    assert "slab:" not in repr(config)  # an address may have a password
    with pytest.raises(ValueError, match="l1_memory_desc must describe host memory"):
        KVOffloadL2Adapter(config)
    make(slab(tmp_path), SMALL)
    with pytest.raises(TierInUseError):
        make(slab(tmp_path), LARGE, SMALL)
    with pytest.raises(TierSpaceError):
        make(slab(tmp_path / "b", 2**44), SMALL)
    with pytest.raises(ValueError, match="capacity must be given"):
        make(f"slab:{tmp_path}/c", SMALL)
    make(slab(tmp_path), LARGE)  # the one that failed has closed it


# -- stores, lookups, loads ------------------------------------------------------------------


def test_random_tasks_answer_as_a_dict(tmp_path, arena, make, seed):
    """Of objects of two sizes, in LMCache's memory and not, whose keys differ in one field.

    A restarted adapter counts what was there before when it is looked up or stored again.
    """
    fields = [
        {},
        {"kv_rank": 1},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"model_name": "org/mode", "cache_salt": "l"},
        {"object_group_id": 1},
        {"model_name": "other"},
    ]
    keys = [key for each in fields for key in keys_of(7, 4, **each)]
    memory = {
        size: arena.objects(10, size)
        + [object_of(torch.empty(size, dtype=torch.uint8)) for _ in range(3)]
        for size in (SMALL, LARGE)
    }
    rng, there, counted = random.Random(seed), {}, {}

    def size_of(key) -> int:
        return LARGE if key.object_group_id else SMALL

    def start():
        adapter = make(slab(tmp_path), SMALL, LARGE)
        adapter.register_listener(Listener(adapter))
        counted.clear()
        return adapter

    adapter, loaded = start(), []
    for _ in range(150):
        some = rng.sample(keys, rng.randint(0, 9))
        free = {size: rng.sample(all_, len(all_)) for size, all_ in memory.items()}
        objects = [free[size_of(key)].pop() for key in some]
        what = rng.choices(("store", "load", "lookup", "delete", "restart"), (6, 6, 3, 2, 0.3))[0]
        if what == "store":
            for each in objects:
                each.raw_data.random_()
            result = store(adapter, some, objects)
            fresh = [key for key in some if key not in there]
            assert result.is_successful()
            assert result.bytes_transferred() == sum(map(size_of, fresh))
            there |= {k: b for k, b in zip(some, bytes_of(objects), strict=True) if k in fresh}
        elif what == "delete":
            adapter.delete(some)
            for key in some:
                there.pop(key, None)
                counted.pop(key, None)
        elif what == "restart":
            adapter.close()
            adapter, loaded = start(), []
        else:
            found = [key in there for key in some]
            assert lookup(adapter, some, g0=SMALL, g1=LARGE) == found
            assert lookup(adapter, some, g0=LARGE, g1=SMALL) == [False] * len(some)
        if what == "load":
            assert load(adapter, some, objects) == found
            for key, got in zip(some, bytes_of(objects), strict=True):
                assert key not in there or got == there[key]
            loaded += [key for key in some if key in there]
        if what in ("store", "load", "lookup"):
            counted |= {key: size_of(key) for key in some if key in there}
            adapter.submit_unlock(some)
        usage = adapter.get_usage()
        assert usage.total_bytes_used == sum(map(size_of, there))
    (listener,) = adapter._listeners
    assert eventually(lambda: listener.sizes == counted)
    assert Counter(listener.accessed) == Counter(loaded)
    by_salt = Counter()
    for key, size in counted.items():
        by_salt[key.cache_salt] += size
    assert adapter.get_usage().bytes_by_cache_salt == by_salt
    assert adapter.report_status()["object_bytes"] == [SMALL, LARGE]


def test_a_result_is_given_once(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    kinds = ("store", "lookup_and_lock", "load")
    assert len({getattr(adapter, f"get_{kind}_event_fd")() for kind in kinds}) == 3
    task = adapter.submit_lookup_and_lock_task(keys_of(0, 1), {})
    assert result_of(adapter, "lookup_and_lock", task) == [False]
    assert adapter.query_lookup_and_lock_result(task) is None
    task = adapter.submit_load_task(keys_of(0, 1), arena.objects(1))
    assert result_of(adapter, "load", task) == [False]
    assert adapter.query_load_result(task) is None
    assert adapter.query_load_result(10**6) is None


def test_keys_and_objects_must_be_as_many(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    with pytest.raises(ValueError, match="objects must be as many as keys, 2, got 1"):
        adapter.submit_store_task(keys_of(0, 2), arena.objects(1))
    with pytest.raises(ValueError, match="objects must be as many as keys, 1, got 2"):
        adapter.submit_load_task(keys_of(0, 1), arena.objects(2))


def test_lookups_miss_until_a_tier_is_opened(tmp_path, arena, make):
    keys, objects = keys_of(0, 3), arena.objects(3)
    first = make(slab(tmp_path), SMALL)
    assert store(first, keys, objects).is_successful()
    first.close()
    adapter = make(slab(tmp_path))
    assert lookup(adapter, keys) == [False] * 3
    assert eventually(lambda: lookup(adapter, keys) == [True] * 3)


def test_other_weights_share_nothing(tmp_path, arena, make):
    keys, objects = keys_of(0, 2), arena.objects(2)
    first = make(slab(tmp_path), SMALL)
    assert store(first, keys, objects).is_successful()
    for params in ({"weights_id": "v"}, {"revision": "r"}, {"salt": "s"}):
        other = make(slab(tmp_path), SMALL, **params)
        assert lookup(other, keys) == [False] * 2


def test_objects_outside_of_the_arena_are_copied(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    keys = keys_of(0, 5)
    elsewhere = [object_of(torch.empty(SMALL, dtype=torch.uint8)) for _ in range(4)]
    inside = arena.objects(1)
    before = bytes_of(elsewhere + inside)
    assert store(adapter, keys, elsewhere + inside).is_successful()
    wipe(elsewhere)
    assert load(adapter, keys, inside + elsewhere) == [True] * 5
    assert bytes_of(inside + elsewhere) == before
    (sized,) = adapter._sized.values()
    assert len(sized.free) == len(set(sized.free)) == 64 * MIB // SMALL
    # more than there are blocks to copy through: what finds none is not stored
    sized.free[:] = sized.free[:2]
    assert not store(adapter, keys_of(10, 4), elsewhere).is_successful()
    assert lookup(adapter, keys_of(10, 4)) == [True, True, False, False]


def test_odd_sizes_and_steps(tmp_path, make):
    arena = Arena()
    arena.desc = type(arena.desc)(arena.desc.ptr + 3, 8 * MIB - 3, 1)
    adapter = make(slab(tmp_path), 1001, memory=arena)
    objects = [object_of(arena.memory[at : at + 1001]) for at in range(3, 50_000, 1501)]
    keys = keys_of(0, len(objects))
    before = bytes_of(objects)
    assert store(adapter, keys, objects).is_successful()
    wipe(objects)
    assert all(load(adapter, keys, objects))
    assert bytes_of(objects) == before


def test_serde_is_refused_and_logged_once(tmp_path, arena, make, caplog):
    adapter = make(slab(tmp_path), SMALL)
    for number in range(3):
        objects = arena.objects(1)
        objects[0].set_used_size(1000 + number)
        with caplog.at_level(logging.ERROR, "kvoffload.lmcache"):
            assert not store(adapter, keys_of(number, 1), objects).is_successful()
    assert sum("serde must not be set" in line for line in caplog.messages) == 1
    assert adapter.report_status()["object_bytes"] == [SMALL]


def test_many_sizes_are_refused(tmp_path, arena, make, caplog):
    adapter = make(slab(tmp_path, 64 * KIB))
    with caplog.at_level(logging.ERROR, "kvoffload.lmcache"):
        results = [
            store(adapter, keys_of(number, 1), arena.objects(1, 4096 * (1 + number)))
            for number in range(18)
        ]
    assert [result.is_successful() for result in results] == [True] * 16 + [False] * 2
    assert sum("of 16 sizes at most" in line for line in caplog.messages) == 1


def test_a_tier_that_cannot_be_opened_is_a_miss(tmp_path, arena, make, caplog):
    blocker = make(slab(tmp_path), SMALL)
    adapter = make(slab(tmp_path), LARGE)
    assert blocker.report_status()["is_healthy"]
    keys, objects = keys_of(0, 1), arena.objects(1)
    with caplog.at_level(logging.ERROR, "kvoffload.lmcache"):
        assert not store(adapter, keys, objects).is_successful()
    assert "cannot be opened" in caplog.text
    assert lookup(adapter, keys) == [False]
    assert load(adapter, keys, objects) == [False]
    assert store(adapter, keys, arena.objects(1, LARGE)).is_successful()


def test_a_tier_for_which_there_is_no_thread_is_opened_later(
    tmp_path, arena, make, monkeypatch, caplog
):
    adapter, keys = make(slab(tmp_path)), keys_of(0, 1)

    def refusing(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "kvoffload.lmcache"):
        patched.setattr(threading.Thread, "start", refusing)
        assert not store(adapter, keys, arena.objects(1)).is_successful()
    assert "cannot be opened now: can't start new thread" in caplog.text
    assert store(adapter, keys, arena.objects(1)).is_successful()


def test_the_ends_of_jobs_wake_the_adapter(tmp_path, arena, make, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 600.0)
    adapter = make(slab(tmp_path), SMALL)
    assert store(adapter, keys_of(0, 1), arena.objects(1), timeout_s=60).is_successful()


# -- bounds, accounting, metrics -------------------------------------------------------------


def test_a_slab_never_has_more_than_its_capacity(tmp_path, arena, make):
    adapter = make(slab(tmp_path, 8 * SMALL), SMALL)
    listener = Listener(adapter)
    adapter.register_listener(listener)
    (path,) = tmp_path.rglob("blocks.dat")
    objects = arena.objects(4)
    for first in range(0, 80, 4):
        keys = keys_of(first, 4, cache_salt=str(first % 8))
        assert store(adapter, keys, objects).is_successful()
    assert path.stat().st_size == 8 * SMALL
    usage = adapter.get_usage()
    assert usage.total_bytes_used == usage.total_capacity_bytes == 8 * SMALL
    assert not adapter.supports_global_eviction
    last = {*keys_of(72, 4, cache_salt="0"), *keys_of(76, 4, cache_salt="4")}
    assert eventually(lambda: set(listener.sizes) == last)  # LMCache is told soon after
    assert set(listener.sizes.values()) == {SMALL}
    assert adapter.get_usage().bytes_by_cache_salt == {"0": 4 * SMALL, "4": 4 * SMALL}


def test_an_object_that_is_loaded_stays(tmp_path, arena, make):
    adapter = make(slab(tmp_path, 4 * SMALL), SMALL)
    keys, objects = keys_of(0, 6), arena.objects(6)
    assert store(adapter, keys[:4], objects[:4]).is_successful()
    assert load(adapter, keys[:1], objects[:1]) == [True]
    assert store(adapter, keys[4:], objects[4:]).is_successful()
    assert lookup(adapter, keys) == [True, False, False, True, True, True]


def test_metrics_and_status(tmp_path, arena, make):
    def exported() -> str:
        return prometheus_client.generate_latest().decode()

    adapter, other = make(slab(tmp_path / "a"), SMALL), make(slab(tmp_path / "b"), SMALL)
    assert store(adapter, keys_of(0, 3), arena.objects(3)).is_successful()
    name, second = f"lmcache-{SMALL}", f"lmcache2-{SMALL}"
    line = 'kvoffload:tier_blocks_total{op="put",status="ok",tier="%s"} 3.0'
    assert line % name in exported()
    assert f'tier="{second}"' in exported()
    status = adapter.report_status()
    assert status["is_healthy"]
    assert status["tiers"][name]["put_ok"] == 3
    adapter.close()
    assert f'tier="{second}"' in exported()
    assert f'tier="{name}"' not in exported()
    other.close()
    assert "kvoffload" not in exported()
    assert not adapter.report_status()["is_healthy"]


def test_a_flipped_byte_is_a_miss(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    listener = Listener(adapter)
    adapter.register_listener(listener)
    keys, objects = keys_of(0, 5), arena.objects(5)
    before = bytes_of(objects)
    assert store(adapter, keys, objects).is_successful()
    (path,) = tmp_path.rglob("blocks.dat")
    data = bytearray(path.read_bytes())
    data[data.index(before[3]) + 5] ^= 0x10
    path.write_bytes(data)
    assert lookup(adapter, keys) == [True] * 5
    assert load(adapter, keys, objects) == [True, True, True, False, True]
    assert lookup(adapter, keys) == [True, True, True, False, True]
    assert eventually(lambda: set(listener.sizes) == {*keys[:3], keys[4]})


# -- threads and the end ---------------------------------------------------------------------


def test_two_threads(tmp_path, arena, make):
    """One stores and deletes while the other looks up and loads: what is loaded is right."""
    adapter = make(slab(tmp_path, 64 * SMALL), SMALL)
    sources = arena.objects(32)
    before = bytes_of(sources)
    targets = arena.objects(32, fill=0)
    stop = threading.Event()
    loaded, errors = [], []

    def loads() -> None:
        try:
            poller = select.poll()
            poller.register(adapter.get_load_event_fd(), select.POLLIN)
            while not stop.is_set():
                keys = keys_of(0, 32)
                lookup(adapter, keys)
                are_there = load(adapter, keys, targets)
                found = bytes_of(targets)
                loaded.append(sum(are_there))
                assert all(found[index] == before[index] for index in range(32) if are_there[index])
                adapter.submit_unlock(keys)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=loads)
    thread.start()
    until = time.monotonic() + 3
    number = 0
    while time.monotonic() < until:
        number += 1
        assert store(adapter, keys_of(0, 32), sources).is_successful()
        assert store(adapter, keys_of(100 * number, 32), sources).is_successful()
        adapter.delete(keys_of(0, 16))
    stop.set()
    thread.join()
    assert not errors
    assert max(loaded) > 0


def test_close_ends_every_task_and_is_done_once(tmp_path, arena, make, caplog):
    adapter = make(slab(tmp_path), SMALL)
    keys, objects = keys_of(0, 64), arena.objects(64)
    assert store(adapter, keys[:8], objects[:8]).is_successful()
    tasks = [
        adapter.submit_store_task(keys, objects),
        adapter.submit_store_task(keys, objects),
        adapter.submit_store_task(keys[:8], objects[:8]),
    ]
    load_task = adapter.submit_load_task(keys[:8], arena.objects(8))
    adapter.close()
    adapter.close()
    ended = adapter.pop_completed_store_tasks()
    assert all(ended[task].is_successful() for task in tasks)
    assert adapter.query_load_result(load_task).popcount() == 8
    assert not caplog.records
    with pytest.raises(RuntimeError, match="closed"):
        adapter.submit_lookup_and_lock_task(keys, {})
    adapter.delete(keys)
    reopened = make(slab(tmp_path), SMALL)
    assert all(lookup(reopened, keys))


def test_it_closes_while_a_tier_is_opened(tmp_path, arena, make):
    adapter = make(slab(tmp_path))
    task = adapter.submit_store_task(keys_of(0, 1), arena.objects(1))
    adapter.close()
    assert task in adapter.pop_completed_store_tasks()
    make(slab(tmp_path), SMALL)  # not in use any longer


# -- the ends of jobs that raise ---------------------------------------------------------------


class Freed(TensorMemoryObj):
    """An object in other memory whose bytes can be neither read nor written."""

    @property
    def byte_array(self):
        raise RuntimeError("its memory was freed")


class ReadOnly(TensorMemoryObj):
    """An object in other memory that cannot be written."""

    @property
    def byte_array(self):
        return bytes(super().byte_array)


def elsewhere(kind) -> TensorMemoryObj:
    made = object_of(torch.empty(SMALL, dtype=torch.uint8))
    return kind(raw_data=made.raw_data, metadata=made.metadata, parent_allocator=None)


def assert_all_has_ended(adapter) -> None:
    (sized,) = adapter._sized.values()
    assert not sized.jobs
    assert not sized.offered
    assert not adapter._loading
    assert len(sized.free) == len(set(sized.free)) == 64 * MIB // SMALL


@pytest.mark.parametrize("kind", [Freed, ReadOnly])
def test_an_object_that_cannot_be_written_is_the_only_miss(tmp_path, arena, make, kind):
    adapter = make(slab(tmp_path), SMALL)
    keys, objects = keys_of(0, 8), arena.objects(8)
    assert store(adapter, keys, objects).is_successful()
    bad = elsewhere(kind)
    tasks = [adapter.submit_load_task(keys[:2], [bad, objects[1]])]
    tasks += [
        adapter.submit_load_task([key], [obj])
        for key, obj in zip(keys[2:], objects[2:], strict=True)
    ]
    assert eventually(lambda: not adapter._loading)
    adapter.submit_unlock(keys)
    found = [result_of(adapter, "load", task) for task in tasks]
    assert found == [[False, True], *[[True]] * 6]
    assert_all_has_ended(adapter)


def test_an_object_that_cannot_be_read_fails_its_store_only(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    keys, objects = keys_of(0, 3), arena.objects(2)
    assert not store(adapter, keys[:2], [elsewhere(Freed), objects[0]]).is_successful()
    assert store(adapter, keys[2:], objects[1:]).is_successful()
    assert lookup(adapter, keys) == [False, True, True]
    assert_all_has_ended(adapter)


def raising(*_arguments):
    raise KeyError("of a plug-in")


@pytest.mark.parametrize("part", ["_end_offers", "_note", "_tell_later"])
def test_an_end_that_cannot_be_processed_is_a_failure_and_the_next_is_not(
    tmp_path, arena, make, monkeypatch, part
):
    adapter = make(slab(tmp_path), SMALL)
    keys, objects = keys_of(0, 4), arena.objects(4)
    assert store(adapter, keys[:2], objects[:2]).is_successful()
    with monkeypatch.context() as patched:
        patched.setattr(adapter, part, raising)
        store(adapter, keys[2:], objects[2:])  # it ends
        load(adapter, keys[:2], objects[:2])
    adapter.submit_unlock(keys)
    assert store(adapter, keys_of(10, 2), objects[:2]).is_successful()
    assert load(adapter, keys[:2], objects[:2]) == [True, True]
    assert eventually(lambda: lookup(adapter, keys_of(10, 2)) == [True, True])


@pytest.mark.parametrize("op", ["put", "get", "lookup", "poll", "take_events", "touch"])
def test_whatever_a_tier_raises_no_task_stays_open(tmp_path, arena, make, monkeypatch, op):
    adapter = make(slab(tmp_path), SMALL)
    keys, objects = keys_of(0, 4), arena.objects(4)
    assert store(adapter, keys[:2], objects[:2]).is_successful()
    (sized,) = adapter._sized.values()
    with monkeypatch.context() as patched:
        patched.setattr(sized.tier, op, raising)
        put = adapter.submit_store_task(keys[2:], objects[2:])
        get = adapter.submit_load_task(keys[:2], objects[:2])
        found = adapter.submit_lookup_and_lock_task(keys[:2], {0: layout(SMALL)})
        time.sleep(0.1)
    adapter.delete([])  # wakes the adapter's thread
    assert result_of(adapter, "load", get) == [op != "get"] * 2
    assert result_of(adapter, "lookup_and_lock", found) == [op != "lookup"] * 2
    assert eventually(lambda: put in adapter.pop_completed_store_tasks())
    adapter.submit_unlock(keys)
    assert eventually(lambda: not sized.jobs)
    assert store(adapter, keys_of(10, 2), objects[:2]).is_successful()


def test_a_tier_that_was_interrupted_is_opened_again_or_closed(tmp_path, arena, make):
    adapter = make(slab(tmp_path), SMALL)
    listener = Listener(adapter)
    adapter.register_listener(listener)
    keys, objects = keys_of(0, 2), arena.objects(2)
    assert store(adapter, keys, objects).is_successful()
    adapter._sized[SMALL].tier._medium.tend = raising
    assert load(adapter, keys, objects) in ([True, True], [False, False])
    adapter.submit_unlock(keys)
    assert eventually(lambda: lookup(adapter, keys) == [True, True])
    assert load(adapter, keys, objects) == [True, True]
    assert eventually(lambda: listener.sizes == dict.fromkeys(keys, SMALL))
    adapter._sized[SMALL].tier._medium.before_close = raising
    adapter.close()
    make(slab(tmp_path), SMALL)
