"""Tiers in trouble, and what they keep to: ownership, deadlines, breakers, bounds."""

import errno
import gc
import itertools
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.testing.tiers import PATIENCE_S, FaultyTier, block_bytes_of, run
from kvoffload.tiers import (
    FileTier,
    MemoryTier,
    Namespace,
    Region,
    State,
    Status,
    TieredStore,
    TierEvent,
    TierInterruptedError,
)
from kvoffload.tiers.engine.tier import TRANSFER_DEADLINE_S
from tests.parts import ListPolicy
from tests.tiers.inside import attached, limit_queue, set_clock, settle, wait_until

BLOCK = 4096
KEYS = [*(b"key-%02d" % number for number in range(63)), b"digested" * 6]
SHORT_S = 0.03
LONG_S = 1.0
"""Enough for what a job does before its deadline."""
BUFFER = 2 * BLOCK
"""Bytes of a buffer: a block and its seal, rounded up."""


@pytest.fixture
def faulty(namespace: Namespace) -> Iterator[tuple[FaultyTier, Region]]:
    """Give a tier with room for 32 blocks, 4 threads, and 16 buffers."""
    tier = FaultyTier(
        32 * BLOCK, namespace=namespace, staging_bytes=16 * BUFFER, enable_events=True
    )
    yield tier, attached(tier, 72, KEYS)
    tier.resume()
    tier.close(PATIENCE_S)


def store(tier: MemoryTier, keys: list[bytes]) -> None:
    """Put keys from the blocks that hold them, and wait until they can be read."""
    assert not run(tier, tier.put(keys, [KEYS.index(key) for key in keys])).status.any()
    settle(tier)


