"""The core of a watch: the shadow of a sample, the requests for its policies, the open transfers.

Structure
    A block is sampled if 24 bits of its keyed hash are below a threshold; two of them select its
    quarter. Each quarter is a list of ``_core/shadow``: LRU would hold the blocks of its segments
    up to ``i`` at size ``i``. A reset moves all blocks to one more segment at the end: no size
    would hold them any longer, but their fates are remembered until new blocks need the room.
Invariants
    Nothing here changes a decision of the manager. A manager tells its watch last, so that a failed
    call is never counted; no event runs Python code.
Cost
    O(1) per sampled block and size. A block of a compiled manager that is not sampled costs a test
    of its node's flag; a key without a node, and every key of a Python manager, costs its hash.
Source
    Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015. Differs from it: the
    rate is fixed, and the sample is split into quarters, from which the error is estimated.
"""

cimport cython
from cpython.array cimport array
from cpython.bytes cimport PyBytes_AS_STRING
from libc.string cimport memcpy, memmove, memset

from kvoffload._core.batch cimport item_key, item_length
from kvoffload._core.bins cimport log_bin
from kvoffload._core.items cimport first_bad, list_items
from kvoffload._core.memory cimport discard, grow, resize
from kvoffload._core.shadow cimport (
    MOST_SIZES,
    shadow_check,
    shadow_close,
    shadow_find,
    shadow_first,
    shadow_near,
    shadow_open,
    shadow_quarter,
    shadow_reach,
    shadow_reset,
    shadow_use,
)
from kvoffload._core.table cimport (
    IS_SHARED,
    NIL,
    RESIDENT,
    SAMPLED,
    Node,
    hash_key,
    hash_node,
    index_find,
    kvo_hash,
    kvo_prefetch,
    node_at,
    own_id,
    table_new_epoch,
    table_sample,
)
from kvoffload.policies._twin_c cimport CollectorOff


