"""A model of engines that share a medium: forgotten blocks are never served, and engines agree.

Each sequence has some engines, each a `SharedStore`, on one medium in memory. Clocks jump; the
medium loses its epoch, gets nonsense or a stranger's in its place, is restored from a snapshot,
refuses writes, loses answers, and carries writes out late, after the writer has given up. Between
any two steps of a call other engines make theirs. Each block says when it was put.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

import kvoffload.tiers.epoch
from kvoffload.tiers import Block, Namespace, RemoteStore, Status
from kvoffload.tiers.epoch import (
    AHEAD_MS,
    EARLIEST_MS,
    FAR_AHEAD_MS,
    RANDOM_BITS,
    Agreement,
    Decision,
    is_epoch,
    is_far_ahead,
    new_epoch,
)
from kvoffload.tiers.metrics import LOWER, MISSING
from kvoffload.tiers.remote.shared import SharedStore
from tests.conftest import read_budget

SEQUENCES, ALL_SEQUENCES = 2_000, 50_000
"""Sequences of each of the two kinds: in a plain run, and in the thorough one."""
SEED = 39
BLOCK = 16
NAMESPACE = Namespace("model", BLOCK)
KEY = b"key"
HOUR_MS, YEAR_MS = 3_600_000, 365 * FAR_AHEAD_MS
NEAR = (0, 1, -1, HOUR_MS, -HOUR_MS, FAR_AHEAD_MS // 2)
"""Errors of clocks, ms, of less than a day."""
ANY = (*NEAR, 2 * FAR_AHEAD_MS, -2 * FAR_AHEAD_MS, YEAR_MS, 50 * YEAR_MS, AHEAD_MS, -AHEAD_MS)


class FullError(Exception):
    """The medium has no memory."""


class Medium:
    """What all engines share: an epoch, blocks, and a history."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.epoch: int | None = None
        self.is_restored = False  # the epoch is one that a snapshot had
        self.blocks: dict[tuple[int, bytes], bytes] = {}
        self.history: list[int] = []  # epochs that it has had
        self.late: list[Callable[[], None]] = []  # writes that are still on their way
        self.is_full = False
        self.has_conditions = chance.random() < 0.7  # a write looks at what it replaces
        self.trouble = 0.15
        self.writes = 0

    def become(self, epoch: int | None, *, restored: bool = False) -> None:
        self.epoch, self.is_restored = epoch, restored
        if epoch is not None:
            self.history.append(epoch)

    def write(self, epoch: int, above: int) -> None:
        self.writes += 1
        if self.has_conditions and self.read() is not None and self.epoch > above:
            return
        self.become(epoch)

    def read(self) -> int | None:
        return self.epoch if self.epoch is not None and is_epoch(self.epoch) else None


class ModelStore(RemoteStore):
    """An engine's way to the medium; other engines go on while it waits."""

    epoch_s = -1.0  # each call asks

    def __init__(self, world: World) -> None:
        super().__init__(NAMESPACE)
        self.world = world
        self.medium = world.medium
        self.found: int | None = None  # the epoch that the medium had when it was asked last
        self.was_restored = False  # the medium had a snapshot's epoch when it was asked last

    def say(self, what: str, level: int = 0) -> None:
        pass

    def ask_epoch(self) -> int | None:
        self.world.others_go_on()
        found = self.look()
        self.world.others_go_on()
        return found

    def look(self) -> int | None:
        self.was_restored = self.medium.is_restored
        self.found = self.medium.read()
        return self.found

    def raise_epoch(self, epoch: int, above: int) -> int | None:
        medium, chance = self.medium, self.medium.chance
        assert not is_far_ahead(epoch) or is_far_ahead(self.found or 0), (
            "a wrong clock's is not written"
        )
        found = self.look()
        if found is not None and found > above:
            return found
        self.world.others_go_on()
        if medium.is_full:
            raise FullError
        trouble = chance.random() / medium.trouble if medium.trouble else 1.0
        if trouble < 0.3:
            medium.late.append(lambda: medium.write(epoch, above))
            raise TimeoutError
        if trouble < 0.5:
            raise OSError("it was cut off before")
        medium.write(epoch, above)
        if trouble < 1.0:
            raise TimeoutError
        self.world.others_go_on()
        return self.look()

    def delete_epoch(self) -> bool:
        if self.medium.chance.random() < self.medium.trouble:
            raise OSError("it was cut off")
        self.world.others_go_on()
        self.medium.become(None)
        self.world.others_go_on()
        return True

    def find(self, run: Sequence[Block], epoch: int) -> None:
        raise NotImplementedError

    def fetch(self, run: Sequence[Block], epoch: int) -> None:
        for block in run:
            value = self.medium.blocks.get((epoch, block.key))
            if value is None:
                block.status = Status.MISS
            else:
                self.check(block, memoryview(value), epoch)

    def store(self, run: Sequence[Block], epoch: int) -> None:
        for block in run:
            self.medium.blocks.setdefault((epoch, block.key), bytes(block.views[0]))
            block.status = Status.OK

    def drop(self, keys: Sequence[bytes], epoch: int) -> None:
        raise NotImplementedError

    def status_of(self, error: Exception) -> Status:
        return Status.FULL if isinstance(error, FullError) else Status.UNAVAILABLE


