"""The accesses of one request: its keys, in the order seen, and the result of each."""

from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.exc cimport PyErr_Occurred
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from kvoffload._core.batch cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from kvoffload._core.table cimport NIL

# The results of a key's accesses, bits of SeenKey.uses.
cdef enum:
    INSERTED = 1        # given a chunk by a store of this request
    REUSED = 2          # found ready by a load or store of this request before it inserted it
    MISSED = 4          # offered for storing while absent
    # With a watch:
    LOADED = 8          # its first access was a load; also kept without a watch
    CAUSE_SHIFT = 4     # three bits: why it missed at its first access, if that was an offer
    REFUSED = 128       # the last store that offered it was refused

cdef enum:
    NOT_ASKED = 0x7FFFFFFFFFFFFFFF

cdef struct SeenKey:
    PyObject* key       # owned
    uint64_t hashed
    uint8_t uses

cdef class RequestAccess:
    """The accesses of one request.

    It is valid for one manager and until its cache is reset: `owner` and `generation` identify
    both.
    """

    cdef readonly object owner  # `Contexts`
    cdef readonly uint64_t generation
    cdef bint started           # its keys were shown to rules that use the chain
    cdef bint finished
    cdef bint is_heard          # the hints of its client were read
    cdef object hints           # `Hints`, or None
    cdef bint ends              # the hints say that its session ends
    cdef int64_t prompt_until   # largest token position when it was first seen; NOT_ASKED: none
    cdef uint64_t num_ignored   # ignored parts of the hints, not counted yet
    cdef Py_ssize_t cursor      # in its positions: the entry after the last that was read
    cdef SeenKey* seen          # in the order of first access
    cdef uint64_t size
    cdef uint64_t room
    cdef uint32_t* cells        # hash table of `seen`: its indexes + 1, 0 if empty; linear probing
    cdef uint64_t mask          # number of cells - 1
    cdef uint64_t num_loaded    # number of LOADED keys, if none was passed
    # With a watch:
    cdef int64_t asked_from     # least token position that was looked up, NOT_ASKED before
    cdef int64_t asked_until    # largest at its last lookup; later ones are generated
    cdef RequestAccess passed   # keys that were offered and not recorded, or None
    cdef bint asked_only        # attached by a lookup, only because of a watch
    # Of the lookup before its first access, if groups count separately:
    cdef int64_t full_until     # token position up to which the full groups had all; 0: unknown
    cdef int64_t full_from      # position from which they were looked up, if nothing is loaded

    cdef bint ensure(self, uint64_t more) noexcept
    cdef inline uint64_t cell_of(self, PyObject* key, uint64_t hashed) noexcept nogil:
        """Return the cell of a key, or the empty one where it belongs."""
        cdef uint64_t cell = hashed & self.mask
        cdef Py_ssize_t length
        cdef SeenKey* seen
        while self.cells[cell] != 0:
            seen = self.seen + self.cells[cell] - 1
            if seen.hashed == hashed:
                if seen.key == key:
                    return cell
                length = PyBytes_GET_SIZE(key)
                if length == PyBytes_GET_SIZE(seen.key) and memcmp(
                    PyBytes_AS_STRING(key), PyBytes_AS_STRING(seen.key), length
                ) == 0:
                    return cell
            cell = (cell + 1) & self.mask
        return cell

    cdef inline uint32_t find(self, PyObject* key, uint64_t hashed) noexcept nogil:
        """Return the index of a key in `seen`, or NIL."""
        if self.size == 0:
            return NIL
        return self.cells[self.cell_of(key, hashed)] - 1

    cdef inline uint32_t find_or_add(self, PyObject* key, uint64_t hashed) noexcept:
        """Return the index of a key, which is appended if it was not seen; `ensure` has made room.
        """
        cdef uint64_t cell = self.cell_of(key, hashed)
        cdef SeenKey* seen
        if self.cells[cell] == 0:
            Py_INCREF(<object>key)
            seen = self.seen + self.size
            seen.key = key
            seen.hashed = hashed
            seen.uses = 0
            self.size += 1
            self.cells[cell] = <uint32_t>self.size
        return self.cells[cell] - 1