class TestHangs:
    def test_a_get_ends_and_the_memory_is_the_callers_again(self, faulty) -> None:
        tier, region = faulty
        store(tier, KEYS[:8])
        tier.hang()
        done = run(tier, tier.get(KEYS[:8], range(40, 48), SHORT_S))
        assert set(done.status.tolist()) == {Status.TIMEOUT}
        assert done.nbytes == 0
        region.array[:] = 7
        tier.resume()
        settle(tier)
        assert (region.array == 7).all(), "a late call has written to memory that was given back"
        assert set(run(tier, tier.get(KEYS[:8], range(8))).status.tolist()) == {Status.OK}
        assert region.read(3) == block_bytes_of(KEYS[3], BLOCK)

    def test_a_put_is_acknowledged_when_it_is_copied(self, faulty) -> None:
        tier, region = faulty
        tier.hang()
        done = run(tier, tier.put(KEYS[:8], range(8)))
        assert set(done.status.tolist()) == {Status.OK}
        assert (tier.lookup(KEYS[:8]) == State.MISS).all(), "it cannot be read yet"
        assert list(tier.take_events()) == []
        region.array[:] = 7  # the caller's again; the copy is what is stored
        tier.resume()
        settle(tier)
        assert (tier.lookup(KEYS[:8]) == State.HIT).all()
        assert list(tier.take_events()) == [TierEvent(KEYS[:8], removed=False)]
        run(tier, tier.get(KEYS[:8], range(8)))
        assert region.read(5) == block_bytes_of(KEYS[5], BLOCK)

    def test_a_query_knows_what_was_stored_since_the_last_poll(self, faulty) -> None:
        tier, _ = faulty
        tier.hang()
        assert run(tier, tier.put(KEYS[:1], [0])).status.tolist() == [Status.OK]
        assert run(tier, tier.query(KEYS[:1])).status.tolist() == [Status.MISS]
        tier.resume()
        wait_until(lambda: not tier.stats()["staging_bytes"])  # it is stored; nobody polls
        assert run(tier, tier.query(KEYS[:1])).status.tolist() == [Status.OK]

    def test_a_put_that_waits_to_be_stored_ends_at_its_deadline(self, namespace) -> None:
        tier = FaultyTier(32 * BLOCK, namespace=namespace, ack="stored")
        attached(tier, 72, KEYS)
        tier.hang()
        job = tier.put(KEYS[:8], range(8), LONG_S)
        wait_until(lambda: tier.stats()["staging_bytes"] == 8 * BUFFER)
        assert set(run(tier, job).status.tolist()) == {Status.TIMEOUT}
        tier.resume()
        settle(tier)
        assert (tier.lookup(KEYS[:8]) == State.HIT).all(), "late, it was stored after all"
        tier.close()

    def test_buffers_are_bounded(self, faulty) -> None:
        """Half of them are for puts: the others of a put wait for its deadline."""
        tier, _ = faulty
        tier.hang()
        done = run(tier, tier.put(KEYS[:12], range(12), LONG_S))
        assert done.status.tolist() == [Status.OK] * 8 + [Status.TIMEOUT] * 4
        assert tier.stats()["staging_bytes"] == 8 * BUFFER
        tier.resume()
        settle(tier)
        assert tier.lookup(KEYS[:12]).tolist() == [State.HIT] * 8 + [State.MISS] * 4
        assert tier.stats()["staging_bytes"] == 0
        assert tier.stats()["blocks"] == 8

    def test_when_every_thread_hangs_calls_are_answered_at_once(self, faulty) -> None:
        tier, _ = faulty
        store(tier, KEYS[:16])
        tier.hang()
        # one thread each; the breaker would open after five
        jobs = [tier.get([key], [place], LONG_S) for place, key in enumerate(KEYS[:4])]
        assert tier.wait(jobs, PATIENCE_S)
        assert tier.health().late_jobs == 4
        done = run(tier, tier.get(KEYS[8:9], [0], 1000.0))
        assert done.status.tolist() == [Status.UNAVAILABLE]

    def test_the_breaker_opens_answers_at_once_and_closes(self, faulty) -> None:
        tier, _ = faulty
        now = [0.0]
        set_clock(tier, lambda: now[0])
        store(tier, KEYS[:16])
        tier.fail("get", 5)
        for key in KEYS[:5]:
            assert run(tier, tier.get([key], [0])).status.tolist() == [Status.FAILED]
        assert tier.health().reads == "open"
        assert tier.health().writes == "closed"
        assert not tier.health().ok
        done = run(tier, tier.get([*KEYS[8:10], b"absent"], [0, 1, 2]))
        assert done.status.tolist() == [Status.UNAVAILABLE, Status.UNAVAILABLE, Status.MISS]
        assert tier.state(KEYS[8]) == State.MISS, "to an engine it is a miss"
        now[0] = 1.0
        assert tier.state(KEYS[8]) == State.HIT, "or nobody would ask again"
        tier.fail("get", 1)
        assert run(tier, tier.get(KEYS[8:9], [0])).status.tolist() == [Status.FAILED]
        now[0] = 2.5
        assert tier.state(KEYS[9]) == State.MISS
        now[0] = 3.0
        # what needs no I/O is no probe
        assert run(tier, tier.get([b"absent"], [0])).status.tolist() == [Status.MISS]
        assert run(tier, tier.get(KEYS[9:10], [0])).status.tolist() == [Status.OK]
        assert tier.health().ok

    def test_close_says_that_something_hangs(self, faulty) -> None:
        tier, region = faulty
        others = threading.active_count() - 4
        store(tier, KEYS[:16])
        tier.hang()
        jobs = [tier.get(KEYS[:8], range(8), 1000.0), tier.put(KEYS[32:36], range(4), 1000.0)]
        assert tier.close(0.05) is False
        ends = {done.job: done.status.tolist() for done in tier.poll()}
        assert set(ends[jobs[0]]) <= {Status.UNAVAILABLE, Status.TIMEOUT}
        region.array[:] = 7
        tier.resume()
        wait_until(lambda: threading.active_count() == others)
        assert (region.array == 7).all()


class TestErrors:
    @pytest.mark.parametrize("ack", ["copied", "stored"])
    @pytest.mark.parametrize(
        ("number", "status"), [(errno.ENOSPC, Status.FULL), (errno.EIO, Status.FAILED)]
    )
    def test_a_put_that_fails_leaves_no_trace(
        self, namespace: Namespace, number: int, status: Status, ack: str
    ) -> None:
        tier = FaultyTier(32 * BLOCK, namespace=namespace, ack=ack)
        attached(tier, 72, KEYS)
        tier.fail("put", 3, number)
        tier.fail("get", 0)  # of another error, which puts do not have
        told = run(tier, tier.put(KEYS[:4], range(4))).status.tolist()
        ends = [Status.OK, status, status, status]
        assert sorted(told) == (sorted(ends) if ack == "stored" else [Status.OK] * 4)
        settle(tier)
        stats = tier.stats()
        assert (stats["blocks"], stats["store_ok"], stats[f"store_{status.name.lower()}"]) == (
            1, 1, 3
        )  # fmt: skip
        store(tier, KEYS[:4])
        assert tier.stats()["blocks"] == 4

    def test_a_policy_that_fails_interrupts_the_tier(self, namespace) -> None:
        class Failing(ListPolicy):
            failing = False

            def evict(self, n, protected):
                if Failing.failing:
                    raise ZeroDivisionError
                return super().evict(n, protected)

        tier = MemoryTier(8 * BLOCK, Failing, namespace=namespace)
        attached(tier, 72, KEYS)
        store(tier, KEYS[:8])
        Failing.failing = True
        with pytest.raises(ZeroDivisionError):
            tier.put(KEYS[:10], range(10))
        assert tier.health().interrupted
        with pytest.raises(TierInterruptedError, match="tier 'memory' was interrupted"):
            tier.get(KEYS[:1], [0])
        assert tier.close()


