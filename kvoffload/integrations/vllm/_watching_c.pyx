"""Requests are revealed to a watch incrementally; see ``_watching_c.pxd``."""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from kvoffload._core.table cimport NIL, Node, sample_of
from kvoffload.integrations.vllm._request_c cimport (
    CAUSE_SHIFT,
    INSERTED,
    LOADED,
    NOT_ASKED,
    REFUSED,
    SeenKey,
    SortKey,
    find_position,
    group_of,
    last_position,
)
from kvoffload.integrations.vllm._rules_c cimport NEW, OBSERVED, READY
from kvoffload.managers._watch_c cimport (
    ASIDE,
    ASKED,
    BEFORE,
    BEHIND,
    BROKEN_PREFIX,
    DECLINED_BLOCKS,
    FATE_DECLINED,
    FATE_EVICTED,
    FATE_REFUSED,
    FATE_STORED,
    KNOWN_HIT,
    LOAD,
    PENDING,
    TAIL_MISSED_TOKENS,
)
from kvoffload.policies._steps_c cimport resident

cdef enum:
    CAUSE_BITS = 7


cdef inline int part_of(
    RequestAccess access, const SortKey* sort_key, const uint8_t* positioned, int64_t judged
) noexcept:
    """Return the relation of a key to those that its request looked up.

    A request that looked anything up counts as having looked up a key without a position. Of
    several groups, one is judged for all.
    """
    if judged != ALL_GROUPS and judged != sort_key.group:
        return ASIDE
    if access.asked_from == NOT_ASKED:
        return BEFORE
    if not positioned[sort_key.seen_index]:
        return ASKED
    if sort_key.position > access.asked_until:
        return BEHIND
    return ASKED if sort_key.position >= access.asked_from else BEFORE


cdef struct Asked:
    uint64_t keys
    uint64_t missed
    bint met_pending


cdef Asked count_asked(RequestAccess access, KeyOrder order, int64_t judged) noexcept:
    """Count the keys that a request looked up, and those of them that it did not load."""
    cdef Asked found = Asked(0, 0, False)
    cdef const SortKey* sort_keys = order.sort_keys
    cdef const SeenKey* seen = access.seen
    cdef bint by_position = order.by_position
    cdef uint64_t at, first = 0, after = access.size
    cdef uint8_t uses
    if access.asked_from == NOT_ASKED:
        return found
    if by_position:  # then they are contiguous
        while first < after and sort_keys[first].position < access.asked_from:
            first += 1
        while first < after and sort_keys[after - 1].position > access.asked_until:
            after -= 1
        if after - first == access.size and judged == ALL_GROUPS and access.passed is None:
            # Pending keys are skipped.
            return Asked(access.size, access.size - access.num_loaded, False)
    for at in range(first, after):
        if judged != ALL_GROUPS and judged != sort_keys[at].group:
            continue
        if not by_position and part_of(access, sort_keys + at, order.positioned, judged) != ASKED:
            continue
        found.keys += 1
        uses = seen[sort_keys[at].seen_index].uses
        if not uses & LOADED:
            found.missed += 1
            found.met_pending |= (uses >> CAUSE_SHIFT) & CAUSE_BITS == PENDING
    return found