cdef class RequestState:
    """The state of vLLM's request context, under this type.

    If two managers serve one context, each replaces the other's accesses and rank, as vLLM's do.
    """

    cdef readonly RequestAccess access  # of the last manager that attached its own, or None
    cdef object ranking                 # the policy that has given the request a rank, or None
    cdef uint64_t generation            # that policy's
    cdef uint64_t opened                # the rank, at the greatest position


cdef class Contexts:
    """vLLM's request contexts, as holders of a manager's state of requests."""

    cdef object context_class   # vLLM's own, whose state is read without its methods
    cdef uint64_t generation    # number of resets of the manager
    # The context of the last call, which the next calls mostly are about, and its two dicts; None
    # if it is not of vLLM's own class, or has finished.
    cdef object recent
    cdef dict recent_states
    cdef object recent_positions

    # Read the dicts of a context of vLLM's own class; False for another one.
    cdef bint read(self, object req_context) except -1
    # Let go of the context of the last call.
    cdef void drop_recent(self) noexcept
    # Return the state of a context, or None.
    cdef RequestState state_of(self, object req_context)
    # Return the request's accesses since the last reset, or None.
    cdef RequestAccess access_of(self, object req_context)
    cdef RequestAccess access_in(self, RequestState state)
    cdef RequestAccess new_access(self)
    # Attach accesses, unless they are None, and return the context's state; it is looked up if
    # `state` is None.
    cdef RequestState attach(self, object req_context, RequestAccess access, RequestState state)
    # Return the dict of token positions, or None if the context has its own methods.
    cdef object positions_of(self, object req_context)


# vLLM's keys end in the group's index, big endian.
cdef enum:
    GROUP_BYTES = 4

cdef inline uint32_t group_of(PyObject* key) noexcept nogil:
    """Return the KV group of a key."""
    cdef Py_ssize_t length = PyBytes_GET_SIZE(key)
    cdef const uint8_t* last = <const uint8_t*>PyBytes_AS_STRING(key)
    cdef uint32_t group = 0
    cdef Py_ssize_t at
    if length >= GROUP_BYTES:  # compilers make one load of this
        last += length - GROUP_BYTES
        return <uint32_t>last[0] << 24 | <uint32_t>last[1] << 16 | <uint32_t>last[2] << 8 | last[3]
    for at in range(length):
        group = group << 8 | last[at]
    return group


cdef struct SortKey:
    int64_t position            # 0 if it has none
    uint32_t group
    uint32_t seen_index         # in the order seen


cdef class KeyOrder:
    cdef PyObject** keys        # head to tail, borrowed from the request's accesses
    cdef SortKey* sort_keys     # one per key, in the same order
    cdef uint8_t* positioned    # by index in `seen`: whether the key has a position
    cdef bint by_position       # all have a position, and `sort_keys` is sorted by it

    cdef inline Py_ssize_t num_from(self, Py_ssize_t size, int64_t position) noexcept:
        """Return how many keys, of `size` in all, are at the last token position or from one on."""
        cdef Py_ssize_t count = size > 0
        if count and self.by_position:
            position = min(position, self.sort_keys[size - 1].position)
            while count < size and self.sort_keys[size - 1 - count].position >= position:
                count += 1
        return count

# Return the largest of a request's token positions, NOT_ASKED if it has none. `least` becomes the
# key that has the least, NULL if there are several groups or keys inside chunks.
cdef int64_t last_position(object positions, PyObject** least) except -1

# Return the keys that a request has shown, head to tail.
cdef KeyOrder order_keys(RequestAccess access, object req_context, object positions)


# A request mostly shows its keys in the order in which the connector has recorded their positions,
# and with the same objects: the entry after the last found one is tried before the dictionary.
cdef inline object find_position(
    object req_context, object positions, PyObject* key, Py_ssize_t* cursor
):
    """Return a key's token position, or None; `positions` are those of `Contexts.positions_of`.

    `cursor` starts at 0.
    """
    cdef PyObject* found_key
    cdef PyObject* position
    cdef Py_ssize_t following = cursor[0]
    if positions is None:
        return req_context.get_offload_key_position(<object>key)
    if PyDict_Next(positions, &following, &found_key, &position) and found_key == key:
        cursor[0] = following
    else:
        position = PyDict_GetItemWithError(positions, <object>key)
        if position == NULL:
            if PyErr_Occurred() != NULL:
                raise
            return None
    return <object>position
