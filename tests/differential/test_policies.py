"""Every step on a policy of each twin, used alone; whichever policies are registered.

The steps are those of `policy_machine`, over two policies that look like one: each call is made on
both twins and compared, beside what the machine itself compares.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Collection
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import kvoffload
from kvoffload import BlockStatus, Hints
from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.policies import registry
from kvoffload.testing.policies import policy_machine
from tests.blocks import once
from tests.conftest import read_budget
from tests.differential.pairs import Pair, Twins, require_equal, same_values
from tests.differential.traffic import Traffic
from tests.differential.workloads import mixed_keys
from tests.observation import as_value
from tests.policies.steps import idle, policy_of
from tests.strategies import KEYS

pytestmark = pytest.mark.fast


class StatusPair(BlockStatus):
    """The status of a block in each twin, written to as one."""

    def __init__(self, python: BlockStatus, compiled: BlockStatus) -> None:
        self.both = python, compiled

    @property
    def block_id(self) -> int:
        return self.both[0].block_id

    @property
    def ref_cnt(self) -> int:
        same_values([self.both])
        return self.both[0].ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        for status in self.both:
            status.ref_cnt = value


class PolicyPair(Pair):
    """A policy of each twin, called as one."""

    def __init__(self, twins: Twins, build: Callable[[ModuleType], Any]) -> None:
        super().__init__(twins, build)
        self.batches = cycle((None, tuple, once))
        self.collections = cycle((list, tuple, once, set, frozenset))

    def call(self, method: str, *arguments: Any, form: Any = None) -> Any:
        outcome, value = self.do(method, *arguments, form=form)
        if outcome == "raised":
            (kind, *_), text = value
            raise (getattr(kvoffload, kind, None) or getattr(builtins, kind))(text)
        return value

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self.call, method)

    def __len__(self) -> int:
        return self.call("__len__")

    def touch(self, hashes: list[bytes]) -> None:
        self.call("touch", hashes, form=next(self.batches))

    def get(self, key: bytes) -> StatusPair | None:
        python, compiled = (each.get(key) for each in self.both)
        require_equal(python is None, compiled is None, "residency of", key)
        return None if python is None else StatusPair(python, compiled)

    def evict(self, n: int, protected: Collection[bytes]) -> Any:
        if n < 0:
            return self.call("evict", n, protected)
        form = next(self.collections)
        return self.victims("evict", [each.evict(n, form(protected)) for each in self.both])

    def make_room(self, hashes: list[bytes], num_free: int, protected: Collection[bytes]) -> Any:
        rooms = [each.make_room(hashes, num_free, set(protected)) for each in self.both]
        python, compiled = (room or (None, None) for room in rooms)
        require_equal(python[0], compiled[0], "make_room", num_free)
        victims = self.victims("make_room", [python[1], compiled[1]])
        return None if python[0] is None else (python[0], victims)

    def victims(self, method: str, found: list[Any]) -> list[tuple[bytes, StatusPair]] | None:
        """Compare the victims of both."""
        require_equal(as_value(found[0]), as_value(found[1]), method)
        if found[0] is None:
            return None
        return [(key, StatusPair(old, new)) for (key, old), (_, new) in zip(*found, strict=True)]


def machine(twins: Twins, name: str) -> Any:
    """Return the machine of a policy: `policy_machine` and calls that are wrong."""
    steps: Any = policy_machine(
        lambda capacity: PolicyPair(twins, lambda twin: twin.policy_class(name)(capacity)),
        is_deterministic=False,  # one pair is enough
        verify=PolicyPair.agree,
    )

    class PolicyPairMachine(steps):
        @property
        def pair(self) -> PolicyPair:
            return self.driven._policy

        @rule()
        @precondition(lambda self: len(self.pair) > 4)
        def clear(self) -> None:
            self.driven.clear()

        @rule(
            method=st.sampled_from(["get", "remove", "touch", "insert"]),
            bad=st.sampled_from([b"", None, 5, "text", bytearray(b"x")]),
        )
        def pass_a_bad_hash(self, method: str, bad: Any) -> None:
            arguments: tuple[Any, ...] = ([KEYS[0], bad],) if method == "touch" else (bad,)
            if method == "insert":
                arguments = (bad, BlockStatus(99))
            self.pair.refuse(method, *arguments)

        @rule(n=st.sampled_from([-1, -(2**70), 2**63, 2**70, True, 1.0, "1", None]))
        def evict_no_number(self, n: Any) -> None:
            self.pair.do("evict", n, ())

        @rule(protected=st.sampled_from([[5], [b""], 5, None, b"x", "x"]))
        def protect_no_hashes(self, protected: Any) -> None:
            self.pair.refuse("evict", 1, protected)

    return PolicyPairMachine


@pytest.mark.parametrize("name", registry.names())
def test_every_policy_is_a_twin(twins: Twins, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tuple(KEYS[:-1])  # one of the longest, since hypothesis prints them
    monkeypatch.setattr("kvoffload.testing.policies.KEYS", keys)
    run_state_machine_as_test(machine(twins, name))


# -- sizes at which storage and index grow, and searches pass over thousands of blocks -------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", registry.names())
def test_a_policy_that_grows_far_beyond_its_capacity(twins: Twins, seed: int, name: str) -> None:
    generator = random.Random(seed)
    pair = Pair(twins, lambda twin: twin.policy_class(name)(3))
    keys = mixed_keys(range(4000))
    for block_id, block in enumerate(keys):
        pair.do("insert", block, idle(block_id))
    pair.agree()
    held = [(pair.python.get(block), pair.compiled.get(block)) for block in keys[::5]]
    for _ in range(6):
        pair.do("touch", generator.sample(keys, 300))
        for block in generator.sample(keys, 50):
            pair.do("remove", block)
        protected = generator.sample(keys, 200)
        victims = [
            [block for block, _ in thing.evict(350, protected)]
            for thing in (pair.python, pair.compiled)
        ]
        require_equal(victims[0], victims[1], "the victims")
        same_values(held)
    pair.agree()
    for block_id, block in enumerate(keys):
        if pair.python.get(block) is None:
            pair.do("insert", block, idle(10_000 + block_id))
    pair.agree()
    same_values(held)
    pair.do("clear")
    pair.agree()


# -- policies that outlive their managers ----------------------------------------------------------

MIXED = mixed_keys(range(14))
HINTS = (None, Hints(ends=True), Hints(expect_s=2.5, source="a"), Hints(expect_s=9.0, source="b"))


def drive_policies(pair: Pair, generator: random.Random, *, look_after: int) -> None:
    """Make calls on both policies; compare results, and all that can be seen after some calls.

    Looking at densities computes them; without looks, each twin decides when to.
    """
    for step in range(40):
        batch = generator.sample(MIXED, generator.randrange(1, 5))
        choice = generator.randrange(15)
        if choice >= 12:
            hook = generator.choice(("begun", "finished", "release"))
            hints = [] if hook == "release" else [generator.choice(HINTS)]
            pair.do(hook, batch, *hints)
        elif choice < 3:
            pair.do("evict", generator.randrange(4), batch[: generator.randrange(3)])
        elif choice < 5:
            pair.do("touch", batch)
        elif choice == 5:
            status = BlockStatus(100 + step)
            status.ref_cnt = generator.choice([0, 0, 1])
            pair.do("insert", batch[0], status)
        elif choice == 6:
            pair.do("remove", batch[0])
        elif choice == 7 and pair.python.get(batch[0]) is None:
            pair.do("make_room", batch[:1], 0, ())
        elif choice == 8 and generator.random() < 0.1:
            pair.do("clear")
        else:
            statuses = [policy.get(batch[0]) for policy in (pair.python, pair.compiled)]
            ref_cnt = generator.choice([0, 0, 0, 1, -1])
            for status in statuses:
                if status is not None:
                    status.ref_cnt = ref_cnt
        if step % look_after == look_after - 1:
            pair.agree()


@pytest.mark.thorough
@pytest.mark.parametrize("name", registry.names())
def test_policies_without_their_managers_are_twins(twins: Twins, name: str, seed: int) -> None:
    for number in range(max(1, round(25 * read_budget()))):
        traffic = Traffic.of(twins, name, seed + number, capacity=1 + number % 8)
        traffic.run(traffic.draw.randrange(60))
        pair, generator = traffic.pair, traffic.draw
        pair.python, pair.compiled = (manager.policy for manager in pair.both)
        del traffic
        assert pair.do("touch", MIXED)[0] == "returned"  # the managers are gone
        drive_policies(pair, generator, look_after=1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", registry.names())
def test_policies_compared_by_results_only_are_twins(twins: Twins, name: str, seed: int) -> None:
    for number in range(max(1, round(300 * read_budget()))):
        generator = random.Random(seed + number)
        blocks = MIXED[: generator.randrange(1, 9)]
        with secrets_from(REPEATABLE):
            pair = Pair(twins, partial(policy_of, name=name, capacity=len(blocks), blocks=blocks))
        drive_policies(pair, generator, look_after=40)
