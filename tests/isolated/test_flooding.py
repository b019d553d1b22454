"""Keys that a client chose to collide: they do under the secret they were made for, and no other.

Samples use the hash of the index in Python, so that keys can be made for a given secret. Time is
not tested; how keys spread over the index is.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter

import pytest

from kvoffload._sampling import hash_key, words_of
from tests.differential.pairs import Twins
from tests.isolated.scripts import run_script

pytestmark = pytest.mark.thorough

NUM_KEYS = 3_000
NUM_BUCKETS = 1_000


def draw_secret(seed: int) -> bytes:
    return random.Random(seed).randbytes(64)


def hash_digest(key: bytes, secret: bytes) -> int:
    """Hash a key as the index does."""
    return hash_key(key, words_of(secret))


def home(hashed: int, num_buckets: int) -> int:
    """Return the bucket that a key belongs to."""
    return (hashed & 0xFFFFFFFF) * num_buckets >> 32


def colliding_keys(secret: bytes, count: int) -> list[bytes]:
    """Return keys with one hash under a secret: their first word makes a factor zero."""
    zero = secret[8:16]
    return [zero + number.to_bytes(8, "big") + bytes(16) for number in range(count)]


def test_keys_made_for_a_secret_collide_under_it_and_spread_under_any_other() -> None:
    keys = colliding_keys(draw_secret(1), NUM_KEYS)
    assert len({hash_digest(key, draw_secret(1)) for key in keys}) == 1
    for seed in range(2, 12):
        hashes = [hash_digest(key, draw_secret(seed)) for key in keys]
        loads = Counter(home(hashed, NUM_BUCKETS) for hashed in hashes)
        assert len(set(hashes)) == NUM_KEYS
        # of 1,000 buckets with 3 keys on average 50 are empty, the fullest has about 10
        assert 20 < NUM_BUCKETS - len(loads) < 90
        assert max(loads.values()) < 18


def test_successive_numbers_as_keys_spread() -> None:
    for place in (0, 24):
        numbers = [number.to_bytes(8, "big").rjust(place + 8, b"\0") for number in range(NUM_KEYS)]
        keys = [number.ljust(32, b"\0") for number in numbers]
        loads = Counter(home(hash_digest(key, draw_secret(3)), NUM_BUCKETS) for key in keys)
        assert 20 < NUM_BUCKETS - len(loads) < 90
        assert max(loads.values()) < 18


WITH_SECRET = """
import faulthandler, os, sys
from tests.isolated.test_flooding import *
drawn = []
def urandom(size):
    drawn.append(size)
    return draw_secret(1)[:size]
os.urandom = urandom
from tests._compiled import CPUOffloadingManager
faulthandler.dump_traceback_later(60, exit=True)
"""


def test_the_index_asks_the_system_for_its_secret(twins: Twins) -> None:
    script = "CPUOffloadingManager(16, 8); CPUOffloadingManager(16, 8); print(drawn)"
    assert run_script(WITH_SECRET + script).strip() == "[64, 64]"


def test_keys_that_all_collide_are_slow_and_right(twins: Twins) -> None:
    run_script(
        WITH_SECRET
        + """
from tests._python import CPUOffloadingManager as Reference
keys = colliding_keys(draw_secret(1), 400)
managers = CPUOffloadingManager(16, 300), Reference(16, 300)
for start in (0, 150, 250, 50, 0, 350):
    batch = keys[start : start + 100]
    both = [manager.prepare_store(batch).block_hashes_evicted for manager in managers]
    assert both[0] == both[1]
    for manager in managers:
        manager.complete_store(batch)
        manager._check()
    assert [m.lookup(keys[:n]) for m in managers[:1] for n in (1, 60, 400)] == [
        managers[1].lookup(keys[:n]) for n in (1, 60, 400)
    ]
"""
    )


def test_a_search_ends_though_every_bucket_overflowed(twins: Twins) -> None:
    # A full bucket sends a thirteenth key on. Twelve of them leave; the key that was sent on keeps
    # the mark "search on" in its home. Done to each bucket, no bucket ends a search for what is
    # not there: only having seen all of them does.
    run_script(
        WITH_SECRET
        + """
capacity = 300  # a key stays in each bucket
num_buckets = (capacity + 1024) // 6 + 1  # spare nodes, six keys per bucket
homes = [[] for _ in range(num_buckets)]
generator = random.Random(2)
while min(map(len, homes)) < 14:
    key = generator.randbytes(32)
    homes[home(hash_digest(key, draw_secret(1)), num_buckets)].append(key)
manager = CPUOffloadingManager(16, capacity)
for keys in homes:
    manager.prepare_store(keys[:13])
    manager.complete_store(keys[:12], False)
    manager.complete_store(keys[12:13])
assert len(manager) == num_buckets
assert [manager.lookup(keys[13:14]) for keys in homes] == [0] * num_buckets
assert [manager.lookup(keys[12:13]) for keys in homes] == [1] * num_buckets
manager._check()
"""
    )


def test_tables_beyond_the_last_number_are_searched_like_the_first(twins: Twins) -> None:
    """A table's first version holds its number in 24 bits; version 0 would mean searched before."""
    from kvoffload._core import table

    symbols = subprocess.run(["nm", table.__file__], capture_output=True, text=True, check=False)
    found = [line for line in symbols.stdout.splitlines() if line.endswith("num_opened")]
    if not found:
        pytest.skip("needs nm and the symbols of the extensions")
    script = """
        import ctypes, sys
        from kvoffload import CPUOffloadingManager
        from kvoffload._core import table
        maps = [line.split() for line in open("/proc/self/maps")]
        start = min(int(line[0].split("-")[0], 16) for line in maps if line[-1] == table.__file__)
        last = ctypes.c_uint64.from_address(start + int(sys.argv[1], 16))
        assert last.value < 100
        last.value = 2**24 - 1
        for expected in (1, 2):
            manager = CPUOffloadingManager(16, 500)
            first = [b"first %d" % number for number in range(300)]
            with manager.begin(first) as request:
                request.prepare_store()
                request.complete_store()
            assert manager.begin([b"other %d" % number for number in range(300)]).lookup() == 0
            assert manager.begin(first).lookup() == 300
            manager._check()
            assert last.value == expected
    """
    run_script(script, found[0].split()[0])
