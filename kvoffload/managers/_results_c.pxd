"""Results and events of managers, built without their constructors.

These check and copy what is right already, and they are Python code: another thread may take over
while they run, and no call may be interrupted between its first look and its last change.

The hashes that left become bytes objects when somebody reads them, in a result or an event: an
engine whose next step asks for slots alone never does, and making them takes a sixth of a store.
"""

from libc.stdint cimport uint8_t

cimport numpy as cnp

from kvoffload._core.table cimport INLINE_KEY_BYTES

cdef struct PackedKey:
    uint8_t length
    uint8_t key[INLINE_KEY_BYTES]

cdef class _PackedKeys:
    """Keys that lie in nodes whole, copied."""
    cdef Py_ssize_t size
    cdef bytes packed       # (size,) PackedKey
    cdef PackedKey* keys    # where they are

    cdef list unpack(self)

# An int64 array of `size` slot indices, not filled.
cdef cnp.ndarray new_ids(Py_ssize_t size)
cdef object new_spec(cnp.ndarray block_ids)
cdef _PackedKeys new_keys(Py_ssize_t size)
# `evicted` and `block_hashes` are each a list or _PackedKeys.
cdef object new_output(list to_store, object spec, object evicted)
cdef object new_event(object block_hashes, object backend, bint removed)
