"""Three small caches of keys only; see ``_trials_c.pxd``.

Each serves a request as `Trial` of ``_guard_py`` does: touch, look up, store, touch. When room is
made, the blocks of the request at work are the most recent of their orders.
"""

from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from kvoffload._core.memory cimport release, reserve
from kvoffload.policies._densities_c cimport NEARLY, SPARSEST_FIRST, STORED, age_bin, class_after
from kvoffload.policies._returns_c cimport stored_part_density
from kvoffload.policies._turn_tails_c cimport (
    BY_RETURN,
    NO_TAIL,
    is_sparser,
    tails_begin,
    tails_first,
    tails_give,
)
from kvoffload.policies._turns_c cimport (
    turns_check,
    turns_join,
    turns_leave,
    turns_put,
    turns_renew,
    turns_take,
)

cdef enum:
    IN_BATCH = 1        # of the request at work
    DENSE = 2           # resident in the cache of hit density
    PASSED_OVER = 4     # a ghost of hit density that passes the hand once more
    COUNTED = 8         # a ghost of ARC whose return was counted
    PENDING = 16        # LRU is storing it; shifted by its id, another cache is

cdef enum:
    T1 = 1
    T2 = 2
    B1 = 3
    B2 = 4

cdef enum:
    PENDING_LRU = PENDING << LRU
    PENDING_DENSE = PENDING << HIT_DENSITY
    PENDING_ARC = PENDING << ARC

cdef enum:
    NONE = -1


cdef uint64_t room_of(uint32_t capacity, uint64_t num_ghosts) noexcept:
    """Return how many entries can be in use, the one that is not used included."""
    return <uint64_t>capacity * (1 + 1 + 2 + SAMPLE_CAPACITIES) + num_ghosts + 1


cdef bint trials_open(
    Trials* trials, uint32_t capacity, uint32_t never_reused, uint32_t reused
) noexcept:
    cdef uint64_t num_ghosts = <uint64_t>never_reused + reused
    cdef int trial
    memset(trials, 0, sizeof(Trials))
    trials.capacity = capacity
    trials.declines = True
    trials.clocks[0].size = never_reused
    trials.clocks[1].start = never_reused
    trials.clocks[1].size = reused
    trials.num_reserved = room_of(capacity, num_ghosts)
    trials.num_buckets = 16
    while trials.num_buckets < 8 * <uint64_t>capacity:
        trials.num_buckets *= 2
    trials.entries = <Entry*>reserve(trials.num_reserved * sizeof(Entry))
    # One allocation for all ids of entries, one for those of requests.
    trials.buckets = <uint16_t*>reserve(num_entry_ids(trials) * sizeof(uint16_t))
    trials.storing[0].requests = <uint32_t*>reserve(
        NUM_TRIALS * <uint64_t>capacity * sizeof(uint32_t)
    )
    if trials.entries == NULL or trials.buckets == NULL or trials.storing[0].requests == NULL:
        trials_close(trials)
        return False
    trials.ghosts = trials.buckets + trials.num_buckets
    trials.batch = trials.ghosts + num_ghosts
    trials.missing = trials.batch + SAMPLE_CAPACITIES * capacity
    trials.victims = trials.missing + SAMPLE_CAPACITIES * capacity
    for trial in range(NUM_TRIALS):
        trials.storing[trial].entry_ids = trials.victims + (1 + trial) * <uint64_t>capacity
        trials.storing[trial].requests = trials.storing[0].requests + trial * <uint64_t>capacity
    return True


cdef uint64_t num_entry_ids(const Trials* trials) noexcept:
    return (
        trials.num_buckets
        + trials.clocks[0].size
        + trials.clocks[1].size
        + <uint64_t>trials.capacity * (2 * SAMPLE_CAPACITIES + 1 + NUM_TRIALS)
    )


cdef void trials_close(Trials* trials) noexcept:
    release(trials.entries, trials.num_reserved * sizeof(Entry))
    release(trials.buckets, num_entry_ids(trials) * sizeof(uint16_t))
    release(trials.storing[0].requests, NUM_TRIALS * <uint64_t>trials.capacity * sizeof(uint32_t))
    release(trials.extras, trials.num_reserved * sizeof(Extra))
    memset(trials, 0, sizeof(Trials))


cdef void trials_clear(Trials* trials) noexcept:
    cdef int index
    memset(trials.buckets, 0, trials.num_buckets * sizeof(uint16_t))
    memset(trials.ghosts, 0, (trials.clocks[0].size + trials.clocks[1].size) * sizeof(uint16_t))
    trials.num_used = 0
    trials.unused = 0
    trials.batch_size = 0
    memset(&trials.lru, 0, sizeof(Order))
    memset(trials.arc, 0, sizeof(trials.arc))
    trials.target = 0.0
    memset(trials.rings, 0, sizeof(trials.rings))
    trials.num_dense = 0
    for index in range(2):
        trials.clocks[index].hand = 0
    for index in range(NUM_TRIALS):
        trials.storing[index].oldest = trials.storing[index].size = 0
    if trials.extras != NULL:
        release(trials.extras, trials.num_reserved * sizeof(Extra))
        trials.extras = NULL
    memset(trials.released, 0, sizeof(trials.released))
    trials.turns = NULL


# -- entries -----------------------------------------------------------------------------------


