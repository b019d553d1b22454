"""The blocks that a request holds while it waits for others from a tier.

A request walks over its blocks. Those that only a tier has are promoted: they get slots of host
memory and are loaded. Without a hold, these slots could be those of its own blocks.

Rule
    From its first promotion on, the blocks that a request finds ready are pinned until it lets go.
    Its blocks that are ready further on are pinned until the walk ends. They leave for a promotion
    only if no other block may leave, the one needed last first. If only held blocks could leave,
    there is no room, and the walk ends with the blocks found.
Cost
    O(1) per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=bytes)


class Hold(Generic[Key]):
    """The blocks that one request holds.

    Parameters
    ----------
    pin, unpin : callable
        Pin and unpin blocks of host memory, all of them or, on an error, none.
    room : callable
        Returns the number of blocks for which there are slots: those free, and those of blocks that
        may leave.

    Attributes
    ----------
    keys : dict
        The blocks that are held until `let_go`, as keys.
    """

    __slots__ = ("_ahead", "_pin", "_room", "_unpin", "keys")

    def __init__(
        self,
        pin: Callable[[list[Key]], object],
        unpin: Callable[[list[Key]], object],
        room: Callable[[], int],
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._room = room
        self._ahead: dict[Key, None] = {}  # pinned until the walk ends; needed last at last
        self.keys: dict[Key, None] = {}

    def add(self, keys: Iterable[Key]) -> None:
        """Hold blocks that are ready; if an error is raised, none of them."""
        new = [key for key in dict.fromkeys(keys) if key not in self.keys]
        unpinned = [key for key in new if key not in self._ahead]
        try:
            self.keys.update(dict.fromkeys(new))
            if unpinned:
                self._pin(unpinned)
        except BaseException:
            for key in new:
                self.keys.pop(key, None)
            raise
        for key in new:
            self._ahead.pop(key, None)

    def expect(self, keys: Iterable[Key]) -> None:
        """Hold blocks that are ready further on until the walk ends, in the order of need."""
        new = dict.fromkeys(key for key in keys if key not in self.keys and key not in self._ahead)
        ahead = self._ahead | new
        self._pin(list(new))
        self._ahead = ahead

    def __contains__(self, key: object) -> bool:
        """Return whether a block is pinned and was not given up."""
        return key in self.keys or key in self._ahead

    def make_room(self, num_blocks: int) -> int:
        """Give up blocks further on as needed; return for how many of the blocks there is room."""
        while (room := self._room()) < num_blocks and self._ahead:
            last = next(reversed(self._ahead))
            self._unpin([last])
            del self._ahead[last]
        return min(room, num_blocks)

    def end_walk(self) -> None:
        """Let go of the blocks that the walk has not found."""
        if self._ahead:
            self._unpin(list(self._ahead))
            self._ahead = {}

    def let_go(self) -> None:
        """Let go of every block."""
        self.end_walk()
        if self.keys:
            self._unpin(list(self.keys))
            self.keys = {}
