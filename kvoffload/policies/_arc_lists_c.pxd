"""The four lists of ARC and its target, compiled; see ``_arc_lists_py``.

Structure
    Four rings of one table: T1, T2 and the ghosts B1, B2.
"""

from libc.stdint cimport uint64_t

from kvoffload.policies._twin_c cimport CompiledPolicy

# Rings, from 0.
cdef enum:
    T1 = 0
    T2 = 1
    B1 = 2
    B2 = 3


cdef class ARCLists(CompiledPolicy):
    cdef double target      # target size of T1, in blocks: the paper's p
    cdef int newcomers      # blocks per victim that enter T1, as counted by a search

    # Adapt to a ghost of B1 (case II), of B2 (case III).
    cdef void raise_target(self) noexcept
    cdef void lower_target(self) noexcept
    # Return whether T1, at that size, yields the next victim.
    cdef bint t1_gives(self, uint64_t t1_size) noexcept
