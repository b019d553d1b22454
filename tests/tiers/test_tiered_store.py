"""Host memory with tiers behind it: every byte verified, whatever the tiers do."""

import importlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvoffload import (
    BlockNotFoundError,
    BlockNotPinnedError,
    CPUOffloadingManager,
    Hints,
    PrepareStoreOutput,
    RequestFinishedError,
)
from kvoffload.policies import registry
from kvoffload.testing.tiers import PATIENCE_S, FaultyTier, block_bytes_of
from kvoffload.tiers import FileTier, MemoryTier, Namespace, Region, State, TieredStore
from kvoffload.tiers.tiered_store import Fetched
from kvoffload.traces import Trace, TraceRecorder
from kvoffload.watch import Watch
from tests.conftest import AVAILABLE
from tests.tiers.inside import is_busy, limit_queue

from .attack import rounds

pytestmark = pytest.mark.fast

BLOCK = 4096
NAMESPACE = Namespace("store", BLOCK)
KEYS = [b"key-%02d" % number for number in range(64)]
DATA = {key: block_bytes_of(key, BLOCK) for key in KEYS}
HOST = 8
BUFFERS = 2
SHORT_S = 0.05


def train(manager: CPUOffloadingManager) -> None:
    """Show that some chains of two are asked for again, and that those between them are not."""
    for number in range(800):
        for name in (b"once-%d" % number, b"again-%d" % (number % 3)):
            request = [name, name + b", continued"]
            with manager.begin(request) as served:
                assert served.prepare_store() is not None
            served.complete_store()