cdef void trials_add(Trials* trials, uint64_t hashed) noexcept:
    cdef uint16_t* bucket = trials.buckets + (hashed & (trials.num_buckets - 1))
    cdef uint16_t entry_id = bucket[0]
    cdef Entry* entry
    if trials.batch_size == SAMPLE_CAPACITIES * trials.capacity:
        return
    while entry_id and trials.entries[entry_id].hashed != hashed:
        entry_id = trials.entries[entry_id].following
    if entry_id:
        entry = trials.entries + entry_id
        if entry.flags & IN_BATCH:
            return  # a repeat
    else:
        entry_id = trials.unused
        if entry_id:
            trials.unused = trials.entries[entry_id].following
        else:
            trials.num_used += 1
            entry_id = <uint16_t>trials.num_used
        entry = trials.entries + entry_id
        memset(entry, 0, sizeof(Entry))
        entry.hashed = hashed
        entry.following = bucket[0]
        bucket[0] = entry_id
    entry.flags |= IN_BATCH
    trials.batch[trials.batch_size] = entry_id
    trials.batch_size += 1


cdef inline void leave_unknown(Trials* trials, uint16_t entry_id) noexcept:
    """Give up an entry if no cache knows its key."""
    cdef Entry* entry = trials.entries + entry_id
    cdef uint16_t* link
    if entry.in_lru or entry.arc_list or entry.kind or entry.flags & IN_BATCH:
        return
    link = trials.buckets + (entry.hashed & (trials.num_buckets - 1))
    while link[0] != entry_id:
        link = &trials.entries[link[0]].following
    link[0] = entry.following
    entry.following = trials.unused
    trials.unused = entry_id


cdef inline void append(Entry* entries, Order* order, int trial, uint16_t entry_id) noexcept:
    """Make an entry the most recent of an order."""
    cdef Link* link = &entries[entry_id].links[trial]
    link.newer = 0
    link.older = order.newest
    if order.newest:
        entries[order.newest].links[trial].newer = entry_id
    else:
        order.oldest = entry_id
    order.newest = entry_id
    order.size += 1


cdef inline void take_out(Entry* entries, Order* order, int trial, uint16_t entry_id) noexcept:
    cdef Link* link = &entries[entry_id].links[trial]
    if link.older:
        entries[link.older].links[trial].newer = link.newer
    else:
        order.oldest = link.newer
    if link.newer:
        entries[link.newer].links[trial].older = link.older
    else:
        order.newest = link.older
    order.size -= 1


cdef inline void append_release(Trials* trials, int trial, uint16_t entry_id) noexcept:
    """Release a block of a cache after those released before."""
    cdef Order* order = &trials.released[trial]
    cdef Extra* extra = trials.extras + entry_id
    if extra.released & 1 << trial:
        return
    extra.released |= <uint8_t>(1 << trial)
    extra.links[trial].newer = 0
    extra.links[trial].older = order.newest
    if order.newest:
        trials.extras[order.newest].links[trial].newer = entry_id
    else:
        order.oldest = entry_id
    order.newest = entry_id
    order.size += 1


cdef inline bint is_released(const Trials* trials, int trial, uint16_t entry_id) noexcept:
    return trials.released[trial].size != 0 and trials.extras[entry_id].released & 1 << trial != 0


cdef inline void end_release(Trials* trials, int trial, uint16_t entry_id) noexcept:
    """Withdraw the release of a block of a cache."""
    cdef Order* order = &trials.released[trial]
    cdef Link* link
    if not is_released(trials, trial, entry_id):
        return
    trials.extras[entry_id].released &= <uint8_t>(~(1 << trial) & 0xFF)
    link = &trials.extras[entry_id].links[trial]
    if link.older:
        trials.extras[link.older].links[trial].newer = link.newer
    else:
        order.oldest = link.newer
    if link.newer:
        trials.extras[link.newer].links[trial].older = link.older
    else:
        order.newest = link.older
    order.size -= 1


cdef inline uint16_t next_release(Trials* trials, int trial, uint16_t entry_id) noexcept:
    """Return the released block from this one on that may leave, or 0."""
    while entry_id and trials.entries[entry_id].flags & (PENDING << trial):
        entry_id = trials.extras[entry_id].links[trial].newer
    return entry_id


cdef inline void renew(Entry* entries, Order* order, int trial, uint16_t entry_id) noexcept:
    if order.newest != entry_id:
        take_out(entries, order, trial, entry_id)
        append(entries, order, trial, entry_id)


# -- a request ---------------------------------------------------------------------------------


cdef void trials_complete(Trials* trials, uint32_t request, uint32_t lag) noexcept:
    cdef Storing* storing
    cdef int trial
    for trial in range(NUM_TRIALS):
        storing = &trials.storing[trial]
        while storing.size and request - storing.requests[storing.oldest] >= lag:
            trials.entries[storing.entry_ids[storing.oldest]].flags &= <uint8_t>(
                ~(PENDING << trial) & 0xFF
            )
            storing.oldest += 1
            if storing.oldest == trials.capacity:
                storing.oldest = 0
            storing.size -= 1


cdef inline void begin_store(
    Trials* trials, int trial, uint16_t entry_id, uint32_t request
) noexcept:
    """Mark a block that a cache holds as being stored."""
    cdef Storing* storing = &trials.storing[trial]
    cdef uint32_t position = storing.oldest + storing.size
    if position >= trials.capacity:
        position -= trials.capacity
    storing.entry_ids[position] = entry_id
    storing.requests[position] = request
    storing.size += 1
    trials.entries[entry_id].flags |= <uint8_t>(PENDING << trial)


cdef void trials_serve(
    Trials* trials,
    const Densities* learned,
    uint32_t now,
    uint32_t request,
    bint ends,
    uint32_t* found,
) noexcept:
    take_back(trials)
    found[LRU] = serve_lru(trials, request, ends)
    found[HIT_DENSITY] = serve_density(trials, learned, now, request, ends)
    found[ARC] = serve_arc(trials, request, ends)
    end_batch(trials)


