"""The blocks that the rings of turns yield in a search for victims; see ``_turn_tails_c.pxd``."""

from libc.string cimport memset

from kvoffload._core.buckets cimport NIL
from kvoffload._core.memory cimport release, reserve
from kvoffload.policies._densities_c cimport age_bin
from kvoffload.policies._returns_c cimport part_density
from kvoffload.policies._turns_c cimport AGAIN, NUM_HALF_OCTAVES, NUM_KEYS, NUM_RINGS, PLACE_OF


cdef bint tails_open(Tails* tails) noexcept:
    memset(tails, 0, sizeof(Tails))
    tails.items = <Tail*>reserve(2 * NUM_KEYS * sizeof(Tail))
    tails.heaps[0] = <uint32_t*>reserve(4 * NUM_KEYS * sizeof(uint32_t))
    tails.heaps[1] = tails.heaps[0] + 2 * NUM_KEYS
    return tails.items != NULL and tails.heaps[0] != NULL


cdef void tails_close(Tails* tails) noexcept:
    release(tails.items, 2 * NUM_KEYS * sizeof(Tail))
    release(tails.heaps[0], 4 * NUM_KEYS * sizeof(uint32_t))
    memset(tails, 0, sizeof(Tails))


cdef uint32_t next_in_part(Tails* tails, uint32_t block) noexcept:
    """Return the first block from this one on that may leave, or NIL."""
    while block != NIL and not tails.may_leave(tails.owner, block):
        block = tails.turns.members[block].behind
    return block


cdef void measure(Tails* tails, Tail* tail) noexcept:
    cdef int ring
    tail.age = tails.age_of(tails.owner, tail.block)
    if tails.search == BY_RETURN:
        tail.density = part_density(tails.returns, tails.turns, tail.part)
    else:
        ring = ring_of_tail(tail)
        # Its next chance is the next request.
        tail.density = tails.learned.table[0 if ring == AGAIN else ring][age_bin(tail.age + 1)]


cdef void find_older(Tails* tails, uint32_t index, uint32_t part, uint32_t block) noexcept:
    """Point the tail that moves to younger parts at the first block from this one on."""
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
        if tails.heap_sizes[0]:
            remove(tails, 0, other.positions[0])


cdef void find_younger(Tails* tails, uint32_t index, uint32_t part, uint32_t block) noexcept:
    """Point the tail that moves to older parts at the first block from this one on."""
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


cdef uint32_t place_of(const Tail* tail) noexcept:
    """Return the place of a ring's tail among those of its class and of others."""
    cdef uint32_t source = tail.key // (NUM_RINGS * NUM_HALF_OCTAVES)
    cdef uint32_t half_octave = tail.key % NUM_HALF_OCTAVES
    cdef uint32_t place_of_class = PLACES * <uint32_t>PLACE_OF[ring_of_tail(tail)]
    return place_of_class + 1 + source * NUM_HALF_OCTAVES + half_octave


cdef void tails_begin(Tails* tails, Search search) noexcept:
    cdef uint32_t ring, key, part
    cdef Tail* tail
    tails.search = search
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
        if search == BY_RETURN:
            tail.place = 2 * key
            (tail + 1).place = 2 * key + 1
            if part != tail.part:
                find_younger(tails, tails.size + 1, part, tails.turns.parts[part].first)
        else:
            tail.place = place_of(tail)
        tails.size += 2
    fill_heap(tails, 0)
    fill_heap(tails, 1)


cdef void tails_give(Tails* tails, int index) noexcept:
    cdef Tail* tail = tails.items + index
    cdef uint32_t block = tails.turns.members[tail.block].behind
    cdef int heap
    if index % 2:
        find_younger(tails, <uint32_t>index, tail.part, block)
    else:
        find_older(tails, <uint32_t>index, tail.part, block)
    for heap in range(2):
        if belongs(tails, heap, tail):
            renew(tails, heap, tail.positions[heap])


# -- heaps -------------------------------------------------------------------------------------


cdef inline bint belongs(const Tails* tails, int heap, const Tail* tail) noexcept:
    """Return whether a tail belongs in a heap."""
    if tails.search == BY_LISTS:
        return (ring_of_tail(tail) == 0) == (heap == 0)
    return heap == 0 or tails.search == BY_DENSITY


cdef inline bint gives_before(
    const Tails* tails, int heap, const Tail* tail, const Tail* other
) noexcept:
    cdef bint by_density = tails.search == BY_RETURN or heap == 1 and tails.search == BY_DENSITY
    if by_density and tail.density != other.density:
        return tail.density < other.density
    if heap == 0 or tails.search == BY_LISTS:
        if tail.age != other.age:
            return tail.age > other.age
    return tail.place < other.place


cdef inline void place(Tails* tails, int heap, uint32_t position, uint32_t index) noexcept:
    tails.heaps[heap][position] = index
    tails.items[index].positions[heap] = position


cdef void sift_down(Tails* tails, int heap, uint32_t position) noexcept:
    cdef uint32_t* order = tails.heaps[heap]
    cdef uint32_t size = tails.heap_sizes[heap], child
    cdef uint32_t moving = order[position]
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        if child + 1 < size and gives_before(
            tails, heap, tails.items + order[child + 1], tails.items + order[child]
        ):
            child += 1
        if not gives_before(tails, heap, tails.items + order[child], tails.items + moving):
            break
        place(tails, heap, position, order[child])
        position = child
    place(tails, heap, position, moving)


cdef void sift_up(Tails* tails, int heap, uint32_t position) noexcept:
    cdef uint32_t* order = tails.heaps[heap]
    cdef uint32_t moving = order[position], above
    while position:
        above = (position - 1) // 2
        if not gives_before(tails, heap, tails.items + moving, tails.items + order[above]):
            break
        place(tails, heap, position, order[above])
        position = above
    place(tails, heap, position, moving)


cdef void fill_heap(Tails* tails, int heap) noexcept:
    cdef uint32_t index, size = 0
    for index in range(tails.size):
        if tails.items[index].part and belongs(tails, heap, tails.items + index):
            place(tails, heap, size, index)
            size += 1
    tails.heap_sizes[heap] = size
    index = size // 2
    while index:
        index -= 1
        sift_down(tails, heap, index)


cdef void renew(Tails* tails, int heap, uint32_t position) noexcept:
    """Move an advanced tail to its place in a heap, or remove it if it is exhausted."""
    cdef uint32_t index = tails.heaps[heap][position]
    if tails.items[index].part:
        sift_up(tails, heap, position)
        sift_down(tails, heap, tails.items[index].positions[heap])
    else:
        remove(tails, heap, position)


cdef void remove(Tails* tails, int heap, uint32_t position) noexcept:
    cdef uint32_t last
    tails.heap_sizes[heap] -= 1
    last = tails.heaps[heap][tails.heap_sizes[heap]]
    if position == tails.heap_sizes[heap]:
        return
    place(tails, heap, position, last)
    sift_up(tails, heap, position)
    sift_down(tails, heap, tails.items[last].positions[heap])
