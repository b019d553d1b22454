"""What one request has shown to a manager; see ``_request.pxd``."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memset

from kvoffload._core.memory cimport discard, resize
from kvoffload.integrations.vllm._lru_c cimport RankedLRU

cdef enum:
    SMALLEST = 16


cdef class RequestAccess:
    def __cinit__(self, object owner not None, uint64_t generation):
        self.owner = owner
        self.generation = generation

    def __dealloc__(self):
        cdef uint64_t number
        for number in range(self.size):
            Py_DECREF(<object>self.seen[number].key)
        discard(self.seen)
        discard(self.cells)

    cdef bint ensure(self, uint64_t more) noexcept:
        """Make room for `more` keys; False, with nothing changed, if there is no memory."""
        cdef uint64_t room = max(self.room, <uint64_t>SMALLEST)
        cdef uint64_t number, cell
        cdef uint32_t* cells
        cdef SeenKey* seen
        if self.size + more <= self.room:
            return True
        while room < self.size + more:
            room *= 2
        cells = <uint32_t*>resize(NULL, 2 * room * sizeof(uint32_t))
        if cells == NULL:
            return False
        seen = <SeenKey*>resize(self.seen, room * sizeof(SeenKey))
        if seen == NULL:
            discard(cells)
            return False
        self.seen = seen
        self.room = room
        self.mask = 2 * room - 1
        memset(cells, 0, 2 * room * sizeof(uint32_t))
        for number in range(self.size):
            cell = seen[number].hashed & self.mask
            while cells[cell] != 0:
                cell = (cell + 1) & self.mask
            cells[cell] = <uint32_t>number + 1
        discard(self.cells)
        self.cells = cells
        return True

    cdef uint32_t add(self, PyObject* key, uint64_t hashed) noexcept:
        """Append a key that was not seen; return its number. `ensure` has made room."""
        cdef uint32_t number = <uint32_t>self.size
        cdef uint64_t cell = hashed & self.mask
        while self.cells[cell] != 0:
            cell = (cell + 1) & self.mask
        self.cells[cell] = number + 1
        Py_INCREF(<object>key)
        self.seen[number].key = key
        self.seen[number].hashed = hashed
        self.seen[number].uses = 0
        self.size += 1
        return number


cdef class RequestRank:
    def __cinit__(self, RankedLRU owner not None):
        self.owner = owner
        self.generation = owner.generation
        self.group = NIL

    def __dealloc__(self):
        # The collector may have cleared the owner already; its groups die with it.
        if self.owner is not None and self.group != NIL:
            (<RankedLRU>self.owner).release(self.generation, self.group)
