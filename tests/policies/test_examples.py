"""The baselines of ``examples/policies``: the contract, the papers' behaviour, textbook versions.

The textbook versions here know neither chains nor batches: they take one block at a time, so they
are compared on requests of one block.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvoffload import BlockStatus, CachePolicy, CPUOffloadingManager
from kvoffload.replay import Configuration, Result, replay
from kvoffload.testing.policies import PolicyConformance, policy_machine
from kvoffload.traces import Request
from tests.blocks import block_hash, block_hashes
from tests.isolated.scripts import ROOT, run_python
from tests.policies.test_chains import Watched, nodes

if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)

from examples.policies import CLOCK, FIFO, GDSF, LRUK, Random, TwoQ, WTinyLFU
from examples.policies._chained import Ghosts
from examples.policies.w_tinylfu import Sketch

pytestmark = pytest.mark.thorough

MAKE = {
    "FIFO": FIFO,
    "Random": Random,
    "CLOCK": CLOCK,
    "TwoQ": TwoQ,
    "LRUK": LRUK,
    "GDSF": GDSF,
    "WTinyLFU": lambda cache_capacity: WTinyLFU(cache_capacity, seed=1),
}
every_policy = pytest.mark.parametrize("name", MAKE)


class TestBaselines(PolicyConformance):
    """Every baseline keeps to the contract."""

    @pytest.fixture(autouse=True, params=MAKE)
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.make = MAKE[request.param]

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return self.make(cache_capacity=cache_capacity)

    def test_in_any_order(self) -> None:
        run_state_machine_as_test(policy_machine(self.make_policy))


# -- by hand -------------------------------------------------------------------------------------


def test_ghosts_that_return_together_are_all_known() -> None:
    ghosts = Ghosts(2)
    for left, comes in ((b"a", b"x"), (b"b", b"y")):
        ghosts.add(left, left)
        assert ghosts.arrive(comes) is None
    ghosts.add(b"x", b"x")
    ghosts.add(b"y", b"y")
    assert [ghosts.arrive(comes) for comes in (b"a", b"b")] == [b"a", b"b"]
    assert len(ghosts) == 2
    assert ghosts.arrive(b"a") is None
    assert ghosts.arrive(b"x") == b"x"
    assert len(ghosts) == 1


def test_a_sketch_never_counts_too_little_and_fades() -> None:
    sketch, counts = Sketch(100, seed=2), Counter[bytes]()
    generator = random.Random(0)
    for _ in range(999):
        key = b"%d" % min(generator.randrange(60), generator.randrange(60))
        sketch.add(key)
        counts[key] += 1
    for key, count in counts.items():
        assert sketch.estimate(key) >= min(15, count)
    exact = sum(sketch.estimate(key) == min(15, count) for key, count in counts.items())
    assert exact >= 55
    before = {key: sketch.estimate(key) for key in counts}
    sketch.add(b"0")  # the thousandth: ten per block of the capacity
    assert all(sketch.estimate(key) == count // 2 for key, count in before.items())


def test_a_sketch_is_bounded_and_its_indexes_cannot_be_predicted() -> None:
    assert sum(map(len, Sketch(2**31 - 1, seed=0)._rows)) == 4 * 2**20
    indexes = {tuple(Sketch(10**5, seed=None)._indexes(b"a")) for _ in range(5)}
    assert len(indexes) == 5


# -- against textbook versions -------------------------------------------------------------------


class Textbook:
    """A cache of single blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.time = 0
        self.begin()

    def begin(self) -> None: ...

    def ask(self, block: int) -> bool:
        """Ask for a block; return whether it was there."""
        raise NotImplementedError


class TextbookFIFO(Textbook):
    def begin(self) -> None:
        self.blocks: deque[int] = deque()

    def ask(self, block: int) -> bool:
        if block in self.blocks:
            return True
        if len(self.blocks) == self.capacity:
            self.blocks.popleft()
        self.blocks.append(block)
        return False


class TextbookCLOCK(Textbook):
    """A circle of frames, and a hand."""

    def begin(self) -> None:
        self.frames: list[int | None] = [None] * self.capacity
        self.used = [False] * self.capacity
        self.hand = 0

    def ask(self, block: int) -> bool:
        if block in self.frames:
            self.used[self.frames.index(block)] = True
            return True
        while self.used[self.hand]:
            self.used[self.hand] = False
            self.hand = (self.hand + 1) % self.capacity
        self.frames[self.hand] = block
        self.hand = (self.hand + 1) % self.capacity
        return False


