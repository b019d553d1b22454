"""What every call of the manager begins with: keys, request contexts, what was accessed before.

A request's accesses hang on its context as ``RequestAccess``. `observe` does everything about an
access that can fail; `record` and the rules then change state and cannot.

The policy is set last: whatever of a construction failed, or was never run, it is None, and every
method begins with `require_ready`, most of them in `open_batch`.
"""

cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memset

from kvoffload._core.batch cimport Batch, batch_close, batch_ensure, item_key, item_length
from kvoffload._core.items cimport check_items, list_items
from kvoffload._core.memory cimport discard, resize
from kvoffload._core.pool cimport Pool, pool_close, pool_open
from kvoffload._core.table cimport NIL, Node, Table, hash_key, table_new_epoch
from kvoffload.integrations.vllm._lru_c cimport RankedLRU
from kvoffload.integrations.vllm._positions cimport find_position
from kvoffload.integrations.vllm._request cimport (
    INSERTED,
    MISSED,
    REUSED,
    RequestAccess,
    RequestRank,
)
from kvoffload.integrations.vllm._rules_c cimport (
    FIRST_MISS,
    NEW,
    OBSERVED,
    POSITIONED,
    READY,
    Access,
    RequestRules,
)

from kvoffload._checks import as_batch, batch_error
from kvoffload.errors import OffloadError, describe, describe_hash, manager_not_initialised

cnp.import_array()

cdef object new_object = object.__new__


class RequestFinishedError(OffloadError, RuntimeError):
    """Say that a request that has finished accesses a key that it had not accessed before."""


