"""Types of the sets of engines and of the blocks used last, with which `_index.py` is compiled."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef Py_ssize_t _WORD
cdef uint64_t _ONE
cdef uint64_t _EVERYONE


cdef class Holders:
    cdef Py_ssize_t num_engines
    cdef Py_ssize_t num_words
    cdef uint64_t[::1] words                # those of each block together

    @cython.locals(
        words=uint64_t[::1], size=Py_ssize_t, num_new=Py_ssize_t, bits=uint64_t, first=Py_ssize_t,
        word=Py_ssize_t, index=Py_ssize_t, place=Py_ssize_t, before=uint64_t,
    )
    cpdef Py_ssize_t put(
        self, const uint32_t[::1] blocks, Py_ssize_t engine, bint is_held
    ) except -1
    @cython.locals(words=uint64_t[::1], first=Py_ssize_t, each=Py_ssize_t)
    cpdef list of(self, Py_ssize_t block)
    @cython.locals(
        words=uint64_t[::1], size=Py_ssize_t, word=Py_ssize_t, held=uint64_t, index=Py_ssize_t
    )
    cpdef Py_ssize_t lead(self, const uint32_t[::1] blocks) except -1


@cython.locals(
    size=Py_ssize_t, num_engines=Py_ssize_t, word=Py_ssize_t, alive=uint64_t, held=uint64_t,
    gone=uint64_t, index=Py_ssize_t, place=Py_ssize_t, engine=Py_ssize_t, holders=Holders,
)
cpdef list leads(list sets, const uint32_t[::1] blocks)


cdef class Ahead(Holders):
    cdef list _more

    @cython.locals(
        words=uint64_t[::1], size=Py_ssize_t, word=Py_ssize_t, bit=uint64_t, index=Py_ssize_t,
        place=Py_ssize_t, more=dict,
    )
    cpdef send(self, const uint32_t[::1] blocks, Py_ssize_t engine)
    @cython.locals(
        words=uint64_t[::1], size=Py_ssize_t, word=Py_ssize_t, others=uint64_t, index=Py_ssize_t,
        more=dict,
    )
    cpdef arrive(self, const uint32_t[::1] blocks, Py_ssize_t engine)


cdef class Recent:
    cdef Py_ssize_t _most
    cdef Py_ssize_t _size
    cdef uint64_t[::1] _last
    cdef uint64_t _used
    cdef uint64_t _passed
    cdef object _rows
    cdef Py_ssize_t _ahead

    @cython.locals(
        last=uint64_t[::1], size=Py_ssize_t, lead=Py_ssize_t, num_missing=Py_ssize_t,
        row="const uint32_t[::1]", entering=uint32_t[::1], index=Py_ssize_t, block=uint32_t,
    )
    cpdef tuple use(self, object blocks)
    @cython.locals(
        last=uint64_t[::1], row="const uint32_t[::1]", count=Py_ssize_t, most=Py_ssize_t
    )
    cpdef Py_ssize_t _forget(self, uint32_t[::1] forgotten) except -1
