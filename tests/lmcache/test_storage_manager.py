"""LMCache's own storage manager and server over a slab, and a disk that hangs."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

from kvoffload.integrations.lmcache import adapter as module
from kvoffload.testing.tiers import FaultyTier
from tests.tiers.servers import free_port

from .memory import (
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
    slab,
    spec,
    store,
    wipe,
)
from .storing import CHUNK, Told, manager_of

ROOT = Path(__file__).parents[2]


def storing(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.lmcache.storing", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)


def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path):
    """Of what LMCache was told is in L2, all is there after a kill below capacity, none wrong."""
    told = tmp_path / "told"
    told.touch()
    for _ in range(2):
        size = told.stat().st_size + 200
        with storing(tmp_path / "kv", "store", told) as child:
            assert eventually(lambda size=size: told.stat().st_size > size, 60)
            time.sleep(random.random())
            child.send_signal(signal.SIGKILL)
    numbers = told.read_text().split("\n")
    told.write_text("\n".join(numbers[:-1][-400:]))  # the last line may be cut off
    with storing(tmp_path / "kv", "check", told) as child:
        printed, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    count = len(told.read_text().split())
    assert count > 50
    assert f"checked {count} missing 0 wrong 0" in printed


def test_the_server_starts_with_it(tmp_path):
    ports = [free_port() for _ in range(3)]
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--l1-size-gb", "0.0625", "--eviction-policy", "LRU", "--no-l1-use-lazy"),
        *("--port", str(ports[0]), "--http-port", str(ports[1])),
        *("--prometheus-port", str(ports[2])),
        *("--l2-adapter", json.dumps(spec(slab(tmp_path / "kv"), SMALL))),
    ]
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT) as server,
    ):
        try:

            def metrics() -> str:
                try:
                    url = f"http://127.0.0.1:{ports[1]}/metrics"
                    with urllib.request.urlopen(url, timeout=300) as answer:
                        return answer.read().decode()
                except OSError:
                    assert server.poll() is None, log.read_text()[-3000:]
                    time.sleep(0.2)
                    return ""

            assert eventually(metrics, 60), log.read_text()[-3000:]
            assert f'kvoffload:tier_capacity_bytes{{tier="lmcache-{SMALL}"}}' in metrics()
            url = f"http://127.0.0.1:{ports[1]}/status"
            with urllib.request.urlopen(url, timeout=300) as answer:
                assert f"lmcache-{SMALL}" in answer.read().decode()
        finally:
            server.terminate()


# -- a disk that hangs -----------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Give an event that all calls of a tier's wait for, which adapters open here."""
    gate = threading.Event()
    gate.set()

    def opened(url, namespace, generation):
        assert "staged=yes" in url
        assert "ack=stored" in url
        tier = FaultyTier(8 * MIB, namespace=namespace, ack="stored", enable_events=True)
        tier._store.running = gate
        return tier

    monkeypatch.setattr(module, "open_tier", opened)
    yield gate
    gate.set()


@pytest.fixture
def hung(tmp_path, gate, close_all):
    """Give an adapter over a slab, and that event."""
    arena = Arena()
    adapter = adapter_of(arena, slab(tmp_path), SMALL)
    close_all.append(adapter)
    yield adapter, arena, gate
    gate.set()  # before it is closed


def test_a_load_that_hangs_touches_no_memory_that_is_used_again(hung):
    adapter, arena, gate = hung
    keys, objects = keys_of(0, 4), arena.objects(4)
    before = bytes_of(objects)
    assert store(adapter, keys, objects).is_successful()
    gate.clear()
    targets = arena.objects(4, fill=0)
    task = adapter.submit_load_task(keys, targets)
    adapter.submit_unlock(keys_of(100, 4))  # other keys do not wait
    adapter.submit_unlock(keys)  # as of a prefetch that was given up
    assert adapter.query_load_result(task).popcount() == 0
    wipe(targets, 0xEE)  # LMCache uses the memory again
    gate.set()
    time.sleep(1.0)
    assert set(b"".join(bytes_of(targets))) == {0xEE}
    assert eventually(lambda: all(load(adapter, keys, objects)))
    assert bytes_of(objects) == before


def test_a_store_that_hangs_stores_nothing_that_came_later(hung):
    adapter, arena, gate = hung
    keys, objects = keys_of(0, 4), arena.objects(4)
    before = bytes_of(objects)
    gate.clear()
    assert not store(adapter, keys, objects).is_successful()
    wipe(objects, 0xEE)
    gate.set()
    time.sleep(1.0)
    are_there = load(adapter, keys, objects)
    for index, is_there in enumerate(are_there):
        assert not is_there or bytes_of(objects)[index] == before[index]
    assert eventually(lambda: store(adapter, keys_of(10, 4), objects).is_successful())
    assert lookup(adapter, keys_of(10, 4)) == [True] * 4


def test_it_closes_while_the_disk_hangs(hung):
    adapter, arena, gate = hung
    keys, objects = keys_of(0, 4), arena.objects(4)
    assert store(adapter, keys, objects).is_successful()
    gate.clear()
    task = adapter.submit_load_task(keys, objects)
    adapter.close()
    assert adapter.query_load_result(task).popcount() == 0
    wipe(objects, 0xEE)
    gate.set()
    time.sleep(0.5)
    assert set(b"".join(bytes_of(objects))) == {0xEE}


def test_lmcache_uses_memory_again_after_its_lock_expired_and_keeps_it(
    tmp_path, gate, close_all, monkeypatch
):
    """A prefetch hangs longer than its lock holds; what is written there since stays."""
    monkeypatch.setattr(module, "_seconds", lambda *_: 2.0)  # of 120 at most, before the lock's 300
    manager = manager_of(tmp_path, memory=MIB, seconds=3)
    close_all.append(manager)
    keys, told = keys_of(0, 8), []
    listener = Told(SimpleNamespace(write=told.append, flush=lambda: None))
    manager.register_l2_listener(listener)
    for key, obj in manager.reserve_write(keys, layout(CHUNK)).items():
        obj.raw_data.fill_(int.from_bytes(key.chunk_hash, "big"))
    manager.finish_write(keys)
    assert eventually(lambda: len(told) == len(keys))
    manager.clear(force=True)
    gate.clear()
    groups = [GroupedObjectKeys(keys, 0, layout(CHUNK))]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups, fetching_policy="full"))
    time.sleep(1.0)
    assert manager.query_prefetch_status(handle) is None  # it loads what was found
    time.sleep(3.0)
    assert manager.wait_prefetch_status(handle, 10)
    (cells,) = manager.query_prefetch_status(handle).hit_cells
    assert cells.popcount() == 0
    others = keys_of(100, 14)
    written = manager.reserve_write(others, layout(CHUNK))
    assert len(written) >= 8  # all of the memory but what stores that hang may read
    for obj in written.values():
        obj.raw_data.fill_(0xEE)
    gate.set()
    time.sleep(1.0)
    assert {byte for obj in written.values() for byte in bytes(obj.byte_array)} == {0xEE}
    manager.finish_write(list(written))