class Engine:
    """A process with a clock of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = SharedStore(ModelStore(world))
        self.store.medium.deadline = time.monotonic() + 3600
        self.error_ms = world.draw_error()
        self.queue: list[tuple[bytes, int]] = []  # what was put and not written; under which epoch
        self.forgets: list[int] = []  # when `forget` was called that is not confirmed
        self.highest = 0  # of the epochs that it has used
        self.is_calling = False

    def put(self) -> None:
        """Take a block for the medium, as a tier acknowledges it."""
        self.queue.append((self.world.now.to_bytes(BLOCK, "big"), self.store.epoch))

    def call(self) -> None:
        """Write what is queued, and read."""
        for data, epoch in self.queue:
            block = Block(KEY, 0, 0, 0)
            block.views = [memoryview(bytearray(data.ljust(self.store.block_bytes, b"\0")))]
            self.store.write([block], epoch)
        self.queue.clear()
        started = self.world.now
        block = Block(KEY, 0, 0, 0)
        self.store.read([block])
        self.confirm()
        if block.status == Status.OK:
            self.world.check(self, started, int.from_bytes(block.views[0], "big"))
        self.highest = max(self.highest, self.store.epoch)

    def forget(self) -> None:
        """Forget, and tell the medium, if it answers."""
        self.forgets.append(self.world.now)
        self.store.forget()
        if not self.is_calling:
            with self.world.in_engine(self, calls=True), suppress(OSError, FullError):
                self.store.meet()
            self.confirm()

    def confirm(self) -> None:
        """Note what the medium has confirmed."""
        if not self.store.owed:
            self.world.forgotten += [(called, self.world.now) for called in self.forgets]
            self.forgets.clear()


class World:
    """The engines, the medium and the true time."""

    def __init__(self, chance: random.Random, errors: Sequence[int], *, snapshots: bool) -> None:
        self.chance = chance
        self.errors = errors
        self.snapshots = snapshots
        self.now = EARLIEST_MS + 200 * YEAR_MS
        self.medium = Medium(chance)
        self.forgotten: list[tuple[int, int]] = []  # calls of `forget`: when, and when confirmed
        self.running: Engine | None = None
        self.depth = 0
        self.engines: list[Engine] = []
        self.engines += [Engine(self) for _ in range(chance.randint(2, 3))]
        self.served = 0

    def draw_error(self) -> int:
        return self.chance.choice(self.errors) if self.chance.random() < 0.5 else 0

    def clock(self) -> int:
        """Return what the clock of the engine shows that runs."""
        return max(self.now + (self.running.error_ms if self.running else 0), EARLIEST_MS)

    @contextmanager
    def in_engine(self, engine: Engine, *, calls: bool) -> Iterator[None]:
        before, self.running = self.running, engine
        was_calling, engine.is_calling = engine.is_calling, engine.is_calling or calls
        try:
            yield
        finally:
            self.running, engine.is_calling = before, was_calling

    def others_go_on(self) -> None:
        if self.depth < 2 and self.medium.trouble and self.chance.random() < 0.25:
            self.depth += 1
            self.step()
            self.depth -= 1

    def step(self) -> None:
        self.now += 1
        chance, medium = self.chance, self.medium
        engine = chance.choice(self.engines)
        kind = chance.random()
        if kind < 0.42:
            if not engine.is_calling:
                with self.in_engine(engine, calls=True):
                    engine.call()
        elif kind < 0.60:
            engine.put()
        elif kind < 0.74:
            with self.in_engine(engine, calls=False):
                engine.forget()
        elif kind < 0.80:
            engine.error_ms = self.draw_error()
        elif kind < 0.84 and not engine.is_calling:
            self.engines[self.engines.index(engine)] = Engine(self)
        elif kind < 0.87:
            medium.is_full = not medium.is_full
        elif kind < 0.90 and medium.late:
            medium.late.pop(chance.randrange(len(medium.late)))()
        else:
            self.damage()

    def damage(self) -> None:
        """Lose the epoch, put nonsense or a stranger's in its place, or restore a snapshot."""
        medium, chance = self.medium, self.chance
        kind = chance.random()
        if self.snapshots and kind < 0.5 and medium.history:
            medium.become(chance.choice(medium.history), restored=True)
        elif kind < 0.8:
            medium.become(None)
        elif kind < 0.9:
            medium.become(2**64 - 1 - chance.randrange(1000))
        else:  # one that nobody has used
            ms = self.now + chance.choice(self.errors)
            medium.become(max(ms, 1) << RANDOM_BITS | chance.getrandbits(RANDOM_BITS))

    def check(self, engine: Engine, started: int, put_at: int) -> None:
        """Check that a block that was served was not put before a confirmed `forget`."""
        self.served += 1
        epoch = engine.store.epoch
        for called, confirmed in self.forgotten:
            if put_at < called and confirmed < started:
                # What a snapshot brings back shows only where a later epoch is known.
                unknowable = engine.store.medium.was_restored and engine.highest <= epoch
                assert unknowable, (put_at, called, confirmed, started)

    def quieten(self) -> None:
        """End all trouble, set all clocks, and let what is on its way arrive."""
        medium = self.medium
        medium.trouble, medium.is_full = 0.0, False
        while medium.late:
            medium.late.pop()()
        for engine in self.engines:
            engine.error_ms = 0

    def agree(self) -> None:
        """Check that engines that call in turn come to one epoch, and then forget nothing."""
        self.quieten()
        for _ in range(2):
            for engine in self.engines:
                self.call_quietly(engine)
        writes = self.medium.writes
        lost = [engine.store.lost.total() for engine in self.engines]
        for engine in self.engines:
            engine.put()
            self.call_quietly(engine)
            assert self.medium.blocks[self.medium.epoch, KEY], "what is put is found"
        assert {engine.store.epoch for engine in self.engines} == {self.medium.epoch}
        assert not any(engine.store.owed for engine in self.engines)
        assert [engine.store.lost.total() for engine in self.engines] == lost
        assert self.medium.writes == writes, "nobody gives the medium a new epoch any more"

    def call_quietly(self, engine: Engine) -> None:
        self.now += 1
        with self.in_engine(engine, calls=True):
            engine.call()


