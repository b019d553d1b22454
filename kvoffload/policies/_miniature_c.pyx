"""A miniature, compiled: a policy that serves whole requests, without slots.

Structure
    The steps are those of ``_steps_c``, which the compiled manager takes as well. What the requests
    of a miniature may need is reserved when it is made, if their size is known then, but for keys
    too long to lie in a node: such a block is not stored if there is no memory. See
    ``_miniature_py`` for the rules and their reasons.
"""

cimport cython
from cpython.object cimport PyObject
from libc.math cimport isnan
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove

cimport numpy as cnp

from kvoffload._core.batch cimport (
    Batch,
    batch_close,
    batch_ensure,
    batch_part,
    batch_set,
    checked_list,
    find_changed,
)
from kvoffload._core.items cimport first_bad, list_items
from kvoffload._core.memory cimport discard, grow
from kvoffload._core.table cimport IS_SHARED, Node, node_at
from kvoffload._core.victims cimport victims_ensure
from kvoffload.policies._steps_c cimport (
    begin_block,
    choose_missing,
    find_room,
    forget,
    leave,
    make_ready,
    meet,
    num_ready,
    resident,
    settle,
)
from kvoffload.policies._twin_c cimport CompiledPolicy, Hint

from kvoffload._checks import batch_error
from kvoffload.errors import describe

cnp.import_array()


