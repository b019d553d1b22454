"""Every step on the pool of each twin."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvoffload import BlockStatus
from tests.blocks import block_hashes, once
from tests.differential.pairs import Pair, Twins, same_values


class PoolPairMachine(RuleBasedStateMachine):
    """A `CPUBackend` of each twin, driven by the same calls."""

    twins: Twins

    @initialize(num_blocks=st.integers(0, 8))
    def build(self, num_blocks: int) -> None:
        self.pair = Pair(self.twins, lambda twin: twin.CPUBackend(16, num_blocks))
        self.given: list[tuple[Any, Any]] = []

    @rule(count=st.integers(0, 4), form=st.sampled_from([list, tuple, once]))
    def allocate(self, count: int, form: Any) -> None:
        hashes = block_hashes(*range(count))
        if count > self.pair.python.get_num_free_blocks():
            self.pair.refuse("allocate_blocks", hashes, form=form)
            return
        python = self.pair.python.allocate_blocks(form(hashes))
        compiled = self.pair.compiled.allocate_blocks(form(hashes))
        self.given += zip(python, compiled, strict=True)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.given:
            python, compiled = self.given.pop(data.draw(st.integers(0, len(self.given) - 1)))
            self.pair.python.free(python)
            self.pair.compiled.free(compiled)

    @rule(block_id=st.integers(-2, 9))
    def free_what_was_not_given(self, block_id: int) -> None:
        if block_id not in [status.block_id for status, _ in self.given]:
            self.pair.refuse("free", BlockStatus(block_id))

    @rule(block=st.sampled_from([None, 5, b"x"]))
    def free_no_status(self, block: Any) -> None:
        self.pair.refuse("free", block)

    @rule(bad=st.sampled_from([[b""], [5], None, 5, b"x"]))
    def allocate_for_no_batch(self, bad: Any) -> None:
        self.pair.refuse("allocate_blocks", bad)

    @rule(data=st.data())
    def describe(self, data: st.DataObject) -> None:
        given = [python for python, _ in self.given]
        blocks = data.draw(st.lists(st.sampled_from(given), max_size=4)) if given else []
        self.pair.do("get_load_store_spec", [], blocks)

    @invariant()
    def the_twins_agree(self) -> None:
        self.pair.agree()
        same_values(self.given)


def test_pools_are_twins(twins: Twins) -> None:
    run_state_machine_as_test(type("Machine", (PoolPairMachine,), {"twins": twins}))
