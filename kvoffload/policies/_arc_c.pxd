"""ARC, compiled, for what builds on it."""

from kvoffload._core.ring cimport Ring
from kvoffload.policies._arc_lists_c cimport ARCLists


cdef class _ARC(ARCLists):
    cdef void trim(self, Ring* ghosts) noexcept
