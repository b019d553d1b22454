"""Observation of a compiled manager: the shadow of a sample, and the open transfers.

Structure
    Blocks that hit have nodes with a SAMPLED flag; a key without a node is hashed. Here the list
    and its markers are those of ``_core/shadow``, and the open transfers form chains by their first
    block id. See ``_watch_py`` for the Python twin, the invariants and the source.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from libc.math cimport NAN, isnan
from libc.string cimport memcpy, memset

from kvoffload._core.batch cimport item_key, item_length
from kvoffload._core.gc cimport PyGC_Disable, PyGC_Enable
from kvoffload._core.items cimport first_bad
from kvoffload._core.memory cimport discard, grow, resize
from kvoffload._core.shadow cimport (
    MOST_SIZES,
    shadow_approach,
    shadow_check,
    shadow_close,
    shadow_find,
    shadow_first,
    shadow_near,
    shadow_open,
    shadow_reach,
    shadow_reset,
    shadow_use,
)
from kvoffload._core.table cimport (
    IS_SHARED,
    NIL,
    RESIDENT,
    SAMPLED,
    hash_key,
    hash_node,
    index_find,
    kvo_prefetch,
    node_at,
    own_id,
    sample_of,
    table_new_epoch,
)

from kvoffload.managers._watching import OTHERS


cdef extern from *:
    """
    #include <time.h>
    /* Some milliseconds coarse, where there is such a clock: it is read at every call. */
    #ifdef CLOCK_MONOTONIC_COARSE
    #define KVO_CLOCK CLOCK_MONOTONIC_COARSE
    #else
    #define KVO_CLOCK CLOCK_MONOTONIC
    #endif
    static inline int64_t kvo_monotonic_ms(void) {
        struct timespec now;
        clock_gettime(KVO_CLOCK, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    }
    /* Seconds on the clock of Python's time.monotonic. */
    static inline double kvo_monotonic(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    }
    static inline int kvo_exponent(uint32_t value) { return 31 - __builtin_clz(value); }
    """
    int64_t kvo_monotonic_ms() noexcept nogil
    double kvo_monotonic() noexcept nogil
    int kvo_exponent(uint32_t value) noexcept nogil

cdef enum:
    MOST_OPEN = 4096
    MOST_OPEN_BLOCKS = 1 << 18
    LAG_STEPS = 16
    NUM_CHAINS = 256


cdef inline int age_bin(uint32_t age) noexcept nogil:
    """Return the bin of an age in ms: exact below 8, then eight bins for each doubling."""
    cdef int exponent
    if age < 8:
        return <int>age
    exponent = kvo_exponent(age)
    return (exponent - 2) * 8 + <int>((age >> (exponent - 3)) & 7)


cdef bint has_id(const Transfer* transfer, int64_t block_id) noexcept nogil:
    """Return whether a block is of a transfer."""
    cdef uint32_t at
    for at in range(transfer.size):
        if transfer.block_ids[at] == block_id:
            return True
    return False


cdef list as_list(const uint64_t* values, int size):
    return [values[index] for index in range(size)]


# Without tp_clear: a manager that is cleared with it may still be called. The watch is cleared.
@cython.no_gc_clear
cdef class WatchCore:
    """The observer of one manager."""

    def __cinit__(self, plan, watch):
        cdef uint32_t limits[MOST_SIZES]
        cdef int size
        cdef Py_ssize_t index
        memset(&self.shadow, 0, sizeof(Shadow))
        memset(&self.tally, 0, sizeof(WatchCounts))
        self.watch = watch
        self.lag = -1.0
        self.num_quarters = plan.quarters
        self.num_sizes = len(plan.limits)
        if not 0 < self.num_sizes <= MOST_SIZES or self.num_quarters not in (1, 2, 4):
            raise ValueError(
                f"plan must have 1 ... {MOST_SIZES} sizes and 1, 2 or 4 quarters, "
                f"got {self.num_sizes} and {self.num_quarters}"
            )
        for size in range(self.num_sizes):
            limits[size] = plan.limits[size]
            self.lengths[size] = plan.lengths[size]
        self.sample_below = plan.sample_below
        self.policy_below = plan.policy_below
        self.keeps_below = self.policy_below if plan.keeps_keys else 0
        self.secret = plan.secret
        self.clock = plan.clock
        self.source_numbers = {}
        self.moment = NAN
        self.latest = NAN
        self.told = []
        self.keys = [[] for _ in range(self.num_quarters)]
        self.start = kvo_monotonic_ms() if self.clock is None else self.clock()
        self.present = self.start
        self.free_transfer = NIL
        self.oldest = NIL
        self.newest = NIL
        for index in range(NUM_CHAINS):
            self.chains[index] = NIL
        if not shadow_open(&self.shadow, self.num_quarters, self.num_sizes, limits):
            raise MemoryError()

    def __dealloc__(self):
        cdef uint32_t index
        shadow_close(&self.shadow)
        for index in range(self.num_transfers):
            discard(self.transfers[index].block_ids)
        discard(self.transfers)
        discard(self.spare_ids)
        discard(self.uses)
        discard(self.requests)

    def __reduce__(self):
        raise TypeError("cannot pickle a watch: it looks at a manager")

    cdef int attach(self, CompiledPolicy policy) except -1:
        cdef uint32_t node_id
        cdef Node* node
        cdef Table* table = policy.table
        if self.secret is not None and table.num_keys == 0:
            if len(self.secret) != sizeof(table.secret):
                raise ValueError(f"secret must be 64 bytes, got {len(self.secret)}")
            memcpy(table.secret, PyBytes_AS_STRING(self.secret), sizeof(table.secret))
        table.sample_below = self.sample_below
        for node_id in range(table.num_used):
            node = node_at(table, node_id)
            node.flags &= <uint8_t>(~SAMPLED & 0xFF)
            if node.key_length and sample_of(hash_node(table, node)) < self.sample_below:
                node.flags |= SAMPLED
        self.policy = policy
        self.storage = policy.storage
        self.table = table
        return 0

    cdef int tick(self) except -1:
        """Read the clock of a user, whose code may not run while a manager is at work."""
        if self.clock is not None:
            try:
                self.present = self.clock()
            except Exception:
                pass
        return 0

    cdef int begin_lookup(self) except -1:
        """Hand over the collected requests if there are enough, and read the clock."""
        if self.due:
            self.watch._drain()
        return self.tick()

    # -- calls of a manager, after each change ------------------------------------------------

    cdef void c_looked_up(self, Batch* batch, Py_ssize_t num_hits) noexcept:
        """Judge the sampled blocks of a request, then use them, last first."""
        cdef Table* table = self.table
        cdef Py_ssize_t index, num_sampled, use_index, num_uses = 0
        cdef uint64_t hashed
        cdef Node* node
        cdef uint32_t node_id, below = self.sample_below
        cdef uint64_t now
        cdef int size
        self.tally.requests += 1
        self.tally.asked += <uint64_t>batch.size
        self.tally.missed += <uint64_t>(batch.size - num_hits)
        # The lookup has found the node of the first miss, too.
        if num_hits < batch.size and batch.node_ids[num_hits] != NIL:
            node = node_at(table, batch.node_ids[num_hits])
            self.tally.met_pending += node.flags & RESIDENT and node.block.ref_cnt < 0
        for size in range(self.num_sizes):
            self.tally.long_requests[size] += <uint64_t>batch.size > self.lengths[size]
        if not self.ensure_uses(batch.size):
            self.forget_told()
            return
        for index in range(num_hits):
            node_id = batch.node_ids[index]
            node = node_at(table, node_id)
            if not node.flags & SAMPLED:
                continue
            hashed = hash_node(table, node)
            self.uses[num_uses] = hashed
            self.use_scratch[num_uses] = node_id
            num_uses += 1
            shadow_approach(&self.shadow, hashed)
            if sample_of(hashed) < self.keeps_below:
                self.collect_key(sample_of(hashed), batch.items[index], ASKED)
        num_sampled = num_uses
        for index in range(num_hits, batch.size):
            # Elements that the lookup did not check may not be keys.
            if first_bad(batch.items, index, index + 1) == index:
                break
            hashed = hash_key(table, item_key(batch, index), item_length(batch, index))
            if sample_of(hashed) < below:
                self.uses[num_uses] = hashed
                self.use_scratch[num_uses] = index_find(
                    table, item_key(batch, index), item_length(batch, index), hashed
                )
                num_uses += 1
                shadow_approach(&self.shadow, hashed)
                if sample_of(hashed) < self.keeps_below:
                    self.collect_key(sample_of(hashed), batch.items[index], ASKED)
        if num_uses == 0:
            self.forget_told()
            return
        for use_index in range(num_uses):
            shadow_near(&self.shadow, self.uses[use_index], self.quarter_of(self.uses[use_index]))
        for use_index in range(num_uses):
            node_id = self.use_scratch[use_index]
            self.judge(
                self.uses[use_index],
                NULL if node_id == NIL else node_at(table, node_id),
                use_index < num_sampled,
            )
        now = self.c_now()
        for use_index in range(num_uses - 1, -1, -1):
            hashed = self.uses[use_index]
            shadow_use(&self.shadow, hashed, self.quarter_of(hashed), <uint32_t>now)
        self.collect_request(0)
        self.forget_told()
        self.due = self.due or now >= self.next_due

    cdef int tell(self, object hints, object now) except -1:
        self.moment = NAN if now is None else now
        self.hints = hints
        return 0

    cdef void forget_told(self) noexcept:
        self.hints = None
        self.moment = NAN

    cdef bint ensure_uses(self, Py_ssize_t size) noexcept:
        """Make room for the sampled blocks of a call; False if there is no memory."""
        cdef uint64_t* larger
        if self.use_room >= size:
            return True
        larger = <uint64_t*>resize(
            self.uses, <size_t>size * 2 * (sizeof(uint64_t) + sizeof(uint32_t))
        )
        if larger == NULL:
            return False
        self.uses = larger
        self.use_scratch = <uint32_t*>(larger + size * 2)
        self.use_room = size * 2
        return True

    cdef int quarter_of(self, uint64_t hashed) noexcept:
        return <int>(sample_of(hashed) & (self.num_quarters - 1))

    cdef Entry* count_segment(self, uint64_t hashed) noexcept:
        """Count a sampled block of a request by its segment; return its entry."""
        cdef Entry* entry = shadow_find(&self.shadow, hashed)
        cdef int segment = self.num_sizes if entry == NULL else entry.segment
        cdef int quarter = self.quarter_of(hashed)
        shadow_reach(&self.shadow, entry, quarter)
        self.tally.judged[quarter][segment] += 1
        if sample_of(hashed) < self.policy_below:
            self.tally.policy_judged[quarter][segment] += 1
        return entry

    cdef void judge(self, uint64_t hashed, Node* node, bint hit) noexcept:
        """Count a sampled block of a request by its segment, and by its cause if it missed."""
        cdef Entry* entry = self.count_segment(hashed)
        if hit:
            if entry != NULL:
                entry.used = True
        elif node != NULL and node.flags & RESIDENT:
            self.tally.causes[PENDING if node.block.ref_cnt < 0 else BROKEN_PREFIX] += 1
        elif entry != NULL and entry.fate >= FATE_EVICTED:
            self.tally.causes[entry.fate] += 1
        else:
            self.tally.causes[NEVER_OR_LONG_AGO] += 1

    cdef void collect_key(self, uint32_t sample, PyObject* key, int part) noexcept:
        """Collect a key of the request at work, if there is memory for it and its request."""
        cdef int quarter = sample & (self.num_quarters - 1)
        cdef CollectedRequest* request = &self.at_work[quarter]
        if self.num_collected >= MOST_KEYS or not grow(
            <void**>&self.requests,
            &self.request_room,
            self.num_requests + <uint64_t>self.num_quarters,
            sizeof(CollectedRequest),
            DRAIN_KEYS,
        ):
            return
        try:
            (<list>self.keys[quarter]).append(<object>key)
        except MemoryError:
            return
        if part == BEFORE and (request.first == 0 or request.first == request.num_keys):
            request.first = request.num_keys + 1
        if part != BEHIND and request.end == request.num_keys:
            request.end += 1
        request.num_keys += 1
        self.num_collected += 1

    cdef void collect_batch(self, Batch* batch, uint8_t but) noexcept:
        """Collect the sampled keys of a batch whose nodes are found and do not have a flag."""
        cdef Py_ssize_t index
        cdef Node* node
        cdef uint64_t hashed
        for index in range(batch.size):
            if batch.node_ids[index] == NIL:
                hashed = batch.hashes[index]
            else:
                node = node_at(self.table, batch.node_ids[index])
                if not node.flags & SAMPLED or node.flags & but:
                    continue
                hashed = hash_node(self.table, node)
            if sample_of(hashed) < self.keeps_below:
                self.collect_key(sample_of(hashed), batch.items[index], BEHIND)

    cdef void c_finished_told(self, Batch* batch, object hints, double now) noexcept:
        self.hints = hints
        self.moment = now
        self.hears_returns = True
        self.collect_batch(batch, 0)
        self.collect_request(FINISHED)
        self.forget_told()

    cdef void c_released(self, Batch* batch) noexcept:
        self.hears_releases = True
        self.keeps_below = self.policy_below
        self.collect_batch(batch, IS_SHARED)
        self.collect_request(RELEASED)

    cdef uint32_t keep_told(self) noexcept:
        """Keep what the client of the request at work has said; return its place, 0 for nothing."""
        if self.hints is None and not self.hears_returns:
            return 0
        self.latest = kvo_monotonic() if isnan(self.moment) else self.moment
        try:
            self.told.append((self.hints, self.latest))
        except MemoryError:
            return 0
        return <uint32_t>len(self.told)

    cdef void collect_request(self, int event) noexcept:
        """End the request at work, or an event that its keys are part of."""
        cdef int quarter
        cdef uint32_t place = 0
        cdef CollectedRequest* request
        for quarter in range(self.num_quarters):
            request = &self.at_work[quarter]
            if request.num_keys:
                if place == 0 and event != RELEASED:
                    place = self.keep_told()
                request.event = event
                request.told = place
                request.quarter = <uint32_t>quarter
                request.stretch = self.stretch
                self.requests[self.num_requests] = request[0]
                self.num_requests += 1
                self.num_collected += 1
                memset(request, 0, sizeof(CollectedRequest))
        self.due = self.due or self.num_collected >= DRAIN_KEYS

    cdef void c_stored(self, Batch* batch, Py_ssize_t admitted, Py_ssize_t missing) noexcept:
        """Note the fates of an accepted store."""
        cdef Py_ssize_t index
        cdef Node* node
        cdef uint32_t now = <uint32_t>self.c_now()
        self.tally.stored += <uint64_t>admitted
        self.tally.declined += <uint64_t>(missing - admitted)
        self.use_unseen(batch, missing, now)
        for index in range(missing):
            node = node_at(self.table, batch.chosen[index])
            if node.flags & SAMPLED:
                self.note_fate(
                    hash_node(self.table, node),
                    FATE_STORED if index < admitted else FATE_DECLINED,
                    now,
                )

    cdef void use_unseen(self, Batch* batch, Py_ssize_t missing, uint32_t now) noexcept:
        """Use the sampled blocks of a store that no lookup since a reset has shown, last first.

        Generated tokens are stored but not asked for; they take room like others.
        """
        cdef Py_ssize_t index, use_index, num_unseen = 0
        cdef uint64_t hashed
        cdef Node* node
        cdef Entry* entry
        if not self.ensure_uses(missing):
            return
        for index in range(missing):
            node = node_at(self.table, batch.chosen[index])
            if not node.flags & SAMPLED:
                continue
            hashed = hash_node(self.table, node)
            entry = shadow_find(&self.shadow, hashed)
            if entry != NULL and entry.segment < self.num_sizes:
                continue
            self.uses[num_unseen] = hashed
            num_unseen += 1
            if sample_of(hashed) < self.keeps_below:
                self.collect_key(sample_of(hashed), batch.items[batch.indexes[index]], BEHIND)
        for use_index in range(num_unseen - 1, -1, -1):
            hashed = self.uses[use_index]
            shadow_use(&self.shadow, hashed, self.quarter_of(hashed), now)
        self.moment = self.latest
        self.collect_request(0)
        self.moment = NAN

    cdef void meet_victim(self, Node* node, Py_ssize_t index) noexcept:
        """Put the hash of a sampled victim into `uses`."""
        self.uses[index] = hash_node(self.table, node)
        shadow_approach(&self.shadow, self.uses[index])

    cdef void note_victims(self, uint64_t size, Py_ssize_t num_sampled) noexcept:
        """Count the victims, and note the fates of the sampled ones, whose hashes are in `uses`."""
        cdef Py_ssize_t index
        cdef uint32_t now = <uint32_t>self.last_now()
        self.tally.evicted += size
        for index in range(num_sampled):
            kvo_prefetch(self.shadow.entries + shadow_first(&self.shadow, self.uses[index]))
        for index in range(num_sampled):
            self.note_evicted(shadow_find(&self.shadow, self.uses[index]), now)

    cdef void note_evicted(self, Entry* entry, uint32_t now) noexcept:
        """Count an evicted block by its record."""
        self.tally.evicted_used[entry != NULL and entry.used] += 1
        if entry != NULL:
            self.tally.unused_ages[age_bin(now - entry.last_use)] += 1
            if entry.fate == FATE_STORED:
                self.tally.stored_ages[age_bin(now - entry.changed)] += 1
            entry.fate = FATE_EVICTED
            entry.changed = now

    cdef void c_refused(self, Batch* batch, Py_ssize_t missing) noexcept:
        """Note the fates of a refused store."""
        cdef Py_ssize_t index
        self.tally.refused += 1
        self.use_unseen(batch, missing, <uint32_t>self.c_now())
        for index in range(missing):
            self.set_fate(node_at(self.table, batch.chosen[index]), FATE_REFUSED)

    cdef void c_ended(self, Batch* batch, bint succeeded) noexcept:
        """Close the transfer of a store, and note the fates of blocks whose store failed."""
        cdef Table* table = self.table
        cdef uint32_t first, last
        if batch.size == 0:
            return
        first = batch.node_ids[0]
        last = batch.node_ids[batch.size - 1]
        if first != NIL and last != NIL:
            if (
                node_at(table, first).flags & node_at(table, last).flags & RESIDENT
                and node_at(table, first).block.ref_cnt < 0
                and node_at(table, last).block.ref_cnt < 0
            ):
                self.c_closed(
                    STORE,
                    batch.size,
                    own_id(table, first, node_at(table, first)),
                    own_id(table, last, node_at(table, last)),
                    -1,
                )
        if not succeeded:
            self.c_failed(batch)

    cdef void c_failed(self, Batch* batch) noexcept:
        """Note the fates of pending blocks whose store failed, once each."""
        cdef Table* table = self.table
        cdef Py_ssize_t index
        cdef uint32_t node_id
        cdef Node* node
        table_new_epoch(table)
        for index in range(batch.size):
            node_id = batch.node_ids[index]
            if node_id == NIL:
                continue
            node = node_at(table, node_id)
            if node.flags & RESIDENT and node.block.ref_cnt < 0 and node.block.mark != table.epoch:
                node.block.mark = table.epoch
                self.tally.failed += 1
                self.set_fate(node, FATE_FAILED)

    cdef void c_loaded(self, Batch* batch) noexcept:
        """Close the transfer of a load."""
        cdef Table* table = self.table
        cdef uint32_t first, last
        if batch.size == 0:
            return
        first = batch.node_ids[0]
        last = batch.node_ids[batch.size - 1]
        self.c_closed(
            LOAD,
            batch.size,
            own_id(table, first, node_at(table, first)),
            own_id(table, last, node_at(table, last)),
            -1,
        )

    cdef int note_hints(self, str source, bint ends, bint expects) except -1:
        cdef int number = MOST_SOURCES
        if not ends and not expects:
            return 0
        known = self.source_numbers.get(source)
        if known is not None:
            number = known
        elif source != OTHERS and len(self.source_numbers) < MOST_SOURCES:
            number = <int>len(self.source_numbers)
            self.source_numbers[source] = number
        self.tally.hints[number][0] += ends
        self.tally.hints[number][1] += expects
        self.hears_returns = self.hears_returns or expects
        return 0

    cdef void c_dropped(self) noexcept:
        """Reset the shadows with the cache, and note the fates of its blocks."""
        cdef uint32_t entry_id
        cdef int quarter, size
        self.tally.resets += 1
        for size in range(self.num_sizes):
            self.tally.fullest[size] = max(self.tally.fullest[size], self.held(size))
        for quarter in range(self.num_quarters):
            entry_id = self.shadow.lists[quarter].head
            while entry_id != NIL:
                if self.shadow.entries[entry_id].fate == FATE_STORED:
                    self.shadow.entries[entry_id].fate = FATE_RESET
                entry_id = self.shadow.entries[entry_id].next
        shadow_reset(&self.shadow)
        if self.stretch == 0 or (
            self.num_requests and self.requests[self.num_requests - 1].stretch == self.stretch
        ):
            self.stretch += 1
        while self.oldest != NIL:
            self.close_at(self.oldest)

    cdef uint64_t held(self, int size) noexcept:
        """Return the sampled blocks that a size holds, of all quarters."""
        cdef uint64_t found = 0
        cdef int quarter, index
        for quarter in range(self.num_quarters):
            for index in range(size + 1):
                found += self.shadow.lists[quarter].counts[index]
        return found

    # -- the ledger ----------------------------------------------------------------------------

    cdef void c_opened(self, uint32_t kind, const int64_t* block_ids, Py_ssize_t size) noexcept:
        """Open a transfer."""
        cdef int32_t* own
        cdef Py_ssize_t index
        if size == 0:
            return
        own = self.open_transfer(kind, size, block_ids[0], block_ids[size - 1], self.c_now())
        if own != NULL:
            for index in range(size):
                own[index] = <int32_t>block_ids[index]

    cdef int32_t* take_ids(self, Py_ssize_t size) noexcept:
        """Return an array for the ids of a transfer, NULL without memory.

        That of the transfer that ended last is used again if it is not much too large.
        """
        cdef int32_t* ids = NULL
        if size <= <Py_ssize_t>self.spare_room <= 2 * size:
            ids = self.spare_ids
            self.spare_ids = NULL
            self.spare_room = 0
        if ids == NULL:
            ids = <int32_t*>resize(NULL, <size_t>size * sizeof(int32_t))
        return ids

    cdef int32_t* open_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, uint64_t now
    ) noexcept:
        """Enter a transfer into the ledger; return where its ids go, NULL if there is no room."""
        cdef uint32_t index = self.free_transfer
        cdef uint32_t* link
        cdef Transfer* transfer
        cdef int32_t* own = NULL
        if (
            self.num_open < MOST_OPEN
            and self.open_blocks + <uint64_t>size <= MOST_OPEN_BLOCKS
            and grow(
                <void**>&self.transfers,
                &self.transfer_room,
                self.num_transfers + (index == NIL),
                sizeof(Transfer),
                64,
            )
        ):
            own = self.take_ids(size)
        if own == NULL:
            self.tally.untracked += 1
            return NULL
        if index == NIL:
            index = self.num_transfers
            self.num_transfers += 1
        else:
            self.free_transfer = self.transfers[index].newer
        self.serial += 1
        transfer = self.transfers + index
        transfer.serial = self.serial
        transfer.time = now
        transfer.kind = kind
        transfer.size = <uint32_t>size
        transfer.request = self.tally.requests
        transfer.first = <int32_t>first
        transfer.last = <int32_t>last
        transfer.block_ids = own
        transfer.older = self.newest
        transfer.newer = NIL
        if self.newest == NIL:
            self.oldest = index
        else:
            self.transfers[self.newest].newer = index
        self.newest = index
        # At the start of its chain, so that the newest match is found first.
        link = &self.chains[<uint32_t>first % NUM_CHAINS]
        transfer.chain = link[0]
        link[0] = index
        self.num_open += 1
        self.open_blocks += <uint64_t>size
        return own

    cdef void c_closed(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, int64_t one
    ) noexcept:
        """Close the newest transfer of this kind and size with this first and last block id.

        A leaked transfer of the same blocks stays and ages. Unless `one` is -1, it is the id of a
        block, which decides between several transfers.
        """
        cdef uint32_t index = self.chains[<uint32_t>first % NUM_CHAINS], found = NIL
        cdef const Transfer* transfer
        while index != NIL:
            transfer = self.transfers + index
            if (
                transfer.kind == kind
                and <Py_ssize_t>transfer.size == size
                and transfer.first == first
                and transfer.last == last
            ):
                if found == NIL or (
                    has_id(transfer, one) and not has_id(self.transfers + found, one)
                ):
                    found = index
                if one < 0:
                    break
            index = transfer.chain
        if found == NIL:
            return
        if kind == STORE:
            self.note_lag(<double>(self.tally.requests - self.transfers[found].request))
        self.close_at(found)

    cdef void note_lag(self, double requests) noexcept:
        """Note the number of requests that came during a store."""
        if self.lag < 0:
            self.lag = requests
        else:
            self.lag += (requests - self.lag) / LAG_STEPS

    cdef void close_at(self, uint32_t index) noexcept:
        """Remove a transfer."""
        cdef Transfer* transfer = self.transfers + index
        cdef uint32_t* link = &self.chains[<uint32_t>transfer.first % NUM_CHAINS]
        while link[0] != index:
            link = &self.transfers[link[0]].chain
        link[0] = transfer.chain
        if transfer.older == NIL:
            self.oldest = transfer.newer
        else:
            self.transfers[transfer.older].newer = transfer.newer
        if transfer.newer == NIL:
            self.newest = transfer.older
        else:
            self.transfers[transfer.newer].older = transfer.older
        self.num_open -= 1
        self.open_blocks -= transfer.size
        discard(self.spare_ids)
        self.spare_ids = transfer.block_ids
        self.spare_room = transfer.size
        transfer.block_ids = NULL
        transfer.newer = self.free_transfer
        self.free_transfer = index

    def open_transfers(self):
        """Return the open transfers, oldest first: number, kind, time in ms, block ids."""
        cdef list found = []
        cdef uint32_t index
        cdef uint32_t at
        cdef Transfer* transfer
        cdef int collecting = PyGC_Disable()
        try:
            index = self.oldest
            while index != NIL:
                transfer = self.transfers + index
                ids = [transfer.block_ids[at] for at in range(transfer.size)]
                found.append((transfer.serial, transfer.kind, transfer.time, ids))
                index = transfer.newer
            return found
        finally:
            if collecting:
                PyGC_Enable()

    def close_transfer(self, serial):
        """Close a transfer by its number."""
        cdef uint64_t wanted = serial
        cdef uint32_t index = self.oldest
        while index != NIL:
            if self.transfers[index].serial == wanted:
                self.close_at(index)
                return
            index = self.transfers[index].newer

    # -- what can be seen ----------------------------------------------------------------------

    cdef uint64_t c_now(self) noexcept:
        if self.clock is None:
            self.present = kvo_monotonic_ms()
        return self.last_now()

    def now(self):
        """Return the time since the start in ms; the last time if a user's clock fails."""
        self.tick()
        return self.c_now()

    @property
    def waits_for_stores(self):
        """Whether a lookup waits for a block being stored, as in vLLM; here such a block misses."""
        return False

    @property
    def block_tokens(self):
        """Tokens per block, if an integration counts tokens; None if no block is judged."""
        return 0

    def progress(self):
        """Return the requests, those that met a block being stored, refused stores, and the lag.

        The lag is the recent mean number of requests that come during a store; 0 before the first
        store ends.
        """
        return self.tally.requests, self.tally.met_pending, self.tally.refused, max(self.lag, 0.0)

    def counts(self):
        """Return every counter since the start."""
        cdef int quarter, index, size = self.num_sizes + 1
        return {
            "requests": self.tally.requests,
            "asked": self.tally.asked,
            "missed": self.tally.missed,
            "met_pending": self.tally.met_pending,
            "stored": self.tally.stored,
            "evicted": self.tally.evicted,
            "declined": self.tally.declined,
            "refused": self.tally.refused,
            "failed": self.tally.failed,
            "resets": self.tally.resets,
            "untracked": self.tally.untracked,
            "tail_missed_tokens": self.tally.tail_missed_tokens,
            "causes": as_list(self.tally.causes, MOST_CAUSES),
            "evicted_used": as_list(self.tally.evicted_used, 2),
            "long_requests": as_list(self.tally.long_requests, self.num_sizes),
            "hints": [as_list(self.tally.hints[index], 2) for index in range(MOST_SOURCES + 1)],
            "judged": [
                as_list(self.tally.judged[quarter], size) for quarter in range(self.num_quarters)
            ],
            "policy_judged": [
                as_list(self.tally.policy_judged[quarter], size)
                for quarter in range(self.num_quarters)
            ],
            "unused_ages": as_list(self.tally.unused_ages, BINS),
            "stored_ages": as_list(self.tally.stored_ages, BINS),
            "held": [self.held(index) for index in range(self.num_sizes)],
            "fullest": [
                max(self.tally.fullest[index], self.held(index)) for index in range(self.num_sizes)
            ],
            "open": self.num_open,
        }

    def sources(self):
        """Return the distinct sources of hints, in the order of their counts."""
        return list(self.source_numbers)

    def take_requests(self):
        """Return and clear the requests collected for the policies.

        One list per quarter, of one list per stretch between resets.
        """
        cdef list taken, keys, fresh, told, nothing
        cdef tuple said, unsaid = (None, None)
        cdef uint64_t index
        cdef uint32_t quarter, end
        cdef uint32_t starts[4]
        cdef CollectedRequest* request
        cdef int collecting = PyGC_Disable()
        memset(starts, 0, sizeof(starts))
        try:
            fresh = [[] for _ in range(self.num_quarters)]
            nothing = []
            told = self.told
            taken = [[[] for _ in range(self.stretch + 1)] for _ in range(self.num_quarters)]
            for index in range(self.num_requests):
                request = self.requests + index
                quarter = request.quarter
                end = starts[quarter] + request.num_keys
                keys = (<list>self.keys[quarter])[starts[quarter] : end]
                starts[quarter] = end
                said = told[request.told - 1] if request.told else unsaid
                (<list>(<list>taken[quarter])[request.stretch]).append(
                    (
                        keys,
                        request.event if request.event else <int>request.first,
                        <int>request.end,
                        said[0],
                        said[1],
                    )
                )
            self.keys = fresh
            self.told = nothing
            self.num_requests = self.num_collected = self.stretch = 0
            self.due = False
            return taken
        finally:
            if collecting:
                PyGC_Enable()

    def explain(self, bytes key not None):
        """Return the facts on a block: its ref_cnt, whether it is sampled, its record.

        The record is None, or the segment, last fate, whether it was used since it was stored,
        and the times, in ms modulo 2**32, of its last use and of its store or eviction.
        """
        cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(key)
        cdef uint64_t hashed = hash_key(self.table, text, <uint64_t>len(key))
        cdef uint32_t node_id = index_find(self.table, text, <uint64_t>len(key), hashed)
        cdef Entry* entry
        cdef object ref_cnt = None
        if node_id != NIL and node_at(self.table, node_id).flags & RESIDENT:
            ref_cnt = node_at(self.table, node_id).block.ref_cnt
        if sample_of(hashed) >= self.sample_below:
            return ref_cnt, False, None
        entry = shadow_find(&self.shadow, hashed)
        if entry == NULL:
            return ref_cnt, True, None
        return (
            ref_cnt,
            True,
            (entry.segment, entry.fate, bool(entry.used), entry.last_use, entry.changed),
        )

    def order(self):
        """Return the fingerprints of each quarter, most recent first."""
        cdef list orders = []
        cdef list order
        cdef int quarter
        cdef uint32_t entry_id
        for quarter in range(self.num_quarters):
            order = []
            entry_id = self.shadow.lists[quarter].head
            while entry_id != NIL:
                order.append(self.shadow.entries[entry_id].fingerprint)
                entry_id = self.shadow.entries[entry_id].next
            orders.append(order)
        return orders

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef const char* broken = shadow_check(&self.shadow)
        cdef uint32_t index = self.oldest, node_id
        cdef uint64_t blocks = 0, num_open = 0
        if broken != NULL:
            raise AssertionError((<bytes>broken).decode())
        while index != NIL:
            blocks += self.transfers[index].size
            num_open += 1
            index = self.transfers[index].newer
        if blocks != self.open_blocks or num_open != self.num_open:
            raise AssertionError("the blocks of open transfers are counted")
        if self.table != NULL:
            for node_id in range(self.table.num_used):
                node = node_at(self.table, node_id)
                if node.key_length and bool(node.flags & SAMPLED) != (
                    sample_of(hash_node(self.table, node)) < self.sample_below
                ):
                    raise AssertionError("the flag says which keys are sampled")

    # -- parts ---------------------------------------------------------------------------------

    cdef void set_fate(self, Node* node, uint8_t fate) noexcept:
        """Note the fate of a block, if it is sampled."""
        if node.flags & SAMPLED:
            self.note_fate(hash_node(self.table, node), fate, 0)

    cdef void note_fate(self, uint64_t hashed, uint8_t fate, uint32_t now) noexcept:
        """Note the fate of a sampled block; `now` is the time of a store."""
        cdef Entry* entry = shadow_find(&self.shadow, hashed)
        if entry == NULL:
            return
        entry.fate = fate
        if fate == FATE_STORED:
            entry.changed = now
            entry.used = False