from kvoffload._sampling import new_secret
from kvoffload.managers._watching import COUNTERS, KINDS, OTHERS


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
    """
    int64_t kvo_monotonic_ms() noexcept nogil

cdef enum:
    DRAIN_KEYS = 256        # sampled keys, and requests, after which a watch takes them
    MOST_KEYS = 1 << 14     # most that are collected if no lookup lets it take them
    MOST_OPEN = 4096        # most transfers in the ledger, and most of their blocks
    MOST_OPEN_BLOCKS = 1 << 18
    LAG_STEPS = 16          # stores, and requests, over which the lag and `early` are averaged
    AGE_BITS = 3            # a histogram of ages in ms has eight bins for each doubling
    NO_STORE = -2           # in place of that number




cdef bint has_id(const Transfer* transfer, int64_t block_id) noexcept nogil:
    """Return whether a block is of a transfer."""
    cdef uint32_t at
    for at in range(transfer.size):
        if transfer.block_ids[at] == block_id:
            return True
    return False


cdef inline uint8_t meets(Table* table, uint32_t node_id) noexcept nogil:
    """Return how a lookup that has stopped before meets a block."""
    cdef const Node* node
    if node_id == NIL:
        return ABSENT
    node = node_at(table, node_id)
    if not node.flags & RESIDENT:
        return ABSENT
    return PENDING if node.block.ref_cnt < 0 else BROKEN_PREFIX


cdef inline uint8_t fate_of(Py_ssize_t index, Py_ssize_t admitted) noexcept nogil:
    """Return the fate of a block by the number that its store admitted, -1 if it was refused."""
    if admitted == NO_STORE:
        return FATE_UNKNOWN
    if admitted < 0:
        return FATE_REFUSED
    return FATE_STORED if index < admitted else FATE_DECLINED


cdef list as_list(const uint64_t* values, int size):
    return [values[index] for index in range(size)]


# Without tp_clear: a manager that is cleared with it may still be called. The watch is cleared.
@cython.final
@cython.no_gc_clear
cdef class WatchCore:
    """The observer of one manager."""

    def __cinit__(self, plan, watch):
        cdef uint32_t limits[MOST_SIZES]
        cdef int size
        cdef bytes secret = new_secret() if plan.secret is None else plan.secret
        self.watch = watch
        self.block_tokens = 0
        self.lag = -1.0
        self.num_quarters = plan.quarters
        self.num_sizes = len(plan.limits)
        if not 0 < self.num_sizes <= MOST_SIZES or self.num_quarters not in (1, 2, 4):
            raise ValueError(
                f"plan must have 1 ... {MOST_SIZES} sizes and 1, 2 or 4 quarters, "
                f"got {self.num_sizes} and {self.num_quarters}"
            )
        if len(secret) != sizeof(self.secret):
            raise ValueError(f"secret must be 64 bytes, got {len(secret)}")
        memcpy(self.secret, PyBytes_AS_STRING(secret), sizeof(self.secret))
        self.has_secret = plan.secret is not None
        for size in range(self.num_sizes):
            limits[size] = plan.limits[size]
            self.lengths[size] = plan.lengths[size]
        self.sample_below = plan.sample_below
        self.policy_below = plan.policy_below
        self.keeps_below = self.policy_below if plan.keeps_keys else 0
        self.clock = plan.clock
        self.sources = {}
        self.told = [None]
        self.keys = [[] for _ in range(self.num_quarters)]
        self.start = kvo_monotonic_ms() if self.clock is None else self.clock()
        self.present = self.start
        if not shadow_open(&self.shadow, self.num_quarters, self.num_sizes, limits):
            raise MemoryError()

    def __dealloc__(self):
        cdef uint64_t index
        shadow_close(&self.shadow)
        for index in range(self.num_open):
            discard(self.transfers[index].block_ids)
        discard(self.transfers)
        discard(self.sampled)
        discard(self.requests)

    def __reduce__(self):
        raise TypeError("cannot pickle a watch: it looks at a manager")

    cdef int look_at(self, Table* table, object get) except -1:
        if self.has_secret and table.num_keys == 0:
            memcpy(table.secret, self.secret, sizeof(self.secret))
        memcpy(self.secret, table.secret, sizeof(self.secret))
        table_sample(table, self.sample_below)
        self.get = get
        return 0

    cdef int tick(self) except -1:
        cdef int64_t present = self.start
        if self.clock is not None:
            try:
                present = self.clock()
            except Exception:
                pass
            self.present = max(self.present, present)  # it may go back
        return 0

    cdef int begin_lookup(self) except -1:
        if self.due:
            self.watch._drain()
        return self.tick()

    cdef uint64_t read_clock(self) noexcept:
        if self.clock is None:
            self.present = kvo_monotonic_ms()
        return self.last_now()

    # -- events --------------------------------------------------------------------------------

    cdef bint begin(self, Py_ssize_t size) noexcept:
        self.num_sampled = 0
        return grow(
            <void**>&self.sampled,
            &self.sampled_room,
            <uint64_t>size,
            sizeof(SampledKey),
            DRAIN_KEYS,
        )

    cdef void count_request(
        self, uint64_t asked, uint64_t missed, bint met_pending, uint64_t length
    ) noexcept:
        cdef int size
        self.count(REQUESTS, 1)
        self.count(ASKED_BLOCKS, asked)
        self.count(MISSED_BLOCKS, missed)
        self.count(MET_PENDING, met_pending)
        for size in range(self.num_sizes):
            self.tally.long_requests[size] += length > self.lengths[size]

    cdef void on_request(self) noexcept:
        cdef Py_ssize_t index
        cdef uint64_t now
        cdef const SampledKey* sampled = self.sampled
        if self.num_sampled:
            for index in range(self.num_sampled):
                shadow_near(&self.shadow, sampled[index].hashed)
            for index in range(self.num_sampled):
                if sampled[index].part == ASKED:
                    judge(self, sampled + index)
            now = self.read_clock()
            use_all(self, now)
            collect(self, 0)
            self.due = self.due or now >= self.next_due
        self.hear(None)

    cdef void count_offer(self, Py_ssize_t admitted, Py_ssize_t missing) noexcept:
        if admitted < 0:
            self.count(REFUSED_STORES, 1)
        else:
            self.count(STORED_BLOCKS, admitted)
            self.count(DECLINED_BLOCKS, missing - admitted)

    cdef void on_offer(self) noexcept:
        cdef Py_ssize_t index
        cdef SampledKey* sampled
        cdef const Entry* entry
        cdef uint64_t now = self.read_clock()
        for index in range(self.num_sampled):
            sampled = self.sampled + index
            entry = shadow_find(&self.shadow, sampled.hashed)
            sampled.seen = entry != NULL and entry.shown and entry.segment < self.num_sizes
        use_all(self, now)
        collect(self, 0)
        for index in range(self.num_sampled):
            self.note_fate(self.sampled[index].hashed, self.sampled[index].fate, <uint32_t>now)

    cdef void on_eviction(self, uint64_t size) noexcept:
        cdef Py_ssize_t index
        cdef Entry* entry
        cdef uint32_t now = <uint32_t>self.last_now()
        self.count(EVICTED_BLOCKS, size)
        for index in range(self.num_sampled):
            kvo_prefetch(
                self.shadow.entries + shadow_first(&self.shadow, self.sampled[index].hashed)
            )
        for index in range(self.num_sampled):
            entry = shadow_find(&self.shadow, self.sampled[index].hashed)
            self.tally.evicted_used[entry != NULL and entry.used] += 1
            if entry != NULL:
                self.tally.unused_ages[log_bin(now - entry.last_use, AGE_BITS)] += 1
                if entry.fate == FATE_STORED:
                    self.tally.stored_ages[log_bin(now - entry.changed, AGE_BITS)] += 1
                entry.fate = FATE_EVICTED
                entry.changed = now

    cdef void on_event(self, int event) noexcept:
        if event == EXTENDED:
            use_all(self, self.read_clock())
        elif event == RELEASED:
            self.hears_releases = True
            self.keeps_below = self.policy_below
        collect(self, event)
        self.hear(None)

    cpdef void on_reset(self) noexcept:
        """Reset the shadows with the cache, and note the fates of its blocks."""
        cdef uint32_t entry_id
        cdef int quarter, size
        self.count(RESETS, 1)
        for size in range(self.num_sizes):
            self.tally.fullest[size] = max(self.tally.fullest[size], held(self, size))
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
        while self.num_open:
            close_at(self, self.num_open - 1)

    cpdef void hear(self, object hints, list before=None) noexcept:
        self.hints = hints
        self.before = before

    cpdef int note_hints(self, str source, bint ends, bint expects) except -1:
        cdef int number = MOST_SOURCES
        if not ends and not expects:
            return 0
        known = self.sources.get(source)
        if known is not None:
            number = known
        elif source != OTHERS and len(self.sources) < MOST_SOURCES:
            number = <int>len(self.sources)
            self.sources[source] = number
        self.tally.hints[number][0] += ends
        self.tally.hints[number][1] += expects
        return 0

    cdef void note_used(self, uint64_t hashed) noexcept:
        cdef Entry* entry = shadow_find(&self.shadow, hashed)
        if entry != NULL:
            entry.used = True

    cdef void note_fate(self, uint64_t hashed, uint8_t fate, uint32_t now) noexcept:
        cdef Entry* entry = shadow_find(&self.shadow, hashed)
        if entry == NULL:
            return
        entry.fate = fate
        if fate == FATE_STORED:
            entry.changed = now
            entry.used = entry.shown = False

    cdef uint8_t cause_of(self, uint64_t hashed) noexcept:
        cdef const Entry* entry = shadow_find(&self.shadow, hashed)
        if entry == NULL or entry.fate < FATE_EVICTED:
            return NEVER_OR_LONG_AGO
        return entry.fate

    # -- requests for the policies -------------------------------------------------------------

    def take_requests(self):
        """Return and clear the requests collected for the policies.

        One list per quarter, of one list per stretch between resets.
        """
        cdef list taken, keys, fresh, told, nothing
        cdef uint64_t index
        cdef uint32_t quarter, end
        cdef uint32_t[4] starts = [0, 0, 0, 0]
        cdef CollectedRequest* request
        cdef CollectorOff held = CollectorOff()
        fresh = [[] for _ in range(self.num_quarters)]
        nothing = [None]
        told = self.told
        taken = [[[] for _ in range(self.stretch + 1)] for _ in range(self.num_quarters)]
        for index in range(self.num_requests):
            request = self.requests + index
            quarter = request.quarter
            end = starts[quarter] + request.num_keys
            keys = (<list>self.keys[quarter])[starts[quarter] : end]
            starts[quarter] = end
            (<list>(<list>taken[quarter])[request.stretch]).append(
                (keys, request.first, <int>request.end, told[request.told])
            )
        self.keys = fresh
        self.told = nothing
        self.num_requests = self.num_collected = self.stretch = 0
        self.due = False
        return taken

    # -- events of batches ---------------------------------------------------------------------

    cdef void c_looked_up(self, Table* table, Batch* batch, Py_ssize_t num_hits) noexcept:
        cdef Py_ssize_t index
        cdef uint64_t hashed
        cdef const Node* node
        cdef uint32_t node_id
        # The lookup has found the node of the first miss, too.
        cdef bint met_pending = (
            num_hits < batch.size and meets(table, batch.node_ids[num_hits]) == PENDING
        )
        if judging(self, batch.size, num_hits, met_pending):
            for index in range(num_hits):
                node = node_at(table, batch.node_ids[index])
                if node.flags & SAMPLED:
                    self.meet(hash_node(table, node), batch.items[index], ASKED, HIT, FATE_UNKNOWN)
            for index in range(num_hits, batch.size):
                # Elements that the lookup did not check may not be keys.
                if first_bad(batch.items, index, index + 1) == index:
                    break
                hashed = hash_key(table, item_key(batch, index), item_length(batch, index))
                if self.samples(hashed):
                    node_id = index_find(
                        table, item_key(batch, index), item_length(batch, index), hashed
                    )
                    self.meet(
                        hashed, batch.items[index], ASKED, meets(table, node_id), FATE_UNKNOWN
                    )
        self.on_request()

    cdef void c_offered(
        self, Table* table, Batch* batch, Py_ssize_t admitted, Py_ssize_t missing
    ) noexcept:
        cdef Py_ssize_t index
        cdef const Node* node
        self.count_offer(admitted, missing)
        if not self.begin(missing):
            return
        for index in range(missing):
            node = node_at(table, batch.chosen[index])
            if node.flags & SAMPLED:
                self.meet(
                    hash_node(table, node),
                    batch.items[batch.indexes[index]],
                    BEHIND,
                    ABSENT,
                    fate_of(index, admitted),
                )
        self.on_offer()

    cdef void c_extended(self, Table* table, Batch* batch) noexcept:
        meet_batch(self, table, batch, 0)
        self.on_event(EXTENDED)

    cdef void c_failed(self, Table* table, Batch* batch) noexcept:
        cdef Py_ssize_t index
        cdef Node* node
        table_new_epoch(table)
        for index in range(batch.size):
            if meets(table, batch.node_ids[index]) != PENDING:
                continue
            node = node_at(table, batch.node_ids[index])
            if node.block.mark != table.epoch:
                node.block.mark = table.epoch
                self.count(FAILED_BLOCKS, 1)
                if node.flags & SAMPLED:
                    self.note_fate(hash_node(table, node), FATE_FAILED, 0)

    cdef void c_closed(self, uint32_t kind, Table* table, Batch* batch) noexcept:
        cdef int64_t* ids
        cdef Py_ssize_t index, size = batch.size
        if (
            size == 0
            or self.end_transfer(
                kind,
                size,
                ending_id(kind, table, batch.node_ids[0]),
                ending_id(kind, table, batch.node_ids[size - 1]),
                -1,
            )
            or kind == LOAD
        ):
            return
        ids = <int64_t*>resize(NULL, <size_t>size * sizeof(int64_t))
        if ids != NULL:
            for index in range(size):
                ids[index] = ending_id(kind, table, batch.node_ids[index])
            close_stores(self, ids, size)
            discard(ids)

    cdef void c_opened(self, uint32_t kind, const int64_t* block_ids, Py_ssize_t size) noexcept:
        cdef int32_t* own = NULL
        cdef Py_ssize_t index
        if size:
            own = self.open_transfer(
                kind, size, block_ids[0], block_ids[size - 1], self.read_clock()
            )
        if own != NULL:
            for index in range(size):
                own[index] = <int32_t>block_ids[index]

    cdef void c_finished(
        self, Table* table, Batch* batch, Py_ssize_t first, Py_ssize_t last, Py_ssize_t prompt,
        object hints, const Hint* hint,
    ) noexcept:
        if 0 <= last and first < prompt:
            note_finish(&self.early, meets(table, batch.node_ids[first]))
        if last >= prompt:
            note_finish(&self.early_answers, meets(table, batch.node_ids[last]))
        if hint != NULL and hint.expect_s > 0.0 and not hint.ends:
            self.hear(hints)
            meet_batch(self, table, batch, 0)
            self.on_event(FINISHED)

    cdef void c_released(self, Table* table, Batch* batch) noexcept:
        meet_batch(self, table, batch, IS_SHARED)
        self.on_event(RELEASED)

    # -- events of a Python manager's lists ----------------------------------------------------

    def looked_up(self, batch, Py_ssize_t num_hits):
        """Judge a request for a list or tuple of keys, of which the first `num_hits` were ready."""
        cdef Py_ssize_t index, size = len(batch)
        cdef list keys, met
        self.tick()
        keys = list(batch)
        # Elements that the lookup did not check may not be keys.
        keys = keys[: first_bad(list_items(keys), 0, len(keys))]
        met = [HIT] * num_hits + [met_as(self.get(key)) for key in keys[num_hits:]]
        if judging(self, size, num_hits, met[num_hits : num_hits + 1] == [PENDING]):
            for index in range(len(keys)):
                meet_key(self, keys[index], ASKED, met[index], FATE_UNKNOWN)
        self.on_request()

    def finished(
        self, list keys not None, hints, Py_ssize_t first, Py_ssize_t last, Py_ssize_t prompt
    ):
        """Hear that a request has finished; see `c_finished`."""
        if 0 <= last and first < prompt:
            note_finish(&self.early, met_as(self.get(keys[first])))
        if last >= prompt:
            note_finish(&self.early_answers, met_as(self.get(keys[last])))
        if hints is not None and hints.expect_s is not None and not hints.ends:
            self.hear(hints)
            meet_list(self, keys, NO_STORE)
            self.on_event(FINISHED)

    def released(self, list keys not None):
        """Hear that blocks were released; from now on keys are collected."""
        meet_list(self, keys, NO_STORE)
        self.on_event(RELEASED)

    def offered(self, list missing not None, Py_ssize_t admitted, list evicted not None):
        """Note the fates of a store that admitted so many of the missing; -1: it was refused."""
        self.tick()
        self.count_offer(admitted, len(missing))
        meet_list(self, missing, admitted)
        self.on_offer()
        meet_list(self, evicted, NO_STORE)
        self.on_eviction(len(evicted))

    def extended(self, list keys not None):
        """Use the blocks that extend a request."""
        self.tick()
        meet_list(self, keys, NO_STORE)
        self.on_event(EXTENDED)

    def failed(self, keys):
        """Note the fates of blocks whose store failed."""
        cdef uint64_t hashed
        self.count(FAILED_BLOCKS, len(keys))
        for key in keys:
            hashed = hash_of(self, key)
            if self.samples(hashed):
                self.note_fate(hashed, FATE_FAILED, 0)

    def opened(self, uint32_t kind, list block_ids not None):
        """Open a transfer."""
        cdef array ids = array("q", map(int, block_ids))  # a user's status may run code
        self.tick()
        self.c_opened(kind, <int64_t*>ids.data.as_longlongs, len(ids))

    def closed(self, uint32_t kind, list block_ids not None):
        """End a transfer, or stores whose blocks follow each other; -1 stands for others."""
        cdef array ids = array("q", map(int, block_ids))
        cdef int64_t* items = <int64_t*>ids.data.as_longlongs
        cdef Py_ssize_t size = len(ids)
        if size and not self.end_transfer(kind, size, items[0], items[size - 1], -1):
            if kind == STORE:
                close_stores(self, items, size)

    # -- the ledger ----------------------------------------------------------------------------

    cdef int32_t* open_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, uint64_t now
    ) noexcept:
        cdef int32_t* own = NULL
        if (
            self.num_open < MOST_OPEN
            and self.open_blocks + <uint64_t>size <= MOST_OPEN_BLOCKS
            and grow(
                <void**>&self.transfers,
                &self.transfer_room,
                self.num_open + 1,
                sizeof(Transfer),
                64,
            )
        ):
            own = <int32_t*>resize(NULL, <size_t>size * sizeof(int32_t))
        if own == NULL:
            self.count(UNTRACKED, 1)
            return NULL
        self.serial += 1
        self.transfers[self.num_open] = Transfer(
            self.serial,
            now,
            self.counters[REQUESTS],
            own,
            kind,
            <uint32_t>size,
            <int32_t>first,
            <int32_t>last,
        )
        self.num_open += 1
        self.open_blocks += <uint64_t>size
        return own

    cpdef bint end_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, int64_t one
    ) noexcept:
        cdef uint64_t index = self.num_open, found = MOST_OPEN
        cdef const Transfer* transfer
        while index:
            index -= 1
            transfer = self.transfers + index
            if (
                transfer.first == first
                and transfer.last == last
                and <Py_ssize_t>transfer.size == size
                and transfer.kind == kind
            ):
                if found == MOST_OPEN or not has_id(self.transfers + found, one):
                    found = index
                if one < 0 or has_id(transfer, one):
                    break
        if found == MOST_OPEN:
            return False
        close_now(self, found)
        return True

    def open_transfers(self):
        """Return the open transfers, oldest first: number, kind, age in seconds, block ids."""
        cdef uint64_t now = self.now()
        cdef list found = []
        cdef uint64_t index
        cdef uint32_t at
        cdef double age
        cdef const Transfer* transfer
        cdef CollectorOff held = CollectorOff()
        for index in range(self.num_open):
            transfer = self.transfers + index
            ids = [transfer.block_ids[at] for at in range(transfer.size)]
            age = <double>(now - transfer.time) / 1000
            found.append((transfer.serial, KINDS[transfer.kind], age, ids))
        return found

    def close_transfer(self, serial):
        """Close a transfer by its number."""
        cdef uint64_t wanted = serial, index
        for index in range(self.num_open):
            if self.transfers[index].serial == wanted:
                close_at(self, index)
                return

    # -- what can be seen ----------------------------------------------------------------------

    def now(self):
        """Return the time since the start in ms; the last time if a user's clock fails."""
        self.tick()
        return self.read_clock()

    def counts(self):
        """Return the counters since the start, of which a report shows the change."""
        cdef int index, size = self.num_sizes + 1
        quarters = range(self.num_quarters)
        return {
            **dict(zip(COUNTERS, as_list(self.counters, NUM_COUNTERS))),
            "causes": as_list(self.tally.causes, MOST_CAUSES),
            "evicted_used": as_list(self.tally.evicted_used, 2),
            "long_requests": as_list(self.tally.long_requests, self.num_sizes),
            "hints": [as_list(self.tally.hints[index], 2) for index in range(MOST_SOURCES + 1)],
            "judged": [as_list(self.tally.judged[index], size) for index in quarters],
            "policy_judged": [as_list(self.tally.policy_judged[index], size) for index in quarters],
        }

    def overall(self):
        """Return the ages at eviction since the start, and the sampled blocks and transfers."""
        cdef int index
        return {
            "unused_ages": as_list(self.tally.unused_ages, BINS),
            "stored_ages": as_list(self.tally.stored_ages, BINS),
            "held": [held(self, index) for index in range(self.num_sizes)],
            "fullest": [
                max(self.tally.fullest[index], held(self, index)) for index in range(self.num_sizes)
            ],
            "open": self.num_open,
        }

    def explain(self, bytes key not None, uint64_t now):
        """Return the facts on a block: its ref_cnt, and if it is sampled a cause and its record.

        The cause is that of its miss if it is absent. The record is None, or whether it was used
        since it was stored, and the ms since its last use and since its store or eviction, one of
        which is None.
        """
        status = self.get(key)
        cdef object ref_cnt = None if status is None else status.ref_cnt
        cdef uint64_t hashed = hash_of(self, key)
        cdef const Entry* entry = shadow_find(&self.shadow, hashed)
        cdef uint32_t age
        cdef tuple record = None
        if not self.samples(hashed):
            return ref_cnt, None, None
        if entry != NULL:
            age = <uint32_t>now - entry.changed
            record = (
                bool(entry.used),
                <uint32_t>now - entry.last_use,
                age if entry.fate == FATE_STORED else None,
                age if entry.fate == FATE_EVICTED else None,
            )
        return ref_cnt, self.cause_of(hashed), record

    def order(self):
        """Return the fingerprints of each quarter, most recent first."""
        cdef list orders = []
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
        cdef uint64_t index, blocks = 0
        if broken != NULL:
            raise AssertionError((<bytes>broken).decode())
        for index in range(self.num_open):
            blocks += self.transfers[index].size
        if blocks != self.open_blocks:
            raise AssertionError("the blocks of open transfers are counted")