MADE: list["Engine"] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Let every engine of a test that passes come to rest, with nothing pinned, and close it."""
    MADE.clear()
    yield
    for engine in MADE:
        if not engine.store._closed:
            engine.quiet()
            engine.store.close()


class Engine:
    """Use a store as an engine does: write what was computed, verify what is loaded."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.region = store.region
        MADE.append(self)

    def compute(self, keys: list[bytes], success: bool = True) -> list[bytes]:
        output = self.store.prepare_store(keys)
        assert output is not None
        self.write(output, success)
        self.store.complete_store(output.block_hashes_to_store, success)
        return output.block_hashes_evicted

    def write(self, output: Any, success: bool = True) -> None:
        """Write the bytes of a store to its blocks."""
        blocks = zip(output.block_hashes_to_store, output.store_spec.block_ids, strict=True)
        for key, block_id in blocks:
            self.region.write(block_id, DATA[key] if success else b"garbage!" * (BLOCK // 8))

    def compute_all(self, *batches: list[bytes]) -> None:
        """Compute batches, each when nothing is under way any longer."""
        for keys in batches:
            self.compute(keys)
            self.quiet()

    def wait(self, job: int) -> Fetched:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for ended in self.store.step():
                if ended.job == job:
                    return ended
            self.store.wait(0.5)
        raise AssertionError(f"fetch {job} has not ended")

    def fetch(self, keys: list[bytes], deadline_s: float | None = None) -> int:
        """Fetch, verify what came, release it; return how many came."""
        ended = self.wait(self.store.fetch(keys, deadline_s))
        self.verify(keys, ended)
        self.store.complete_load(keys[: ended.num_blocks])
        return ended.num_blocks

    def verify(self, keys: list[bytes], ended: Fetched) -> None:
        assert len(ended.block_ids) == ended.num_blocks
        for key, block_id in zip(keys, ended.block_ids.tolist(), strict=False):
            assert self.region.read(block_id) == DATA[key], key

    def step_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            self.store.wait(0.01)
            self.store.step()
            assert time.monotonic() < until

    def rest(self) -> None:
        """Wait until no tier does anything."""
        tiers = self.store.tiers
        self.step_until(lambda: not self.store.busy and not any(map(is_busy, tiers)))

    def quiet(self) -> None:
        """Wait until nothing is under way, and nothing is pinned."""
        self.rest()
        stats = self.store.manager.stats()
        assert (stats["pinned"], stats["pending"]) == (0, 0)


TWINS = {name: importlib.import_module(f"tests._{name}").CPUOffloadingManager for name in AVAILABLE}


def make(
    tiers: list, write: str = "through", spare: int = 0, manager: Any = None, **options
) -> Engine:
    region = Region.allocate(HOST + spare, BLOCK)
    manager = CPUOffloadingManager(16, HOST, "lru") if manager is None else manager
    return Engine(TieredStore(region, manager, tiers, write, **options))


def memory(blocks: int = 64, name: str = "memory") -> MemoryTier:
    return MemoryTier(blocks * BLOCK, namespace=NAMESPACE, name=name, enable_events=True)


def faulty(blocks: int = 64, **options) -> FaultyTier:
    return FaultyTier(blocks * BLOCK, namespace=NAMESPACE, **options)


def calls_of_store(store: TieredStore) -> list[Callable[[], object]]:
    """Return one call of each method that a closed store, or one of another process, refuses."""
    calls = [store.lookup, store.touch, store.begin, store.fetch, store.prepare_load]
    calls += [store.complete_load, store.prepare_store, store.complete_store]
    others = (store.step, store.forget, partial(store.wait, 0.0))
    return [*(partial(call, KEYS[:1]) for call in calls), *others]


def calls_of_request(request: Any) -> list[Callable[[], object]]:
    """Return the calls that a finished request refuses, and one of a closed store."""
    calls = [request.lookup, request.fetch, request.prepare_store, request.__enter__]
    return [*calls, partial(request.prepare_load, 0, 1), partial(request.extend, KEYS[4:5])]


class Model:
    """A store in plain words: a manager for host memory, and a set of keys for each tier.

    Each call of it says what is so when nothing is under way any longer.
    """

    def __init__(self, write: str, num_tiers: int) -> None:
        self.write = write
        self.host = CPUOffloadingManager(16, HOST, "lru")
        self.tiers: list[set[bytes]] = [set() for _ in range(num_tiers)]
        self.corrupt: set[tuple[int, bytes]] = set()
        self.storing: dict[bytes, object] = {}  # by the call that it began with
        self.owner: dict[int, bytes] = {}  # of a block of host memory, the last
        self.counts: Counter[str] = Counter()

    def tier_of(self, key: bytes) -> int | None:
        return next((index for index, tier in enumerate(self.tiers) if key in tier), None)

    def is_somewhere(self, key: bytes) -> bool:
        is_there = key in self.host or self.tier_of(key) is not None
        return is_there and key not in self.storing

    def lookup(self, keys: list[bytes]) -> tuple[int, int]:
        ready = self.host.lookup(keys)
        return ready, ready + len([*takewhile(self.is_somewhere, keys[ready:])])

    def prepare_store(self, keys: list[bytes]) -> PrepareStoreOutput:
        output = self.host.prepare_store(keys)
        ids, evicted = output.store_spec.block_ids.tolist(), output.block_hashes_evicted
        left = [key for key in map(self.owner.get, ids) if key in evicted]
        self.owner.update(zip(ids, output.block_hashes_to_store, strict=True))
        if self.write == "demote":
            gone = [key for key in left if self.tier_of(key) is None]
            self.tiers[0].update(gone[:BUFFERS])
            self.counts["demoted_blocks"] += len(gone[:BUFFERS])
            self.counts["demote_dropped_blocks"] += len(gone[BUFFERS:])
        self.storing.update(dict.fromkeys(output.block_hashes_to_store, output))
        return output

    def complete_store(self, keys: list[bytes], success: bool) -> None:
        keys = [key for key in keys if key in self.storing]
        self.end_store(keys, success)
        if success and self.write == "through":
            for tier in self.tiers:
                self.counts["written_blocks"] += len(set(keys) - tier)
                tier.update(keys)

    def end_store(self, keys: list[bytes], success: bool) -> None:
        self.host.complete_store(keys, success)
        for key in keys:
            del self.storing[key]
        if not success:
            self.owner = {place: key for place, key in self.owner.items() if key not in keys}

    def fetch(self, keys: list[bytes]) -> int:
        wanted = list(dict.fromkeys(takewhile(self.is_somewhere, keys)))
        held = [key for key in wanted if key in self.host]
        self.host.prepare_load(held)
        self.prepare_store(wanted)
        for key in wanted:
            if key not in held:
                self.load(key)
        self.host.complete_load(held)
        self.counts["fetches"] += 1
        return len([*takewhile(lambda key: key in wanted and key in self.host, keys)])

    def load(self, key: bytes) -> None:
        while (index := self.tier_of(key)) is not None and (index, key) in self.corrupt:
            self.corrupt.remove((index, key))
            self.tiers[index].remove(key)
        self.end_store([key], success=index is not None)
        self.counts["fetch_failed_blocks" if index is None else "fetched_blocks"] += 1
        for nearer in range(index or 0):
            self.tiers[nearer].add(key)
            self.counts["promoted_blocks"] += 1

    def forget(self) -> None:
        self.host.reset_cache()
        for keys in (*self.tiers, self.corrupt, self.storing, self.owner):
            keys.clear()


def serve(
    engine: Engine, model: Model, keys: list[bytes], some: int, success: bool
) -> Callable[[], None]:
    """Serve a prompt, some of whose blocks come later; return what ends its stores."""
    with engine.store.begin(keys[:some]) as request:
        request.extend(keys[some:])
        assert request
        assert request.hashes == tuple(keys)
        for part in (keys[:some], keys[some:]):
            model.host.touch(part)
        for start in (0, some):
            assert request.lookup(start) == model.lookup(keys[start:])
        ended = engine.wait(request.fetch(some))
        assert ended.num_blocks == model.fetch(keys[some:])
        engine.verify(keys[some:], ended)
        engine.rest()
        loaded = keys[some : some + ended.num_blocks]
        assert engine.store.manager.stats()["pinned"] == len(set(loaded))
        request.complete_load(some, some + ended.num_blocks)
        begun: dict[bytes, object] = {}
        for start, stop in ((0, some), (some, len(keys))):
            output, same = request.prepare_store(start, stop), model.prepare_store(keys[start:stop])
            assert output.block_hashes_evicted == same.block_hashes_evicted
            begun |= dict.fromkeys(same.block_hashes_to_store, same)
            engine.write(output, success)
            engine.rest()
    model.host.touch(keys)

    def end() -> None:
        request.complete_store(success)
        own = [key for key, output in begun.items() if model.storing.get(key) is output]
        model.complete_store(own, success)

    return end


@pytest.mark.parametrize("write", ["through", "demote"])
def test_a_store_is_what_the_model_says(write: str, seed: int) -> None:
    """Its blocks, their order, the tiers and the counters, while blocks are damaged.

    Stores may end long after their requests, and after everything was forgotten.
    """
    chance = random.Random(seed)
    engine, model = make([faulty(), faulty()], write, spare=BUFFERS), Model(write, 2)
    store, late = engine.store, []
    for _ in range(500):
        start = chance.randrange(4) * 8
        keys = KEYS[start : start + chance.randrange(5)]
        keys = keys + chance.sample(keys, len(keys) // 2)
        some = chance.randrange(len(keys) + 1)
        late.append(serve(engine, model, keys, some, success=chance.random() < 0.8))
        while late and (len(model.storing) > 3 or chance.random() < 0.5):
            late.pop(chance.randrange(len(late)))()
        engine.rest()
        if chance.random() < 0.06:
            assert store.forget()
            model.forget()
        assert list(store.manager.policy.blocks) == list(model.host.policy.blocks)
        for tier, there in zip(store.tiers, model.tiers, strict=True):
            assert {key for key in KEYS if tier.state(key) == State.HIT} == there
            tier.health(reset=True)
        counts = Counter({**store.stats(), "free_buffers": 0})
        assert +counts == +model.counts
        for index, key in enumerate(chance.sample(KEYS, 2)):
            if key in model.tiers[index] and (index, key) not in model.corrupt:
                store.tiers[index].flip(key)
                model.corrupt.add((index, key))
    assert len(counts) - len(+counts) <= 4
    for end in late:
        end()


class TestThrough:
    def test_blocks_are_pinned_until_every_tier_has_them(self) -> None:
        slow = faulty(ack="stored")
        engine = make([memory(), slow])
        slow.hang()
        engine.compute(KEYS[:8])
        engine.step_until(lambda: engine.store.stats()["written_blocks"] == 8)
        assert engine.store.manager.stats()["pinned"] == 8
        assert engine.store.prepare_store(KEYS[8:10]) is None
        slow.resume()
        engine.quiet()
        assert engine.compute(KEYS[8:10]) == KEYS[:2]

    def test_a_request_releases_no_pin_of_a_tier_or_of_another_request(self) -> None:
        slow = faulty(ack="stored")
        engine = make([slow])
        slow.hang()
        engine.compute(KEYS[:3])
        request, other = engine.store.begin(KEYS[:2]), engine.store.begin(KEYS[:2])
        other.prepare_load(0, 2)
        with pytest.raises(BlockNotPinnedError):
            request.complete_load(0, 1)
        request.prepare_load(0, 2)
        request.extend(KEYS[2:3])
        request.prepare_load(1, 3)
        for start, stop in ((1, 3), (0, 2)):
            request.complete_load(start, stop)
            with pytest.raises(BlockNotPinnedError):
                request.complete_load(0, 3)
        other.complete_load(0, 2)
        assert engine.store.manager.stats()["pinned"] == 3
        slow.resume()
        engine.quiet()
        assert engine.store.manager.stats()["pinned"] == 0


class TestDeclining:
    """Above tiers the policy of host memory declines nothing, or they would be starved."""

    @staticmethod
    def engine(tiers: list) -> Engine:
        """Return an engine whose host memory would decline what it has not seen before."""
        engine = make(tiers, manager=CPUOffloadingManager(16, HOST, "hit-density"))
        train(engine.store.manager)
        return engine

    def test_what_host_memory_would_decline_is_stored_and_comes_back(self) -> None:
        tier = memory()
        engine = self.engine([tier])
        engine.compute_all(KEYS[:8])
        assert (tier.lookup(KEYS[:8]) == State.HIT).all()
        engine.compute_all(KEYS[8:16])
        assert engine.fetch(KEYS[:8]) == 8, "a read takes slots of host memory"
        engine.quiet()
        assert engine.store.forget()
        train(engine.store.manager)
        engine.compute(KEYS[16:24])
        assert engine.store.lookup(KEYS[16:24]) == (8, 8)

    def test_without_a_tier_and_after_the_end_blocks_are_declined(self) -> None:
        engine = self.engine([])
        engine.compute(KEYS[:8])
        assert engine.store.lookup(KEYS[:8])[0] < 8
        engine = self.engine([memory()])
        manager = engine.store.manager
        engine.store.close()
        train(manager)
        output = manager.prepare_store(KEYS[:8])
        assert output is not None
        assert len(output.block_hashes_to_store) < 8
        manager.reset_cache()
        second = make([memory()], manager=manager)
        engine.store.close()  # once more
        train(manager)
        second.compute(KEYS[:8])
        assert second.store.lookup(KEYS[:8])[0] == 8

    @pytest.mark.parametrize("tiers", [0, 1])
    def test_estimates_of_a_watch_decline_where_the_manager_may(self, tiers: int) -> None:
        watch = Watch(max_rate=1.0, policies=("hit-density",))
        manager = CPUOffloadingManager(16, 32, watch=watch)
        engine = make([memory()] * tiers, spare=32 - HOST, manager=manager)

        def declined() -> int:
            train(engine.store.manager)
            watch.report()
            (mini,) = watch._shadows.minis
            return sum(each.not_admitted for each in mini.quarters)

        assert (declined() == 0) == (tiers > 0)
        engine.store.close()
        assert declined() > 0


class TestDemote:
    def test_a_tier_that_does_not_take_it_leaves_it_to_the_next(self) -> None:
        bad, good = faulty(ack="stored"), memory()
        engine = make([bad, good], "demote", spare=8)
        engine.compute(KEYS[:8])
        bad.fail("put", 2)
        engine.compute_all(KEYS[8:12])
        assert (bad.lookup(KEYS[:4]) == State.HIT).sum() == 2
        assert (good.lookup(KEYS[:4]) == State.HIT).sum() == 2
        bad.fail("put", 100)
        limit_queue(good, 0)
        engine.compute_all(KEYS[12:16])
        assert engine.store.stats()["demote_dropped_blocks"] == 4
        assert engine.store.stats()["free_buffers"] == 8


class TestFetch:
    def prepared(self, *tiers, **options) -> Engine:
        """Return an engine whose tiers have 16 blocks, of which host memory has the last 8."""
        engine = make([*tiers], **options)
        engine.compute_all(KEYS[:8], KEYS[8:16])
        return engine

    def test_a_hung_tier_leaves_time_for_the_next(self) -> None:
        first, second = faulty(), memory()
        engine = self.prepared(first, second)
        first.hang()
        fetch = engine.store.fetch(KEYS[:8], 2.0)
        ended = engine.wait(fetch)
        assert ended.num_blocks == 8
        engine.verify(KEYS[:8], ended)
        engine.store.complete_load(KEYS[:8])
        assert first.stats()["get_timeout"] == 8
        first.resume()

    def test_two_fetches_of_one_prefix_share_what_is_on_its_way(self) -> None:
        tier = faulty()
        engine = self.prepared(tier)
        tier.hang()
        jobs = [engine.store.fetch(KEYS[:6]), engine.store.fetch(KEYS[:4] + KEYS[30:32])]
        assert engine.store.lookup(KEYS[:6]) == (0, 6)
        tier.resume()
        ends: dict[int, Fetched] = {}
        while len(ends) < 2:
            engine.store.wait(0.1)
            ends.update({ended.job: ended for ended in engine.store.step()})
        assert [ends[job].num_blocks for job in jobs] == [6, 4]
        assert tier.stats()["get_ok"] == 6
        engine.store.complete_load(KEYS[:6])
        engine.store.complete_load(KEYS[:4])

    def test_late_blocks_serve_the_next(self) -> None:
        """A fetch whose time is over ends; what its tier gives later is in host memory."""
        tier = faulty()
        engine = self.prepared(tier)
        tier.hang()
        job = engine.store.fetch(KEYS[:4], 1000.0)
        engine.store._fetches[job].deadline = 0.0  # its time is over, the tier's is not
        assert engine.wait(job).num_blocks == 0
        tier.resume()
        engine.quiet()
        assert engine.store.lookup(KEYS[:4]) == (4, 4)

    def test_a_fetch_that_nobody_has_taken_ends_with_no_block(self) -> None:
        """Its blocks were in host memory, pinned: those pins are gone, and others get the slots."""
        engine = self.prepared(memory())
        assert engine.store.lookup(KEYS[8:16])[0] == 8
        with engine.store.begin(KEYS[8:16]) as request:
            job = request.fetch()
            assert engine.store.manager.stats()["pinned"] == 8
            assert engine.store.forget("new")
            (ended,) = engine.store.step()
            assert (ended.job, ended.num_blocks, list(ended.block_ids)) == (job, 0, [])
            engine.compute_all(KEYS[8:16])
            engine.wait(request.fetch())
            request.complete_load(0, 8)

    @pytest.mark.parametrize("kind", TWINS)
    def test_pins_from_before_release_nobodys_after_it(self, kind: str) -> None:
        engine = make([memory()], manager=TWINS[kind](16, HOST, "lru"))
        store = engine.store
        engine.compute_all(KEYS[:8])
        before, other = store.begin(KEYS[:8]), store.begin(KEYS[:4])
        assert engine.wait(before.fetch(2, 6)).num_blocks == 4
        assert store.forget("new")
        engine.compute_all(KEYS[:8])
        assert engine.wait(other.fetch()).num_blocks == 4
        before.complete_load(2, 6)
        before.finish()
        assert store.manager.stats()["pinned"] == 4
        other.complete_load(0, 4)
        with pytest.raises(BlockNotPinnedError):
            other.complete_load(0, 4)

    def test_a_tier_whose_forget_fails_keeps_no_other_from_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = [memory(), memory(name="far")]
        engine = self.prepared(*tiers)
        monkeypatch.setattr(tiers[0], "forget", Mock(side_effect=RuntimeError("no new")))
        with pytest.raises(RuntimeError, match="no new"):
            engine.store.forget("new")
        assert engine.store.manager.stats()["resident"] == tiers[1].stats()["blocks"] == 0

    def test_a_tier_that_hangs_does_not_keep_host_memory_readable(self) -> None:
        tiers = [memory(), faulty(ack="stored")]
        engine = self.prepared(*tiers)
        job = engine.store.fetch(KEYS[:4])
        engine.wait(job)
        tiers[1].hang()
        engine.store.complete_load(KEYS[:4])
        engine.compute(KEYS[20:22])
        waiting = engine.store.fetch(KEYS[4:6], 1000.0)
        assert engine.store.forget(timeout_s=SHORT_S) is False, "one has not confirmed it"
        assert engine.store.busy  # a store to the second one uses two blocks
        assert engine.store.lookup(KEYS[:4]) == engine.store.lookup(KEYS[20:22]) == (0, 0)
        assert engine.store.manager.lookup(KEYS[20:22]) == 0
        with pytest.raises(BlockNotFoundError):
            engine.store.prepare_load(KEYS[20:22])
        assert [ended.num_blocks for ended in engine.store.step() if ended.job == waiting] == [0]
        # No block is given out that the hanging call may still read.
        assert engine.store.prepare_store(KEYS[30:31]) is None
        with pytest.raises(TypeError, match=r"hashes\[0\] must be bytes"):
            engine.store.prepare_store(["text"])
        request = engine.store.begin(KEYS[30:32])
        assert request.prepare_store() is None
        with pytest.raises(ValueError, match="start must be"):
            request.prepare_store(3)
        assert engine.fetch(KEYS[:4]) == 0
        tiers[1].resume()
        engine.quiet()
        engine.compute(KEYS[30:38])
        assert engine.fetch(KEYS[30:38]) == 8

    def test_bytes_that_were_leaving_are_not_offered_to_the_next_tier(self) -> None:
        full, far = faulty(ack="stored"), memory(name="far")
        engine = make([full, far], "demote", spare=4)
        engine.compute(KEYS[:8])
        full.hang()
        full.fail("put", 4)
        engine.compute(KEYS[8:12])  # four leave for a tier that will fail
        assert engine.store.stats()["free_buffers"] == 0
        assert engine.store.forget(timeout_s=0.0) is False
        full.resume()
        engine.quiet()
        assert engine.store.stats()["free_buffers"] == 4
        assert (far.lookup(KEYS[:4]) == State.MISS).all()
        assert far.stats()["blocks"] == 0


class TestRequests:
    def test_a_session_that_ends_releases_its_blocks_in_every_tier(self) -> None:
        engine = make([memory(blocks=4)])
        for keys in (KEYS[:2], KEYS[2:4]):
            with engine.store.begin(keys):
                engine.compute(keys)
            engine.quiet()
        with engine.store.begin(KEYS[2:4], hints=Hints(ends=True)):
            pass
        engine.compute_all(KEYS[4:6])
        present = [bool(state == State.HIT) for state in engine.store.tiers[0].lookup(KEYS[:6])]
        assert present == [True, True, False, False, True, True]
        engine.store.release(KEYS[1:2])
        engine.compute_all(KEYS[6:7])
        assert engine.store.tiers[0].state(KEYS[0]) == State.HIT
        assert engine.store.tiers[0].state(KEYS[1]) == State.MISS

    def test_two_requests_that_fetch_a_prompt_at_the_same_time_share_it(self) -> None:
        engine = make([memory()])
        for keys in (KEYS[:2], KEYS[2 : HOST + 2]):
            engine.compute_all(keys)
        manager = engine.store.manager
        first, second = engine.store.begin(KEYS[:2]), engine.store.begin(KEYS[:2])
        assert manager.lookup(KEYS[:2]) == 0
        first.fetch()
        assert engine.wait(second.fetch()).num_blocks == 2
        for request in (second, first):
            request.complete_load(0, 2)
            request.finish(hints=Hints(ends=True))
            assert manager.policy.num_released == 0

    def test_a_released_block_leaves_host_memory_first(self) -> None:
        engine = make([memory()])
        engine.compute_all(KEYS[:HOST])
        engine.store.release(KEYS[3:4])
        assert engine.compute(KEYS[HOST : HOST + 1]) == [KEYS[3]]

    def test_an_end_told_at_the_begin_keeps_nothing_from_being_stored(self) -> None:
        engine = make([memory()])
        engine.compute_all(KEYS[:HOST])
        with engine.store.begin(KEYS[HOST : HOST + 2], hints=Hints(ends=True)) as request:
            assert len(request.prepare_store().block_hashes_to_store) == 2
            request.complete_store(success=False)

    def test_a_finished_request_only_ends_what_it_began(self) -> None:
        engine = make([memory()])
        engine.compute(KEYS[:2])
        request = engine.store.begin(KEYS[:4])
        ended = engine.wait(request.fetch())
        engine.write(request.prepare_store())
        request.finish()
        request.finish(hints=Hints())
        assert request.is_finished
        assert request.hashes == tuple(KEYS[:4])
        for call in calls_of_request(request):
            with pytest.raises(RequestFinishedError, match="the request has finished"):
                call()
        request.complete_load(0, ended.num_blocks)
        request.complete_store()
        request.complete_store()
        engine.quiet()
        assert engine.store.lookup(KEYS) == (4, 4)

    def test_a_failed_call_leaves_no_trace(self) -> None:
        engine = make([memory()])
        engine.compute_all(KEYS[:2])
        store = engine.store
        request = store.begin(KEYS[:4])
        before = (store.stats(), store.manager.stats(), store.tiers[0].stats())
        calls = [
            *(
                (TypeError, partial(call, [b"k", "text"]))
                for call in (store.begin, store.lookup, store.fetch, store.touch)
            ),
            (ValueError, partial(store.fetch, [b"k"], 0)),
            (TypeError, partial(store.begin, KEYS, hints=1)),
            (ValueError, partial(store.begin, KEYS, now=float("inf"))),
            (ValueError, partial(request.lookup, 5)),
            (ValueError, partial(request.fetch, 3, 2)),
            (ValueError, partial(request.fetch, deadline_s=0)),
            (BlockNotFoundError, partial(request.prepare_load, 0, 3)),
            (ValueError, partial(request.prepare_load, 0, 5)),
            (BlockNotPinnedError, partial(request.complete_load, 0, 1)),
            (ValueError, partial(request.prepare_store, -1)),
            (TypeError, partial(request.complete_store, 2)),
            (TypeError, partial(request.extend, [b"k", 3])),
            (TypeError, partial(request.finish, hints=1)),
        ]
        for error, call in calls:
            with pytest.raises(error):
                call()
        assert (store.stats(), store.manager.stats(), store.tiers[0].stats()) == before
        assert not store.busy
        assert (len(request), request.is_finished) == (4, False)
        store.close()

    def test_a_closed_store_refuses_every_call(self) -> None:
        tier = memory()
        engine = make([tier])
        engine.compute(KEYS[:2])
        with engine.store as store:
            request = store.begin(KEYS[:2])
        assert store.close()
        ends = (partial(request.complete_load, 0, 1), request.complete_store)
        for call in (*calls_of_store(store), tier.forget, *calls_of_request(request), *ends):
            with pytest.raises(RuntimeError, match="is closed"):
                call()
        assert store.stats()["fetches"] == 0
        assert len(store.manager) == 2
        request.finish()
        assert request.is_finished
        assert request.hashes == tuple(KEYS[:2])

    def test_a_use_is_counted_once_in_host_memory_and_shown_to_the_tiers_once(self) -> None:
        class Listening(MemoryTier):
            def touch(self, keys) -> None:
                touched.append(list(keys))
                super().touch(keys)

        touched: list[list[bytes]] = []
        engine = make([Listening(64 * BLOCK, namespace=NAMESPACE)])
        with engine.store.begin(KEYS[:2]) as request:
            request.extend(KEYS[2:3])
        assert touched == [KEYS[:2], KEYS[2:3]]

    def test_a_request_that_only_fetches_is_seen_and_recorded_once(self, tmp_path: Path) -> None:
        manager = CPUOffloadingManager(16, HOST, watch=Watch(max_rate=1.0))
        recorder = TraceRecorder(manager, tmp_path / "requests.jsonl.gz")
        with TieredStore(Region.allocate(HOST, BLOCK), recorder, [memory()]) as store:
            for looks in (False, True):
                request = store.begin(KEYS[:4])
                if looks:
                    request.lookup()
                with pytest.raises(ValueError, match="deadline_s"):
                    request.fetch(deadline_s=-1)
                request.fetch()
                request.fetch(2)
                request.finish()
        recorder.close()
        assert manager.stats()["lookups"] == 2
        assert manager.watch.report().asked == 8
        assert [len(one.hash_ids) for one in Trace(recorder.log.path)] == [4, 4]


def test_a_wait_ends_with_a_fetch_or_a_store() -> None:
    engine = make([memory()])
    engine.store.fetch([])
    assert engine.store.wait(float("inf"))
    assert engine.store.step()
    engine.compute(KEYS[:1])
    assert engine.store.wait(float("inf"))


def make_trouble(
    chance: random.Random, near: MemoryTier, disk: FileTier, server: FaultyTier
) -> None:
    """Let something happen to the tiers, or nothing."""
    trouble = chance.random()
    if trouble < 0.02:
        server.hang()
    elif trouble < 0.10:
        server.resume()
    elif trouble < 0.13:
        server.fail(chance.choice(["put", "get"]), chance.randrange(4))
    elif trouble < 0.16:
        kept = [key for key in KEYS if server.state(key) == State.HIT]
        if kept:
            server.flip(chance.choice(kept), chance.randrange(BLOCK * 8))
    elif trouble < 0.18:
        with (disk.folder / "blocks.dat").open("r+b") as file:
            file.seek(chance.randrange(32) * BLOCK)
            file.write(chance.randbytes(5))
    elif trouble < 0.19:
        near.forget()
    elif trouble < 0.25:
        for tier in (near, disk, server):
            tier.health(reset=True)


@pytest.mark.attack
@pytest.mark.parametrize("write", ["through", "demote"])
def test_random_requests_while_tiers_fail(write: str, tmp_path: Path, seed: int) -> None:
    """Requests of shared prefixes, while tiers fail, hang, lose and flip. Stated: 4,000."""
    chance = random.Random(seed)
    server = faulty(24, threads=6)
    disk = FileTier(tmp_path, 32 * BLOCK, namespace=NAMESPACE, policy="arc", threads=3)
    near = memory(6, "near")
    engine = make([near, disk, server], write, spare=6)
    store = engine.store
    loaded = computed = 0
    for _ in range(rounds(4000)):
        make_trouble(chance, near, disk, server)
        start = chance.randrange(8) * 8
        prefix = KEYS[start : start + chance.randrange(1, 7)]
        request = store.begin(prefix)
        ready, reachable = request.lookup()
        assert ready <= reachable
        ended = engine.wait(request.fetch(deadline_s=chance.choice([1.0, SHORT_S])))
        engine.verify(prefix, ended)
        loaded += ended.num_blocks
        output = request.prepare_store()
        request.complete_load(0, ended.num_blocks)
        request.finish()
        if output is None:  # all is pinned by writes, to a hung server for one
            store.wait(SHORT_S)
            store.step()
            continue
        engine.write(output)
        computed += len(output.block_hashes_to_store)
        request.complete_store(chance.random() < 0.95)
        store.step()
        if write == "demote" and chance.random() < 0.5:  # else buffers may never be free again
            engine.step_until(lambda: store.stats()["free_buffers"] == 6)
    server.resume()
    engine.quiet()
    assert loaded
    moved = {name: count for name, count in store.stats().items() if name.endswith("_blocks")}
    assert moved["fetched_blocks"], moved
    assert store.stats()["free_buffers"] == 6
    print(f"attack: {loaded} blocks loaded, every byte verified; {computed} computed; {moved}")
    store.close()


class TestHeld:
    """A fetch evicts none of its own blocks that it needs, and takes what fits."""

    @staticmethod
    def engine(policy: str, tier) -> Engine:
        engine = make([tier], manager=CPUOffloadingManager(16, HOST, policy))
        engine.compute_all(KEYS[:8], KEYS[8:16])
        return engine

    @pytest.mark.parametrize("policy", registry.names())
    @pytest.mark.parametrize("part", [slice(0, 2), slice(4, 6), slice(1, 6, 2)])
    def test_what_host_memory_has_is_not_loaded_again(self, policy: str, part: slice) -> None:
        engine = self.engine(policy, memory())
        assert engine.fetch(KEYS[:6][part]) == len(KEYS[:6][part])
        engine.compute_all(KEYS[20:24])
        lacked = sum(key not in engine.store.manager for key in KEYS[:6])
        before = engine.store.stats()["fetched_blocks"]
        assert engine.fetch(KEYS[:6]) == 6
        assert engine.store.stats()["fetched_blocks"] - before == lacked

    @pytest.mark.parametrize("policy", registry.names())
    def test_a_prefix_larger_than_memory_fills_it(self, policy: str) -> None:
        engine = self.engine(policy, memory())
        for _ in range(3):
            assert engine.fetch(KEYS[:16]) == HOST
        pinned = engine.wait(engine.store.fetch(KEYS[8:11]))
        assert engine.fetch(KEYS[:16]) == HOST - 3, "others hold three of its last blocks"
        engine.store.complete_load(KEYS[8 : 8 + pinned.num_blocks])


class TestRaising:
    """A job that a tier refuses, or whose end raises, is settled, and no other is touched."""

    @pytest.mark.parametrize("write", ["through", "demote"])
    def test_the_next_tier_is_asked_if_one_raises(self, write: str, monkeypatch) -> None:
        tiers = [memory(name="first"), memory(name="second")]
        engine = make(tiers, write, 8, promote=False)
        raising = Mock(side_effect=KeyError("of a plug-in"))
        for op in ("put", "get"):
            monkeypatch.setattr(tiers[0], op, raising)
        engine.compute_all(KEYS[:8], KEYS[8:16])
        for tier in tiers:  # those that may have a block are asked
            monkeypatch.setattr(tier, "state", lambda key: State.UNKNOWN)
        assert engine.fetch(KEYS[:8]) == 8
        engine.quiet()
        monkeypatch.setattr(tiers[1], "get", raising)
        assert engine.fetch(KEYS[8:16]) == 0
        engine.quiet()
        assert engine.store.stats()["free_buffers"] == 8

    def test_the_end_of_one_load_that_raises_ends_its_fetch_only(self, monkeypatch) -> None:
        tier = memory()
        engine = make([tier])
        engine.compute_all(KEYS[:8], KEYS[8:16], KEYS[16:24])
        loaded, bad = engine.store._loaded, KEYS[0]

        def raising(index, job, done):
            if bad in job.keys:
                raise KeyError("of a plug-in")
            loaded(index, job, done)

        monkeypatch.setattr(engine.store, "_loaded", raising)
        jobs = [engine.store.fetch(KEYS[:3]), engine.store.fetch(KEYS[8:11])]
        assert tier.wait(list(engine.store._jobs[0]), PATIENCE_S)
        found = {ended.job: ended.num_blocks for ended in engine.store.step()}
        assert found == {jobs[0]: 0, jobs[1]: 3}
        engine.store.complete_load(KEYS[8:11])
