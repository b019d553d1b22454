"""ARC, compiled, for the classes derived from it."""

from kvoffload._core.ring cimport Ring
from kvoffload.policies._arc_lists_c cimport ARCLists


cdef class _ARC(ARCLists):
    cdef void trim(self, Ring* ghosts) noexcept