# -- parts -------------------------------------------------------------------------------------


cdef void judge(WatchCore core, const SampledKey* sampled) noexcept:
    """Count a sampled block of a request by its segment, and by its cause if it missed."""
    cdef Entry* entry = shadow_find(&core.shadow, sampled.hashed)
    cdef int segment = core.num_sizes if entry == NULL else entry.segment
    cdef int quarter = shadow_quarter(&core.shadow, sampled.hashed)
    shadow_reach(&core.shadow, entry, quarter)
    core.tally.judged[quarter][segment] += 1
    if sample_of(sampled.hashed) < core.policy_below:
        core.tally.policy_judged[quarter][segment] += 1
    if sampled.met == HIT:
        if entry != NULL:
            entry.used = True
    elif sampled.met != KNOWN_HIT:
        core.tally.causes[
            core.cause_of(sampled.hashed) if sampled.met == ABSENT else sampled.met
        ] += 1


cdef void use_all(WatchCore core, uint64_t now) noexcept:
    """Use the keys that are not `seen`, last first; a new one gets its fate."""
    cdef Py_ssize_t index
    cdef const SampledKey* sampled
    cdef Entry* entry
    cdef bint is_new
    for index in range(core.num_sampled - 1, -1, -1):
        sampled = core.sampled + index
        if sampled.seen:
            continue
        is_new = sampled.fate and shadow_find(&core.shadow, sampled.hashed) == NULL
        shadow_use(&core.shadow, sampled.hashed, <uint32_t>now)
        entry = shadow_find(&core.shadow, sampled.hashed) if is_new else NULL
        if entry != NULL:
            entry.changed = <uint32_t>now
            entry.fate = sampled.fate
            entry.used = sampled.fate == FATE_STORED and sampled.met >= KNOWN_HIT


