"""Types of what hit density learns, with which `_learned.py` is compiled for the compiled twin."""

cimport cython
from libc cimport math  # instead of Python's
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvoffload._core.bins cimport log_bin

cdef enum:
    CLASSES = 15
    BINS = 64
    STEPS = 36
    SAID = 684              # sources x steps
    SHARED_SAID = 36

cdef int _GAPS
cdef int _CLASSES
cdef int _BINS
cdef int _STEPS
cdef int _SOURCES
cdef int _SHARES
cdef double _NEVER_REUSED
cdef double _FIRST_CHANCE
cdef double _MOST_CHANCE
cdef double _PRIOR_CAPACITY_SHARE
cdef double _PRIOR_REQUESTS
cdef double _FACTOR_PRIOR_SHARE
cdef double _EVIDENCE
cdef double _NEIGHBOUR_SHARE
cdef double _HALF_LIFE_REQUESTS
cdef double _HALF_LIFE_CAPACITIES
cdef double _MEAN_LENGTH_GAIN
cdef int64_t _LEAST_TOUCHES
cdef int64_t _COMPUTATIONS_PER_CAPACITY
cdef double _FADE
cdef uint64_t _LEAST_COMPARED
cdef double _STANDARD_ERRORS
cdef double _MINIATURE_BIAS


cdef inline int bin_of(uint32_t age) noexcept nogil:
    """Return `age_bin` of an age, without a loop."""
    return min(log_bin(age + 1, 2), BINS - 1)


@cython.locals(value=uint32_t, exponent=int)
cpdef int age_bin(uint32_t age) noexcept
cpdef double bin_width(int bin_index) noexcept
@cython.locals(number=int)
cpdef int class_after(uint32_t gap, int reuse_class) noexcept
@cython.locals(source=int, step=int)
cpdef int share_index(int said, int bin_index) noexcept
@cython.locals(expected=double)
cdef double _chance(
    double uses, double time, double width, double weight, double prior
) noexcept


@cython.final
cdef class Learned:
    cdef readonly int64_t capacity
    cdef readonly double[::1] uses          # by class and bin
    cdef readonly double[::1] time          # in requests
    cdef readonly double[::1] chances
    cdef readonly double[::1] logs          # -ln(1 - chance), once there were hints
    cdef readonly double[::1] used          # by source and share of the stated time
    cdef readonly double[::1] expected
    cdef readonly double[::1] row           # densities by bin, of the label computed last
    cdef double[::1] _run_hits
    cdef double[::1] _run_time
    cdef double[::1] _run_lasting
    cdef public uint32_t request            # number of the present request
    cdef readonly double mean_length        # of recent requests, in blocks
    cdef readonly bint is_hinted
    cdef readonly uint64_t num_computed
    cdef int64_t _touches                   # since the last computation

    @cython.locals(index=int)
    cpdef void clear(self) noexcept
    cpdef void hint(self) noexcept
    cpdef void count_use(self, int reuse_class, int said, int bin_index) noexcept
    @cython.locals(index=int)
    cpdef void count_time(
        self, int reuse_class, int said, int bin_index, double requests
    ) noexcept
    cpdef void end_request(self, int64_t length) noexcept
    cpdef double weight(self) noexcept
    @cython.locals(prior=double, index=int)
    cpdef double factor(self, int said, int bin_index) noexcept
    @cython.locals(prior=double, share=int, index=int, requests=double, factor=double)
    cpdef list factors(self, int source)
    @cython.locals(
        num_runs=int, bin_index=int, index=int, chance=double, hits=double, time=double,
        lasting=double,
    )
    cpdef void compute_row(self, int reuse_class, int said) noexcept
    @cython.locals(
        weight=double, common=double, bin_index=int, width=double, uses=double, time=double,
        reuse_class=int, index=int, gap=int, prior=double,
    )
    cdef void _compute(self) noexcept
    @cython.locals(half_life=double, factor=double, index=int)
    cdef void _fade(self) noexcept


@cython.final
cdef class Gain:
    cdef uint64_t requests
    cdef double blocks
    cdef double hits
    cdef double plain
    cdef double squares
    cdef double products
    cdef double squared_blocks

    cpdef void clear(self) noexcept
    @cython.locals(gained=double)
    cpdef void add(self, double blocks, double hits, double plain) noexcept
    @cython.locals(hit_ratio=double, plain=double, gain=double, squares=double, variance=double)
    cpdef object seen(self, int64_t capacity, bint followed)
