"""The blocks that the rings of turns give in a search for victims, compiled; see ``_tails``.

A *tail* stands at the next block that a ring gives. Each ring has two: one goes on from its oldest
part to younger ones, the other from its youngest part to older ones; where both have come to one
part, the first alone goes on. Inside a part both go from the deepest block on.
"""

from libc.stdint cimport uint32_t

from kvoffload.policies._densities_c cimport Densities
from kvoffload.policies._returns_c cimport Returns
from kvoffload.policies._turns_c cimport Turns

cdef enum:
    NO_TAIL = -1
    # Tails of one class that are told apart where all else is equal: the rings of turns, and one.
    PLACES = 2048

cdef struct Tail:
    uint32_t part           # where it stands; 0: it gives no more
    uint32_t block
    uint32_t age            # requests since the block's last use
    uint32_t key            # of the ring
    double density
    bint is_last            # it gives nothing behind its part: the other has

ctypedef bint (*MayLeave)(void* owner, uint32_t block) noexcept
ctypedef uint32_t (*AgeOf)(void* owner, uint32_t block) noexcept

cdef struct Tails:
    Tail* items             # of a ring that from the oldest part on, then the other
    int size                # 0: no search is open, or no block is on a ring
    int least               # the tail with the least density, or NO_TAIL
    const Turns* turns
    const Returns* returns  # what tells densities; NULL: ...
    const Densities* learned    # ... these do, by class and last use
    void* owner             # of the blocks
    MayLeave may_leave
    AgeOf age_of

# Reserve room; False if there is none.
cdef bint tails_open(Tails* tails) noexcept
cdef void tails_close(Tails* tails) noexcept
# Begin a search; the members from `turns` on say of what. With `one_end` the rings have one tail.
cdef void tails_begin(Tails* tails, bint one_end) noexcept
# Let a tail go on to the next block.
cdef void tails_advance(Tails* tails, int index) noexcept
# The same in a search by density over age in units of T', and find the least.
cdef void tails_give(Tails* tails, int index) noexcept
# Return the ring of a tail's class.
cdef int ring_of_tail(const Tail* tail) noexcept


cdef inline bint is_sparser(const Tail* tail, double density, uint32_t age) noexcept nogil:
    """Return whether a tail's block leaves before the sparsest of those without a turn."""
    return tail.density < density or tail.density == density and tail.age > age
