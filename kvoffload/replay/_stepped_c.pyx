"""A miniature that serves a trace as vLLM's scheduler serves it: prompts in steps.

Structure
    The calls that vLLM makes for a request of one full group over the steps of a miniature: after
    each step the blocks complete by then are offered; a refused offer is repeated with the next; a
    store ends before the second step after it; blocks are used at the end. `SteppedRequest` in
    ``kvoffload.replay.serving`` is the same over a manager's calls, with the reasons, and for
    several groups; tests hold both to each other.
Invariants
    Flags of a block that is repeated in a prompt are those of its first place.
Cost
    O(blocks of the prompt) per step, plus the policy.
"""

cimport cython
from cpython.object cimport PyObject
from libc.math cimport NAN, isnan
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

cimport numpy as cnp

from kvoffload._core.batch cimport (
    Batch,
    batch_close,
    batch_ensure,
    batch_part,
    batch_set,
    find_changed,
    item_key,
    item_length,
)
from kvoffload._core.items cimport first_bad, list_items
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.table cimport Node, holds_key, node_at
from kvoffload.policies._miniature_c cimport Miniature, data_of, new_counts
from kvoffload.policies._steps_c cimport (
    make_ready,
    num_ready,
    release_unshared,
    resident,
    serve_at_once,
    touch_as_stored,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload._checks import batch_error

cnp.import_array()

# What a request has done with a block.
cdef enum:
    USED = 1        # loaded, or offered while it was there
    MISSED = 2      # offered while it was absent
    OWN = 4         # stored
    ENDED = 8       # and readable before the request ends

# A block of the request at work that is being stored.
cdef struct Own:
    int64_t step
    uint32_t index
    uint32_t node_id


@cython.final
cdef class SteppedRows:
    """A cache that serves the requests of a trace in steps.

    The flags say from which uses the policy learns; see `Learning` in ``kvoffload.replay.serving``.
    """

    cdef readonly Miniature cache
    cdef bint is_lru, is_arc, from_ghosts, by_chain
    cdef Batch part             # some blocks of the request; its items are its own array
    cdef uint64_t part_room
    cdef uint8_t* stored        # (part_room,) whether each block counts as being stored
    cdef uint64_t stored_room
    cdef uint8_t* uses          # (size,) flags by place in the prompt
    cdef uint64_t uses_room
    cdef uint32_t* same         # (size,) the first place of the same block
    cdef uint64_t same_room
    cdef uint32_t* places       # (blocks of the trace,) the first place in the prompt
    cdef uint64_t places_room
    cdef Own* own               # (num_own,), ended before `next_own`
    cdef uint64_t own_room
    cdef uint64_t num_own
    cdef uint64_t next_own
    cdef Py_ssize_t first       # most loads and offers begin at this block
    cdef Hint begins            # of the request at work
    cdef Hint finishes
    cdef const Hint* hint       # NULL for a trace without hints
    cdef const Hint* last       # NULL if none is given at the end

    def __cinit__(
        self,
        Miniature cache not None,
        *,
        bint is_lru,
        bint is_arc,
        bint from_ghosts,
        bint by_chain,
    ):
        memset(&self.part, 0, sizeof(Batch))
        self.cache = cache
        self.is_lru, self.is_arc = is_lru, is_arc
        self.from_ghosts, self.by_chain = from_ghosts, by_chain

    def __dealloc__(self):
        discard(self.part.items)
        discard(self.stored)
        discard(self.uses)
        discard(self.same)
        discard(self.places)
        discard(self.own)
        batch_close(&self.part)

    cdef bint ensure(self, uint64_t size) noexcept:
        return (
            batch_ensure(&self.part, <Py_ssize_t>size)
            and grow(
                <void**>&self.part.items, &self.part_room, size, sizeof(PyObject*), 1
            )
            and grow(<void**>&self.stored, &self.stored_room, size, 1, 1)
            and grow(<void**>&self.uses, &self.uses_room, size, 1, 1)
            and grow(<void**>&self.same, &self.same_room, size, sizeof(uint32_t), 1)
            and grow(<void**>&self.own, &self.own_room, size, sizeof(Own), 1)
        )

    def serve_rows(
        self,
        list keys,
        starts,
        blocks,
        first,
        *,
        int64_t block_tokens,
        int64_t step_tokens,
        double position,
        double lag,
        told=None,
    ):
        """Serve the requests of a trace; return the counts of each, (rows, 5) int64.

        Arguments are those of `Miniature.serve_rows`, and the tokens of a block and of a step. With
        a `lag` of 0 a store ends in its request, else before the row that follows `lag` others.
        """
        cdef const int64_t* start = <const int64_t*>data_of("starts", starts, cnp.NPY_INT64)
        cdef const int64_t* before = <const int64_t*>data_of("first", first, cnp.NPY_INT64)
        cdef const uint32_t* all_blocks = <const uint32_t*>data_of("blocks", blocks, cnp.NPY_UINT32)
        cdef cnp.npy_intp num_rows = len(first)
        cdef Py_ssize_t row, index, size
        cdef uint32_t place
        cdef uint64_t num_keys = len(keys)
        cdef bint ends
        cdef PyObject** items = list_items(keys)
        cdef Miniature cache = self.cache
        cdef cnp.ndarray counts = new_counts(num_rows)
        if len(starts) != num_rows + 1 or block_tokens < 1 or step_tokens < 1:
            raise ValueError("starts must have one more than first, tokens be 1 or more")
        if told is not None and len(told) != num_rows:
            raise ValueError(f"told must have {num_rows} rows, got {len(told)}")
        if first_bad(items, 0, <Py_ssize_t>num_keys) != <Py_ssize_t>num_keys:
            raise batch_error(keys, "keys")
        if num_keys > self.places_room:
            if not grow(
                <void**>&self.places, &self.places_room, num_keys, sizeof(uint32_t), 1
            ):
                raise MemoryError()
            memset(self.places, 0, self.places_room * sizeof(uint32_t))
        for row in range(num_rows):
            size = <Py_ssize_t>(start[row + 1] - start[row])
            if not 0 <= start[row] <= start[row + 1] <= len(blocks) or not 0 <= before[row] <= size:
                raise ValueError(f"row {row} must lie in blocks, and first in the row")
            if not cache.ensure(size) or not self.ensure(<uint64_t>size):
                raise MemoryError()
            batch_set(&cache.batch, cache.items, size)
            for index in range(size):
                place = all_blocks[start[row] + index]
                if place >= num_keys:
                    raise ValueError(f"row {row} must have keys, got {place}")
                cache.items[index] = items[place]
                self.uses[index] = 0
                # The place is right if the prompt has this block there.
                self.same[index] = self.places[place]
                if (
                    self.same[index] >= <uint32_t>index
                    or all_blocks[start[row] + self.same[index]] != place
                ):
                    self.same[index] = self.places[place] = <uint32_t>index
            cache.subtract_counts(counts, row)
            self.hint = self.last = NULL
            if told is not None:
                now, at_begin, at_finish, *_ = told[row]
                self.hint = cache.policy.hint_of(at_begin, now, &self.begins)
                self.last = cache.policy.hint_of(at_finish, None, &self.finishes, True)
                ends = self.last != NULL and self.last.ends
                if ends and not cache.policy.ensure_release(size):
                    raise MemoryError()
            self.serve(
                <Py_ssize_t>before[row],
                block_tokens,
                step_tokens,
                NAN if lag == 0 else position,
                position - lag,
            )
            if cache.no_memory:
                raise MemoryError()
            cache.add_counts(counts, row)
            position += 1.0
        return counts

    cdef Py_ssize_t serve(
        self,
        Py_ssize_t local,
        int64_t block_tokens,
        int64_t step_tokens,
        double position,
        double before,
    ) noexcept:
        """Serve the request that was taken, of which the accelerator has `local` blocks."""
        cdef Miniature cache = self.cache
        cdef Batch* batch = &cache.batch
        cdef Batch asked
        cdef Py_ssize_t size = batch.size, hits, index, start, stop, waiting = -1
        cdef int64_t kept, end, length, step = 0, last = 0
        cdef uint64_t evicted = cache.evicted
        cache.no_memory = False
        self.num_own = self.next_own = 0
        self.first = 0
        cache.end_stores(before)
        find_changed(cache.policy.table, batch)
        asked = batch_part(batch, local, batch.size)
        hits = num_ready(cache.policy.table, &asked)
        cache.asked += <uint64_t>asked.size
        cache.hits += <uint64_t>hits
        if self.by_chain:  # such a policy learns from the whole request
            cache.policy.begin_request(batch, self.hint)
        if hits:
            self.first = local
            for index in range(local, local + hits):
                self.uses[self.same[index]] |= USED
        start = local + hits if hits else 0
        kept = (local + hits) * block_tokens
        # One token at least is computed, which may be behind the last block.
        length = max(size * block_tokens, kept + 1)
        end = kept
        while end < length:
            end = min((end // block_tokens + 1) * block_tokens, length)
            step = (end - kept + step_tokens - 1) // step_tokens
            end = min(kept + step * step_tokens, length)
            stop = <Py_ssize_t>(end // block_tokens)
            if stop > start:
                last = step
                self.end_own(last - 1)
                if waiting < 0:
                    waiting = start
                if self.offer(waiting, min(stop, size), last, position):
                    waiting = -1
                start = stop
        for step in range(last + 1, last + 3):  # of the answer: then all stores have ended
            if waiting >= 0 and self.end_own(step - 1) and self.offer(
                waiting, min(start, size), step, position
            ):
                waiting = -1
        batch.size, batch.found_at = size, 0
        self.use_all(cache.evicted > evicted)
        if self.hint != NULL:
            self.end_session()
        self.end_own(last + 4)
        return hits

    cdef bint end_own(self, int64_t before) noexcept:
        """End the stores of earlier steps; return whether there were any."""
        cdef CompiledPolicy policy = self.cache.policy
        cdef Batch* batch = &self.cache.batch
        cdef bint has_ended = False
        cdef const Own* own
        cdef Node* node
        while self.next_own < self.num_own and self.own[self.next_own].step < before:
            own = &self.own[self.next_own]
            node = node_at(policy.table, own.node_id)
            # A pending block keeps its node; one that was ready before may have left it.
            if node.block.ref_cnt < 0 and holds_key(
                node, item_key(batch, own.index), item_length(batch, own.index)
            ):
                make_ready(policy, own.node_id, node)
            self.uses[own.index] |= ENDED
            self.next_own += 1
            has_ended = True
        return has_ended

    cdef bint offer(
        self, Py_ssize_t start, Py_ssize_t stop, int64_t step, double position
    ) noexcept:
        """Offer a part of the blocks; return whether the offer was accepted."""
        cdef Miniature cache = self.cache
        cdef CompiledPolicy policy = cache.policy
        cdef Batch* batch = &cache.batch
        cdef Batch offered
        cdef Py_ssize_t index, num_admitted, chosen
        cdef Node* node
        cdef uint8_t* uses
        if self.is_lru:
            # The nodes of later blocks are not needed before these are offered.
            batch.size, batch.found_at = stop, 0
            find_changed(policy.table, batch)
            if self.choose(USED | OWN, 0, stop):
                policy.touch_batch(&self.part)  # until the request ends, they count as newest
        offered = batch_part(batch, start, stop)
        find_changed(policy.table, &offered)
        if not self.is_lru and not self.by_chain:
            self.part.size = 0
            for index in range(start, stop):
                if resident(policy.table, batch, index) == NULL and not (
                    self.uses[self.same[index]] & MISSED
                ):
                    self.add(index)
            policy.touch_batch(&self.part)  # it may learn from blocks that have left
            find_changed(policy.table, &offered)
        for index in range(start, stop):
            node = resident(policy.table, batch, index)
            uses = self.uses + self.same[index]
            if node == NULL:
                uses[0] |= MISSED
            elif not uses[0] & OWN and node.block.ref_cnt >= 0:
                uses[0] |= USED
        num_admitted = cache.store(&offered, position, False)
        batch.found_at = 0
        if num_admitted < 0:
            return False
        for chosen in range(num_admitted):
            index = start + <Py_ssize_t>offered.indexes[chosen]
            self.uses[self.same[index]] |= OWN
            if isnan(position):  # the store ends in this request
                self.note_own(Own(step, self.same[index], offered.chosen[chosen]))
        return True

    cdef void note_own(self, Own own) noexcept:
        """Note a block that is being stored; there are at most as many as the prompt has."""
        if self.num_own == self.own_room:
            self.num_own -= self.next_own
            memmove(self.own, self.own + self.next_own, self.num_own * sizeof(Own))
            self.next_own = 0
        self.own[self.num_own] = own
        self.num_own += 1

    cdef void use_all(self, bint has_evicted) noexcept:
        """Use the loaded and offered blocks; the first is the most recent."""
        cdef CompiledPolicy policy = self.cache.policy
        cdef Batch* batch = &self.cache.batch
        cdef Py_ssize_t index
        cdef uint8_t uses
        cdef Node* node
        find_changed(policy.table, batch)
        if self.is_arc:
            # A block loaded, evicted and offered again counts as used again.
            for index in range(batch.size):
                uses = self.uses[self.same[index]]
                node = resident(policy.table, batch, index)
                if uses & USED and uses & OWN and node != NULL and node.block.ref_cnt < 0:
                    make_ready(policy, batch.node_ids[index], node)
        if self.from_ghosts and has_evicted:
            # Blocks evicted by the request itself do not come back.
            for index in range(batch.size):
                if resident(policy.table, batch, index) == NULL:
                    uses = self.uses[self.same[index]]
                    self.uses[self.same[index]] = 0 if uses & OWN else uses & MISSED
        if not self.choose(USED | OWN, MISSED if self.by_chain else 0, batch.size):
            return
        if self.by_chain:
            policy.finish_request(&self.part, self.last)
        elif self.is_lru:  # what stored them makes no difference
            policy.touch_batch(&self.part)
        else:
            touch_as_stored(policy, &self.part, self.stored)

    cdef void end_session(self) noexcept:
        """Note the session of the request; release its blocks if the session ends."""
        cdef CompiledPolicy policy = self.cache.policy
        cdef Batch* batch = &self.cache.batch
        cdef Py_ssize_t known = batch.size
        find_changed(policy.table, batch)
        while known and (
            self.uses[self.same[known - 1]] & OWN or resident(policy.table, batch, known - 1) == NULL
        ):
            known -= 1
        serve_at_once(policy.table, batch, known, 1)
        if self.last != NULL and self.last.ends:
            release_unshared(policy, batch)

    cdef Py_ssize_t choose(self, uint8_t flags, uint8_t others, Py_ssize_t size) noexcept:
        """Put the blocks with one of `flags` into the part; return their number.

        Blocks with one of the `others` are put there, too.
        """
        cdef Py_ssize_t index, number = 0, run = 0
        cdef uint8_t wanted = flags | others
        self.part.size = 0
        for index in range(size):
            number += self.same[index] == <uint32_t>index and self.uses[index] & wanted != 0
        # Mostly these are all.
        while run < number and self.first + run < size and (
            self.uses[self.same[self.first + run]] & wanted
        ):
            run += 1
        if run == number:
            for index in range(self.first, self.first + run):
                self.add(index)
            return number
        for index in range(size):
            if self.uses[self.same[index]] & wanted:
                self.add(index)
        return number

    cdef void add(self, Py_ssize_t index) noexcept:
        """Add a block of the request, whose node was found, to the part."""
        cdef const Batch* batch = &self.cache.batch
        cdef Py_ssize_t place = self.part.size
        cdef uint8_t uses = self.uses[self.same[index]]
        self.part.items[place] = batch.items[index]
        self.part.node_ids[place] = batch.node_ids[index]
        self.part.hashes[place] = batch.hashes[index]  # read where there is no node
        self.stored[place] = uses & (ENDED | USED) == ENDED
        self.part.size += 1
