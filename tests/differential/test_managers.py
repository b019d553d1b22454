"""Every step on a manager of each twin: results, errors and their text, all that can be seen."""

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

from kvoffload.policies import registry
from tests.blocks import once
from tests.contract.conftest import KINDS, build_manager
from tests.differential.pairs import Pair, Twins, same_values
from tests.strategies import BATCHES, BLOCKS, KEYS

FORMS = st.sampled_from([None, tuple, once])
METHODS = (
    "lookup",
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
)
BAD_ELEMENTS = (b"", None, 5, "text", bytearray(b"x"), memoryview(b"x"), (b"x",))
BAD_BATCHES = (None, 5, b"bytes", "text", 1.5)


class ManagerPairMachine(RuleBasedStateMachine):
    """A manager of each twin, driven by the same calls."""

    twins: Twins
    kind: str
    policy_name: str | None = None

    @initialize(num_blocks=st.integers(0, 9), events_on=st.booleans())
    def build(self, num_blocks: int, events_on: bool) -> None:
        def construct(twin: Any) -> Any:
            if self.policy_name is None:
                return build_manager(twin, self.kind, num_blocks, 16, events_on)
            return twin.CPUOffloadingManager(16, num_blocks, self.policy_name, events_on)

        self.pair = Pair(self.twins, construct)
        self.held: list[tuple[Any, Any]] = []
        self.lent: list[tuple[Any, Any]] = []

    def blocks_with(self, lowest: int, highest: int) -> list[bytes]:
        """Return the resident blocks whose `ref_cnt` lies within bounds."""
        found: list[bytes] = []
        for key in KEYS:
            status = self.pair.python.policy.get(key)
            if status is not None and lowest <= status.ref_cnt <= highest:
                found.append(key)
        return found

    @rule(method=st.sampled_from(METHODS), batch=BATCHES, form=FORMS)
    def call(self, method: str, batch: list[bytes], form: Any) -> None:
        self.pair.do(method, batch, form=form)

    @rule(batch=BATCHES, success=st.booleans())
    def store(self, batch: list[bytes], success: bool) -> None:
        self.pair.do("touch", batch)
        self.pair.do("prepare_store", batch)
        self.pair.do("complete_store", batch, success)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        ready = self.blocks_with(0, 2**31)
        if ready:
            batch = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=5))
            self.pair.do("prepare_load", batch)

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        pinned = self.blocks_with(1, 2**31)
        if pinned:
            batch = data.draw(st.lists(st.sampled_from(pinned), min_size=1, max_size=5))
            self.pair.do("complete_load", batch)

    @rule(success=st.booleans())
    def complete_every_store(self, success: bool) -> None:
        self.pair.do("complete_store", self.blocks_with(-1, -1), success)

    @rule()
    def take_events(self) -> None:
        self.pair.do("take_events")

    @rule()
    @precondition(lambda self: len(self.pair.python) > 3)
    def reset_cache(self) -> None:
        self.pair.do("reset_cache")

    @rule(key=st.one_of(BLOCKS, st.sampled_from([b"", None, 5])))
    def ask_for_residency(self, key: Any) -> None:
        self.pair.do("__contains__", key)

    @rule(key=BLOCKS)
    def hold_a_status(self, key: bytes) -> None:
        python = self.pair.python.policy.get(key)
        compiled = self.pair.compiled.policy.get(key)
        assert (python is None) == (compiled is None)
        if python is not None:
            self.held.append((python, compiled))

    @rule(
        method=st.sampled_from(METHODS),
        batch=BATCHES,
        bad=st.sampled_from(BAD_ELEMENTS),
        form=FORMS,
        data=st.data(),
    )
    def pass_a_bad_element(
        self, method: str, batch: list[Any], bad: Any, form: Any, data: st.DataObject
    ) -> None:
        position = data.draw(st.integers(0, len(batch)))
        batch = [*batch[:position], bad, *batch[position:]]
        outcome, _ = self.pair.do(method, batch, form=form)
        # A lookup of a list or tuple may stop before it gets there.
        assert outcome == "raised" or (method == "lookup" and form is not once)

    @rule(method=st.sampled_from(METHODS), batch=st.sampled_from(BAD_BATCHES))
    def pass_what_is_no_batch(self, method: str, batch: Any) -> None:
        assert self.pair.do(method, batch)[0] == "raised"

    @rule()
    @precondition(lambda self: self.kind.endswith("over-cpu-backend"))
    def lend_a_slot_to_someone_else(self) -> None:
        pair = self.pair
        if pair.python.backend.get_num_free_blocks():
            both = (pair.python, pair.compiled)
            python, compiled = (each.backend.allocate_blocks([KEYS[0]])[0] for each in both)
            self.lent.append((python, compiled))
            self.held.append((python, compiled))

    @rule(data=st.data())
    @precondition(lambda self: self.kind.endswith("over-cpu-backend"))
    def take_a_slot_back(self, data: st.DataObject) -> None:
        if self.lent:
            python, compiled = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
            self.pair.python.backend.free(python)
            self.pair.compiled.backend.free(compiled)

    @invariant()
    def the_twins_agree(self) -> None:
        self.pair.agree()
        same_values(self.held)


def machine(twins: Twins, kind: str, policy_name: str | None = None) -> Any:
    members = {"twins": twins, "kind": kind, "policy_name": policy_name}
    return type("Machine", (ManagerPairMachine,), members)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("cpu-")])
def test_managers_of_every_kind_are_twins(twins: Twins, kind: str) -> None:
    run_state_machine_as_test(machine(twins, kind))


@pytest.mark.parametrize("name", registry.names())
def test_managers_with_every_policy_are_twins(twins: Twins, name: str) -> None:
    run_state_machine_as_test(machine(twins, "cpu", name))
