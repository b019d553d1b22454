"""A process killed at any moment leaves no wrong byte, and loses only what was in flight."""

import mmap
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvoffload.tiers import FileTier, State, Status, TierInUseError

from .attack import NAMESPACE, Universe, kill, open_slab, open_when_free, report, rounds, start

pytestmark = pytest.mark.attack

NUM_SLOTS = 96
NUM_KEYS = 300
BATCH = 12
# What the child knows of each key, in memory that outlives it.
ABSENT, STORED, MAYBE = 0, 1, 2


def churn(  # noqa: C901
    path: Path, universe: Universe, known: np.ndarray, options: dict, seed: int
) -> None:
    """Put, get, touch and discard without end; note what is certain in `known`.

    ``known[-1]`` is the number of blocks that the call under way may evict.
    """
    chance = random.Random(seed)
    tier, region = open_slab(path, NUM_SLOTS, enable_events=True, **options)
    numbers = {key: number for number, key in enumerate(universe.keys)}
    known[:NUM_KEYS] = np.where(tier.lookup(universe.keys) == State.HIT, STORED, ABSENT)
    free = list(range(region.num_blocks))
    jobs: dict[int, list[int]] = {}

    def note() -> None:
        for event in tier.take_events():
            for key in event.keys:
                known[numbers[key]] = ABSENT if event.removed else STORED

    def discard(keys: list[bytes]) -> None:
        for key in keys:
            known[numbers[key]] = MAYBE
        tier.discard(keys)
        note()
        for key in keys:
            known[numbers[key]] = ABSENT

    def put(keys: list[bytes], ids: list[int]) -> int:
        for block_id, key in zip(ids, keys, strict=True):
            region.write(block_id, universe.data[key])
        known[-1] = len(keys)
        job = tier.put(keys, ids)
        note()
        known[-1] = 0
        return job

    while True:
        keys = [chance.choice(universe.keys) for _ in range(chance.randrange(1, BATCH + 1))]
        action = chance.random()
        if action < 0.1:
            tier.touch(keys)
        elif action < 0.15:
            discard(keys[:2])
        elif len(free) >= len(keys):
            ids = [free.pop() for _ in keys]
            jobs[put(keys, ids) if action < 0.7 else tier.get(keys, ids)] = ids
        if chance.random() < 0.7:
            if chance.random() < 0.3:
                tier.wait(list(jobs)[:1], 1.0)
            for done in tier.poll():
                free += jobs.pop(done.job)
            note()


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_killed_under_churn(staged: bool, tmp_path: Path, seed: int) -> None:
    """Stated: 200 kills, half of them direct; each round goes on with what the last one left."""
    universe = Universe(NUM_KEYS)
    known = np.frombuffer(mmap.mmap(-1, NUM_KEYS + 1), np.uint8)
    chance = random.Random(seed)
    options = {"staged": staged}
    kills, compared, lost, corrupt = rounds(100), 0, 0, 0
    for number in range(kills):
        known[:] = 0
        child = start(partial(churn, tmp_path, universe, known, options, seed + number))
        time.sleep(chance.uniform(0.02, 0.12))
        kill(child)
        certain = [key for key, state in zip(universe.keys, known, strict=False) if state == STORED]
        tier, region = open_slab(tmp_path, NUM_SLOTS, **options)
        found = universe.check(tier, region)
        tier.close()
        assert set(found.values()) <= {Status.OK, Status.MISS, Status.CORRUPT}
        compared += sum(status == Status.OK for status in found.values())
        corrupt += sum(status == Status.CORRUPT for status in found.values())
        missing = sum(found[key] != Status.OK for key in certain)
        lost += missing
        assert missing <= int(known[-1]), f"{missing} lost, {known[-1]} in flight"
    assert compared > kills or kills < 10  # a busy machine may have stored nothing in a few rounds
    report(
        f"{kills} kills, {compared} blocks compared, none wrong; {lost} that a call under way "
        f"was evicting were gone, {corrupt} were corrupt"
    )


def test_two_processes(tmp_path: Path) -> None:
    """The second is refused and told who; no lock outlives its holder. Stated: 40 rounds."""
    turns = rounds(40)
    for _ in range(turns):
        ready, tell = os.pipe()

        def hold(tell: int = tell) -> None:
            tier, _ = open_slab(tmp_path, 8)
            os.write(tell, b"!")
            while tier.health().ok:
                time.sleep(1)

        child = start(hold)
        assert os.read(ready, 1) == b"!"
        with pytest.raises(TierInUseError, match=f"in use by process {child}") as caught:
            FileTier(tmp_path, 2**20, namespace=NAMESPACE)
        assert caught.value.pid == child
        kill(child)
        tier, _ = open_slab(tmp_path, 8)
        with pytest.raises(TierInUseError, match=f"in use by process {os.getpid()}"):
            FileTier(tmp_path, 2**20, namespace=NAMESPACE)
        tier.close()
        os.close(ready)
        os.close(tell)
    report(f"{turns} times a second process was refused, and let in when the first was killed")


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A process that forks and is killed leaves its child alive, and the slab free."""
    ready, tell = os.pipe()

    def hold() -> None:
        _tier, _ = open_slab(tmp_path, 8)
        grandchild = start(lambda: time.sleep(60))
        os.write(tell, b"%d" % grandchild)
        time.sleep(60)

    child = start(hold)
    grandchild = int(os.read(ready, 16))
    kill(child)
    os.kill(grandchild, 0)  # it lives
    open_when_free(tmp_path, 8)[0].close()  # it lets go when it runs for the first time
    os.kill(grandchild, signal.SIGKILL)
    os.close(ready)
    os.close(tell)
