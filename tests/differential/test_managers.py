"""Every step on a manager of each twin: results, errors and their text, all that can be seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from kvoffload import BlockHash
from kvoffload.policies import registry
from tests.contract.conftest import KINDS, build_manager
from tests.differential.pairs import Pair, Twins, same_values
from tests.machines import BAD_ELEMENTS, ManagerRules
from tests.strategies import BATCHES, BLOCKS


class ManagerPairMachine(ManagerRules):
    """A manager of each twin, driven by the same calls."""

    twins: Twins
    policy_name: str | None = None
    driven: Pair

    @initialize(num_blocks=st.integers(0, 9), events_on=st.booleans(), batch=BATCHES)
    def build(self, num_blocks: int, events_on: bool, batch: list[BlockHash]) -> None:
        def construct(twin: Any) -> Any:
            if self.policy_name is None:
                return build_manager(twin, self.kind, num_blocks, 16, events_on)
            return twin.CPUOffloadingManager(16, num_blocks, self.policy_name, events_on)

        self.driven = Pair(self.twins, construct)
        self.held: list[tuple[Any, Any]] = []
        self.fill(batch[:num_blocks])

    @rule(key=BLOCKS)
    def hold_a_status(self, key: bytes) -> None:
        python, compiled = (manager.policy.get(key) for manager in self.driven.both)
        assert (python is None) == (compiled is None)
        if python is not None:
            self.held.append((python, compiled))

    @rule(
        before=BATCHES,
        bad=st.sampled_from(BAD_ELEMENTS),
        after=BATCHES,
        form=st.sampled_from([list, tuple]),
    )
    def look_up_a_bad_element(
        self, before: list[bytes], bad: Any, after: list[bytes], form: Any
    ) -> None:
        self.driven.do("lookup", [*before, bad, *after], form=form)  # it may stop before

    def slot_lent(self, statuses: list[Any]) -> None:
        self.held.append((statuses[0], statuses[1]))

    @invariant()
    def the_twins_agree(self) -> None:
        self.driven.agree()
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
