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

from kvoffload._core.batch cimport (
    Batch,
    batch_close,
    batch_ensure,
    batch_part,
    find_changed,
    item_key,
    item_length,
)
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.table cimport IS_SHARED, Node, holds_key, node_at
from kvoffload.policies._miniature_c cimport Miniature
from kvoffload.policies._steps_c cimport (
    make_ready,
    resident,
    serve_at_once,
    touch_as_stored,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

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


# Without tp_clear, as its base.
@cython.final
@cython.no_gc_clear
cdef class SteppedMiniature(Miniature):
    """A cache that serves the rows of a trace in steps; it has no `changes`."""

    cdef int64_t block_tokens, step_tokens
    cdef bint is_lru, is_arc, from_ghosts, by_chain     # see `Learning` in ``serving.py``
    cdef Batch part             # some blocks of the request; its items are its own array
    cdef uint64_t part_room
    cdef uint8_t* is_stored     # (part_room,) whether each block counts as being stored
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
    cdef Py_ssize_t local       # most loads and offers begin at this block
    cdef const Hint* at_begin   # of the request at work; NULL for a trace without hints
    cdef const Hint* at_finish  # NULL if none is given at the end

    def __dealloc__(self):
        discard(self.part.items)
        discard(self.is_stored)
        discard(self.uses)
        discard(self.same)
        discard(self.places)
        discard(self.own)
        batch_close(&self.part)

    cdef bint ensure(self, Py_ssize_t size) noexcept:
        cdef uint64_t room = <uint64_t>size
        return (
            Miniature.ensure(self, size)
            and batch_ensure(&self.part, size)
            and grow(<void**>&self.part.items, &self.part_room, room, sizeof(PyObject*), 1)
            and grow(<void**>&self.is_stored, &self.stored_room, room, 1, 1)
            and grow(<void**>&self.uses, &self.uses_room, room, 1, 1)
            and grow(<void**>&self.same, &self.same_room, room, sizeof(uint32_t), 1)
            and grow(<void**>&self.own, &self.own_room, room, sizeof(Own), 1)
        )

    def serve_rows(
        self,
        list keys,
        *rows,
        int64_t block_tokens,
        int64_t step_tokens,
        bint is_lru,
        bint is_arc,
        bint from_ghosts,
        bint by_chain,
        **options,
    ):
        """Serve the requests of a trace; return the counts of each, (rows, 5) int64.

        Other arguments are those of `Miniature.serve_rows`. The tokens are those of a block and of
        a step; the flags say from which uses the policy learns.
        """
        if block_tokens < 1 or step_tokens < 1:
            raise ValueError("the tokens of a block and of a step must be 1 or more")
        self.block_tokens, self.step_tokens = block_tokens, step_tokens
        self.is_lru, self.is_arc = is_lru, is_arc
        self.from_ghosts, self.by_chain = from_ghosts, by_chain
        if <uint64_t>len(keys) > self.places_room:
            if not grow(
                <void**>&self.places, &self.places_room, len(keys), sizeof(uint32_t), 1
            ):
                raise MemoryError()
            memset(self.places, 0, self.places_room * sizeof(uint32_t))
        return Miniature.serve_rows(self, keys, *rows, **options)

    cdef bint serve_row(
        self, const Hint* hint, const Hint* last, bint is_told, double position, double before
    ) noexcept:
        cdef Batch* batch = &self.batch
        cdef Batch asked
        cdef Py_ssize_t size = batch.size, hits, index, start, stop, waiting = -1
        cdef int64_t kept, end, length, step = 0, last_step = 0
        cdef uint64_t evicted = self.evicted
        self.no_memory = False
        self.num_own = self.next_own = 0
        self.local = 0
        self.at_begin, self.at_finish = hint, last
        self.find_same()
        self.end_stores(before)
        hits = self.ask()
        if self.by_chain:  # such a policy learns from the whole request
            self.policy.begin_request(batch, self.at_begin)
        if hits:
            self.local = self.first
            for index in range(self.first, self.first + hits):
                self.uses[self.same[index]] |= USED
        if before == position:  # the store ends in this request
            position = NAN
        start = self.first + hits if hits else 0
        kept = (self.first + hits) * self.block_tokens
        # One token at least is computed, which may be behind the last block.
        length = max(size * self.block_tokens, kept + 1)
        end = kept
        while end < length:
            end = min((end // self.block_tokens + 1) * self.block_tokens, length)
            step = (end - kept + self.step_tokens - 1) // self.step_tokens
            end = min(kept + step * self.step_tokens, length)
            stop = <Py_ssize_t>(end // self.block_tokens)
            if stop > start:
                last_step = step
                self.end_steps(step - 1)
                if waiting < 0:
                    waiting = start
                if self.offer(waiting, min(stop, size), step, position):
                    waiting = -1
                start = stop
        # Steps of the answer: after them all stores have ended.
        for step in range(last_step + 1, last_step + 3):
            if waiting >= 0 and self.end_steps(step - 1) and self.offer(
                waiting, min(start, size), step, position
            ):
                waiting = -1
        batch.size, batch.found_at = size, 0
        self.use_all(self.evicted > evicted)
        if is_told:
            self.end_session()
        self.end_steps(last_step + 4)
        return not self.no_memory

    cdef void find_same(self) noexcept:
        """Note where each block of the request is first in the prompt, and that none is used."""
        cdef Py_ssize_t index
        cdef uint32_t number, place
        for index in range(self.batch.size):
            number = self.numbers[index]
            place = self.places[number]
            # The place is right if the prompt has this block there.
            if place >= <uint32_t>index or self.numbers[place] != number:
                place = self.places[number] = <uint32_t>index
            self.same[index] = place
            self.uses[index] = 0

    cdef bint end_steps(self, int64_t before) noexcept:
        """End the stores of earlier steps; return whether there were any."""
        cdef CompiledPolicy policy = self.policy
        cdef Batch* batch = &self.batch
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
        cdef CompiledPolicy policy = self.policy
        cdef Batch* batch = &self.batch
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
        num_admitted = self.store(&offered, position, False)
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
        cdef CompiledPolicy policy = self.policy
        cdef Batch* batch = &self.batch
        cdef Py_ssize_t index
        cdef uint8_t uses
        find_changed(policy.table, batch)
        if self.is_arc:
            # A block loaded, evicted and offered again counts as used again.
            self.part.size = 0
            for index in range(batch.size):
                if self.uses[self.same[index]] & (USED | OWN) == USED | OWN:
                    self.add(index)
            self.end_own(&self.part)
        if self.from_ghosts and has_evicted:
            # Blocks evicted by the request itself do not come back.
            for index in range(batch.size):
                if resident(policy.table, batch, index) == NULL:
                    uses = self.uses[self.same[index]]
                    self.uses[self.same[index]] = 0 if uses & OWN else uses & MISSED
        if not self.choose(USED | OWN, MISSED if self.by_chain else 0, batch.size):
            return
        if self.by_chain:
            policy.finish_request(&self.part, self.at_finish)
        elif self.is_lru:  # what stored them makes no difference
            policy.touch_batch(&self.part)
        else:
            touch_as_stored(policy, &self.part, self.is_stored)

    cdef void end_session(self) noexcept:
        """Note the session of the request; release its blocks if the session ends."""
        cdef CompiledPolicy policy = self.policy
        cdef Batch* batch = &self.batch
        cdef Py_ssize_t known = batch.size
        find_changed(policy.table, batch)
        while known and (
            self.uses[self.same[known - 1]] & OWN or resident(policy.table, batch, known - 1) == NULL
        ):
            known -= 1
        serve_at_once(policy.table, batch, known, 1)
        if self.at_finish != NULL and self.at_finish.ends:
            policy.c_release(batch, IS_SHARED)

    cdef Py_ssize_t choose(self, uint8_t flags, uint8_t others, Py_ssize_t size) noexcept:
        """Put the blocks with one of `flags` into the part; return their number.

        Blocks with one of the `others` are put there, too.
        """
        cdef Py_ssize_t index, number = 0, run = 0
        cdef uint8_t wanted = flags | others
        self.part.size = 0
        for index in range(size):
            number += self.uses[self.same[index]] & wanted != 0
        # Mostly these are all.
        while run < number and self.local + run < size and (
            self.uses[self.same[self.local + run]] & wanted
        ):
            run += 1
        if run == number:
            for index in range(self.local, self.local + run):
                self.add(index)
            return number
        for index in range(size):
            if self.uses[self.same[index]] & wanted:
                self.add(index)
        return number

    cdef void add(self, Py_ssize_t index) noexcept:
        """Add a block of the request, whose node was found, to the part."""
        cdef const Batch* batch = &self.batch
        cdef Py_ssize_t place = self.part.size
        cdef uint8_t uses = self.uses[self.same[index]]
        self.part.items[place] = batch.items[index]
        self.part.node_ids[place] = batch.node_ids[index]
        self.part.hashes[place] = batch.hashes[index]  # read where there is no node
        self.is_stored[place] = uses & (ENDED | USED) == ENDED
        self.part.size += 1
