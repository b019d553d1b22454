"""The turns of sessions, and rings of the blocks that belong to them; see ``_turns_c.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport extend, release, reserve

# Longer gaps first, then fewer uses; the ring AGAIN is the last and behind class 0.
PLACE_OF[:] = [0, 14, 12, 10, 8, 6, 4, 2, 15, 13, 11, 9, 7, 5, 3, 1]


cdef inline uint64_t kept(uint32_t used) noexcept:
    """Return how many entries to keep of an array in which [0] is not used."""
    return used + <uint64_t>1 if used else 0


cdef bint turns_ensure(Turns* turns, uint64_t num_blocks, uint64_t num_records) noexcept:
    # A request adds at most one turn, and one part per ring before other parts are emptied.
    cdef uint64_t most = num_records + NUM_RINGS + 2
    if turns.rings == NULL:
        turns.rings = <TurnRing*>reserve(NUM_KEYS * sizeof(TurnRing))
    if turns.keys == NULL:
        turns.keys = <uint32_t*>reserve(NUM_KEYS * sizeof(uint32_t))
    return (
        turns.rings != NULL
        and turns.keys != NULL
        and extend(
            <void**>&turns.members,
            &turns.num_members,
            num_blocks,
            sizeof(Member),
            turns.num_members,
        )
        and extend(
            <void**>&turns.parts, &turns.num_parts, most, sizeof(Part), kept(turns.used_parts)
        )
        and extend(
            <void**>&turns.turns, &turns.num_turns, most, sizeof(Turn), kept(turns.used_turns)
        )
    )


cdef void turns_close(Turns* turns) noexcept:
    release(turns.members, turns.num_members * sizeof(Member))
    release(turns.parts, turns.num_parts * sizeof(Part))
    release(turns.turns, turns.num_turns * sizeof(Turn))
    release(turns.rings, NUM_KEYS * sizeof(TurnRing))
    release(turns.keys, NUM_KEYS * sizeof(uint32_t))
    memset(turns, 0, sizeof(Turns))


cdef uint32_t turns_begin(
    Turns* turns, double begun, double said, int source, int half_octave
) noexcept:
    cdef uint32_t number = turns.unused_turn
    cdef Turn* turn
    if number:
        turns.unused_turn = turns.turns[number].following
    else:
        turns.used_turns += 1
        number = turns.used_turns
    turn = turns.turns + number
    memset(turn, 0, sizeof(Turn))
    turn.begun = begun
    turn.said = said
    turn.source = <uint8_t>source
    turn.half_octave = <uint8_t>half_octave
    turn.is_open = True
    return number


cdef void turns_settle(Turns* turns, uint32_t turn) noexcept:
    if turn:
        turns.turns[turn].is_open = False
        end_without_parts(turns, turn)


cdef void end_without_parts(Turns* turns, uint32_t turn) noexcept:
    if turns.turns[turn].first_part == 0 and not turns.turns[turn].is_open:
        turns.turns[turn].following = turns.unused_turn
        turns.unused_turn = turn


cdef uint32_t turns_join(Turns* turns, uint32_t turn, int ring) noexcept:
    cdef uint32_t number = turns.turns[turn].first_part
    cdef Part* part
    while number and turns.parts[number].ring != ring:
        number = turns.parts[number].following
    if number == 0:
        number = turns.unused_part
        if number:
            turns.unused_part = turns.parts[number].following
        else:
            turns.used_parts += 1
            number = turns.used_parts
        part = turns.parts + number
        memset(part, 0, sizeof(Part))
        part.turn = turn
        part.ring = <uint8_t>ring
        part.first = part.last = NIL
        part.following = turns.turns[turn].first_part
        turns.turns[turn].first_part = number
    turns.parts[number].num_records += 1
    return number


cdef void turns_leave(Turns* turns, uint32_t part) noexcept:
    cdef Part* left = turns.parts + part
    cdef uint32_t turn = left.turn
    cdef uint32_t* link
    if part == 0:
        return
    left.num_records -= 1
    if left.num_records:
        return
    link = &turns.turns[turn].first_part
    while link[0] != part:
        link = &turns.parts[link[0]].following
    link[0] = left.following
    left.turn = 0
    left.following = turns.unused_part
    turns.unused_part = part
    end_without_parts(turns, turn)


cdef void put_on_ring(Turns* turns, uint32_t part) noexcept:
    """Make a part the newest of its ring."""
    cdef Part* put = turns.parts + part
    cdef uint32_t key = key_of_part(turns, part)
    cdef TurnRing* ring = turns.rings + key
    put.older = ring.newest
    put.newer = 0
    if ring.newest:
        turns.parts[ring.newest].newer = part
    else:
        ring.oldest = part
        ring.place = turns.num_keys
        turns.keys[turns.num_keys] = key
        turns.num_keys += 1
    ring.newest = part


cdef void take_off_ring(Turns* turns, uint32_t part) noexcept:
    cdef Part* taken = turns.parts + part
    cdef TurnRing* ring = turns.rings + key_of_part(turns, part)
    cdef uint32_t moved
    if taken.older:
        turns.parts[taken.older].newer = taken.newer
    else:
        ring.oldest = taken.newer
    if taken.newer:
        turns.parts[taken.newer].older = taken.older
    else:
        ring.newest = taken.older
    if ring.oldest == 0:
        turns.num_keys -= 1
        moved = turns.keys[turns.num_keys]
        turns.keys[ring.place] = moved
        turns.rings[moved].place = ring.place


cdef void turns_put(Turns* turns, uint32_t part, uint32_t block) noexcept:
    cdef Part* of_turn = turns.parts + part
    cdef Member* member = turns.members + block
    if of_turn.num_blocks == 0:
        put_on_ring(turns, part)
    member.part = part
    member.before = of_turn.last
    member.behind = NIL
    if of_turn.last == NIL:
        of_turn.first = block
    else:
        turns.members[of_turn.last].behind = block
    of_turn.last = block
    of_turn.num_blocks += 1
    turns.num_on[of_turn.ring] += 1
    turns.num_blocks += 1


cdef void turns_take(Turns* turns, uint32_t block) noexcept:
    cdef Member* member = turns.members + block
    cdef Part* part = turns.parts + member.part
    if member.before == NIL:
        part.first = member.behind
    else:
        turns.members[member.before].behind = member.behind
    if member.behind == NIL:
        part.last = member.before
    else:
        turns.members[member.behind].before = member.before
    part.num_blocks -= 1
    turns.num_on[part.ring] -= 1
    turns.num_blocks -= 1
    if part.num_blocks == 0:
        take_off_ring(turns, member.part)


cdef const char* check_part(Turns* turns, uint32_t number, uint64_t* num_on) noexcept:
    cdef Part* part = turns.parts + number
    cdef uint32_t block = part.first, before = NIL, size = 0
    while block != NIL and size <= part.num_blocks:
        if turns.members[block].part != number or turns.members[block].before != before:
            return b"the blocks of a part are linked both ways"
        before = block
        block = turns.members[block].behind
        size += 1
    if size != part.num_blocks or before != part.last or size == 0:
        return b"a part on a ring has blocks"
    if part.living > part.num_records or part.num_blocks > part.num_records:
        return b"a part has its records"
    num_on[part.ring] += size
    return NULL


cdef const char* turns_check(Turns* turns) noexcept:
    cdef uint64_t num_on[NUM_RINGS]
    cdef uint64_t total = 0
    cdef uint32_t index, key, number, older, parts = 0, turn
    cdef const char* broken = NULL
    memset(num_on, 0, sizeof(num_on))
    for index in range(turns.num_keys):
        key = turns.keys[index]
        if turns.rings[key].place != index or turns.rings[key].oldest == 0:
            return b"a ring of turns has parts"
        older = 0
        number = turns.rings[key].oldest
        while number:
            if turns.parts[number].older != older or key_of_part(turns, number) != key:
                return b"a part is on the ring of its key"
            broken = check_part(turns, number, num_on)
            if broken != NULL:
                return broken
            older = number
            number = turns.parts[number].newer
        if older != turns.rings[key].newest:
            return b"a ring of turns ends at its newest part"
    for index in range(<uint32_t>NUM_RINGS):
        total += num_on[index]
        if num_on[index] != turns.num_on[index]:
            return b"the blocks of turns are counted"
    if total != turns.num_blocks:
        return b"the blocks of turns are counted"
    for number in range(1, turns.used_parts + 1):
        parts += turns.parts[number].turn != 0
        if turns.parts[number].turn and turns.parts[number].num_records == 0:
            return b"a part has a record"
    number = turns.unused_part
    while number:
        parts += 1
        number = turns.parts[number].following
    if parts != turns.used_parts:
        return b"every part is in use or not"
    parts = 0
    turn = turns.unused_turn
    while turn:
        parts += 1
        turn = turns.turns[turn].following
    for number in range(1, turns.used_turns + 1):
        turn = turns.turns[number].first_part
        parts += turn != 0
        while turn:
            if turns.parts[turn].turn != number:
                return b"a part is its turn's"
            turn = turns.parts[turn].following
    if parts != turns.used_turns:
        return b"every turn is in use or not"
    return NULL