class TextbookTwoQ(Textbook):
    def begin(self) -> None:
        self.a1in: deque[int] = deque()
        self.a1out: deque[int] = deque()
        self.am: OrderedDict[int, None] = OrderedDict()

    def ask(self, block: int) -> bool:
        if block in self.am:
            self.am.move_to_end(block)
            return True
        if block in self.a1in:
            return True
        returns = block in self.a1out  # before room is made, which may forget it
        if len(self.a1in) + len(self.am) == self.capacity:
            if len(self.a1in) > self.capacity // 4 or not self.am:
                self.a1out.append(self.a1in.popleft())
                if len(self.a1out) > self.capacity // 2:
                    self.a1out.popleft()
            else:
                self.am.popitem(last=False)
        if block in self.a1out:
            self.a1out.remove(block)
        if returns:
            self.am[block] = None
        else:
            self.a1in.append(block)
        return False


class TextbookLRU2(Textbook):
    remembered = 1.0  # blocks that left, as a share of the capacity

    def begin(self) -> None:
        self.blocks: set[int] = set()
        self.history: dict[int, list[int]] = {}
        self.left: deque[int] = deque()

    def ask(self, block: int) -> bool:
        self.time += 1
        hit = block in self.blocks
        if not hit:
            past = self.history.get(block)  # before room is made, which may forget it
            if len(self.blocks) == self.capacity:
                victim = min(
                    self.blocks, key=lambda b: (([0] + self.history[b])[-2], self.time_of(b))
                )
                self.blocks.remove(victim)
                self.left.append(victim)
                if len(self.left) > self.remembered * self.capacity:
                    del self.history[self.left.popleft()]
            if block in self.left:
                self.left.remove(block)
            if past is not None:
                self.history[block] = past
            self.blocks.add(block)
        self.history.setdefault(block, []).append(self.time)
        return hit

    def time_of(self, block: int) -> int:
        return self.history[block][-1]


class TextbookLRU2WithoutHistory(TextbookLRU2):
    remembered = 0.0


class TextbookGDSF(Textbook):
    def begin(self) -> None:
        self.counts: dict[int, int] = {}
        self.rank: dict[int, tuple[int, int]] = {}
        self.age = 0

    def ask(self, block: int) -> bool:
        self.time += 1
        hit = block in self.rank
        if not hit and len(self.rank) == self.capacity:
            victim = min(self.rank, key=self.rank.__getitem__)
            self.age, _ = self.rank.pop(victim)
            del self.counts[victim]
        self.counts[block] = self.counts.get(block, 0) + 1
        self.rank[block] = (self.age + self.counts[block], self.time)
        return hit