cdef uint32_t trials_serve_density(
    Trials* trials, const Densities* learned, uint32_t now, uint32_t request, bint ends
) noexcept:
    cdef uint32_t found
    take_back(trials)
    found = serve_density(trials, learned, now, request, ends)
    trials_end_batch(trials)
    return found


cdef void take_back(Trials* trials) noexcept:
    """Withdraw the releases of the blocks of the request at work."""
    cdef uint32_t index
    cdef int trial
    for trial in range(NUM_TRIALS):
        if trials.released[trial].size:
            for index in range(trials.batch_size):
                end_release(trials, trial, trials.batch[index])


cdef void trials_end_batch(Trials* trials) noexcept:
    end_batch(trials)


cdef inline void end_batch(Trials* trials) noexcept:
    cdef uint32_t index
    for index in range(trials.batch_size):
        trials.entries[trials.batch[index]].flags &= <uint8_t>(~IN_BATCH & 0xFF)
        leave_unknown(trials, trials.batch[index])
    trials.batch_size = 0


cdef bint trials_ensure_release(Trials* trials) noexcept:
    if trials.extras == NULL:
        trials.extras = <Extra*>reserve(trials.num_reserved * sizeof(Extra))
    return trials.extras != NULL


cdef void trials_release(Trials* trials) noexcept:
    cdef Entry* entry
    cdef uint32_t index
    cdef uint16_t entry_id
    for index in range(trials.batch_size):
        entry_id = trials.batch[trials.batch_size - 1 - index]
        entry = trials.entries + entry_id
        if entry.in_lru:
            append_release(trials, LRU, entry_id)
        if entry.flags & DENSE:
            append_release(trials, HIT_DENSITY, entry_id)
        if entry.arc_list == T1 or entry.arc_list == T2:
            append_release(trials, ARC, entry_id)
    trials_end_batch(trials)


cdef uint32_t serve_lru(Trials* trials, uint32_t request, bint ends) noexcept:
    """Serve the request by LRU: both touches, and making room between them, in one pass."""
    cdef Entry* entries = trials.entries
    cdef Order* order = &trials.lru
    cdef uint32_t found = 0, size = trials.batch_size, num_missing = 0, index
    cdef uint32_t num_fixed = trials.storing[LRU].size, admitted
    cdef uint16_t entry_id
    cdef bint all_ready = True
    for index in range(size):
        entry_id = trials.batch[index]
        if not entries[entry_id].in_lru:
            num_missing += 1
            all_ready = False
        elif entries[entry_id].flags & PENDING_LRU:
            all_ready = False
        else:
            num_fixed += 1
            found += all_ready
    # Else too few may leave for the whole request.
    if ends or num_missing + num_fixed <= trials.capacity:
        admitted = num_missing
        entry_id = next_release(trials, LRU, trials.released[LRU].oldest)
        while entry_id and order.size + num_missing > trials.capacity:
            entry_id = leave_first_lru(trials, entry_id)
        if ends:
            admitted = min(num_missing, trials.capacity - order.size)
        entry_id = order.oldest
        while order.size + admitted > trials.capacity:
            entry_id = leave_lru(trials, entry_id)
    else:
        admitted = 0
    for index in range(size):
        entry_id = trials.batch[size - 1 - index]
        if entries[entry_id].in_lru:
            renew(entries, order, LRU, entry_id)
            continue
        num_missing -= 1
        if num_missing < admitted:
            entries[entry_id].in_lru = 1
            append(entries, order, LRU, entry_id)
            begin_store(trials, LRU, entry_id, request)
    return found


cdef inline uint16_t leave_first_lru(Trials* trials, uint16_t entry_id) noexcept:
    """Evict a released block; return the next that may leave."""
    cdef uint16_t following = next_release(trials, LRU, trials.extras[entry_id].links[LRU].newer)
    end_release(trials, LRU, entry_id)
    take_out(trials.entries, &trials.lru, LRU, entry_id)
    trials.entries[entry_id].in_lru = 0
    leave_unknown(trials, entry_id)
    return following


cdef inline uint16_t leave_lru(Trials* trials, uint16_t entry_id) noexcept:
    """Evict a block if it may leave; return the next more recent one."""
    cdef Entry* entry = trials.entries + entry_id
    cdef uint16_t newer = entry.links[LRU].newer
    if not entry.flags & (IN_BATCH | PENDING_LRU):
        take_out(trials.entries, &trials.lru, LRU, entry_id)
        entry.in_lru = 0
        leave_unknown(trials, entry_id)
    return newer


# -- published ARC -----------------------------------------------------------------------------


cdef uint32_t serve_arc(Trials* trials, uint32_t request, bint ends) noexcept:
    cdef uint32_t found = 0, size = trials.batch_size, num_missing = 0, index
    cdef uint32_t num_fixed = trials.storing[ARC].size
    cdef Entry* entry
    cdef bint all_ready = True
    touch_arc(trials)
    for index in range(size):
        entry = trials.entries + trials.batch[index]
        if entry.arc_list != T1 and entry.arc_list != T2:
            trials.missing[num_missing] = trials.batch[index]
            num_missing += 1
            all_ready = False
        elif entry.flags & PENDING_ARC:
            all_ready = False
        else:
            num_fixed += 1
            found += all_ready
    if num_missing == 0 or not ends and num_missing + num_fixed > trials.capacity:
        return found
    num_missing = replace(trials, num_missing, ends)
    for index in range(num_missing):
        insert_arc(trials, trials.missing[index])
        begin_store(trials, ARC, trials.missing[index], request)
    touch_arc(trials)
    return found