def run_sequences(
    monkeypatch: pytest.MonkeyPatch, seeds: range, errors: Sequence[int], *, snapshots: bool
) -> None:
    """Run a sequence per seed; print what they did."""
    present, drawn = SimpleNamespace(), SimpleNamespace()

    def now_ms() -> int:
        return present.world.clock()

    monkeypatch.setattr(kvoffload.tiers.epoch, "_now_ms", now_ms)
    monkeypatch.setattr(kvoffload.tiers.epoch, "secrets", drawn)
    served = forgotten = lost = 0
    for seed in seeds:
        chance = random.Random(seed)
        drawn.randbits = chance.getrandbits
        world = present.world = World(chance, errors, snapshots=snapshots)
        try:
            for _ in range(chance.randint(6, 24)):
                world.step()
            world.agree()
        except Exception as error:
            raise AssertionError(f"the sequence of seed {seed} failed") from error
        served += world.served
        forgotten += len(world.forgotten)
        lost += sum(engine.store.lost.total() for engine in world.engines)
    print(
        f"{len(seeds)} sequences from seed {seeds.start}: {served} blocks served, "
        f"{forgotten} times forgotten, {lost} epochs lost"
    )
    assert served
    assert forgotten
    assert lost


KINDS = pytest.mark.parametrize(
    ("errors", "snapshots"),
    [pytest.param(ANY, False, id="any-clock"), pytest.param(NEAR, True, id="snapshots")],
)


