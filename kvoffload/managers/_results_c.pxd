"""Results and events of managers, built without their constructors.

The constructors check and copy values that are already right, and they are Python code: another
thread may take over while they run, and no call may be interrupted between its first read and its
last change.

Evicted hashes become bytes objects when they are first read, in a result or an event: an engine
that needs only slots never reads them, and creating them takes a sixth of a store.
"""

from libc.stdint cimport uint8_t

cimport numpy as cnp

from kvoffload._core.table cimport INLINE_KEY_BYTES

cdef struct PackedKey:
    uint8_t length
    uint8_t key[INLINE_KEY_BYTES]

cdef class _PackedKeys:
    """Copies of keys that fit whole into nodes."""
    cdef Py_ssize_t size
    cdef bytes packed       # (size,) PackedKey
    cdef PackedKey* keys    # in `packed`

    cdef list unpack(self)

# An int64 array of `size` slot indices, not filled.
cdef cnp.ndarray new_ids(Py_ssize_t size)
cdef object new_spec(cnp.ndarray block_ids)
cdef _PackedKeys new_keys(Py_ssize_t size)
# `evicted` and `block_hashes` are each a list or _PackedKeys.
cdef object new_output(list to_store, object spec, object evicted)
cdef object new_event(object block_hashes, object backend, bint removed)