cdef void touch_arc(Trials* trials) noexcept:
    cdef Entry* entries = trials.entries
    cdef Entry* entry
    cdef uint32_t index
    cdef uint16_t entry_id
    cdef bint later_is_in_t2 = False
    for index in range(trials.batch_size):
        entry_id = trials.batch[trials.batch_size - 1 - index]
        entry = entries + entry_id
        if entry.arc_list == T1 and (later_is_in_t2 or not entry.flags & PENDING_ARC):
            take_out(entries, &trials.arc[T1], ARC, entry_id)
            entry.arc_list = T2
            append(entries, &trials.arc[T2], ARC, entry_id)
            later_is_in_t2 = True
        elif entry.arc_list:
            if entry.arc_list == T2:
                later_is_in_t2 = True
            elif entry.arc_list != T1:
                adapt(trials, entry)
                entry.flags |= COUNTED
            renew(entries, &trials.arc[entry.arc_list], ARC, entry_id)


cdef void adapt(Trials* trials, const Entry* ghost) noexcept:
    """Move the target for a ghost that returns, once."""
    cdef double share
    if ghost.flags & COUNTED:
        return
    if ghost.arc_list == B1:
        share = <double>trials.arc[B2].size / <double>trials.arc[B1].size
        trials.target = min(trials.target + max(1.0, share), <double>trials.capacity)
    else:
        share = <double>trials.arc[B1].size / <double>trials.arc[B2].size
        trials.target = max(trials.target - max(1.0, share), 0.0)


cdef uint32_t replace(Trials* trials, uint32_t num_missing, bint ends) noexcept:
    """Make room; enough blocks may leave. Return how many missing blocks it is for.

    That is all of them, unless the session `ends`.
    """
    cdef Entry* entries = trials.entries
    cdef Order* lists = trials.arc
    cdef uint32_t t1_size = lists[T1].size
    cdef uint32_t count = lists[T1].size + lists[T2].size + num_missing
    cdef uint16_t once, again, following
    cdef uint16_t entry_id = next_release(trials, ARC, trials.released[ARC].oldest)
    cdef bint seen_once
    while entry_id and count > trials.capacity:
        seen_once = entries[entry_id].arc_list == T1
        following = next_release(trials, ARC, trials.extras[entry_id].links[ARC].newer)
        end_release(trials, ARC, entry_id)
        become_ghost(trials, entry_id, seen_once)
        # The block that replaces it enters T1.
        t1_size += not seen_once
        count -= 1
        entry_id = following
    if ends:
        num_missing -= min(num_missing, max(count, trials.capacity) - trials.capacity)
        trim_ghosts(trials)
        return num_missing
    once = may_leave_arc(trials, lists[T1].oldest)
    again = may_leave_arc(trials, lists[T2].oldest)
    while count > trials.capacity:
        seen_once = once != 0 and (again == 0 or <double>t1_size > trials.target)
        if seen_once:
            entry_id = once
            once = may_leave_arc(trials, entries[entry_id].links[ARC].newer)
        else:
            entry_id = again
            again = may_leave_arc(trials, entries[entry_id].links[ARC].newer)
        become_ghost(trials, entry_id, seen_once)
        # The block that replaces it enters T1.
        t1_size += not seen_once
        count -= 1
    trim_ghosts(trials)
    return num_missing


cdef inline void become_ghost(Trials* trials, uint16_t entry_id, bint seen_once) noexcept:
    take_out(trials.entries, &trials.arc[T1 if seen_once else T2], ARC, entry_id)
    trials.entries[entry_id].arc_list = B1 if seen_once else B2
    append(trials.entries, &trials.arc[B1 if seen_once else B2], ARC, entry_id)


cdef inline uint16_t may_leave_arc(const Trials* trials, uint16_t entry_id) noexcept:
    """Return the next block from `entry_id` on that may leave its list, or 0."""
    while entry_id and trials.entries[entry_id].flags & (IN_BATCH | PENDING_ARC):
        entry_id = trials.entries[entry_id].links[ARC].newer
    return entry_id


cdef void insert_arc(Trials* trials, uint16_t entry_id) noexcept:
    cdef Entry* entry = trials.entries + entry_id
    if entry.arc_list:
        take_out(trials.entries, &trials.arc[entry.arc_list], ARC, entry_id)
        entry.arc_list = T2
    else:
        entry.arc_list = T1
    entry.flags &= <uint8_t>(~COUNTED & 0xFF)
    append(trials.entries, &trials.arc[entry.arc_list], ARC, entry_id)
    trim_ghosts(trials)


cdef void trim_ghosts(Trials* trials) noexcept:
    """Drop the oldest ghosts that the paper's bounds leave no room for (case IV)."""
    cdef Order* lists = trials.arc
    cdef uint32_t resident = lists[T1].size + lists[T2].size
    while lists[B1].size and lists[T1].size + lists[B1].size > trials.capacity:
        drop_ghost(trials, B1)
    while lists[B2].size and resident + lists[B1].size + lists[B2].size > 2 * trials.capacity:
        drop_ghost(trials, B2)


cdef void drop_ghost(Trials* trials, int ghosts) noexcept:
    cdef uint16_t entry_id = trials.arc[ghosts].oldest
    take_out(trials.entries, &trials.arc[ghosts], ARC, entry_id)
    trials.entries[entry_id].arc_list = 0
    trials.entries[entry_id].flags &= <uint8_t>(~COUNTED & 0xFF)
    leave_unknown(trials, entry_id)


# -- hit density -------------------------------------------------------------------------------


