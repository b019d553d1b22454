"""The duel, compiled: see ``_duel_py``."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Table
from kvoffload.policies._learned cimport Gain
from kvoffload.policies._miniature_c cimport Miniature
from kvoffload.policies._twin_c cimport Hint

cdef enum:
    DENSITY = 0
    LRU = 1
    MOST_NOTED = 256
    SAMPLE_CAPACITIES = 2       # most blocks of a request that a miniature examines

# A store of the cache.
cdef struct Noted:
    uint64_t hashed             # of its first key
    uint32_t request            # in which it began


cdef class Duel:
    cdef int rule
    cdef int shift              # one block in 2**shift is sampled
    cdef Miniature by_density
    cdef Miniature by_recency
    cdef Miniature without_hints  # None before the gain by hints was asked for
    cdef double hits[2]         # recent hits by rule, fading
    cdef uint32_t request       # immediate repeats count as well
    cdef uint32_t lag           # requests that a store of the cache takes
    cdef bint store_begins      # the cache begins a store, and nothing was inserted since
    cdef uint32_t oldest        # index of the oldest noted store
    cdef uint32_t num_noted
    cdef Noted noted[MOST_NOTED]
    cdef Gain gain              # by hints

    cdef void clear(self) noexcept
    # Take the sampled blocks of a batch, whose bits are drawn, but for nodes with a flag of `kept`.
    cdef Py_ssize_t take(self, Table* table, Batch* batch, uint8_t kept) noexcept
    # Serve such a request to the miniatures; return the rule that leads.
    cdef int serve(
        self, Table* table, Batch* batch, const Hint* hint, double mean_length
    ) noexcept
    cdef void measure_lag(self, Table* table) noexcept
    # Apply a hint at the end of such a request; release such blocks.
    cdef void finish(self, Table* table, Batch* batch, const Hint* hint) noexcept
    cdef void release(self, Table* table, Batch* batch, uint8_t kept) noexcept
    cdef bint ensure_release(self) noexcept
    # Note a store of the cache by its first key.
    cdef void note_store(self, uint64_t hashed) noexcept


cdef inline bint is_sampled(uint32_t drawn, int shift) noexcept nogil:
    """Return whether a key, with what `sample_of` has drawn for it, is one of ``2**shift``."""
    return drawn & ((<uint32_t>1 << shift) - 1) == 0
