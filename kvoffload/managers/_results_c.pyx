"""Results and events of managers; see ``_results_c.pxd``."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF

cimport numpy as cnp

from types import MemberDescriptorType

from kvoffload.types import CPULoadStoreSpec, OffloadingEvent, PrepareStoreOutput

cnp.import_array()

cdef extern from "structmember.h":  # which Python.h includes from 3.12 on
    object PyType_GenericAlloc(PyTypeObject* kind, Py_ssize_t items)
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef* d_member


cdef Py_ssize_t offset_of(member) except -1:
    """Return the offset of a member in its object."""
    if type(member) is not MemberDescriptorType:
        raise TypeError(f"member must be a slot of a class, got {member!r}")
    return (<PyMemberDescrObject*>member).d_member.offset


cdef inline void fill(object result, Py_ssize_t offset, object value) noexcept:
    """Set a member of a new object without lookups, which are slow in cold caches."""
    Py_INCREF(value)
    (<PyObject**>(<char*><PyObject*>result + offset))[0] = <PyObject*>value


cdef object spec_class = CPULoadStoreSpec
cdef object output_class = PrepareStoreOutput
cdef object event_class = OffloadingEvent
cdef Py_ssize_t ids_offset = offset_of(CPULoadStoreSpec.block_ids)
cdef Py_ssize_t to_store_offset = offset_of(PrepareStoreOutput.block_hashes_to_store)
cdef Py_ssize_t spec_offset = offset_of(PrepareStoreOutput.store_spec)


cdef cnp.ndarray new_ids(Py_ssize_t size):
    cdef cnp.npy_intp length = size
    return cnp.PyArray_SimpleNew(1, &length, cnp.NPY_INT64)


cdef object new_spec(cnp.ndarray block_ids):
    spec = PyType_GenericAlloc(<PyTypeObject*>spec_class, 0)
    fill(spec, ids_offset, block_ids)
    return spec


cdef class _PackedKeys:
    cdef list unpack(self):
        """Return the keys as a list of bytes objects."""
        cdef Py_ssize_t index
        cdef list keys = [None] * self.size
        for index in range(self.size):
            keys[index] = PyBytes_FromStringAndSize(
                <const char*>self.keys[index].key, self.keys[index].length
            )
        return keys


cdef _PackedKeys new_keys(Py_ssize_t size):
    """Return room for `size` keys, not filled."""
    cdef _PackedKeys keys = _PackedKeys.__new__(_PackedKeys)
    keys.packed = PyBytes_FromStringAndSize(NULL, size * <Py_ssize_t>sizeof(PackedKey))
    keys.keys = <PackedKey*>PyBytes_AS_STRING(keys.packed)
    keys.size = size
    return keys


cdef class _UnpackedList:
    """A member whose packed keys become a list at the first read."""

    cdef object member
    cdef object kind            # the class that it is a member of
    cdef Py_ssize_t offset

    def __cinit__(self, member):
        self.member = member
        self.kind = member.__objclass__
        self.offset = offset_of(member)

    def __get__(self, result, owner):
        cdef PyObject* slot
        if result is None:
            return self
        if type(result) is self.kind:
            slot = (<PyObject**>(<char*><PyObject*>result + self.offset))[0]
            if slot != NULL and type(<object>slot) is not _PackedKeys:
                return <object>slot
        value = self.member.__get__(result, owner)
        if type(value) is not _PackedKeys:
            return value
        unpacked = (<_PackedKeys>value).unpack()
        # another thread may have read while the list was allocated
        value = self.member.__get__(result, owner)
        if type(value) is not _PackedKeys:
            return value
        self.member.__set__(result, unpacked)
        return unpacked

    def __set__(self, result, value):
        self.member.__set__(result, value)

    def __delete__(self, result):
        self.member.__delete__(result)


cdef _UnpackedList evicted_member = _UnpackedList(PrepareStoreOutput.block_hashes_evicted)
PrepareStoreOutput.block_hashes_evicted = evicted_member
cdef _UnpackedList hashes_member = _UnpackedList(OffloadingEvent.block_hashes)
OffloadingEvent.block_hashes = hashes_member


cdef object new_output(list to_store, object spec, object evicted):
    output = PyType_GenericAlloc(<PyTypeObject*>output_class, 0)
    fill(output, to_store_offset, to_store)
    fill(output, spec_offset, spec)
    fill(output, evicted_member.offset, evicted)
    return output


cdef object new_event(object block_hashes, object backend, bint removed):
    event = PyType_GenericAlloc(<PyTypeObject*>event_class, 0)
    fill(event, hashes_member.offset, block_hashes)
    event.block_size = backend.block_size
    event.medium = backend.medium
    event.removed = removed
    return event
