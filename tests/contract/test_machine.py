"""Every public method of all managers in random order, against the model, step by step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
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

from kvoffload import BlockHash, OffloadError
from tests.blocks import once, slots
from tests.contract.conftest import ARC_KINDS, RECENCY_KINDS, build_manager
from tests.contract.model import (
    AdaptiveModel,
    CountingPool,
    LowestFirstPool,
    ManagerModel,
    RecencyModel,
)
from tests.strategies import BATCHES, KEYS

COUNTERS = (
    "lookups",
    "lookup_blocks",
    "hit_blocks",
    "stored_blocks",
    "failed_blocks",
    "evicted_blocks",
    "refused_stores",
    "not_admitted",
    "loaded_blocks",
)


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Return what a call gave, or which error it raised."""
    try:
        return "returned", call(*arguments)
    except OffloadError as error:
        return "raised", error


class ManagerMachine(RuleBasedStateMachine):
    """One manager and its model, driven by the same calls."""

    twin: ModuleType
    kind: str

    @initialize(num_blocks=st.integers(0, 7), events_on=st.booleans())
    def build(self, num_blocks: int, events_on: bool) -> None:
        self.manager = build_manager(self.twin, self.kind, num_blocks, 16, events_on)
        own_pool = self.kind.endswith("user-backend")
        pool = LowestFirstPool(num_blocks) if own_pool else CountingPool(num_blocks)
        policy = AdaptiveModel if self.kind in ARC_KINDS else RecencyModel
        self.model = ManagerModel(policy, pool, events_on)
        self.lent: list[Any] = []
        # open requests of the manager, their blocks, and what each stores
        self.requests: list[tuple[Any, list[BlockHash], list[BlockHash]]] = []

    def agree_on_load(self, method: str, batch: list[BlockHash]) -> None:
        """Do one half of a load on both; compare ids, or the error and the hash it names."""
        kind, value = outcome(getattr(self.manager, method), once(batch))
        expected_kind, expected = outcome(getattr(self.model, method), batch)
        assert kind == expected_kind
        if kind == "raised":
            assert type(value) is type(expected)
            assert str(expected)[:64] in str(value)
        elif method == "prepare_load":
            assert slots(value) == expected

    @rule(batch=BATCHES)
    def lookup(self, batch: list[BlockHash]) -> None:
        assert self.manager.lookup(once(batch)) == self.model.lookup(batch)

    @rule(batch=BATCHES)
    def touch(self, batch: list[BlockHash]) -> None:
        self.manager.touch(once(batch))
        self.model.touch(batch)

    @rule(batch=BATCHES)
    def prepare_load(self, batch: list[BlockHash]) -> None:
        self.agree_on_load("prepare_load", batch)

    @rule(data=st.data())
    def prepare_load_of_ready_blocks(self, data: st.DataObject) -> None:
        ready = [row.block for row in self.model.rows if row.pins >= 0]
        if ready:
            batch = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=4))
            self.agree_on_load("prepare_load", batch)

    @rule(batch=BATCHES)
    def complete_load(self, batch: list[BlockHash]) -> None:
        self.agree_on_load("complete_load", batch)

    @rule(data=st.data())
    def complete_load_of_pinned_blocks(self, data: st.DataObject) -> None:
        pins = [row.block for row in self.model.rows for _ in range(row.pins)]
        if pins:
            count = data.draw(st.integers(1, len(pins)))
            batch = data.draw(st.permutations(pins))[:count]
            self.agree_on_load("complete_load", batch)

    def place(self, batch: list[BlockHash]) -> list[BlockHash]:
        """Prepare a store on both and return what is to be stored."""
        output, expected = self.manager.prepare_store(once(batch)), self.model.prepare_store(batch)
        assert (output is None) == (expected is None)
        if output is None or expected is None:
            return []
        assert output.block_hashes_to_store == expected[0]
        assert slots(output.store_spec) == expected[1]
        assert output.block_hashes_evicted == expected[2]
        return expected[0]

    @rule(batch=BATCHES)
    def prepare_store(self, batch: list[BlockHash]) -> None:
        self.place(batch)

    @rule(batch=BATCHES)
    def store(self, batch: list[BlockHash]) -> None:
        self.complete_store(self.place(batch), True)

    @rule(batch=BATCHES, success=st.booleans())
    def complete_store(self, batch: list[BlockHash], success: bool) -> None:
        self.manager.complete_store(once(batch), success)
        self.model.complete_store(batch, success)

    @rule(success=st.booleans())
    def complete_every_store(self, success: bool) -> None:
        self.complete_store([row.block for row in self.model.rows], success)

    @rule(batch=BATCHES)
    def begin(self, batch: list[BlockHash]) -> None:
        self.requests.append((self.manager.begin(once(batch)), list(batch), []))
        self.model.touch(batch)

    def drawn(self, data: st.DataObject) -> tuple[Any, list[BlockHash], list[BlockHash]] | None:
        return data.draw(st.sampled_from(self.requests)) if self.requests else None

    def part(self, data: st.DataObject, batch: list[BlockHash]) -> tuple[int, int]:
        start = data.draw(st.integers(0, len(batch)))
        return start, data.draw(st.integers(start, len(batch)))

    @rule(data=st.data())
    def look_up_a_request(self, data: st.DataObject) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, batch, _ = drawn
            start, _ = self.part(data, batch)
            assert request.lookup(start) == self.model.lookup(batch[start:])

    @rule(data=st.data(), method=st.sampled_from(["prepare_load", "complete_load"]))
    def load_a_part(self, data: st.DataObject, method: str) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, batch, _ = drawn
            start, stop = self.part(data, batch)
            kind, value = outcome(getattr(request, method), start, stop)
            expected_kind, expected = outcome(getattr(self.model, method), batch[start:stop])
            assert kind == expected_kind
            if kind == "raised":
                assert type(value) is type(expected)
                assert str(expected)[:64] in str(value)
            elif method == "prepare_load":
                assert slots(value) == expected

    @rule(data=st.data())
    def store_a_part(self, data: st.DataObject) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, batch, storing = drawn
            start, stop = self.part(data, batch)
            output = request.prepare_store(start, stop)
            expected = self.model.prepare_store(batch[start:stop])
            assert (output is None) == (expected is None)
            if output is not None and expected is not None:
                assert output.block_hashes_to_store == expected[0]
                assert slots(output.store_spec) == expected[1]
                assert output.block_hashes_evicted == expected[2]
                storing += expected[0]

    @rule(data=st.data(), success=st.booleans())
    def complete_a_request_s_stores(self, data: st.DataObject, success: bool) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, _, storing = drawn
            request.complete_store(success)
            self.model.complete_store(list(storing), success)
            storing.clear()

    @rule(data=st.data(), more=BATCHES)
    def extend(self, data: st.DataObject, more: list[BlockHash]) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, batch, _ = drawn
            request.extend(once(more))
            self.model.touch(more)
            batch += more
            assert request.hashes == tuple(batch)

    @rule(data=st.data(), dropped=st.booleans())
    def finish(self, data: st.DataObject, dropped: bool) -> None:
        if (drawn := self.drawn(data)) is not None:
            request, batch, _ = drawn
            self.requests.remove(drawn)
            if not dropped:
                request.finish()
                self.model.touch(batch)

    @rule()
    def take_events(self) -> None:
        taken = [(event.block_hashes, event.removed) for event in self.manager.take_events()]
        assert taken == self.model.take_events()

    @rule()
    def take_events_and_leave_them(self) -> None:
        next(self.manager.take_events(), None)
        self.model.take_events()

    @rule()
    @precondition(lambda self: len(self.model.rows) > 2)
    def reset_cache(self) -> None:
        self.manager.reset_cache()
        self.model.reset()

    @rule(
        method=st.sampled_from(
            ["lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store"]
        ),
        batch=BATCHES,
        bad=st.sampled_from([b"", None, "text", bytearray(b"x")]),
        data=st.data(),
    )
    def mistake(self, method: str, batch: list[Any], bad: Any, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(batch)))
        batch = [*batch[:position], bad, *batch[position:]]
        with pytest.raises(ValueError if bad == b"" else TypeError, match=rf"\[{position}\]"):
            getattr(self.manager, method)(once(batch))

    @rule()
    @precondition(lambda self: self.kind.endswith("over-cpu-backend"))
    def lend_a_slot_to_someone_else(self) -> None:
        if self.model.pool.num_free():
            (status,) = self.manager.backend.allocate_blocks([KEYS[0]])
            slot = self.model.pool.take()
            assert status.block_id == slot
            self.lent.append(status)
            self.model.pool.lent.append(slot)

    @rule(data=st.data())
    @precondition(lambda self: self.kind.endswith("over-cpu-backend"))
    def take_a_slot_back(self, data: st.DataObject) -> None:
        if self.lent:
            status = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
            self.manager.backend.free(status)
            self.model.pool.lent.remove(status.block_id)
            self.model.pool.give_back(status.block_id)

    @invariant()
    def every_invariant_holds(self) -> None:
        self.manager._check()

    @invariant()
    def all_that_can_be_seen_agrees(self) -> None:
        manager, model = self.manager, self.model
        assert len(manager) == len(model.rows)
        assert [block in manager for block in KEYS] == [model.row(key) is not None for key in KEYS]
        for row in model.rows:
            status = manager.policy.get(row.block)
            assert (status.ref_cnt, status.block_id) == (row.pins, row.slot)
        expected = {**dict.fromkeys(COUNTERS, 0), **model.counts, **model.present()}
        assert manager.stats() == expected
        untaken = manager.events
        if untaken is not None:
            assert [(event.block_hashes, event.removed) for event in untaken] == model.events
        assert (untaken is not None) == model.events_on
        if not self.kind.startswith("user-"):
            for name, content in model.policy.views().items():
                view = getattr(manager.policy, name)
                assert (list(view) if isinstance(content, list) else view) == content


@pytest.mark.parametrize("kind", RECENCY_KINDS + ARC_KINDS)
def test_a_manager_does_what_its_model_does(twin: ModuleType, kind: str) -> None:
    machine = type("Machine", (ManagerMachine,), {"twin": twin, "kind": kind})
    run_state_machine_as_test(machine)