class TextbookWTinyLFU(Textbook):
    """With exact counts: the keys are few, so that the sketch has hardly a collision."""

    def begin(self) -> None:
        self.window: OrderedDict[int, None] = OrderedDict()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()
        self.counts: Counter[int] = Counter()
        self.added = 0
        self.window_size = max(1, self.capacity // 100)
        self.main_size = self.capacity - self.window_size

    def count(self, block: int) -> None:
        self.counts[block] = min(15, self.counts[block] + 1)
        self.added += 1
        if self.added == 10 * self.capacity:
            for each in self.counts:
                self.counts[each] //= 2
            self.added //= 2

    def ask(self, block: int) -> bool:
        self.count(block)
        if block in self.window:
            self.window.move_to_end(block)
        elif block in self.protected:
            self.protected.move_to_end(block)
        elif block in self.probation:
            del self.probation[block]
            self.protected[block] = None
            if len(self.protected) > 0.8 * self.main_size:
                self.probation[self.protected.popitem(last=False)[0]] = None
        else:
            self.store(block)
            return False
        return True

    def store(self, block: int) -> None:
        if len(self.window) == self.window_size:
            candidate, _ = self.window.popitem(last=False)
            main = self.probation or self.protected
            if len(self.probation) + len(self.protected) < self.main_size:
                self.probation[candidate] = None
            elif self.counts[candidate] > self.counts[next(iter(main))]:
                main.popitem(last=False)
                self.probation[candidate] = None
        self.window[block] = None


TEXTBOOKS = {
    "FIFO": TextbookFIFO,
    "CLOCK": TextbookCLOCK,
    "TwoQ": TextbookTwoQ,
    "LRUK": TextbookLRU2,
    "LRUK without history": TextbookLRU2WithoutHistory,
    "GDSF": TextbookGDSF,
    "WTinyLFU": TextbookWTinyLFU,
}


def single_blocks(seed: int, count: int) -> list[int]:
    """Return popular blocks, among scans of what is asked for once."""
    generator = random.Random(seed)
    asked = []
    while len(asked) < count:
        if generator.random() < 0.02:
            start = generator.randrange(10**6)
            asked += range(start, start + 20)
        else:
            asked.append(int(generator.paretovariate(0.9)) % 300)
    return asked[:count]


def run(requests: Iterable[Request], manager: CPUOffloadingManager) -> Result:
    return replay(requests, Configuration(host=manager.policy.cache_capacity), manager=manager)


@pytest.mark.parametrize("name", TEXTBOOKS)
@pytest.mark.parametrize("capacity", [4, 20, 100])
def test_it_hits_what_the_textbook_version_hits(name: str, capacity: int) -> None:
    asked = single_blocks(capacity, 3000)
    make = MAKE.get(name, partial(LRUK, history=0.0))
    manager = CPUOffloadingManager(16, capacity, make(cache_capacity=capacity))
    textbook = TEXTBOOKS[name](capacity)
    log = run((Request(0, 0, 0, (block,)) for block in asked), manager).log
    assert log is not None
    found = (log["host"] == 1).tolist()
    expected = [textbook.ask(block) for block in asked]
    assert 300 < sum(expected) < 2900
    differing = [
        place for place, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
    ]
    if name == "WTinyLFU":
        assert len(differing) <= 0.01 * len(asked)  # collisions
    else:
        assert differing == []


def test_lru_1_is_lru() -> None:
    for capacity in (60, 300):
        own = CPUOffloadingManager(16, capacity, LRUK(capacity, k=1))
        lru = CPUOffloadingManager(16, capacity, "lru")
        singles = [Request(0, 0, 0, (block,)) for block in single_blocks(1, 1500)]
        assert run(singles, own).hits == run(singles, lru).hits


def test_random_takes_each_block_as_often_and_the_same_by_one_seed() -> None:
    def victims(seed: int) -> list[bytes]:
        policy = Random(10, seed=seed)
        for number, key in enumerate(block_hashes(*range(10))):
            status = BlockStatus(number)
            status.ref_cnt = 0
            policy.insert(key, status)
        return [key for key, _ in policy.evict(3, frozenset()) or ()]

    drawn = Counter(key for seed in range(2000) for key in victims(seed))
    assert set(drawn) == set(block_hashes(*range(10)))
    assert all(520 < count < 680 for count in drawn.values())  # 600, and 3.9 standard deviations
    assert victims(7) == victims(7)
    assert Random(1).seed == 0


# -- of chains -----------------------------------------------------------------------------------


@every_policy
def test_no_block_leaves_before_those_behind_it(name: str) -> None:
    generator = random.Random(5)
    watched = Watched(CPUOffloadingManager(16, 30, MAKE[name](cache_capacity=30)))
    for _ in range(400):
        watched.request(nodes([generator.randrange(3) for _ in range(generator.randrange(1, 9))]))
    assert watched.too_early == []


@every_policy
def test_a_block_before_one_in_use_leaves_where_nothing_else_may(name: str) -> None:
    chain = block_hashes(*range(4))
    manager = CPUOffloadingManager(16, 4, MAKE[name](cache_capacity=4))
    assert manager.prepare_store(chain) is not None
    manager.touch(chain)
    manager.complete_store(chain)
    manager.prepare_load(chain[3:])
    output = manager.prepare_store(block_hashes(7, 8))
    assert output is not None
    assert output.block_hashes_evicted == [chain[2], chain[1]]
    assert manager.prepare_store(block_hashes(10, 11)) is None


@every_policy
def test_the_finish_of_a_request_changes_nothing(name: str) -> None:
    """What leaves is the same where a request is dropped instead."""
    asked = single_blocks(3, 800)
    managers = [CPUOffloadingManager(16, 25, MAKE[name](cache_capacity=25)) for _ in range(2)]
    for block in asked:
        answers = []
        for finishes, manager in enumerate(managers):
            request = manager.begin([block_hash(block)])
            output = request.prepare_store()
            assert output is not None
            if finishes:
                request.finish()
            request.complete_store()
            answers.append(output.block_hashes_evicted)
        assert answers[0] == answers[1]


# -- options and the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TwoQ(4, kin=1.1), "kin must be 0.0 ... 1.0, got 1.1"),
        (lambda: TwoQ(4, kout=-1), "kout must be 0.0 ... 1.0, got -1"),
        (lambda: LRUK(4, k=0), "k must be >= 1, got 0"),
        (lambda: LRUK(4, history=-0.5), "history must be >= 0 and finite, got -0.5"),
        (lambda: WTinyLFU(4, window=2), "window must be 0.0 ... 1.0, got 2"),
        (lambda: WTinyLFU(4, seed=-1), r"seed must be an int, 0 ... 2\*\*64 - 1, got -1"),
    ],
)
def test_a_wrong_option_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def test_the_command_takes_them_in_the_root_of_a_clone(tmp_path: Path) -> None:
    pytest.importorskip("click", reason="the command needs the extra cli")
    names = [f"examples.policies:{name}" for name in MAKE]
    names += ["examples.policies:Random?seed=3", "examples.policies:LRUK?k=3"]
    arguments = ["--limit", "60", "--capacity", "80", "--quiet", "--policy", ",".join(names)]
    done = run_python("-m", "kvoffload", "replay", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in names)