cdef class ManagerBase:
    """Hold the parts of a manager, and what its calls have in common."""

    def __cinit__(self):
        memset(&self.batch, 0, sizeof(Batch))
        memset(&self.pool, 0, sizeof(Pool))
        self.accesses = NULL
        self.accesses_room = 0

    def __dealloc__(self):
        pool_close(&self.pool)
        batch_close(&self.batch)
        discard(self.accesses)

    def _setup(
        self, int64_t num_chunks, RequestRules rules not None, names, bint reports_failed_stores
    ):
        """Join the parts; `names` has vLLM's classes and constants as attributes."""
        cdef Pool pool
        self.policy = None
        if not pool_open(&pool, num_chunks):
            raise MemoryError(f"no room for {num_chunks} chunk ids")
        pool_close(&self.pool)
        self.pool = pool
        self._num_chunks = num_chunks
        self.num_idle = self.num_pending = 0
        self.last = NIL
        self.miss, self.hit = names.LookupResult.MISS, names.LookupResult.HIT
        self.hit_pending = names.LookupResult.HIT_PENDING
        self.host = names.host
        self.context_class = names.ReqContext
        self.request_context_class = names.RequestOffloadingContext
        self.spec_class = names.CPULoadStoreSpec
        self.output_class = names.PrepareStoreOutput
        self.event_class = names.OffloadingEvent
        self.reports_failed_stores = reports_failed_stores
        self.follow(rules)

    cdef void follow(self, RequestRules rules) noexcept:
        self.generation += 1
        self.rules = rules
        self.policy = rules.policy

    cdef object not_initialised(self):
        return manager_not_initialised()

    def _require_ready(self):
        """Raise an error unless the construction has succeeded."""
        self.require_ready()

    # -- keys in -----------------------------------------------------------------------------

    cdef list open_batch(self, object keys):
        """Return a checked copy of the keys, which the scratch arrays point into."""
        cdef list batch
        self.require_ready()
        batch = list(keys) if type(keys) is list else list(as_batch(keys, "keys"))
        if not check_items(batch):
            raise batch_error(batch, "keys")
        self.ensure_scratch(len(batch))
        self.batch.items = list_items(batch)
        self.batch.size = len(batch)
        return batch

    cdef int ensure_scratch(self, Py_ssize_t size) except -1:
        cdef Access* accesses
        if not batch_ensure(&self.batch, size):
            raise MemoryError()
        if self.batch.room > self.accesses_room:
            accesses = <Access*>resize(self.accesses, self.batch.room * sizeof(Access))
            if accesses == NULL:
                raise MemoryError()
            self.accesses = accesses
            self.accesses_room = self.batch.room
        return 0

    cdef object state_of(self, object req_context, object state_class):
        """Return what hangs on a request's context under a class, or None."""
        if type(req_context) is self.context_class:
            return req_context._state.get(state_class)
        return req_context.get_state(state_class)

    cdef RequestAccess access_of(self, object req_context):
        """Return what the request has shown to this manager in its present life, or None."""
        cdef RequestAccess access = self.state_of(req_context, RequestAccess)
        if access is None or access.owner is not self or access.generation != self.generation:
            return None
        return access

    cdef RequestRank rank_of(self, object req_context):
        """Return the rank that the request has in this policy in its present life, or None."""
        cdef RequestRank rank = self.state_of(req_context, RequestRank)
        cdef RankedLRU policy = <RankedLRU>self.policy
        if rank is None or rank.owner is not policy or rank.generation != policy.generation:
            return None
        return rank

    cdef int attach(self, object req_context, object access, object rank) except -1:
        """Hang new state on a request's context: all that is given or, on an error, none.

        A context has one place for each class, and the last comer has it: where two managers serve
        one context, each takes the other's place, as vLLM's do.
        """
        cdef object before = None
        if access is not None:
            if rank is not None:
                before = self.state_of(req_context, RequestAccess)
            req_context.set_state(access)
        if rank is not None:
            try:
                req_context.set_state(rank)
            except BaseException:
                if access is not None:
                    self.put_back(req_context, RequestAccess, before)
                raise
        return 0

    cdef int put_back(self, object req_context, object state_class, object state) except -1:
        """Hang on a context what hung there before `attach`, None if nothing did."""
        if type(req_context) is self.context_class:
            if state is None:
                req_context._state.pop(state_class, None)
            else:
                req_context._state[state_class] = state
        elif state is not None:
            req_context.set_state(state)
        return 0

    cdef object positions_of(self, object req_context):
        """Return the dict of token positions, or None where the context has methods of its own."""
        if type(req_context) is self.context_class:
            return req_context._offload_key_positions
        return None

    cdef int read_position(
        self, object req_context, object positions, Py_ssize_t place, Py_ssize_t* cursor
    ) except -1:
        cdef PyObject* found
        cdef object position
        cdef long long number
        cdef int overflow = 0
        cdef Access* access = self.accesses + place
        if positions is not None:
            find_position(positions, self.batch.items[place], cursor, &found)
            if found == NULL:
                return 0
            position = <object>found
        else:
            position = req_context.get_offload_key_position(<object>self.batch.items[place])
        if position is None:
            return 0
        number = PyLong_AsLongLongAndOverflow(position, &overflow)
        if overflow != 0 or not -INT32_MAX <= number <= INT32_MAX:
            raise ValueError(
                f"a key's token position must be within +-{INT32_MAX}, got {describe(position)}"
            )
        access.reverse_position = -<int32_t>number
        access.flags |= POSITIONED
        return 0

    cdef int64_t observe(
        self, str call, object req_context, RequestAccess access, object positions
    ) except -1:
        """Compare the OBSERVED keys with what the request has shown, and make room for them.

        Everything that can fail about recording happens here; nothing is changed. Return how many
        keys are new to the request.
        """
        cdef Table* table = self.policy.table
        cdef Py_ssize_t place
        cdef uint64_t num_new = 0
        cdef Access* entry
        self.chain = None
        for place in range(self.batch.size):
            entry = self.accesses + place
            if not entry.flags & OBSERVED:
                continue
            if entry.flags & READY:
                entry.hashed = hash_key(
                    table, item_key(&self.batch, place), item_length(&self.batch, place)
                )
            entry.number = access.find(self.batch.items[place], entry.hashed)
            if entry.number == NIL:
                if access.finished:
                    raise RequestFinishedError(
                        f"{call}: block {describe_hash(<object>self.batch.items[place])} is new "
                        "to the request, which has finished"
                    )
                entry.flags |= NEW
                num_new += 1
            if not entry.flags & READY and (
                entry.flags & NEW or not access.seen[entry.number].uses & MISSED
            ):
                entry.flags |= FIRST_MISS
            if self.rules.ranked and (
                entry.flags & NEW or not entry.flags & READY
            ):
                self.read_position(req_context, positions, place, &access.cursor)
        if self.rules.by_chain and not access.started and self.batch.size:
            self.chain = self.chain_of(positions)
            if not self.rules.open_chain(self.chain):
                raise MemoryError()
        if not access.ensure(num_new) or not self.rules.ensure(2 * <uint64_t>self.batch.size):
            raise MemoryError()
        return <int64_t>num_new

    cdef list chain_of(self, object positions):
        """Return the keys of a request by position, then those of the call that have none."""
        cdef list chain = []
        cdef Py_ssize_t place
        if positions is not None:
            chain = [key for key in positions if type(key) is bytes and key]
            chain.sort(key=positions.__getitem__)
        for place in range(self.batch.size):
            if positions is None or <object>self.batch.items[place] not in positions:
                chain.append(<object>self.batch.items[place])
        return chain

    cdef void start(self, RequestAccess access) noexcept:
        """Show the keys of a request that makes its first access to rules that go by them."""
        if self.chain is not None:
            access.started = True
            self.rules.started()
            self.chain = None

    cdef void record(self, RequestAccess access, bint may_repeat) noexcept:
        """Record what `observe` has found."""
        cdef Py_ssize_t place
        cdef Access* entry
        cdef uint8_t* uses
        for place in range(self.batch.size):
            entry = self.accesses + place
            if not entry.flags & OBSERVED:
                continue
            if entry.flags & NEW:
                if may_repeat:  # what is repeated is new once
                    entry.number = access.find(self.batch.items[place], entry.hashed)
                if entry.number != NIL:
                    entry.flags &= <uint8_t>(~NEW & 0xFF)
                else:
                    entry.number = access.add(self.batch.items[place], entry.hashed)
            uses = &access.seen[entry.number].uses
            if not entry.flags & READY:
                uses[0] |= MISSED
            elif not uses[0] & INSERTED:
                uses[0] |= REUSED

    # -- what is shared ----------------------------------------------------------------------

    cdef void protect_resident(self) noexcept:
        """Let the resident keys of the batch stay in the search that follows.

        Ghosts are not marked: that would say that they are about to be stored.
        """
        cdef Py_ssize_t place
        cdef Node* node
        table_new_epoch(self.policy.table)
        for place in range(self.batch.size):
            node = self.resident(place)
            if node != NULL:
                node.block.mark = self.policy.table.epoch

    cdef cnp.ndarray new_ids(self, Py_ssize_t size):
        cdef cnp.npy_intp length = size
        return cnp.PyArray_SimpleNew(1, &length, cnp.NPY_INT32)

    cdef object new_spec(self, cnp.ndarray chunk_ids):
        """Build vLLM's spec without its constructor, which copies from a list."""
        spec = new_object(self.spec_class)
        spec.block_ids = chunk_ids
        return spec

    cdef object new_output(self, list to_store, object spec, list evicted):
        """Build vLLM's output without its constructor, which only sets what is given."""
        output = new_object(self.output_class)
        output.keys_to_store = to_store
        output.store_spec = spec
        output.evicted_keys = evicted
        return output
