"""What a request holds while it waits for others from a tier."""

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload._hold import Hold

pytestmark = pytest.mark.fast

KEYS = [b"key-%d" % number for number in range(10)]


class Memory:
    """Memory for six blocks, four of them taken, and what a request holds there."""

    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(16, 6, "lru")
        self.store(KEYS[:4])
        self.hold: Hold[bytes] = Hold(
            self.manager.prepare_load, self.manager.complete_load, self.room
        )

    def store(self, keys: list[bytes]) -> list[bytes]:
        output = self.manager.prepare_store(keys)
        assert output is not None
        self.manager.complete_store(keys)
        return output.block_hashes_evicted

    def room(self) -> int:
        sizes = self.manager.stats()
        return sizes["free"] + sizes["resident"] - sizes["pinned"] - sizes["pending"]

    @property
    def pinned(self) -> int:
        return self.manager.stats()["pinned"]


def test_held_blocks_are_pinned_once_until_it_lets_go() -> None:
    memory = Memory()
    memory.hold.expect(KEYS[1:4])
    memory.hold.add([KEYS[0], KEYS[1], KEYS[1]])
    memory.hold.add(KEYS[:2])
    assert memory.pinned == 4
    assert list(memory.hold.keys) == KEYS[:2]
    memory.hold.end_walk()
    assert memory.pinned == 2
    memory.hold.let_go()
    memory.hold.let_go()
    assert memory.pinned == 0


def test_blocks_further_on_are_given_up_last_first_and_no_more_than_needed() -> None:
    memory = Memory()
    memory.hold.add(KEYS[:1])
    memory.hold.expect(KEYS[1:4])
    assert memory.hold.make_room(2) == 2
    assert memory.pinned == 4
    assert memory.hold.make_room(3) == 3
    assert memory.store(KEYS[5:8]) == KEYS[3:4]
    memory.hold.add(KEYS[5:8])
    assert memory.hold.make_room(3) == 2, "what is held does not leave"
    assert memory.pinned == 4
    memory.hold.let_go()
    assert memory.pinned == 0


def test_an_error_holds_nothing() -> None:
    memory = Memory()
    for call in (memory.hold.add, memory.hold.expect):
        with pytest.raises(KeyError):
            call([KEYS[0], KEYS[9]])
        assert memory.pinned == 0
    assert not memory.hold.keys
