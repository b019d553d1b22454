"""The base of compiled policies whose queues are not ordered by use; see the ``.pyx``."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.table cimport Node
from kvoffload.policies._twin_c cimport CompiledPolicy

cdef extern from *:
    """
    #define KVO_BEYOND_ALL UINT64_MAX
    """
    const uint64_t BEYOND_ALL "KVO_BEYOND_ALL"  # a position that is never assigned


# A block before a search changed its place or count.
cdef struct Change:
    uint64_t position
    uint32_t node_id
    uint8_t ring            # its queue's id
    uint8_t count


cdef class Queues(CompiledPolicy):
    cdef uint64_t* positions        # by node_id: of the block in its queue, greater is newer
    cdef uint64_t num_positions     # nodes that the array has room for
    cdef int num_queues
    cdef int most_counted
    cdef bint searching             # a search is neither settled nor cancelled
    cdef Change* changes            # that it has made
    cdef uint64_t num_changes
    cdef uint64_t changes_room

    # Construct a policy that counts up to `most_counted` uses; with two queues, ghosts are third.
    cdef int open(self, object cache_capacity, int num_queues, int most_counted) except -1
    # Take `n` victims by `take_one`; False if there are fewer, or no memory.
    cdef bint sift(self, uint64_t n) noexcept
    # Log the place and count of a block that the search changes; False if there is no memory.
    cdef bint note_change(self, uint32_t node_id, Node* node) noexcept
    # Handle a parked block that is about to return to its queue.
    cdef void returns(self, uint32_t node_id) noexcept
    # Return whether a parked block may be idle without being listed.
    cdef bint waits(self, uint32_t node_id) noexcept

    # Count a use of ready blocks, unless not `counts`, and renew the pending ones.
    cdef void use(self, Batch* batch, bint counts) noexcept
    # Put a block that is on no ring at the newest end of a queue.
    cdef void join(self, int queue_index, uint32_t node_id, Node* node) noexcept
    # Move a block of a queue to its newest end.
    cdef void renew(self, uint32_t node_id, Node* node) noexcept
    # Advance the scan of a queue by one, NIL at its end; `rest` is the next block of the list.
    cdef uint32_t scan(self, int queue_index, uint32_t* rest) noexcept
    # Count the blocks that a scan of the whole queue would meet.
    cdef uint64_t num_to_scan(self, int queue_index) noexcept
    # Park a block that the scan has met and cannot take; False if there is no memory.
    cdef bint park(self, uint32_t node_id, Node* node) noexcept
    # Pass over a block that may not leave: park it, unless it is only protected.
    cdef bint skip(self, uint32_t node_id, Node* node) noexcept
    # Park up to `most` blocks of a list by `park_ahead`, before `end`; return the next one.
    cdef uint32_t park_from(self, uint32_t node_id, uint32_t end, uint64_t most) noexcept
    # Park a block of the list that a scan would park; False if it would not, or without memory.
    cdef bint park_ahead(self, uint32_t node_id, Node* node) noexcept
    cdef void put_back(self, const Change* change, Node* node, uint32_t last) noexcept