cdef class RequestWatch:
    """What a manager of vLLM's interface tells the core of its watch."""

    def __cinit__(self, WatchCore core not None, CompiledSteps steps not None, Contexts contexts):
        self.core = core
        self.steps = steps
        self.table = steps._policy.table
        self.contexts = contexts
        self.judged = ALL_GROUPS
        core.look_at(self.table, steps._policy.get)
        core.waits_for_stores = True

    def tell_apart(self, dict full not None, dict others not None):
        """Judge only the first full group; the others take room. See `KVGroups`."""
        if len(full) + len(others) == 1 and full:
            return
        self.judged = NO_GROUP
        if full:
            self.judged, self.core.block_tokens = next(iter(full.items()))
            if others:
                self.full_groups = full
        else:
            self.core.block_tokens = None

    # -- lookups -------------------------------------------------------------------------------

    cdef int ask(self, object key, object req_context) except -1:
        """Record that a request other than the last one looks up a key.

        Only its first and last key are kept: vLLM looks up in the order of positions, forwards or,
        in a sliding window, backwards.
        """
        cdef RequestAccess access
        cdef object positions
        self.settle()
        self.asker = req_context
        self.first_asked = self.first_full = key
        self.asked_group = group_of(<PyObject*>key)
        self.full_until = self.asker_from = self.asker_until = NOT_ASKED
        self.full_missed = False
        try:
            positions = self.contexts.positions_of(req_context)
            read_positions(self, positions, key)
            access = self.contexts.access_of(req_context)
            if access is None:
                # vLLM's tiering manager does not notify its primary tier of new requests.
                access = self.contexts.new_access()
                access.asked_only = True
                self.contexts.attach(req_context, access, None)
            self.asker_access = access
            self.asker_positions = positions
        except Exception:  # of a foreign context, and a watch must change nothing
            self.asker_until = NOT_ASKED
        self.keeps_last = self.asker_from == NOT_ASKED or self.full_groups is not None
        return 0

    cdef int ask_on(self, object key) except -1:
        """Record how far the full groups reach: they are looked up first, one after another.

        Each ends at the first absent chunk, or where the previous one ended, and nothing changes
        until a key of the next group is looked up. A lower full group, or one after a window or a
        state, begins another lookup: the request waits for a store, or looks up what the others
        have left, which meets no absent chunk.
        """
        cdef uint32_t group = group_of(<PyObject*>key), before = self.asked_group
        cdef dict full = self.full_groups
        cdef RequestAccess access
        if group == before:
            return 0
        self.asked_group = group
        try:
            if before not in full and group not in full:
                return 0
            if before not in full or group in full and group < before:
                self.first_full = key
                self.full_until = NOT_ASKED
                self.full_missed = False
                return 0
            until = self.asker.get_offload_key_position(self.last_asked)
            if until is None:
                return 0
            if not holds(self, self.last_asked):
                until -= full[before]
                self.full_missed = True
            self.full_until = min(self.full_until, <int64_t>until)
            if group not in full:
                # A hit of a group that drafts omits the last chunk; the next begins there.
                until = self.asker.get_offload_key_position(key)
                if until is not None:
                    self.full_until = min(self.full_until, <int64_t>until)
            access = self.asker_access
            # Its first access decides, as for hits.
            if group not in full and access is not None and access.size == 0:
                if not self.full_missed:
                    self.full_until = max(self.full_until, access.full_until)
                access.full_until = self.full_until
        except Exception:  # of a foreign context, and a watch must change nothing
            pass
        return 0

    cdef int settle(self) except -1:
        cdef object asker = self.asker, first = self.first_asked, last = self.last_asked
        cdef object positions = self.asker_positions
        cdef RequestAccess access = self.asker_access
        cdef Py_ssize_t cursor = 0
        cdef int64_t at
        if asker is None:
            return 0
        self.forget_asker()
        try:
            if access is not None:
                if self.asker_from == NOT_ASKED:
                    for key in (first, last):
                        position = find_position(asker, positions, <PyObject*>key, &cursor)
                        at = -NOT_ASKED if position is None else <int64_t>position
                        self.asker_from = min(self.asker_from, at)
                access.asked_from = min(access.asked_from, self.asker_from)
                access.asked_until = max(access.asked_until, self.asker_until)
                if self.full_groups is not None and access.size == 0:
                    settle_groups(self, asker, access, last)
        except Exception:  # of a foreign context, and a watch must change nothing
            pass
        return 0

    cdef void forget_asker(self) noexcept:
        self.asker = self.first_asked = self.last_asked = None
        self.asker_positions = self.asker_access = None

    # -- loads and offers ----------------------------------------------------------------------

    cdef void c_loading(
        self, Batch* batch, const Access* accesses, RequestAccess access
    ) noexcept:
        cdef Py_ssize_t index
        cdef uint32_t found
        cdef RequestAccess passed = access.passed
        cdef bint has_passed = passed is not None
        cdef uint32_t below = self.core.sample_below
        cdef uint8_t* uses
        for index in range(batch.size):
            if has_passed and accesses[index].flags & NEW:
                found = passed.find(batch.items[index], batch.hashes[index])
                if found != NIL:  # it was offered before
                    uses = &access.seen[accesses[index].seen_index].uses
                    uses[0] = <uint8_t>(uses[0] & ~LOADED) | passed.seen[found].uses
            if sample_of(batch.hashes[index]) < below:
                self.core.note_used(batch.hashes[index])

    cdef void c_offered(
        self,
        Batch* batch,
        const Access* accesses,
        RequestAccess access,
        int64_t admitted,
        int64_t missing,
    ) noexcept:
        cdef Py_ssize_t index, last_admitted = batch.indexes[admitted - 1] if admitted > 0 else -1
        cdef const Access* entry
        cdef SeenKey* seen
        cdef bint has_passed = access.passed is not None, is_sampled
        cdef uint32_t below = self.core.sample_below
        cdef uint32_t now = <uint32_t>self.core.read_clock()
        for index in range(batch.size):
            entry = accesses + index
            if not entry.flags & OBSERVED:
                not_recorded(self, batch, index, access)
                has_passed = access.passed is not None
                continue
            is_sampled = sample_of(batch.hashes[index]) < below
            if not is_sampled and not has_passed:
                continue
            seen = access.seen + entry.seen_index
            if entry.flags & NEW:
                seen.uses |= missed_as(self.core, batch, index, entry, access)
            if entry.flags & READY or not is_sampled:
                continue
            if admitted < 0:
                seen.uses |= REFUSED
                self.core.note_fate(batch.hashes[index], FATE_REFUSED, now)
                continue
            seen.uses &= <uint8_t>(~REFUSED & 0xFF)
            self.core.note_fate(
                batch.hashes[index],
                FATE_STORED if index <= last_admitted else FATE_DECLINED,
                now,
            )
        if missing:
            self.core.count_offer(admitted, missing)

    # -- transfers -----------------------------------------------------------------------------

    cdef void c_begun(self, uint32_t kind, const int32_t* chunk_ids, Py_ssize_t size) noexcept:
        cdef uint32_t sum = 0
        cdef Py_ssize_t index
        cdef int32_t* own
        if size == 0:
            return
        for index in range(size):
            sum += <uint32_t>chunk_ids[index]
        own = self.core.open_transfer(
            kind,
            size,
            <int32_t>sum,
            <int32_t>sum,
            # An offer has read the clock.
            self.core.read_clock() if kind == LOAD else self.core.last_now(),
        )
        if own != NULL:
            memcpy(own, chunk_ids, <size_t>size * sizeof(int32_t))

    cdef void c_completed(self, uint32_t kind, Ended ended) noexcept:
        self.core.end_transfer(
            kind, ended.size, <int32_t>ended.sum, <int32_t>ended.sum, ended.one
        )

    # -- requests ------------------------------------------------------------------------------

    cdef void c_finished(
        self, RequestAccess access, KeyOrder order, const uint32_t* node_ids
    ) noexcept:
        cdef uint64_t at
        cdef const SortKey* sort_keys = order.sort_keys
        cdef const SeenKey* seen
        cdef Asked found = count_asked(access, order, self.judged)
        cdef uint32_t below = self.core.sample_below
        cdef uint8_t cause
        if found.keys:
            self.core.count_request(found.keys, found.missed, found.met_pending, access.size)
            if access.full_until:
                self.core.count(TAIL_MISSED_TOKENS, tail_of(access, sort_keys))
        if self.core.begin(<Py_ssize_t>access.size):
            for at in range(access.size):
                seen = access.seen + sort_keys[at].seen_index
                if sample_of(seen.hashed) < below:
                    cause = (seen.uses >> CAUSE_SHIFT) & CAUSE_BITS
                    self.core.meet(
                        seen.hashed,
                        seen.key,
                        part_of(access, sort_keys + at, order.positioned, self.judged),
                        KNOWN_HIT if seen.uses & LOADED else cause,
                        fate_of(self, seen, node_ids + at if node_ids != NULL else NULL),
                    )
        self.core.on_request()