cdef void collect_key(WatchCore core, const SampledKey* sampled) noexcept:
    """Collect a key that policies see, if there is memory for it and its request."""
    cdef int quarter = shadow_quarter(&core.shadow, sampled.hashed)
    cdef CollectedRequest* request = &core.at_work[quarter]
    if (
        sample_of(sampled.hashed) >= core.keeps_below
        or core.num_collected >= MOST_KEYS
        or not grow(
            <void**>&core.requests,
            &core.request_room,
            core.num_requests + <uint64_t>core.num_quarters,
            sizeof(CollectedRequest),
            DRAIN_KEYS,
        )
    ):
        return
    try:
        (<list>core.keys[quarter]).append(<object>sampled.key)
    except MemoryError:
        return
    if sampled.part <= ASKED and request.end == request.num_keys:
        request.end += 1
        if sampled.part == BEFORE and request.first in (0, <int32_t>request.num_keys):
            request.first = <int32_t>request.end
    request.num_keys += 1
    core.num_collected += 1


cdef void collect(WatchCore core, int event) noexcept:
    """Collect the keys that are not `seen` as a request, or as an event that they are part of."""
    cdef int quarter
    cdef Py_ssize_t index
    cdef bint is_aside
    cdef uint32_t place = 0
    cdef CollectedRequest* request
    # Keys that are not judged follow the others, which are contiguous.
    for is_aside in range(2):
        for index in range(core.num_sampled):
            if (core.sampled[index].part == ASIDE) == is_aside and not core.sampled[index].seen:
                collect_key(core, core.sampled + index)
    for quarter in range(core.num_quarters):
        request = &core.at_work[quarter]
        if request.num_keys:
            if place == 0 and event != RELEASED:
                place = keep_told(core)
            if event:
                request.first = event
            request.told = place
            request.quarter = <uint32_t>quarter
            request.stretch = core.stretch
            core.requests[core.num_requests] = request[0]
            core.num_requests += 1
            core.num_collected += 1
            memset(request, 0, sizeof(CollectedRequest))
    core.due = core.due or core.num_collected >= DRAIN_KEYS


