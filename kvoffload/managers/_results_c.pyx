"""Results and events of managers; see ``_results_c.pxd``."""

from cpython.object cimport PyTypeObject

cimport numpy as cnp

from kvoffload.types import CPULoadStoreSpec, OffloadingEvent, PrepareStoreOutput

cnp.import_array()

cdef extern from "Python.h":
    object PyType_GenericAlloc(PyTypeObject* kind, Py_ssize_t items)

cdef object spec_class = CPULoadStoreSpec
cdef object output_class = PrepareStoreOutput
cdef object event_class = OffloadingEvent


cdef cnp.ndarray new_ids(Py_ssize_t size):
    cdef cnp.npy_intp length = size
    return cnp.PyArray_SimpleNew(1, &length, cnp.NPY_INT64)


cdef object new_spec(cnp.ndarray block_ids):
    spec = PyType_GenericAlloc(<PyTypeObject*>spec_class, 0)
    spec.block_ids = block_ids
    return spec


cdef object new_output(list to_store, object spec, list evicted):
    output = PyType_GenericAlloc(<PyTypeObject*>output_class, 0)
    output.block_hashes_to_store = to_store
    output.store_spec = spec
    output.block_hashes_evicted = evicted
    return output


cdef object new_event(list block_hashes, object backend, bint removed):
    event = PyType_GenericAlloc(<PyTypeObject*>event_class, 0)
    event.block_hashes = block_hashes
    event.block_size = backend.block_size
    event.medium = backend.medium
    event.removed = removed
    return event