cdef uint32_t serve_density(
    Trials* trials, const Densities* learned, uint32_t now, uint32_t request, bint ends
) noexcept:
    cdef Entry* entries = trials.entries
    cdef Entry* entry
    cdef uint32_t found = 0, size = trials.batch_size, num_missing = 0, admitted, index
    cdef uint16_t entry_id
    cdef bint all_ready = True
    touch_density(trials, now)
    for index in range(size):
        entry_id = trials.batch[index]
        if not entries[entry_id].flags & DENSE:
            trials.missing[num_missing] = entry_id
            num_missing += 1
            all_ready = False
        elif entries[entry_id].flags & PENDING_DENSE:
            all_ready = False
        else:
            found += all_ready
    if num_missing == 0:
        return found
    admitted = make_room(trials, learned, now, num_missing, ends)
    for index in range(admitted):
        entry_id = trials.missing[index]
        entry = entries + entry_id
        if entry.kind == 0:
            entry.kind = 1
            entry.last = now
        else:
            leave_clock(trials, entry)
        entry.flags |= DENSE
        put_dense(trials, entry_id)
        begin_store(trials, HIT_DENSITY, entry_id, request)
    trials.num_dense += admitted
    for index in range(size):
        entry_id = trials.batch[size - 1 - index]
        entry = entries + entry_id
        if entry.kind == 0:  # its ghost was replaced by another of the request
            join_turn(trials, entry_id, 0)
            remember(trials, entry_id, 0, now)
        elif entry.flags & DENSE:
            renew_dense(trials, entry_id)
    return found


# -- its turns


cdef inline uint32_t part_of(const Trials* trials, uint16_t entry_id) noexcept:
    """Return the part that a block belongs to, 0 for none."""
    return trials.turns.members[entry_id].part if trials.turns != NULL else 0


cdef inline void put_dense(Trials* trials, uint16_t entry_id) noexcept:
    """Put a block on the ring of its class, or of its turn."""
    cdef uint32_t part = part_of(trials, entry_id)
    if part:
        turns_put(trials.turns, part, entry_id)
    else:
        append(
            trials.entries,
            &trials.rings[trials.entries[entry_id].kind - 1],
            HIT_DENSITY,
            entry_id,
        )


cdef inline void take_dense(Trials* trials, uint16_t entry_id) noexcept:
    """Remove a block from its ring."""
    if part_of(trials, entry_id):
        turns_take(trials.turns, entry_id)
    else:
        take_out(
            trials.entries,
            &trials.rings[trials.entries[entry_id].kind - 1],
            HIT_DENSITY,
            entry_id,
        )


cdef inline void renew_dense(Trials* trials, uint16_t entry_id) noexcept:
    if part_of(trials, entry_id):
        turns_renew(trials.turns, entry_id)
    else:
        renew(
            trials.entries,
            &trials.rings[trials.entries[entry_id].kind - 1],
            HIT_DENSITY,
            entry_id,
        )


cdef inline void leave_turn(Trials* trials, uint16_t entry_id) noexcept:
    """Remove a block that is on no ring from its turn."""
    cdef uint32_t part = trials.turns.members[entry_id].part
    if part:
        trials.turns.members[entry_id].part = 0
        turns_leave(trials.turns, part)


cdef inline void join_turn(Trials* trials, uint16_t entry_id, int reuse_class) noexcept:
    """Assign a block that is on no ring to the turn of the request at work, or to none."""
    if trials.turns == NULL:
        return
    leave_turn(trials, entry_id)
    if trials.turn and not trials.extras[entry_id].is_shared:
        trials.turns.members[entry_id].part = turns_join(trials.turns, trials.turn, reuse_class)


cdef inline void forget_dense(Trials* trials, uint16_t entry_id) noexcept:
    """Forget a ghost."""
    trials.entries[entry_id].kind = 0
    if trials.turns != NULL:
        trials.extras[entry_id].is_shared = False
        leave_turn(trials, entry_id)
    leave_unknown(trials, entry_id)


cdef uint16_t deepest_of(const Trials* trials) noexcept:
    """Return the last block of the request at work that hit density knows, or 0."""
    cdef uint32_t index = trials.batch_size
    while index:
        index -= 1
        if trials.entries[trials.batch[index]].kind:
            return trials.batch[index]
    return 0


cdef void trials_join(Trials* trials) noexcept:
    cdef Entry* entries = trials.entries
    cdef uint32_t index
    cdef uint16_t entry_id, deepest = deepest_of(trials)
    for index in range(trials.batch_size):
        entry_id = trials.batch[trials.batch_size - 1 - index]
        if (
            entries[entry_id].kind == 0
            or <int32_t>(entries[entry_id].last - entries[deepest].last) > 0
            or trials.extras[entry_id].is_shared
        ):
            continue
        if entries[entry_id].flags & DENSE:
            take_dense(trials, entry_id)
        join_turn(trials, entry_id, entries[entry_id].kind - 1)
        if entries[entry_id].flags & DENSE:
            put_dense(trials, entry_id)
    trials_end_batch(trials)


cdef void trials_heed(
    Trials* trials, Turns* turns, const Returns* returns, Tails* tails
) noexcept:
    trials.turns = turns
    trials.returns = returns
    trials.tails = tails