cdef uint32_t keep_told(WatchCore core) noexcept:
    """Keep what the client of the request at work has said; return its place, 0 for nothing."""
    if core.hints is None:
        return 0
    try:
        core.told.append(core.hints)
    except MemoryError:
        return 0
    return <uint32_t>len(core.told) - 1


cdef void meet_batch(WatchCore core, Table* table, Batch* batch, uint8_t but) noexcept:
    """Meet the sampled keys of a batch whose nodes do not have a flag."""
    cdef Py_ssize_t index
    cdef const Node* node
    cdef uint64_t hashed
    if not core.begin(batch.size):
        return
    for index in range(batch.size):
        if batch.node_ids[index] == NIL:
            hashed = batch.hashes[index]
        else:
            node = node_at(table, batch.node_ids[index])
            if not node.flags & SAMPLED or node.flags & but:
                continue
            hashed = hash_node(table, node)
        if core.samples(hashed):
            core.meet(hashed, batch.items[index], BEHIND, ABSENT, FATE_UNKNOWN)


cdef void meet_list(WatchCore core, list keys, Py_ssize_t admitted) noexcept:
    """Meet the sampled keys of a list, with their fates if it is that of a store."""
    cdef Py_ssize_t index
    if core.begin(len(keys)):
        for index in range(len(keys)):
            meet_key(core, keys[index], BEHIND, ABSENT, fate_of(index, admitted))


