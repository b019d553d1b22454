"""Prompts that are offered step by step, as vLLM's scheduler does; vLLM itself is in tests/vllm."""

from __future__ import annotations

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.replay import (
    Group,
    GroupChunks,
    GroupLayout,
)
from kvoffload.replay.groups import step_ends
from kvoffload.replay.serving import GroupServer, group_key


def serve(manager, size, step, hashes, **how):
    """Serve a prompt of full blocks step by step."""
    server = GroupServer(GroupChunks.of_blocks(size, step_tokens=step), manager, **how)
    return server.serve(hashes, size * len(hashes))


def keys(*indexes: int) -> list[bytes]:
    return [b"%d" % index for index in indexes]


def test_a_prompt_larger_than_memory_evicts_the_others_and_keeps_its_head() -> None:
    manager = CPUOffloadingManager(16, 8)
    serve(manager, 16, 32, keys(*range(100, 106))).complete()
    served = serve(manager, 16, 32, keys(*range(12)))
    assert served.refused == 0
    assert len(served.to_store) == 12
    # The others, the tail first; then its own tail, as far as its stores have ended.
    assert served.evicted == keys(105, 104, 103, 102, 101, 100, 5, 4, 7, 6)
    served.complete()
    assert manager.lookup(keys(*range(12))) == 4
    # Offered whole it is refused, and nothing leaves.
    manager = CPUOffloadingManager(16, 8)
    manager.complete_store(manager.prepare_store(keys(*range(100, 106))).block_hashes_to_store)
    assert manager.prepare_store(keys(*range(12))) is None


def test_an_offer_that_is_refused_is_made_again_with_the_next() -> None:
    # The second step finds the first one's store in flight; the third offers what both have.
    manager = CPUOffloadingManager(16, 5)
    served = serve(manager, 16, 48, keys(*range(8)))
    assert (served.refused, served.to_store) == (1, keys(*range(8)))
    assert served.evicted == keys(2, 1, 0)
    # The steps of the answer offer again what the last step of the prompt could not store.
    served = serve(CPUOffloadingManager(16, 5), 16, 48, keys(*range(6)))
    assert (served.refused, served.to_store) == (1, keys(0, 1, 2, 3, 4, 5))
    assert served.evicted == keys(2)


def test_stores_that_stay_in_flight_leave_no_room() -> None:
    served = serve(CPUOffloadingManager(16, 5), 16, 48, keys(*range(6)), ends_stores=False)
    assert (served.refused, served.to_store) == (1, keys(0, 1, 2))


def test_a_state_that_is_refused_is_not_offered_again() -> None:
    layout = GroupLayout((Group("full", 1, 16), Group("state", 1, 16)), 4096)
    chunks = GroupChunks.of(layout, 16, None, step_tokens=32)
    manager = CPUOffloadingManager(16, 3)
    served = GroupServer(chunks, manager).serve(keys(*range(4)), 65)
    assert served.offered.count([group_key(b"3", 1)]) == 1
    assert [group_key(b"2", 0), group_key(b"3", 0)] in served.offered


@pytest.mark.parametrize(
    ("length", "start", "step", "unit", "expected"),
    [
        (100, 0, 32, 16, [(1, 32), (2, 64), (3, 96), (4, 100)]),
        (100, 48, 32, 16, [(1, 80), (2, 100)]),
        (64, 64, 32, 16, []),
        (64, 0, 10, 16, [(2, 20), (4, 40), (5, 50), (7, 64)]),  # steps that complete no block
        (2**24, 0, 1, 2**24, [(2**24, 2**24)]),
    ],
)
def test_steps_that_complete_no_block_are_counted_and_left_out(
    length: int, start: int, step: int, unit: int, expected: list[tuple[int, int]]
) -> None:
    assert list(step_ends(length, start, step, unit)) == expected
