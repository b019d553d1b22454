"""The search for victims: in two steps, so that a failure or a refusal leaves no trace.

Structure
    `victims_next` finds the next block of a ring that may leave and takes it provisionally;
    `victims_find` only finds it. `victims_take` takes a block, wherever it is, and
    `victims_take_oldest` those before the first that may not leave. Only these make a block a
    victim, and never one that is in use, protected or a victim already. Afterwards `victims_settle`
    ends the search and the policy removes each victim, or `victims_cancel` gives all back. With a
    manager (``managed``), `victims_find` parks what it passes over and what it finds. In a policy
    without a manager, ``ref_cnt`` may change without notice, so nothing is parked and a cursor
    walks the list.
Invariants
    Between calls of the policy no search is open: ``size`` is 0. Exactly the victims of an open
    search are CHOSEN; an evicted block loses the flag with its node or its block.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.ring cimport Ring
from kvoffload._core.table cimport CHOSEN, Node, Table

cdef struct Victim:
    uint32_t node_id
    Ring* ring
    uint64_t hashed         # of the victim's key, if the policy has set it

# The position of a search on one ring, in a policy without a manager.
cdef struct Cursor:
    bint started
    uint32_t node_id        # the next node to examine

cdef struct Victims:
    Victim* items           # in eviction order
    uint64_t size
    uint64_t room
    Victim* aside           # idle but protected blocks that were parked: listed at the end
    uint64_t num_aside
    uint64_t aside_room
    bint managed            # a manager reports when a block becomes idle
    bint no_memory          # the search ended because an allocation failed

cdef void victims_open(Victims* victims) noexcept
cdef void victims_close(Victims* victims) noexcept
# Make room for `n` victims and `num_aside` protected blocks to pass over; False if there is no
# memory.
cdef bint victims_ensure(Victims* victims, uint64_t n, uint64_t num_aside) noexcept
# Return the next block of the ring that may leave, parked if managed; NIL if no block may, or there
# is no memory.
cdef uint32_t victims_find(Victims* victims, Table* table, Ring* ring, Cursor* cursor) noexcept
# Take and hash blocks from the old end of the list, up to `n` victims in all, before the first that
# may not leave; none if a parked one comes first, or there is no memory. They stay on the list.
cdef void victims_take_oldest(Victims* victims, Table* table, Ring* ring, uint64_t n) noexcept
# Take the next block of the ring that may leave; False if no block may, or there is no memory.
cdef bint victims_next(Victims* victims, Table* table, Ring* ring, Cursor* cursor) noexcept
# Take a block; False if it may not leave, or there is no memory.
cdef bint victims_take(Victims* victims, Table* table, Ring* ring, uint32_t node_id) noexcept
# Note a parked block to list later, at the latest when the search ends; False if there is no
# memory.
cdef bint victims_set_aside(Victims* victims, Ring* ring, uint32_t node_id) noexcept
# List the noted blocks of a ring.
cdef void victims_list_aside(Victims* victims, Table* table, Ring* ring) noexcept
# End the search; the victims stay in `items` and on their rings (parked if managed).
cdef void victims_settle(Victims* victims, Table* table) noexcept
# End the search and give all victims back at the positions where a scan would find them again.
cdef void victims_cancel(Victims* victims, Table* table) noexcept


cdef inline bint evictable(const Table* table, const Node* node) noexcept nogil:
    """Return whether a block is idle, and neither protected nor a victim already."""
    return (
        node.block.ref_cnt == 0
        and node.block.mark != table.epoch
        and not node.flags & CHOSEN
    )