cdef void meet_key(WatchCore core, object key, uint8_t part, uint8_t met, uint8_t fate) noexcept:
    """Meet a key if it is sampled."""
    cdef uint64_t hashed = hash_of(core, key)
    if core.samples(hashed):
        core.meet(hashed, <PyObject*>key, part, met, fate)


cdef uint64_t hash_of(WatchCore core, object key) noexcept:
    return kvo_hash(
        <const uint8_t*>PyBytes_AS_STRING(key), <uint64_t>len(<bytes>key), core.secret
    )


cdef void note_finish(double* early, uint8_t met) noexcept:
    """Note how a request that finishes meets a block that it stored."""
    if met != ABSENT:
        early[0] += ((met != PENDING) - early[0]) / LAG_STEPS


cdef int64_t ending_id(uint32_t kind, Table* table, uint32_t node_id) noexcept:
    """Return the id of a block whose load or store ends, -1 if it is not being stored."""
    if kind == LOAD or meets(table, node_id) == PENDING:
        return own_id(table, node_id, node_at(table, node_id))
    return -1


cdef void close_stores(WatchCore core, const int64_t* block_ids, Py_ssize_t size) noexcept:
    """Close the newest stores whose blocks follow each other; -1 stands for others."""
    cdef uint64_t index, at = 0, end = <uint64_t>size
    while at < end:
        if block_ids[at] < 0:
            at += 1
            continue
        index = core.num_open
        while index and not begins(core.transfers + index - 1, block_ids + at, end - at):
            index -= 1
        if index == 0:
            return
        at += core.transfers[index - 1].size
        close_now(core, index - 1)


