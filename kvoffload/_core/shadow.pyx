"""The shadow of a sample; see ``shadow.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport release, reserve


cdef bint shadow_open(
    Shadow* shadow, int num_quarters, int num_sizes, const uint32_t* limits
) noexcept:
    cdef uint64_t chains = 1
    cdef uint64_t entries = (<uint64_t>limits[num_sizes - 1] + 1) * <uint64_t>num_quarters
    cdef uint64_t index
    cdef int quarter, size
    memset(shadow, 0, sizeof(Shadow))
    while chains < entries:
        chains *= 2
    if entries >= NIL:
        return False
    shadow.entries = <Entry*>reserve(entries * sizeof(Entry))
    shadow.chains = <uint32_t*>reserve(chains * sizeof(uint32_t))
    shadow.num_entries = <uint32_t>entries
    shadow.num_chains = chains
    if shadow.entries == NULL or shadow.chains == NULL:
        shadow_close(shadow)
        return False
    for index in range(chains):
        shadow.chains[index] = NIL
    shadow.free_head = NIL
    shadow.num_sizes = num_sizes
    shadow.num_quarters = num_quarters
    for quarter in range(num_quarters):
        shadow.lists[quarter].head = NIL
        shadow.lists[quarter].markers[num_sizes] = NIL
        for size in range(num_sizes):
            shadow.lists[quarter].markers[size] = NIL
            shadow.lists[quarter].rooms[size] = limits[size] - (limits[size - 1] if size else 0)
    return True


cdef void shadow_close(Shadow* shadow) noexcept:
    release(shadow.entries, shadow.num_entries * sizeof(Entry))
    release(shadow.chains, shadow.num_chains * sizeof(uint32_t))
    memset(shadow, 0, sizeof(Shadow))


cdef inline void unlink(Shadow* shadow, ShadowList* line, uint32_t entry_id, Entry* entry) noexcept:
    """Take an entry off its list; if it was the last of its segment, move the marker back."""
    line.counts[entry.segment] -= 1
    if line.markers[entry.segment] == entry_id:
        line.markers[entry.segment] = entry.prev if line.counts[entry.segment] else NIL
    if entry.prev == NIL:
        line.head = entry.next
    else:
        shadow.entries[entry.prev].next = entry.next
    if entry.next != NIL:
        shadow.entries[entry.next].prev = entry.prev


cdef void forget(Shadow* shadow, ShadowList* line, uint32_t entry_id) noexcept:
    """Drop the last entry of a list."""
    cdef Entry* entry = shadow.entries + entry_id
    cdef uint32_t* link = shadow.chains + (entry.fingerprint & (shadow.num_chains - 1))
    while link[0] != entry_id:
        link = &shadow.entries[link[0]].chain
    link[0] = entry.chain
    unlink(shadow, line, entry_id, entry)
    entry.next = shadow.free_head
    shadow.free_head = entry_id


cdef void forget_before_reset(Shadow* shadow, ShadowList* line) noexcept:
    """Drop the last entry of a list that has no room for one more."""
    cdef uint64_t listed = line.counts[shadow.num_sizes], room = 0
    cdef int size
    for size in range(shadow.num_sizes):
        listed += line.counts[size]
        room += line.rooms[size]
    if listed >= room:
        forget(shadow, line, line.markers[shadow.num_sizes])


cdef uint32_t new_entry(Shadow* shadow, uint64_t fingerprint) noexcept:
    """Take an entry; one more is reserved than the lists have room for."""
    cdef uint32_t entry_id = shadow.free_head
    cdef Entry* entry
    cdef uint32_t* chain = shadow.chains + (fingerprint & (shadow.num_chains - 1))
    if entry_id != NIL:
        shadow.free_head = shadow.entries[entry_id].next
    else:
        entry_id = shadow.num_used
        shadow.num_used += 1
    entry = shadow.entries + entry_id
    memset(entry, 0, sizeof(Entry))
    entry.fingerprint = fingerprint
    entry.chain = chain[0]
    chain[0] = entry_id
    return entry_id


cdef void shadow_use(Shadow* shadow, uint64_t fingerprint, uint32_t now) noexcept:
    cdef ShadowList* line = &shadow.lists[shadow_quarter(shadow, fingerprint)]
    cdef Entry* entry = shadow_find(shadow, fingerprint)
    cdef uint32_t entry_id, moved
    cdef int size
    if entry != NULL:
        entry_id = <uint32_t>(entry - shadow.entries)
        entry.last_use = now
        entry.shown = True
        if line.head == entry_id and entry.segment == 0:
            return
        unlink(shadow, line, entry_id, entry)
    else:
        if line.counts[shadow.num_sizes]:
            forget_before_reset(shadow, line)
        entry_id = new_entry(shadow, fingerprint)
        entry = shadow.entries + entry_id
        entry.last_use = now
        entry.shown = True
    entry.prev = NIL
    entry.next = line.head
    if line.head != NIL:
        shadow.entries[line.head].prev = entry_id
    line.head = entry_id
    entry.segment = 0
    line.counts[0] += 1
    if line.counts[0] == 1:
        line.markers[0] = entry_id
    for size in range(shadow.num_sizes):
        if line.counts[size] <= line.rooms[size]:
            return
        moved = line.markers[size]
        if size + 1 == shadow.num_sizes:
            forget(shadow, line, moved)
            return
        line.counts[size] -= 1
        line.markers[size] = shadow.entries[moved].prev if line.counts[size] else NIL
        shadow.entries[moved].segment = <uint8_t>(size + 1)
        line.counts[size + 1] += 1
        if line.counts[size + 1] == 1:
            line.markers[size + 1] = moved


cdef void shadow_reset(Shadow* shadow) noexcept:
    cdef ShadowList* line
    cdef uint32_t entry_id
    cdef int quarter, size, end = shadow.num_sizes
    for quarter in range(shadow.num_quarters):
        line = &shadow.lists[quarter]
        entry_id = line.head
        while entry_id != NIL:
            shadow.entries[entry_id].segment = <uint8_t>end
            line.markers[end] = entry_id
            entry_id = shadow.entries[entry_id].next
        for size in range(end):
            line.counts[end] += line.counts[size]
            line.counts[size] = 0
            line.markers[size] = NIL


cdef const char* shadow_check(Shadow* shadow) noexcept:
    """Verify the invariants; return the broken one, or NULL."""
    cdef uint64_t listed = 0, chained = 0, chain_index, held, room
    cdef uint32_t entry_id, last, count
    cdef int quarter, size
    cdef ShadowList* line
    for quarter in range(shadow.num_quarters):
        line = &shadow.lists[quarter]
        entry_id = line.head
        last = NIL
        held = room = 0
        for size in range(shadow.num_sizes + 1):
            count = 0
            if size < shadow.num_sizes:
                room += line.rooms[size]
                if line.counts[size] > line.rooms[size]:
                    return b"no segment holds more than its room"
            while entry_id != NIL and shadow.entries[entry_id].segment == size:
                if shadow.entries[entry_id].prev != last:
                    return b"a list runs both ways"
                if shadow_quarter(shadow, shadow.entries[entry_id].fingerprint) != quarter:
                    return b"a list has the entries of its quarter"
                last = entry_id
                entry_id = shadow.entries[entry_id].next
                count += 1
            if count != line.counts[size]:
                return b"the entries of each segment are counted"
            if line.markers[size] != (last if count else NIL):
                return b"a marker is the last entry of its segment"
            held += count
        listed += held
        if held > room:
            return b"no list holds more than its room"
        if entry_id != NIL:
            return b"segments follow each other"
    for chain_index in range(shadow.num_chains):
        entry_id = shadow.chains[chain_index]
        while entry_id != NIL:
            if (shadow.entries[entry_id].fingerprint & (shadow.num_chains - 1)) != chain_index:
                return b"an entry is in its own chain"
            chained += 1
            entry_id = shadow.entries[entry_id].chain
    if listed != chained:
        return b"every entry is on a list and in a chain"
    return NULL