class TestBounds:
    def test_the_queue_is_bounded(self, namespace) -> None:
        tier = FaultyTier(64 * BLOCK, namespace=namespace, ack="stored")
        limit_queue(tier, 6 * BLOCK)
        attached(tier, 72, KEYS)
        tier.hang()
        first = tier.put(KEYS[:4], range(4))
        second = tier.put([KEYS[0], *KEYS[4:9], KEYS[4]], range(7))
        third = tier.put(KEYS[9:10], [0])
        tier.resume()
        assert tier.wait([first, second, third], PATIENCE_S)
        ends = {done.job: done.status.tolist() for done in tier.poll()}
        assert ends[first] == [Status.OK] * 4
        assert ends[second] == [Status.OK] * 3 + [Status.FULL] * 3 + [Status.OK]
        assert ends[third] == [Status.FULL]
        done = run(tier, tier.get(KEYS[:9], range(9)))
        assert done.status.tolist() == [Status.OK] * 6 + [Status.MISS] * 3
        limit_queue(tier, 2 * BLOCK)
        done = run(tier, tier.get(KEYS[:4], range(4)))
        assert done.status.tolist() == [Status.OK] * 2 + [Status.FULL] * 2
        tier.close()

    def test_a_policy_may_decline(self, namespace) -> None:
        """Hit density does not give blocks that are asked for away for blocks that are not."""
        tier = MemoryTier(8 * BLOCK, "hit-density", namespace=namespace)
        attached(tier, 72, KEYS)
        statuses = []
        for number in range(800):
            once = [b"once %d" % number, b"and its tail %d" % number]
            again = KEYS[number % 3 * 2 : number % 3 * 2 + 2]
            for keys in (once, again):
                tier.touch(keys)
                statuses += run(tier, tier.put(keys, [0, 1])).status.tolist()
                tier.touch(keys)
        assert set(statuses) == {Status.OK, Status.DECLINED}
        assert tier.stats()["put_declined"] == statuses.count(Status.DECLINED)
        assert (tier.lookup(KEYS[:6]) == State.HIT).all()
        tier.close()

    def test_pinned_blocks_leave_no_room(self, faulty) -> None:
        tier, _ = faulty
        store(tier, KEYS[:32])
        tier.hang()
        tier.get(KEYS[:30], range(30))
        done = run(tier, tier.put(KEYS[32:40], range(32, 40)))
        assert done.status.tolist().count(Status.FULL) == 6
        tier.resume()
        settle(tier)
        tier.poll()
        assert tier.stats()["blocks"] == 32

    def test_deadlines_by_default(self, namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        """1 s and 50 MB/s; the time between the call and the pool counts."""
        seen: list[float] = []
        clock = SimpleNamespace(monotonic=partial(next, itertools.count(step=0.125)))
        for name in ("tier", "jobs"):
            monkeypatch.setattr(f"kvoffload.tiers.engine.{name}.time", clock)
        monkeypatch.setattr("kvoffload.tiers.engine.tier.TRANSFER_DEADLINE_S", TRANSFER_DEADLINE_S)

        class Spy:
            def __init__(self, pool: Any) -> None:
                self.pool = pool

            def submit(self, *arguments: Any, timeout_s: float, generation: int) -> None:
                seen.append(timeout_s)
                self.pool.submit(*arguments, timeout_s=timeout_s, generation=generation)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.pool, name)

        tier = MemoryTier(64 * BLOCK, namespace=namespace)
        tier.attach(Region.allocate(64, BLOCK))
        tier._jobs.pool = Spy(tier._jobs.pool)
        run(tier, tier.put(KEYS[:50], range(50)))
        run(tier, tier.put(KEYS[50:51], [0], 2))
        run(tier, tier.get(KEYS[:1], [0], np.float32(0.5)))
        run(tier, tier.get(KEYS[:1], [0], float("inf")))
        wanted = [1 + 50 * BLOCK / 50e6, 2.0, 0.5, 86_400.0]
        assert seen == pytest.approx([want - 0.125 for want in wanted], rel=1e-12)
        tier.close()