cdef bint begins(const Transfer* transfer, const int64_t* block_ids, uint64_t size) noexcept:
    """Return whether some blocks begin with those of a store."""
    return (
        transfer.kind == STORE
        and transfer.size <= size
        and transfer.first == block_ids[0]
        and transfer.last == block_ids[transfer.size - 1]
    )


cdef bint judging(
    WatchCore core, Py_ssize_t size, Py_ssize_t num_hits, bint met_pending
) noexcept:
    """Count a request that asks for so many blocks, and meet those before them."""
    cdef Py_ssize_t index, num_before = 0 if core.before is None else len(core.before)
    core.count_request(size, size - num_hits, met_pending, num_before + size)
    if not core.begin(num_before + size):
        return False
    for index in range(num_before):
        meet_key(core, core.before[index], BEFORE, ABSENT, FATE_UNKNOWN)
    return True


cdef void close_now(WatchCore core, uint64_t index) noexcept:
    """Close a transfer that has ended; note how long a store took."""
    cdef double requests = <double>(core.counters[REQUESTS] - core.transfers[index].request)
    if core.transfers[index].kind == STORE:
        core.lag = requests if core.lag < 0 else core.lag + (requests - core.lag) / LAG_STEPS
    close_at(core, index)


cdef void close_at(WatchCore core, uint64_t index) noexcept:
    """Remove a transfer."""
    cdef Transfer* transfer = core.transfers + index
    core.open_blocks -= transfer.size
    core.num_open -= 1
    discard(transfer.block_ids)
    memmove(transfer, transfer + 1, (core.num_open - index) * sizeof(Transfer))


cdef uint64_t held(WatchCore core, int size) noexcept:
    """Return the sampled blocks that a size holds, of all quarters."""
    cdef uint64_t found = 0
    cdef int quarter, index
    for quarter in range(core.num_quarters):
        for index in range(size + 1):
            found += core.shadow.lists[quarter].counts[index]
    return found


def met_as(status):
    """Return how a lookup that has stopped before meets a block."""
    if status is None:
        return ABSENT
    return PENDING if status.ref_cnt < 0 else BROKEN_PREFIX