cdef void trials_copy_density(Trials* trials, const Trials* others) noexcept:
    cdef uint64_t num_ghosts = <uint64_t>others.clocks[0].size + others.clocks[1].size
    cdef uint64_t bucket
    cdef Storing* storing = &trials.storing[HIT_DENSITY]
    cdef uint16_t entry_id, following
    trials.declines = others.declines
    trials.num_used = others.num_used
    trials.unused = others.unused
    memcpy(trials.entries, others.entries, (1 + others.num_used) * sizeof(Entry))
    memcpy(trials.buckets, others.buckets, others.num_buckets * sizeof(uint16_t))
    memcpy(trials.ghosts, others.ghosts, num_ghosts * sizeof(uint16_t))
    memcpy(trials.rings, others.rings, sizeof(others.rings))
    memcpy(trials.clocks, others.clocks, sizeof(others.clocks))
    trials.num_dense = others.num_dense
    memcpy(
        storing.entry_ids,
        others.storing[HIT_DENSITY].entry_ids,
        others.capacity * sizeof(uint16_t),
    )
    memcpy(
        storing.requests,
        others.storing[HIT_DENSITY].requests,
        others.capacity * sizeof(uint32_t),
    )
    storing.oldest = others.storing[HIT_DENSITY].oldest
    storing.size = others.storing[HIT_DENSITY].size
    memcpy(trials.extras, others.extras, (1 + others.num_used) * sizeof(Extra))
    trials.released[HIT_DENSITY] = others.released[HIT_DENSITY]
    for bucket in range(trials.num_buckets):
        entry_id = trials.buckets[bucket]
        while entry_id:
            following = trials.entries[entry_id].following
            keep_dense(trials, entry_id)
            entry_id = following


cdef void keep_dense(Trials* trials, uint16_t entry_id) noexcept:
    """Keep a key only for hit density."""
    cdef Entry* entry = trials.entries + entry_id
    entry.in_lru = entry.arc_list = 0
    entry.flags &= DENSE | PASSED_OVER | PENDING_DENSE
    trials.extras[entry_id].released &= 1 << HIT_DENSITY
    leave_unknown(trials, entry_id)


