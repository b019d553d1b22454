"""The blocks that the rings of turns yield in a search for victims, compiled; see ``_tails``.

A *tail* points at the next block that a ring yields. Each ring has two: one moves from its oldest
part to younger ones, the other from its youngest part to older ones; once both reach the same part,
only the first moves on. Within a part both start at the deepest block.
"""

from libc.stdint cimport uint32_t

from kvoffload.policies._densities_c cimport Densities
from kvoffload.policies._returns_c cimport Returns
from kvoffload.policies._turns_c cimport NUM_HALF_OCTAVES, NUM_RINGS, Turns

cdef enum:
    NO_TAIL = -1
    # Number of places per class for ties: one per ring of turns, and one more.
    PLACES = 2048

# The order of a search; in both heaps the least tail leaves first.
cdef enum Search:
    BY_RETURN               # the least density over age in units of T', then the oldest
    BY_USE                  # the oldest
    BY_DENSITY              # the oldest, and in the second heap the least density by last use
    BY_LISTS                # the oldest of ring 0, and in the second heap that of all others

cdef struct Tail:
    uint32_t part           # where it points; 0: it is exhausted
    uint32_t block
    uint32_t age            # requests since the block's last use
    uint32_t key            # of the ring
    double density
    uint32_t place          # ties go to the lowest
    bint is_last            # it ends with its part: the other tail has yielded the rest
    uint32_t positions[2]   # in the heaps

ctypedef bint (*MayLeave)(void* owner, uint32_t block) noexcept
ctypedef uint32_t (*AgeOf)(void* owner, uint32_t block) noexcept

cdef struct Tails:
    Tail* items             # of each ring, that from the oldest part on, then the other
    uint32_t size           # 0: no block of a turn may leave
    Search search
    uint32_t* heaps[2]      # of tails, each with the tails of its order
    uint32_t heap_sizes[2]
    const Turns* turns
    const Returns* returns
    const Densities* learned    # by class and last use
    void* owner             # of the blocks
    MayLeave may_leave
    AgeOf age_of

# Reserve room; False if there is no memory.
cdef bint tails_open(Tails* tails) noexcept
cdef void tails_close(Tails* tails) noexcept
# Begin a search of the data in the members from `turns` on. Only BY_RETURN uses two tails per ring.
cdef void tails_begin(Tails* tails, Search search) noexcept
# Advance a tail to the next block.
cdef void tails_give(Tails* tails, int index) noexcept


cdef inline int ring_of_tail(const Tail* tail) noexcept nogil:
    """Return the ring of a tail's class."""
    return <int>(tail.key // NUM_HALF_OCTAVES % NUM_RINGS)


cdef inline int tails_first(const Tails* tails, int heap) noexcept nogil:
    """Return the tail that yields first by the order of a heap, or NO_TAIL."""
    return <int>tails.heaps[heap][0] if tails.heap_sizes[heap] else NO_TAIL


cdef inline bint is_sparser(const Tail* tail, double density, uint32_t age) noexcept nogil:
    """Return whether a tail's block leaves before the sparsest of those without a turn."""
    return tail.density < density or tail.density == density and tail.age > age
