"""The rules of state machines that drive managers, whatever a manager is compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvoffload import BlockHash, Hints
from tests.blocks import METHODS, once
from tests.strategies import BATCHES, BLOCKS, KEYS

FORMS = st.sampled_from([None, tuple, once, deque])
OwnBytes = type("OwnBytes", (bytes,), {})  # equal to bytes, and not bytes
BAD_ELEMENTS = (b"", None, 5, "text", bytearray(b"x"), memoryview(b"x"), (b"x",), OwnBytes(KEYS[0]))
BAD_BATCHES = (None, 5, b"bytes", b"", "text", "", 1.5, bytearray(b"bytes"), memoryview(b"b"))
PARTS = ("lookup", "prepare_load", "complete_load", "prepare_store")
"""Methods of a request that take a part of it."""
MOST = 2**31
HINTS = st.sampled_from([None, Hints(), Hints(ends=True)])
with_requests = precondition(lambda self: bool(self.requests))
with_a_shared_pool = precondition(lambda self: self.kind.endswith("over-cpu-backend"))


def call(method: str) -> Any:
    """Return the rule that calls a method with any batch."""

    def calls(self: ManagerRules, data: st.DataObject, form: Any) -> None:
        self.driven.do(method, self.batch(data), form=form)

    calls.__name__ = method
    return rule(data=st.data(), form=FORMS)(calls)


class ManagerRules(RuleBasedStateMachine):
    """Every call on a manager, some of them wrong.

    Attributes
    ----------
    kind : str
        Of the manager, as `build_manager` takes it.
    driven
        The manager beside what it is compared with. ``do`` makes a call on both and compares the
        outcomes, ``refuse`` makes one that must raise, ``begin`` begins a request, which has
        ``finish`` beside ``do``, and ``both``
        are the managers, one or two.
    """

    kind: str
    driven: Any

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self.lent: list[Any] = []

    def blocks_with(self, lowest: int, highest: int) -> dict[BlockHash, int]:
        """Return the resident blocks whose `ref_cnt` lies within bounds, and their `ref_cnt`."""
        found = {key: self.driven.both[0].policy.get(key) for key in KEYS}
        return {
            key: status.ref_cnt
            for key, status in found.items()
            if status is not None and lowest <= status.ref_cnt <= highest
        }

    def batch(self, data: st.DataObject) -> list[BlockHash]:
        """Return a batch of any blocks, about half of them resident."""
        resident = list(self.blocks_with(-1, MOST))
        blocks = st.one_of(st.sampled_from(resident), BLOCKS) if resident else BLOCKS
        return data.draw(st.lists(blocks, max_size=6))

    def fill(self, batch: list[BlockHash]) -> None:
        """Begin with blocks that are stored, every other one pinned."""
        self.driven.do("prepare_store", batch)
        self.driven.do("complete_store", batch)
        self.load_every_other_block()

    # -- batches -----------------------------------------------------------------------------

    lookup, touch, prepare_load, complete_load, prepare_store, complete_store, release = map(
        call, METHODS
    )

    @rule(data=st.data(), touched=st.booleans(), success=st.booleans())
    def store(self, data: st.DataObject, touched: bool, success: bool) -> None:
        batch = self.batch(data)
        if touched:
            self.driven.do("touch", batch)
        self.driven.do("prepare_store", batch)
        self.driven.do("complete_store", batch, success)

    @rule(success=st.booleans())
    def complete_every_store(self, success: bool) -> None:
        self.driven.do("complete_store", list(self.blocks_with(-1, MOST)), success)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        ready = list(self.blocks_with(0, MOST))
        if ready:
            batch = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=5))
            self.driven.do("prepare_load", batch)

    @rule()
    def load_every_other_block(self) -> None:
        self.driven.do("prepare_load", list(self.blocks_with(0, MOST))[::2])

    @rule(data=st.data(), excess=st.booleans())
    def unload(self, data: st.DataObject, excess: bool) -> None:
        pinned = self.blocks_with(1, MOST)
        pins = [key for key, count in pinned.items() for _ in range(count + excess)]
        if pins:
            count = data.draw(st.integers(1, len(pins)))
            self.driven.do("complete_load", data.draw(st.permutations(pins))[:count])

    @rule()
    def take_events(self) -> None:
        self.driven.do("take_events")

    @rule()
    @precondition(lambda self: len(self.driven.both[0]) > 2)
    def reset_cache(self) -> None:
        self.driven.do("reset_cache")

    @rule(key=st.one_of(BLOCKS, st.sampled_from([b"", None, 5])))
    def ask_for_residency(self, key: Any) -> None:
        self.driven.do("__contains__", key)

    # -- requests ----------------------------------------------------------------------------

    @rule(data=st.data(), hints=HINTS)
    def begin(self, data: st.DataObject, hints: Hints | None) -> None:
        self.requests.append(self.driven.begin(self.batch(data), hints))

    def drawn(self, data: st.DataObject) -> Any:
        """Return a request that is open."""
        return data.draw(st.sampled_from(self.requests))

    @rule(data=st.data(), method=st.sampled_from(PARTS))
    @with_requests
    def use_a_part(self, data: st.DataObject, method: str) -> None:
        request = self.drawn(data)
        start = data.draw(st.integers(0, request.size))
        stop = data.draw(st.integers(start, request.size))
        request.do(method, start, *([] if method == "lookup" else [stop]))

    @rule(data=st.data(), success=st.booleans())
    @with_requests
    def complete_the_stores_of_a_request(self, data: st.DataObject, success: bool) -> None:
        self.drawn(data).do("complete_store", success)

    @rule(data=st.data())
    @with_requests
    def extend(self, data: st.DataObject) -> None:
        self.drawn(data).do("extend", self.batch(data))

    @rule(data=st.data(), dropped=st.booleans(), hints=HINTS)
    @with_requests
    def finish(self, data: st.DataObject, dropped: bool, hints: Hints | None) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if not dropped:
            request.finish(hints)

    # -- mistakes ----------------------------------------------------------------------------

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
        if method == "lookup":
            form = once  # of a list or a tuple it may stop before it gets there
        kinds, text = self.driven.refuse(method, batch, form=form)
        assert ("ValueError" if bad == b"" else "TypeError") in kinds
        assert f"[{position}]" in text

    @rule(method=st.sampled_from(METHODS), batch=BATCHES)
    def pass_an_iterator_that_fails(self, method: str, batch: list[BlockHash]) -> None:
        def failing(hashes: list[BlockHash]) -> Iterator[BlockHash]:
            yield from hashes
            raise ValueError("of the caller")

        assert self.driven.refuse(method, batch, form=failing)[1] == "of the caller"

    @rule(method=st.sampled_from(METHODS), batch=st.sampled_from(BAD_BATCHES))
    def pass_what_is_no_batch(self, method: str, batch: Any) -> None:
        _, text = self.driven.refuse(method, batch)
        advice = ": wrap it in a list" if isinstance(batch, bytes) else ""
        assert text == f"hashes must be an iterable of block hashes, got {batch!r}{advice}"

    # -- a pool that others use as well ------------------------------------------------------

    def slot_lent(self, statuses: list[Any]) -> None:
        """Follow what `lend_a_slot_to_someone_else` did."""

    def slot_taken_back(self, statuses: list[Any]) -> None:
        """Follow what `take_a_slot_back` did."""

    @rule()
    @with_a_shared_pool
    def lend_a_slot_to_someone_else(self) -> None:
        backends = [manager.backend for manager in self.driven.both]
        if backends[0].get_num_free_blocks():
            self.lent.append([each.allocate_blocks([KEYS[0]])[0] for each in backends])
            self.slot_lent(self.lent[-1])

    @rule(data=st.data())
    @with_a_shared_pool
    def take_a_slot_back(self, data: st.DataObject) -> None:
        if self.lent:
            statuses = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
            for manager, status in zip(self.driven.both, statuses, strict=True):
                manager.backend.free(status)
            self.slot_taken_back(statuses)
