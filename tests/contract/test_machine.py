"""Every public method of all managers in random order, against the model, step by step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from kvoffload import BlockHash, Hints
from kvoffload.managers import calls
from kvoffload.testing.policies import check_invariants
from tests.blocks import once
from tests.contract.conftest import ARC_KINDS, RECENCY_KINDS, build_manager
from tests.contract.model import (
    COUNTERS,
    CountingPool,
    LowestFirstPool,
    ManagerModel,
    RequestModel,
    Row,
)
from tests.machines import ManagerRules, OwnBytes
from tests.observation import attempt
from tests.policies.models import MODELS
from tests.strategies import BATCHES, BLOCKS, KEYS

AS_THE_MODEL: dict[str, Callable[[Any], Any]] = {
    "prepare_load": lambda spec: spec[-1],
    "prepare_store": lambda output: output and [output[0], output[1][-1], output[2]],
    "take_events": lambda events: [[blocks, removed] for blocks, *_, removed in events],
}
"""What the model gives of the value that a manager gives."""

pytestmark = pytest.mark.fast


class Modelled:
    """A manager, or a request, and its model, driven by the same calls."""

    def __init__(self, tested: Any, model: ManagerModel | RequestModel) -> None:
        self.both = [tested]
        self.model: Any = model

    @property
    def size(self) -> int:
        """Number of blocks of a request."""
        return len(self.model.hashes)

    def do(self, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None) -> bool:
        """Make a call on both; compare the results, or the errors and the hashes they name.

        Return whether it succeeded.
        """
        kind, value = attempt(self.both[0], method, *arguments, form=form)
        expected_kind, expected = attempt(self.model, method, *arguments)
        assert kind == expected_kind
        if kind == "raised":
            assert value[0] == expected[0]
            assert value[1].startswith(expected[1])
        else:
            assert AS_THE_MODEL.get(method, lambda same: same)(value) == expected
        if isinstance(self.model, RequestModel):
            assert self.both[0].hashes == tuple(self.model.hashes)
        return kind == "returned"

    def refuse(self, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None) -> Any:
        """Make a call that must be refused, and return the classes and the text of its error."""
        outcome, error = attempt(self.both[0], method, *arguments, form=form)
        assert outcome == "raised", f"{method} {arguments} gave {error}"
        return error

    def begin(self, batch: list[BlockHash], hints: Hints | None) -> Modelled:
        """Begin a request."""
        ends = hints is not None and hints.ends
        return Modelled(self.both[0].begin(once(batch), hints=hints), self.model.begin(batch, ends))

    def finish(self, hints: Hints | None) -> None:
        """Finish a request, with what the client says of its session."""
        self.both[0].finish(hints=hints)
        self.model.finish(None if hints is None else hints.ends)


def modelled(twin: ModuleType, kind: str, num_blocks: int, events_on: bool) -> Modelled:
    """Return a manager of a kind and its model."""
    pool = LowestFirstPool if kind.endswith("user-backend") else CountingPool
    name = "arc" if kind in ARC_KINDS else kind.removeprefix("cpu-")
    policy = MODELS.get(name, MODELS["lru"])
    model = ManagerModel(policy, pool(num_blocks), events_on, not kind.startswith("user-"))
    return Modelled(build_manager(twin, kind, num_blocks, 48, events_on), model)


def agree(manager: Any, model: ManagerModel) -> None:
    """Compare all but the blocks of a manager with its model."""
    now = model.present()
    assert manager.stats() == {**dict.fromkeys(COUNTERS, 0), **model.counts, **now}
    untaken = manager.events
    assert (untaken is not None) == model.events_on
    assert [(event.block_hashes, event.removed) for event in untaken or ()] == model.events
    described = {(event.block_size, event.medium) for event in untaken or ()}
    assert described <= {(manager.block_size, manager.medium)}
    if untaken:
        untaken.clear()  # it is a copy
    shown = f"{now['resident']} of {now['resident'] + now['free']} blocks resident, "
    shown += f"{now['pending']} pending, {now['pinned']} pinned>"
    name, policy = type(manager).__name__, type(manager.policy).__name__
    assert repr(manager) == f"<{name} over {policy}: {shown}"
    assert calls.unshared(manager, KEYS) == model.unshared(KEYS)
    if isinstance(model.pool, LowestFirstPool):
        backend = manager.backend
        assert [hashes for hashes in backend.asked if hashes] == model.allocated
        assert [status.block_id for status in backend.freed] == model.pool.freed
        assert all(any(one is other for other in backend.allocated) for one in backend.freed)
    if model.releases:
        assert manager.policy.num_released == len(model.policy.released)


class ManagerMachine(ManagerRules):
    """One manager and its model, driven by the same calls."""

    twin: ModuleType
    driven: Modelled

    @initialize(num_blocks=st.integers(0, 7), events_on=st.booleans(), batch=BATCHES)
    def build(self, num_blocks: int, events_on: bool, batch: list[BlockHash]) -> None:
        self.driven = modelled(self.twin, self.kind, num_blocks, events_on)
        self.manager, self.model = self.driven.both[0], self.driven.model
        self.held: list[tuple[Any, Row]] = []
        self.fill(batch[:num_blocks])
        for block in batch[1::2]:
            self.hold_a_status(block)

    @rule(key=BLOCKS)
    def hold_a_status(self, key: BlockHash) -> None:
        row = self.model.row(key)
        if row is not None:
            self.held.append((self.manager.policy.get(key), row))

    @rule(key=BLOCKS)
    def hold_a_status_whose_store_fails(self, key: BlockHash) -> None:
        self.driven.do("prepare_store", [key])
        self.hold_a_status(key)
        self.driven.do("complete_store", [key], False)

    @rule()
    def take_events_and_leave_them(self) -> None:
        next(self.manager.take_events(), None)
        self.model.take_events()

    def slot_lent(self, statuses: list[Any]) -> None:
        slot = self.model.pool.take()
        assert statuses[0].block_id == slot
        self.model.pool.lent.append(slot)

    def slot_taken_back(self, statuses: list[Any]) -> None:
        self.model.pool.lent.remove(statuses[0].block_id)
        self.model.pool.give_back(statuses[0].block_id)

    @invariant()
    def every_invariant_holds(self) -> None:
        check_invariants(self.manager)

    @invariant()
    def all_that_can_be_seen_agrees(self) -> None:
        manager, model = self.manager, self.model
        assert len(manager) == len(model.rows)
        assert [block in manager for block in KEYS] == [model.row(key) is not None for key in KEYS]
        others: list[Any] = [OwnBytes, bytearray, bytes.hex, list]
        assert not any(form(key) in manager for form in others for key in KEYS)
        present = [(manager.policy.get(row.block), row) for row in model.rows]
        for status, row in present + self.held:  # of a block that has left they stay the last ones
            assert (status.ref_cnt, status.block_id) == (row.pins, row.slot)
            assert status.is_ready == (row.pins >= 0)
            assert getattr(status, "label", row.block.hex()) == row.block.hex()
        assert sorted(manager.block_table.tolist()) == sorted((r.pins, r.slot) for r in model.rows)
        agree(manager, model)
        if not self.kind.startswith("user-"):
            for name, content in model.policy.views().items():
                view = getattr(manager.policy, name)
                assert (list(view) if isinstance(content, list) else view) == content
                if "-over-" in self.kind:
                    assert getattr(manager, name) == view


@pytest.mark.parametrize("kind", RECENCY_KINDS + ARC_KINDS)
def test_a_manager_does_what_its_model_does(twin: ModuleType, kind: str) -> None:
    machine = type("Machine", (ManagerMachine,), {"twin": twin, "kind": kind})
    run_state_machine_as_test(machine)
