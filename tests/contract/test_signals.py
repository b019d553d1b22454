"""A signal handler that raises leaves a compiled manager as before the call, or as after it."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from kvoffload.policies import registry
from kvoffload.testing.policies import check_invariants
from tests.blocks import block_hashes
from tests.conftest import read_budget
from tests.observation import attempt, observe


class AlarmError(Exception):
    """The exception that the handler raises."""


class Alarm:
    """A handler that raises while it is armed.

    Where another thread has taken the signal, it is handled later than it came.
    """

    armed = False

    def __call__(self, *_: object) -> None:
        if self.armed:
            raise AlarmError


ALARM = Alarm()


@contextmanager
def alarms() -> Iterator[None]:
    """Let SIGALRM raise; what the collector finalises would keep that to itself."""
    gc.disable()
    former = signal.signal(signal.SIGALRM, ALARM)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        gc.enable()


def is_interrupted(thing: Any, method: str, arguments: tuple[Any, ...], delay: float) -> bool:
    """Make a call that an alarm may end, and return whether it did."""
    try:
        try:
            ALARM.armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            attempt(thing, method, *arguments)
        finally:
            ALARM.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except AlarmError:
        return True
    return False


def calls(chance: random.Random) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the calls of requests, some of which fail, are refused or make a mistake."""
    while True:
        start, length = chance.randrange(60), chance.randrange(1, 24)
        batch = block_hashes(*range(start, start + length))
        yield "touch", (batch,)
        yield "lookup", (batch,)
        yield "prepare_load", (batch[: length // 3],)
        yield "complete_load", (batch[: length // 3],)
        yield "prepare_store", (batch,)
        yield "touch", (batch,)
        yield "complete_store", (batch, chance.random() < 0.8)
        if chance.random() < 0.02:
            yield "reset_cache", ()


@pytest.mark.parametrize("name", registry.names())
def test_an_alarm_leaves_the_state_before_or_after(
    twins: tuple[ModuleType, ModuleType], name: str, seed: int
) -> None:
    chance = random.Random(seed)
    _, compiled = twins
    made = calls(chance)
    rounds = max(100, round(400 * read_budget()))
    num_interrupted = 0
    is_known = False
    with alarms():
        for _ in range(rounds):
            if not is_known:
                manager, same = (compiled.CPUOffloadingManager(16, 40, name, True) for _ in "ab")
                is_known = True
            method, arguments = next(made)
            before = observe(same)
            attempt(same, method, *arguments)
            after = observe(same)
            if is_interrupted(manager, method, arguments, chance.uniform(1e-6, 5e-5)):
                num_interrupted += 1
                state = observe(manager)
                assert state in (before, after), method
                check_invariants(manager)
                if before == after:
                    is_known = False  # whether the call was made cannot be seen
                elif state == before:
                    attempt(manager, method, *arguments)
            if is_known:
                assert observe(manager) == after, method
    print(f"{num_interrupted} of {rounds} calls interrupted")
