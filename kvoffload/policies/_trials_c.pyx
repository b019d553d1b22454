"""Three small caches of keys alone; see ``_trials_c.pxd``.

Each serves a request as `Trial` of ``_guard_py`` does: touch, look up, store, touch. When room is
made, the blocks of the request at work are the most recent of their orders.
"""

from libc.string cimport memset

from kvoffload._core.memory cimport release, reserve
from kvoffload.policies._densities_c cimport NEARLY, SPARSEST_FIRST, STORED, age_bin, class_after

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
    # One stretch for all that is ids of entries, one for those of requests.
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
    Trials* trials, const Densities* learned, uint32_t now, uint32_t request, uint32_t* found
) noexcept:
    cdef uint32_t index
    found[LRU] = serve_lru(trials, request)
    found[HIT_DENSITY] = serve_density(trials, learned, now, request)
    found[ARC] = serve_arc(trials, request)
    for index in range(trials.batch_size):
        trials.entries[trials.batch[index]].flags &= <uint8_t>(~IN_BATCH & 0xFF)
        leave_unknown(trials, trials.batch[index])
    trials.batch_size = 0


cdef uint32_t serve_lru(Trials* trials, uint32_t request) noexcept:
    """Serve the request by LRU: both touches, with the room made between them, at once."""
    cdef Entry* entries = trials.entries
    cdef Order* order = &trials.lru
    cdef uint32_t found = 0, size = trials.batch_size, num_missing = 0, index
    cdef uint32_t num_fixed = trials.storing[LRU].size
    cdef uint16_t entry_id
    cdef bint all_ready = True, has_room
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
    has_room = num_missing + num_fixed <= trials.capacity
    entry_id = order.oldest
    while has_room and order.size + num_missing > trials.capacity:
        entry_id = leave_lru(trials, entry_id)
    for index in range(size):
        entry_id = trials.batch[size - 1 - index]
        if entries[entry_id].in_lru:
            renew(entries, order, LRU, entry_id)
        elif has_room:
            entries[entry_id].in_lru = 1
            append(entries, order, LRU, entry_id)
            begin_store(trials, LRU, entry_id, request)
    return found


cdef inline uint16_t leave_lru(Trials* trials, uint16_t entry_id) noexcept:
    """Let a block go if it may; return the one that was used next."""
    cdef Entry* entry = trials.entries + entry_id
    cdef uint16_t newer = entry.links[LRU].newer
    if not entry.flags & (IN_BATCH | PENDING_LRU):
        take_out(trials.entries, &trials.lru, LRU, entry_id)
        entry.in_lru = 0
        leave_unknown(trials, entry_id)
    return newer


# -- published ARC -----------------------------------------------------------------------------


cdef uint32_t serve_arc(Trials* trials, uint32_t request) noexcept:
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
    if num_missing == 0 or num_missing + num_fixed > trials.capacity:
        return found
    replace(trials, num_missing)
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