@KINDS
def test_no_block_put_before_a_confirmed_forget_is_served_after_it(
    monkeypatch: pytest.MonkeyPatch, errors: Sequence[int], snapshots: bool
) -> None:
    count = max(100, round(SEQUENCES * min(1.0, read_budget())))
    run_sequences(monkeypatch, range(SEED, SEED + count), errors, snapshots=snapshots)


@pytest.mark.thorough
@pytest.mark.nightly
@KINDS
def test_none_is_served_in_100_000_sequences(
    monkeypatch: pytest.MonkeyPatch, errors: Sequence[int], snapshots: bool
) -> None:
    seeds = range(10**6, 10**6 + ALL_SEQUENCES)
    run_sequences(monkeypatch, seeds, errors, snapshots=snapshots)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give a clock that tests set."""
    clock = SimpleNamespace(ms=EARLIEST_MS + YEAR_MS)
    monkeypatch.setattr(kvoffload.tiers.epoch, "_now_ms", lambda: clock.ms)
    return clock


class TestAgreement:
    def test_the_epoch_used_last_is_used_on_and_a_higher_one_adopted(self) -> None:
        agreement = Agreement()
        for found, adopted in ((5, 1), (5, 1), (7, 2), (7, 2)):
            assert agreement.answer(found) == Decision()
            assert (agreement.epoch, agreement.adopted) == (found, adopted)

    def test_one_that_is_new_to_a_medium_forgets_nothing(self) -> None:
        agreement = Agreement()
        decision = agreement.answer(None)
        assert (bool(decision.write), decision.above, decision.loss) == (True, 0, "")
        assert not agreement.owed
        assert agreement.answer(decision.write) == Decision()

    @pytest.mark.parametrize(("found", "loss"), [(None, MISSING), (3, LOWER)])
    def test_a_doubt_is_answered_with_a_new_epoch_above_all(
        self, found: int | None, loss: str
    ) -> None:
        agreement = Agreement()
        known = new_epoch()
        agreement.answer(known)
        first = agreement.answer(found)
        assert (first.write > known, first.above, first.loss) == (True, known, loss)
        assert agreement.owed
        assert agreement.epoch == 0, "nothing is put under the old one any more"
        again = agreement.answer(known)
        assert again.write not in (0, known, first.write), "none is written twice"
        assert again.loss == "", "a loss is counted once"
        assert agreement.answer(again.write) == Decision()
        assert not agreement.owed

    def test_another_s_epoch_does_not_confirm_a_forget(self) -> None:
        agreement = Agreement()
        agreement.answer(5)
        agreement.forget()
        for found in (5, new_epoch()):
            decision = agreement.answer(found)
            assert decision.write > found
            assert agreement.owed
        agreement.forget()
        assert agreement.answer(decision.write).write, "it was drawn before the second one"

    def test_an_epoch_that_was_deleted_confirms_no_later_forget(self) -> None:
        agreement = Agreement()
        agreement.forget()
        before = agreement.forgets
        agreement.forget()
        agreement.deleted(before)
        assert agreement.owed
        agreement.deleted(agreement.forgets)
        assert not agreement.owed

    @pytest.mark.parametrize("ahead_ms", [2 * FAR_AHEAD_MS, 99 * YEAR_MS, AHEAD_MS])
    @pytest.mark.parametrize("finds", ["none", "another", "its own"])
    def test_an_epoch_of_a_wrong_clock_is_drawn_anew_when_the_clock_is_right(
        self, clock: SimpleNamespace, ahead_ms: int, finds: str
    ) -> None:
        agreement = Agreement()
        clock.ms += ahead_ms
        far = agreement.answer(None).write
        agreement.answer(far)
        clock.ms -= ahead_ms - 1
        found = {"none": None, "another": new_epoch(), "its own": far}[finds]
        if finds == "its own" and is_epoch(far):
            assert agreement.answer(far) == Decision(), "the medium has it: all use it"
            agreement.forget()
            assert agreement.answer(far).write > far, "what comes is above it"
            return
        decision = agreement.answer(found if found and is_epoch(found) else None)
        assert not is_far_ahead(decision.write)
        assert decision.write > (found or 0) or finds == "its own"
        assert agreement.answer(decision.write) == Decision()
