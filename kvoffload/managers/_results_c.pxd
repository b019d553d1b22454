"""Results and events of managers, built without their constructors.

These check and copy what is right already, and they are Python code: another thread may take over
while they run, and no call may be interrupted between its first look and its last change.
"""

cimport numpy as cnp

# An int64 array of `size` slot indices, not filled.
cdef cnp.ndarray new_ids(Py_ssize_t size)
cdef object new_spec(cnp.ndarray block_ids)
cdef object new_output(list to_store, object spec, list evicted)
cdef object new_event(list block_hashes, object backend, bint removed)