cdef void replace(Trials* trials, uint32_t num_missing) noexcept:
    """Make room, for which enough blocks may leave."""
    cdef Entry* entries = trials.entries
    cdef Order* lists = trials.arc
    cdef uint32_t t1_size = lists[T1].size
    cdef uint32_t count = lists[T1].size + lists[T2].size + num_missing
    cdef uint16_t once = may_leave_arc(trials, lists[T1].oldest)
    cdef uint16_t again = may_leave_arc(trials, lists[T2].oldest)
    cdef uint16_t entry_id
    cdef bint seen_once
    while count > trials.capacity:
        seen_once = once != 0 and (again == 0 or <double>t1_size > trials.target)
        if seen_once:
            entry_id = once
            once = may_leave_arc(trials, entries[entry_id].links[ARC].newer)
        else:
            entry_id = again
            again = may_leave_arc(trials, entries[entry_id].links[ARC].newer)
        take_out(entries, &lists[T1 if seen_once else T2], ARC, entry_id)
        entries[entry_id].arc_list = B1 if seen_once else B2
        append(entries, &lists[B1 if seen_once else B2], ARC, entry_id)
        # The block that takes its place enters T1.
        t1_size += not seen_once
        count -= 1
    trim_ghosts(trials)


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
    Trials* trials, const Densities* learned, uint32_t now, uint32_t request
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
    admitted = make_room(trials, learned, now, num_missing)
    for index in range(admitted):
        entry_id = trials.missing[index]
        entry = entries + entry_id
        if entry.kind == 0:
            entry.kind = 1
            entry.last = now
        else:
            leave_clock(trials, entry)
        entry.flags |= DENSE
        append(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
        begin_store(trials, HIT_DENSITY, entry_id, request)
    trials.num_dense += admitted
    for index in range(size):
        entry_id = trials.batch[size - 1 - index]
        entry = entries + entry_id
        if entry.kind == 0:  # its ghost made room for another of the request
            remember(trials, entry_id, 0, now)
        elif entry.flags & DENSE:
            renew(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
    return found


cdef void touch_density(Trials* trials, uint32_t now) noexcept:
    cdef Entry* entries = trials.entries
    cdef Entry* entry
    cdef uint32_t index, age, least_age = 0
    cdef int use_class = NONE, reuse_class
    cdef uint16_t entry_id
    for index in range(trials.batch_size):
        entry_id = trials.batch[trials.batch_size - 1 - index]
        entry = entries + entry_id
        if entry.kind == 0:
            reuse_class = 0 if use_class == NONE else class_after(least_age, use_class)
            remember(trials, entry_id, reuse_class, now)
            continue
        if entry.last == now:  # by the request before, for the same
            if entry.flags & DENSE:
                renew(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
            continue
        # It was a use of all before it, too: this record stands in for those that are lost.
        age = now - entry.last
        if use_class == NONE or age <= least_age:
            least_age = age
            use_class = entry.kind - 1
        reuse_class = class_after(least_age, use_class)
        if entry.flags & PENDING_DENSE:
            renew(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
            entry.last = now
        elif entry.flags & DENSE:
            take_out(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, entry_id)
            append(entries, &trials.rings[reuse_class], HIT_DENSITY, entry_id)
            entry.kind = <uint8_t>(reuse_class + 1)
            entry.last = now
        elif entry.kind > 1:
            entry.kind = <uint8_t>(reuse_class + 1)
            entry.last = now
            entry.flags |= PASSED_OVER
        else:
            leave_clock(trials, entry)
            remember(trials, entry_id, reuse_class, now)


cdef void remember(Trials* trials, uint16_t entry_id, int reuse_class, uint32_t last) noexcept:
    """Make a ghost, in the place of the next one to be forgotten."""
    cdef Entry* entries = trials.entries
    cdef Entry* entry = entries + entry_id
    cdef TrialClock* clock = &trials.clocks[reuse_class > 0]
    cdef uint32_t hand
    cdef uint16_t oldest
    if clock.size == 0:
        entry.kind = 0
        leave_unknown(trials, entry_id)
        return
    while True:
        hand = clock.start + clock.hand
        clock.hand = 0 if clock.hand + 1 == clock.size else clock.hand + 1
        oldest = trials.ghosts[hand]
        if oldest == 0:
            break
        if not entries[oldest].flags & PASSED_OVER:
            entries[oldest].kind = 0
            leave_unknown(trials, oldest)
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
    Trials* trials, const Densities* learned, uint32_t now, uint32_t num_missing
) noexcept:
    """Evict for the missing blocks; return how many of them to store."""
    cdef Entry* entries = trials.entries
    cdef Entry* entry
    cdef uint16_t candidates[NUM_CLASSES]
    cdef double densities[NUM_CLASSES]
    cdef uint32_t admitted = min(num_missing, trials.capacity - trials.num_dense)
    cdef uint32_t num_victims = 0, victim
    cdef int index, ring, oldest, least
    cdef uint8_t kind
    if admitted == num_missing:
        return admitted
    for index in range(NUM_CLASSES):
        candidates[index] = trials.rings[index].oldest
        if candidates[index]:
            densities[index] = advance(trials, learned, now, index, &candidates[index])
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
        if least == NONE:
            break
        ring = least if densities[oldest] > NEARLY * densities[least] else oldest
        # What continues a prefix is no denser: the first to fail decides for the rest.
        kind = entries[trials.missing[admitted]].kind
        if trials.declines and densities[ring] >= learned.table[kind - 1 if kind else 0][STORED]:
            break
        trials.victims[num_victims] = candidates[ring]
        num_victims += 1
        admitted += 1
        candidates[ring] = entries[candidates[ring]].links[HIT_DENSITY].newer
        if candidates[ring]:
            densities[ring] = advance(trials, learned, now, ring, &candidates[ring])
    for victim in range(num_victims):
        entry = entries + trials.victims[victim]
        take_out(entries, &trials.rings[entry.kind - 1], HIT_DENSITY, trials.victims[victim])
        entry.flags &= <uint8_t>(~DENSE & 0xFF)
        remember(trials, trials.victims[victim], entry.kind - 1, entry.last)
    trials.num_dense -= num_victims
    return admitted


cdef inline double advance(
    Trials* trials, const Densities* learned, uint32_t now, int ring, uint16_t* candidate
) noexcept:
    """Pass over what is being stored; return the density of the candidate.

    There is none if the request has come to its blocks.
    """
    cdef Entry* entry = trials.entries + candidate[0]
    while candidate[0] and entry.flags & (IN_BATCH | PENDING_DENSE) == PENDING_DENSE:
        candidate[0] = entry.links[HIT_DENSITY].newer
        entry = trials.entries + candidate[0]
    if candidate[0] == 0 or entry.flags & IN_BATCH:
        candidate[0] = 0
        return 0.0
    # Its next chance is a request on.
    return learned.table[ring][age_bin(now - entry.last + 1)]


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
            num_entries += 1
            other = entry.following
    for index in range(NUM_TRIALS):
        if pending[index] != trials.storing[index].size:
            return b"a trial's queue holds what it is storing"
        if known[index] != sizes[index]:
            return b"a trial's blocks are those of its orders"
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
