"""What compiled policies share whose queues are not ordered by use.

Structure
    Rings that are only lists here: nothing is parked, a scan passes over what cannot leave. Rings
    0 ... ``num_queues`` - 1 hold the resident blocks.
Invariants
    A search takes blocks provisionally: it flags them in their links and lets them leave their
    chains, and the policy logs what else it changed. A search that was cancelled is undone at the
    policy's next call.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._chains_c cimport Chains
from kvoffload.policies._twin_c cimport CompiledPolicy


cdef class QueuePolicy(CompiledPolicy):
    cdef Chains chains
    cdef int num_queues
    cdef uint32_t search            # number of the search at work or last
    cdef bint searching             # a search was not settled
    cdef uint64_t num_chosen        # its victims

    # Find `n` victims by `choose`; False if there is no memory. There are enough.
    cdef bint c_sift(self, uint64_t n) noexcept
    # Take back what `c_sift` has logged.
    cdef void c_undo(self) noexcept

    cdef void undo(self) noexcept
    cdef bint may_leave(self, uint32_t slot, const Node* node) noexcept
    cdef bint is_chosen(self, uint32_t slot) noexcept
    cdef bint choose(self, int number, uint32_t slot, Node* node) noexcept
    # Choose the deepest blocks, whatever is behind them; `start` is where ring 0 begins.
    cdef bint take_deepest(self, uint64_t n, uint32_t start) noexcept
    cdef bint enough(self, uint64_t n) noexcept
    # A block leaves: its links name it no more.
    cdef void leave(self, uint32_t slot) noexcept
