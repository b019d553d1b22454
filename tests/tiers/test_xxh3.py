"""XXH3-64 in C gives what the ``xxhash`` package gives: every length, seeds, buffers in pieces."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import AVAILABLE

xxhash = pytest.importorskip("xxhash")
if "compiled" not in AVAILABLE:
    pytest.skip("the compiled twins are not built", allow_module_level=True)

from kvoffload._core import io  # noqa: E402
from kvoffload.tiers import Region  # noqa: E402

SEEDS = (0, 1, 2**32, 2**64 - 1)


def check(data: bytes | memoryview, value: int) -> None:
    found, expected = io.xxh3_64(data, value), xxhash.xxh3_64_intdigest(data, value)
    assert found == expected, f"{len(data)} bytes, seed {value}: {found:#x}, not {expected:#x}"


def test_every_length_and_alignment(seed: int) -> None:
    chance = random.Random(seed)
    data = memoryview(chance.randbytes(5000))
    for length in range(4097):
        for value in (*SEEDS, chance.getrandbits(64)):
            check(data[length % 64 :][:length], value)
    for start in range(64):
        for length in (0, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 1025, 1500):
            check(data[start : start + length], start)


def test_a_block_in_pieces_has_the_sum_of_its_bytes_joined(seed: int, tmp_path: Path) -> None:
    """The threads sum a block where it lies: in one to many parts, of any sizes."""
    chance = random.Random(seed)
    fingerprint = b"f" * 16
    for _ in range(60):
        sizes = [chance.choice([1, 7, 63, 64, 65, 240, 1000, 1024, 5000]) for _ in range(1, 9)]
        sizes = sizes[: chance.randrange(1, 9)]
        offsets = np.cumsum([0, *[size + chance.randrange(3) for size in sizes]]).tolist()
        memory = bytearray(chance.randbytes(offsets[-1]))
        parts = [(start, 1 << 20, size) for start, size in zip(offsets, sizes, strict=False)]
        region = Region.of_parts(memory, parts, 1)
        target = Region(bytearray(region.block_bytes), region.block_bytes)
        sums = np.zeros(1, np.uint64)
        pool = io.Pool(region, io.MemoryStore(target, fingerprint, sums), 1)
        ids = np.zeros(1, np.int64)
        pool.submit(1, 1, [b"key"], ids, ids, timeout_s=60, generation=0)
        while not pool.poll():
            pool.wait(1)
        assert pool.close(60)
        seed_of_key = xxhash.xxh3_64_intdigest(fingerprint + b"key")
        assert int(sums[0]) == xxhash.xxh3_64_intdigest(region.read(0), seed_of_key), sizes
        assert target.read(0) == region.read(0)
