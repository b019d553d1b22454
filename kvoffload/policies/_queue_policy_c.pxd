"""The base of compiled policies whose queues are not ordered by use.

Structure
    Rings 0 ... ``num_queues`` - 1 hold the resident blocks, in the order of their positions, which
    are given out, rising, at the newest end. With a manager, a scan parks what it meets and cannot
    take, under its position: a block in use until it is idle again, a block that *waits*, since
    others are behind it, until none is or it is used. Then the next scan that gets there puts it
    back between its neighbours. So each is met once, however many scans there are.
    Where all idle blocks wait, the deepest leave: a heap has the waiting blocks, and takes in what
    came to it only when they are asked for.
Invariants
    The heap holds every parked block that is idle and not listed. Others that are parked may still
    be in it: one in use is passed over, one that is listed leaves it when the scan puts it back.
    A search takes blocks provisionally: it flags them in their links and lets them leave their
    chains, and the policy logs what else it changed. A search that was cancelled is undone at the
    policy's next call. (Parking changes nothing that could be seen.)
Cost
    O(1) for each block that a scan meets, O(log waiting) where it waits. A scan meets the blocks
    that were idle or came to be since the last one, and those of the batch.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.table cimport Node
from kvoffload.policies._chains_c cimport Chains
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef extern from *:
    """
    #define KVO_BEYOND_ALL UINT64_MAX
    """
    const uint64_t BEYOND_ALL "KVO_BEYOND_ALL"  # a position that is never given out


# A block that waits for those behind it.
cdef struct Waiting:
    uint32_t node_id
    int queue_index         # its queue's, from 0
    uint64_t position       # in its queue, once it is in the heap
    uint32_t depth          # in its chain, likewise


cdef class QueuePolicy(CompiledPolicy):
    cdef Chains chains
    cdef Waiting* waiting           # heap, deepest first, then as the queues stand; then the rest
    cdef uint64_t num_waiting
    cdef uint64_t num_ordered       # of them, in the heap
    cdef uint64_t waiting_room
    cdef int num_queues
    cdef bint searching             # a search was not settled
    cdef uint64_t num_chosen        # its victims
    cdef uint32_t last_put_back     # while a search is undone, NIL for none

    # Find `n` victims by `choose`; False if there are fewer, or no memory.
    cdef bint c_sift(self, uint64_t n) noexcept
    # A parked block that is idle has none behind it any more; False if there is no memory.
    cdef bint c_became_tail(self, uint32_t node_id, Node* node) noexcept
    # Take back what `c_sift` has logged.
    cdef void c_undo(self) noexcept

    cdef void undo(self) noexcept
    cdef bint may_leave(self, const Node* node) noexcept
    cdef bint is_worth_parking(self, const Node* node) noexcept
    cdef bint choose(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Choose the deepest blocks, whatever is behind them, where scans of all have found none else.
    cdef bint take_deepest(self, uint64_t n) noexcept
    cdef bint gather(self) noexcept

    # Put a block that is on no ring at the newest end of a queue.
    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Move a block of a queue to its newest end.
    cdef void renew(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Put a block that is on no ring where its position says.
    cdef void put_back(
        self, int queue_index, uint32_t node_id, Node* node, uint64_t position
    ) noexcept
    # Go one on in the scan of a queue, NIL at its end; `rest` is the next block of the list.
    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept
    # Count the blocks that a scan of the whole queue would meet.
    cdef uint64_t num_to_scan(self, int queue_index) noexcept
    # Park a block that the scan has met and cannot take; False if there is no memory.
    cdef bint park(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Park a block that the scan has met with others behind it; False if there is no memory.
    cdef bint wait(self, int queue_index, uint32_t node_id, Node* node) noexcept
    cdef bint grow_waiting(self) noexcept
    cdef void order_waiting(self) noexcept
    # A block that is among them leaves the waiting: it is about to be parked no longer.
    cdef void wait_no_longer(self, uint32_t node_id) noexcept
    cdef void forget_waiting(self) noexcept
    cdef const char* check_queues(self) noexcept
    cdef const char* check_waiting(self) noexcept
    # A block leaves its chain: tell of the one before it, where it waited for this.
    cdef bint leave_chain(self, uint32_t node_id) noexcept
    # A block leaves: its links name it no more.
    cdef void leave(self, uint32_t node_id) noexcept