class TestRemoval:
    def test_what_the_medium_lost_is_dropped_counted_and_logged_once_a_minute(
        self, faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier, _ = faulty
        store(tier, KEYS[:16])
        list(tier.take_events())
        tier.fail("get", 1)
        assert run(tier, tier.get(KEYS[5:6], [0])).status.tolist() == [Status.FAILED]
        for count, key in enumerate(KEYS[:3], start=1):
            if count == 3:
                tier._jobs._logged.clear()  # a minute later
            tier.flip(key, bit=12_345)
            done = run(tier, tier.get([key, KEYS[8]], [0, 1]))
            assert done.status.tolist() == [Status.CORRUPT, Status.OK]
            assert tier.state(key) == State.MISS
            assert tier.stats()["removed_corrupt"] == count
        assert [record.args[2] for record in caplog.records] == [1, 3]
        assert list(tier.take_events()) == [
            TierEvent([KEYS[5]], removed=True, reason="failed"),
            *(TierEvent([key], removed=True, reason="corrupt") for key in KEYS[:3]),
        ]
        assert tier.stats()["blocks"] == 12
        store(tier, KEYS[:16])
        assert tier.stats()["blocks"] == 16
        store(tier, KEYS[63:])
        tier.flip(KEYS[63])
        assert run(tier, tier.get(KEYS[63:], [0])).status.tolist() == [Status.CORRUPT]

    @pytest.mark.parametrize("is_again", [False, True])
    def test_a_block_dropped_and_wanted_again_while_it_is_stored(self, faulty, is_again) -> None:
        """For the first time, or again."""
        tier, _ = faulty
        if is_again:
            store(tier, KEYS[:4])
            tier.discard(KEYS[:4])
            list(tier.take_events())
        tier.hang()
        job = tier.put(KEYS[:4], range(4))
        tier.discard(KEYS[:3])
        again = tier.put(KEYS[:2], range(2))  # wanted after all: their store goes on
        tier.resume()
        assert tier.wait([job, again], PATIENCE_S)
        tier.poll()
        settle(tier)
        assert tier.lookup(KEYS[:4]).tolist() == [State.HIT, State.HIT, State.MISS, State.HIT]
        events = [(sorted(event.keys), event.removed) for event in tier.take_events()]
        assert events == [([*KEYS[:2], KEYS[3]], False)]
        assert tier.stats()["blocks"] == 3
        store(tier, KEYS[:4])
        assert tier.stats()["blocks"] == 4

    def test_dropped_blocks_give_their_slots_to_others_in_the_policys_order(self, faulty) -> None:
        tier, _ = faulty
        store(tier, KEYS[:32])
        list(tier.take_events())
        tier.discard(KEYS[:8])
        store(tier, KEYS[32:40])  # the least recent leave: the dropped ones
        assert tier.stats()["blocks"] == 32
        assert [(event.removed, event.reason) for event in tier.take_events()] == [
            (True, "discarded"),
            (False, ""),
        ]
        assert tier.lookup(KEYS[:40]).tolist() == [State.MISS] * 8 + [State.HIT] * 32

    def test_slots_of_before_a_forget_are_not_written_while_a_thread_uses_them(
        self, faulty
    ) -> None:
        tier, region = faulty
        store(tier, KEYS[:16])
        tier.hang()
        read = tier.get(KEYS[:8], range(64, 72), 1000.0)
        tier.put(KEYS[16:24], range(16, 24))
        assert tier.forget() is False  # it hangs
        job = tier.put(KEYS[24:56], range(24, 56), 1000.0)
        threading.Timer(0.05, tier.resume).start()
        assert tier.wait([read, job], PATIENCE_S)
        ends = {done.job: done.status.tolist() for done in tier.poll()}
        assert ends[read] == [Status.MISS] * 8, "it ends after the forget"
        assert ends[job].count(Status.FULL) == 16, "8 are read from, 8 are written to"
        settle(tier)
        assert not tier._medium._busy
        assert (tier.lookup(KEYS[:24]) == State.MISS).all()
        store(tier, [key for key in KEYS[24:56] if tier.state(key) != State.HIT])
        assert (tier.lookup(KEYS[24:56]) == State.HIT).all()
        region.array[:] = 0
        run(tier, tier.get(KEYS[24:56], range(24, 56)))
        assert all(
            region.read(place) == block_bytes_of(KEYS[place], BLOCK) for place in range(24, 56)
        )


class TestLives:
    def test_a_tier_that_nobody_closed_ends_its_threads(self, namespace) -> None:
        gc.collect()
        before = set(threading.enumerate())
        for _ in range(5):
            tier = FaultyTier(8 * BLOCK, namespace=namespace)
            attached(tier, 8)
            tier.put(KEYS[:8], range(8))
            del tier
            gc.collect()
        assert set(threading.enumerate()) <= before

    def test_own_memory_is_used(self, namespace) -> None:
        memory = Region.allocate(16, BLOCK)
        tier = MemoryTier(2**30, namespace=namespace, memory=memory)
        assert tier.capacity_bytes == 16 * BLOCK
        data = attached(tier, 1, KEYS[:1]).read(0)
        run(tier, tier.put([b"k"], [0]))
        assert sum(memory.read(block) == data for block in range(16)) == 1
        tier.close()


def test_a_copy_ends_at_its_deadline(tmp_path: Path) -> None:
    """The copy of a large block to a fresh buffer takes longer: it is not waited for."""
    large = 128 * 2**20
    region = Region.allocate(1, large)
    with FileTier(tmp_path, large, namespace=Namespace("m", large), staged=True) as tier:
        tier.attach(region)
        done = run(tier, tier.put([b"large"], [0], 0.004))
        assert done.status.tolist() == [Status.TIMEOUT]
        settle(tier)
        assert tier.stats()["staging_bytes"] == 0
        assert tier.state(b"large") == State.MISS


def test_an_exception_of_a_signal_ends_close(namespace: Namespace) -> None:
    """The tier is open until a second call, which goes on with it."""
    large = 2**22
    tier = MemoryTier(large * 4, namespace=Namespace("m", large), threads=1)
    attached(tier, 4)
    run(tier, tier.put(KEYS[:4], range(4)))
    for _ in range(500):  # some seconds of copying
        tier.get(KEYS[:4], range(4))

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come before the call
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            tier.close(PATIENCE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    tier.poll()
    assert tier.stats()["queued_bytes"] > 0, "it has waited for all"
    assert tier.close(0), "a disk that answers is no disk that hangs"
    assert {Status(status) for done in tier.poll() for status in done.status} >= {
        Status.UNAVAILABLE
    }


def test_a_block_that_is_stored_again_during_a_get_is_one_of_both() -> None:
    large = 2**20
    with MemoryTier(large, namespace=Namespace("m", large), threads=4) as tier:
        region = attached(tier, 4)
        for number in range(1, 30):
            region.write(0, bytes([number]) * large)
            region.write(2, bytes([number + 100]) * large)
            run(tier, tier.put([b"key"], [0]))
            jobs = [tier.get([b"key"], [1])]
            tier.discard([b"key"])
            jobs.append(tier.put([b"key"], [2]))
            assert tier.wait(jobs, PATIENCE_S)
            got = next(done for done in tier.poll() if done.op == "get")
            assert got.status.tolist() == [Status.OK]
            assert region.read(1) in (bytes([number]) * large, bytes([number + 100]) * large)
            tier.discard([b"key"])


def test_a_region_may_be_named_again(namespace: Namespace) -> None:
    """A store takes a tier that has its region, and leaves the others as they are."""
    region, other = Region.allocate(4, BLOCK), Region.allocate(4, BLOCK)
    with MemoryTier(8 * BLOCK, namespace=namespace) as tier:
        tier.attach(region)
        tier.attach(region)
        with pytest.raises(ValueError, match="has one"):
            tier.attach(other)
        store = TieredStore(region, CPUOffloadingManager(1, 4), [tier])
        store.prepare_store(KEYS[:1])
        store.complete_store(KEYS[:1])
        while store.busy:
            store.step()
        assert tier.state(KEYS[0]) == State.HIT
