"""A timed replay: its calls, and its counts."""

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import BlockNotFoundError, CPUOffloadingManager, OffloadingManager
from kvoffload.replay import Configuration, DecodedTrace, GroupChunks, Selection, replay
from kvoffload.replay.durations import DurationHistogram
from kvoffload.traces import Request, Workload
from tests.blocks import METHODS

pytestmark = pytest.mark.fast


def key(hash_id: int) -> bytes:
    return sha256(str(hash_id).encode()).digest()


def keys(*hash_ids: int) -> list[bytes]:
    return [key(hash_id) for hash_id in hash_ids]


def timed(requests, manager, block_tokens=None, progress=None):
    """Replay requests through a manager."""
    host = manager.stats()["free"] if isinstance(manager, CPUOffloadingManager) else 3
    configuration = Configuration(host=host, groups=GroupChunks.of_blocks(block_tokens))
    return replay(requests, configuration, manager=manager, progress=progress)


def recording(manager: OffloadingManager, calls: list[tuple[str, list[bytes]]]) -> Any:
    """Return a manager that passes calls on to another and records them."""

    def passed_on(name: str) -> Any:
        def call(_: object, hashes: Any, success: bool = True) -> Any:
            assert success
            calls.append((name, list(hashes)))
            return getattr(manager, name)(hashes)

        return call

    methods = {name: passed_on(name) for name in METHODS}
    return type("Recording", (OffloadingManager,), methods)()


def test_calls_in_the_order_of_an_engine():
    calls: list[tuple[str, list[bytes]]] = []
    requests = [
        Request(0, 40, 1, (10, 11)),
        Request(1, 40, 1, (10, 12)),
        Request(2, 90, 1, (1, 2, 3, 4)),  # larger than the cache: refused
        Request(3, 0, 1, ()),
    ]
    result = timed(requests, recording(CPUOffloadingManager(16, 3), calls), 20)
    assert calls == [
        ("touch", keys(10, 11)),
        ("lookup", keys(10, 11)),
        ("prepare_store", keys(10, 11)),
        ("touch", keys(10, 11)),
        ("complete_store", keys(10, 11)),
        ("touch", keys(10, 12)),
        ("lookup", keys(10, 12)),
        ("prepare_load", keys(10)),
        ("complete_load", keys(10)),
        ("prepare_store", keys(10, 12)),
        ("touch", keys(10, 12)),
        ("complete_store", keys(12)),
        ("touch", keys(1, 2, 3, 4)),
        ("lookup", keys(1, 2, 3, 4)),
        ("prepare_store", keys(1, 2, 3, 4)),
        ("touch", keys(1, 2, 3, 4)),
        ("complete_store", []),
        ("touch", []),
        ("lookup", []),
        ("prepare_store", []),
        ("touch", []),
        ("complete_store", []),
    ]
    assert (result.requests, result.blocks, result.tokens) == (4, 8, 170)
    assert (result.hits, result.hit_tokens, result.loaded, result.stored) == (1, 20, 1, 3)
    assert (result.evicted, result.refused, result.not_admitted) == (0, 1, 0)
    assert result.times.count == 4
    assert result.manager_seconds > 0
    assert result.blocks_per_second == pytest.approx(8 / result.manager_seconds)


def test_not_admitted_is_what_the_manager_says():
    class Choosy(CPUOffloadingManager):
        stores = 0

        def prepare_store(self, hashes):
            self.stores += 1
            return super().prepare_store(hashes)

        def stats(self):
            return super().stats() | {"not_admitted": 7 + 2 * self.stores}

    # those from before the replay do not count
    assert timed(Workload(5), Choosy(16, 9)).not_admitted == 10


def test_ratios_of_nothing_are_zero():
    result = timed([], CPUOffloadingManager(16, 9), 16)
    assert (result.hit_ratio, result.token_hit_ratio, result.blocks_per_second) == (0, None, 0)


def test_keys_are_the_digests_of_the_ids():
    trace = DecodedTrace.of([Request(0, 0, 0, (2**64 - 1, 0, 7, 0))])
    assert trace.keys() == keys(0, 7, 2**64 - 1)


def test_progress_is_called_between_requests():
    reported: list[int] = []
    timed(Workload(200), CPUOffloadingManager(16, 9), progress=reported.append)
    assert reported == [64, 128, 192]


def test_an_error_of_the_manager_ends_the_replay():
    class Stopping(CPUOffloadingManager):
        def lookup(self, hashes):
            if key(5) in hashes:
                raise BlockNotFoundError("enough")
            return super().lookup(hashes)

    manager = Stopping(16, 9)
    with pytest.raises(BlockNotFoundError, match="enough"):
        timed([Request(i, 1, 1, (i,)) for i in range(9)], manager)
    assert manager.stats()["stored_blocks"] == 5


def test_selection_of_the_first_requests_and_of_full_blocks():
    requests = [Request(0, 40, 1, (1, 2, 3)), Request(1, 32, 1, (1, 2)), Request(2, 5, 1, (4,))]
    assert list(Selection(requests, limit=2)) == requests[:2]
    assert list(Selection(requests)) == requests
    full = Selection(requests, full_block_tokens=16)
    for _ in range(2):
        assert [request.hash_ids for request in full] == [(1, 2), (1, 2), ()]
    unknown = [Request(0, 0, 0, (1, 2, 3))]
    assert list(Selection(unknown, full_block_tokens=16)) == unknown, "of a prompt of any length"


# -- percentiles of times, from a histogram ------------------------------------------------------

durations = st.lists(st.integers(0, 2**50) | st.integers(0, 300), min_size=1)


@given(durations, st.floats(0, 100))
def test_percentiles(values, percent):
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = next(
        value
        for rank, value in enumerate(sorted(values), start=1)
        if rank >= len(values) * percent / 100
    )
    assert exact <= histogram.percentile(percent) <= exact * (1 + 1 / 64)
    assert histogram.percentile(100) == histogram.max == max(values)
    assert histogram.total == sum(values)
    assert histogram.count == len(values)


def test_memory_does_not_grow_with_the_number_of_durations():
    histogram = DurationHistogram()
    for value in range(0, 2**20, 7):
        histogram.add(value)
    assert len(histogram._counts) < 64 * 20


@pytest.mark.parametrize("percent", [0, 50, 100])
def test_of_nothing_is_zero(percent):
    assert DurationHistogram().percentile(percent) == 0
