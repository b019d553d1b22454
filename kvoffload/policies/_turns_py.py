"""The turns of sessions, and rings of the blocks that belong to them.

A *turn* is a request whose client has said when the session returns. Its blocks belong to it until
another request uses them. There is one ring per class, source and half octave of T', with the
blocks of a turn deepest first; the blocks of one turn on one ring are a *part* of the turn.

Structure
    On a ring the parts are in the order in which their first block came; the deepest blocks of the
    oldest and of the youngest part are its candidates for eviction, since densities over T' need
    not fall with age. A part without resident blocks is on no ring, but its turn lasts while a
    block, resident or ghost, belongs to it.
Cost
    O(1) per block; a search looks at two candidates of each ring that is not empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvoffload.types import BlockHash, BlockStatus

from ._densities_py import NUM_CLASSES
from ._twin_py import require

#: Ring of the blocks of class 0 that ARC's rule has in T2: immediate repeats of requests.
AGAIN = NUM_CLASSES
#: Number of distinct half octaves of seconds, from one second on.
NUM_HALF_OCTAVES = 64


@dataclass(slots=True, eq=False)
class Turn:
    """A request whose client has said when the session returns."""

    begun: float  # in seconds, by the clock of the caller
    said: float  # T, in seconds
    source: int
    half_octave: int  # of T', taken as 2 ** (half_octave / 2) seconds
    parts: dict[int, Part] = field(default_factory=dict)  # by ring

    def copy(self) -> Turn:
        """Return the same turn, without blocks."""
        return Turn(self.begun, self.said, self.source, self.half_octave)

    def part(self, ring: int) -> Part:
        """Return the part on a ring."""
        part = self.parts.get(ring)
        if part is None:
            part = self.parts[ring] = Part(self, ring)
        return part


@dataclass(slots=True, eq=False)
class Part:
    """The blocks of a turn on one ring."""

    turn: Turn
    ring: int
    living: int = 0  # blocks, resident or ghosts, whose ages are counted
    blocks: OrderedDict[BlockHash, BlockStatus] = field(default_factory=OrderedDict)  # resident

    @property
    def reuse_class(self) -> int:
        """The class of the blocks."""
        return 0 if self.ring == AGAIN else self.ring

    @property
    def key(self) -> int:
        """Number of the ring: by source, then class, then half octave."""
        turn = self.turn
        return (turn.source * (AGAIN + 1) + self.ring) * NUM_HALF_OCTAVES + turn.half_octave


class TurnRings:
    """The resident blocks of all turns, on rings."""

    __slots__ = ("_num_blocks", "rings")

    def __init__(self) -> None:
        #: Parts by key, oldest first.
        self.rings: dict[int, OrderedDict[Part, None]] = {}
        self._num_blocks = [0] * (AGAIN + 1)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return sum(self._num_blocks)

    def num_blocks(self, ring: int) -> int:
        """Return the number of blocks of a class, or of AGAIN."""
        return self._num_blocks[ring]

    def add(self, part: Part, block_hash: BlockHash, status: BlockStatus) -> None:
        """Add a block after those of its part."""
        if not part.blocks:
            self.rings.setdefault(part.key, OrderedDict())[part] = None
        part.blocks[block_hash] = status
        self._num_blocks[part.ring] += 1

    def take(self, part: Part, block_hash: BlockHash) -> BlockStatus:
        """Take a block off its part."""
        status = part.blocks.pop(block_hash)
        self._num_blocks[part.ring] -= 1
        if not part.blocks:
            ring = self.rings[part.key]
            del ring[part]
            if not ring:
                del self.rings[part.key]
        return status

    def oldest_first(self, key: int) -> Iterator[tuple[BlockHash, BlockStatus]]:
        """Yield the blocks of a ring, those of each part deepest first."""
        for part in self.rings[key]:
            yield from part.blocks.items()

    def youngest_first(self, key: int) -> Iterator[tuple[BlockHash, BlockStatus]]:
        """Yield the blocks of a ring, youngest part first, each part deepest block first."""
        for part in reversed(self.rings[key]):
            yield from part.blocks.items()

    def of_class(self, ring: int) -> Iterator[tuple[BlockHash, BlockStatus]]:
        """Yield all blocks of a class, or of AGAIN, by key."""
        for key in sorted(self.rings):
            if key // NUM_HALF_OCTAVES % (AGAIN + 1) == ring:
                yield from self.oldest_first(key)

    def clear(self) -> None:
        """Forget all blocks."""
        self.rings.clear()
        self._num_blocks = [0] * (AGAIN + 1)

    def _check(self) -> None:
        """Verify the invariants; raise AssertionError with the broken one."""
        num_blocks = [0] * (AGAIN + 1)
        for key, ring in self.rings.items():
            require(len(ring) > 0, "a ring of turns has parts")
            for part in ring:
                require(part.key == key, "a part is on the ring of its key")
                require(part.turn.parts.get(part.ring) is part, "a part is its turn's")
                require(len(part.blocks) > 0, "a part on a ring has blocks")
                num_blocks[part.ring] += len(part.blocks)
        require(num_blocks == self._num_blocks, "the blocks of turns are counted")