# Without tp_clear, since its methods need the policy.
@cython.no_gc_clear
cdef class Miniature:
    """A cache of keys that serves whole requests.

    Given the size of its largest requests, `most`, it reserves what they need.
    """

    def __cinit__(self, CompiledPolicy policy not None, Py_ssize_t most=0):
        policy.require_ready()
        self.policy = policy
        self.most = most
        policy.join_manager(<void*>self)
        if most:
            policy.victims.managed = False  # so it does not park blocks, which allocates
        if not self.ensure(most) or (
            most
            and not (
                policy.c_ensure(<uint64_t>(policy.capacity + most))
                and victims_ensure(&policy.victims, <uint64_t>policy.capacity, 0)
            )
        ):
            raise MemoryError("no room for a miniature")

    def __dealloc__(self):
        discard(self.items)
        discard(self.left)
        discard(self.storing)
        batch_close(&self.batch)

    cdef bint ensure(self, Py_ssize_t size) noexcept:
        cdef uint64_t most_storing = min(
            self.num_storing + <uint64_t>size, <uint64_t>self.policy.capacity
        )
        return (
            batch_ensure(&self.batch, size)
            and grow(<void**>&self.items, &self.room, <uint64_t>size, sizeof(PyObject*), 1)
            and grow(<void**>&self.storing, &self.storing_room, most_storing, sizeof(Storing), 1)
        )

    cdef void take(self, const Batch* asked, const uint32_t* indexes, Py_ssize_t size) noexcept:
        cdef Py_ssize_t index
        for index in range(size):
            self.items[index] = asked.items[indexes[index]]
        batch_set(&self.batch, self.items, size)
        self.first, self.stop = 0, size

    cdef Py_ssize_t c_serve(
        self, const Hint* hint, const Hint* last, bint ends, double position, double before,
        bint early=False,
    ) noexcept:
        cdef CompiledPolicy policy = self.policy
        cdef Py_ssize_t num_hits
        self.no_memory = False
        self.end_stores(before)
        find_changed(policy.table, &self.batch)
        policy.begin_request(&self.batch, hint)
        num_hits = self.ask()
        self.store(&self.batch, position, ends)
        if early:
            self.mark_own(0)
        self.c_finish(last)
        if early:
            self.mark_own(-1)
        return num_hits

    cdef bint serve_row(
        self, const Hint* hint, const Hint* last, bint is_told, double position, double before
    ) noexcept:
        cdef CompiledPolicy policy = self.policy
        cdef Py_ssize_t met = 0, own
        self.no_memory = False
        self.end_stores(before)
        find_changed(policy.table, &self.batch)
        policy.begin_request(&self.batch, hint)
        if is_told:
            met = meet(policy.table, &self.batch, 0)
        self.ask()
        own = met
        if self.store(&self.batch, position, hint != NULL and hint.ends) > 0:
            own = <Py_ssize_t>self.batch.indexes[0]
        self.c_finish(last)
        if is_told:
            leave(policy.table, &self.batch, met, own, 1)
        if last != NULL and last.ends:
            policy.c_release(&self.batch, IS_SHARED)
        return not self.no_memory

    cdef Py_ssize_t ask(self) noexcept:
        """Count the leading blocks that are ready of those that the request asks for."""
        cdef Batch asked
        cdef Py_ssize_t num_hits
        find_changed(self.policy.table, &self.batch)
        asked = batch_part(&self.batch, self.first, self.stop)
        num_hits = num_ready(self.policy.table, &asked)
        self.asked += <uint64_t>asked.size
        self.hits += <uint64_t>num_hits
        return num_hits

    cpdef void end_stores(self, double before) noexcept:
        """End the stores that began before a position."""
        cdef uint32_t node_id
        while self.num_storing and self.storing[self.oldest].position < before:
            node_id = self.storing[self.oldest].node_id
            make_ready(self.policy, node_id, node_at(self.policy.table, node_id))
            self.oldest += 1
            self.num_storing -= 1

    cdef void end_own(self, const Batch* own) noexcept:
        """End the stores of blocks whose nodes are found."""
        cdef CompiledPolicy policy = self.policy
        cdef Storing* storing = self.storing + self.oldest
        cdef uint64_t place, num_storing = 0
        cdef Py_ssize_t index
        cdef Node* node
        for index in range(own.size):
            node = resident(policy.table, own, index)
            if node != NULL and node.block.ref_cnt < 0:
                make_ready(policy, own.node_ids[index], node)
        for place in range(self.num_storing):
            if node_at(policy.table, storing[place].node_id).block.ref_cnt < 0:
                storing[num_storing] = storing[place]
                num_storing += 1
        self.num_storing = num_storing

    cdef Py_ssize_t store(self, Batch* batch, double position, bint ends) noexcept:
        cdef CompiledPolicy policy = self.policy
        cdef int64_t num_free = policy.capacity - <int64_t>policy.num_resident
        cdef Py_ssize_t num_missing = choose_missing(policy, batch, NULL), num_admitted
        cdef uint64_t index
        cdef uint32_t node_id
        cdef Node* node
        if num_missing <= 0:
            self.no_memory = num_missing < 0
            return num_missing
        num_admitted = find_room(policy, batch, num_missing, num_free, ends)
        if num_admitted < 0:
            self.no_memory = policy.victims.no_memory
            self.refused += not self.no_memory
            forget(policy.table, batch, 0, num_missing)
            return -1
        if self.numbers != NULL:  # there are at most as many victims as missing blocks
            self.num_left = policy.victims.size
            for index in range(self.num_left):
                node = node_at(policy.table, policy.victims.items[index].node_id)
                self.left[index] = <uint32_t>node.block.block_id
        self.evicted += policy.victims.size
        policy.commit()
        for index in range(<uint64_t>num_admitted):
            node_id = batch.chosen[index]
            node = node_at(policy.table, node_id)
            begin_block(
                policy, node, 0 if self.numbers == NULL else self.numbers[batch.indexes[index]]
            )
            policy.c_insert(node_id, node)
            if not isnan(position):
                self.note_storing(node_id, position)
        settle(policy, batch, num_admitted, num_missing)
        self.stored += <uint64_t>num_admitted
        self.not_admitted += <uint64_t>(num_missing - num_admitted)
        return num_admitted

    cdef void mark_own(self, int32_t ref_cnt) noexcept:
        """Let the policy see the blocks of the last store as ready, or as pending again."""
        cdef Py_ssize_t index
        for index in range(self.batch.num_chosen):
            node_at(self.policy.table, self.batch.chosen[index]).block.ref_cnt = ref_cnt

    cdef void note_storing(self, uint32_t node_id, double position) noexcept:
        """Note a block that is being stored; there is room, maybe before the oldest."""
        cdef Storing* noted
        if self.oldest + self.num_storing == self.storing_room:
            noted = self.storing + self.oldest
            memmove(self.storing, noted, <size_t>self.num_storing * sizeof(Storing))
            self.oldest = 0
        noted = self.storing + self.oldest + self.num_storing
        noted.position = position
        noted.node_id = node_id
        self.num_storing += 1

    cdef void c_finish(self, const Hint* hint) noexcept:
        find_changed(self.policy.table, &self.batch)
        self.policy.finish_request(&self.batch, hint)

    cdef void c_release(self) noexcept:
        find_changed(self.policy.table, &self.batch)
        self.policy.c_release(&self.batch, 0)

    cpdef void clear(self) noexcept:
        """Forget everything but the counts."""
        self.oldest = self.num_storing = self.num_left = 0
        self.batch.size = self.batch.num_hints = self.batch.num_chosen = 0
        self.policy.clear_now()

    # -- for Python code -----------------------------------------------------------------------

    def serve(
        self, hashes, Py_ssize_t first, Py_ssize_t stop, hints, *,
        double position, double before, bint waits=False, bint again=True, bint early=False,
    ):
        """Serve a request; return the number of leading blocks that were ready.

        It asks for the blocks from `first` to before `stop`. Stores that began before the position
        `before` have ended, and if the request `waits`, those of its own blocks, too. It finishes
        at once, and finds its blocks ready if its store ends `early`. The hints count when it
        begins, and `again` when it finishes. If its session ends, it takes only free slots and
        those of released blocks, and the caller releases its blocks.
        """
        cdef Hint said
        cdef const Hint* hint = self.policy.hint_of(hints, &said)
        cdef const Hint* last = hint
        cdef bint ends = hint != NULL and hint.ends
        cdef list batch = self.open(hashes)
        cdef Py_ssize_t num_hits
        self.first, self.stop = first, stop
        if not 0 <= first <= stop <= self.batch.size:
            raise ValueError(f"first and stop must be in 0 ... {len(batch)}, got {first}, {stop}")
        if ends or not again:
            last = NULL
        if waits:
            self.end_stores(before)
            find_changed(self.policy.table, &self.batch)
            self.end_own(&self.batch)
        num_hits = self.c_serve(hint, last, ends, position, before, early)
        if self.no_memory:
            raise MemoryError()
        return num_hits

    def finish(self, hashes, hints):
        """Apply a hint that came at the end of a request."""
        cdef Hint said
        cdef const Hint* hint = self.policy.hint_of(hints, &said)
        cdef list batch = self.open(hashes)
        self.c_finish(hint)

    def release(self, hashes):
        """Release blocks: they leave before all others."""
        cdef list batch = self.open(hashes)
        if not self.policy.ensure_release(self.batch.size):
            raise MemoryError()
        self.c_release()

    def serve_rows(
        self, list keys, starts, blocks, first, nodes, *, double position, double lag, told=None
    ):
        """Serve the requests of a trace; return the counts of each, (rows, 5) int64.

        These are blocks hit, stored and evicted, refused stores, and blocks not admitted. `keys`
        are the trace's distinct blocks, and `blocks` ((n,) uint32) those of all rows by their
        indexes in it. Row i has those of ``starts[i:i + 2]`` ((rows + 1,) int64), and asks for
        those from its ``first[i]`` on ((rows,) int64). `nodes` ((len(keys),) uint32) notes where
        each key was found; initial values are arbitrary. `told`, a list, has of each row the time,
        and the hints at its beginning and its end; then sessions are noted, and those that end
        release their blocks. `position` is that of the first row; a store ends before the row that
        follows `lag` others, and with its own for -1.
        """
        cdef Hint begins, finishes
        cdef const Hint* hint = NULL
        cdef const Hint* last = NULL
        cdef const int64_t* start = <const int64_t*>data_of("starts", starts, cnp.NPY_INT64)
        cdef const int64_t* before = <const int64_t*>data_of("first", first, cnp.NPY_INT64)
        cdef const uint32_t* all_blocks = <const uint32_t*>data_of("blocks", blocks, cnp.NPY_UINT32)
        cdef uint32_t* node_ids = <uint32_t*>data_of("nodes", nodes, cnp.NPY_UINT32)
        cdef cnp.npy_intp num_rows = len(first)
        cdef cnp.npy_intp[2] shape = [num_rows + 1, NUM_COUNTS]
        cdef Py_ssize_t row, index, size
        cdef PyObject** items = list_items(keys)
        cdef cnp.ndarray counts = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
        cdef int64_t* count = <int64_t*>cnp.PyArray_DATA(counts)
        if len(starts) != num_rows + 1 or len(nodes) != len(keys):
            raise ValueError("starts must have one more than first, nodes as many as keys")
        if told is not None and len(told) != num_rows:
            raise ValueError(f"told must have {num_rows} rows, got {len(told)}")
        for row in range(num_rows):
            if not 0 <= start[row] <= start[row + 1] <= len(blocks):
                raise ValueError(f"row {row} must lie in blocks")
            if not 0 <= before[row] <= start[row + 1] - start[row]:
                raise ValueError(f"first must lie in row {row}, got {before[row]}")
            for index in range(start[row], start[row + 1]):
                if all_blocks[index] >= <uint64_t>len(keys):
                    raise ValueError(f"row {row} must have keys, got {all_blocks[index]}")
                if first_bad(items + all_blocks[index], 0, 1) == 0:
                    raise batch_error(keys, "keys")
        self.note_counts(count)
        try:
            for row in range(num_rows):
                size = <Py_ssize_t>(start[row + 1] - start[row])
                if not self.ensure(size) or not grow(
                    <void**>&self.left, &self.left_room, <uint64_t>size, sizeof(uint32_t), 1
                ):
                    raise MemoryError()
                self.numbers = all_blocks + start[row]
                batch_set(&self.batch, self.items, size)
                self.batch.num_hints = size
                for index in range(size):
                    self.items[index] = items[self.numbers[index]]
                    self.batch.node_ids[index] = node_ids[self.numbers[index]]
                self.first, self.stop = <Py_ssize_t>before[row], size
                self.num_left = 0
                if told is not None:
                    _, at_begin, at_finish = told[row]
                    hint = self.policy.hint_of(at_begin, &begins)
                    last = self.policy.hint_of(at_finish or at_begin, &finishes, True)
                    if last != NULL and last.ends and not self.policy.ensure_release(size):
                        raise MemoryError()
                if not self.serve_row(hint, last, told is not None, position, position - lag):
                    raise MemoryError()
                count += NUM_COUNTS
                self.note_counts(count)
                position += 1.0
                for index in range(size):
                    node_ids[self.numbers[index]] = self.batch.node_ids[index]
        finally:
            self.numbers = NULL
        return counts[1:] - counts[:num_rows]

    cdef void note_counts(self, int64_t* count) noexcept:
        count[0] = <int64_t>self.hits
        count[1] = <int64_t>self.stored
        count[2] = <int64_t>self.evicted
        count[3] = <int64_t>self.refused
        count[4] = <int64_t>self.not_admitted

    def changes(self):
        """Return the blocks that left and that entered for the last row that was served.

        Both are indexes in its `keys`, (n,) uint32, in order.
        """
        cdef CompiledPolicy policy = self.policy
        cdef cnp.npy_intp num_left = <Py_ssize_t>self.num_left, num_entered = self.batch.num_chosen
        cdef cnp.ndarray left = cnp.PyArray_EMPTY(1, &num_left, cnp.NPY_UINT32, 0)
        cdef cnp.ndarray entered = cnp.PyArray_EMPTY(1, &num_entered, cnp.NPY_UINT32, 0)
        cdef Py_ssize_t index
        if num_left:
            memcpy(cnp.PyArray_DATA(left), self.left, <size_t>num_left * sizeof(uint32_t))
        for index in range(num_entered):
            (<uint32_t*>cnp.PyArray_DATA(entered))[index] = <uint32_t>node_at(
                policy.table, self.batch.chosen[index]
            ).block.block_id
        return left, entered

    def _check(self):
        """Verify the invariants; raise AssertionError with the broken one."""
        cdef uint64_t place
        if self.policy.num_resident > <uint64_t>self.policy.capacity:
            raise AssertionError("it is within its capacity")
        for place in range(self.oldest, self.oldest + self.num_storing):
            if node_at(self.policy.table, self.storing[place].node_id).block.ref_cnt != -1:
                raise AssertionError("the blocks that are being stored are pending")
        self.policy._check()

    cdef list open(self, object hashes):
        """Take a request's blocks; return them as a checked list, which the scratch arrays use."""
        cdef list batch = checked_list(hashes, "hashes")
        if not self.ensure(len(batch)):
            raise MemoryError()
        batch_set(&self.batch, list_items(batch), len(batch))
        return batch


cdef void* data_of(str name, object array, int kind) except? NULL:
    """Return the address of the elements of a contiguous one-dimensional array."""
    if (
        not cnp.PyArray_Check(array)
        or cnp.PyArray_TYPE(array) != kind
        or cnp.PyArray_NDIM(array) != 1
        or not cnp.PyArray_IS_C_CONTIGUOUS(array)
    ):
        raise TypeError(f"{name} must be a contiguous array of its type, got {describe(array)}")
    return cnp.PyArray_DATA(array)
