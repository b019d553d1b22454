"""ARC, compiled, for what builds on it."""

from kvoffload._core.ring cimport Ring
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class _ARC(CompiledPolicy):
    cdef double target      # size that T1 should have, in blocks: the paper's p

    cdef double step(self, int other, int own) noexcept
    cdef void trim(self, Ring* ghosts) noexcept
