"""The baselines of ``examples/policies``: the contract, the papers' behaviour, textbook versions.

The textbook versions here know neither chains nor batches: they take one block at a time, so they
are compared on requests of one block.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
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


# Each takes a capacity and what is asked for, and says of each block whether it was there.


def textbook_fifo(capacity: int, asked: list[int]) -> Iterator[bool]:
    blocks: deque[int] = deque(maxlen=capacity)
    for block in asked:
        yield block in blocks
        if block not in blocks:
            blocks.append(block)


def textbook_clock(capacity: int, asked: list[int]) -> Iterator[bool]:
    """A circle of frames, and a hand."""
    frames: list[int | None] = [None] * capacity
    used = [False] * capacity
    hand = 0
    for block in asked:
        yield block in frames
        if block in frames:
            used[frames.index(block)] = True
            continue
        while used[hand]:
            used[hand] = False
            hand = (hand + 1) % capacity
        frames[hand] = block
        hand = (hand + 1) % capacity


def textbook_2q(capacity: int, asked: list[int]) -> Iterator[bool]:
    a1in: deque[int] = deque()
    a1out: deque[int] = deque(maxlen=capacity // 2)
    am: OrderedDict[int, None] = OrderedDict()
    for block in asked:
        yield block in am or block in a1in
        if block in am:
            am.move_to_end(block)
        if block in am or block in a1in:
            continue
        returns = block in a1out  # before room is made, which may forget it
        if len(a1in) + len(am) == capacity:
            if len(a1in) > capacity // 4 or not am:
                a1out.append(a1in.popleft())
            else:
                am.popitem(last=False)
        if block in a1out:
            a1out.remove(block)
        if returns:
            am[block] = None
        else:
            a1in.append(block)


def textbook_lru_2(capacity: int, asked: list[int], remembered: float = 1.0) -> Iterator[bool]:
    """With blocks remembered that left, as a share of the capacity."""
    blocks: set[int] = set()
    history: dict[int, list[int]] = {}
    left: deque[int] = deque()
    for time, block in enumerate(asked, start=1):
        yield block in blocks
        if block not in blocks:
            past = history.get(block)  # before room is made, which may forget it
            if len(blocks) == capacity:
                victim = min(blocks, key=lambda b: ([0] + history[b])[-2:])
                blocks.remove(victim)
                left.append(victim)
                if len(left) > remembered * capacity:
                    del history[left.popleft()]
            if block in left:
                left.remove(block)
            if past is not None:
                history[block] = past
            blocks.add(block)
        history.setdefault(block, []).append(time)


def textbook_gdsf(capacity: int, asked: list[int]) -> Iterator[bool]:
    counts: Counter[int] = Counter()
    rank: dict[int, tuple[int, int]] = {}
    age = 0
    for time, block in enumerate(asked):
        yield block in rank
        if block not in rank and len(rank) == capacity:
            victim = min(rank, key=rank.__getitem__)
            age, _ = rank.pop(victim)
            del counts[victim]
        counts[block] += 1
        rank[block] = (age + counts[block], time)


def textbook_w_tiny_lfu(capacity: int, asked: list[int]) -> Iterator[bool]:
    """With exact counts: the keys are few, so that the sketch has hardly a collision."""
    window, probation, protected = (OrderedDict[int, None]() for _ in range(3))
    counts: Counter[int] = Counter()
    added = 0
    window_size = max(1, capacity // 100)
    main_size = capacity - window_size
    for block in asked:
        counts[block] = min(15, counts[block] + 1)
        added += 1
        if added == 10 * capacity:
            for each in counts:
                counts[each] //= 2
            added //= 2
        yield block in window or block in protected or block in probation
        if block in window:
            window.move_to_end(block)
        elif block in protected:
            protected.move_to_end(block)
        elif block in probation:
            del probation[block]
            protected[block] = None
            if len(protected) > 0.8 * main_size:
                probation[protected.popitem(last=False)[0]] = None
        else:
            if len(window) == window_size:
                candidate, _ = window.popitem(last=False)
                main = probation or protected
                if len(probation) + len(protected) < main_size:
                    probation[candidate] = None
                elif counts[candidate] > counts[next(iter(main))]:
                    main.popitem(last=False)
                    probation[candidate] = None
            window[block] = None


TEXTBOOKS = {
    "FIFO": textbook_fifo,
    "CLOCK": textbook_clock,
    "TwoQ": textbook_2q,
    "LRUK": textbook_lru_2,
    "LRUK without history": partial(textbook_lru_2, remembered=0.0),
    "GDSF": textbook_gdsf,
    "WTinyLFU": textbook_w_tiny_lfu,
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
    log = run((Request(0, 0, 0, (block,)) for block in asked), manager).log
    assert log is not None
    found = (log["host"] == 1).tolist()
    expected = list(TEXTBOOKS[name](capacity, asked))
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
