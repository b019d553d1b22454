"""Calls that wait for a tier, from many threads, while it is slow, hangs, fails or is closed."""

from __future__ import annotations

import random
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from kvoffload.integrations.sglang import blocking
from kvoffload.integrations.sglang.blocking import BlockingTier
from kvoffload.testing.tiers import PATIENCE_S, FaultyTier, block_bytes_of
from kvoffload.tiers import Namespace, Region, State, Status

BLOCK_BYTES = 512
THREADS = 8
ROUNDS = 25
SLOTS = THREADS * ROUNDS


@pytest.fixture
def tier():
    with FaultyTier(
        SLOTS * BLOCK_BYTES, namespace=Namespace("model", BLOCK_BYTES), ack="stored"
    ) as made:
        made.attach(Region.allocate(2 * THREADS, BLOCK_BYTES))
        yield made
        made.resume()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def in_threads(work) -> list:
    with ThreadPoolExecutor(THREADS) as threads:
        return [one.result(PATIENCE_S) for one in [threads.submit(work, n) for n in range(THREADS)]]


def test_each_thread_has_the_end_of_its_own_jobs(tier, monkeypatch):
    """And none waits for the next poll without a signal."""
    monkeypatch.setattr(blocking, "POLL_S", 2 * PATIENCE_S)
    calls = BlockingTier(tier)
    region = tier._region

    def work(number: int) -> list:
        rng = random.Random(number)
        wrong = []
        for turn in range(ROUNDS):
            key = b"%d %d" % (number, turn)
            data = block_bytes_of(key, BLOCK_BYTES)
            region.write(number, data)
            stored = calls.put([key], ids(number)).status.tolist()
            found = calls.query([key, b"nothing"]).tolist()
            other = THREADS + number
            region.write(other, bytes(BLOCK_BYTES))
            loaded = calls.get([b"nothing", key], ids(number, other)).tolist()
            expected = [[Status.OK], [Status.OK, Status.MISS], [Status.MISS, Status.OK]]
            if [stored, found, loaded] != expected or region.read(other) != data:
                wrong.append(turn)
            if rng.random() < 0.2:
                tier.delay(rng.random() / 1000)
        return wrong

    assert in_threads(work) == [[]] * THREADS
    assert calls._ended == {}


def test_what_hangs_is_not_waited_for_beyond_its_deadline(tier):
    calls = BlockingTier(tier)
    assert calls.put([b"key"], ids(0)).status.tolist() == [Status.OK]
    tier.hang()
    found = in_threads(lambda number: calls.get([b"key"], ids(number)).tolist())
    assert all(status in ([Status.TIMEOUT], [Status.UNAVAILABLE]) for status in found)


def test_an_error_of_the_medium_is_a_status_and_others_go_on(tier):
    calls = BlockingTier(tier)
    keys = [b"%d" % number for number in range(THREADS)]
    assert (calls.put(keys, ids(*range(THREADS))).status == Status.OK).all()
    tier.fail("get", 1)
    found = in_threads(lambda number: calls.get([keys[number]], ids(number)).tolist())
    assert sorted(found) == [[Status.OK]] * (THREADS - 1) + [[Status.FAILED]]


def test_a_wrong_call_raises_and_others_go_on(tier):
    calls = BlockingTier(tier)

    def work(number: int) -> bool:
        if number % 2:
            with pytest.raises(ValueError, match="ids must be in 0"):
                calls.put([b"key"], ids(-1))
            return True
        return calls.put([b"%d" % number], ids(number)).status.tolist() == [Status.OK]

    assert all(in_threads(work))


def test_closing_ends_the_calls_that_wait(tier):
    calls = BlockingTier(tier)
    assert calls.put([b"key"], ids(0)).status.tolist() == [Status.OK]
    tier.hang()
    waiting = threading.Barrier(THREADS)

    def work(number: int) -> list | bool:
        waiting.wait(PATIENCE_S)
        if not number:
            return calls.close(0.05)
        try:
            return calls.get([b"key"], ids(number)).tolist()
        except RuntimeError as error:  # it was closed before
            return str(error)

    _, *others = in_threads(work)  # it returns, so `close` and every other call have
    closed = "tier 'faulty' is closed"
    assert all(other in ([Status.TIMEOUT], [Status.UNAVAILABLE], closed) for other in others)
    with pytest.raises(RuntimeError, match=closed):
        calls.get([b"key"], ids(0))


def test_calls_of_an_interrupted_tier_end_when_it_is_closed(tier, monkeypatch):
    """Until then its jobs may use the callers' memory."""
    calls = BlockingTier(tier)
    assert calls.put([b"key"], ids(0)).status.tolist() == [Status.OK]
    tier.hang()

    tend = tier._medium.tend

    def tend_or_fail(failing: int) -> float | None:
        return 1 / 0 if threading.get_ident() == failing else tend()

    def work(number: int) -> bool:
        if not number:  # the last call: its own poll fails
            while len(tier._jobs.unsettled) < THREADS - 1:
                time.sleep(0.001)
            fails = partial(tend_or_fail, threading.get_ident())
            monkeypatch.setattr(tier._medium, "tend", fails)
        with suppress(ZeroDivisionError):
            calls.get([b"key"], ids(number))
        return tier._is_closed

    assert all(in_threads(work))
    with pytest.raises(RuntimeError, match="is closed"):
        calls.get([b"key"], ids(0))


def test_a_sleeper_hears_of_its_end_that_another_thread_has_polled(tier, monkeypatch):
    """The poll of a call that needs no I/O takes the end, and the signal, of the sleeper's job."""
    monkeypatch.setattr(blocking, "POLL_S", 10 * PATIENCE_S)
    calls = BlockingTier(tier)
    assert calls.put([b"there"], ids(0)).status.tolist() == [Status.OK]
    about_to_sleep, may_sleep = threading.Event(), threading.Event()

    class LatePoll:
        """A poll that comes late to the kernel."""

        def __init__(self) -> None:
            self._poll = poll()

        def register(self, *what: int) -> None:
            self._poll.register(*what)

        def poll(self, timeout_ms: float) -> list:
            about_to_sleep.set()
            assert may_sleep.wait(PATIENCE_S)
            return self._poll.poll(timeout_ms)

    poll = select.poll
    monkeypatch.setattr(select, "poll", LatePoll)
    tier.hang()  # else the job may have ended before anything would sleep
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(calls.get, [b"there"], ids(1))
        try:
            assert about_to_sleep.wait(PATIENCE_S)
            tier.resume()
            assert select.select([tier.fileno()], [], [], PATIENCE_S)[0]  # its job has ended
            assert calls.put([b"there"], ids(0)).nbytes == 0
            may_sleep.set()
            assert sleeper.result(PATIENCE_S).tolist() == [Status.OK]
        finally:
            may_sleep.set()
            tier.put([b"more"], ids(0))  # wakes a sleeper that has not heard


def test_a_lookup_finds_what_was_stored_since():
    """A store that ended when it was copied is known once it is polled, and nobody else polls."""
    with FaultyTier(SLOTS * BLOCK_BYTES, namespace=Namespace("model", BLOCK_BYTES)) as tier:
        tier.attach(Region.allocate(1, BLOCK_BYTES))
        calls = BlockingTier(tier)
        assert calls.put([b"key"], ids(0)).status.tolist() == [Status.OK]
        give_up = time.monotonic() + PATIENCE_S
        while calls.lookup([b"key"]).tolist() != [State.HIT]:
            assert time.monotonic() < give_up
