"""The turns of sessions, and rings of the blocks that belong to them; see ``_turns_py``.

Structure
    Ids of turns and parts count from 1, and are reused. A block is a number that the owner of the
    turns has for it: the id of a node, or of a trial's entry. A *record* holds the facts on a
    block, resident or not; a part lasts while a record belongs to it, a turn while it has parts.
    The heads of the rings are indexed by key.
Cost
    O(1) per block, with the parts of a turn, one per ring, as a constant. 12 bytes per block and 72
    per part and its turn, touched when first used.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.buckets cimport NIL
from kvoffload.policies._densities_c cimport NUM_CLASSES

cdef enum:
    AGAIN = NUM_CLASSES     # ring of the blocks of class 0 that ARC's rule has in T2
    NUM_RINGS = NUM_CLASSES + 1
    NUM_HALF_OCTAVES = 64
    MOST_SOURCES = 16       # distinct ones; one more stands for all others
    NUM_KEYS = (MOST_SOURCES + 1) * NUM_RINGS * NUM_HALF_OCTAVES

# Places of the rings from the sparsest on, if densities tie.
cdef int[NUM_RINGS] PLACE_OF

cdef struct Turn:
    double begun            # in seconds, by the clock of the caller
    double said             # T, in seconds
    uint32_t first_part     # of a list; 0: none
    uint32_t following      # in the stack of turns that are not in use
    uint8_t source
    uint8_t half_octave     # of T', taken as 2 ** (half_octave / 2) seconds
    bint is_open            # it lasts without parts

cdef struct Part:
    uint32_t turn           # 0: not in use
    uint32_t following      # in the list of its turn's, or in the stack of those not in use
    uint32_t older          # on its ring
    uint32_t newer
    uint32_t first          # block, the deepest, NIL for none
    uint32_t last
    uint32_t num_blocks     # resident
    uint32_t num_records    # resident or not
    uint32_t living         # records whose ages are counted
    uint8_t ring

cdef struct Member:
    uint32_t part
    uint32_t before         # in its part, NIL for none
    uint32_t behind

cdef struct TurnRing:
    uint32_t oldest         # part; 0: the ring is empty
    uint32_t newest
    uint32_t place          # among the rings in use

cdef struct Turns:
    Member* members         # by block
    uint64_t num_members
    Part* parts             # [0] is not used, nor of `turns`
    uint64_t num_parts
    uint32_t used_parts     # that were in use at least once
    uint32_t unused_part    # a stack of those that are not any more
    Turn* turns
    uint64_t num_turns
    uint32_t used_turns
    uint32_t unused_turn
    TurnRing* rings         # by key
    uint32_t* keys          # of the rings in use, in no order
    uint32_t num_keys
    uint64_t num_on[NUM_RINGS]  # blocks by ring
    uint64_t num_blocks

# Make room for blocks and records; False, with nothing changed, if there is no memory.
cdef bint turns_ensure(Turns* turns, uint64_t num_blocks, uint64_t num_records) noexcept
cdef void turns_close(Turns* turns) noexcept
# Begin a turn, without parts; return it. It is open until `turns_settle`.
cdef uint32_t turns_begin(
    Turns* turns, double begun, double said, int source, int half_octave
) noexcept
# Close a turn: from now on it lasts while it has parts; 0 is legal.
cdef void turns_settle(Turns* turns, uint32_t turn) noexcept
# Add a record to the part of a turn on a ring; return the part.
cdef uint32_t turns_join(Turns* turns, uint32_t turn, int ring) noexcept
# Remove a record from a part; 0 is legal.
cdef void turns_leave(Turns* turns, uint32_t part) noexcept
# Add a resident block after those of its part.
cdef void turns_put(Turns* turns, uint32_t part, uint32_t block) noexcept
# Remove a resident block from its part, to which its record still belongs.
cdef void turns_take(Turns* turns, uint32_t block) noexcept
# Verify the invariants; return the broken one, or NULL.
cdef const char* turns_check(Turns* turns) noexcept


cdef inline uint32_t key_of_part(const Turns* turns, uint32_t part) noexcept nogil:
    """Return the number of the ring: by source, then class, then half octave."""
    cdef const Part* of_turn = turns.parts + part
    cdef const Turn* turn = turns.turns + of_turn.turn
    return (
        (<uint32_t>turn.source * NUM_RINGS + of_turn.ring) * NUM_HALF_OCTAVES + turn.half_octave
    )


cdef inline uint32_t turns_renew(Turns* turns, uint32_t block) noexcept:
    """Make a block the last of its part."""
    cdef uint32_t part = turns.members[block].part
    if turns.parts[part].last != block:
        turns_take(turns, block)
        turns_put(turns, part, block)
    return part
