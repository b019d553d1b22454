"""The base of compiled policies whose queues are not ordered by use.

Structure
    Rings 0 ... ``num_queues`` - 1 hold the resident blocks, ordered by positions, which rise and
    are assigned at the newest end. With a manager, a scan parks each block in use that it meets,
    under its position, until the block is idle again. The next scan that gets there puts it back
    between its neighbours. So scans meet each such block once, however many scans run.
Invariants
    A search takes blocks provisionally, and the policy logs its other changes. A cancelled search
    is undone at the policy's next call. (Parking changes nothing observable.)
Cost
    O(1) per block that a scan meets: those that were idle at the last one or have become idle
    since, and those of the batch. 8 bytes per node.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef extern from *:
    """
    #define KVO_BEYOND_ALL UINT64_MAX
    """
    const uint64_t BEYOND_ALL "KVO_BEYOND_ALL"  # a position that is never assigned


cdef class QueuePolicy(CompiledPolicy):
    cdef uint64_t* positions        # by node_id: of the block in its queue, greater is newer
    cdef uint64_t num_positions     # nodes that the array has room for
    cdef int num_queues
    cdef bint searching             # a search is not settled
    cdef uint64_t num_chosen        # its victims; 0 if it was undone
    cdef uint32_t last_put_back     # while a search is undone, NIL for none

    # Find `n` victims by `choose`; False if there are fewer, or no memory.
    cdef bint c_sift(self, uint64_t n) noexcept
    # Undo the changes that `c_sift` has logged.
    cdef void c_undo(self) noexcept
    # Handle a parked block that is about to return to its queue.
    cdef void c_returning(self, uint32_t node_id) noexcept
    # Return whether a parked block may be idle without being listed.
    cdef bint c_waits(self, uint32_t node_id) noexcept

    cdef void undo(self) noexcept
    # Make a block of a ring a victim; False if it may not leave, or there is no memory.
    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Put a block that is on no ring at the newest end of a queue.
    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Move a block of a queue to its newest end.
    cdef void renew(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Insert a block that is on no ring at its position.
    cdef void put_back(
        self, int queue_index, uint32_t node_id, Node* node, uint64_t position
    ) noexcept
    # Advance the scan of a queue by one, NIL at its end; `rest` is the next block of the list.
    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept
    # Count the blocks that a scan of the whole queue would meet.
    cdef uint64_t num_to_scan(self, int queue_index) noexcept
    # Park a block that the scan has met and cannot take; False if there is no memory.
    cdef bint park(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Pass over a block that may not leave: park it, unless it is only protected.
    cdef bint skip(self, int queue_index, uint32_t node_id, Node* node) noexcept
    cdef const char* check_queues(self) noexcept
