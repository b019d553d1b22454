"""What compiled policies share whose queues are not ordered by use.

Structure
    Rings 0 ... ``num_queues`` - 1 hold the resident blocks, in the order of their places: numbers
    that are given out, rising, at the newest end. With a manager, a scan parks what it meets in
    use, under its place; when that is idle again, the next scan that gets there puts it back
    between its neighbours. So a block in use is met once, however many scans there are. A policy
    whose scans begin at the oldest parks a block that has others behind it, too, until it has none
    or is used.
Invariants
    A search takes blocks provisionally: it flags them in their links and lets them leave their
    chains, and the policy logs what else it changed. A search that was cancelled is undone at the
    policy's next call. (Parking changes nothing that could be seen.)
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._chains_c cimport Chains
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef extern from *:
    """
    #define KVO_BEYOND_ALL UINT64_MAX
    """
    const uint64_t BEYOND_ALL "KVO_BEYOND_ALL"  # a place that is never given out


cdef class QueuePolicy(CompiledPolicy):
    cdef Chains chains
    cdef int num_queues
    cdef uint32_t search            # number of the search at work or last
    cdef bint searching             # a search was not settled
    cdef uint64_t num_chosen        # its victims
    cdef uint32_t last_put_back     # while a search is undone, NIL for none

    # Find `n` victims by `choose`; False if there are fewer, or no memory.
    cdef bint c_sift(self, uint64_t n) noexcept
    # A parked block that is idle has none behind it any more; False if there is no memory.
    cdef bint c_became_tail(self, uint32_t slot, Node* node) noexcept
    # Take back what `c_sift` has logged.
    cdef void c_undo(self) noexcept

    cdef void undo(self) noexcept
    cdef bint may_leave(self, uint32_t slot, const Node* node) noexcept
    cdef bint is_chosen(self, uint32_t slot) noexcept
    cdef bint choose(self, int number, uint32_t slot, Node* node) noexcept
    # Choose the deepest blocks, whatever is behind them, where scans of all have found none else.
    cdef bint take_deepest(self, uint64_t n) noexcept

    # Put a block that is on no ring at the newest end of a queue.
    cdef void join(self, int number, uint32_t slot, Node* node) noexcept
    # Move a block of a queue to its newest end.
    cdef void renew(self, int number, uint32_t slot, Node* node) noexcept
    # Put a block that is on no ring where its place says.
    cdef void put_back(self, int number, uint32_t slot, Node* node, uint64_t place) noexcept
    # Go one on in the scan of a queue, NIL at its end; `rest` is the next block of the list.
    cdef uint32_t scan(self, int number, uint32_t* rest) noexcept
    # Count the blocks that a scan of the whole queue would meet.
    cdef uint64_t num_to_scan(self, int number) noexcept
    # Park a block that the scan has met and cannot take; False if there is no memory.
    cdef bint park(self, int number, uint32_t slot, Node* node) noexcept
    cdef const char* check_queues(self) noexcept
    # A block leaves its chain: tell of the one before it, where it waited for this.
    cdef bint leave_chain(self, uint32_t slot) noexcept
    # A block leaves: its links name it no more.
    cdef void leave(self, uint32_t slot) noexcept
