"""The base of compiled policies whose queues are not ordered by use.

Structure
    Rings 0 ... ``num_queues`` - 1 hold the resident blocks, ordered by positions, which rise and
    are assigned at the newest end. With a manager, a scan parks each block that it meets and cannot
    take, under its position: a block in use until it is idle again, a block that *waits* for others
    behind it until none is left or it is used. The next scan that gets there puts it back between
    its neighbours. So scans meet each such block once, however many scans run.
    If all idle blocks wait, the deepest leave: a heap holds the waiting blocks, and adds new ones
    only when it is read.
Invariants
    The heap holds every parked block that is idle and not listed. It may also hold other parked
    blocks: one in use is skipped, a listed one leaves the heap when the scan puts it back.
    A search takes blocks provisionally: it flags them in their links and removes them from their
    chains, and the policy logs its other changes. A cancelled search is undone at the policy's next
    call. (Parking changes nothing observable.)
Cost
    O(1) per block that a scan meets, O(log waiting) if the block waits. A scan meets the blocks
    that were idle at the last one or have become idle since, and those of the batch.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._chains_c cimport Chains
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef extern from *:
    """
    #define KVO_BEYOND_ALL UINT64_MAX
    """
    const uint64_t BEYOND_ALL "KVO_BEYOND_ALL"  # a position that is never assigned


# A block that waits for those behind it.
cdef struct Waiting:
    uint32_t node_id
    int queue_index         # its queue's, from 0
    uint64_t position       # in its queue, once it is in the heap
    uint32_t depth          # in its chain, likewise


cdef class QueuePolicy(CompiledPolicy):
    cdef Chains chains
    cdef Waiting* waiting           # heap, deepest first, then in queue order; then the rest
    cdef uint64_t num_waiting
    cdef uint64_t num_ordered       # how many are in the heap
    cdef uint64_t waiting_room
    cdef int num_queues
    cdef bint searching             # a search is not settled
    cdef uint64_t num_chosen        # its victims
    cdef uint32_t last_put_back     # while a search is undone, NIL for none

    # Find `n` victims by `choose`; False if there are fewer, or no memory.
    cdef bint c_sift(self, uint64_t n) noexcept
    # Handle a parked idle block that has none behind it any more; False if there is no memory.
    cdef bint c_became_tail(self, uint32_t node_id, Node* node) noexcept
    # Undo the changes that `c_sift` has logged.
    cdef void c_undo(self) noexcept

    cdef void undo(self) noexcept
    cdef bint may_leave(self, const Node* node) noexcept
    cdef bint is_worth_parking(self, const Node* node) noexcept
    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Choose the deepest blocks, whatever is behind them, after scans of all queues found no other.
    cdef bint take_deepest(self, uint64_t n) noexcept
    cdef bint gather(self) noexcept

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
    # Park a block that the scan has met with others behind it; False if there is no memory.
    cdef bint wait(self, int queue_index, uint32_t node_id, Node* node) noexcept
    cdef bint grow_waiting(self) noexcept
    cdef void order_waiting(self) noexcept
    # Remove a block, if present, from the waiting ones: it is about to be unparked.
    cdef void wait_no_longer(self, uint32_t node_id) noexcept
    cdef void forget_waiting(self) noexcept
    cdef const char* check_queues(self) noexcept
    cdef const char* check_waiting(self) noexcept
    # Remove a block from its chain; report the one before it if that waited for this one.
    cdef bint leave_chain(self, uint32_t node_id) noexcept
    # Remove a block from the links.
    cdef void leave(self, uint32_t node_id) noexcept