# -- lookups ---------------------------------------------------------------------------------------


cdef int read_positions(RequestWatch watch, object positions, object key) except -1:
    """Read the largest of a request's token positions, and that of `key` if it is the least."""
    cdef PyObject* least
    watch.asker_until = last_position(positions, &least)
    if least == <PyObject*>key:
        watch.asker_from = positions[key]
    return 0


cdef int settle_groups(
    RequestWatch watch, object asker, RequestAccess access, object last
) except -1:
    """Record whether the lookup of a request that has loaded nothing hit nothing.

    Then it ended at an absent chunk of a window or a state. Otherwise the request is looked up
    again, unless the accelerator has obtained the chunks that it could load.
    """
    cdef dict full = watch.full_groups
    if watch.asked_group in full or holds(watch, last):
        access.full_until = 0
        return 0
    access.full_from = asker.get_offload_key_position(watch.first_full)
    access.full_from -= full[group_of(<PyObject*>watch.first_full)]
    return 0


cdef inline bint holds(RequestWatch watch, object key) noexcept:
    """Return whether a chunk is resident; the batch of a call at work stays valid."""
    return watch.steps.resident_node(key) != NULL


# -- offers ----------------------------------------------------------------------------------------


cdef uint8_t missed_as(
    WatchCore core, Batch* batch, Py_ssize_t index, const Access* entry, RequestAccess access
) noexcept:
    """Return the uses of a key that is recorded only now: why it was missed, or was before."""
    cdef uint32_t passed = NIL
    cdef uint8_t cause
    if access.passed is not None:
        passed = access.passed.find(batch.items[index], batch.hashes[index])
    if passed != NIL:
        return access.passed.seen[passed].uses
    if not core.samples(batch.hashes[index]):
        return 0
    cause = BROKEN_PREFIX if entry.flags & READY else core.cause_of(batch.hashes[index])
    return <uint8_t>(cause << CAUSE_SHIFT)


