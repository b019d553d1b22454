"""Every step on a policy of each twin, used alone; whichever policies are registered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvoffload import BlockStatus
from kvoffload.policies import registry
from tests.blocks import once
from tests.differential.pairs import Pair, Twins, same_values
from tests.observation import as_value
from tests.strategies import BATCHES, BLOCKS, KEYS

FORMS = st.sampled_from([None, tuple, once, set, frozenset])
REF_CNTS = st.sampled_from([-1, 0, 0, 0, 1, 2**31 - 1])


def status_of(ref_cnt: int, block_id: int) -> BlockStatus:
    status = BlockStatus(block_id)
    status.ref_cnt = ref_cnt
    return status


class PolicyPairMachine(RuleBasedStateMachine):
    """A policy of each twin, driven by the same calls."""

    twins: Twins
    policy_name: str

    @initialize(capacity=st.integers(0, 9))
    def build(self, capacity: int) -> None:
        self.pair = Pair(self.twins, lambda twin: twin.policy_class(self.policy_name)(capacity))
        self.held: list[tuple[Any, Any]] = []
        self.next_id = 0

    def resident(self) -> list[bytes]:
        return [key for key in KEYS if self.pair.python.get(key) is not None]

    @rule(key=BLOCKS, ref_cnt=REF_CNTS)
    def insert(self, key: bytes, ref_cnt: int) -> None:
        self.pair.do("insert", key, status_of(ref_cnt, self.next_id))
        self.next_id += 1

    @rule(count=st.integers(2, 6))
    def insert_several(self, count: int) -> None:
        absent = [key for key in KEYS if key not in self.resident()]
        for key in absent[:count]:
            self.insert(key, 0)

    @rule(key=BLOCKS)
    def remove(self, key: bytes) -> None:
        self.pair.do("remove", key)

    @rule(batch=BATCHES, form=st.sampled_from([None, tuple, once]))
    def touch(self, batch: list[bytes], form: Any) -> None:
        self.pair.do("touch", batch, form=form)

    @rule(n=st.integers(0, 5), protected=BATCHES, form=FORMS)
    def evict(self, n: int, protected: list[bytes], form: Any) -> None:
        given = form or list
        outcomes = [
            thing.evict(n, given(protected)) for thing in (self.pair.python, self.pair.compiled)
        ]
        if outcomes[0] is None or outcomes[1] is None:
            assert outcomes == [None, None]
            return
        python, compiled = ([(key, as_value(s)) for key, s in each] for each in outcomes)
        assert python == compiled
        self.held += [
            (old, new) for (_, old), (_, new) in zip(outcomes[0], outcomes[1], strict=True)
        ]

    @rule(data=st.data(), num_free=st.integers(0, 3))
    def make_room(self, data: st.DataObject, num_free: int) -> None:
        absent = [key for key in KEYS if key not in self.resident()]
        count = data.draw(st.integers(0, min(4, len(absent))))
        protected = set(data.draw(BATCHES))
        outcomes = [
            thing.make_room(absent[:count], num_free, protected)
            for thing in (self.pair.python, self.pair.compiled)
        ]
        python, compiled = (
            None if each is None else (each[0], [(key, as_value(s)) for key, s in each[1]])
            for each in outcomes
        )
        assert python == compiled

    @rule(data=st.data(), ref_cnt=REF_CNTS)
    def write_ref_cnt(self, data: st.DataObject, ref_cnt: int) -> None:
        resident = self.resident()
        if resident:
            key = data.draw(st.sampled_from(resident))
            for policy in (self.pair.python, self.pair.compiled):
                policy.get(key).ref_cnt = ref_cnt

    @rule(key=BLOCKS)
    def hold_a_status(self, key: bytes) -> None:
        python, compiled = self.pair.python.get(key), self.pair.compiled.get(key)
        assert (python is None) == (compiled is None)
        if python is not None:
            self.held.append((python, compiled))

    @rule()
    @precondition(lambda self: len(self.pair.python) > 4)
    def clear(self) -> None:
        self.pair.do("clear")

    @rule(
        method=st.sampled_from(["get", "remove", "touch", "insert"]),
        bad=st.sampled_from([b"", None, 5, "text", bytearray(b"x")]),
    )
    def pass_a_bad_hash(self, method: str, bad: Any) -> None:
        arguments: tuple[Any, ...] = ([KEYS[0], bad],) if method == "touch" else (bad,)
        if method == "insert":
            arguments = (bad, status_of(0, 99))
        assert self.pair.do(method, *arguments)[0] == "raised"

    @rule(n=st.sampled_from([-1, -(2**70), 2**63, 2**70, True, 1.0, "1", None]))
    def evict_no_number(self, n: Any) -> None:
        self.pair.do("evict", n, ())

    @rule(protected=st.sampled_from([[5], [b""], 5, None, b"x", "x"]))
    def protect_no_hashes(self, protected: Any) -> None:
        assert self.pair.do("evict", 1, protected)[0] == "raised"

    @invariant()
    def the_twins_agree(self) -> None:
        self.pair.agree()
        same_values(self.held)


@pytest.mark.parametrize("name", registry.names())
def test_every_policy_is_a_twin(twins: Twins, name: str) -> None:
    members = {"twins": twins, "policy_name": name}
    run_state_machine_as_test(type("Machine", (PolicyPairMachine,), members))