cdef void touch_density(Trials* trials, uint32_t now) noexcept:
    cdef Entry* entries = trials.entries
    cdef Entry* entry
    cdef uint32_t index, age, least_age = 0, latest_age = 0
    cdef int use_class = NONE, reuse_class
    cdef uint16_t entry_id
    if trials.turns != NULL:
        entry_id = deepest_of(trials)
        latest_age = now - entries[entry_id].last if entry_id else 0
    for index in range(trials.batch_size):
        entry_id = trials.batch[trials.batch_size - 1 - index]
        entry = entries + entry_id
        if entry.kind == 0:
            reuse_class = 0 if use_class == NONE else class_after(least_age, use_class)
            join_turn(trials, entry_id, reuse_class)
            remember(trials, entry_id, reuse_class, now)
            continue
        if entry.last == now:  # by the request before, for the same
            if entry.flags & DENSE:
                renew_dense(trials, entry_id)
            continue
        # The use covers all blocks before it, too: this record replaces lost ones.
        age = now - entry.last
        if age < latest_age:
            trials.extras[entry_id].is_shared = True
        if use_class == NONE or age <= least_age:
            least_age = age
            use_class = entry.kind - 1
        reuse_class = class_after(least_age, use_class)
        entry.last = now
        if entry.flags & PENDING_DENSE:
            if trials.turns == NULL:
                renew_dense(trials, entry_id)
                continue
            take_dense(trials, entry_id)
            join_turn(trials, entry_id, entry.kind - 1)
            put_dense(trials, entry_id)
        elif entry.flags & DENSE:
            if trials.turns == NULL:
                take_out(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
                append(entries, &trials.rings[reuse_class], HIT_DENSITY, entry_id)
                entry.kind = <uint8_t>(reuse_class + 1)
                continue
            take_dense(trials, entry_id)
            join_turn(trials, entry_id, reuse_class)
            entry.kind = <uint8_t>(reuse_class + 1)
            put_dense(trials, entry_id)
        elif entry.kind > 1:
            join_turn(trials, entry_id, reuse_class)
            entry.kind = <uint8_t>(reuse_class + 1)
            entry.flags |= PASSED_OVER
        else:
            leave_clock(trials, entry)
            join_turn(trials, entry_id, reuse_class)
            remember(trials, entry_id, reuse_class, now)


cdef void remember(Trials* trials, uint16_t entry_id, int reuse_class, uint32_t last) noexcept:
    """Make a ghost, in place of the next one to forget."""
    cdef Entry* entries = trials.entries
    cdef Entry* entry = entries + entry_id
    cdef TrialClock* clock = &trials.clocks[reuse_class > 0]
    cdef uint32_t hand
    cdef uint16_t oldest
    if clock.size == 0:
        forget_dense(trials, entry_id)
        return
    while True:
        hand = clock.start + clock.hand
        clock.hand = 0 if clock.hand + 1 == clock.size else clock.hand + 1
        oldest = trials.ghosts[hand]
        if oldest == 0:
            break
        if not entries[oldest].flags & PASSED_OVER:
            forget_dense(trials, oldest)
            break
        entries[oldest].flags &= <uint8_t>(~PASSED_OVER & 0xFF)
    trials.ghosts[hand] = entry_id
    entry.links[HIT_DENSITY].older = <uint16_t>hand
    entry.kind = <uint8_t>(reuse_class + 1)
    entry.last = last


cdef inline void leave_clock(Trials* trials, Entry* entry) noexcept:
    """Take a ghost out of its clock."""
    trials.ghosts[entry.links[HIT_DENSITY].older] = 0
    entry.flags &= <uint8_t>(~PASSED_OVER & 0xFF)


cdef uint32_t make_room(
    Trials* trials, const Densities* learned, uint32_t now, uint32_t num_missing, bint ends
) noexcept:
    """Evict for the missing blocks; return how many of them to store."""
    cdef uint32_t admitted = min(num_missing, trials.capacity - trials.num_dense)
    cdef uint32_t num_victims = 0, victim
    cdef uint16_t entry_id = trials.released[HIT_DENSITY].oldest
    if admitted == num_missing:
        return admitted
    entry_id = next_release(trials, HIT_DENSITY, entry_id)
    while entry_id and admitted < num_missing:
        trials.victims[num_victims] = entry_id
        num_victims += 1
        admitted += 1
        entry_id = next_release(
            trials, HIT_DENSITY, trials.extras[entry_id].links[HIT_DENSITY].newer
        )
    if admitted < num_missing and not ends:
        choose_dense(trials, learned, now, num_missing, admitted, &num_victims)
    # As many as are free, and one for each victim.
    admitted = min(num_missing, trials.capacity - trials.num_dense + num_victims)
    for victim in range(num_victims):
        let_go(trials, trials.victims[victim])
    return admitted


cdef void let_go(Trials* trials, uint16_t entry_id) noexcept:
    cdef Entry* entry = trials.entries + entry_id
    end_release(trials, HIT_DENSITY, entry_id)
    take_dense(trials, entry_id)
    entry.flags &= <uint8_t>(~DENSE & 0xFF)
    trials.num_dense -= 1
    remember(trials, entry_id, entry.kind - 1, entry.last)


cdef void choose_dense(
    Trials* trials,
    const Densities* learned,
    uint32_t now,
    uint32_t num_missing,
    uint32_t admitted,
    uint32_t* num_victims,
) noexcept:
    """Choose victims for the missing blocks from one on, while those are denser."""
    cdef const Entry* entries = trials.entries
    cdef uint16_t candidates[NUM_CLASSES]
    cdef double densities[NUM_CLASSES]
    cdef double density
    cdef bint has_tails = trials.turns != NULL and trials.turns.num_blocks != 0
    cdef int index, ring, oldest, least, turn_tail
    cdef uint16_t entry_id
    for index in range(NUM_CLASSES):
        candidates[index] = trials.rings[index].oldest
        if candidates[index]:
            densities[index] = advance(trials, learned, now, index, &candidates[index])
    if has_tails:
        begin_tails(trials, now)
    while admitted < num_missing:
        oldest = least = NONE
        for index in range(NUM_CLASSES):
            ring = SPARSEST_FIRST[index]
            if candidates[ring] == 0:
                continue
            if least == NONE or densities[ring] < densities[least]:
                least = ring
            if oldest == NONE or (
                now - entries[candidates[ring]].last > now - entries[candidates[oldest]].last
            ):
                oldest = ring
        turn_tail = tails_first(trials.tails, 0) if has_tails else NO_TAIL
        if turn_tail != NO_TAIL and least != NONE and not is_sparser(
            &trials.tails.items[turn_tail], densities[least], now - entries[candidates[least]].last
        ):
            turn_tail = NO_TAIL
        if turn_tail != NO_TAIL:
            entry_id = <uint16_t>trials.tails.items[turn_tail].block
            density = trials.tails.items[turn_tail].density
        elif least == NONE:
            break
        else:
            ring = least if densities[oldest] > NEARLY * densities[least] else oldest
            entry_id = candidates[ring]
            density = densities[ring]
        # A continuation is no denser than its prefix: the first to fail decides.
        if trials.declines and density >= stored_density(
            trials, learned, trials.missing[admitted]
        ):
            break
        trials.victims[num_victims[0]] = entry_id
        num_victims[0] += 1
        admitted += 1
        if turn_tail != NO_TAIL:
            tails_give(trials.tails, turn_tail)
            continue
        candidates[ring] = trials.entries[entry_id].links[HIT_DENSITY].newer
        if candidates[ring]:
            densities[ring] = advance(trials, learned, now, ring, &candidates[ring])


cdef inline double stored_density(
    const Trials* trials, const Densities* learned, uint16_t entry_id
) noexcept:
    """Return the density of a block that is stored now."""
    cdef uint8_t kind = trials.entries[entry_id].kind
    cdef uint32_t part = part_of(trials, entry_id)
    if part:
        return stored_part_density(trials.returns, trials.turns, part)
    return learned.table[kind - 1 if kind else 0][STORED]


cdef inline double advance(
    Trials* trials, const Densities* learned, uint32_t now, int ring, uint16_t* candidate
) noexcept:
    """Skip blocks being stored or already leaving; return the density of the candidate.

    No candidate is left once the request's own blocks are reached.
    """
    cdef Entry* entry = trials.entries + candidate[0]
    while candidate[0] and not entry.flags & IN_BATCH and (
        entry.flags & PENDING_DENSE or is_released(trials, HIT_DENSITY, candidate[0])
    ):
        candidate[0] = entry.links[HIT_DENSITY].newer
        entry = trials.entries + candidate[0]
    if candidate[0] == 0 or entry.flags & IN_BATCH:
        candidate[0] = 0
        return 0.0
    # Its next chance is the next request.
    return learned.table[ring][age_bin(now - entry.last + 1)]


cdef bint may_leave_dense(void* owner, uint32_t block) noexcept:
    cdef const Trials* trials = <const Trials*>owner
    return not trials.entries[block].flags & (IN_BATCH | PENDING_DENSE) and not is_released(
        trials, HIT_DENSITY, <uint16_t>block
    )


cdef uint32_t age_of_block(void* owner, uint32_t block) noexcept:
    cdef const Trials* trials = <const Trials*>owner
    return trials.now - trials.entries[block].last


cdef void begin_tails(Trials* trials, uint32_t now) noexcept:
    """Begin the search among the blocks of turns."""
    trials.now = now
    trials.tails.turns = trials.turns
    trials.tails.returns = trials.returns
    trials.tails.owner = trials
    trials.tails.may_leave = may_leave_dense
    trials.tails.age_of = age_of_block
    tails_begin(trials.tails, BY_RETURN)


# -- for the tests -----------------------------------------------------------------------------


cdef const char* check_order(Trials* trials, Order* order, int trial, uint32_t* total) noexcept:
    cdef uint16_t entry_id = order.oldest, older = 0
    cdef uint32_t size = 0
    while entry_id:
        if trials.entries[entry_id].links[trial].older != older or size > order.size:
            return b"a trial's order is linked both ways"
        older = entry_id
        entry_id = trials.entries[entry_id].links[trial].newer
        size += 1
    if size != order.size or order.newest != older:
        return b"a trial's order has its length"
    total[0] += size
    return NULL


cdef const char* trials_check(Trials* trials) noexcept:
    cdef const char* broken
    cdef uint32_t sizes[NUM_TRIALS]
    cdef uint32_t known[NUM_TRIALS]
    cdef uint32_t pending[NUM_TRIALS]
    cdef uint32_t arc_ghosts = 0, ghosts = 0, remembered = 0, num_entries = 0, position
    cdef uint32_t of_turns = 0, released = 0
    cdef uint64_t bucket
    cdef uint16_t other
    cdef Entry* entry
    cdef int index
    memset(sizes, 0, sizeof(sizes))
    memset(known, 0, sizeof(known))
    memset(pending, 0, sizeof(pending))
    broken = check_order(trials, &trials.lru, LRU, &sizes[LRU])
    for index in range(NUM_CLASSES):
        if broken == NULL:
            broken = check_order(trials, &trials.rings[index], HIT_DENSITY, &sizes[HIT_DENSITY])
    for index in range(T1, B2 + 1):
        if broken == NULL:
            broken = check_order(
                trials, &trials.arc[index], ARC, &sizes[ARC] if index <= T2 else &arc_ghosts
            )
    if broken == NULL and trials.turns != NULL:
        sizes[HIT_DENSITY] += <uint32_t>trials.turns.num_blocks
        broken = turns_check(trials.turns)
    if broken != NULL:
        return broken
    for index in range(NUM_TRIALS):
        if sizes[index] > trials.capacity:
            return b"each trial is within its capacity"
    if sizes[HIT_DENSITY] != trials.num_dense:
        return b"the blocks of the hit-density trial are counted"
    if arc_ghosts + sizes[ARC] > 2 * trials.capacity:
        return b"ARC's lists are within twice the capacity"
    if not 0.0 <= trials.target <= <double>trials.capacity:
        return b"the trial's target is within its capacity"
    for bucket in range(trials.num_buckets):
        other = trials.buckets[bucket]
        while other:
            entry = trials.entries + other
            if entry.hashed & (trials.num_buckets - 1) != bucket:
                return b"an entry is in the bucket of its key"
            if entry.flags & IN_BATCH or not (entry.in_lru or entry.arc_list or entry.kind):
                return b"an entry is known to a trial"
            for index in range(NUM_TRIALS):
                pending[index] += entry.flags & PENDING << index != 0
            if (
                entry.flags & PENDING_LRU and not entry.in_lru
                or entry.flags & PENDING_DENSE and not entry.flags & DENSE
                or entry.flags & PENDING_ARC and not T1 <= entry.arc_list <= T2
            ):
                return b"a trial holds what it is storing"
            known[LRU] += entry.in_lru
            known[ARC] += entry.arc_list == T1 or entry.arc_list == T2
            if entry.flags & DENSE:
                known[HIT_DENSITY] += 1
            elif entry.kind:
                ghosts += 1
                if trials.ghosts[entry.links[HIT_DENSITY].older] != other:
                    return b"a ghost of a trial stands in its place"
            if part_of(trials, other):
                of_turns += 1
                if trials.turns.parts[part_of(trials, other)].ring != entry.kind - 1:
                    return b"a block of a trial is of its part's class"
            if trials.extras != NULL:
                for index in range(NUM_TRIALS):
                    released += trials.extras[other].released >> index & 1
                if trials.extras[other].released & ~(
                    (entry.in_lru != 0) << LRU
                    | (entry.flags & DENSE != 0) << HIT_DENSITY
                    | (T1 <= entry.arc_list <= T2) << ARC
                ):
                    return b"a trial holds what leaves first"
            num_entries += 1
            other = entry.following
    for index in range(NUM_TRIALS):
        if pending[index] != trials.storing[index].size:
            return b"a trial's queue holds what it is storing"
        if known[index] != sizes[index]:
            return b"a trial's blocks are those of its orders"
    for index in range(NUM_TRIALS):
        released -= trials.released[index].size
    if released:
        return b"what leaves first is counted"
    if trials.turns != NULL:
        for position in range(1, trials.turns.used_parts + 1):
            if trials.turns.parts[position].turn:
                of_turns -= trials.turns.parts[position].num_records
    if of_turns:
        return b"a trial's blocks of turns are counted"
    for position in range(trials.clocks[0].size + trials.clocks[1].size):
        remembered += trials.ghosts[position] != 0
    if remembered != ghosts:
        return b"a trial's clocks hold its ghosts and nothing else"
    other = trials.unused
    while other:
        num_entries += 1
        other = trials.entries[other].following
    if num_entries != trials.num_used or trials.num_used >= trials.num_reserved:
        return b"every entry is in use or not"
    return NULL