cdef void not_recorded(
    RequestWatch watch, Batch* batch, Py_ssize_t index, RequestAccess access
) noexcept:
    """Keep a key that was offered below the threshold, or while it was pending."""
    cdef uint64_t hashed = batch.hashes[index]
    cdef uint8_t cause = 0
    cdef Node* node = resident(watch.table, batch, index)
    if batch.node_ids[index] == NIL:
        watch.core.count(DECLINED_BLOCKS, 1)
        if watch.core.samples(hashed):
            cause = watch.core.cause_of(hashed)
            watch.core.note_fate(hashed, FATE_DECLINED, 0)
    elif node == NULL or node.block.ref_cnt >= 0:
        return  # a repeat
    else:
        cause = PENDING
    pass_over(access, batch.items[index], hashed, <uint8_t>(cause << CAUSE_SHIFT))


cdef void pass_over(
    RequestAccess access, PyObject* key, uint64_t hashed, uint8_t uses
) noexcept:
    """Keep an unrecorded key the first time; without memory it is not counted."""
    cdef uint32_t seen_index
    if access.find(key, hashed) != NIL:
        return
    try:
        if access.passed is None:
            access.passed = RequestAccess(access.owner, access.generation)
    except MemoryError:
        return
    if access.passed.find(key, hashed) != NIL or not access.passed.ensure(1):
        return
    seen_index = access.passed.find_or_add(key, hashed)
    access.passed.seen[seen_index].uses = uses


# -- requests --------------------------------------------------------------------------------------


cdef uint64_t tail_of(RequestAccess access, const SortKey* sort_keys) noexcept:
    """Return the tokens that the full groups had and the others kept from being loaded.

    A load ends with the group whose last loaded key comes first.
    """
    cdef const SortKey* sort_key
    cdef uint64_t at, groups = 0, bit
    cdef int64_t loaded = access.full_from
    for at in range(access.size, 0, -1):
        sort_key = &sort_keys[at - 1]
        if not access.seen[sort_key.seen_index].uses & LOADED or sort_key.group >= 64:
            continue
        bit = <uint64_t>1 << sort_key.group
        if not groups & bit:
            groups |= bit
            loaded = sort_key.position
    return <uint64_t>max(access.full_until - loaded, <int64_t>0)


cdef uint8_t fate_of(
    RequestWatch watch, const SeenKey* seen, const uint32_t* node_id
) noexcept:
    """Return the fate of a key after its request.

    `node_id` is its node, NIL if it is not resident, or NULL if that is not known.
    """
    if node_id[0] != NIL if node_id != NULL else holds(watch, <object>seen.key):
        return FATE_STORED
    if seen.uses & INSERTED:
        return FATE_EVICTED
    return FATE_REFUSED if seen.uses & REFUSED else FATE_DECLINED


cdef RequestAccess all_keys(RequestAccess access):
    cdef RequestAccess passed = access.passed, every
    cdef uint64_t index
    cdef uint32_t seen_index
    every = RequestAccess(access.owner, access.generation)
    if not every.ensure(access.size + passed.size):
        raise MemoryError()
    every.passed = passed  # they are also among its own
    every.asked_from = access.asked_from
    every.asked_until = access.asked_until
    every.full_until = access.full_until
    every.full_from = access.full_from
    for index in range(access.size):
        seen_index = every.find_or_add(access.seen[index].key, access.seen[index].hashed)
        every.seen[seen_index].uses = access.seen[index].uses
    for index in range(passed.size):
        if access.find(passed.seen[index].key, passed.seen[index].hashed) == NIL:
            seen_index = every.find_or_add(passed.seen[index].key, passed.seen[index].hashed)
            every.seen[seen_index].uses = passed.seen[index].uses
    return every
