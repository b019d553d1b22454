"""The blocks that the rings of turns give in a search for victims; see ``_turn_tails_c.pxd``."""

from libc.string cimport memset

from kvoffload._core.buckets cimport NIL
from kvoffload._core.memory cimport release, reserve
from kvoffload.policies._densities_c cimport age_bin
from kvoffload.policies._returns_c cimport part_density
from kvoffload.policies._turns_c cimport AGAIN, NUM_HALF_OCTAVES, NUM_KEYS, NUM_RINGS


cdef bint tails_open(Tails* tails) noexcept:
    memset(tails, 0, sizeof(Tails))
    tails.items = <Tail*>reserve(2 * NUM_KEYS * sizeof(Tail))
    return tails.items != NULL


cdef void tails_close(Tails* tails) noexcept:
    release(tails.items, 2 * NUM_KEYS * sizeof(Tail))
    memset(tails, 0, sizeof(Tails))


cdef int ring_of_tail(const Tail* tail) noexcept:
    return <int>(tail.key // NUM_HALF_OCTAVES % NUM_RINGS)


cdef uint32_t next_in_part(Tails* tails, uint32_t block) noexcept:
    """Return the first block from this one on that may leave, NIL if there is none."""
    while block != NIL and not tails.may_leave(tails.owner, block):
        block = tails.turns.members[block].behind
    return block


cdef void measure(Tails* tails, Tail* tail) noexcept:
    cdef int ring
    tail.age = tails.age_of(tails.owner, tail.block)
    if tails.returns != NULL:
        tail.density = part_density(tails.returns, tails.turns, tail.part)
    else:
        ring = ring_of_tail(tail)
        # Its next chance is a request on.
        tail.density = tails.learned.table[0 if ring == AGAIN else ring][age_bin(tail.age + 1)]


cdef void find_older(Tails* tails, int index, uint32_t part, uint32_t block) noexcept:
    """Let the tail that goes to younger parts stand at the first block from this one on."""
    cdef Tail* tail = tails.items + index
    cdef Tail* other = tail + 1
    block = next_in_part(tails, block)
    while block == NIL:
        part = 0 if tail.is_last else tails.turns.parts[part].newer
        if part == 0:
            break
        if part == other.part:
            block = other.block
        else:
            block = next_in_part(tails, tails.turns.parts[part].first)
    tail.part = part
    tail.block = block
    if part:
        measure(tails, tail)
    if part and part == other.part:
        tail.is_last = True
        other.part = 0


cdef void find_younger(Tails* tails, int index, uint32_t part, uint32_t block) noexcept:
    """Let the tail that goes to older parts stand at the first block from this one on."""
    cdef Tail* tail = tails.items + index
    cdef Tail* other = tail - 1
    block = next_in_part(tails, block)
    while block == NIL:
        part = tails.turns.parts[part].older
        if part == 0 or part == other.part:
            tail.part = 0
            other.is_last = True
            return
        block = next_in_part(tails, tails.turns.parts[part].first)
    tail.part = part
    tail.block = block
    measure(tails, tail)


cdef void tails_begin(Tails* tails, bint one_end) noexcept:
    cdef uint32_t ring, key, part
    cdef Tail* tail
    tails.size = 0
    for ring in range(tails.turns.num_keys):
        key = tails.turns.keys[ring]
        tail = tails.items + tails.size
        tail.key = (tail + 1).key = key
        tail.part = (tail + 1).part = 0
        tail.is_last = False
        part = tails.turns.rings[key].oldest
        find_older(tails, tails.size, part, tails.turns.parts[part].first)
        if tail.part == 0:
            continue
        part = tails.turns.rings[key].newest
        if part != tail.part and not one_end:
            find_younger(tails, tails.size + 1, part, tails.turns.parts[part].first)
        tails.size += 2
    tails.least = NO_TAIL if one_end else find_least(tails)


cdef void tails_advance(Tails* tails, int index) noexcept:
    cdef Tail* tail = tails.items + index
    cdef uint32_t block = tails.turns.members[tail.block].behind
    if index % 2:
        find_younger(tails, index, tail.part, block)
    else:
        find_older(tails, index, tail.part, block)


cdef void tails_give(Tails* tails, int index) noexcept:
    tails_advance(tails, index)
    tails.least = find_least(tails)


cdef int find_least(const Tails* tails) noexcept:
    cdef int index, least = NO_TAIL
    cdef const Tail* tail
    cdef const Tail* best = NULL
    for index in range(tails.size):
        tail = tails.items + index
        if tail.part and (
            best == NULL
            or tail.density < best.density
            or tail.density == best.density
            and (tail.age > best.age or tail.age == best.age and tail.key < best.key)
        ):
            best = tail
            least = index
    return least
